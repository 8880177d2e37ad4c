//! Products on wgmma or mma.sync: views Burn's tensors as the matrices of `crate::kernels::linear`.

use crate::kernels::linear::available as is_available;
use crate::kernels::linear::multiply as launch;
use crate::kernels::linear::{
    Epilogue, EpilogueTensors, HEAD, HEAD_ROWS, MatrixView, ProductPlan, ProductRequest,
};
use blocksparse_cubecl::rows::ActivationKind;

use crate::linear::values::{HeadParts, MOST_PARTS};
use burn_blocksparse::internal::cube::*;
use burn_blocksparse::internal::prelude::*;

/// Returns true for bf16 and false for f16, the two dtypes of factors.
pub(crate) fn is_bf16(dtype: DType) -> Result<bool, String> {
    match dtype {
        DType::BF16 => Ok(true),
        DType::F16 => Ok(false),
        _ => Err(format!(
            "wgmma and mma.sync multiply bf16 and f16, not {dtype:?}"
        )),
    }
}

/// Views a tensor as a matrix or a batch of matrices, if it has at most 3 dimensions.
pub(crate) fn view(tensor: &CubeTensor) -> Result<MatrixView, &'static str> {
    match tensor.rank() {
        2 => batched(tensor, &[]),
        3 => batched(
            tensor,
            &[(tensor.meta.shape()[0], tensor.meta.strides()[0])],
        ),
        _ => Err("a factor has more than three dimensions"),
    }
}

/// Swaps rows and columns of a matrix.
pub(crate) fn swapped(mut tensor: CubeTensor) -> CubeTensor {
    tensor.meta.swap(0, 1);
    tensor
}

/// Least rows and columns for which a product of Burn's runs here.
const SMALLEST: usize = 32;

/// Returns whether the device supports the kernel.
pub(crate) fn available(device: &CubeDevice) -> bool {
    is_available(&device.client()).is_ok()
}

/// Batch dimensions that two factors share: length, and stride in each factor. The stride is 0 where a factor has one matrix for all.
type Batch = Vec<(usize, [usize; 2])>;

/// Returns the batch dimensions of two factors of one rank, merged as far as possible.
fn batch_of([lhs, rhs]: [&CubeTensor; 2]) -> Option<Batch> {
    let rank = lhs.rank();
    if rank != rhs.rank() || rank < 2 {
        return None;
    }
    let mut batch: Batch = Vec::new();
    for dim in 0..rank - 2 {
        let lengths = [lhs, rhs].map(|of| of.meta.shape()[dim]);
        let length = lengths[0].max(lengths[1]);
        if lengths.iter().any(|own| ![1, length].contains(own)) {
            return None;
        }
        if length == 1 {
            continue;
        }
        let mut strides = [lhs, rhs].map(|of| of.meta.strides()[dim]);
        for (stride, own) in strides.iter_mut().zip(lengths) {
            if own == 1 {
                *stride = 0;
            }
        }
        match batch.last_mut() {
            // The previous dimension is contiguous over this one in both factors: merge them.
            Some((before, outer))
                if (outer.iter().zip(strides)).all(|(outer, stride)| *outer == stride * length) =>
            {
                *before *= length;
                *outer = strides;
            }
            _ => batch.push((length, strides)),
        }
    }
    Some(batch)
}

/// Views a factor with a batch of at most two dimensions.
fn batched(tensor: &CubeTensor, batch: &[(usize, usize)]) -> Result<MatrixView, &'static str> {
    if tensor.qparams.is_some() || tensor.meta.is_tiled() {
        return Err("a factor is quantized or tiled");
    }
    let rank = tensor.rank();
    let (shape, strides) = (tensor.meta.shape(), tensor.meta.strides());
    // One matrix for the whole batch, or one for each entry.
    let (matrices, stride, outer) = match batch {
        [] => (1, 0, [1, 0]),
        batch if batch.iter().all(|(_, stride)| *stride == 0) => (1, 0, [1, 0]),
        [(length, stride)] => (*length, *stride, [1, 0]),
        [(outer, outer_stride), (inner, stride)] if *stride != 0 && *outer_stride != 0 => {
            (outer * inner, *stride, [*outer, *outer_stride])
        }
        _ => return Err("a batch has more than two dimensions"),
    };
    Ok(MatrixView {
        handle: tensor.handle.clone(),
        shape: [matrices, shape[rank - 2], shape[rank - 1]],
        strides: [stride, strides[rank - 2], strides[rank - 1]],
        outer,
        seq: None,
    })
}

