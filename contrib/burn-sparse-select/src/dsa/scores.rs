//! The indexer's scores in Burn's operations.

use std::ops::Range;

use crate::selection::parts::in_steps;
use burn_blocksparse::internal::prelude::*;

/// Least number of queries that are scored together, if memory allows. Below it heads are split first, so that matmuls keep this many rows.
const FEWEST_ROWS: usize = 64;

/// Projections of an indexer: queries of several heads, one key per token, and weights of the heads.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct DsaIndex {
    /// `[batch, index_heads, seq_q, index_dim]`
    pub q: Tensor<4>,
    /// `[batch, 1, seq_kv, index_dim]`
    pub k: Tensor<4>,
    /// `[batch, index_heads, seq_q]`
    pub weights: Tensor<3>,
    pub(crate) in_fp8: bool,
}

impl DsaIndex {
    /// Creates an index from queries, keys and weights. The last query is at the position of the last key.
    ///
    /// # Shapes
    /// See the fields.
    ///
    /// # Errors
    /// [`OpError`] if shapes, dtypes or devices do not match, if a size is 0, or if there are more queries than keys.
    pub fn new(q: Tensor<4>, k: Tensor<4>, weights: Tensor<3>) -> Result<Self, OpError> {
        check_index(&q, &k)?;
        let [batch, heads, seq_q, _] = q.dims();
        let (whose, expected) = ("index q's", [batch, heads, seq_q]);
        OpError::expect_same("index weights' shape", expected, whose, weights.dims())?;
        let got = weights.device();
        OpError::expect_same("index weights' device", q.device(), whose, got)?;
        Ok(Self {
            q,
            k,
            weights,
            in_fp8: false,
        })
    }

    pub(crate) fn seq_kv(&self) -> usize {
        self.k.dims()[2]
    }

    pub(crate) fn without_autodiff(self) -> Self {
        Self {
            q: self.q.without_autodiff(),
            k: self.k.without_autodiff(),
            weights: self.weights.without_autodiff(),
            ..self
        }
    }
}

/// Checks that queries and keys form an index.
pub(crate) fn check_index(q: &Tensor<4>, k: &Tensor<4>) -> Result<(), OpError> {
    served(&q.device())?;
    let [batch, heads, seq_q, width] = q.dims();
    let [k_batch, k_heads, seq_kv, k_width] = k.dims();
    for (argument, size) in [
        ("index q's batch", batch),
        ("index q's heads", heads),
        ("index q's index_dim", width),
    ] {
        OpError::ensure_positive(argument, size)?;
    }
    let whose = "index q's";
    OpError::expect_same("index k's batch", batch, whose, k_batch)?;
    OpError::expect_same("index k's heads", 1, "one key a token", k_heads)?;
    OpError::expect_same("index k's index_dim", width, whose, k_width)?;
    crate::selection::check_seq_q("index q's seq_q", seq_q, seq_kv)?;
    OpError::expect_same("index k's device", q.device(), whose, k.device())
}

/// Queries of an indexer, each with a list of candidate keys. Without autodiff.
#[derive(Clone, Debug)]
pub struct DsaLists {
    /// `[queries, index_heads, index_dim]`
    pub q: Tensor<3>,
    /// `[queries, index_heads]`
    pub weights: Tensor<2>,
    /// `[rows, index_dim]`
    pub keys: Tensor<2>,
    /// i32 `[queries, listed]`: rows of `keys`, negative after the last.
    pub slots: Tensor<2, Int>,
    /// i32 `[queries]`: number of listed keys that each query sees.
    pub seen: Tensor<1, Int>,
}

impl DsaLists {
    /// Gathers the listed keys into contiguous rows, where no kernel reads them in place.
    pub(super) fn gathered(&self) -> Result<DsaIndex, OpError> {
        let [_, width] = self.keys.dims();
        let [queries, listed] = self.slots.dims();
        // Entries after the last are not seen, so any row will do.
        let ids = self.slots.clone().clamp_min(0).reshape([queries * listed]);
        let keys = self.keys.clone().select(0, ids);
        DsaIndex::new(
            self.q.clone().unsqueeze_dim(2),
            keys.reshape([queries, 1, listed, width])
                .cast(self.q.dtype()),
            self.weights.clone().unsqueeze_dim(2),
        )
    }
}

