//! Attention that selects its keys by content: block scores, a rule that selects blocks, and attention over them.
//!
//! Top-k of given scores: [`top_k_blocks`], [`top_k_blocks_on_device`]. Methods that compute the scores: [`Selection`] with [`attention_selected`]. Index lists
//! of blocks or single keys that you provide: [`SelectedBlocks`], [`TokenIndices`].

// estimator    trait of a method: block scores from queries and keys
// mean, moba, quest, antidiagonal, sparge, flex, vertical_slash
//              methods
// lines        columns and diagonals of the attention matrix, for flex and vertical_slash
// parts        calls in parts, visibility, overlap of adjacent queries' lists
// selected     attention over a selection
// query_lists  per-query selection: the queries that selected each block
// lists        attention over block lists, a part of the heads at a time
// key_lists    attention over lists of single keys
// token_sparse backend operation of both kinds of lists
// token_order  primitives of token clustering and hashing
// layouts      cache of layouts of forced blocks
// by_query     per-query selection on the host
// estimates    block scores by kernels, on devices that have them
// within       selections restricted by a layout or by padding
// sharing      shared selection of the heads of a KV head
// text         parsing and formatting of selections
// methods      the table of methods, by which selections are parsed
// reference    the same computations in Burn's operations and in host loops
// quality      attention recall of a selection, and of the best one of equal size
pub mod backend;
#[cfg(feature = "cube")]
pub mod estimate_backend;
#[cfg(feature = "cube")]
pub mod estimate_ops;
pub mod ops;
pub mod token_sparse;
pub mod top_k;

mod antidiagonal;
pub(crate) mod by_query;
#[cfg(feature = "cube")]
mod estimates;
pub mod estimator;
mod flex;
pub mod key_lists;
pub mod layouts;
mod lines;
pub mod lists;
mod mean;
mod methods;
mod moba;
pub mod parts;
mod quality;
pub mod query_lists;
mod quest;
pub mod reference;
pub mod selected;
pub mod sharing;
mod sparge;
mod text;
pub mod token_order;
pub mod values;
mod vertical_slash;
mod within;

pub use crate::selection::top_k::{top_k_blocks, top_k_blocks_on_device};
pub use crate::vertical_slash::{vertical_slash_layout, vertical_slash_layout_async};
pub use blocksparse::{Always, Budget, EstimateKind, Rule, ScoreGrid};
pub use burn_blocksparse::internal::DispatchMode;
pub use burn_blocksparse::layout::TopKOptions;
pub use burn_blocksparse::{
    AccumulatedAttention, AccumulatedAttentionOptions, accumulated_attention,
};
pub use key_lists::{TokenIndices, token_sparse_attention};
pub use lists::selected_blocks_attention;

use std::fmt;
use std::sync::Arc;

use blocksparse::{BLOCK_SIZES, BlockLayout, LayoutShape};
use burn::tensor::{Int, Tensor};
use serde::{Deserialize, Serialize};

pub use antidiagonal::XAttention;
use burn_blocksparse::internal::device::served;
use burn_blocksparse::internal::{checked, mask};
use burn_blocksparse::{DeviceLayout, OpError};
#[cfg(feature = "cube")]
pub(crate) use estimates::scores as scores_by_kernels;
pub use estimator::{
    BlockEstimator, EstimateGrid, EstimateInputs, EstimatorTraits, PageSummary, ReferenceInputs,
};
pub use flex::{FlexHead, FlexPrefill};
use layouts::LayoutCache;
pub use mean::MeanPool;
pub(crate) use mean::{means, products};
pub use moba::Moba;
pub use quality::{SelectionQuality, recall};
pub use query_lists::SelectedBlocks;
pub use quest::Quest;
pub use selected::{SelectedOptions, attention_selected, attention_selected_with_lse};
pub use sharing::GqaReduction;
pub use sparge::SpargeAttn;
pub use vertical_slash::VerticalSlash;
pub use within::Candidates;

/// Content-based selection of key blocks: an estimator scores the blocks and a rule selects some. They form the layout that
/// [`sparse_attention`](burn_blocksparse::sparse_attention) runs over.
///
/// ```
/// use burn::tensor::{Device, Distribution, Tensor};
/// use burn_blocksparse::sparse_attention;
/// use burn_sparse_select::{Budget, EstimateInputs, Selection};
///
/// let [q, k, v] = [(); 3]
///     .map(|_| Tensor::<4>::random([1, 2, 256, 16], Distribution::Default, &Device::flex()));
/// // The 4 blocks of 32 keys that score highest, or those that make up nine tenths of the estimate.
/// let selection: Selection = "topk:32,4".parse()?;
/// let by_share = selection.clone().with_budget(Budget::top_p(0.9));
/// assert_eq!(by_share.to_string(), "topk:32,p=0.9");
/// let chosen = selection.choose(&EstimateInputs::new(q.clone(), k.clone()))?;
/// let out = sparse_attention(q, k, v, &chosen.layout)?;
/// assert_eq!(out.dims(), [1, 2, 256, 16]);
/// # Ok::<(), burn_blocksparse::OpError>(())
/// ```
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(into = "String", try_from = "String")]
pub struct Selection {
    estimator: Arc<dyn BlockEstimator>,
    keep: Budget,
    forced: Always,
    sharing: GqaReduction,
    layouts: LayoutCache,
}

