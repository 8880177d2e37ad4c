//! MiniMax sparse attention (MSA: MiniMax, 2026, arXiv 2606.13392): an index branch chooses blocks of keys for each query and head of keys.

// mod    the choice, and attention over it
// scores what blocks are chosen by, and the highest of each block
// loss   what the index branch learns by

mod loss;
mod scores;

use blocksparse::{BLOCK_SIZES, BlockLayout, LayoutShape, Pattern, ScoreGrid};
use burn::tensor::{Int, Tensor};

use crate::msa::scores::BlockScores;
use crate::pages::page_choice::OWN;
use crate::pages::{PageChoice, topk_pages};
use crate::selection::check_wide_block;
use crate::selection::estimator::EstimateGrid;
use crate::selection::layouts::LayoutCache;
use crate::selection::lists::{check_options, selected_blocks_attention};
use crate::selection::parts::{in_steps, padded};
use crate::selection::query_lists::{ListSizes, SelectedBlocks};
use burn_blocksparse::{AttentionOptions, OpError, SparseAttentionCall};
pub use loss::MsaTarget;
pub use scores::MsaIndex;

/// MiniMax sparse attention (MiniMax, 2026): every query attends to `keep` blocks of `block` keys, its own among them. Each KV head chooses for all
/// query heads that share it, by an index branch with one narrow query head per KV head and one key per token:
///
/// ```text
/// x[g, i, J] = max over keys j of block J of q[g, i] · k[j] / √index_dim
/// ```
///
/// Ties go to the earlier block, and NaN sorts last. A choice follows from earlier tokens alone: blocks before a query's own are whole. The
/// paper has blocks of 128, 16 of them, and `index_dim` 128.
///
/// The choice has no gradient. The index branch learns by [`loss`](Self::loss), against the attention of the heads that share its choice.
///
/// ```
/// use burn::tensor::{Device, Distribution, Tensor};
/// use burn_blocksparse::AttentionOptions;
/// use burn_sparse_select::msa::{Msa, MsaIndex, MsaTarget};
///
/// let device = Device::flex().autodiff();
/// let random = |heads, width| Tensor::<4>::random([1, heads, 64, width], Distribution::Default, &device);
/// let (q, k, v) = (random(4, 16), random(2, 16), random(2, 16));
/// // An index of width 8, whose tokens the model does not learn by.
/// let queries = random(2, 8).require_grad();
/// let index = MsaIndex::new(queries.clone(), random(1, 8))?;
/// // Three of eight blocks.
/// let msa = Msa::new(8, 3)?;
/// let lists = msa.choose(&index)?;
/// let options = AttentionOptions::default();
/// let (out, lse) = msa.attention(q.clone(), k.clone(), v, lists.clone(), options)?;
/// assert_eq!(out.dims(), [1, 4, 64, 16]);
/// let over = MsaTarget::Chosen { lists: lists.as_ref(), lse: &lse };
/// let loss = msa.loss(&index, [&q, &k], None, over)?;
/// assert_eq!(queries.grad(&loss.backward()).unwrap().dims(), [1, 2, 64, 8]);
/// # Ok::<(), burn_blocksparse::OpError>(())
/// ```
#[derive(Clone, Debug)]
pub struct Msa {
    block: usize,
    keep: usize,
    numbers: usize,
    layouts: LayoutCache,
}

/// What adjacent queries choose in common: that of [`Nsa`](crate::nsa::Nsa), whose choice is of the same kind. Kernels are chosen by it.
const OVERLAP: f64 = 0.85;

/// Elements of queries, or of outputs, that are processed at a time: kernels count to 2³², and parts of outputs take many times as many.
const TOGETHER: usize = 1 << 30;

/// Scores of single keys in memory at a time: 256 MiB, so that launches are few.
const NUMBERS: usize = 1 << 26;

impl Msa {
    /// Attention to `keep` blocks of `block` keys.
    ///
    /// # Errors
    /// [`OpError`] if `block` is not 8, 16, 32, 64, 128 or a larger multiple of 128, or `keep` is 0.
    pub fn new(block: usize, keep: usize) -> Result<Self, OpError> {
        check_wide_block("block", block)?;
        if keep == 0 {
            return Err(OpError::argument("keep", "at least 1, the own block", 0));
        }
        Ok(Self {
            block,
            keep,
            numbers: NUMBERS,
            layouts: LayoutCache::default(),
        })
    }

    /// The same with so many scores of single keys in memory at a time, of whole queries, one at least: 2²⁶ unless it is set. Fewer take longer.
    ///
    /// # Errors
    /// [`OpError`] if it is 0.
    pub fn with_chunk_elements(self, numbers: usize) -> Result<Self, OpError> {
        OpError::ensure_positive("numbers", numbers)?;
        Ok(Self { numbers, ..self })
    }

    /// Keys of a block.
    pub fn block(&self) -> usize {
        self.block
    }

