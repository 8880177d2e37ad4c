//! Rules that select the blocks of a row by score, on the host.

use crate::LayoutError;

/// Kind of a block's score.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum EstimateKind {
    /// An estimate of the attention that the block receives, at least 0. The score is its own weight. +∞ is not an estimate: it marks a block that an estimator
    /// requires regardless of other scores. Such a block ranks first and has weight 0. A rule drops it only if its budget is exhausted.
    Probability,
    /// Any number. The weights of a row are the softmax of its scores over the visible blocks.
    Logit,
}

/// Number of highest-scoring blocks that a row selects. Ties go to the earlier block; NaN sorts last.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Budget {
    /// This number, including forced blocks (more if more are forced).
    TopK(usize),
    /// This share of the visible blocks, rounded up to whole blocks. The share itself is rounded down to a multiple of 2⁻¹⁴.
    Ratio(f64),
    /// The fewest blocks whose weights sum to a share of the weights of all visible blocks.
    TopP {
        /// Share in (0, 1]. 1 keeps all blocks.
        p: f64,
        /// Minimum number of blocks, including forced ones.
        min: usize,
        /// Maximum number of blocks, including forced ones (more if more are forced).
        max: usize,
    },
    /// All blocks whose weight is at least this factor, in (0, 1], times the largest weight.
    MinP(f64),
}

impl Budget {
    /// Returns [`Budget::TopP`] without limits on the number of blocks.
    pub fn top_p(p: f64) -> Self {
        let (min, max) = (0, usize::MAX);
        Self::TopP { p, min, max }
    }
}

/// Blocks that are always selected if they are visible.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Always {
    /// Number of first key blocks (attention sinks).
    pub first: usize,
    /// Number of key blocks up to the queries' own: 1 selects the blocks that contain the row's own positions, 2 also the block before them.
    pub local: usize,
}

/// Rule that selects the blocks of a row by score.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Rule {
    /// Kind of the scores.
    pub kind: EstimateKind,
    /// Number of selected blocks.
    pub keep: Budget,
    /// Blocks that are always selected.
    pub forced: Always,
}

/// Grid of scores. A row represents `query_rows` adjacent queries, a column a block of keys. The last query is aligned with the last key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ScoreGrid {
    /// Number of queries in a row, which share a selection.
    pub query_rows: usize,
    /// Number of keys in a block.
    pub block: usize,
    /// Number of queries.
    pub seq_q: usize,
    /// Number of keys.
    pub seq_kv: usize,
    /// True if queries see no later keys.
    pub causal: bool,
}

impl ScoreGrid {
    /// Returns the number of rows of scores.
    pub fn rows(&self) -> usize {
        self.seq_q.div_ceil(self.query_rows)
    }

    /// Returns the number of key blocks.
    pub fn blocks(&self) -> usize {
        self.seq_kv.div_ceil(self.block)
    }

    /// Returns the positions of the first and the last query of a row.
    pub fn positions(&self, row: usize) -> [i64; 2] {
        let offset = self.seq_kv as i64 - self.seq_q as i64;
        let first = row * self.query_rows;
        let last = (first + self.query_rows).min(self.seq_q) - 1;
        [first as i64 + offset, last as i64 + offset]
    }

    fn start(&self, block: usize) -> i64 {
        (block * self.block) as i64
    }

    /// Returns whether some query of a row may see some key of a block.
    pub fn is_visible(&self, row: usize, block: usize) -> bool {
        !self.causal || self.start(block) <= self.positions(row)[1]
    }

    /// Returns whether a block is always selected.
    pub fn is_forced(&self, row: usize, block: usize, forced: Always) -> bool {
        let [first, last] = self.positions(row);
        let reach = i64::try_from(forced.local).unwrap_or(i64::MAX);
        let reach = reach.saturating_mul(self.block as i64);
        let near = self.start(block) <= last && first - self.start(block) < reach;
        let is_one = block < forced.first || (forced.local > 0 && near);
        is_one && self.is_visible(row, block)
    }
}

/// Bound of scores used as weights, so that sums are finite.
pub const LARGEST: f32 = 7.922_816_3e28; // 2^96

/// Converts a share of blocks to units of 1 / [`WHOLE`].
pub fn parts_of(ratio: f64) -> u32 {
    ((ratio * f64::from(WHOLE)) as u32).max(1)
}

