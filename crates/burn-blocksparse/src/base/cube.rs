//! Bindings of CubeCL tensors to the kernels of `blocksparse-cubecl`.

use blocksparse::BlockLayout;
use blocksparse_cubecl as kernels;
use blocksparse_cubecl::rows::Typed;
use blocksparse_cubecl::{BiasView, ChoiceTensor, Readable, TableView, TensorView, Tuning};
use burn::tensor::{DType, Shape};
use burn_cubecl::ops::numeric::{empty_device_contiguous_dtype, full_device_dtype};
use cubecl::client::Client;
use cubecl::prelude::InputScalar;

pub use crate::base::array::matrix;
pub use blocksparse_cubecl::KernelError;
pub use burn::backend::cubecl::dtype_to_elem_type;
pub use burn_cubecl::kernel::{cast, into_contiguous};
pub use burn_cubecl::tensor::CubeTensor;
pub use burn_cubecl::{CubeBackend, CubeDevice};

use crate::base::values::{DynamicBlocks, OptFloat};

/// Returns whether the reference runs instead of the kernels (`BLOCKSPARSE_REFERENCE=1`), for comparisons.
pub fn uses_reference() -> bool {
    Tuning::or_default().reference
}

/// Creates an uninitialized tensor on the device of `like`. With poisoning enabled it is filled with NaN.
pub fn empty<const D: usize>(like: &CubeTensor, shape: [usize; D], dtype: DType) -> CubeTensor {
    let (client, device) = (like.client.clone(), like.device.clone());
    match Tuning::or_default().poison {
        // Integers have no NaN.
        true if dtype.is_int() => filled(like, shape, f64::from(i32::MIN), dtype),
        true => filled(like, shape, f64::NAN, dtype),
        false => empty_device_contiguous_dtype(client, device, Shape::new(shape), dtype),
    }
}

/// Creates a tensor of one value. It is filled as one row, because Burn may pad the rows of a tensor that it fills.
pub fn filled<const D: usize>(
    like: &CubeTensor,
    shape: [usize; D],
    value: f64,
    dtype: DType,
) -> CubeTensor {
    let (client, device) = (like.client.clone(), like.device.clone());
    let value = InputScalar::new(value, dtype_to_elem_type(dtype));
    // A tensor without elements still gets a buffer.
    let row = Shape::new([shape.iter().product::<usize>().max(1)]);
    let row = full_device_dtype(client, row, device, value, dtype);
    reshaped(row, Shape::new(shape))
}

/// Creates an uninitialized contiguous tensor on the device of `like`.
pub fn shaped(like: &CubeTensor, shape: Shape, dtype: DType) -> CubeTensor {
    // A tensor without elements still gets a buffer.
    reshaped(empty(like, [shape.num_elements().max(1)], dtype), shape)
}

/// Creates an uninitialized contiguous tensor with the shape and device of `x`.
pub fn empty_like(x: &CubeTensor, dtype: DType) -> CubeTensor {
    shaped(x, x.meta.shape().clone(), dtype)
}

/// Returns a contiguous tensor in the form that row kernels take.
pub fn typed(tensor: &CubeTensor) -> Typed<'_> {
    (&tensor.handle, dtype_to_elem_type(tensor.dtype))
}

/// Reshapes a contiguous tensor to the matrix of its rows.
pub fn as_matrix(x: CubeTensor) -> CubeTensor {
    let [rows, width] = matrix(x.meta.shape());
    reshaped(x, Shape::new([rows, width]))
}

/// Reshapes a contiguous tensor to a shape with as many elements.
pub fn reshaped(x: CubeTensor, shape: Shape) -> CubeTensor {
    CubeTensor::new_contiguous(x.client, x.device, shape, x.handle, x.dtype)
}

/// Returns the part of a contiguous tensor that starts at an element.
pub fn part_of(all: &CubeTensor, start: usize, shape: Shape) -> CubeTensor {
    let (count, size) = (all.meta.shape().num_elements(), all.dtype.size());
    let rest = count - start - shape.num_elements();
    let mut part = reshaped(all.clone(), shape);
    if start + rest > 0 {
        let handle = part.handle.offset_start((start * size) as u64);
        part.handle = handle.offset_end((rest * size) as u64);
    }
    part
}

