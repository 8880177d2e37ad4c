//! Two-stage selection: first blocks of keys, then single keys within them (HISA: Xu et al., 2026, arXiv 2603.28458).

use burn::tensor::{DType, Int, Tensor};
use burn_blocksparse::OpError;
use burn_blocksparse::internal::arange;

use crate::dsa::Dsa;
#[cfg(feature = "cube")]
use crate::dsa::kernels;
use crate::dsa::scores::{DsaIndex, DsaLists};
use crate::dsa::slabs::has_kernels;
use crate::selection::parts::{in_steps, padded};

/// Blocks in which a query selects its keys.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Blocks {
    pub count: usize,
    /// Number of keys of a block.
    pub size: usize,
}

impl Blocks {
    /// Returns the number of keys of all blocks.
    pub fn keys(&self) -> usize {
        self.count.saturating_mul(self.size)
    }

    /// Returns the number of blocks that may contain near keys: the query's own and some before it.
    fn local(&self, near: usize) -> usize {
        1 + (near.max(1) - 1).div_ceil(self.size)
    }
}

impl Dsa {
    /// Selects in two stages (HISA: Xu et al., 2026), for sequences of more than `blocks` blocks of `block` keys. A query first selects `blocks` blocks, by the
    /// indexer's score with the mean of a block's keys as key. The first block, the query's own and those of [near](Self::with_near) keys are always among
    /// them. Then it selects among the keys of these blocks by the usual scores. The paper uses 64 blocks of 128 keys, on models that were trained without.
    ///
    /// ```
    /// use burn::tensor::{Device, Distribution, Tensor};
    /// use burn_sparse_select::dsa::{Dsa, DsaIndex};
    ///
    /// let device = Device::flex();
    /// let random = |heads, width| Tensor::<4>::random([1, heads, 256, width], Distribution::Default, &device);
    /// let index = DsaIndex::new(random(2, 8), random(1, 8), random(2, 1).squeeze_dim(3))?;
    /// // 12 keys of three blocks of 16.
    /// let lists = Dsa::new(12)?.with_blocks(3, 16)?.choose(&index)?;
    /// assert_eq!(lists.keys().dims(), [1, 1, 256, 12]);
    /// # Ok::<(), burn_blocksparse::OpError>(())
    /// ```
    ///
    /// # Errors
    /// [`OpError`] if `block` is 0, or if `blocks` is too small for the forced blocks or for `keep` keys.
    pub fn with_blocks(self, blocks: usize, block: usize) -> Result<Self, OpError> {
        OpError::ensure_positive("block", block)?;
        let within = Some(Blocks {
            count: blocks,
            size: block,
        });
        Self { within, ..self }.with_enough_blocks()
    }

    /// Returns the number of blocks that a query selects first, and the keys of a block.
    pub fn blocks(&self) -> Option<[usize; 2]> {
        self.within.map(|of| [of.count, of.size])
    }

    pub(super) fn with_enough_blocks(self) -> Result<Self, OpError> {
        if let Some(of) = self.within {
            let least = (1 + of.local(self.near)).max(self.keep.div_ceil(of.size));
            blocksparse::ensure! {
                OpError;
                of.count >= least =>
                    "blocks", format!("at least {least}, the first, those of near keys and as many as have keep keys"), of.count;
            }
        }
        Ok(self)
    }

    /// Runs [`listed`](Self::listed) in two stages. `seen` is the number of keys that each query sees, `[batch or 1, seq_q]`.
    pub(super) fn listed_in_blocks(
        &self,
        index: &DsaIndex,
        seen: Tensor<2, Int>,
        of: Blocks,
    ) -> Result<Tensor<3, Int>, OpError> {
        let [batch, _, seq_q, _] = index.q.dims();
        let Blocks { count, size } = of;
        let size = size as i32;
        let own = seen.clone().sub_scalar(1).clamp_min(0).div_scalar(size);
        let in_own = seen - own.clone().mul_scalar(size);
        let one_stage = Self {
            within: None,
            ..*self
        };
        // The first block has no score, so the number of other blocks that a query sees is the index of its own block.
        let first = Self {
            keep: count - 1,
            near: of.local(self.near),
            ..one_stage
        };
        let others = first.listed(&index.means_behind_first(of.size), Some(own.clone()))?;
        let none = others.clone().lower_elem(0);
        let others = others.add_scalar(1).mask_fill(none, -1);
        let first = Tensor::zeros([batch, seq_q, 1], (&index.q.device(), DType::I32));
        let blocks = Tensor::cat(vec![first, others], 2);
        // Number of listed keys that a query sees. Its own block is the last; the others are complete.
        let seen = own.clamp_max(count as i32 - 1).mul_scalar(size) + in_own;
        #[cfg(feature = "cube")]
        {
            let (lists, picks) = ((&blocks, &seen), [self.keep, self.near]);
            let keys = kernels::top_k_in_blocks(index, lists, picks, of.size, self.numbers);
            if let Some(keys) = keys {
                return Ok(keys);
            }
        }
        one_stage.listed_among(index, blocks, seen, of)
    }

