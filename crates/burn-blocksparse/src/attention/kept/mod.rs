//! Attention whose results are kept from one pass and given to another.

pub(crate) mod values;

use burn::tensor::Tensor;

use crate::attention::tensors::AttentionTensors;
use crate::attention::{call, call_given, with_sinks};
use crate::call_layout::Layout;
use crate::check;
use crate::error::OpError;
use crate::options::AttentionOptions;
use values::{AttentionResiduals, check_options};

/// [`SparseAttentionCall`](crate::SparseAttentionCall) that returns out and lse, and what of it a later call with the same arguments can take
/// in place of computing it.
///
/// It is for recomputation (gradient checkpointing) around attention: a first pass without autodiff keeps this of each call, and a second pass with
/// autodiff, by [`attention_from_residuals`], computes again all but the attention (selective recomputation; Korthikanti et al., 2022, choose what is cheap to
/// compute for its memory, and here attention is what is not).
///
/// ```
/// use burn::tensor::{Device, Distribution, Tensor};
/// use burn_blocksparse::{AttentionOptions, AttentionTensors, Pattern};
/// use burn_blocksparse::internal::{attention_from_residuals, attention_with_residuals};
///
/// let x = Tensor::<4>::random([1, 2, 64, 16], Distribution::Default, &Device::flex());
/// let layout = Pattern::local(16).layout(2, 64, 16)?;
/// let tensors = AttentionTensors::default();
/// let options = AttentionOptions::default();
/// let (q, k, v) = (x.clone(), x.clone(), x.clone());
/// let (out, _, kept) =
///     attention_with_residuals(q, k, v, tensors.clone(), &layout, options.clone())?;
/// // Nothing is computed before the backward pass.
/// let x = x.autodiff().require_grad();
/// let (q, k, v) = (x.clone(), x.clone(), x.clone());
/// let (again, _) = attention_from_residuals(q, k, v, tensors, kept, &layout, options)?;
/// assert_eq!(again.to_data(), out.into_data());
/// let grads = again.sum().backward();
/// assert_eq!(x.grad(&grads).unwrap().dims(), [1, 2, 64, 16]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Shapes
/// As [`SparseAttentionCall`](crate::SparseAttentionCall).
///
/// # Errors
/// As [`SparseAttentionCall`](crate::SparseAttentionCall); also if the options ask for stored weights or largest scores, which are not kept.
pub fn attention_with_residuals<'a>(
    q: Tensor<4>,
    k: Tensor<4>,
    v: Tensor<4>,
    tensors: AttentionTensors,
    layout: impl Into<Layout<'a>>,
    options: AttentionOptions,
) -> Result<(Tensor<4>, Tensor<3>, AttentionResiduals), OpError> {
    let layout = layout.into();
    check::shapes(&q, &k, &v, layout.sizes())?;
    tensors.check(&q, layout.sizes())?;
    check_options(&options)?;
    let sinks = tensors.sinks.clone();
    let scores = tensors.scores(&q);
    let output = call(q, k, v, scores, layout, options)?;
    let kept = AttentionResiduals::new(
        Tensor::from_dispatch(output.out.clone()),
        Tensor::from_dispatch(output.lse.clone()),
    );
    let (output, _) = with_sinks(output, sinks);
    Ok((
        Tensor::from_dispatch(output.out),
        Tensor::from_dispatch(output.lse),
        kept,
    ))
}

/// [`SparseAttentionCall`](crate::SparseAttentionCall) with known results: returns out and lse. No kernel of attention runs, the graph
/// keeps what is given, and sinks are applied to it.
///
/// `kept` must be what [`attention_with_residuals`] kept of a call with the same values of all arguments, dropout's seed among them; which values they are
/// cannot be checked. The gradients, of all but `kept`, are then those of the call itself, to the bit; no gradient flows into `kept`.
///
/// # Shapes
/// As [`SparseAttentionCall`](crate::SparseAttentionCall); `kept` as [`AttentionResiduals`] says.
///
/// # Errors
/// As [`attention_with_residuals`]; also if shapes, dtypes or devices of `kept` do not fit q and v.
pub fn attention_from_residuals<'a>(
    q: Tensor<4>,
    k: Tensor<4>,
    v: Tensor<4>,
    tensors: AttentionTensors,
    kept: AttentionResiduals,
    layout: impl Into<Layout<'a>>,
    options: AttentionOptions,
) -> Result<(Tensor<4>, Tensor<3>), OpError> {
    let layout = layout.into();
    check::shapes(&q, &k, &v, layout.sizes())?;
    tensors.check(&q, layout.sizes())?;
    let sinks = tensors.sinks.clone();
    let scores = tensors.scores(&q);
    let output = call_given(q, k, v, scores, Some(kept), layout, options)?;
    let (output, _) = with_sinks(output, sinks);
    Ok((
        Tensor::from_dispatch(output.out),
        Tensor::from_dispatch(output.lse),
    ))
}
