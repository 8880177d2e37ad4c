//! Keys of layers.

use super::super::CacheError;
use super::{EvictionBudget, EvictionConfig};

/// The keys of each layer's heads by PyramidKV (Cai et al., 2024, section 3), whose mean is `capacity`: fewer in each later layer by the same number, the last
/// `window` of each not counted. `tokens` is what there is to keep. Rounded to whole keys by largest remainders, so that they sum up to `layers · capacity`.
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
    // Remainders that differ by rounding alone are equal: those of earlier layers come first.
    let remainder = |layer: usize| ((exact[layer] - exact[layer].floor()) * 1e6).round() as i64;
    order.sort_by_key(|&layer| -remainder(layer));
    for &layer in order.iter().take(missing) {
        whole[layer] += 1;
    }
    Ok(whole)
}

impl EvictionConfig {
    /// The keys of each layer's heads, on average over the heads, in a sequence of so many tokens.
    ///
    /// # Errors
    /// As [`pyramid_budgets`].
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