    /// Blocks that a query attends to, at most.
    pub fn keep(&self) -> usize {
        self.keep
    }

    /// Keys that a query attends to that sees so many.
    pub fn attended(&self, keys: usize) -> usize {
        let before = keys.saturating_sub(1) / self.block;
        before.min(self.keep - 1) * self.block + (keys - before * self.block)
    }

    /// Returns whether queries of so many keys see all of them.
    fn sees_all(&self, seq_kv: usize) -> bool {
        seq_kv.div_ceil(self.block) <= self.keep
    }

    /// The blocks that each query chooses in addition to its own, in lists of the heads of keys. None if there is nothing to choose: no more blocks than are kept, or
    /// the own one alone. Scores of blocks are in memory for some queries at a time, and where no kernel makes those alone also of single keys, 2²⁶ elements of
    /// them. Nothing is read back where kernels run.
    ///
    /// # Errors
    /// [`OpError`] if the index does not fit the device's kernels.
    pub fn choose(&self, index: &MsaIndex) -> Result<Option<SelectedBlocks>, OpError> {
        let ([_, _, seq_q, _], seq_kv) = (index.q.dims(), index.seq_kv());
        let grid = self.grid(seq_q, seq_kv);
        if self.sees_all(seq_kv) {
            return Ok(None);
        }
        let Some(sizes) = ListSizes::new(grid, self.keep, OWN) else {
            return Ok(None);
        };
        let scores = self.scores(index);
        let of_rows = |rows| scores.of_candidates(rows);
        let lists = SelectedBlocks::new(of_rows, scores.rows_at_a_time(), &sizes)?;
        lists.with_group_reuse(OVERLAP).map(Some)
    }

    /// The scores of all blocks, f32 `[batch, kv_heads, seq_q, blocks]`, without autodiff; those that a query does not see, or not whole, among them: for
    /// looking at.
    ///
    /// # Errors
    /// As [`Self::choose`].
    pub fn block_scores(&self, index: &MsaIndex) -> Result<Tensor<4>, OpError> {
        self.scores(index).all()
    }

    fn scores(&self, index: &MsaIndex) -> BlockScores {
        BlockScores::new(index.clone().without_autodiff(), self.block, self.numbers)
    }

    /// Attention to the blocks of [`choose`](Self::choose) and to each query's own, or to all keys up to a query's position where there are no more blocks than
    /// are kept: out and lse. Differentiable in q, k and v; backward is deterministic.
    ///
    /// # Shapes
    /// - `q`: `[batch, heads, seq_q, head_dim]`; `k`, `v`: `[batch, kv_heads, seq_kv, width]`; the last query sits at the last key
    /// - result: `[batch, heads, seq_q, value_dim]` and `[batch, heads, seq_q]`
    ///
    /// # Errors
    /// As [`selected_blocks_attention`], and if lists are of other blocks.
    pub fn attention(
        &self,
        q: Tensor<4>,
        k: Tensor<4>,
        v: Tensor<4>,
        lists: Option<SelectedBlocks>,
        options: AttentionOptions,
    ) -> Result<(Tensor<4>, Tensor<3>), OpError> {
        check_options(&options)?;
        let near = self.near_layout(q.dims(), k.dims()[2])?;
        let Some(lists) = lists else {
            let call = SparseAttentionCall::new(q, k, v, &near);
            return call.options(options).run_with_lse();
        };
        OpError::expect_same("lists' block", self.block, "that of msa", lists.block)?;
        if self.sees_all(k.dims()[2]) {
            let expected = "none where there are at most keep blocks";
            return Err(OpError::argument("lists", expected, "some"));
        }
        let [batch, heads, seq_q, head_dim] = q.dims();
        let widest = head_dim.max(v.dims()[3]);
        let together = (TOGETHER / (batch * heads * widest)).max(self.block);
        match together < seq_q {
            false => selected_blocks_attention(q, k, v, &near, lists, options),
            true => self.attention_in_parts([q, k, v], &lists, &options, together),
        }
    }

    /// Attention of so many queries at a time, to the keys up to the last of them.
    fn attention_in_parts(
        &self,
        [q, k, v]: [Tensor<4>; 3],
        lists: &SelectedBlocks,
        options: &AttentionOptions,
        together: usize,
    ) -> Result<(Tensor<4>, Tensor<3>), OpError> {
        let ([_, _, seq_q, _], seq_kv) = (q.dims(), k.dims()[2]);
        let (mut outs, mut logs) = (Vec::new(), Vec::new());
        for rows in in_steps(0..seq_q, together) {
            let end = rows.end + seq_kv - seq_q;
            let sizes = match self.sees_all(end) {
                true => None,
                false => ListSizes::new(self.grid(rows.len(), end), self.keep, OWN),
            };
            let lists = sizes.map(|sizes| lists.of_queries(rows.clone(), &sizes));
            let [k, v] = [&k, &v].map(|x| x.clone().slice_dim(2, 0..end));
            let q = q.clone().slice_dim(2, rows);
            let (out, lse) = self.attention(q, k, v, lists, options.clone())?;
            outs.push(out);
            logs.push(lse);
        }
        Ok((Tensor::cat(outs, 2), Tensor::cat(logs, 2)))
    }

