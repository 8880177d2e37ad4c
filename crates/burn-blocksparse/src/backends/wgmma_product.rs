//! Products on wgmma: tensors of Burn's as the matrices of `blocksparse::kernels::linear`.

use blocksparse::kernels::linear::{
    Epilogue, EpilogueTensors, MatrixView, Order, ProductPlan, ProductRequest, multiply as launch,
};
use burn::backend::{DType, TensorMetadata};
use burn_cubecl::CubeDevice;
use burn_cubecl::tensor::CubeTensor;

use super::cube::empty;

/// Whether a dtype of factors is bf16, and not f16.
fn is_bf16(dtype: DType) -> Result<bool, String> {
    match dtype {
        DType::BF16 => Ok(true),
        DType::F16 => Ok(false),
        _ => Err(format!("wgmma multiplies bf16 and f16, not {dtype:?}")),
    }
}

/// A tensor as matrices, if it is at most a batch of them.
fn view(tensor: &CubeTensor) -> Result<MatrixView, &'static str> {
    if tensor.qparams.is_some() || tensor.meta.is_tiled() {
        return Err("a factor is quantized or tiled");
    }
    let (shape, strides) = (tensor.meta.shape(), tensor.meta.strides());
    let rank = tensor.rank();
    let batch = match rank {
        2 => (1, 0),
        // One matrix for the whole batch.
        3 if strides[0] == 0 => (1, 0),
        3 => (shape[0], strides[0]),
        _ => return Err("a factor has more than three dimensions"),
    };
    Ok(MatrixView {
        handle: tensor.handle.clone(),
        shape: [batch.0, shape[rank - 2], shape[rank - 1]],
        strides: [batch.1, strides[rank - 2], strides[rank - 1]],
    })
}

/// How `lhs · rhs` would run.
fn plan(
    [lhs, rhs]: [&CubeTensor; 2],
    out: DType,
    parts: bool,
) -> Result<(ProductPlan, [MatrixView; 2]), String> {
    let factors = [view(lhs)?, view(rhs)?];
    let wide = out == DType::F32;
    let [a, b] = &factors;
    let request = ProductRequest::of(is_bf16(lhs.dtype)?, [a, b], wide, parts)?;
    Ok((ProductPlan::new(&lhs.client, request)?, factors))
}

/// `out = lhs · rhs` of matrices or batches of them, if the kernel takes them.
pub(crate) fn multiply(lhs: &CubeTensor, rhs: &CubeTensor, out: &CubeTensor) -> bool {
    let Ok((plan, [a, b])) = plan([lhs, rhs], out.dtype, false) else {
        return false;
    };
    launch(
        &lhs.client,
        &plan,
        [&a, &b],
        &out.handle,
        &EpilogueTensors::default(),
    )
    .is_ok()
}

/// Parts of `lhs · rhs` of matrices, which add up to it, in f32, if the kernel takes them: `[parts, rows, columns]`.
pub(crate) fn parts(lhs: &CubeTensor, rhs: &CubeTensor) -> Option<CubeTensor> {
    let (plan, [a, b]) = plan([lhs, rhs], DType::F32, true).ok()?;
    let out = empty(lhs, [plan.parts(), a.shape[1], b.shape[2]], DType::F32);
    (launch(
        &lhs.client,
        &plan,
        [&a, &b],
        &out.handle,
        &EpilogueTensors::default(),
    ))
    .is_ok()
    .then_some(out)
}

/// How a layer's product of contiguous `[rows, inputs]` and `[inputs, outputs]` runs, or why not on wgmma.
pub(crate) fn text(
    device: &CubeDevice,
    dtype: DType,
    [rows, inputs, outputs]: [usize; 3],
) -> Result<String, String> {
    let request = ProductRequest {
        bf16: is_bf16(dtype)?,
        batch: 1,
        rows,
        cols: outputs,
        depth: inputs,
        orders: [Order::Depth, Order::Across],
        wide: false,
        parts: false,
        epilogue: Epilogue::Plain,
    };
    if !inputs.is_multiple_of(8) {
        return Err(format!(
            "wgmma reads rows of multiples of 8 numbers, not of {inputs}"
        ));
    }
    Ok(ProductPlan::new(&device.client(), request)?.to_string())
}
