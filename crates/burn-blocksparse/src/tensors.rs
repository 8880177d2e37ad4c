//! The tensors that a call may have besides queries, keys and values.

use blocksparse::BlockLayout;
use burn::tensor::Tensor;

use crate::attention::{call, check};
use crate::merge::{Shares, shares};
use crate::{AttentionError, AttentionOptions};

/// Tensors of [`attention_with_tensors`] besides queries, keys and values. Build it from [`Default`].
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub struct AttentionTensors {
    /// `[heads]`, any float dtype: the score of a further key of each head, whose value is 0.
    pub sinks: Option<Tensor<1>>,
    /// `[batch or 1, heads or 1, seq_q or 1, seq_kv]`, in the dtype of q, k and v: added to the scores.
    pub bias: Option<Tensor<4>>,
}

impl AttentionTensors {
    /// Sets the sink logits, `[heads]`: queries of head `h` attend to a further key of score `sinks[h]` and value 0, so that the
    /// weights of the keys need not sum to 1 (Miller, "Attention is off by one", 2023; gpt-oss learns the logits).
    pub fn sinks(mut self, sinks: Tensor<1>) -> Self {
        self.sinks = Some(sinks);
        self
    }

    /// Sets a bias of the scores, `[batch or 1, heads or 1, seq_q or 1, seq_kv]`, added after scale and softcap. Its gradient has
    /// its shape: sums over what shares it, in a fixed order. Values must be finite; pairs are masked by the layout. For
    /// biases linear in distance [`AttentionOptions::alibi`] needs no tensor.
    pub fn bias(mut self, bias: Tensor<4>) -> Self {
        self.bias = Some(bias);
        self
    }

    pub(crate) fn check(&self, q: &Tensor<4>, layout: &BlockLayout) -> Result<(), AttentionError> {
        if let Some(sinks) = &self.sinks {
            let [heads] = sinks.dims();
            AttentionError::expect_same("sinks' heads", layout.heads(), "the layout's", heads)?;
            AttentionError::expect_same("sinks' device", q.device(), "q's", sinks.device())?;
        }
        let Some(bias) = &self.bias else {
            return Ok(());
        };
        let [batch, heads, seq_q, seq_kv] = bias.dims();
        for (argument, expected, got) in [
            ("bias's batch", q.dims()[0], batch),
            ("bias's heads", layout.heads(), heads),
            ("bias's seq_q", layout.seq_q(), seq_q),
        ] {
            if got != 1 && got != expected {
                return Err(AttentionError::argument(
                    argument,
                    format!("{expected} or 1"),
                    got,
                ));
            }
        }
        AttentionError::expect_same("bias's seq_kv", layout.seq_kv(), "the layout's", seq_kv)?;
        AttentionError::expect_same("bias's dtype", q.dtype(), "q's", bias.dtype())?;
        AttentionError::expect_same("bias's device", q.device(), "q's", bias.device())
    }
}

/// [`attention_with_lse`](crate::attention_with_lse) with further tensors: returns out and lse.
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
/// As [`attention`](crate::attention()), and if a tensor does not fit the layout or the others.
pub fn attention_with_tensors(
    q: Tensor<4>,
    k: Tensor<4>,
    v: Tensor<4>,
    tensors: AttentionTensors,
    layout: &BlockLayout,
    options: AttentionOptions,
) -> Result<(Tensor<4>, Tensor<3>), AttentionError> {
    check(&q, &k, &v, layout)?;
    tensors.check(&q, layout)?;
    let AttentionTensors { sinks, bias } = tensors;
    let output = call(q, k, v, bias, layout, options)?;
    let out = Tensor::from_dispatch(output.out);
    let lse = Tensor::from_dispatch(output.lse);
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
