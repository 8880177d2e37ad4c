//! Block selection by means where these are accurate, otherwise by columns and diagonals (FlexPrefill: Lai et al., 2025, §3).

use std::ops::Range;

#[cfg(feature = "cube")]
use crate::kernels::selection::FlexLimits;
use blocksparse::{Always, EstimateKind, Rule};
use burn::tensor::Tensor;

use crate::selection::estimator::{
    BlockEstimator, EstimateGrid, EstimateInputs, EstimatorTraits, ReferenceInputs, dot,
};
use crate::selection::lines::{
    By, LineSums, heaviest_blocks, heaviest_blocks_reference, is_touched, largest,
    largest_reference, line_sums, line_sums_reference, touched,
};
use crate::selection::mean::{means, means_reference, products};
use crate::selection::parts::{
    by_heads, hidden, padded, rows_of, softmax_of_seen, softmax_reference,
};
use crate::selection::sharing::GqaReduction;
use crate::selection::text::{Arguments, Method, Written};
use crate::selection::vertical_slash::ONES;
use crate::selection::{Selection, check_block};
#[cfg(feature = "cube")]
use crate::selection::{estimate_ops::ScoredBy, estimates};
use burn_blocksparse::OpError;

/// Each head picks one of two ways by the attention of its last block of queries. The estimate of that attention is the softmax of products of means
/// (`mean(q) · mean(k) · scale`). If estimate and attention differ by less than `threshold` (the square root of their Jensen–Shannon divergence, in natural
/// logarithms), the estimate is computed for all rows, and the head keeps its largest pairs of blocks up to a share `gamma` of the total. Otherwise it keeps
/// the columns and the diagonals that each cover a share `gamma` of the last queries' attention, as all blocks that they touch.
///
/// Both ways keep the first block and the queries' own. `min_budget` adds the heaviest key blocks, by the last queries' attention, up to that many keys, and as
/// many of the heaviest block diagonals. It is 1,024 in the paper's experiments, and off by default here and in the paper's repository. The last rows then keep
/// at least that many keys; earlier rows keep those of them that they see. Scores are 1 and 0, and
/// [`VerticalSlash::DEFAULT_BUDGET`](crate::selection::VerticalSlash::DEFAULT_BUDGET) keeps the ones. The last block of queries has as many queries as a block.
///
/// ```
/// use burn_sparse_select::{FlexPrefill, Always, Selection, VerticalSlash};
///
/// let selection: Selection = "flexprefill:128,0.9".parse()?;
/// let estimator = FlexPrefill { block: 128, gamma: 0.9, threshold: 0.1, min_budget: 0 };
/// let same = Selection::new(estimator, VerticalSlash::DEFAULT_BUDGET).with_always(Always { first: 1, local: 1 });
/// assert_eq!(selection, same);
/// # Ok::<(), burn_blocksparse::OpError>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct FlexPrefill {
    /// Width of a block.
    pub block: usize,
    /// Share of the attention to cover, in (0, 1].
    pub gamma: f64,
    /// Largest Jensen–Shannon distance at which the estimate is used. Default: 0.1.
    pub threshold: f64,
    /// Least number of selected keys, in whole blocks, and of distances. With 0 only forced blocks are added.
    pub min_budget: usize,
}

/// Selection of a head, on the host.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct FlexHead {
    /// Attention of the last block of queries to each key block, estimated by products of means.
    pub estimate: Vec<f64>,
    /// Exact attention of the last block of queries to each key block.
    pub attention: Vec<f64>,
    /// Distance between `estimate` and `attention`, √JS.
    pub divergence: f64,
    /// Keys and distances that are selected if the distance is too large.
    pub lines: [Vec<bool>; 2],
    /// Pairs of blocks that are selected, `[rows][blocks]`, without forced ones.
    pub pairs: Vec<bool>,
}

/// Default forced blocks: the first and the queries' own.
const FORCED: Always = Always { first: 1, local: 1 };

/// Default of the largest distance between estimate and attention.
const THRESHOLD: f64 = 0.1;

pub(crate) const METHOD: Method = Method {
    name: "flexprefill",
    notation: "flexprefill:BLOCK,GAMMA[,THRESHOLD[,MIN_BUDGET]]",
    read: |arguments: &mut Arguments| {
        let estimator = FlexPrefill {
            block: arguments.next("BLOCK")?,
            gamma: arguments.next("GAMMA")?,
            threshold: arguments.next_or("THRESHOLD", THRESHOLD)?,
            min_budget: arguments.next_or("MIN_BUDGET", 0)?,
        };
        let keep = arguments.named_keep()?.unwrap_or(ONES);
        let selection = Selection::new(estimator, keep);
        Ok(selection.with_always(arguments.forced(FORCED)?))
    },
};

