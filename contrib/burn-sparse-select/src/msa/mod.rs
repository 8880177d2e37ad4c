//! MiniMax sparse attention (MSA: MiniMax, 2026, arXiv 2606.13392): an index branch selects key blocks for each query and KV head.

// mod    selection, and attention over it
// scores block scores: the maximum over each block's keys
// loss   training loss of the index branch

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

/// MiniMax sparse attention (MiniMax, 2026): every query attends to `keep` blocks of `block` keys, including its own. Each KV head selects for all of its query
/// heads, by an index branch with one narrow query head per KV head and one key per token:
///
/// ```text
/// x[g, i, J] = max over keys j of block J of q[g, i] · k[j] / √index_dim
/// ```
///
/// Ties go to the earlier block, and NaN sorts last. A selection depends on earlier tokens only, because the blocks before a query's own are complete. The
/// paper uses 16 blocks of 128 keys and `index_dim` 128.
///
/// The selection has no gradient. The index branch is trained by [`loss`](Self::loss), against the attention of the heads that share its selection.
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

/// Expected overlap of adjacent queries' lists, which affects the choice of kernels. It is that of [`Nsa`](crate::nsa::Nsa), whose selection is similar.
const OVERLAP: f64 = 0.85;

/// Upper bound of the elements of queries, or of outputs, that are processed at a time. Kernels index up to 2³² elements, and parts of outputs are several
/// times larger.
const TOGETHER: usize = 1 << 30;

/// Default number of scores of single keys in memory at a time: 256 MiB, which keeps the number of launches small.
const NUMBERS: usize = 1 << 26;

impl Msa {
    /// Creates attention to `keep` blocks of `block` keys.
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

    /// Sets the number of scores of single keys in memory at a time, rounded to whole queries, at least one. Default: 2²⁶. Smaller numbers are slower.
    ///
    /// # Errors
    /// [`OpError`] if it is 0.
    pub fn with_chunk_elements(self, numbers: usize) -> Result<Self, OpError> {
        OpError::ensure_positive("numbers", numbers)?;
        Ok(Self { numbers, ..self })
    }

    /// Returns the number of keys of a block.
    pub fn block(&self) -> usize {
        self.block
    }

    /// Returns the number of blocks that a query attends to at most.
    pub fn keep(&self) -> usize {
        self.keep
    }

    /// Returns the number of keys that a query attends to if it sees `keys` keys.
    pub fn attended(&self, keys: usize) -> usize {
        let before = keys.saturating_sub(1) / self.block;
        before.min(self.keep - 1) * self.block + (keys - before * self.block)
    }

    /// Returns whether queries over `seq_kv` keys attend to all of them.
    fn sees_all(&self, seq_kv: usize) -> bool {
        seq_kv.div_ceil(self.block) <= self.keep
    }

    /// Selects the blocks of each query in addition to its own, in lists per KV head. `None` if there is nothing to select: there are no more than `keep`
    /// blocks, or `keep` is 1. Scores of blocks are in memory for some queries at a time; where no kernel computes them directly, so are scores of single keys,
    /// 2²⁶ elements. Reads nothing back where kernels run.
    ///
    /// # Errors
    /// [`OpError`] if the device's kernels do not serve the index.
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

    /// Returns the scores of all blocks, f32 `[batch, kv_heads, seq_q, blocks]`, without autodiff. Includes blocks that a query does not see entirely. Meant
    /// for inspection.
    ///
    /// # Errors
    /// Those of [`Self::choose`].
    pub fn block_scores(&self, index: &MsaIndex) -> Result<Tensor<4>, OpError> {
        self.scores(index).all()
    }

    fn scores(&self, index: &MsaIndex) -> BlockScores {
        BlockScores::new(index.clone().without_autodiff(), self.block, self.numbers)
    }

    /// Attends to the blocks of [`choose`](Self::choose) and to each query's own, or to all keys up to a query's position if there are no more than `keep`
    /// blocks. Returns out and lse. Differentiable in q, k and v; backward is deterministic.
    ///
    /// # Shapes
    /// - `q`: `[batch, heads, seq_q, head_dim]`; `k`, `v`: `[batch, kv_heads, seq_kv, width]`; the last query is at the position of the last key
    /// - result: `[batch, heads, seq_q, value_dim]` and `[batch, heads, seq_q]`
    ///
    /// # Errors
    /// Those of [`selected_blocks_attention`], and if the lists have another block size.
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

    /// Computes attention of `together` queries at a time, over the keys up to the last of them.
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

    /// Returns the layout of the pairs that queries `[batch, heads, seq_q, head_dim]` see in addition to their [lists](Self::choose): their own blocks, or all
    /// keys up to their positions if there is nothing to select.
    ///
    /// # Errors
    /// [`OpError`] if there is no query, or if there are more queries than keys.
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

    /// Returns the selection over pages of `page` tokens, of [`keep`](Self::keep) blocks.
    ///
    /// # Errors
    /// [`OpError`] if the page size is not a power of two or does not divide the block.
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

    /// Returns the pages of the selected blocks of queries at arbitrary positions, and of their own blocks: [`choose`](Self::choose) for keys in pages.
    ///
    /// # Shapes
    /// - `index`: `rows` queries of each batch entry, and the keys of all its pages in order. Keys after a query's position do not affect the result
    /// - `spans`: i32 `[batch · rows, 1, 4]`, see [`topk_pages`]: one page list per query, which ends at the query's own key
    /// - result: i32 `[batch · rows, kv_heads, choice.selected_pages()]`
    ///
    /// # Errors
    /// Those of [`topk_pages`].
    pub fn choose_pages(
        &self,
        index: &MsaIndex,
        spans: &Tensor<3, Int>,
        choice: &PageChoice,
    ) -> Result<Tensor<3, Int>, OpError> {
        let scores = self.block_scores(index)?;
        let [batch, groups, rows, blocks] = scores.dims();
        // A block's score is the sum of its pages', so only the first page carries it.
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

    /// The number of queries at a time does not change results, with as many queries as keys and with fewer. The first parts see all blocks.
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
