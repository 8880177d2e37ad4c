//! What an index branch makes of tokens, and the highest score of each block of keys, of some queries at a time: by a kernel that writes nothing else, or from the scores of single keys.

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

/// What the scores of blocks are made of.
pub(super) struct BlockScores {
    index: MsaIndex,
    /// The same, of single keys.
    of_keys: OnceCell<DsaIndex>,
    block: usize,
    /// Scores of single keys in memory at a time.
    numbers: usize,
}

impl BlockScores {
    /// Of an index that is not on an autodiff device.
    pub fn new(index: MsaIndex, block: usize, numbers: usize) -> Self {
        Self {
            index,
            of_keys: OnceCell::new(),
            block,
            numbers,
        }
    }

    /// Queries whose scores of blocks are in memory at a time, 2²⁶ of them: few beside all queries, since a kernel makes them for all blocks that the last of
    /// these sees.
    pub fn rows_at_a_time(&self) -> usize {
        let [batch, groups, seq_q, _] = self.index.q.dims();
        let of_row = batch * groups * self.index.seq_kv().div_ceil(self.block);
        let fitting = (1 << 26) / of_row;
        fitting.min((seq_q / 16).max(1024)).max(64)
    }

    /// In the order of scores the blocks before each query's own, of some queries: `[batch, groups, rows, blocks]`, as many as the last of them has, or more.
    /// Others say nothing.
    pub fn of_candidates(&self, rows: Range<usize>) -> Result<Tensor<4>, OpError> {
        let ([_, _, seq_q, _], seq_kv) = (self.index.q.dims(), self.index.seq_kv());
        let own = (rows.end - 1 + seq_kv - seq_q) / self.block;
        // Of few sizes, so that memory is used again; all of them whole.
        let whole = seq_kv / self.block;
        let blocks = own.max(1).next_multiple_of(whole.div_ceil(16));
        match self.by_kernel(&rows, blocks.min(whole)) {
            Some(products) => Ok(products),
            None => self.maxima(rows, false),
        }
    }

    /// The scores of all blocks: `[batch, groups, seq_q, blocks]`.
    pub fn all(&self) -> Result<Tensor<4>, OpError> {
        let [_, _, seq_q, _] = self.index.q.dims();
        self.maxima(0..seq_q, true)
    }

    /// Products, which are scores but for a factor, of so many of the first blocks, if a kernel makes them.
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

    /// The highest score of each block, of some queries. Unless `all` are wanted, those from a query's own block on say nothing.
    fn maxima(&self, rows: Range<usize>, all: bool) -> Result<Tensor<4>, OpError> {
        let index = self.of_keys()?;
        let ([batch, groups, seq_q, _], seq_kv) = (self.index.q.dims(), self.index.seq_kv());
        let blocks = seq_kv.div_ceil(self.block);
        let step = together(index.q.dims(), seq_kv, self.numbers);
        let parts = in_steps(rows, step).map(|rows| {
            let count = rows.len();
            // Blocks before that of the last query are whole.
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
                // The last block is filled up with its last key.
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

/// Projections of an index branch: a query head for each KV head of the attention, and one key per token, shared by all.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct MsaIndex {
    /// `[batch, kv_heads, seq_q, index_dim]`
    pub q: Tensor<4>,
    /// `[batch, 1, seq_kv, index_dim]`
    pub k: Tensor<4>,
}

impl MsaIndex {
    /// The last query sits at the last key.
    ///
    /// # Shapes
    /// As the fields have them.
    ///
    /// # Errors
    /// [`OpError`] if shapes or devices do not fit each other, if a size is 0, or if there are more queries than keys.
    pub fn new(q: Tensor<4>, k: Tensor<4>) -> Result<Self, OpError> {
        check_index(&q, &k)?;
        Ok(Self { q, k })
    }

    /// The same with other keys, as a cache has them.
    ///
    /// # Errors
    /// As [`Self::new`].
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

    /// So many queries, with the keys up to the last of them.
    pub(super) fn of_rows(&self, rows: std::ops::Range<usize>) -> Self {
        let [_, _, seq_q, _] = self.q.dims();
        let end = rows.end + self.seq_kv() - seq_q;
        Self {
            q: self.q.clone().slice_dim(2, rows),
            k: self.k.clone().slice_dim(2, 0..end),
        }
    }

    /// The index of [`Dsa`](crate::dsa::Dsa) with the same scores, of which each head of keys is a batch entry: `z = relu(z) − relu(−z)`, so two of its heads are
    /// one of these.
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
        // The scale there is 1/√(2 · width).
        let weights = Tensor::full([all, 1, seq_q], SQRT_2, (&q.device(), dtype));
        DsaIndex::new(
            Tensor::cat(vec![q.clone(), q.neg()], 1),
            k.reshape([all, 1, seq_kv, width]),
            Tensor::cat(vec![weights.clone(), weights.neg()], 1),
        )
    }
}