/// Returns `lhs · rhs` with the semantics of Burn's `matmul`, if the kernel supports them.
pub(crate) fn matmul(lhs: &CubeTensor, rhs: &CubeTensor, shape: &Shape) -> Option<CubeTensor> {
    let batch = batch_of([lhs, rhs])?;
    // Both factors broadcast over a whole dimension: the kernel would write the result only once.
    if batch.iter().any(|(_, strides)| *strides == [0; 2]) {
        return None;
    }
    let of = |factor: usize| -> Vec<(usize, usize)> {
        batch
            .iter()
            .map(|(length, strides)| (*length, strides[factor]))
            .collect()
    };
    let mut a = batched(lhs, &of(0)).ok()?;
    let b = batched(rhs, &of(1)).ok()?;
    // If the right factor is one matrix and the left matrices are contiguous, multiply all their rows as one matrix: fewer ragged tiles.
    let [matrices, rows, _] = a.shape;
    if b.shape[0] == 1
        && a.outer[0] == 1
        && a.strides[0] == rows * a.strides[1]
        && a.strides[2] == 1
    {
        a.shape = [1, matrices * rows, a.shape[2]];
    }
    // A tile has at least 128 rows and 64 columns; Burn has kernels for vectors.
    if a.shape[1] < SMALLEST || b.shape[2] < SMALLEST {
        return None;
    }
    Some(reshaped(plain(lhs, [&a, &b])?, shape.clone()))
}

/// Returns the plan of a product of factors of one dtype; the result is f32 if `wide`.
fn plan(
    like: &CubeTensor,
    factors: [&MatrixView; 2],
    [wide, parts]: [bool; 2],
    epilogue: Epilogue,
) -> Result<ProductPlan, String> {
    let request = ProductRequest::of(is_bf16(like.dtype)?, factors, wide, parts)?;
    Ok(ProductPlan::new(&like.client, request.with(epilogue))?)
}

/// Launches a product without an epilogue into a buffer.
fn run(plan: &ProductPlan, factors: [&MatrixView; 2], out: &CubeTensor) -> Option<()> {
    let beside = EpilogueTensors::default();
    launch(&out.client, plan, factors, &out.handle, &beside).ok()
}

/// Returns the product of factors like `like`, if the kernel supports them: `[rows, columns]`, the matrices of a batch in order.
fn plain(like: &CubeTensor, [a, b]: [&MatrixView; 2]) -> Option<CubeTensor> {
    let plan = plan(like, [a, b], [false; 2], Epilogue::Plain).ok()?;
    let rows = a.shape[0].max(b.shape[0]) * a.shape[1];
    let out = empty(like, [rows, b.shape[2]], like.dtype);
    run(&plan, [a, b], &out).map(|()| out)
}

/// Returns partial products in f32 that add up to the product: `[parts, rows, columns]`.
fn summands(like: &CubeTensor, [a, b]: [&MatrixView; 2]) -> Option<CubeTensor> {
    let plan = plan(like, [a, b], [true; 2], Epilogue::Plain).ok()?;
    let out = empty(like, [plan.parts(), a.shape[1], b.shape[2]], DType::F32);
    run(&plan, [a, b], &out).map(|()| out)
}

/// Computes `out = lhs · rhs` for matrices or batches of them, if the kernel supports them.
pub(crate) fn multiply(lhs: &CubeTensor, rhs: &CubeTensor, out: &CubeTensor) -> Option<()> {
    let [a, b] = [&view(lhs).ok()?, &view(rhs).ok()?];
    let wide = out.dtype == DType::F32;
    let plan = plan(lhs, [a, b], [wide, false], Epilogue::Plain).ok()?;
    run(&plan, [a, b], out)
}

/// Returns partial products in f32 that add up to `lhs · rhs`, if the kernel supports the matrices: `[parts, rows, columns]`.
pub(crate) fn parts(lhs: &CubeTensor, rhs: &CubeTensor) -> Option<CubeTensor> {
    summands(lhs, [&view(lhs).ok()?, &view(rhs).ok()?])
}

/// Returns the alignment of slices of a buffer.
fn part_alignment(like: &CubeTensor) -> u64 {
    like.client.properties().memory.alignment
}

