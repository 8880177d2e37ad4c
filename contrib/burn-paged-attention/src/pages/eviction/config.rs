//! Configuration of eviction: score, budget and numbers of keys.

use serde::{Deserialize, Serialize};

use super::super::CacheError;

/// Score of a key. The queries of heads that share a KV head are pooled.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum EvictionScore {
    /// Sum of the attention from all later queries (H2O: Zhang et al., 2023).
    Sum,
    /// Sum divided by the number of heads and queries that saw the key, so that old keys have no advantage (kvpress' `ObservedAttentionPress`).
    Mean,
    /// Attention of the newest query, averaged over all heads of the layer: all KV heads retain the same keys (TOVA: Oren et al., 2024, section 3).
    LastRow,
    /// Mean attention of the last `window` queries, smoothed over `pool` adjacent keys (SnapKV: Li et al., 2024). Keys of the window itself are
    /// always retained.
    Votes {
        /// Number of queries that vote.
        window: usize,
        /// Width of the smoothing in keys, an odd number; 1 turns it off.
        pool: usize,
        /// Kind of smoothing.
        kind: ScoreSmoothing,
    },
    /// Higher for keys of smaller norm (Devoto et al., 2024).
    KeyNorm,
    /// Provided by the caller.
    #[serde(rename = "given")]
    Custom,
}

/// Smoothing of the scores of adjacent keys.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ScoreSmoothing {
    /// Sum divided by the width of the pool; zeros outside of the competing keys.
    #[default]
    Average,
    /// Maximum.
    Max,
}

/// Distribution of the retained keys over layers and KV heads.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum EvictionBudget {
    /// Equal numbers.
    #[default]
    Uniform,
    /// More keys in earlier layers (PyramidKV: Cai et al., 2024, section 3): [`pyramid_budgets`](super::pyramid_budgets).
    Pyramid {
        /// The last layer's share of the mean is 1 / β; the paper's is 20.
        beta: f64,
    },
    /// Divided within a layer by the heads' scores (Ada-KV: Feng et al., 2024): [`adaptive`](super::adaptive).
    Adaptive {
        /// Guaranteed share of the mean for each head; kvpress' is 0.2.
        alpha: f64,
    },
}

/// Eviction down to `capacity` keys per layer and KV head, once there are more than `capacity + slack`. It retains the first `sinks`, the last
/// `recent`, and the best of the others by score.
///
/// ```
/// use burn_paged_attention::pages::EvictionConfig;
///
/// // Two thousand keys for each head, by the votes of the last 64 queries.
/// let config = EvictionConfig::snapkv(2048);
/// assert_eq!((config.capacity(), config.recent, config.slack), (2048, 64, 256));
/// config.validate()?;
/// // The five that the newest query looks at most, and never more than five.
/// EvictionConfig::tova(5).with_slack(0).validate()?;
/// # Ok::<(), burn_paged_attention::pages::CacheError>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[must_use]
#[non_exhaustive]
pub struct EvictionConfig {
    /// Score of a key.
    pub score: EvictionScore,
    /// Number of first keys, which are never evicted.
    pub sinks: usize,
    /// Number of last keys, which are never evicted.
    pub recent: usize,
    /// Number of other keys that are retained by score, per layer and KV head or on average.
    pub heavy: usize,
    /// Number of keys above the capacity that triggers an eviction, so that not every token causes one.
    pub slack: usize,
    /// Distribution of the retained keys over layers and heads.
    pub budget: EvictionBudget,
}

impl EvictionConfig {
    /// Combines a score with sinks, recent and heavy keys. Slack is 256 (kvpress' `DecodingPress` evicts every 512 tokens); the budget is uniform.
    pub fn combined(score: EvictionScore, sinks: usize, recent: usize, heavy: usize) -> Self {
        Self {
            score,
            sinks,
            recent,
            heavy,
            slack: 256,
            budget: EvictionBudget::Uniform,
        }
    }

