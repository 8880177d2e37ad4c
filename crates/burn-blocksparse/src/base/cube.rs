//! CubeCL devices: the kernels of `blocksparse-cubecl`.

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

/// Returns whether the reference runs instead of the kernels (`BLOCKSPARSE_REFERENCE=1`), to compare the two.
pub fn uses_reference() -> bool {
    Tuning::or_default().reference
}

/// A tensor to be written, on the device of another.
pub fn empty<const D: usize>(like: &CubeTensor, shape: [usize; D], dtype: DType) -> CubeTensor {
    let (client, device) = (like.client.clone(), like.device.clone());
    match Tuning::or_default().poison {
        // Integers have no NaN.
        true if dtype.is_int() => filled(like, shape, f64::from(i32::MIN), dtype),
        true => filled(like, shape, f64::NAN, dtype),
        false => empty_device_contiguous_dtype(client, device, Shape::new(shape), dtype),
    }
}

/// Filled as one row, because Burn may put gaps between the rows of a tensor that it fills.
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

/// A contiguous tensor to be written, on the device of another.
pub fn shaped(like: &CubeTensor, shape: Shape, dtype: DType) -> CubeTensor {
    // A tensor without elements still gets a buffer.
    reshaped(empty(like, [shape.num_elements().max(1)], dtype), shape)
}

/// A contiguous tensor to be written, of another's shape and on its device.
pub fn empty_like(x: &CubeTensor, dtype: DType) -> CubeTensor {
    shaped(x, x.meta.shape().clone(), dtype)
}

/// A contiguous tensor as row kernels get it.
pub fn typed(tensor: &CubeTensor) -> Typed<'_> {
    (&tensor.handle, dtype_to_elem_type(tensor.dtype))
}

/// A contiguous tensor as the matrix of its rows.
pub fn as_matrix(x: CubeTensor) -> CubeTensor {
    let [rows, width] = matrix(x.meta.shape());
    reshaped(x, Shape::new([rows, width]))
}

/// A contiguous tensor in another shape of as many elements.
pub fn reshaped(x: CubeTensor, shape: Shape) -> CubeTensor {
    CubeTensor::new_contiguous(x.client, x.device, shape, x.handle, x.dtype)
}

/// The tensor that lies in a contiguous one from an element on.
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

/// A contiguous tensor, if there is one.
pub fn contiguous(tensor: OptFloat<CubeBackend>) -> Option<CubeTensor> {
    tensor.into_option().map(into_contiguous)
}

/// A table as kernels get it.
pub fn table_view(table: &CubeTensor) -> TableView {
    TableView {
        handle: table.handle.clone(),
        shape: table.meta.shape().dims(),
    }
}

/// A bias as kernels get it.
pub fn bias_view(bias: &CubeTensor) -> BiasView {
    BiasView {
        handle: bias.handle.clone(),
        shape: bias.meta.shape().dims(),
    }
}

/// Gives a layout that is made on the device the tensor that chooses its blocks.
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

/// The kernels take any strides but of the last dimension, as long as they are multiples of `alignment` elements.
pub fn readable(tensor: CubeTensor, alignment: usize) -> CubeTensor {
    let reach = usize::MAX;
    readable_as(tensor, Readable { alignment, reach })
}

/// The tensor, or a contiguous copy where launches do not read it as it lies.
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
    // It was contiguous before, and began elsewhere.
    copied(tensor)
}

/// A contiguous copy.
fn copied(tensor: CubeTensor) -> CubeTensor {
    let (client, device, dtype) = (tensor.client.clone(), tensor.device.clone(), tensor.dtype);
    let (shape, elem) = (tensor.meta.shape().clone(), dtype_to_elem_type(dtype));
    let copy = cubecl::std::tensor::into_contiguous(&client, tensor.binding(), elem);
    CubeTensor::new_contiguous(client, device, shape, copy.handle, dtype)
}

/// A tensor as kernels get it, with its strides.
pub fn view(tensor: &CubeTensor) -> TensorView {
    TensorView {
        handle: tensor.handle.clone(),
        shape: tensor.meta.shape().dims(),
        strides: std::array::from_fn(|dim| tensor.meta.strides()[dim]),
    }
}

/// As [`checked`], of launches. One that a recording refuses is kept with the recording, which then fails as a whole: the thread that launches has nobody to
/// return it to.
pub fn launched(result: Result<(), KernelError>) {
    match result {
        Err(KernelError::Recording { .. }) => {}
        result => checked(result),
    }
}

/// The public functions checked the plan; only a direct call of the trait can get here with what cannot run.
pub fn checked<T>(result: Result<T, KernelError>) -> T {
    result.unwrap_or_else(|error| panic!("block-sparse attention: {error}"))
}

/// Contiguous integers of 32 bits.
pub fn integers(tensor: CubeTensor) -> CubeTensor {
    let tensor = into_contiguous(tensor);
    match tensor.dtype {
        DType::I32 => tensor,
        _ => cast(tensor, DType::I32),
    }
}

/// A contiguous tensor that nobody else reads: the tensor itself, if the call alone holds it.
pub fn writable(tensor: CubeTensor) -> CubeTensor {
    let tensor = into_contiguous(tensor);
    match tensor.can_mut() || tensor.meta.shape().num_elements() == 0 {
        true => tensor,
        false => copied(tensor),
    }
}
