use std::sync::Arc;

use blocksparse::{Dropout, ProductPrecision, ensure};
use burn::tensor::DType;

use crate::error::OpError;

/// Options of attention. Build them from [`Default`]:
///
/// ```
/// use burn_blocksparse::{AttentionOptions, WeightsMode};
///
/// let options = AttentionOptions::default().softcap(30.0).weights(WeightsMode::Store);
/// assert_eq!(options.softcap, Some(30.0));
/// ```
#[derive(Clone, Debug, Default, PartialEq)]
#[must_use]
#[non_exhaustive]
pub struct AttentionOptions {
    /// Factor of the scores `q · kᵀ`; default `1 / √head_dim`.
    pub scale: Option<f64>,
    /// Softcap `c`: scores become `c · tanh(score / c)` after scaling and before masking (Gemma 2).
    pub softcap: Option<f64>,
    /// ALiBi slopes, one per head: scores get `−slope · |i − j|` after the softcap. See [`alibi`](Self::alibi).
    pub alibi: Option<Arc<[f64]>>,
    /// Attention dropout.
    pub dropout: Option<Dropout>,
    /// Threshold `t`: tiles whose scores are all more than `t` below the maxima of their rows are skipped. See
    /// [`softmax_threshold`](Self::softmax_threshold).
    pub softmax_threshold: Option<f64>,
    /// Storage of attention weights for the backward pass.
    pub weights: WeightsMode,
    /// Precision of matmul operands.
    pub precision: ProductPrecision,
    /// True if each row's largest score is also returned. [`SparseAttentionCall::max_scores`](crate::SparseAttentionCall::max_scores) sets it.
    pub max_scores: bool,
    /// Implementation of attention to blocks that each query selected.
    pub dispatch_mode: DispatchMode,
}

/// Implementation of attention to blocks that each query selected (`attention_selected`, `Nsa`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum DispatchMode {
    /// Each query attends to its own list, if the device has kernels that support the call and blocks are not so long that
    /// [`GroupByBlock`](Self::GroupByBlock) is faster. Otherwise as `GroupByBlock`. `SelectedBlocks::explain` tells which one runs.
    #[default]
    Auto,
    /// Queries are grouped by the block that they selected and attend to that block alone. Then the parts are merged.
    GroupByBlock,
}

/// Storage of attention probabilities for the backward pass. The gradients are the same.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum WeightsMode {
    /// Store q, k, v, out and lse; recompute the attention probabilities in the backward pass. Memory O(n · d).
    #[default]
    Recompute,
    /// Also store the block-sparse attention probabilities, `[batch, blocks, block_size, block_size]`.
    Store,
}

impl AttentionOptions {
    blocksparse::setters! {
        /// Sets the factor of the scores.
        scale: Some(f64),
        /// Sets the softcap.
        softcap: Some(f64),
    }

    /// Adds linear biases by distance to the scores, ALiBi (Press et al., 2022): query `i` and key `j` of head `h` get `−slopes[h] · |i − j|`, after scale and
    /// softcap. `i` and `j` are positions as in patterns: with `seq_q ≠ seq_kv` query row `r` has position `r + seq_kv − seq_q`. The biases are computed from
    /// positions together with the scores; no n × n tensor is created. The slopes are constants. [`alibi_slopes`] returns those of the paper.
    ///
    /// ```
    /// use burn_blocksparse::{AttentionOptions, alibi_slopes};
    ///
    /// let options = AttentionOptions::default().alibi(alibi_slopes(8));
    /// assert_eq!(options.alibi.unwrap()[0], 0.5);
    /// ```
    pub fn alibi(mut self, slopes: impl Into<Arc<[f64]>>) -> Self {
        self.alibi = Some(slopes.into());
        self
    }

    /// Returns the dropout if its probability is not 0.
    #[doc(hidden)]
    pub fn active_dropout(&self) -> Option<Dropout> {
        self.dropout.filter(|dropout| dropout.probability > 0.0)
    }