    /// H2O: retains the `heavy` keys with the most attention so far, and the last `recent`.
    pub fn h2o(heavy: usize, recent: usize) -> Self {
        Self::combined(EvictionScore::Sum, 0, recent, heavy)
    }

    /// Like [`Self::h2o`], by mean attention.
    pub fn h2o_mean(heavy: usize, recent: usize) -> Self {
        Self::combined(EvictionScore::Mean, 0, recent, heavy)
    }

    /// Like [`Self::h2o`], with shares of a prompt's tokens; the paper's are 0.1 and 0.1.
    ///
    /// # Errors
    /// [`CacheError::Argument`] if a share is not above 0 or exceeds 1.
    pub fn h2o_shares(prompt: usize, heavy: f64, recent: f64) -> Result<Self, CacheError> {
        let keys = |argument, share: f64| {
            blocksparse::ensure! { CacheError; share > 0.0 && share <= 1.0 => argument, "above 0, at most 1", share; }
            Ok((share * prompt as f64) as usize)
        };
        Ok(Self::h2o(keys("heavy", heavy)?, keys("recent", recent)?))
    }

    /// TOVA: retains the keys with the most attention of the newest query, and the newest key.
    pub fn tova(capacity: usize) -> Self {
        Self::combined(EvictionScore::LastRow, 0, 1, capacity.saturating_sub(1))
    }

    /// SnapKV with its authors' window of 64 queries and pool of 5 keys; their capacity is 2,048.
    pub fn snapkv(capacity: usize) -> Self {
        Self::snapkv_with(capacity, 64, 5, ScoreSmoothing::Average)
    }

    /// SnapKV: retains the last `window` keys, and those of the others with the most attention of the last `window` queries.
    pub fn snapkv_with(capacity: usize, window: usize, pool: usize, kind: ScoreSmoothing) -> Self {
        let score = EvictionScore::Votes { window, pool, kind };
        Self::combined(score, 0, window, capacity.saturating_sub(window))
    }

    /// Retains the keys of smallest norm.
    pub fn key_norm(capacity: usize) -> Self {
        Self::combined(EvictionScore::KeyNorm, 0, 0, capacity)
    }

    /// Retains the keys with the caller's highest scores.
    pub fn importance(capacity: usize) -> Self {
        Self::combined(EvictionScore::Custom, 0, 0, capacity)
    }

    /// Sets the number of first keys that are retained, at the expense of heavy keys.
    pub fn with_sinks(mut self, sinks: usize) -> Self {
        self.heavy = (self.heavy + self.sinks).saturating_sub(sinks);
        self.sinks = sinks;
        self
    }

    blocksparse::setters! {
        /// Sets the number of keys above the capacity that triggers an eviction.
        with_slack => slack: usize,
        /// Sets the distribution of the retained keys over layers and heads.
        with_budget => budget: EvictionBudget,
    }

    /// Returns the keys that are retained per layer and KV head, or on average.
    pub fn capacity(&self) -> usize {
        (self.sinks.saturating_add(self.recent)).saturating_add(self.heavy)
    }

    /// Returns whether all KV heads of a layer retain the same keys.
    pub fn is_shared(&self) -> bool {
        self.score == EvictionScore::LastRow
    }

    /// Returns whether a layer's KV heads retain equally many keys.
    pub fn is_even_in_layers(&self) -> bool {
        !matches!(self.budget, EvictionBudget::Adaptive { .. })
    }

    /// Returns whether all layers retain equally many keys.
    pub fn is_even(&self) -> bool {
        self.budget == EvictionBudget::Uniform
    }

