//! The tensors that a call may have besides queries, keys and values.

use blocksparse::BlockLayout;
use burn::backend::Dispatch;
use burn::tensor::{DType, Tensor};

use crate::attention::{call, call_with_weights, check};
use crate::merge::{Shares, shares};
use crate::ops::MaybeFloat;
use crate::reference::accumulate_in;
use crate::{AttentionError, AttentionOptions, BlockSparseTensor, Layout};

/// Tensors of [`attention_with_tensors`] besides queries, keys and values. Build it from [`Default`].
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub struct AttentionTensors {
    /// `[heads]`, any float dtype: the score of a further key of each head, whose value is 0.
    pub sinks: Option<Tensor<1>>,
    /// `[batch or 1, heads or 1, seq_q or 1, seq_kv]`, in the dtype of q, k and v: added to the scores.
    pub bias: Option<Tensor<4>>,
    /// `[heads or 1, 2 · reach + 1]`, any float dtype: a bias of each distance.
    pub relative_bias: Option<Tensor<2>>,
}

/// What is added to scores.
#[derive(Clone, Debug, Default)]
pub(crate) struct Biases {
    /// `[batch or 1, heads or 1, seq_q or 1, seq_kv]`, in the dtype of q, k and v.
    pub bias: Option<Tensor<4>>,
    /// `[heads or 1, 2 · reach + 1]`, in the dtype of sums.
    pub relative: Option<Tensor<2>>,
}

impl Biases {
    /// Whether there are any of either kind.
    pub fn kinds(&self) -> [bool; 2] {
        [self.bias.is_some(), self.relative.is_some()]
    }

    /// Whether autodiff follows one of them.
    #[cfg(feature = "cube")]
    pub fn is_autodiff(&self) -> bool {
        let bias = self.bias.iter().any(|bias| bias.device().is_autodiff());
        bias || (self.relative.iter()).any(|table| table.device().is_autodiff())
    }

    /// As backends take them.
    pub fn into_dispatch(self) -> [MaybeFloat<Dispatch>; 2] {
        let bias = match self.bias {
            Some(bias) => MaybeFloat::Some(bias.into_dispatch()),
            None => MaybeFloat::None,
        };
        let relative = match self.relative {
            Some(table) => MaybeFloat::Some(table.into_dispatch()),
            None => MaybeFloat::None,
        };
        [bias, relative]
    }
}

impl AttentionTensors {
    /// Numbers that a table of biases of distances may have, all heads together: kernels add distances to their places, in 32 bits with a
    /// sign.
    pub const MAX_DISTANCES: usize = 1 << 30;

    /// Sets the sink logits, `[heads]`: queries of head `h` attend to a further key of score `sinks[h]` and value 0, so that the
    /// weights of the keys need not sum to 1 (Miller, "Attention is off by one", 2023; gpt-oss learns the logits).
    pub fn sinks(mut self, sinks: Tensor<1>) -> Self {
        self.sinks = Some(sinks);
        self
    }

    /// Sets a bias of the scores, `[batch or 1, heads or 1, seq_q or 1, seq_kv]`, added after scale and softcap. Its gradient has
    /// its shape: sums over what shares it, in a fixed order. Values must be finite and at most about 1e8 in size; pairs are masked by the layout. For
    /// biases linear in distance [`AttentionOptions::alibi`] needs no tensor.
    pub fn bias(mut self, bias: Tensor<4>) -> Self {
        self.bias = Some(bias);
        self
    }