/// The share 1 in these units.
pub const WHOLE: u32 = 1 << 14;

impl Rule {
    /// Checks the rule's parameters.
    ///
    /// # Errors
    /// [`LayoutError::Argument`] if k is 0, a share is not in (0, 1], or a minimum number of blocks is above the maximum.
    pub fn check(&self) -> Result<(), LayoutError> {
        let share = |argument, share: f64| {
            crate::ensure! { LayoutError; share > 0.0 && share <= 1.0 => argument, "above 0 and at most 1", share; }
            Ok(())
        };
        match self.keep {
            Budget::TopK(0) => Err(LayoutError::argument("k", "at least 1", 0)),
            Budget::TopK(_) => Ok(()),
            Budget::Ratio(ratio) => share("ratio", ratio),
            Budget::MinP(above) => share("above", above),
            Budget::TopP { p, min, max } => {
                crate::ensure! { LayoutError; min <= max => "min", format!("at most max, which is {max}"), min; }
                share("p", p)
            }
        }
    }

    /// Returns the maximum number of blocks that a row can select, of `all`.
    pub fn most_blocks(&self, all: usize) -> usize {
        let Always { first, local } = self.forced;
        // The positions of a row lie in at most two key blocks if the row is no longer than a block.
        let near = local.saturating_add(usize::from(local > 0));
        let forced = first.saturating_add(near);
        let kept = match self.keep {
            Budget::TopK(k) => k,
            Budget::Ratio(ratio) => of_visible(all, ratio),
            Budget::TopP { max, .. } => max,
            Budget::MinP(_) => all,
        };
        kept.max(forced).min(all)
    }

    /// Returns which blocks a row of scores selects.
    ///
    /// # Panics
    /// If the number of scores is not the number of blocks.
    pub fn selects(&self, grid: &ScoreGrid, row: usize, scores: &[f64]) -> Vec<bool> {
        self.selects_of(grid, row, scores, |_| true)
    }

    /// Returns which blocks a row of scores selects, where only blocks with `may_choose` are visible.
    ///
    /// # Panics
    /// As [`Self::selects`].
    pub fn selects_of(
        &self,
        grid: &ScoreGrid,
        row: usize,
        scores: &[f64],
        may_choose: impl Fn(usize) -> bool,
    ) -> Vec<bool> {
        assert_eq!(scores.len(), grid.blocks());
        let is_visible = |block: &usize| grid.is_visible(row, *block) && may_choose(*block);
        let visible = (0..scores.len()).filter(is_visible);
        let visible: Vec<usize> = visible.collect();
        let is_forced = |block: &usize| grid.is_forced(row, *block, self.forced);
        let (forced, mut rest): (Vec<usize>, Vec<usize>) =
            visible.iter().partition(|b| is_forced(b));
        let order = |block: usize| match scores[block].is_nan() {
            true => f64::NEG_INFINITY,
            // −0 equals 0.
            false => scores[block] + 0.0,
        };
        rest.sort_by(|&x, &y| order(y).total_cmp(&order(x)));
        let weights = self.weights(scores, &visible);
        let sum = |blocks: &[usize]| blocks.iter().map(|&block| weights[block]).sum::<f64>();
        let up_to = |count: usize| count.saturating_sub(forced.len());
        let count = match self.keep {
            Budget::TopK(k) => up_to(k),
            Budget::Ratio(ratio) => up_to(of_visible(visible.len(), ratio)),
            Budget::TopP { p, min, max } => {
                let wanted = p * sum(&visible);
                let mut have = sum(&forced);
                let is_wanted = |block: &&usize| self.is_wanted(scores[**block]);
                let mut count = rest.iter().filter(is_wanted).count();
                while count < rest.len() && (have < wanted || p >= 1.0) {
                    have += weights[rest[count]];
                    count += 1;
                }
                count.max(up_to(min)).min(up_to(max))
            }
            Budget::MinP(above) => {
                let largest = visible
                    .iter()
                    .map(|&block| weights[block])
                    .fold(0.0, f64::max);
                rest.retain(|&block| {
                    weights[block] >= above * largest || self.is_wanted(scores[block])
                });
                rest.len()
            }
        };
        rest.truncate(count);
        let mut kept = vec![false; scores.len()];
        let all = forced.into_iter().chain(rest);
        all.for_each(|block| kept[block] = true);
        kept
    }