/// Inputs of the scores in f32. Products that determine a selection are not rounded to 16 bits.
pub(crate) struct Scores {
    pub q: Tensor<4>,
    pub k: Tensor<4>,
    /// Weights that include the scale of the scores.
    pub weights: Tensor<3>,
    pub scale: f64,
    /// Upper bound of the scores in memory at a time. A single query of one head may exceed it.
    numbers: usize,
}

impl Scores {
    pub fn new(index: &DsaIndex, numbers: usize) -> Self {
        let [_, heads, _, width] = index.q.dims();
        let scale = 1.0 / ((heads * width) as f64).sqrt();
        // Tensors in f64, which tests use, stay in f64.
        let dtype = match index.q.dtype() {
            DType::F64 => DType::F64,
            _ => DType::F32,
        };
        Self {
            q: index.q.clone().cast(dtype),
            k: index.k.clone().cast(dtype),
            weights: index.weights.clone().cast(dtype).mul_scalar(scale),
            scale,
            numbers,
        }
    }

    pub fn heads(&self) -> usize {
        self.q.dims()[1]
    }

    pub fn seq_kv(&self) -> usize {
        self.k.dims()[2]
    }

    /// Returns the ranges of queries that are computed at once, with up to `heads` heads.
    pub fn slabs(&self, heads: usize) -> Vec<Range<usize>> {
        let [batch, _, seq_q, _] = self.q.dims();
        let of_row = batch * self.seq_kv();
        let all = self.numbers / (of_row * heads).max(1);
        let rows = match all >= FEWEST_ROWS {
            true => all,
            false => (self.numbers / of_row).clamp(1, FEWEST_ROWS),
        };
        in_steps(0..seq_q, rows).collect()
    }

    /// Returns how many heads are computed at once with `rows` queries.
    pub fn heads_at_a_time(&self, rows: usize) -> usize {
        let of_head = self.q.dims()[0] * rows * self.seq_kv();
        (self.numbers / of_head.max(1)).max(1)
    }

    /// Returns the parts of the heads for `rows` queries.
    pub fn parts(&self, rows: usize) -> impl Iterator<Item = Range<usize>> {
        in_steps(0..self.heads(), self.heads_at_a_time(rows))
    }

    /// Returns queries, and weights `[batch, heads, rows, 1]`, of a range of heads and rows.
    pub fn part(&self, heads: &Range<usize>, rows: &Range<usize>) -> (Tensor<4>, Tensor<4>) {
        let q = self.q.clone().slice_dim(1, heads.clone());
        let weights = self.weights.clone().slice_dim(1, heads.clone());
        let weights = weights.slice_dim(2, rows.clone());
        (q.slice_dim(2, rows.clone()), weights.unsqueeze_dim(3))
    }

    /// Computes `relu(q · k)`: `[batch, heads, rows, seq_kv]`.
    pub fn products(&self, q: Tensor<4>) -> Tensor<4> {
        let [batch, heads, rows, width] = q.dims();
        // One matmul for all heads.
        let q = q.reshape([batch, 1, heads * rows, width]);
        let products = q.matmul(self.k.clone().swap_dims(2, 3)).clamp_min(0.0);
        products.reshape([batch, heads, rows, self.seq_kv()])
    }

    /// Computes the scores of a range of queries over all keys: `[batch, rows, seq_kv]`.
    pub fn of_rows(&self, rows: Range<usize>) -> Tensor<3> {
        let parts = self.parts(rows.len()).map(|heads| {
            let (q, weights) = self.part(&heads, &rows);
            (self.products(q) * weights).sum_dim(1).squeeze_dim(1)
        });
        parts.reduce(|a, b| a + b).expect("there is a head")
    }
}

/// Returns how many queries kernels score at once, with about `numbers` scores.
pub(crate) fn together([batch, _, seq_q, _]: [usize; 4], seq_kv: usize, numbers: usize) -> usize {
    (numbers / (batch * seq_kv)).clamp(1, seq_q)
}