/// Layout that a [`Selection`] chose.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct SelectedLayout {
    /// Selected blocks, on the device.
    pub layout: DeviceLayout,
}

impl SelectedLayout {
    /// Returns the number of selected blocks of each query row: i32 `[batch, heads, rows]`, on the device. Reads nothing back where kernels run. Heads that
    /// share a selection have one row for all of them ([`DeviceLayout::counts`]).
    ///
    /// # Errors
    /// See [`DeviceLayout::counts`].
    pub fn counts(&self) -> Result<Tensor<3, Int>, OpError> {
        self.layout.counts()
    }

    /// Returns the selected share of the visible blocks: f32 `[1]`, on the device.
    ///
    /// # Errors
    /// See [`DeviceLayout::counts`].
    pub fn density(&self) -> Result<Tensor<1>, OpError> {
        self.layout.density()
    }
}

impl Selection {
    /// Text forms of selections. `KEEP` is a number or a named rule: `k=12`, `ratio=0.25`, `p=0.9` or `above=0.01`. `share=sum`, `mean` or `max` makes the
    /// heads of a KV head share a selection. `first=1` and `local=2` set the forced blocks of any method ([`Always`]).
    pub const NOTATION: &[&str] = methods::NOTATION;

    /// Creates a selection from an estimator and a budget, without forced blocks, separate for each head.
    pub fn new(estimator: impl BlockEstimator + 'static, keep: Budget) -> Self {
        Self {
            estimator: Arc::new(estimator),
            keep,
            forced: Always::default(),
            sharing: GqaReduction::PerHead,
            layouts: LayoutCache::default(),
        }
    }

    blocksparse::setters! {
        /// Sets the budget, which says how many blocks are selected by score.
        with_budget => keep: Budget,
        /// Sets the forced blocks.
        with_always => forced: Always,
        /// Sets whether and how the heads of a KV head share a selection.
        with_gqa_reduction => sharing: GqaReduction,
    }

    /// Returns the method that scores the blocks.
    pub fn estimator(&self) -> &dyn BlockEstimator {
        &*self.estimator
    }

    /// Returns the selection for a single layer of a model ([`BlockEstimator::for_layer`]).
    #[must_use]
    pub fn for_layer(mut self) -> Self {
        if let Some(estimator) = self.estimator.for_layer() {
            self.estimator = estimator;
        }
        self
    }

    /// Returns the rule that selects blocks by score.
    pub fn rule(&self) -> Rule {
        Rule {
            kind: self.estimator.traits().kind,
            keep: self.keep,
            forced: self.forced,
        }
    }

    /// Returns whether and how the heads of a KV head share a selection.
    pub fn gqa_reduction(&self) -> GqaReduction {
        self.sharing
    }

    /// Checks the parameters of the estimator and the rule.
    ///
    /// # Errors
    /// [`OpError`] if one is out of range.
    pub fn check(&self) -> Result<(), OpError> {
        self.estimator.check()?;
        let rule = self.rule();
        self.estimator.check_rule(&rule)?;
        Ok(rule.check()?)
    }

    /// Checks the selection, and that it is defined for `call`.
    fn check_for(&self, call: &EstimateInputs) -> Result<(), OpError> {
        self.check()?;
        check_call(call)?;
        let traits = self.estimator.traits();
        blocksparse::ensure! { OpError; !traits.causal_only || call.causal => "call.causal", format!("true for {self}"), false; }
        Ok(())
    }

    /// Selects the blocks that the call's queries attend to. Reads nothing back; no gradient reaches the scores.
    ///
    /// # Errors
    /// [`OpError`] if shapes, dtypes or devices do not match, a number is out of range, or the method is not defined for the call.
    pub fn choose(&self, call: &EstimateInputs) -> Result<SelectedLayout, OpError> {
        self.choose_among(call, Candidates::default())
    }

