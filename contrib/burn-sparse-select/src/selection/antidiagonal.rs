//! Block selection by sums over antidiagonals (XAttention: Xu et al., 2025, §2).

use std::ops::Range;

use blocksparse::{Budget, EstimateKind, Rule};
use burn::tensor::Tensor;

use crate::selection::estimator::{
    BlockEstimator, EstimateGrid, EstimateInputs, EstimatorTraits, ReferenceInputs, dot,
};
use crate::selection::parts::{
    NUMBERS, by_heads, hidden, in_steps, joined, padded, rows_of, softmax_of_seen,
    softmax_reference,
};
use crate::selection::sharing::GqaReduction;
use crate::selection::text::{Arguments, Method, SINKS_AND_NEAR, Written};
use crate::selection::{Selection, check_block};
#[cfg(feature = "cube")]
use crate::selection::{estimate_ops::ScoredBy, estimates};
use burn_blocksparse::OpError;

/// Queries and keys form groups of `stride`. The score of two groups is the sum over their antidiagonal,
/// `A[X, Y] = Σ_u q[X·stride + stride − 1 − u] · k[Y·stride + u] · scale / stride`. A block's score is the sum of `softmax_Y A` over its groups: an estimate of
/// the attention that it gets from as many queries as there are groups. A group of queries sees the groups of keys of which its last query sees a key.
///
/// Groups count from the first query and the first key. The last ones may have fewer members: missing members add nothing to a sum, and the divisor stays
/// `stride`.
///
/// ```
/// use burn_sparse_select::{XAttention, Always, Budget, Selection};
///
/// let selection: Selection = "xattention:128,16,0.9".parse()?;
/// let estimator = XAttention { block: 128, stride: 16 };
/// let same = Selection::new(estimator, Budget::top_p(0.9)).with_always(Always { first: 1, local: 2 });
/// assert_eq!(selection, same);
/// # Ok::<(), burn_blocksparse::OpError>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct XAttention {
    /// Width of a block.
    pub block: usize,
    /// Number of members of a group, a divisor of `block`. The estimate costs `1 / (2 · stride)` of causal attention.
    pub stride: usize,
}

pub(crate) const METHOD: Method = Method {
    name: "xattention",
    notation: "xattention:BLOCK,STRIDE,KEEP",
    read: |arguments: &mut Arguments| {
        let block = arguments.next("BLOCK")?;
        let stride = arguments.next("STRIDE")?;
        let keep = arguments.keep("KEEP", Budget::top_p)?;
        let selection = Selection::new(XAttention { block, stride }, keep);
        Ok(selection.with_always(arguments.forced(SINKS_AND_NEAR)?))
    },
};

impl XAttention {
    /// Returns the grid of groups.
    fn groups(&self) -> EstimateGrid {
        EstimateGrid::square(self.stride)
    }

    /// Computes the attention of a group of queries to each group of keys, a row of `softmax A`, in f64 loops.
    pub fn probabilities_reference(
        &self,
        call: &ReferenceInputs,
        head: usize,
        group: usize,
    ) -> Vec<f64> {
        let s = self.stride;
        let grid = call.grid(self.groups());
        let sum = |keys: usize| {
            let pairs = (0..s).map(|u| [group * s + s - 1 - u, keys * s + u]);
            let pairs = pairs.filter(|[i, j]| *i < call.seq_q && *j < call.seq_kv);
            let products = pairs.map(|[i, j]| dot(call.query(head, i), call.key(head, j)));
            products.sum::<f64>() * call.scale / s as f64
        };
        let seen = |keys: usize| grid.is_visible(group, keys).then(|| sum(keys));
        softmax_reference(&(0..grid.blocks()).map(seen).collect::<Vec<_>>())
    }
}

impl BlockEstimator for XAttention {
    fn text(&self, rule: &Rule, sharing: GqaReduction) -> String {
        let written = Written::new(METHOD.name)
            .number(self.block)
            .number(self.stride);
        let written = written.keep(rule.keep, |keep| matches!(keep, Budget::TopP { .. }));
        let written = written.forced(rule.forced, SINKS_AND_NEAR);
        written.finish(sharing, GqaReduction::PerHead)
    }

    fn grid(&self) -> EstimateGrid {
        EstimateGrid::square(self.block)
    }

    fn traits(&self) -> EstimatorTraits {
        EstimatorTraits {
            kind: EstimateKind::Probability,
            // The score of a block of queries includes its later queries.
            prefix_stable: false,
            causal_only: false,
        }
    }

    fn check(&self) -> Result<(), OpError> {
        check_block(self.block)?;
        blocksparse::ensure! {
            OpError;
            self.stride > 0 && self.block.is_multiple_of(self.stride) => "stride", format!("a divisor of the block, {}", self.block), self.stride;
        }
        Ok(())
    }

    fn scores(&self, call: &EstimateInputs, rows: Range<usize>) -> Result<Tensor<4>, OpError> {
        let (b, s) = (self.block, self.stride);
        #[cfg(feature = "cube")]
        if let Some(scores) =
            estimates::scores(call, b, &rows, ScoredBy::Antidiagonals { stride: s })
        {
            return Ok(scores);
        }
        let in_block = b / s;
        let [_, _, seq_q, dim] = call.q.dims();
        let seq_kv = call.k.dims()[2];
        let grid = call.grid(self.groups());
        let blocks = seq_kv.div_ceil(b);
        let columns = blocks * in_block;
        let row_elements = (in_block * columns).max(b * dim);
        let scores = by_heads(call, row_elements, |q, k| {
            let [parts, group, ..] = q.dims();
            let heads = parts * group;
            let device = q.device();
            let k = padded(rows_of(&k, 0..seq_kv), 2, [0, blocks * b - seq_kv]);
            let k = k.reshape([parts, 1, columns, s * dim]).transpose();
            let slab = (NUMBERS / (heads * row_elements)).max(1);
            let slabs = in_steps(rows.clone(), slab).map(|rows| {
                let Range { start, end } = rows;
                let (count, first) = (end - start, (start * b).min(seq_q));
                let to = (end * b).min(seq_q);
                let groups = count * in_block;
                let q = rows_of(&q, first..to) * (call.scale / s as f64);
                let q = padded(q, 2, [0, count * b - (to - first)]);
                // Reversed members: the last member of a query group pairs with the first of a key group.
                let q = q.reshape([heads * groups, s, dim]).flip([1]);
                let x = q
                    .reshape([parts, 1, group * groups, s * dim])
                    .matmul(k.clone());
                let dims = [parts, group, groups, columns];
                let hidden = hidden(&grid, start * in_block..end * in_block, dims, &device);
                let p = softmax_of_seen(x.reshape(dims), hidden);
                let sums = p.reshape([heads * groups, blocks, in_block]).sum_dim(2);
                let sums = sums.reshape([heads * count, in_block, blocks]).sum_dim(1);
                sums.reshape([parts, group, count, blocks])
            });
            joined(slabs.collect(), 2)
        });
        Ok(scores)
    }

    fn reference(&self, call: &ReferenceInputs) -> Vec<f64> {
        let grid = call.grid(self.grid());
        let in_block = self.block / self.stride;
        let groups = call.seq_q.div_ceil(self.stride);
        let mut scores = vec![0.0; call.heads * grid.rows() * grid.blocks()];
        for head in 0..call.heads {
            for group in 0..groups {
                let row = (head * grid.rows() + group / in_block) * grid.blocks();
                let p = self.probabilities_reference(call, head, group);
                let keys = p.iter().enumerate();
                keys.for_each(|(keys, p)| scores[row + keys / in_block] += p);
            }
        }
        scores
    }
}
