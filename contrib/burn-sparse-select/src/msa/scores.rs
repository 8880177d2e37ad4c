//! Inputs of an index branch, and the highest score of each key block for some queries at a time: by a kernel that writes only these, or from the scores of
//! single keys.

use std::cell::OnceCell;
use std::f64::consts::SQRT_2;
use std::ops::Range;

use burn::tensor::{DType, Tensor};

#[cfg(feature = "cube")]
use crate::dsa::kernels;
use crate::dsa::{DsaIndex, Slabs, check_index, together};
#[cfg(feature = "cube")]
use crate::kernels::selection::MOST_RUN;
use crate::selection::parts::{in_steps, joined, padded};
use burn_blocksparse::OpError;

/// Inputs of block scores.
pub(super) struct BlockScores {
    index: MsaIndex,
    /// The index in the form that scores single keys.
    of_keys: OnceCell<DsaIndex>,
    block: usize,
    /// Number of scores of single keys in memory at a time.
    numbers: usize,
}

impl BlockScores {
    /// Creates the inputs from an index without autodiff.
    pub fn new(index: MsaIndex, block: usize, numbers: usize) -> Self {
        Self {
            index,
            of_keys: OnceCell::new(),
            block,
            numbers,
        }
    }

    /// Returns how many queries have their block scores in memory at a time, 2²⁶ scores. This is a small part of all queries, since a kernel computes all
    /// blocks that the last of them sees.
    pub fn rows_at_a_time(&self) -> usize {
        let [batch, groups, seq_q, _] = self.index.q.dims();
        let of_row = batch * groups * self.index.seq_kv().div_ceil(self.block);
        let fitting = (1 << 26) / of_row;
        fitting.min((seq_q / 16).max(1024)).max(64)
    }

    /// Returns numbers in the order of the scores of the blocks before each query's own: `[batch, groups, rows, blocks]`, with at least the blocks of the last
    /// query. Other entries are unspecified.
    pub fn of_candidates(&self, rows: Range<usize>) -> Result<Tensor<4>, OpError> {
        let ([_, _, seq_q, _], seq_kv) = (self.index.q.dims(), self.index.seq_kv());
        let own = (rows.end - 1 + seq_kv - seq_q) / self.block;
        // Rounding the number of blocks leaves few distinct sizes, so that memory is reused. All of these blocks are complete.
        let whole = seq_kv / self.block;
        let blocks = own.max(1).next_multiple_of(whole.div_ceil(16));
        match self.by_kernel(&rows, blocks.min(whole)) {
            Some(products) => Ok(products),
            None => self.maxima(rows, false),
        }
    }

    /// Returns the scores of all blocks: `[batch, groups, seq_q, blocks]`.
    pub fn all(&self) -> Result<Tensor<4>, OpError> {
        let [_, _, seq_q, _] = self.index.q.dims();
        self.maxima(0..seq_q, true)
    }

    /// Computes the products of the first `blocks` blocks, which are unscaled scores, if a kernel serves them.
    #[cfg(feature = "cube")]
    fn by_kernel(&self, rows: &Range<usize>, blocks: usize) -> Option<Tensor<4>> {
        let MsaIndex { q, k } = &self.index;
        let run = self.block.min(MOST_RUN);
        let runs = self.block / run;
        let of_runs = kernels::maxima([q, k], [rows.start, rows.len()], [run, blocks * runs])?;
        if runs == 1 {
            return Some(of_runs);
        }
        let [batch, groups, rows, _] = of_runs.dims();
        let of_runs = of_runs.reshape([batch * groups, rows, blocks, runs]);
        Some(of_runs.max_dim(3).reshape([batch, groups, rows, blocks]))
    }

    #[cfg(not(feature = "cube"))]
    fn by_kernel(&self, _: &Range<usize>, _: usize) -> Option<Tensor<4>> {
        None
    }

    fn of_keys(&self) -> Result<&DsaIndex, OpError> {
        if let Some(known) = self.of_keys.get() {
            return Ok(known);
        }
        let made = self.index.of_groups()?;
        Ok(self.of_keys.get_or_init(|| made))
    }