    /// Selects among the keys of blocks that each query lists, i32 `[batch, seq_q, blocks]`, ascending, then −1. A query sees the first `seen` of these keys.
    fn listed_among(
        &self,
        index: &DsaIndex,
        blocks: Tensor<3, Int>,
        seen: Tensor<2, Int>,
        of: Blocks,
    ) -> Result<Tensor<3, Int>, OpError> {
        let [batch, heads, seq_q, width] = index.q.dims();
        let (seq_kv, listed, size) = (index.seq_kv(), of.keys(), of.size);
        let device = index.q.device();
        let numbers = |count: usize| arange(count, &device);
        let entries = numbers(batch).mul_scalar(seq_kv as i32);
        // Without a kernel that reads keys in place, keys are copied for each query.
        let each = match has_kernels(index, self.numbers) {
            true => 1,
            false => width,
        };
        let step = (self.numbers / (batch * listed * each)).clamp(1, seq_q);
        let mut chosen = Vec::new();
        for rows in in_steps(0..seq_q, step) {
            let (count, all) = (rows.len(), batch * rows.len());
            let wide = [batch, count, of.count, size];
            let blocks = blocks.clone().slice_dim(1, rows.clone());
            let blocks = blocks.mul_scalar(size as i32).unsqueeze_dim::<4>(3);
            let keys = blocks.expand(wide) + numbers(size).reshape([1, 1, 1, size]).expand(wide);
            let wide = [batch, count, listed];
            let keys = keys.reshape(wide);
            let seen = seen
                .clone()
                .slice_dim(1, rows.clone())
                .expand([batch, count]);
            let places = numbers(listed).reshape([1, 1, listed]).expand(wide);
            let unseen = places.greater_equal(seen.clone().unsqueeze_dim::<3>(2).expand(wide));
            let slots = keys.clone() + entries.clone().reshape([batch, 1, 1]).expand(wide);
            let q = index.q.clone().slice_dim(2, rows.clone()).swap_dims(1, 2);
            let weights = index.weights.clone().slice_dim(2, rows).swap_dims(1, 2);
            let places = self.choose_in_lists(&DsaLists {
                q: q.reshape([all, heads, width]),
                weights: weights.reshape([all, heads]),
                keys: index.k.clone().reshape([batch * seq_kv, width]),
                slots: slots.mask_fill(unseen, -1).reshape([all, listed]),
                seen: seen.reshape([all]),
            })?;
            let places = places.reshape([batch, count, self.keep]);
            let none = places.clone().lower_elem(0);
            let keys = keys.gather(2, places.clamp_min(0));
            chosen.push(keys.mask_fill(none, -1));
        }
        Ok(Tensor::cat(chosen, 1))
    }
}

impl DsaIndex {
    /// Returns the index whose keys are the means of blocks, except the first block. The last block may be incomplete, but queries that see it never select it
    /// by its mean.
    fn means_behind_first(&self, size: usize) -> Self {
        let [batch, _, seq_kv, width] = self.k.dims();
        let blocks = seq_kv.div_ceil(size);
        let dtype = self.k.dtype();
        let k = match dtype {
            DType::F64 => self.k.clone(),
            _ => self.k.clone().cast(DType::F32),
        };
        let k = padded(k.slice_dim(2, size..seq_kv), 2, [0, blocks * size - seq_kv]);
        let k = k.reshape([batch, blocks - 1, size, width]).mean_dim(2);
        Self {
            k: k.reshape([batch, 1, blocks - 1, width]).cast(dtype),
            // Means are not rounded.
            in_fp8: false,
            ..self.clone()
        }
    }
}