impl FlexPrefill {
    /// Returns the least number of key blocks to keep.
    fn least_blocks(&self) -> usize {
        self.min_budget.div_ceil(self.block)
    }

    /// Computes the selection of a head in f64 loops.
    pub fn head_reference(&self, call: &ReferenceInputs, head: usize) -> FlexHead {
        let grid = call.grid(self.grid());
        let (b, blocks) = (self.block, grid.blocks());
        let queries = b.min(call.seq_q);
        let q_means = means_reference(|i| call.query(head, i), call.seq_q, b);
        let k_means = means_reference(|j| call.key(head, j), call.seq_kv, b);
        let first = call.seq_q - queries;
        let last = means_reference(|i| call.query(head, first + i), queries, queries).remove(0);
        let product = |q: &[f64], block: usize| dot(q, &k_means[block]) * call.scale;
        let of_last = (0..blocks).map(|block| Some(product(&last, block)));
        let estimate = softmax_reference(&of_last.collect::<Vec<_>>());

        let [columns, distances] = line_sums_reference(call, head, queries);
        let whole: f64 = columns.iter().sum();
        let attention = columns
            .chunks(b)
            .map(|part| part.iter().sum::<f64>() / whole);
        let attention: Vec<f64> = attention.collect();
        let divergence = divergence_reference(&estimate, &attention);
        let sums = [columns, distances];
        let heaviest = match self.least_blocks() {
            0 => vec![false; grid.rows() * blocks],
            least => heaviest_blocks_reference(&sums, least, &grid),
        };
        let lines = sums.map(|sums| {
            let limit = self.gamma * sums.iter().sum::<f64>();
            largest_reference(&sums, By::Sum, limit)
        });

        let rows = 0..grid.rows();
        let chosen: Vec<bool> = match divergence < self.threshold {
            true => {
                let row = |row: usize| {
                    let x = (0..blocks).map(|block| {
                        let is_seen = grid.is_visible(row, block);
                        is_seen.then(|| product(&q_means[row], block))
                    });
                    softmax_reference(&x.collect::<Vec<_>>())
                };
                let p: Vec<f64> = rows.flat_map(row).collect();
                largest_reference(&p, By::Sum, self.gamma * p.iter().sum::<f64>())
            }
            false => {
                let row = |row: usize| (0..blocks).map(move |block| [row, block]);
                let pairs = rows.flat_map(row);
                let is_kept = |[row, block]: [usize; 2]| is_touched(&lines, &grid, row, block);
                pairs.map(is_kept).collect()
            }
        };
        let pairs = chosen.into_iter().zip(heaviest);
        let pairs = pairs.map(|(chosen, is_heavy)| chosen || is_heavy).collect();
        FlexHead {
            estimate,
            attention,
            divergence,
            lines,
            pairs,
        }
    }
}

impl BlockEstimator for FlexPrefill {
    fn text(&self, rule: &Rule, sharing: GqaReduction) -> String {
        let written = Written::new(METHOD.name).number(self.block);
        let mut written = written.number(self.gamma);
        if self.threshold != THRESHOLD || self.min_budget > 0 {
            written = written.number(self.threshold);
        }
        if self.min_budget > 0 {
            written = written.number(self.min_budget);
        }
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
        blocksparse::ensure! {
            OpError;
            self.gamma > 0.0 && self.gamma <= 1.0 => "gamma", "above 0 and at most 1", self.gamma;
            self.threshold >= 0.0 => "threshold", "at least 0", self.threshold;
        }
        Ok(())
    }