    /// Returns whether an estimator requires a block with this score.
    fn is_wanted(&self, score: f64) -> bool {
        self.kind == EstimateKind::Probability && score == f64::INFINITY
    }

    /// Returns the weight of every block, 0 for an invisible one.
    fn weights(&self, scores: &[f64], visible: &[usize]) -> Vec<f64> {
        let most = f64::from(LARGEST);
        // `max` and `min` ignore NaN.
        let value = |block: usize| match self.kind {
            EstimateKind::Probability if self.is_wanted(scores[block]) => 0.0,
            EstimateKind::Probability => scores[block].max(0.0).min(most),
            EstimateKind::Logit => scores[block].max(-most).min(most),
        };
        let largest = visible
            .iter()
            .map(|&block| value(block))
            .fold(-most, f64::max);
        let mut weights = vec![0.0; scores.len()];
        for &block in visible {
            weights[block] = match self.kind {
                EstimateKind::Probability => value(block),
                EstimateKind::Logit => (value(block) - largest).exp(),
            };
        }
        weights
    }
}

/// Returns the number of blocks for a share of the visible ones.
fn of_visible(visible: usize, ratio: f64) -> usize {
    (visible * parts_of(ratio) as usize).div_ceil(WHOLE as usize)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rule(keep: Budget, forced: Always) -> Rule {
        let kind = EstimateKind::Logit;
        Rule { kind, keep, forced }
    }

    fn of_probabilities(keep: Budget) -> Rule {
        Rule {
            kind: EstimateKind::Probability,
            ..rule(keep, NONE)
        }
    }

    fn kept(rule: &Rule, scores: &[f64]) -> Vec<usize> {
        let grid = ScoreGrid {
            query_rows: 8,
            block: 8,
            seq_q: 8,
            seq_kv: 8 * scores.len(),
            causal: true,
        };
        let kept = rule.selects(&grid, 0, scores);
        (0..scores.len()).filter(|&block| kept[block]).collect()
    }

    const NONE: Always = Always { first: 0, local: 0 };

    /// The examples of the rules' definition. The weights of the scores are .1256 .5630 .0280 .2071 .0762.
    #[rstest::rstest]
    #[case(Budget::TopK(2), vec![1, 3])]
    #[case(Budget::TopK(9), vec![0, 1, 2, 3, 4])]
    #[case(Budget::top_p(0.5), vec![1])]
    #[case(Budget::top_p(0.6), vec![1, 3])]
    #[case(Budget::top_p(0.8), vec![0, 1, 3])]
    #[case(Budget::top_p(0.9), vec![0, 1, 3, 4])]
    #[case(Budget::top_p(0.95), vec![0, 1, 3, 4])]
    #[case(Budget::top_p(1.0), vec![0, 1, 2, 3, 4])]
    #[case(Budget::TopP { p: 0.5, min: 3, max: 4 }, vec![0, 1, 3])]
    #[case(Budget::TopP { p: 1.0, min: 0, max: 2 }, vec![1, 3])]
    #[case(Budget::MinP(0.1), vec![0, 1, 3, 4])]
    #[case(Budget::MinP(0.2), vec![0, 1, 3])]
    #[case(Budget::MinP(0.3), vec![1, 3])]
    #[case(Budget::MinP(1.0), vec![1])]
    #[case(Budget::Ratio(0.4), vec![1, 3])]
    #[case(Budget::Ratio(0.41), vec![0, 1, 3])]
    #[case(Budget::Ratio(1.0), vec![0, 1, 2, 3, 4])]
    #[case(Budget::Ratio(1e-9), vec![1])]
    fn rules_keep(#[case] keep: Budget, #[case] expected: Vec<usize>) {
        let scores = [0.5, 2.0, -1.0, 1.0, 0.0];
        assert_eq!(kept(&rule(keep, NONE), &scores), expected);
    }

    /// Like the above, with block 2 forced as the local block.
    #[rstest::rstest]
    #[case(Budget::TopK(2), vec![1, 2])]
    #[case(Budget::TopK(1), vec![2])]
    #[case(Budget::TopP { p: 0.6, min: 0, max: 1 }, vec![2])]
    fn forced_blocks_count(#[case] keep: Budget, #[case] expected: Vec<usize>) {
        let scores = [0.5, 2.0, -1.0];
        assert_eq!(
            kept(&rule(keep, Always { first: 0, local: 1 }), &scores),
            expected
        );
    }

    /// Equal scores and scores that are not numbers.
    #[test]
    fn any_score_has_a_place() {
        let nan = f64::NAN;
        let inf = f64::INFINITY;
        for (keep, scores, expected) in [
            (Budget::TopK(2), [0.0, -0.0, 0.0, 0.0], vec![0, 1]),
            (Budget::TopK(3), [nan, 1.0, nan, -inf], vec![0, 1, 2]),
            (Budget::top_p(0.9), [nan, 1.0, nan, -inf], vec![1]),
            (Budget::top_p(0.5), [inf, 1.0, inf, inf], vec![0, 2]),
            (Budget::MinP(0.5), [nan, -inf, nan, -inf], vec![0, 1, 2, 3]),
        ] {
            assert_eq!(
                kept(&rule(keep, NONE), &scores),
                expected,
                "{keep:?} of {scores:?}"
            );
        }
        let probabilities = of_probabilities(Budget::top_p(0.7));
        assert_eq!(kept(&probabilities, &[nan, 3.0, -9.0, 1.0]), [1]);
        assert_eq!(kept(&probabilities, &[0.0, 0.0, -9.0, nan]), [0usize; 0]);
    }

    /// A block with infinite probability is selected within the budget and has weight 0.
    #[rstest::rstest]
    #[case(Budget::top_p(0.5), vec![0, 2, 3])]
    #[case(Budget::top_p(0.8), vec![0, 1, 2, 3])]
    #[case(Budget::TopP { p: 0.8, min: 0, max: 1 }, vec![0])]
    #[case(Budget::TopP { p: 0.8, min: 0, max: 3 }, vec![0, 2, 3])]
    #[case(Budget::TopK(1), vec![0])]
    #[case(Budget::TopK(3), vec![0, 2, 3])]
    #[case(Budget::MinP(0.7), vec![0, 2, 3])]
    #[case(Budget::MinP(0.5), vec![0, 1, 2, 3])]
    fn wanted_blocks_weigh_nothing(#[case] keep: Budget, #[case] expected: Vec<usize>) {
        let inf = f64::INFINITY;
        let kept = |keep, scores: &[f64]| kept(&of_probabilities(keep), scores);
        assert_eq!(kept(keep, &[inf, 0.3, inf, 0.5]), expected);
        // Next to required blocks, blocks of weight 0 are not selected.
        assert_eq!(kept(Budget::top_p(0.5), &[0.0, inf, 0.0, inf]), [1, 3]);
    }

    #[rstest::rstest]
    #[case(Budget::TopK(0), "k must be at least 1, got 0")]
    #[case(Budget::Ratio(0.0), "ratio must be above 0 and at most 1, got 0")]
    #[case(Budget::MinP(f64::NAN), "above must be above 0 and at most 1, got NaN")]
    #[case(Budget::top_p(1.1), "p must be above 0 and at most 1, got 1.1")]
    #[case(Budget::TopP { p: 0.5, min: 3, max: 2 }, "min must be at most max, which is 2, got 3")]
    fn numbers_are_checked(#[case] keep: Budget, #[case] message: &str) {
        let error = rule(keep, NONE).check().unwrap_err();
        assert_eq!(error.to_string(), message);
    }

    #[rstest::rstest]
    #[case(Budget::TopK(3), 0, 1, 3)]
    #[case(Budget::TopK(1), 2, 1, 4)]
    #[case(Budget::TopK(1), 1, 2, 4)]
    #[case(Budget::TopK(1), 2, 0, 2)]
    #[case(Budget::TopK(1), usize::MAX, 1, 5)]
    #[case(Budget::TopK(1), 0, usize::MAX, 5)]
    #[case(Budget::TopK(usize::MAX), 0, 0, 5)]
    #[case(Budget::Ratio(0.5), 0, 0, 3)]
    #[case(Budget::TopP { p: 0.5, min: 0, max: 2 }, 1, 0, 2)]
    #[case(Budget::top_p(0.5), 0, 0, 5)]
    #[case(Budget::MinP(0.5), 0, 0, 5)]
    fn no_row_has_more_blocks_than_there_are(
        #[case] keep: Budget,
        #[case] first: usize,
        #[case] local: usize,
        #[case] most: usize,
    ) {
        assert_eq!(rule(keep, Always { first, local }).most_blocks(5), most);
    }
}
