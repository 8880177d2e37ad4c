//! Block selection by columns and diagonals of the last queries' attention (the vertical-slash heads of MInference: Jiang et al., 2024, §3).

use std::ops::Range;

#[cfg(feature = "cube")]
use crate::kernels::selection::Kept;
use blocksparse::{Always, Budget, EstimateKind, Rule};
use burn::tensor::Tensor;

use crate::selection::estimator::{
    BlockEstimator, EstimateGrid, EstimateInputs, EstimatorTraits, ReferenceInputs,
};
use crate::selection::lines::{
    is_touched, largest_behind, largest_behind_reference, line_sums, line_sums_reference, touched,
};
use crate::selection::sharing::GqaReduction;
use crate::selection::text::{Arguments, Method, Written};
use crate::selection::{Selection, check_block};
#[cfg(feature = "cube")]
use crate::selection::{estimate_ops::ScoredBy, estimates};
use burn_blocksparse::OpError;

/// Selects the keys, and the distances from a query back to a key, that the last queries attend to most. A block is kept for all queries if it contains one of
/// those keys or a pair at one of those distances. That is a superset of the pairs themselves, which
/// [`vertical_slash_layout`](crate::selection::vertical_slash_layout) keeps exactly, at the cost of reading the selection back.
///
/// Scores are 1 and 0, and [`DEFAULT_BUDGET`](Self::DEFAULT_BUDGET) is the rule that keeps the ones. Keys or distances of equal attention are all kept or all
/// dropped, and those without attention are dropped, so there can be fewer or more than asked for.
///
/// ```
/// use burn_sparse_select::{Selection, VerticalSlash};
///
/// let selection: Selection = "minference:64,1000,6096".parse()?;
/// assert_eq!(selection, Selection::new(VerticalSlash::new(64, 1000, 6096), VerticalSlash::DEFAULT_BUDGET));
/// # Ok::<(), burn_blocksparse::OpError>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct VerticalSlash {
    /// Width of a block.
    pub block: usize,
    /// Number of selected keys, including `sinks`.
    pub columns: usize,
    /// Number of selected distances, including `window`.
    pub slashes: usize,
    /// Number of last queries that determine the selection. Default: 64.
    pub queries: usize,
    /// Number of first keys that are always selected. Default: 30.
    pub sinks: usize,
    /// Number of shortest distances, from 0 on, that are always selected. Default: 100.
    pub window: usize,
}

/// Budget that keeps the ones of rows of scores 1 and 0 with at least one 1: all scores of at least a share of the largest. The share is small, so that a
/// reduction over heads keeps everything that one of them keeps.
pub(crate) const ONES: Budget = Budget::MinP(1e-3);

/// The rule forces no blocks, because the estimator does.
const FORCED: Always = Always { first: 0, local: 0 };

pub(crate) const METHOD: Method = Method {
    name: "minference",
    notation: "minference:BLOCK,COLUMNS,SLASHES[,QUERIES][,sinks=30][,window=100]",
    read: |arguments: &mut Arguments| {
        let [block, columns, slashes] = [
            arguments.next("BLOCK")?,
            arguments.next("COLUMNS")?,
            arguments.next("SLASHES")?,
        ];
        let default = VerticalSlash::new(block, columns, slashes);
        let estimator = VerticalSlash {
            queries: arguments.next_or("QUERIES", default.queries)?,
            sinks: arguments.named("sinks", default.sinks)?,
            window: arguments.named("window", default.window)?,
            ..default
        };
        let keep = arguments.named_keep()?.unwrap_or(ONES);
        let selection = Selection::new(estimator, keep);
        Ok(selection.with_always(arguments.forced(FORCED)?))
    },
};

impl VerticalSlash {
    /// Rule that keeps the blocks of score 1.
    pub const DEFAULT_BUDGET: Budget = ONES;

    /// Creates a method that selects `columns` keys and `slashes` distances by the last 64 queries, including the first 30 keys and the shortest 100 distances.
    pub fn new(block: usize, columns: usize, slashes: usize) -> Self {
        Self {
            block,
            columns,
            slashes,
            queries: 64,
            sinks: 30,
            window: 100,
        }
    }

    blocksparse::setters! {
        /// Sets how many of the last queries determine the selection.
        queries: usize,
        /// Sets how many of the first keys are always selected.
        sinks: usize,
        /// Sets how many of the shortest distances are always selected.
        window: usize,
    }

    /// Returns the keys and distances that a head selects, computed in f64 loops.
    pub fn lines_reference(&self, call: &ReferenceInputs, head: usize) -> [Vec<bool>; 2] {
        let [columns, distances] = line_sums_reference(call, head, self.queries);
        [
            largest_behind_reference(&columns, self.columns, self.sinks),
            largest_behind_reference(&distances, self.slashes, self.window),
        ]
    }
}

impl BlockEstimator for VerticalSlash {
    fn text(&self, rule: &Rule, sharing: GqaReduction) -> String {
        let default = Self::new(self.block, self.columns, self.slashes);
        let written = Written::new(METHOD.name).number(self.block);
        let mut written = written.number(self.columns).number(self.slashes);
        if self.queries != default.queries {
            written = written.number(self.queries);
        }
        let written = written.named_whole("sinks", self.sinks, default.sinks);
        let mut written = written.named_whole("window", self.window, default.window);
        if rule.keep != ONES {
            written = written.keep(rule.keep, |_| false);
        }
        let written = written.forced(rule.forced, FORCED);
        written.finish(sharing, GqaReduction::PerHead)
    }

    fn grid(&self) -> EstimateGrid {
        EstimateGrid::square(self.block)
    }

    fn traits(&self) -> EstimatorTraits {
        EstimatorTraits {
            kind: EstimateKind::Probability,
            // The last queries select for all rows.
            prefix_stable: false,
            causal_only: true,
        }
    }

    fn check(&self) -> Result<(), OpError> {
        check_block(self.block)?;
        // Every row then has a block at distance 0, and so a score of 1.
        for (argument, number) in [("queries", self.queries), ("window", self.window)] {
            OpError::ensure_positive(argument, number)?;
        }
        Ok(())
    }

    fn scores(&self, call: &EstimateInputs, rows: Range<usize>) -> Result<Tensor<4>, OpError> {
        #[cfg(feature = "cube")]
        {
            let kept = Kept::Count {
                all: [self.columns, self.slashes],
                forced: [self.sinks, self.window],
            };
            let queries = self.queries;
            let by = ScoredBy::Lines { queries, kept };
            if let Some(scores) = estimates::scores(call, self.block, &rows, by) {
                return Ok(scores);
            }
        }
        let [batch, heads, ..] = call.q.dims();
        let grid = call.grid(self.grid());
        let sums = line_sums(call, self.queries);
        let columns = largest_behind(sums.columns, self.columns, self.sinks);
        let distances = largest_behind(sums.distances, self.slashes, self.window);
        let dims = [batch, heads, rows.len(), grid.blocks()];
        Ok(touched(columns, distances, &grid, rows).reshape(dims))
    }

    fn reference(&self, call: &ReferenceInputs) -> Vec<f64> {
        let grid = call.grid(self.grid());
        let mut scores = Vec::new();
        for head in 0..call.heads {
            let lines = self.lines_reference(call, head);
            for row in 0..grid.rows() {
                let score = |block| f64::from(u8::from(is_touched(&lines, &grid, row, block)));
                scores.extend((0..grid.blocks()).map(score));
            }
        }
        scores
    }
}
