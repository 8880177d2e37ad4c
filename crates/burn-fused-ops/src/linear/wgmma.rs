//! Products on wgmma, or on mma.sync: tensors of Burn's as the matrices of `crate::kernels::linear`.

use crate::kernels::linear::available as is_available;
use crate::kernels::linear::multiply as launch;
use crate::kernels::linear::{
    Epilogue, EpilogueTensors, HEAD, HEAD_ROWS, MatrixView, ProductPlan, ProductRequest,
};
use blocksparse_cubecl::rows::ActivationKind;

use crate::linear::values::{HeadParts, MOST_PARTS};
use burn_blocksparse::internal::cube::*;
use burn_blocksparse::internal::prelude::*;

/// Returns whether a dtype of factors is bf16, and not f16.
pub(crate) fn is_bf16(dtype: DType) -> Result<bool, String> {
    match dtype {
        DType::BF16 => Ok(true),
        DType::F16 => Ok(false),
        _ => Err(format!(
            "wgmma and mma.sync multiply bf16 and f16, not {dtype:?}"
        )),
    }
}

/// A tensor as matrices, if it is at most a batch of them.
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

/// A matrix with rows and columns swapped.
pub(crate) fn swapped(mut tensor: CubeTensor) -> CubeTensor {
    tensor.meta.swap(0, 1);
    tensor
}

/// Rows and columns that a product of Burn's has at least, to be run here.
const SMALLEST: usize = 32;

/// Returns whether the device has the kernel at all.
pub(crate) fn available(device: &CubeDevice) -> bool {
    is_available(&device.client()).is_ok()
}

/// Dimensions of a batch that matrices of both factors are in: how many, and from one to the next in either; 0 where a factor has one for all.
type Batch = Vec<(usize, [usize; 2])>;

/// The batch of two factors of one rank, with as few dimensions as describe it.
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
            // One run of the dimension before is all of this one, in both.
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

/// A factor of a batch of at most two dimensions.
fn batched(tensor: &CubeTensor, batch: &[(usize, usize)]) -> Result<MatrixView, &'static str> {
    if tensor.qparams.is_some() || tensor.meta.is_tiled() {
        return Err("a factor is quantized or tiled");
    }
    let rank = tensor.rank();
    let (shape, strides) = (tensor.meta.shape(), tensor.meta.strides());
    // One matrix for all of them, or one each.
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

/// `lhs · rhs` as Burn's `matmul` has it, if the kernel takes them.
pub(crate) fn matmul(lhs: &CubeTensor, rhs: &CubeTensor, shape: &Shape) -> Option<CubeTensor> {
    let batch = batch_of([lhs, rhs])?;
    // One product for a whole batch: it would be written once only.
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
    // Rows of all matrices are rows of one, if the right factor is one and they lie after each other: fewer ragged tiles.
    let [matrices, rows, _] = a.shape;
    if b.shape[0] == 1
        && a.outer[0] == 1
        && a.strides[0] == rows * a.strides[1]
        && a.strides[2] == 1
    {
        a.shape = [1, matrices * rows, a.shape[2]];
    }
    // A tile has 128 rows and 64 columns or more; Burn has kernels for vectors.
    if a.shape[1] < SMALLEST || b.shape[2] < SMALLEST {
        return None;
    }
    Some(reshaped(plain(lhs, [&a, &b])?, shape.clone()))
}

/// How a product of factors of one dtype runs; in f32 if it is `wide`.
fn plan(
    like: &CubeTensor,
    factors: [&MatrixView; 2],
    [wide, parts]: [bool; 2],
    epilogue: Epilogue,
) -> Result<ProductPlan, String> {
    let request = ProductRequest::of(is_bf16(like.dtype)?, factors, wide, parts)?;
    Ok(ProductPlan::new(&like.client, request.with(epilogue))?)
}

/// A product with nothing beside it, into a buffer.
fn run(plan: &ProductPlan, factors: [&MatrixView; 2], out: &CubeTensor) -> Option<()> {
    let beside = EpilogueTensors::default();
    launch(&out.client, plan, factors, &out.handle, &beside).ok()
}

/// The product of factors like `like`, if the kernel takes them: `[rows, columns]`, one matrix after the other.
fn plain(like: &CubeTensor, [a, b]: [&MatrixView; 2]) -> Option<CubeTensor> {
    let plan = plan(like, [a, b], [false; 2], Epilogue::Plain).ok()?;
    let rows = a.shape[0].max(b.shape[0]) * a.shape[1];
    let out = empty(like, [rows, b.shape[2]], like.dtype);
    run(&plan, [a, b], &out).map(|()| out)
}