    blocksparse::setters! {
        /// Applies attention dropout after the softmax: `out[i] = Σ_j p[i, j] · mask[i, j] / (1 − probability) · v[j]`. The backward pass
        /// uses the same mask. lse and returned weights are those before dropout. The mask depends on the seed and the pair alone
        /// ([`Dropout`]), so use a different seed for every training step and every layer.
        dropout: Some(Dropout),
        /// Skips tiles of queries and keys with negligible weights: those whose scores, after scale, softcap and biases, are all more than `t` below the
        /// largest scores of their rows so far. Each skipped weight is below `exp(−t)`, so a row of `n` keys loses less than `n · exp(−t)` of its weight: with
        /// `t = 16` and 64K keys less than 0.8%. The unit is that of scores, natural logarithms. By default nothing is skipped.
        ///
        /// A kernel still computes all scores. It omits exponentials and the product with values and, in the backward pass, four of five products of tiles
        /// whose weights are all below `exp(−t)`. Tiles are those of the kernel, so skipped pairs differ by device and dtype; the same call gives the same
        /// bits. Row maxima and returned or stored weights cover all pairs. CPU backends, paged decoding, and the cases that the [plan](crate::AttentionPlan)
        /// names compute exactly.
        softmax_threshold: Some(f64),
        /// Sets what is stored for the backward pass.
        weights: WeightsMode,
        /// Sets the precision of matmul operands.
        precision: ProductPrecision,
        /// Sets whether each row's largest score is also returned.
        max_scores: bool,
        /// Sets the implementation of attention to blocks that each query selected.
        dispatch_mode: DispatchMode,
    }

    /// Returns the factor of the scores for a head dimension.
    pub fn scale_for(&self, head_dim: usize) -> f64 {
        self.scale.unwrap_or_else(|| 1.0 / (head_dim as f64).sqrt())
    }

    /// Checks the options for a layout of `heads` heads and tensors of `dtype`.
    #[doc(hidden)]
    pub fn validate(&self, heads: usize, dtype: DType) -> Result<(), OpError> {
        // Scores are f32, or f64 for f64 tensors.
        let (largest, least, number) = match dtype {
            DType::F64 => (f64::MAX, f64::MIN_POSITIVE, "f64"),
            _ => (f64::from(f32::MAX), f64::from(f32::MIN_POSITIVE), "f32"),
        };
        let finite = |x: f64| x.abs() <= largest;
        let probability = self.dropout.map_or(0.0, |dropout| dropout.probability);
        ensure! { OpError;
            self.scale.is_none_or(finite) => "options.scale", format!("finite in {number}"), self.scale.unwrap_or_default();
            self.softcap.is_none_or(|softcap| finite(softcap) && softcap >= least) =>
                "options.softcap", format!("positive and finite in {number}"), self.softcap.unwrap_or_default();
            self.softmax_threshold.is_none_or(|threshold| finite(threshold) && threshold > 0.0) =>
                "options.softmax_threshold", format!("positive and finite in {number}"), self.softmax_threshold.unwrap_or_default();
            (0.0..1.0).contains(&probability) => "options.dropout's probability", "at least 0 and less than 1", probability;
        }
        let Some(slopes) = &self.alibi else {
            return Ok(());
        };
        let name = "options.alibi's slopes";
        OpError::expect_same(name, heads, "the layout's heads", slopes.len())?;
        let wrong = slopes.iter().find(|slope| !finite(**slope));
        ensure! { OpError; wrong.is_none() => name, format!("finite in {number}"), wrong.unwrap_or(&0.0); }
        Ok(())
    }
}

/// Returns the ALiBi slopes: `2^(−8 · (h + 1) / heads)` if `heads` is a power of two. Otherwise the slopes of the next lower power of two,
/// followed by every other slope of twice that power (Press et al., 2022, and its reference implementation).
pub fn alibi_slopes(heads: usize) -> Vec<f64> {
    let geometric =
        |count: usize| (1..=count).map(move |h| 2f64.powf(-8.0 * h as f64 / count as f64));
    match heads.checked_ilog2() {
        None => Vec::new(),
        Some(log) => {
            let power = 1 << log;
            let between = geometric(2 * power).step_by(2);
            geometric(power).chain(between).take(heads).collect()
        }
    }
}
