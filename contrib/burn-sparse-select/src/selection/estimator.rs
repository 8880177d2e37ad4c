//! What estimates how much attention blocks of keys get.

use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use blocksparse::{EstimateKind, Rule, ScoreGrid};
use burn::tensor::{Int, Tensor};

use crate::selection::sharing::GqaReduction;
use burn_blocksparse::OpError;

/// The rows and blocks that an estimator has scores of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EstimateGrid {
    /// Adjacent queries that share a choice.
    pub query_rows: usize,
    /// Keys of a block.
    pub block: usize,
}

impl EstimateGrid {
    /// Blocks of `block` queries and `block` keys.
    pub fn square(block: usize) -> Self {
        Self {
            query_rows: block,
            block,
        }
    }

    /// Single queries, blocks of `block` keys.
    pub fn by_query(block: usize) -> Self {
        Self {
            query_rows: 1,
            block,
        }
    }

    /// The rows and blocks of so many queries and keys, where queries see no later keys, or see all.
    pub fn of(self, [seq_q, seq_kv]: [usize; 2], causal: bool) -> ScoreGrid {
        ScoreGrid {
            query_rows: self.query_rows,
            block: self.block,
            seq_q,
            seq_kv,
            causal,
        }
    }
}

/// Properties of an estimator.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EstimatorTraits {
    /// Kind of its scores.
    pub kind: EstimateKind,
    /// True if a query's choice depends on earlier positions only. Where it does not, later tokens leak into the choice: such a choice serves
    /// for reading a prompt, not for generating token by token, and a language model that is trained with it sees a little of the future.
    pub prefix_stable: bool,
    /// True if it is defined only where queries see no later keys.
    pub causal_only: bool,
}

/// Summary of each page that a paged pool stores for an estimator's scores.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum PageSummary {
    /// The largest and the smallest element of each channel: scores are `Σ_c max(q_c · max_c, q_c · min_c)`.
    Bounds,
    /// The mean of the keys: scores are `q · mean`.
    Mean,
}

impl PageSummary {
    /// Rows of a page's summary.
    pub fn rows(self) -> usize {
        match self {
            Self::Bounds => 2,
            Self::Mean => 1,
        }
    }
}

/// Queries and keys whose blocks are to be scored.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct EstimateInputs {
    /// `[batch, heads, seq_q, head_dim]`.
    pub q: Tensor<4>,
    /// `[batch, kv_heads, seq_kv, head_dim]`; `kv_heads` divides `heads`.
    pub k: Tensor<4>,
    /// Factor of dot products before the softmax.
    pub scale: f64,
    /// True if queries see no later keys. The last query sits at the last key.
    pub causal: bool,
}

impl EstimateInputs {
    /// A causal call with the usual scale, 1/√head_dim.
    pub fn new(q: Tensor<4>, k: Tensor<4>) -> Self {
        let scale = 1.0 / (q.dims()[3].max(1) as f64).sqrt();
        Self {
            q,
            k,
            scale,
            causal: true,
        }
    }

    blocksparse::setters! {
        /// Sets what products are multiplied by before a softmax.
        scale: f64,
        /// Sets whether queries see no later keys.
        causal: bool,
    }

    /// The call of plain tensors: no choice has a gradient.
    pub(crate) fn without_autodiff(&self) -> Self {
        Self {
            q: self.q.clone().without_autodiff(),
            k: self.k.clone().without_autodiff(),
            ..*self
        }
    }

    /// Query heads of a key head.
    pub fn group(&self) -> usize {
        self.q.dims()[1] / self.k.dims()[1]
    }

    /// The rows and blocks of the call.
    pub fn grid(&self, grid: EstimateGrid) -> ScoreGrid {
        grid.of([&self.q, &self.k].map(|x| x.dims()[2]), self.causal)
    }
}