    /// Sets biases of distances, `[heads or 1, 2 · reach + 1]`: query `i` and key `j` of head `h` get
    /// `table[h, clamp(j − i, −reach, reach) + reach]`, after scale and softcap (Shaw et al., 2018, with a number for each distance). `i` and `j` are
    /// positions: with `seq_q ≠ seq_kv` query row `r` sits at `r + seq_kv − seq_q`. No `seq_q × seq_kv` tensor exists, and the table has a
    /// gradient, summed in a fixed order. Computed in the dtype of sums. Values are as a bias's.
    ///
    /// Buckets of distances, as T5's (Raffel et al., 2020), are a smaller table and an index of each distance:
    ///
    /// ```
    /// use burn::tensor::{Device, Distribution, Int, Tensor, TensorData};
    /// use burn_blocksparse::{AttentionOptions, AttentionTensors, Pattern, attention_with_tensors};
    ///
    /// /// The bucket of a key at `distance` from its query, of 32 for both directions: 8 of one distance each, 8 up to 128, on each side.
    /// fn bucket(distance: i32) -> i32 {
    ///     let behind = distance.abs() as f32;
    ///     let far = 8.0 + (behind / 8.0).ln() / 16f32.ln() * 8.0;
    ///     let of_side = if behind < 8.0 { behind } else { far.min(15.0) };
    ///     of_side as i32 + if distance > 0 { 16 } else { 0 }
    /// }
    ///
    /// let device = Device::flex().autodiff();
    /// let x = Tensor::<4>::random([1, 2, 64, 16], Distribution::Default, &device);
    /// let buckets = Tensor::<2>::random([2, 32], Distribution::Default, &device).require_grad();
    /// let distances: Vec<i32> = (-128..=128).map(bucket).collect();
    /// let distances = Tensor::<1, Int>::from_data(TensorData::new(distances, [257]), &device);
    /// // The gradient flows through the selection.
    /// let table = buckets.clone().select(1, distances);
    /// let tensors = AttentionTensors::default().relative_bias(table);
    /// let layout = Pattern::window(20).layout(2, 64, 16)?;
    /// let options = AttentionOptions::default().scale(1.0);
    /// let (out, _) = attention_with_tensors(x.clone(), x.clone(), x, tensors, &layout, options)?;
    /// let grads = out.powi_scalar(2).sum().backward();
    /// assert_eq!(buckets.grad(&grads).unwrap().dims(), [2, 32]);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn relative_bias(mut self, table: Tensor<2>) -> Self {
        self.relative_bias = Some(table);
        self
    }

    /// What is added to scores, in the dtypes that kernels take.
    pub(crate) fn biases(self, q: &Tensor<4>) -> Biases {
        let sums = accumulate_in(q.dtype().into());
        Biases {
            bias: self.bias,
            relative: self
                .relative_bias
                .map(|table| table.cast(DType::from(sums))),
        }
    }

    pub(crate) fn check(&self, q: &Tensor<4>, layout: &BlockLayout) -> Result<(), AttentionError> {
        if let Some(sinks) = &self.sinks {
            let [heads] = sinks.dims();
            AttentionError::expect_same("sinks' heads", layout.heads(), "the layout's", heads)?;
            AttentionError::expect_same("sinks' device", q.device(), "q's", sinks.device())?;
        }
        if let Some(table) = &self.relative_bias {
            // Its gradient sums over lines that the host lists.
            if layout.device_choice().is_some() && table.device().is_autodiff() {
                return Err(AttentionError::argument(
                    "relative_bias",
                    "without autodiff for a layout that is made on the device",
                    "with",
                ));
            }
            let [heads, distances] = table.dims();
            if heads != 1 && heads != layout.heads() {
                return Err(AttentionError::argument(
                    "relative_bias's heads",
                    format!("{} or 1", layout.heads()),
                    heads,
                ));
            }
            if heads * distances > Self::MAX_DISTANCES {
                return Err(AttentionError::argument(
                    "relative_bias's numbers",
                    format!("at most {}", Self::MAX_DISTANCES),
                    heads * distances,
                ));
            }
            if distances.is_multiple_of(2) {
                return Err(AttentionError::argument(
                    "relative_bias's distances",
                    "an odd number, 2 · reach + 1",
                    distances,
                ));
            }
            AttentionError::expect_same(
                "relative_bias's device",
                q.device(),
                "q's",
                table.device(),
            )?;
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
pub fn attention_with_tensors<'a>(
    q: Tensor<4>,
    k: Tensor<4>,
    v: Tensor<4>,
    tensors: AttentionTensors,
    layout: impl Into<Layout<'a>>,
    options: AttentionOptions,
) -> Result<(Tensor<4>, Tensor<3>), AttentionError> {
    let layout = layout.into();
    check(&q, &k, &v, layout.sizes())?;
    tensors.check(&q, layout.sizes())?;
    let sinks = tensors.sinks.clone();
    let biases = tensors.biases(&q);
    let output = call(q, k, v, biases, layout, options)?;
    let out = Tensor::from_dispatch(output.out);
    let lse = Tensor::from_dispatch(output.lse);
    Ok(match sinks {
        Some(sinks) => {
            let Shares { a, lse, .. } = shares_with(sinks, lse);
            (scaled(out, a), lse)
        }
        None => (out, lse),
    })
}

/// [`attention_with_tensors`], and its weights `p` in block-sparse form, as
/// [`attention_with_weights`](crate::attention_with_weights) returns them: out, lse and weights. The weights are those of the keys, after biases
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
) -> Result<(Tensor<4>, Tensor<3>, BlockSparseTensor), AttentionError> {
    check(&q, &k, &v, layout)?;
    tensors.check(&q, layout)?;
    let sinks = tensors.sinks.clone();
    let biases = tensors.biases(&q);
    let (out, lse, weights) = call_with_weights(q, k, v, biases, layout, options)?;
    let Some(sinks) = sinks else {
        return Ok((out, lse, weights));
    };
    let Shares { a, lse, .. } = shares_with(sinks, lse);
    let weights = weights.times_rows(a.clone().detach());
    Ok((scaled(out, a), lse, weights))
}

/// The sink is one more part of the keys, whose output is 0.
fn shares_with(sinks: Tensor<1>, lse: Tensor<3>) -> Shares {
    let heads = sinks.dims()[0];
    let sinks = sinks.cast(lse.dtype()).reshape([1, heads, 1]);
    let sinks = sinks.expand(lse.dims());
    shares(lse, sinks)
}

/// The rows of `out` times their shares.
fn scaled(out: Tensor<4>, shares: Tensor<3>) -> Tensor<4> {
    let dtype = out.dtype();
    let out = out.cast(shares.dtype()) * shares.unsqueeze_dim(3);
    out.cast(dtype)
}
