//! Block selection by means, for self-similar blocks (SpargeAttn: Zhang et al., 2025, §3).

use std::ops::Range;

use blocksparse::{Budget, EstimateKind, Rule};

use crate::selection::estimator::{
    BlockEstimator, EstimateGrid, EstimateInputs, EstimatorTraits, ReferenceInputs, dot,
};
use crate::selection::mean::{mean_of_all, means, means_reference, products};
use crate::selection::ops::SelectionOps;
use crate::selection::parts::{hidden, in_steps, softmax_of_seen, softmax_reference};
use crate::selection::sharing::GqaReduction;
use crate::selection::text::{Arguments, Method, SINKS_AND_NEAR, Written};
use crate::selection::{Selection, check_block};
#[cfg(feature = "cube")]
use crate::selection::{estimate_ops::ScoredBy, estimates};
use burn_blocksparse::internal::prelude::*;

/// Scores blocks by `softmax(mean(q) · mean(k) · scale)` over key blocks. A block's self-similarity is the mean cosine of all pairs of its rows. A key block
/// below `similarity` is left out of the softmax and scores +∞: rules by probability ([`EstimateKind::Probability`]) keep it in addition to the others. A query
/// block below `similarity` keeps all blocks.
///
/// ```
/// use burn_sparse_select::{Always, Budget, Selection, SpargeAttn};
///
/// let selection: Selection = "sparge:64,0.98,0.6".parse()?;
/// let estimator = SpargeAttn { block: 64, similarity: 0.6, smooth: true };
/// let same = Selection::new(estimator, Budget::top_p(0.98)).with_always(Always { first: 1, local: 2 });
/// assert_eq!(selection, same);
/// # Ok::<(), burn_blocksparse::OpError>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SpargeAttn {
    /// Width of a block.
    pub block: usize,
    /// Least self-similarity at which a block's mean represents it, from −1 to 1.
    pub similarity: f64,
    /// True to subtract the mean over the sequence from the keys. This does not change a softmax over all keys, but it changes similarities.
    pub smooth: bool,
}

pub(crate) const METHOD: Method = Method {
    name: "sparge",
    notation: "sparge:BLOCK,KEEP,SIMILARITY[,smooth=0]",
    read: |arguments: &mut Arguments| {
        let block = arguments.next("BLOCK")?;
        let keep = arguments.keep("KEEP", Budget::top_p)?;
        let estimator = SpargeAttn {
            block,
            similarity: arguments.next("SIMILARITY")?,
            smooth: arguments.flag("smooth", true)?,
        };
        let selection = Selection::new(estimator, keep);
        Ok(selection.with_always(arguments.forced(SINKS_AND_NEAR)?))
    },
};

/// Lower bound of a row's norm, which avoids division by zero.
const SHORTEST: f64 = 1e-18;

impl SpargeAttn {
    /// Computes the self-similarities of a head's query blocks and key blocks in f64 loops.
    pub fn similarities_reference(&self, call: &ReferenceInputs, head: usize) -> [Vec<f64>; 2] {
        let (b, dim) = (self.block, call.head_dim);
        let k = self.keys_reference(call, head);
        let of_queries = similarities_reference(|i| call.query(head, i), call.seq_q, b);
        let of_keys = similarities_reference(|j| &k[j * dim..][..dim], call.seq_kv, b);
        [of_queries, of_keys]
    }

    /// Returns the keys of a query head, less their mean if `smooth`.
    fn keys_reference(&self, call: &ReferenceInputs, head: usize) -> Vec<f64> {
        let mean = match self.smooth {
            true => means_reference(|j| call.key(head, j), call.seq_kv, call.seq_kv).remove(0),
            false => vec![0.0; call.head_dim],
        };
        let less = |j: usize| {
            call.key(head, j)
                .iter()
                .zip(&mean)
                .map(|(k, mean)| k - mean)
        };
        (0..call.seq_kv).flat_map(less).collect()
    }
}

impl BlockEstimator for SpargeAttn {
    fn text(&self, rule: &Rule, sharing: GqaReduction) -> String {
        let written = Written::new(METHOD.name).number(self.block);
        let written = written.keep(rule.keep, |keep| matches!(keep, Budget::TopP { .. }));
        let written = written.number(self.similarity);
        let written = written.named_whole("smooth", self.smooth.into(), 1);
        let written = written.forced(rule.forced, SINKS_AND_NEAR);
        written.finish(sharing, GqaReduction::PerHead)
    }

    fn grid(&self) -> EstimateGrid {
        EstimateGrid::square(self.block)
    }

    fn traits(&self) -> EstimatorTraits {
        EstimatorTraits {
            kind: EstimateKind::Probability,
            // The mean of a block of queries includes its later queries, and the mean over the sequence all later keys.
            prefix_stable: false,
            causal_only: false,
        }
    }

