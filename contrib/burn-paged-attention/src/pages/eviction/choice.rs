//! Selection of keys by score.

use std::cmp::Ordering;
use std::collections::BTreeSet;

use super::super::CacheError;
use super::{EvictionBudget, EvictionConfig, EvictionScore, ScoreSmoothing};

/// Returns the indices of the `count` best scores, ascending. Ties go to the later index; NaN is the lowest score.
pub fn best(scores: &[f32], count: usize) -> Vec<usize> {
    let mut places: Vec<usize> = (0..scores.len()).collect();
    if count < places.len() {
        let better = |a: &usize, b: &usize| worth(scores[*b], scores[*a]).then(b.cmp(a));
        places.select_nth_unstable_by(count, better);
        places.truncate(count);
        places.sort_unstable();
    }
    places
}

/// Returns the indices of the keys that Ada-KV retains of each head, ascending. Each head gets its `⌊alpha · capacity⌋` best keys; the rest of
/// `heads · capacity` are the best remaining keys over all heads. Ties go to the lower head, then to the later key.
///
/// # Errors
/// [`CacheError::Argument`] if alpha is not between 0 and 1.
pub fn adaptive(
    scores: &[&[f32]],
    capacity: usize,
    alpha: f64,
) -> Result<Vec<Vec<usize>>, CacheError> {
    blocksparse::ensure! { CacheError; (0.0..=1.0).contains(&alpha) => "alpha", "from 0 to 1", alpha; }
    let certain = (alpha * capacity as f64) as usize;
    let mut kept: Vec<BTreeSet<usize>> = (scores.iter())
        .map(|scores| best(scores, certain).into_iter().collect())
        .collect();
    let taken: usize = kept.iter().map(BTreeSet::len).sum();
    let mut rest: Vec<(usize, usize)> = Vec::new();
    for (head, (scores, kept)) in scores.iter().zip(&kept).enumerate() {
        let left = (0..scores.len()).filter(|place| !kept.contains(place));
        rest.extend(left.map(|place| (head, place)));
    }
    rest.sort_unstable_by(|&(a, x), &(b, y)| {
        let by_score = worth(scores[b][y], scores[a][x]);
        by_score.then(a.cmp(&b)).then(y.cmp(&x))
    });
    let more = (scores.len() * capacity).saturating_sub(taken);
    for &(head, place) in rest.iter().take(more) {
        kept[head].insert(place);
    }
    Ok(kept
        .into_iter()
        .map(|kept| kept.into_iter().collect())
        .collect())
}

/// Pools votes over `pool` adjacent keys, with zeros outside.
pub fn pooled_votes(votes: &[f32], pool: usize, kind: ScoreSmoothing) -> Vec<f32> {
    let reach = pool / 2;
    let neighbours = |at: usize| {
        let end = votes.len().min(at + reach + 1);
        &votes[at.saturating_sub(reach)..end]
    };
    let pooled = (0..votes.len()).map(|at| {
        let near = neighbours(at).iter();
        match kind {
            ScoreSmoothing::Average => near.sum::<f32>() / pool as f32,
            ScoreSmoothing::Max => near.copied().fold(f32::NEG_INFINITY, f32::max),
        }
    });
    pooled.collect()
}

impl EvictionConfig {
    /// Selects the keys that each KV head of a layer retains, as ascending indices, from the scores of its stored keys, oldest first. The layer's
    /// heads retain `capacity` keys on average: [`Self::capacity`], or that of [`Self::layer_capacities`].
    ///
    /// Scores of [`EvictionScore::LastRow`] and [`EvictionScore::Votes`] are attention averaged over heads and queries; this function pools the
    /// votes.
    ///
    /// # Errors
    /// [`CacheError::Argument`] if all heads retain the same keys but have different numbers of scores.
    pub fn choose(
        &self,
        scores: &[&[f32]],
        capacity: usize,
    ) -> Result<Vec<Vec<usize>>, CacheError> {
        let heavy = capacity.saturating_sub(self.sinks + self.recent);
        let contests: Vec<Vec<f32>> = scores.iter().map(|scores| self.contest(scores)).collect();
        let of_heads = match self.budget {
            _ if self.is_shared() => {
                let first = scores.first().map_or(0, |scores| scores.len());
                if let Some(other) = scores.iter().find(|scores| scores.len() != first) {
                    let expected = format!("of {first} keys, as those of the first head");
                    return Err(CacheError::argument("scores", expected, other.len()));
                }
                let heads = contests.len() as f32;
                let mut mean = vec![0.0; contests.first().map_or(0, Vec::len)];
                for contest in &contests {
                    (mean.iter_mut().zip(contest)).for_each(|(mean, score)| *mean += score / heads);
                }
                vec![best(&mean, heavy); contests.len()]
            }
            EvictionBudget::Adaptive { alpha } => {
                let contests: Vec<&[f32]> = contests.iter().map(Vec::as_slice).collect();
                adaptive(&contests, heavy, alpha)?
            }
            EvictionBudget::Uniform | EvictionBudget::Pyramid { .. } => contests
                .iter()
                .map(|contest| best(contest, heavy))
                .collect(),
        };
        let kept = scores.iter().zip(of_heads).map(|(scores, chosen)| {
            let (sinks, end) = self.outside(scores.len());
            let middle = chosen.into_iter().map(|place| place + sinks);
            (0..sinks).chain(middle).chain(end..scores.len()).collect()
        });
        Ok(kept.collect())
    }

    /// Returns the number of sinks and the index of the first recent key.
    fn outside(&self, keys: usize) -> (usize, usize) {
        let sinks = self.sinks.min(keys);
        (sinks, keys.saturating_sub(self.recent).max(sinks))
    }

    /// Returns the scores of the keys that are neither sinks nor recent.
    fn contest(&self, scores: &[f32]) -> Vec<f32> {
        let (sinks, end) = self.outside(scores.len());
        match self.score {
            EvictionScore::Votes { window, pool, kind } => {
                let voted = scores.len().saturating_sub(window).max(end);
                pooled_votes(&scores[..voted], pool, kind)[sinks..end].to_vec()
            }
            _ => scores[sinks..end].to_vec(),
        }
    }
}

/// Compares scores; NaN is lowest.
fn worth(a: f32, b: f32) -> Ordering {
    a.partial_cmp(&b)
        .unwrap_or_else(|| b.is_nan().cmp(&a.is_nan()))
}
