//! The trait of methods that estimate how much attention each key block gets.

use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use blocksparse::{EstimateKind, Rule, ScoreGrid};
use burn::tensor::{Int, Tensor};

use crate::selection::sharing::GqaReduction;
use burn_blocksparse::OpError;

/// Granularity of an estimator's scores.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EstimateGrid {
    /// Number of adjacent queries that share a selection.
    pub query_rows: usize,
    /// Number of keys of a block.
    pub block: usize,
}

impl EstimateGrid {
    /// Creates a grid of blocks of `block` queries and `block` keys.
    pub fn square(block: usize) -> Self {
        Self {
            query_rows: block,
            block,
        }
    }

    /// Creates a grid of single queries and blocks of `block` keys.
    pub fn by_query(block: usize) -> Self {
        Self {
            query_rows: 1,
            block,
        }
    }

    /// Returns the score grid of these sequence lengths.
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
    /// True if a query's selection depends on earlier positions only. Otherwise later tokens leak into it. Such a selection suits prefill, not decoding, and a
    /// language model that trains with it sees a little of the future.
    pub prefix_stable: bool,
    /// True if the method is defined for causal attention only.
    pub causal_only: bool,
}

/// Summary of each page that a paged pool stores for an estimator's scores.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum PageSummary {
    /// Largest and smallest element of each channel. Scores are `Σ_c max(q_c · max_c, q_c · min_c)`.
    Bounds,
    /// Mean of the keys. Scores are `q · mean`.
    Mean,
}

impl PageSummary {
    /// Returns the number of rows of a page's summary.
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
    /// Factor of the dot products before the softmax.
    pub scale: f64,
    /// True if queries see no later keys. The last query is at the position of the last key.
    pub causal: bool,
}

impl EstimateInputs {
    /// Creates a causal call with the usual scale, 1/√head_dim.
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
        /// Sets the factor of the dot products before the softmax.
        scale: f64,
        /// Sets whether queries see no later keys.
        causal: bool,
    }

    /// Returns the call with tensors without autodiff: a selection has no gradient.
    pub(crate) fn without_autodiff(&self) -> Self {
        Self {
            q: self.q.clone().without_autodiff(),
            k: self.k.clone().without_autodiff(),
            ..*self
        }
    }

    /// Returns the number of query heads per KV head.
    pub fn group(&self) -> usize {
        self.q.dims()[1] / self.k.dims()[1]
    }

    /// Returns the score grid of the call.
    pub fn grid(&self, grid: EstimateGrid) -> ScoreGrid {
        grid.of([&self.q, &self.k].map(|x| x.dims()[2]), self.causal)
    }
}

/// Queries and keys of one batch entry on the host, in f64. Tests compare with results from these.
#[derive(Clone, Copy, Debug)]
pub struct ReferenceInputs<'a> {
    /// `[heads][seq_q][head_dim]`.
    pub q: &'a [f64],
    /// `[kv_heads][seq_kv][head_dim]`.
    pub k: &'a [f64],
    /// Number of query heads.
    pub heads: usize,
    /// Number of KV heads, a divisor of `heads`.
    pub kv_heads: usize,
    /// Number of queries.
    pub seq_q: usize,
    /// Number of keys.
    pub seq_kv: usize,
    /// Number of elements of a query or a key.
    pub head_dim: usize,
    /// Factor of the dot products before the softmax.
    pub scale: f64,
    /// True if queries see no later keys.
    pub causal: bool,
}

impl<'a> ReferenceInputs<'a> {
    /// Returns a query.
    pub fn query(&self, head: usize, row: usize) -> &'a [f64] {
        &self.q[(head * self.seq_q + row) * self.head_dim..][..self.head_dim]
    }

    /// Returns a key of the KV head that query head `head` uses.
    pub fn key(&self, head: usize, row: usize) -> &'a [f64] {
        let head = head / (self.heads / self.kv_heads);
        &self.k[(head * self.seq_kv + row) * self.head_dim..][..self.head_dim]
    }

    /// Returns the score grid of the call.
    pub fn grid(&self, grid: EstimateGrid) -> ScoreGrid {
        grid.of([self.seq_q, self.seq_kv], self.causal)
    }
}

/// Returns the dot product of two vectors.
pub fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

/// A method of content-based selection: scores of key blocks, computed from queries and keys.
///
/// To add a method, implement this for a struct in a file of its own, and add a row to `METHODS` that parses it from text.
pub trait BlockEstimator: fmt::Debug + Send + Sync {
    /// Returns the text of a selection by this estimator, as [`Selection`](crate::selection::Selection) parses it.
    fn text(&self, rule: &Rule, sharing: GqaReduction) -> String;

    /// Returns the granularity of the scores.
    fn grid(&self) -> EstimateGrid;

    /// Returns the properties of the method.
    fn traits(&self) -> EstimatorTraits;

    /// Checks the parameters.
    ///
    /// # Errors
    /// [`OpError`] if one is out of range.
    fn check(&self) -> Result<(), OpError> {
        Ok(())
    }

    /// Checks that the method is defined for a rule.
    ///
    /// # Errors
    /// [`OpError`] if it is not.
    fn check_rule(&self, _rule: &Rule) -> Result<(), OpError> {
        Ok(())
    }

    /// Returns how many of a model's last layers use full attention.
    fn full_last_layers(&self) -> usize {
        0
    }

    /// Returns how many of a model's first layers use full attention.
    fn full_first_layers(&self) -> usize {
        0
    }

    /// Returns the method for a single selecting layer, without [`Self::full_last_layers`] and [`Self::full_first_layers`]. Methods that have such layers
    /// return `Some`: a model passes the result to its layers, and a single layer refuses a method with a nonzero number of such layers.
    fn for_layer(&self) -> Option<Arc<dyn BlockEstimator>> {
        None
    }

    /// Returns the page summary that the scores follow from, if a [pool of pages](crate::pages) can select by this method.
    fn page_summary(&self) -> Option<PageSummary> {
        None
    }

    /// Returns the scores of a range of query rows: f32 `[batch, heads, rows, blocks]`. Scores of blocks that a row does not see are ignored and may have any
    /// value. Tensors are without autodiff. Reads nothing back.
    ///
    /// # Errors
    /// [`OpError`] if the estimator is not defined for the call.
    fn scores(&self, call: &EstimateInputs, rows: Range<usize>) -> Result<Tensor<4>, OpError>;

    /// Computes [`scores`](Self::scores) of all rows in f64 loops: `[heads][rows][blocks]`.
    fn reference(&self, call: &ReferenceInputs) -> Vec<f64>;

    /// Returns the `most` highest-scoring blocks before each query's own, if the method has a faster way than [`scores`](Self::scores). Per-query selection
    /// only. `[batch, heads, queries, most]` in descending order of scores, ties in favor of the earlier block, −1 where there are fewer. The call's keys are
    /// those between a selection's forced blocks, so a score may depend on its own block only.
    fn picks(&self, _call: &EstimateInputs, _most: usize) -> Option<Tensor<4, Int>> {
        None
    }
}