    /// Computes the highest score of each block for a range of queries. Unless `all` is true, scores from a query's own block on are unspecified.
    fn maxima(&self, rows: Range<usize>, all: bool) -> Result<Tensor<4>, OpError> {
        let index = self.of_keys()?;
        let ([batch, groups, seq_q, _], seq_kv) = (self.index.q.dims(), self.index.seq_kv());
        let blocks = seq_kv.div_ceil(self.block);
        let step = together(index.q.dims(), seq_kv, self.numbers);
        let parts = in_steps(rows, step).map(|rows| {
            let count = rows.len();
            // Blocks before that of the last query are complete.
            let own = (rows.end - 1 + seq_kv - seq_q) / self.block;
            let is_part = !all && own * self.block >= count;
            let keys = if is_part { own * self.block } else { seq_kv };
            let part = DsaIndex {
                q: index.q.clone().slice_dim(2, rows.clone()),
                k: index.k.clone().slice_dim(2, 0..keys),
                weights: index.weights.clone().slice_dim(2, rows),
                ..*index
            };
            let x = Slabs::new(&part, self.numbers).scores(0..count, 0, true);
            let known = keys.div_ceil(self.block);
            let x = match known * self.block - keys {
                0 => x,
                // Pads the last block with its last key.
                behind => {
                    let last = x.clone().slice_dim(2, keys - 1..keys);
                    let dims = [batch * groups, count, behind];
                    Tensor::cat(vec![x, last.expand(dims)], 2)
                }
            };
            let x = x.reshape([batch * groups * count, known, self.block]);
            let x = x.max_dim(2).reshape([batch, groups, count, known]);
            padded(x, 3, [0, blocks - known])
        });
        Ok(joined(parts.collect(), 2))
    }
}

/// Projections of an index branch: one query head per KV head of the attention, and one key per token, which all share.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct MsaIndex {
    /// `[batch, kv_heads, seq_q, index_dim]`
    pub q: Tensor<4>,
    /// `[batch, 1, seq_kv, index_dim]`
    pub k: Tensor<4>,
}

impl MsaIndex {
    /// Creates an index. The last query is at the position of the last key.
    ///
    /// # Shapes
    /// See the fields.
    ///
    /// # Errors
    /// [`OpError`] if shapes or devices do not match, if a size is 0, or if there are more queries than keys.
    pub fn new(q: Tensor<4>, k: Tensor<4>) -> Result<Self, OpError> {
        check_index(&q, &k)?;
        Ok(Self { q, k })
    }

    /// Returns the index with other keys, such as those of a cache.
    ///
    /// # Errors
    /// Those of [`Self::new`].
    pub fn with_keys(self, k: Tensor<4>) -> Result<Self, OpError> {
        Self::new(self.q, k)
    }

    pub(super) fn seq_kv(&self) -> usize {
        self.k.dims()[2]
    }

    pub(super) fn without_autodiff(self) -> Self {
        Self {
            q: self.q.without_autodiff(),
            k: self.k.without_autodiff(),
        }
    }

    /// Returns a range of queries with the keys up to the last of them.
    pub(super) fn of_rows(&self, rows: std::ops::Range<usize>) -> Self {
        let [_, _, seq_q, _] = self.q.dims();
        let end = rows.end + self.seq_kv() - seq_q;
        Self {
            q: self.q.clone().slice_dim(2, rows),
            k: self.k.clone().slice_dim(2, 0..end),
        }
    }

    /// Returns an index of [`Dsa`](crate::dsa::Dsa) with the same scores, whose batch entries are KV heads. Because `z = relu(z) − relu(−z)`, two of its heads
    /// make up one of these.
    pub(super) fn of_groups(&self) -> Result<DsaIndex, OpError> {
        let [batch, groups, seq_q, width] = self.q.dims();
        let seq_kv = self.seq_kv();
        let all = batch * groups;
        let q = self.q.clone().reshape([all, 1, seq_q, width]);
        let k = self.k.clone().expand([batch, groups, seq_kv, width]);
        let dtype = match q.dtype() {
            DType::F64 => DType::F64,
            _ => DType::F32,
        };
        // The scale of that index is 1/√(2 · width).
        let weights = Tensor::full([all, 1, seq_q], SQRT_2, (&q.device(), dtype));
        DsaIndex::new(
            Tensor::cat(vec![q.clone(), q.neg()], 1),
            k.reshape([all, 1, seq_kv, width]),
            Tensor::cat(vec![weights.clone(), weights.neg()], 1),
        )
    }
}
