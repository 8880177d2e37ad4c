//! The choice of keys by their scores.

use std::cmp::Ordering;
use std::collections::BTreeSet;

use super::super::CacheError;
use super::{EvictionBudget, EvictionConfig, EvictionScore, ScoreSmoothing};

/// The places of the best scores, ascending: ties go to the later, NaN sorts last.
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

/// Of each head's keys the places that Ada-KV keeps, ascending: each head's `⌊alpha · capacity⌋` best ones, and for the rest of `heads · capacity` the best of what
/// is left over all heads, ties go to the lower head, then to the later key.
///
/// # Errors
/// [`CacheError::Argument`] if alpha is not from 0 to 1.
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

/// Votes pooled over `pool` adjacent keys, with nothing outside.
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
    /// The places of the keys that each KV head of a layer keeps, ascending, from the scores of those it has, oldest first. A layer's heads have `capacity` keys on
    /// average: [`Self::capacity`], or what [`Self::layer_capacities`] says.
    ///
    /// Scores of [`EvictionScore::LastRow`] and [`EvictionScore::Votes`] are attention, means over heads and queries; votes are pooled here.
    ///
    /// # Errors
    /// [`CacheError::Argument`] if the heads have unequally many keys where they cannot, as all of them keep the same.
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

    /// Sinks, and where the recent keys begin.
    fn outside(&self, keys: usize) -> (usize, usize) {
        let sinks = self.sinks.min(keys);
        (sinks, keys.saturating_sub(self.recent).max(sinks))
    }

    /// The scores of the keys that are neither sinks nor recent.
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

/// Scores compared, NaN lowest.
fn worth(a: f32, b: f32) -> Ordering {
    a.partial_cmp(&b)
        .unwrap_or_else(|| b.is_nan().cmp(&a.is_nan()))
}
