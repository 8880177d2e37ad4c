//! The tensors that a call may have besides queries, keys and values.

use blocksparse::BlockLayout;
use burn::tensor::Tensor;

use crate::merge::{Shares, shares};
use crate::{AttentionError, AttentionOptions, attention_with_lse};

/// Tensors of [`attention_with_tensors`] besides queries, keys and values. Build it from [`Default`].
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub struct AttentionTensors {
    /// `[heads]`, any float dtype: the score of a further key of each head, whose value is 0.
    pub sinks: Option<Tensor<1>>,
}

impl AttentionTensors {
    /// Sets the sink logits, `[heads]`: queries of head `h` attend to a further key of score `sinks[h]` and value 0, so that the
    /// weights of the keys need not sum to 1 (Miller, "Attention is off by one", 2023; gpt-oss learns the logits).
    pub fn sinks(mut self, sinks: Tensor<1>) -> Self {
        self.sinks = Some(sinks);
        self
    }
}

/// [`attention_with_lse`] with further tensors: returns out and lse.
///
/// With sink logits `out = out₀ · exp(lse₀ − lse)` and `lse = ln(exp(lse₀) + exp(sinks[head]))`, where out₀ and lse₀ are those without.
/// Rows with no allowed key give zeros, and the sink as lse.
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
/// As [`attention`](crate::attention()), and if a tensor does not fit the layout or the others.
pub fn attention_with_tensors(
    q: Tensor<4>,
    k: Tensor<4>,
    v: Tensor<4>,
    tensors: AttentionTensors,
    layout: &BlockLayout,
    options: AttentionOptions,
) -> Result<(Tensor<4>, Tensor<3>), AttentionError> {
    let AttentionTensors { sinks } = tensors;
    if let Some(sinks) = &sinks {
        let [heads] = sinks.dims();
        AttentionError::expect_same("sinks' heads", layout.heads(), "the layout's", heads)?;
        AttentionError::expect_same("sinks' device", q.device(), "q's", sinks.device())?;
    }
    let (out, lse) = attention_with_lse(q, k, v, layout, options)?;
    Ok(match sinks {
        Some(sinks) => with_sinks(out, lse, sinks),
        None => (out, lse),
    })
}

/// The sink is one more part of the keys, whose output is 0.
fn with_sinks(out: Tensor<4>, lse: Tensor<3>, sinks: Tensor<1>) -> (Tensor<4>, Tensor<3>) {
    let (dtype, accumulator) = (out.dtype(), lse.dtype());
    let heads = sinks.dims()[0];
    let sinks = sinks.cast(accumulator).reshape([1, heads, 1]);
    let sinks = sinks.expand(lse.dims());
    let Shares { a, lse, .. } = shares(lse, sinks);
    let out = out.cast(accumulator) * a.unsqueeze_dim(3);
    (out.cast(dtype), lse)
}