/// Queries and keys of one batch entry on the host, in f64: what tests compare with.
#[derive(Clone, Copy, Debug)]
pub struct ReferenceInputs<'a> {
    /// `[heads][seq_q][head_dim]`.
    pub q: &'a [f64],
    /// `[kv_heads][seq_kv][head_dim]`.
    pub k: &'a [f64],
    /// Heads of the queries.
    pub heads: usize,
    /// Heads of the keys, a divisor of them.
    pub kv_heads: usize,
    /// Number of queries.
    pub seq_q: usize,
    /// Number of keys.
    pub seq_kv: usize,
    /// Elements of a query.
    pub head_dim: usize,
    /// Factor of dot products before the softmax.
    pub scale: f64,
    /// True if queries see no later keys.
    pub causal: bool,
}

impl<'a> ReferenceInputs<'a> {
    /// A query.
    pub fn query(&self, head: usize, row: usize) -> &'a [f64] {
        &self.q[(head * self.seq_q + row) * self.head_dim..][..self.head_dim]
    }

    /// A key of the head of keys that a head of queries sees.
    pub fn key(&self, head: usize, row: usize) -> &'a [f64] {
        let head = head / (self.heads / self.kv_heads);
        &self.k[(head * self.seq_kv + row) * self.head_dim..][..self.head_dim]
    }

    /// The rows and blocks of the call.
    pub fn grid(&self, grid: EstimateGrid) -> ScoreGrid {
        grid.of([self.seq_q, self.seq_kv], self.causal)
    }
}

/// The product of two rows.
pub fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

/// Scores of blocks of keys, by queries and keys: a method of content-based selection.
///
/// To add a method, write a file with a struct that implements this, and give `METHODS` a row that reads it from text.
pub trait BlockEstimator: fmt::Debug + Send + Sync {
    /// The text of a selection by this estimator: what [`Selection`](crate::selection::Selection) reads.
    fn text(&self, rule: &Rule, sharing: GqaReduction) -> String;

    /// The rows and blocks of its scores.
    fn grid(&self) -> EstimateGrid;

    /// Properties of the method.
    fn traits(&self) -> EstimatorTraits;

    /// Checks the parameters.
    ///
    /// # Errors
    /// [`OpError`] if one is out of range.
    fn check(&self) -> Result<(), OpError> {
        Ok(())
    }

    /// Checks that a rule is one that the method is defined with.
    ///
    /// # Errors
    /// [`OpError`] if it is not.
    fn check_rule(&self, _rule: &Rule) -> Result<(), OpError> {
        Ok(())
    }

    /// Number of last layers of a model with full attention.
    fn full_last_layers(&self) -> usize {
        0
    }

    /// Number of first layers of a model with full attention.
    fn full_first_layers(&self) -> usize {
        0
    }

    /// The method for one layer that chooses, without [`Self::full_last_layers`] and [`Self::full_first_layers`]. A method that has such layers says it: it is what a
    /// model gives its layers, and a layer refuses one that counts others.
    fn for_layer(&self) -> Option<Arc<dyn BlockEstimator>> {
        None
    }

    /// What of each page of keys its scores follow from, if a [pool of pages](crate::pages) can choose by it.
    fn page_summary(&self) -> Option<PageSummary> {
        None
    }

    /// The scores of rows of queries, f32 `[batch, heads, rows, blocks]`. Those of blocks that a row does not see count for nothing, whatever they are.
    /// Tensors are without autodiff. Nothing is read back.
    ///
    /// # Errors
    /// [`OpError`] if the call is none that the estimator is defined for.
    fn scores(&self, call: &EstimateInputs, rows: Range<usize>) -> Result<Tensor<4>, OpError>;

    /// The same in plain f64 loops: `[heads][rows][blocks]`.
    fn reference(&self, call: &ReferenceInputs) -> Vec<f64>;

    /// Where every query chooses for itself, the blocks of the `most` highest scores before its own, if there is a shorter way to them than by
    /// [`scores`](Self::scores): `[batch, heads, queries, most]` by falling score, ties go to the earlier, −1 where there are fewer. The call's keys are
    /// those between a selection's forced blocks, so a score must follow from its block alone.
    fn picks(&self, _call: &EstimateInputs, _most: usize) -> Option<Tensor<4, Int>> {
        None
    }
}