    fn check(&self) -> Result<(), OpError> {
        check_block(self.block)?;
        blocksparse::ensure! { OpError; (-1.0..=1.0).contains(&self.similarity) => "similarity", "from -1 to 1", self.similarity; }
        Ok(())
    }

    fn scores(&self, call: &EstimateInputs, rows: Range<usize>) -> Result<Tensor<4>, OpError> {
        #[cfg(feature = "cube")]
        {
            let by = ScoredBy::Alike {
                similarity: self.similarity,
                smooth: self.smooth,
            };
            if let Some(scores) = estimates::scores(call, self.block, &rows, by) {
                return Ok(scores);
            }
        }
        let b = self.block;
        let [batch, heads, seq_q, _] = call.q.dims();
        let group = call.group();
        let grid = call.grid(self.grid());
        let (blocks, count) = (grid.blocks(), rows.len());
        let queries = (rows.start * b).min(seq_q)..(rows.end * b).min(seq_q);
        let q = call.q.clone().slice_dim(2, queries);
        let k = call.k.clone();
        let less = self.smooth.then(|| mean_of_all(k.clone()));
        // The mean of differences is the difference of means.
        let k_means = means(k.clone(), b);
        let k_means = match &less {
            Some(less) => k_means - less.clone(),
            None => k_means,
        };
        let x = products(means(q.clone(), b) * call.scale, k_means, call.group());
        let unlike = |x: Tensor<4>, less| {
            let alike = self_similarity(x, less, b);
            alike.lower_elem(self.similarity)
        };
        let dims = [batch, heads, count, blocks];
        let of_keys = unlike(k, less).swap_dims(2, 3);
        let by_head = [batch, heads / group, group, blocks];
        let of_keys = of_keys.expand(by_head).reshape([batch, heads, 1, blocks]);
        let of_keys = of_keys.expand(dims);
        let of_queries = unlike(q, None).expand(dims);
        let hidden = hidden(&grid, rows, dims, &x.device());
        let p = softmax_of_seen(x, hidden.bool_or(of_keys.clone()));
        Ok(p.mask_fill(of_keys.bool_or(of_queries), f32::INFINITY))
    }

    fn reference(&self, call: &ReferenceInputs) -> Vec<f64> {
        let grid = call.grid(self.grid());
        let dim = call.head_dim;
        let mut scores = Vec::new();
        for head in 0..call.heads {
            let k = self.keys_reference(call, head);
            let q_means = means_reference(|i| call.query(head, i), call.seq_q, self.block);
            let k_means = means_reference(|j| &k[j * dim..][..dim], call.seq_kv, self.block);
            let [of_queries, of_keys] = self.similarities_reference(call, head);
            for row in 0..grid.rows() {
                let is_like = |block: usize| of_keys[block] >= self.similarity;
                let x = (0..grid.blocks()).map(|block| {
                    let is_weighed = grid.is_visible(row, block) && is_like(block);
                    is_weighed.then(|| dot(&q_means[row], &k_means[block]) * call.scale)
                });
                let p = softmax_reference(&x.collect::<Vec<_>>());
                let is_weighed = |block| of_queries[row] >= self.similarity && is_like(block);
                scores.extend(p.into_iter().enumerate().map(|(block, p)| {
                    match is_weighed(block) {
                        true => p,
                        false => f64::INFINITY,
                    }
                }));
            }
        }
        scores
    }
}

/// Computes the mean cosine of all pairs of a block's rows, after subtracting `less`: `[batch, heads, blocks, 1]`.
fn self_similarity(x: Tensor<4>, less: Option<Tensor<4>>, block: usize) -> Tensor<4> {
    let less = OptFloat::from(less.map(Tensor::into_dispatch));
    let alike = <Dispatch as SelectionOps>::block_self_similarity(x.into_dispatch(), less, block);
    Tensor::from_dispatch(alike)
}

fn similarities_reference<'a>(
    row: impl Fn(usize) -> &'a [f64],
    rows: usize,
    block: usize,
) -> Vec<f64> {
    let cosine = |i: usize, j: usize| {
        let [i, j] = [i, j].map(&row);
        let length = |x: &[f64]| dot(x, x).sqrt().max(SHORTEST);
        dot(i, j) / (length(i) * length(j))
    };
    let blocks = in_steps(0..rows, block).map(|members| {
        let pairs = members
            .clone()
            .flat_map(|i| members.clone().map(move |j| (i, j)));
        let count = members.len() * members.len();
        pairs.map(|(i, j)| cosine(i, j)).sum::<f64>() / count as f64
    });
    blocks.collect()
}
