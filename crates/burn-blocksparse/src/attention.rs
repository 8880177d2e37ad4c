//! The public functions: checks, defaults, and the step from tensors to the backend trait.

use blocksparse::BlockLayout;
use burn::backend::Dispatch;
use burn::tensor::Tensor;

use crate::call_layout::Layout;
use crate::check;
use crate::error::OpError;
use crate::kept::values::KeptAttention;
use crate::merge::{Shares, shares};
use crate::ops::BlockSparseOps;
use crate::options::{AttentionOptions, WeightsMode};
use crate::plan::{AttentionPlan, Chosen};
use crate::tensors::AttentionTensors;
use crate::upload;
use crate::values::{AttentionInputs, AttentionOutput, MaybeFloat, ScoreTensors};
use crate::weights::BlockSparseTensor;

/// Softmax attention over the pairs that `layout` allows:
/// `out[i] = Σ_j p[i, j] · v[j]`, `p[i, ·] = softmax over the allowed j of scale · q[i] · k[j]`.
///
/// `layout` is a [`BlockLayout`], built on the host, or a [`DeviceLayout`](crate::DeviceLayout), made on the device of tensors.
///
/// Exact, differentiable (once; [`attention_gradients`](crate::attention_gradients) is for second derivatives) in `q`, `k` and `v`, deterministic. Rows with no allowed key give zeros
/// and zero gradients.
///
/// # Shapes
/// - `q`: `[batch, heads, seq_q, head_dim]`
/// - `k`: `[batch, kv_heads, seq_kv, head_dim]`; `kv_heads` divides `heads`, and query head `h` uses
///   key head `h / (heads / kv_heads)` (grouped-query attention)
/// - `v`: `[batch, kv_heads, seq_kv, value_dim]`
/// - returns `[batch, heads, seq_q, value_dim]` in the inputs' dtype
///
/// # Errors
/// [`OpError`] if shapes, dtypes, devices or options do not fit each other or the layout, or if the
/// device cannot run the call ([`AttentionPlan`] says what it runs, [`check_device`](crate::check_device) whether a device can be used at all).
pub fn attention<'a>(
    q: Tensor<4>,
    k: Tensor<4>,
    v: Tensor<4>,
    layout: impl Into<Layout<'a>>,
    options: AttentionOptions,
) -> Result<Tensor<4>, OpError> {
    let output = call(q, k, v, ScoreTensors::default(), layout.into(), options)?;
    Ok(Tensor::from_dispatch(output.out))
}

/// [`attention`], and `lse[i] = ln Σ_j exp(score[i, j])` over the allowed keys.
///
/// `lse`: `[batch, heads, seq_q]`, in f32 (f64 for f64 inputs), −∞ for a row with no allowed key. With two
/// disjoint layouts over the same queries it is what merges two outputs into the attention over their union:
/// [`merge_attention`](crate::merge_attention). It is differentiable, as the output is, and both take one backward pass.
///
/// # Errors
/// As [`attention`].
pub fn attention_with_lse<'a>(
    q: Tensor<4>,
    k: Tensor<4>,
    v: Tensor<4>,
    layout: impl Into<Layout<'a>>,
    options: AttentionOptions,
) -> Result<(Tensor<4>, Tensor<3>), OpError> {
    let output = call(q, k, v, ScoreTensors::default(), layout.into(), options)?;
    Ok((
        Tensor::from_dispatch(output.out),
        Tensor::from_dispatch(output.lse),
    ))
}

/// [`attention`], and its weights `p` in block-sparse form. Implies [`WeightsMode::Store`].
/// No gradient flows through the weights. With biases or sinks:
/// [`attention_with_tensors_and_weights`](crate::attention_with_tensors_and_weights).
///
/// # Errors
/// As [`attention`].
pub fn attention_with_weights(
    q: Tensor<4>,
    k: Tensor<4>,
    v: Tensor<4>,
    layout: &BlockLayout,
    options: AttentionOptions,
) -> Result<(Tensor<4>, BlockSparseTensor), OpError> {
    let (out, _, weights) = call_with_weights(q, k, v, ScoreTensors::default(), layout, options)?;
    Ok((out, weights))
}