/// Returns `lhs · rhs + bias` by heads, if the kernel supports it: `[batch, heads, seq, width]` for each part, in one buffer.
pub(crate) fn by_heads(
    [lhs, rhs]: [&CubeTensor; 2],
    bias: Option<&CubeTensor>,
    [batch, seq]: [usize; 2],
    parts: HeadParts,
) -> Option<[Option<CubeTensor>; MOST_PARTS]> {
    let heads = parts.map(|part| part.map_or(0, |(heads, _)| heads));
    let epilogue = heads_epilogue(bias.map(|bias| bias.dtype), parts).ok()?;
    let [a, b] = [&view(lhs).ok()?, &view(rhs).ok()?];
    let plan = plan(lhs, [a, b], [false; 2], epilogue).ok()?;
    let width = b.shape[2];
    let all = empty(lhs, [batch * seq * width], lhs.dtype);
    let bytes = lhs.dtype.size();
    let ends = parts.map(|part| part.map_or(0, |(heads, dim)| batch * heads * seq * dim * bytes));
    let alignment = part_alignment(lhs);
    let is_aligned = ends
        .iter()
        .all(|bytes| (*bytes as u64).is_multiple_of(alignment));
    if !is_aligned && parts[1].is_some() {
        return None;
    }
    let beside = EpilogueTensors {
        bias: bias.map(|bias| &bias.handle),
        heads: Some((seq, heads)),
        ..EpilogueTensors::default()
    };
    launch(&lhs.client, &plan, [a, b], &all.handle, &beside).ok()?;
    let mut start = 0;
    Some(parts.map(|part| {
        let (heads, dim) = part?;
        let first = start;
        start += batch * heads * seq * dim;
        Some(part_of(&all, first, Shape::new([batch, heads, seq, dim])))
    }))
}

/// Returns whether the kernel multiplies factors of a dtype.
pub(crate) fn is_half(dtype: FloatDType) -> bool {
    is_bf16(dtype.into()).is_ok()
}

/// Returns `f(lhs · rhs + bias)`, and with `keep` the product itself, if the kernel supports them.
pub(crate) fn activated(
    [lhs, rhs]: [&CubeTensor; 2],
    bias: Option<&CubeTensor>,
    activation: ActivationKind,
    keep: bool,
) -> Option<[Option<CubeTensor>; 2]> {
    check_bias(bias.map(|bias| bias.dtype)).ok()?;
    let epilogue = Epilogue::Activation(activation);
    let [a, b] = [&view(lhs).ok()?, &view(rhs).ok()?];
    let plan = plan(lhs, [a, b], [false; 2], epilogue).ok()?;
    let made = || empty(lhs, [a.shape[1], b.shape[2]], lhs.dtype);
    let active = made();
    let hidden = keep.then(made);
    let beside = EpilogueTensors {
        bias: bias.map(|bias| &bias.handle),
        second: hidden.as_ref().map(|hidden| &hidden.handle),
        ..EpilogueTensors::default()
    };
    launch(&lhs.client, &plan, [a, b], &active.handle, &beside).ok()?;
    Some([Some(active), hidden])
}

/// Results of [`through`].
pub(crate) struct Through {
    /// Gradient before the activation, `[rows, hidden]`.
    pub grad: CubeTensor,
    /// Recomputed activation, `[rows, hidden]`.
    pub active: Option<CubeTensor>,
    /// Partial sums over rows, f32: `[parts, hidden]`.
    pub totals: Option<CubeTensor>,
}

/// Returns `(grad · outerᵀ) ∘ f'(hidden + bias)`, if the kernel supports it. Also returns sums over its rows (`sums`) and the recomputed activation
/// (`again`), which overwrites `hidden` if `in_place`.
pub(crate) fn through(
    [grad, outer]: [&CubeTensor; 2],
    hidden: &CubeTensor,
    bias: Option<&CubeTensor>,
    activation: ActivationKind,
    [sums, again, in_place]: [bool; 3],
) -> Option<Through> {
    check_bias(bias.map(|bias| bias.dtype)).ok()?;
    (hidden.dtype == grad.dtype).then_some(())?;
    let [a, b] = [&view(grad).ok()?, &view(outer).ok()?.transposed()];
    let epilogue = Epilogue::Gradient { activation, sums };
    let plan = plan(grad, [a, b], [false; 2], epilogue).ok()?;
    let (rows, width) = (a.shape[1], b.shape[2]);
    let made = || empty(grad, [rows, width], grad.dtype);
    let out = made();
    let active = again.then(|| match in_place {
        true => reshaped(hidden.clone(), Shape::new([rows, width])),
        false => made(),
    });
    let totals = sums.then(|| empty(grad, [plan.total_rows(), width], DType::F32));
    let beside = EpilogueTensors {
        bias: bias.map(|bias| &bias.handle),
        before: Some(&hidden.handle),
        second: active.as_ref().map(|active| &active.handle),
        totals: totals.as_ref().map(|totals| &totals.handle),
        ..EpilogueTensors::default()
    };
    launch(&grad.client, &plan, [a, b], &out.handle, &beside).ok()?;
    Some(Through {
        grad: out,
        active,
        totals,
    })
}