/// Parts of the product, which add up to it, in f32: `[parts, rows, columns]`.
fn summands(like: &CubeTensor, [a, b]: [&MatrixView; 2]) -> Option<CubeTensor> {
    let plan = plan(like, [a, b], [true; 2], Epilogue::Plain).ok()?;
    let out = empty(like, [plan.parts(), a.shape[1], b.shape[2]], DType::F32);
    run(&plan, [a, b], &out).map(|()| out)
}

/// `out = lhs · rhs` of matrices or batches of them, if the kernel takes them.
pub(crate) fn multiply(lhs: &CubeTensor, rhs: &CubeTensor, out: &CubeTensor) -> Option<()> {
    let [a, b] = [&view(lhs).ok()?, &view(rhs).ok()?];
    let wide = out.dtype == DType::F32;
    let plan = plan(lhs, [a, b], [wide, false], Epilogue::Plain).ok()?;
    run(&plan, [a, b], out)
}

/// Parts of `lhs · rhs` of matrices, which add up to it, in f32, if the kernel takes them: `[parts, rows, columns]`.
pub(crate) fn parts(lhs: &CubeTensor, rhs: &CubeTensor) -> Option<CubeTensor> {
    summands(lhs, [&view(lhs).ok()?, &view(rhs).ok()?])
}

/// Of which alignment Burn's own slices begin.
fn part_alignment(like: &CubeTensor) -> u64 {
    like.client.properties().memory.alignment
}

/// `lhs · rhs + bias` of matrices by heads, if the kernel takes them: `[batch, heads, seq, width]` each, in one buffer.
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

/// Returns whether a dtype of factors is one that the kernel multiplies.
pub(crate) fn is_half(dtype: FloatDType) -> bool {
    is_bf16(dtype.into()).is_ok()
}

/// `f(lhs · rhs + bias)` of matrices, and with `keep` the product itself, if the kernel takes them.
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

/// What [`through`] makes.
pub(crate) struct Through {
    /// `[rows, hidden]`
    pub grad: CubeTensor,
    /// The activation again, `[rows, hidden]`.
    pub active: Option<CubeTensor>,
    /// Parts of the sums over rows: `[parts, hidden]`, f32.
    pub totals: Option<CubeTensor>,
}

/// `(grad · outerᵀ) ∘ f'(hidden + bias)`, if the kernel takes them; sums over its rows, if they are wanted, and the activation again, if that is, in
/// place of `hidden`, if that may be.
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

/// What writes heads of one width.
fn heads_epilogue(bias: Option<DType>, parts: HeadParts) -> Result<Epilogue, String> {
    let mut dims = parts.iter().flatten().map(|(_, dim)| *dim);
    let first = dims.next().unwrap_or(0);
    if dims.any(|dim| dim != first) {
        return Err("heads have several widths".to_owned());
    }
    check_bias(bias)?;
    Ok(Epilogue::Heads { dim: first })
}

/// That the kernel reads a bias of a dtype.
fn check_bias(bias: Option<DType>) -> Result<(), &'static str> {
    match bias.is_none_or(|dtype| dtype == DType::F32) {
        true => Ok(()),
        false => Err("the bias is not f32"),
    }
}

/// `[batch, heads, seq, 64]`, contiguous, as a left factor.
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

/// `x · rhs` of contiguous `[batch, heads, seq, width]` as rows, if the kernel takes it: `[rows, columns]` in x's dtype.
pub(crate) fn of_heads(x: &CubeTensor, rhs: &CubeTensor) -> Option<CubeTensor> {
    plain(x, [&heads_view(x).ok()?, &view(rhs).ok()?])
}

/// [`parts`] of `xᵀ · rhs` of such an x.
pub(crate) fn parts_of_heads(x: &CubeTensor, rhs: &CubeTensor) -> Option<CubeTensor> {
    summands(x, [&heads_view(x).ok()?.transposed(), &view(rhs).ok()?])
}

/// What a product of `[rows, inputs]` and `[inputs, outputs]` is.
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

/// How a product of `[rows, inputs]` and `[inputs, outputs]` with an activation runs, or why not on wgmma.
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

/// How a projection of `[batch, seq, inputs]` to heads runs, or why not on wgmma.
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

/// How a projection of `[batch, heads, seq, width]` runs, or why not on wgmma.
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

/// How a layer's product of contiguous `[rows, inputs]` and `[inputs, outputs]` runs, or why not on wgmma.
pub(crate) fn text(
    device: &CubeDevice,
    dtype: DType,
    lengths: [usize; 3],
) -> Result<String, String> {
    planned(device, request(dtype, lengths)?)
}