/// [`attention_with_lse`] with further tensors: returns out and lse.
///
/// With sink logits `out = out₀ · exp(lse₀ − lse)` and `lse = ln(exp(lse₀) + exp(sinks[head]))`, where out₀ and lse₀ are those without.
/// Rows with no allowed key give zeros, and the sink as lse. A bias is added to the scores.
///
/// ```
/// use burn::tensor::{Device, Distribution, Tensor};
/// use burn_blocksparse::{AttentionOptions, AttentionTensors, Pattern, attention_with_tensors};
///
/// let device = Device::flex().autodiff();
/// let q = Tensor::<4>::random([1, 2, 64, 16], Distribution::Default, &device);
/// let sinks = Tensor::<1>::zeros([2], &device).require_grad();
/// let layout = Pattern::local(16).layout(2, 64, 16)?;
/// let tensors = AttentionTensors::default().sinks(sinks.clone());
/// let options = AttentionOptions::default();
/// let (out, _) = attention_with_tensors(q.clone(), q.clone(), q, tensors, &layout, options)?;
/// let grads = out.sum().backward();
/// assert_eq!(sinks.grad(&grads).unwrap().dims(), [2]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Errors
/// As [`attention`], and if a tensor does not fit the layout or the others.
pub fn attention_with_tensors<'a>(
    q: Tensor<4>,
    k: Tensor<4>,
    v: Tensor<4>,
    tensors: AttentionTensors,
    layout: impl Into<Layout<'a>>,
    options: AttentionOptions,
) -> Result<(Tensor<4>, Tensor<3>), OpError> {
    let output = call_with_tensors(q, k, v, tensors, layout.into(), options)?;
    Ok((
        Tensor::from_dispatch(output.out),
        Tensor::from_dispatch(output.lse),
    ))
}

/// What a call says of itself besides its output ([`attention_with_aux`]).
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct AttentionAux {
    /// `[batch, heads, seq_q]`, in f32 (f64 for f64 inputs): natural log of the sum of exponentials of each row's scores, as
    /// [`attention_with_lse`] returns it. Differentiable.
    pub lse: Tensor<3>,
    /// `[batch, heads, seq_q]`, in lse's dtype: the largest score of each row over the keys it attends to, after scale, softcap and biases and
    /// before sinks; −∞ for a row with no allowed key. No gradient flows through it.
    pub max_scores: Tensor<3>,
}

/// [`attention`], and what else its pass over the scores knows: [`AttentionAux`]. Implies
/// [`options.max_scores`](AttentionOptions::max_scores); output and gradients are those of [`attention`].
///
/// Attention logits that grow from step to step are an early sign of training that will diverge, and the largest scores show them for one more
/// number of each row: log the largest of each head, or act on it. QK-clip (MuonClip; Kimi K2, 2025) scales a head's query and key weights down
/// after a step in which its largest score was above a threshold. FlexAttention has the same auxiliary outputs.
///
/// Of disjoint layouts over the same queries, the largest score over their union is the larger one.
///
/// ```
/// use burn::tensor::{Device, Distribution, Tensor};
/// use burn_blocksparse::{AttentionOptions, Pattern, attention_with_aux};
///
/// let q = Tensor::<4>::random([1, 2, 64, 16], Distribution::Default, &Device::flex());
/// let layout = Pattern::local(16).layout(2, 64, 16)?;
/// let options = AttentionOptions::default();
/// let (out, aux) = attention_with_aux(q.clone(), q.clone(), q, &layout, options)?;
/// // QK-clip: what each head's queries and keys are multiplied by, half of it each.
/// let largest = aux.max_scores.max_dim(2).max_dim(0).reshape([2]);
/// let threshold = 100.0;
/// let factors = (largest.clamp_min(threshold).recip() * threshold).sqrt();
/// # assert_eq!(factors.into_data().to_vec::<f32>().unwrap(), [1.0, 1.0]);
/// # let _ = out;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Errors
/// As [`attention`].
pub fn attention_with_aux<'a>(
    q: Tensor<4>,
    k: Tensor<4>,
    v: Tensor<4>,
    layout: impl Into<Layout<'a>>,
    options: AttentionOptions,
) -> Result<(Tensor<4>, AttentionAux), OpError> {
    attention_with_tensors_and_aux(q, k, v, AttentionTensors::default(), layout, options)
}