/// Returns the epilogue that writes heads; all heads must have one width.
fn heads_epilogue(bias: Option<DType>, parts: HeadParts) -> Result<Epilogue, String> {
    let mut dims = parts.iter().flatten().map(|(_, dim)| *dim);
    let first = dims.next().unwrap_or(0);
    if dims.any(|dim| dim != first) {
        return Err("heads have several widths".to_owned());
    }
    check_bias(bias)?;
    Ok(Epilogue::Heads { dim: first })
}

/// Checks that the kernel reads a bias of a dtype.
fn check_bias(bias: Option<DType>) -> Result<(), &'static str> {
    match bias.is_none_or(|dtype| dtype == DType::F32) {
        true => Ok(()),
        false => Err("the bias is not f32"),
    }
}

/// Views contiguous `[batch, heads, seq, 64]` as a left factor.
fn heads_view(x: &CubeTensor) -> Result<MatrixView, String> {
    let [batch, heads, seq, dim] = x.meta.shape().dims();
    if dim != HEAD {
        return Err(format!("wgmma reads heads of {HEAD}, not of {dim}"));
    }
    if x.qparams.is_some() || x.meta.is_tiled() {
        return Err("a factor is quantized or tiled".to_owned());
    }
    Ok(MatrixView::by_heads(x.handle.clone(), [batch, heads, seq]))
}

/// Returns `x · rhs`, `[rows, columns]` in x's dtype, for a contiguous `[batch, heads, seq, width]` read as rows, if the kernel supports it.
pub(crate) fn of_heads(x: &CubeTensor, rhs: &CubeTensor) -> Option<CubeTensor> {
    plain(x, [&heads_view(x).ok()?, &view(rhs).ok()?])
}

/// [`parts`] of `xᵀ · rhs` for an x by heads.
pub(crate) fn parts_of_heads(x: &CubeTensor, rhs: &CubeTensor) -> Option<CubeTensor> {
    summands(x, [&heads_view(x).ok()?.transposed(), &view(rhs).ok()?])
}

/// Returns the request of a product of `[rows, inputs]` and `[inputs, outputs]`.
fn request(dtype: DType, [rows, inputs, outputs]: [usize; 3]) -> Result<ProductRequest, String> {
    if !inputs.is_multiple_of(8) {
        return Err(format!(
            "wgmma reads rows of multiples of 8 numbers, not of {inputs}"
        ));
    }
    Ok(ProductRequest::plain(
        is_bf16(dtype)?,
        [rows, outputs, inputs],
    ))
}

fn planned(device: &CubeDevice, request: ProductRequest) -> Result<String, String> {
    Ok(ProductPlan::new(&device.client(), request)?.to_string())
}

/// Describes a product of `[rows, inputs]` and `[inputs, outputs]` with an activation, or returns why it does not run on wgmma.
pub(crate) fn activated_text(
    device: &CubeDevice,
    dtype: DType,
    lengths: [usize; 3],
    bias: Option<DType>,
    activation: ActivationKind,
) -> Result<String, String> {
    check_bias(bias)?;
    let epilogue = Epilogue::Activation(activation);
    planned(device, request(dtype, lengths)?.with(epilogue))
}

/// Describes a projection of `[batch, seq, inputs]` to heads, or returns why it does not run on wgmma.
pub(crate) fn by_heads_text(
    device: &CubeDevice,
    dtype: DType,
    [batch, seq, inputs]: [usize; 3],
    bias: Option<DType>,
    parts: HeadParts,
) -> Result<String, String> {
    let outputs = parts.iter().flatten().map(|(heads, dim)| heads * dim).sum();
    let request = request(dtype, [batch * seq, inputs, outputs])?;
    let request = request.with(heads_epilogue(bias, parts)?);
    planned(device, request)
}

/// Describes a projection of `[batch, heads, seq, width]`, or returns why it does not run on wgmma.
pub(crate) fn of_heads_text(
    device: &CubeDevice,
    dtype: DType,
    [batch, heads, seq, dim]: [usize; 4],
    outputs: usize,
) -> Result<String, String> {
    if dim != HEAD {
        return Err(format!("wgmma reads heads of {HEAD}, not of {dim}"));
    }
    if !seq.is_multiple_of(HEAD_ROWS) {
        return Err(format!("the sequence is not a multiple of {HEAD_ROWS}"));
    }
    let mut request = request(dtype, [batch * seq, heads * dim, outputs])?;
    request.by_heads = true;
    planned(device, request)
}

/// Describes a layer's product of contiguous `[rows, inputs]` and `[inputs, outputs]`, or returns why it does not run on wgmma.
pub(crate) fn text(
    device: &CubeDevice,
    dtype: DType,
    lengths: [usize; 3],
) -> Result<String, String> {
    planned(device, request(dtype, lengths)?)
}