    /// Checks the values.
    ///
    /// # Errors
    /// [`CacheError::Argument`] naming the value and its range.
    pub fn validate(&self) -> Result<(), CacheError> {
        let most = super::super::config::MOST_POSITIONS;
        let with_slack = self.capacity().saturating_add(self.slack);
        blocksparse::ensure! { CacheError; with_slack <= most => "capacity", format!("at most {most} with the slack"), with_slack; }
        if let EvictionScore::Votes { window, pool, .. } = self.score {
            blocksparse::ensure! {
                CacheError;
                window != 0 => "window", "at least 1", window;
                window < self.capacity() => "window", format!("below the capacity of {} keys", self.capacity()), window;
                self.recent >= window => "recent", format!("at least the {window} queries that vote"), self.recent;
                pool % 2 != 0 => "pool", "an odd number", pool;
            }
        }
        let &Self { sinks, recent, .. } = self;
        let least = sinks.saturating_add(recent).saturating_add(1);
        blocksparse::ensure! {
            CacheError;
            self.heavy > 0 => "capacity",
                format!("at least {least}: {sinks} sinks, {recent} recent keys and one for its score"), self.capacity();
        }
        match self.budget {
            EvictionBudget::Uniform => {}
            EvictionBudget::Pyramid { beta } => {
                blocksparse::ensure! { CacheError; beta > 1.0 && beta.is_finite() => "beta", "a number above 1", beta; }
            }
            EvictionBudget::Adaptive { alpha } => blocksparse::ensure! {
                CacheError;
                !self.is_shared() => "budget", "uniform or pyramid: all heads keep the same keys", "adaptive";
                (0.0..=1.0).contains(&alpha) => "alpha", "from 0 to 1", alpha;
            },
        }
        Ok(())
    }

    /// Returns each layer's number of keys per head, on average over the heads, in a sequence of `tokens` tokens.
    ///
    /// # Errors
    /// Those of [`pyramid_budgets`].
    pub fn layer_capacities(&self, layers: usize, tokens: usize) -> Result<Vec<usize>, CacheError> {
        let capacity = self.capacity();
        match self.budget {
            EvictionBudget::Pyramid { beta } => {
                let outside = self.sinks + self.recent;
                pyramid_budgets(layers, capacity, outside, beta, tokens)
            }
            EvictionBudget::Uniform | EvictionBudget::Adaptive { .. } => Ok(vec![capacity; layers]),
        }
    }
}

/// Returns each layer's number of keys per head by PyramidKV (Cai et al., 2024, section 3), with mean `capacity`. Each layer has fewer than the one
/// before by the same number, not counting the last `window` keys of each. `tokens` is the number of keys available. Largest remainders round to
/// whole keys, so that the sum is `layers · capacity`.
///
/// # Errors
/// [`CacheError::Argument`] if β is not above 1, or the capacity is not above the window.
pub fn pyramid_budgets(
    layers: usize,
    capacity: usize,
    window: usize,
    beta: f64,
    tokens: usize,
) -> Result<Vec<usize>, CacheError> {
    blocksparse::ensure! {
        CacheError;
        beta > 1.0 && beta.is_finite() => "beta", "a number above 1", beta;
        capacity > window => "capacity", format!("above the window of {window} keys"), capacity;
    }
    if tokens <= capacity || layers < 2 {
        return Ok(vec![capacity; layers]);
    }
    let base = (capacity - window) as f64;
    let mut least = base / beta;
    let mut most = 2.0 * base - least;
    let there_are = (tokens - window) as f64;
    if most >= there_are {
        most = there_are;
        least = 2.0 * base - most;
    }
    let step = (most - least) / (layers - 1) as f64;
    let exact = (0..layers).map(|layer| most - layer as f64 * step + window as f64);
    let exact: Vec<f64> = exact.collect();
    let mut whole: Vec<usize> = exact.iter().map(|keys| keys.floor() as usize).collect();
    let missing = (layers * capacity).saturating_sub(whole.iter().sum());
    let mut order: Vec<usize> = (0..layers).collect();
    // Remainders that differ by rounding alone count as equal: earlier layers come first.
    let remainder = |layer: usize| ((exact[layer] - exact[layer].floor()) * 1e6).round() as i64;
    order.sort_by_key(|&layer| -remainder(layer));
    for &layer in order.iter().take(missing) {
        whole[layer] += 1;
    }
    Ok(whole)
}