/// [`attention_with_aux`] with further tensors. Biases are in the largest scores and sinks are not; both are in lse.
///
/// # Errors
/// As [`attention_with_tensors`].
pub fn attention_with_tensors_and_aux<'a>(
    q: Tensor<4>,
    k: Tensor<4>,
    v: Tensor<4>,
    tensors: AttentionTensors,
    layout: impl Into<Layout<'a>>,
    options: AttentionOptions,
) -> Result<(Tensor<4>, AttentionAux), OpError> {
    let options = options.max_scores(true);
    let output = call_with_tensors(q, k, v, tensors, layout.into(), options)?;
    let MaybeFloat::Some(max_scores) = output.max_scores else {
        unreachable!("a call that asks for the largest scores returns them")
    };
    let aux = AttentionAux {
        lse: Tensor::from_dispatch(output.lse),
        max_scores: Tensor::from_dispatch(max_scores),
    };
    Ok((Tensor::from_dispatch(output.out), aux))
}

/// [`attention_with_tensors`], and its weights `p` in block-sparse form, as
/// [`attention_with_weights`] returns them: out, lse and weights. The weights are those of the keys, after biases
/// and before dropout; with sinks they sum to less than 1. No gradient flows through them.
///
/// # Errors
/// As [`attention_with_tensors`].
pub fn attention_with_tensors_and_weights(
    q: Tensor<4>,
    k: Tensor<4>,
    v: Tensor<4>,
    tensors: AttentionTensors,
    layout: &BlockLayout,
    options: AttentionOptions,
) -> Result<(Tensor<4>, Tensor<3>, BlockSparseTensor), OpError> {
    check::shapes(&q, &k, &v, layout)?;
    tensors.check(&q, layout)?;
    let sinks = tensors.sinks.clone();
    let scores = tensors.scores(&q);
    let (out, lse, weights) = call_with_weights(q, k, v, scores, layout, options)?;
    let Some(sinks) = sinks else {
        return Ok((out, lse, weights));
    };
    let Shares { a, lse, .. } = shares_with(sinks, lse);
    let weights = weights.times_rows(a.clone().detach());
    Ok((scaled(out, a), lse, weights))
}

/// The output of a call with further tensors; sinks are in out and lse, and not in the weights.
fn call_with_tensors(
    q: Tensor<4>,
    k: Tensor<4>,
    v: Tensor<4>,
    tensors: AttentionTensors,
    layout: Layout,
    options: AttentionOptions,
) -> Result<AttentionOutput<Dispatch>, OpError> {
    check::shapes(&q, &k, &v, layout.sizes())?;
    tensors.check(&q, layout.sizes())?;
    let sinks = tensors.sinks.clone();
    let scores = tensors.scores(&q);
    let output = call(q, k, v, scores, layout, options)?;
    Ok(with_sinks(output, sinks))
}

/// Out and lse with sinks in them.
pub(crate) fn with_sinks(
    mut output: AttentionOutput<Dispatch>,
    sinks: Option<Tensor<1>>,
) -> AttentionOutput<Dispatch> {
    if let Some(sinks) = sinks {
        let Shares { a, lse, .. } = shares_with(sinks, Tensor::from_dispatch(output.lse));
        output.out = scaled(Tensor::from_dispatch(output.out), a).into_dispatch();
        output.lse = lse.into_dispatch();
    }
    output
}

