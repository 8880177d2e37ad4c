//! Block selection by products of means (the block-sparse heads of MInference: Jiang et al., 2024).

use std::ops::Range;

use blocksparse::{Always, Budget, EstimateKind, Rule};

use crate::selection::estimator::{
    BlockEstimator, EstimateGrid, EstimateInputs, EstimatorTraits, ReferenceInputs, dot,
};
use crate::selection::ops::SelectionOps;
use crate::selection::parts::in_steps;
use crate::selection::sharing::GqaReduction;
use crate::selection::text::{Arguments, Method, SINKS_AND_NEAR, Written};
use crate::selection::{Selection, check_block, reference};
#[cfg(feature = "cube")]
use crate::selection::{estimate_ops::ScoredBy, estimates};
use burn_blocksparse::internal::prelude::*;

/// Scores blocks by `mean(q) · mean(k) · scale` of a block of queries and a block of keys.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MeanPool {
    /// Width of a block.
    pub block: usize,
}

pub(crate) const METHOD: Method = Method {
    name: "topk",
    notation: "topk:BLOCK,KEEP[,LOCAL,FIRST]",
    read: |arguments: &mut Arguments| {
        let block = arguments.next("BLOCK")?;
        let keep = arguments.keep("KEEP", |k| Budget::TopK(k as usize))?;
        let local = arguments.next_or("LOCAL", SINKS_AND_NEAR.local)?;
        let first = arguments.next_or("FIRST", SINKS_AND_NEAR.first)?;
        let forced = arguments.forced(Always { first, local })?;
        Ok(Selection::new(MeanPool { block }, keep).with_always(forced))
    },
};

impl BlockEstimator for MeanPool {
    fn text(&self, rule: &Rule, sharing: GqaReduction) -> String {
        let Always { first, local } = rule.forced;
        let written = Written::new(METHOD.name).number(self.block);
        let written = written.keep(rule.keep, |keep| matches!(keep, Budget::TopK(_)));
        let written = match rule.forced == SINKS_AND_NEAR {
            true => written,
            false => written.number(local).number(first),
        };
        written.finish(sharing, GqaReduction::PerHead)
    }

    fn grid(&self) -> EstimateGrid {
        EstimateGrid::square(self.block)
    }

    fn traits(&self) -> EstimatorTraits {
        EstimatorTraits {
            kind: EstimateKind::Logit,
            // The mean of a block of queries includes its later queries.
            prefix_stable: false,
            causal_only: false,
        }
    }

    fn check(&self) -> Result<(), OpError> {
        check_block(self.block)
    }

    fn scores(&self, call: &EstimateInputs, rows: Range<usize>) -> Result<Tensor<4>, OpError> {
        let b = self.block;
        #[cfg(feature = "cube")]
        if let Some(scores) = estimates::scores(call, b, &rows, ScoredBy::Means) {
            return Ok(scores);
        }
        let to = (rows.end * b).min(call.q.dims()[2]);
        let q = call.q.clone().slice_dim(2, rows.start * b..to);
        let (q, k) = (means(q, b), means(call.k.clone(), b));
        Ok(products(q * call.scale, k, call.group()))
    }

    fn reference(&self, call: &ReferenceInputs) -> Vec<f64> {
        let mut scores = Vec::new();
        for head in 0..call.heads {
            let q = |row| call.query(head, row);
            let k = |row| call.key(head, row);
            let q = means_reference(q, call.seq_q, self.block);
            let k = means_reference(k, call.seq_kv, self.block);
            for q in &q {
                scores.extend(k.iter().map(|k| dot(q, k) * call.scale));
            }
        }
        scores
    }
}

/// Computes `q · kᵀ` of every query head and its KV head: `[batch, heads, rows of q, rows of k]`.
pub(crate) fn products(q: Tensor<4>, k: Tensor<4>, group: usize) -> Tensor<4> {
    let [batch, heads, rows, dim] = q.dims();
    let blocks = k.dims()[2];
    let q = q.reshape([batch, heads / group, group * rows, dim]);
    q.matmul(k.transpose())
        .reshape([batch, heads, rows, blocks])
}

/// Computes means over blocks of rows, in f32 and without autodiff: `[batch, heads, blocks, dim]`.
pub(crate) fn means(x: Tensor<4>, block_size: usize) -> Tensor<4> {
    let x = x.without_autodiff();
    // `top_k_blocks` uses Burn's own operations, and works on devices that this crate does not serve.
    let is_served = served(&x.device()).is_ok();
    let x = x.into_dispatch();
    Tensor::from_dispatch(match is_served {
        true => <Dispatch as SelectionOps>::block_means(x, block_size),
        false => reference::block_means::<Dispatch>(x, block_size),
    })
}

/// Computes the mean of all rows via means of blocks: `[batch, heads, 1, dim]`. Burn's sum over many rows runs in a single cube.
pub(crate) fn mean_of_all(x: Tensor<4>) -> Tensor<4> {
    let rows = x.dims()[2];
    let block = rows.isqrt().max(1);
    let means = means(x, block);
    let (whole, rest) = (rows / block, rows % block);
    let of_whole = means.clone().slice_dim(2, 0..whole).mean_dim(2);
    if rest == 0 {
        return of_whole;
    }
    let share = rest as f64 / rows as f64;
    of_whole * (1.0 - share) + means.slice_dim(2, whole..whole + 1) * share
}

/// Computes [`means`] in f64 loops.
pub(crate) fn means_reference<'a>(
    row: impl Fn(usize) -> &'a [f64],
    rows: usize,
    block: usize,
) -> Vec<Vec<f64>> {
    let blocks = in_steps(0..rows, block).map(|members| {
        let count = members.len() as f64;
        let dim = row(members.start).len();
        let of = |c: usize| members.clone().map(|i| row(i)[c]).sum::<f64>() / count;
        (0..dim).map(of).collect()
    });
    blocks.collect()
}