    /// Layout of what queries `[batch, heads, seq_q, head_dim]` see of so many keys besides their [lists](Self::choose): their own blocks, or all keys up to their positions
    /// where there is nothing to choose from.
    ///
    /// # Errors
    /// [`OpError`] if there is no query, or more of them than keys.
    pub fn near_layout(
        &self,
        [_, heads, seq_q, _]: [usize; 4],
        seq_kv: usize,
    ) -> Result<BlockLayout, OpError> {
        crate::selection::check_seq_q("seq_q", seq_q, seq_kv)?;
        let block = self.block.min(BLOCK_SIZES[BLOCK_SIZES.len() - 1]);
        let shape = LayoutShape::new(heads, [seq_q, seq_kv], block);
        match self.sees_all(seq_kv) {
            true => self.layouts.of_pattern(&Pattern::causal(), shape),
            false => (self.layouts).of_forced(&self.grid(seq_q, seq_kv), OWN, shape),
        }
    }

    fn grid(&self, seq_q: usize, seq_kv: usize) -> ScoreGrid {
        EstimateGrid::by_query(self.block).of([seq_q, seq_kv], true)
    }

    /// Returns the same choice over pages of `page` tokens: [`keep`](Self::keep) blocks.
    ///
    /// # Errors
    /// [`OpError`] if pages are no whole parts of blocks, or no power of two.
    pub fn on_pages(&self, page: usize) -> Result<PageChoice, OpError> {
        if !page.is_power_of_two() || !self.block.is_multiple_of(page) {
            let expected = format!(
                "a power of two that divides {}, the block of msa",
                self.block
            );
            return Err(OpError::argument("page_size", expected, page));
        }
        Ok(PageChoice::of_blocks(page, self.block / page, self.keep))
    }

    /// The pages of the blocks that queries at any positions choose, and of their own: [`choose`](Self::choose) for keys that lie in pages.
    ///
    /// # Shapes
    /// - `index`: `rows` queries of each batch entry, and the keys of all its pages in order. What stands after a query's position has no part in the result
    /// - `spans`: i32 `[batch · rows, 1, 4]`, as [`topk_pages`] has them: a page list of each query, which ends at its own key
    /// - result: i32 `[batch · rows, kv_heads, choice.selected_pages()]`
    ///
    /// # Errors
    /// As [`topk_pages`].
    pub fn choose_pages(
        &self,
        index: &MsaIndex,
        spans: &Tensor<3, Int>,
        choice: &PageChoice,
    ) -> Result<Tensor<3, Int>, OpError> {
        let scores = self.block_scores(index)?;
        let [batch, groups, rows, blocks] = scores.dims();
        // The score of a block is the sum of its pages'.
        let scores = (scores.swap_dims(1, 2)).reshape([batch * rows, groups, blocks, 1]);
        let scores = padded(scores, 3, [0, choice.block - 1]);
        let scores = scores.reshape([batch * rows, groups, blocks * choice.block]);
        topk_pages(scores, spans, choice)
    }
}

#[cfg(all(test, feature = "flex"))]
mod tests {
    use burn::tensor::{Device, Distribution};

    use super::*;

    /// However many queries at a time, of as many queries as keys and of fewer; the first parts see all blocks.
    #[test]
    fn parts_give_what_the_whole_gives() {
        let device = Device::flex();
        let random =
            |heads, rows| Tensor::<4>::random([2, heads, rows, 8], Distribution::Default, &device);
        let msa = Msa::new(8, 3).unwrap();
        for [seq_q, seq_kv] in [[90, 90], [37, 75]] {
            let index = MsaIndex::new(random(2, seq_q), random(1, seq_kv)).unwrap();
            let lists = msa.choose(&index).unwrap().unwrap();
            let x = [random(4, seq_q), random(2, seq_kv), random(2, seq_kv)];
            let options = AttentionOptions::default();
            let [q, k, v] = x.clone();
            let whole = msa.attention(q, k, v, Some(lists.clone()), options.clone());
            let (out, lse) = whole.unwrap();
            for together in [1, 8, 13, 40, 90] {
                let found = msa.attention_in_parts(x.clone(), &lists, &options, together);
                let (found_out, found_lse) = found.unwrap();
                let far = |a: Tensor<1>, b: Tensor<1>| (a - b).abs().max().into_scalar::<f32>();
                let far = [
                    far(found_out.flatten(0, 3), out.clone().flatten(0, 3)),
                    far(found_lse.flatten(0, 2), lse.clone().flatten(0, 2)),
                ];
                assert!(
                    far.iter().all(|&far| far < 1e-6),
                    "{together} of {seq_q}: {far:?}"
                );
            }
        }
    }
}