/// The output, lse and the weights.
pub(crate) fn call_with_weights(
    q: Tensor<4>,
    k: Tensor<4>,
    v: Tensor<4>,
    scores: ScoreTensors<Dispatch>,
    layout: &BlockLayout,
    options: AttentionOptions,
) -> Result<(Tensor<4>, Tensor<3>, BlockSparseTensor), OpError> {
    let options = options.weights(WeightsMode::Store);
    let output = call(q, k, v, scores, layout.into(), options)?;
    let MaybeFloat::Some(weights) = output.weights else {
        unreachable!("WeightsMode::Store returns the weights")
    };
    let values = Tensor::from_dispatch(weights);
    Ok((
        Tensor::from_dispatch(output.out),
        Tensor::from_dispatch(output.lse),
        BlockSparseTensor::new(values, layout.clone()),
    ))
}

pub(crate) fn call(
    q: Tensor<4>,
    k: Tensor<4>,
    v: Tensor<4>,
    scores: ScoreTensors<Dispatch>,
    layout: Layout,
    options: AttentionOptions,
) -> Result<AttentionOutput<Dispatch>, OpError> {
    call_given(q, k, v, scores, None, layout, options)
}

/// The output, or what is given of it in its place.
pub(crate) fn call_given(
    q: Tensor<4>,
    k: Tensor<4>,
    v: Tensor<4>,
    scores: ScoreTensors<Dispatch>,
    given: Option<KeptAttention>,
    layout: Layout,
    options: AttentionOptions,
) -> Result<AttentionOutput<Dispatch>, OpError> {
    check::call(&q, &k, &v, layout, &options)?;
    if let Some(given) = &given {
        given.check(&q, &v, &options)?;
    }
    let Chosen { plan, packed } = AttentionPlan::choose(&q, &k, &v, &scores, layout, &options)?;
    let [batch, heads, seq_q, head_dim] = q.dims();
    let kv_heads = k.dims()[1];
    // The reference walks what the host knows.
    let read = match layout {
        Layout::Device(layout) if !plan.is_kernels() => Some(layout.to_host()?),
        _ => None,
    };
    let host = read.as_ref().unwrap_or(layout.sizes());
    // The same memory: heads that share a key head are neighbours.
    let own = match &packed {
        Some(packed) => q.reshape([batch, kv_heads, packed.seq_q(), head_dim]),
        None => q,
    };
    let host = packed.as_ref().unwrap_or(host);
    let mut tensors = upload::layout_tensors(host, &own.device(), plan.is_kernels())?;
    tensors.plan = plan.kernels();
    if let (Layout::Device(layout), None) = (layout, &read) {
        tensors.choice = layout.chooser();
    }
    let inputs = AttentionInputs {
        q: own.into_dispatch(),
        k: k.into_dispatch(),
        v: v.into_dispatch(),
        scores,
    };
    let mut output = match given {
        None => <Dispatch as BlockSparseOps>::block_sparse_attention(inputs, tensors, options),
        Some(given) => {
            let packed = packed.as_ref().map(|packed| [kv_heads, packed.seq_q()]);
            let given = given.into_given(packed);
            <Dispatch as BlockSparseOps>::block_sparse_attention_given(
                inputs, given, tensors, options,
            )
        }
    };
    if packed.is_some() {
        let out = Tensor::<4>::from_dispatch(output.out);
        let value_dim = out.dims()[3];
        let out = out.reshape([batch, heads, seq_q, value_dim]);
        let rows = |rows| Tensor::<3>::from_dispatch(rows).reshape([batch, heads, seq_q]);
        output.out = out.into_dispatch();
        output.lse = rows(output.lse).into_dispatch();
        let max_scores = output.max_scores.into_option();
        output.max_scores = max_scores.map(|scores| rows(scores).into_dispatch()).into();
    }
    Ok(output)
}

/// The sink is one more part of the keys, whose output is 0.
pub(crate) fn shares_with(sinks: Tensor<1>, lse: Tensor<3>) -> Shares {
    let heads = sinks.dims()[0];
    let sinks = sinks.cast(lse.dtype()).reshape([1, heads, 1]);
    let sinks = sinks.expand(lse.dims());
    shares(lse, sinks)
}

/// The rows of `out` times their shares.
pub(crate) fn scaled(out: Tensor<4>, shares: Tensor<3>) -> Tensor<4> {
    let dtype = out.dtype();
    let out = out.cast(shares.dtype()) * shares.unsqueeze_dim(3);
    out.cast(dtype)
}