    fn scores(&self, call: &EstimateInputs, rows: Range<usize>) -> Result<Tensor<4>, OpError> {
        #[cfg(feature = "cube")]
        {
            let limits = FlexLimits {
                threshold: self.threshold,
                blocks: self.least_blocks(),
            };
            let gamma = self.gamma;
            let by = ScoredBy::Flex { gamma, limits };
            if let Some(scores) = estimates::scores(call, self.block, &rows, by) {
                return Ok(scores);
            }
        }
        let [batch, heads, ..] = call.q.dims();
        let grid = call.grid(self.grid());
        let (all, blocks) = (grid.rows(), grid.blocks());
        let (lines, count) = (batch * heads, rows.len());
        let sums = line_sums(call, self.block);
        let estimates = self.estimates(call);
        let of_last = estimates.clone().slice_dim(2, all..all + 1);
        let by_means = estimates
            .slice_dim(2, 0..all)
            .reshape([lines, all * blocks]);
        let by_means = self.share(by_means).reshape([lines, all, blocks]);
        let by_means = by_means.slice_dim(1, rows.clone());

        let attention = padded(
            sums.columns.clone(),
            1,
            [0, blocks * self.block - grid.seq_kv],
        );
        let attention = attention.reshape([lines, blocks, self.block]).sum_dim(2);
        let attention = attention.reshape([lines, blocks]);
        let whole = attention.clone().sum_dim(1).clamp_min(f32::MIN_POSITIVE);
        let apart = divergence(of_last.reshape([lines, blocks]), attention / whole);
        let is_apart = apart.greater_equal_elem(self.threshold);

        let heaviest = match self.least_blocks() {
            0 => None,
            least => Some(heaviest_blocks(&sums, least, &grid, rows.clone())),
        };
        let LineSums { columns, distances } = sums;
        let by_lines = touched(self.share(columns), self.share(distances), &grid, rows);
        let dims = [lines, count, blocks];
        let is_apart = is_apart.reshape([lines, 1, 1]).expand(dims);
        let chosen = by_means.mask_where(is_apart, by_lines);
        let chosen = match heaviest {
            Some(heaviest) => chosen.max_pair(heaviest),
            None => chosen,
        };
        // This gives every row a score of 1.
        let first = chosen.clone().slice_dim(2, 0..1).ones_like();
        let chosen = match blocks {
            1 => first,
            _ => Tensor::cat(vec![first, chosen.slice_dim(2, 1..blocks)], 2),
        };
        Ok(chosen.reshape([batch, heads, count, blocks]))
    }

    fn reference(&self, call: &ReferenceInputs) -> Vec<f64> {
        let blocks = call.grid(self.grid()).blocks();
        let of_head = |head| {
            let pairs = self
                .head_reference(call, head)
                .pairs
                .into_iter()
                .enumerate();
            pairs.map(move |(pair, kept)| match kept || pair % blocks == 0 {
                true => 1.0,
                false => 0.0,
            })
        };
        (0..call.heads).flat_map(of_head).collect()
    }
}

impl FlexPrefill {
    /// Computes the softmax of products of means for every row, and then for the last block of queries: `[batch, heads, rows + 1, blocks]`.
    fn estimates(&self, call: &EstimateInputs) -> Tensor<4> {
        let [_, _, seq_q, dim] = call.q.dims();
        let seq_kv = call.k.dims()[2];
        let grid = call.grid(self.grid());
        let (all, blocks) = (grid.rows(), grid.blocks());
        let numbers = (seq_q * dim).max((all + 1) * blocks);
        by_heads(call, numbers, |q, k| {
            let [parts, group, ..] = q.dims();
            let last = rows_of(&q, seq_q - self.block.min(seq_q)..seq_q).mean_dim(2);
            let q = Tensor::cat(vec![means(q, self.block), last], 2) * call.scale;
            let x = products(q, means(rows_of(&k, 0..seq_kv), self.block), group);
            let dims = [parts, group, all, blocks];
            let hidden = hidden(&grid, 0..all, dims, &x.device());
            let rows = softmax_of_seen(x.clone().slice_dim(2, 0..all), hidden);
            let last = burn::tensor::activation::softmax(x.slice_dim(2, all..all + 1), 3);
            Tensor::cat(vec![rows, last], 2)
        })
    }

    /// Selects the largest elements of each row that cover the share `gamma` of its sum.
    fn share(&self, x: Tensor<2>) -> Tensor<2> {
        let limit = x.clone().sum_dim(1) * self.gamma;
        largest(x, By::Sum, limit)
    }
}

/// Computes the square root of the Jensen–Shannon divergence of rows: `[rows, 1]`.
fn divergence(a: Tensor<2>, b: Tensor<2>) -> Tensor<2> {
    let middle = ((a.clone() + b.clone()) / 2.0).clamp_min(f32::MIN_POSITIVE);
    let from_middle = |x: Tensor<2>| {
        let ratio = (x.clone() / middle.clone()).clamp_min(f32::MIN_POSITIVE);
        (x * ratio.log()).sum_dim(1)
    };
    // For equal rows rounding may give a negative result.
    ((from_middle(a) + from_middle(b)) / 2.0)
        .clamp_min(0.0)
        .sqrt()
}

/// Computes [`divergence`] in f64.
fn divergence_reference(a: &[f64], b: &[f64]) -> f64 {
    let from_middle = |x: f64, other: f64| match x > 0.0 {
        true => x * (2.0 * x / (x + other)).ln(),
        false => 0.0,
    };
    let pairs = a.iter().zip(b);
    let terms = pairs.map(|(&a, &b)| from_middle(a, b) + from_middle(b, a));
    (terms.sum::<f64>() / 2.0).max(0.0).sqrt()
}