    /// Computes [`choose`](Self::choose) for one batch entry in f64 loops on the host.
    ///
    /// # Errors
    /// [`OpError`] if a number is out of range.
    pub fn choose_reference(&self, call: &ReferenceInputs) -> Result<BlockLayout, OpError> {
        self.check()?;
        let dims = [1, call.heads, call.seq_q, call.head_dim];
        let shape = match self.is_by_query() {
            true => self.query_shape(dims, call.seq_kv)?,
            false => self.shape(dims, call.seq_kv)?,
        };
        let grid = call.grid(self.estimator.grid());
        let group = call.heads / call.kv_heads;
        let scores = self.estimator.reference(call);
        let scores = self.sharing.reduce_reference(scores, call.heads, group);
        let rows = scores.chunks(grid.blocks()).enumerate();
        let rule = self.rule();
        let rows = rows.map(|(row, scores)| rule.selects(&grid, row % grid.rows(), scores));
        let rows: Vec<Vec<bool>> = rows.collect();
        let patterns = rows.len() / grid.rows();
        let name = self.to_string();
        if self.is_by_query() {
            return by_query::layout(&name, shape, &grid, &rows);
        }
        let layout = BlockLayout::from_block_fn(&name, shape, |head, q_block, kv_block| {
            let pattern = head / (call.heads / patterns);
            let kept = rows[pattern * grid.rows() + q_block][kv_block];
            kept.then(|| mask(q_block, kv_block, shape, call.causal))
        });
        Ok(layout?)
    }

    fn shape(&self, q: [usize; 4], seq_kv: usize) -> Result<LayoutShape, OpError> {
        let grid = self.estimator.grid();
        blocksparse::ensure! {
            OpError;
            grid.query_rows == grid.block => "query_rows", "as many queries as keys of a block (attention_selected also takes 1)", grid.query_rows;
        }
        sizes(q, seq_kv, grid.block)
    }

    /// Returns the shape of a layout of single queries. Its blocks are at most as wide as the widest of a layout; the selected ones may be wider.
    fn query_shape(&self, q: [usize; 4], seq_kv: usize) -> Result<LayoutShape, OpError> {
        let [.., widest] = BLOCK_SIZES;
        sizes(q, seq_kv, self.estimator.grid().block.min(widest))
    }
}

impl fmt::Display for Selection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.estimator.text(&self.rule(), self.sharing))
    }
}

/// Selections are equal if their texts are.
impl PartialEq for Selection {
    fn eq(&self, other: &Self) -> bool {
        self.to_string() == other.to_string()
    }
}

impl From<Selection> for String {
    fn from(selection: Selection) -> Self {
        selection.to_string()
    }
}

impl TryFrom<String> for Selection {
    type Error = OpError;

    fn try_from(text: String) -> Result<Self, OpError> {
        text.parse()
    }
}

/// Returns the layout shape of these sizes, checked.
fn sizes(q: [usize; 4], seq_kv: usize, block_size: usize) -> Result<LayoutShape, OpError> {
    let [_, heads, seq_q, _] = q;
    checked(&LayoutShape::new(heads, [seq_q, seq_kv], block_size))
}

/// Checks that `block` is a block size of layouts, or a multiple of the widest.
pub(crate) fn check_wide_block(argument: &'static str, block: usize) -> Result<(), OpError> {
    let is_wide = block > 128 && block.is_multiple_of(128);
    blocksparse::ensure! {
        OpError;
        BLOCK_SIZES.contains(&block) || is_wide => argument, "8, 16, 32, 64, 128 or a larger multiple of 128", block;
    }
    Ok(())
}

/// Checks that `block` is a block size of layouts.
pub fn check_block(block: usize) -> Result<(), OpError> {
    blocksparse::ensure! { OpError; BLOCK_SIZES.contains(&block) => "block", "8, 16, 32, 64 or 128", block; }
    Ok(())
}

/// Checks that queries and keys match, on a device that this crate serves.
pub fn check_call(call: &EstimateInputs) -> Result<(), OpError> {
    let (q, k): (&Tensor<4>, &Tensor<4>) = (&call.q, &call.k);
    served(&q.device().without_autodiff())?;
    check_shapes(q, k)?;
    blocksparse::ensure! { OpError; call.scale.is_finite() => "call.scale", "finite", call.scale; }
    Ok(())
}

/// Checks that there are queries, and no more of them than keys.
pub(crate) fn check_seq_q(
    argument: &'static str,
    seq_q: usize,
    seq_kv: usize,
) -> Result<(), OpError> {
    blocksparse::ensure! { OpError; seq_q != 0 && seq_kv >= seq_q => argument, format!("between 1 and seq_kv, which is {seq_kv}"), seq_q; }
    Ok(())
}

/// Checks that the shapes of queries and keys match.
pub fn check_shapes(q: &Tensor<4>, k: &Tensor<4>) -> Result<(), OpError> {
    let [batch, heads, _, head_dim] = q.dims();
    let [k_batch, kv_heads, _, k_dim] = k.dims();
    for (argument, got) in [("q's batch", batch), ("q's head_dim", head_dim)] {
        OpError::ensure_positive(argument, got)?;
    }
    OpError::expect_same("k's batch", batch, "q's", k_batch)?;
    OpError::expect_same("k's head_dim", head_dim, "q's", k_dim)?;
    blocksparse::ensure! {
        OpError;
        kv_heads != 0 && heads.is_multiple_of(kv_heads) => "k's kv_heads", format!("a divisor of the {heads} heads of q"), kv_heads;
    }
    OpError::expect_same("k's dtype", q.dtype(), "q's", k.dtype())?;
    OpError::expect_same("k's device", q.device(), "q's", k.device())
}
