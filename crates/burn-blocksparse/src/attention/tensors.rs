//! Optional tensors of a call besides queries, keys and values.

use blocksparse::BlockLayout;

use crate::base::prelude::*;
use crate::base::values::ScoreTensors;
use crate::check::same_device;

/// Optional tensors of a [`SparseAttentionCall`](crate::SparseAttentionCall) besides queries, keys and values. Build them from [`Default`].
#[derive(Clone, Debug, Default)]
#[must_use]
#[non_exhaustive]
pub struct AttentionTensors {
    /// `[heads]`, any float dtype: the score of an additional key of each head with value 0.
    pub sinks: Option<Tensor<1>>,
    /// `[batch or 1, heads or 1, seq_q or 1, seq_kv]`, in the dtype of q, k and v: added to the scores.
    pub bias: Option<Tensor<4>>,
    /// `[heads or 1, 2 · reach + 1]`, any float dtype: a bias per distance between key and query.
    pub relative_bias: Option<Tensor<2>>,
}

impl AttentionTensors {
    /// Maximum number of elements of a relative bias over all heads: kernels add distances to offsets as signed 32-bit integers.
    pub const MAX_DISTANCES: usize = 1 << 30;

    blocksparse::setters! {
        /// Sets the sink logits, `[heads]`: queries of head `h` attend to an additional key with score `sinks[h]` and value 0, so the
        /// weights of the keys may sum to less than 1 (Miller, "Attention is off by one", 2023; gpt-oss learns the logits).
        sinks: Some(Tensor<1>),
        /// Sets a bias of the scores, `[batch or 1, heads or 1, seq_q or 1, seq_kv]`, added after scale and softcap. Its gradient has its shape and is summed
        /// over broadcast dimensions in a fixed order. Values must be finite with magnitudes up to about 1e8; mask pairs with the layout instead. For biases
        /// linear in the distance use [`AttentionOptions::alibi`](crate::AttentionOptions::alibi), which needs no tensor.
        bias: Some(Tensor<4>),
        /// Sets a relative bias, `[heads or 1, 2 · reach + 1]`: query `i` and key `j` of head `h` get `table[h, clamp(j − i, −reach, reach) + reach]`, after
        /// scale and softcap (Shaw et al., 2018, with a scalar per distance). `i` and `j` are positions: with `seq_q ≠ seq_kv` query row `r` has position `r +
        /// seq_kv − seq_q`. No `seq_q × seq_kv` tensor is created. The table has a gradient, summed in a fixed order. It is computed in the dtype of sums. The
        /// limits on values are those of the bias.
        ///
        /// For buckets of distances as in T5 (Raffel et al., 2020), use a smaller table and select an entry for each distance:
        ///
        /// ```
        /// use burn::tensor::{Device, Distribution, Int, Tensor, TensorData};
        /// use burn_blocksparse::{Pattern, SparseAttentionCall};
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
        /// let layout = Pattern::window(20).layout(2, 64, 16)?;
        /// let call = SparseAttentionCall::new(x.clone(), x.clone(), x, &layout);
        /// let out = call.relative_bias(table).scale(1.0).run()?.out;
        /// let grads = out.powi_scalar(2).sum().backward();
        /// assert_eq!(buckets.grad(&grads).unwrap().dims(), [2, 32]);
        /// # Ok::<(), Box<dyn std::error::Error>>(())
        /// ```
        relative_bias: Some(Tensor<2>),
    }

    /// Returns the tensors that are added to scores, in the form that backends take.
    #[doc(hidden)]
    pub fn scores(self, q: &Tensor<4>) -> ScoreTensors<Dispatch> {
        let sums = accumulate_in(q.dtype().into());
        let relative = (self.relative_bias).map(|table| table.cast(DType::from(sums)));
        ScoreTensors {
            bias: self.bias.map(Tensor::into_dispatch).into(),
            relative_bias: relative.map(Tensor::into_dispatch).into(),
        }
    }

    #[doc(hidden)]
    pub fn check(&self, q: &Tensor<4>, layout: &BlockLayout) -> Result<(), OpError> {
        if let Some(sinks) = &self.sinks {
            let [heads] = sinks.dims();
            OpError::expect_same("sinks' heads", layout.heads(), "the layout's", heads)?;
            same_device("sinks' device", &q.device(), "q's", &sinks.device())?;
        }
        if let Some(table) = &self.relative_bias {
            // Its gradient sums over lines that only the host can list.
            blocksparse::ensure! {
                OpError;
                layout.device_choice().is_none() || !table.device().is_autodiff()
                    => "relative_bias", "without autodiff for a layout that is made on the device", "with";
            }
            let [heads, distances] = table.dims();
            blocksparse::ensure! {
                OpError;
                heads == 1 || heads == layout.heads() => "relative_bias's heads", format!("{} or 1", layout.heads()), heads;
                heads * distances <= Self::MAX_DISTANCES => "relative_bias's numbers", format!("at most {}", Self::MAX_DISTANCES), heads * distances;
                !distances.is_multiple_of(2) => "relative_bias's distances", "an odd number, 2 · reach + 1", distances;
            }
            let device = table.device();
            same_device("relative_bias's device", &q.device(), "q's", &device)?;
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
            blocksparse::ensure! { OpError; got == 1 || got == expected => argument, format!("{expected} or 1"), got; }
        }
        OpError::expect_same("bias's seq_kv", layout.seq_kv(), "the layout's", seq_kv)?;
        OpError::expect_same("bias's dtype", q.dtype(), "q's", bias.dtype())?;
        same_device("bias's device", &q.device(), "q's", &bias.device())
    }
}