/// Makes a tensor contiguous, if there is one.
pub fn contiguous(tensor: OptFloat<CubeBackend>) -> Option<CubeTensor> {
    tensor.into_option().map(into_contiguous)
}

/// Returns a table in the form that kernels take.
pub fn table_view(table: &CubeTensor) -> TableView {
    TableView {
        handle: table.handle.clone(),
        shape: table.meta.shape().dims(),
    }
}

/// Returns a bias in the form that kernels take.
pub fn bias_view(bias: &CubeTensor) -> BiasView {
    BiasView {
        handle: bias.handle.clone(),
        shape: bias.meta.shape().dims(),
    }
}

/// Passes the tensor that chooses the blocks of a device layout to the layout.
pub fn choose_blocks(client: &Client, layout: &BlockLayout, choice: DynamicBlocks<CubeBackend>) {
    let tensor = match choice {
        DynamicBlocks::Host => return,
        DynamicBlocks::Bools(tensor)
        | DynamicBlocks::Ints(tensor)
        | DynamicBlocks::Floats(tensor) => into_contiguous(tensor),
    };
    let tensor = ChoiceTensor {
        dtype: dtype_to_elem_type(tensor.dtype),
        handle: tensor.handle,
    };
    launched(kernels::choose_blocks(client, layout, &tensor));
}

/// Returns a tensor that kernels can read. They accept any strides, except of the last dimension, that are multiples of `alignment` elements.
pub fn readable(tensor: CubeTensor, alignment: usize) -> CubeTensor {
    let reach = usize::MAX;
    readable_as(tensor, Readable { alignment, reach })
}

/// Returns the tensor, or a contiguous copy if launches cannot read its strides.
pub fn readable_as(tensor: CubeTensor, readable: Readable) -> CubeTensor {
    let start = |tensor: &CubeTensor| {
        tensor.handle.offset_start.unwrap_or(0) as usize / tensor.dtype.size()
    };
    let lies_well = || {
        let TensorView { shape, strides, .. } = view(&tensor);
        readable.takes(shape, strides, start(&tensor))
    };
    if !tensor.meta.is_tiled() && tensor.qparams.is_none() && lies_well() {
        return tensor;
    }
    let tensor = into_contiguous(tensor);
    if start(&tensor).is_multiple_of(readable.alignment) {
        return tensor;
    }
    // It was already contiguous but has an unsuitable offset.
    copied(tensor)
}

/// Returns a contiguous copy.
fn copied(tensor: CubeTensor) -> CubeTensor {
    let (client, device, dtype) = (tensor.client.clone(), tensor.device.clone(), tensor.dtype);
    let (shape, elem) = (tensor.meta.shape().clone(), dtype_to_elem_type(dtype));
    let copy = cubecl::std::tensor::into_contiguous(&client, tensor.binding(), elem);
    CubeTensor::new_contiguous(client, device, shape, copy.handle, dtype)
}

/// Returns a tensor with its strides in the form that kernels take.
pub fn view(tensor: &CubeTensor) -> TensorView {
    TensorView {
        handle: tensor.handle.clone(),
        shape: tensor.meta.shape().dims(),
        strides: std::array::from_fn(|dim| tensor.meta.strides()[dim]),
    }
}

/// Unwraps the result of a launch like [`checked`]. A launch that a recording refuses is noted in the recording, which then fails as a whole: the launching
/// thread cannot return the error to anyone.
pub fn launched(result: Result<(), KernelError>) {
    match result {
        Err(KernelError::Recording { .. }) => {}
        result => checked(result),
    }
}

/// Unwraps a result. The public functions check the plan, so only a direct call of the trait can fail here.
pub fn checked<T>(result: Result<T, KernelError>) -> T {
    result.unwrap_or_else(|error| panic!("block-sparse attention: {error}"))
}

/// Converts to contiguous 32-bit integers.
pub fn integers(tensor: CubeTensor) -> CubeTensor {
    let tensor = into_contiguous(tensor);
    match tensor.dtype {
        DType::I32 => tensor,
        _ => cast(tensor, DType::I32),
    }
}

/// Returns a contiguous tensor that is not shared: the tensor itself if nothing else holds it, otherwise a copy.
pub fn writable(tensor: CubeTensor) -> CubeTensor {
    let tensor = into_contiguous(tensor);
    match tensor.can_mut() || tensor.meta.shape().num_elements() == 0 {
        true => tensor,
        false => copied(tensor),
    }
}
