//! Attention that selects its keys by content: block scores, a rule that keeps some blocks, and attention over them.
//!
//! Top-k of given scores: [`top_k_blocks`], [`top_k_blocks_on_device`]. A method that scores by itself: [`Selection`] with
//! [`attention_selected`]. Blocks or single keys that you chose: [`SelectedBlocks`], [`TokenIndices`].

// estimator    what a method is: scores of blocks by queries and keys
// mean, moba, quest, antidiagonal, sparge, flex, vertical_slash
//              methods
// lines        columns and diagonals of attention, for the last two
// parts        calls in parts, who sees whom, and what the lists of adjacent queries have in common
// selected     attention over what is chosen
// query_lists  the queries that chose each block, where every query chooses for itself
// lists        attention over such lists, in parts of heads
// key_lists    attention over lists of single keys
// token_sparse the backend operation of both kinds of lists
// token_order  what clusters and hashes of tokens are found by
// layouts      layouts of what is forced, which are kept
// by_query     the same choice on the host
// estimates    the same scores by kernels, where a device has them
// within       choices that are cut by a layout, and by padding
// sharing      whether heads that share keys choose together
// text         arguments of selections as text
// methods      the table of methods, by which selections are read
// reference    what kernels do of it, in Burn's primitives and in loops on the host
// quality      how much of the attention a choice keeps, also beside the best choice, for reports
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

/// Selection of blocks of keys by content: an estimator gives each block a score, a rule keeps some, and those are the layout that
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

/// The layout that a [`Selection`] chose.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct SelectedLayout {
    /// The blocks, on the device.
    pub layout: DeviceLayout,
}

impl SelectedLayout {
    /// Returns the number of blocks per row of queries: i32 `[batch, heads, rows]`, on the device. Nothing is read back where kernels run. Heads that share a
    /// choice have one row for all of them ([`DeviceLayout::counts`]).
    ///
    /// # Errors
    /// As [`DeviceLayout::counts`].
    pub fn counts(&self) -> Result<Tensor<3, Int>, OpError> {
        self.layout.counts()
    }

    /// Selected share of the visible blocks, `[1]` in f32, on the device.
    ///
    /// # Errors
    /// As [`DeviceLayout::counts`].
    pub fn density(&self) -> Result<Tensor<1>, OpError> {
        self.layout.density()
    }
}

impl Selection {
    /// Texts of selections: `KEEP` is a number, or a rule with its name, `k=12`, `ratio=0.25`, `p=0.9` or `above=0.01`. `share=sum`, `mean` or `max`
    /// lets heads that share keys choose together. `first=1` and `local=2` set the forced blocks of any method ([`Always`]).
    pub const NOTATION: &[&str] = methods::NOTATION;

    /// A selection by an estimator and a budget, without forced blocks, each head separately.
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
        /// Sets the budget: which blocks are selected by score.
        with_budget => keep: Budget,
        /// Sets the forced blocks.
        with_always => forced: Always,
        /// Sets whether and how heads that share keys share a selection.
        with_gqa_reduction => sharing: GqaReduction,
    }

    /// The method that scores blocks.
    pub fn estimator(&self) -> &dyn BlockEstimator {
        &*self.estimator
    }

    /// The same for one layer of a model that selects ([`BlockEstimator::for_layer`]).
    #[must_use]
    pub fn for_layer(mut self) -> Self {
        if let Some(estimator) = self.estimator.for_layer() {
            self.estimator = estimator;
        }
        self
    }

    /// The rule that selects by score.
    pub fn rule(&self) -> Rule {
        Rule {
            kind: self.estimator.traits().kind,
            keep: self.keep,
            forced: self.forced,
        }
    }

    /// Returns whether heads that share keys share one choice.
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

    /// Checks the selection, and that it is defined for a call.
    fn check_for(&self, call: &EstimateInputs) -> Result<(), OpError> {
        self.check()?;
        check_call(call)?;
        let traits = self.estimator.traits();
        blocksparse::ensure! { OpError; !traits.causal_only || call.causal => "call.causal", format!("true for {self}"), false; }
        Ok(())
    }

    /// The blocks that the call's queries attend to. Nothing is read back; no gradient reaches the scores.
    ///
    /// # Errors
    /// [`OpError`] if shapes, dtypes or devices do not fit each other, a number is out of range, or the method is not defined for the call.
    pub fn choose(&self, call: &EstimateInputs) -> Result<SelectedLayout, OpError> {
        self.choose_among(call, Candidates::default())
    }

    /// [`choose`](Self::choose) for one batch entry, in plain f64 loops on the host.
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

    /// Sizes of a layout of single queries, whose blocks may be narrower than those that are chosen.
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

/// Selections are equal if they are written alike.
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

/// Sizes that a layout can have.
fn sizes(q: [usize; 4], seq_kv: usize, block_size: usize) -> Result<LayoutShape, OpError> {
    let [_, heads, seq_q, _] = q;
    checked(&LayoutShape::new(heads, [seq_q, seq_kv], block_size))
}

/// That blocks of keys are as wide as those of a layout, or several of the widest.
pub(crate) fn check_wide_block(argument: &'static str, block: usize) -> Result<(), OpError> {
    let is_wide = block > 128 && block.is_multiple_of(128);
    blocksparse::ensure! {
        OpError;
        BLOCK_SIZES.contains(&block) || is_wide => argument, "8, 16, 32, 64, 128 or a larger multiple of 128", block;
    }
    Ok(())
}

/// A width that blocks can have.
pub fn check_block(block: usize) -> Result<(), OpError> {
    blocksparse::ensure! { OpError; BLOCK_SIZES.contains(&block) => "block", "8, 16, 32, 64 or 128", block; }
    Ok(())
}

/// That queries and keys fit each other, on a device that this crate serves.
pub fn check_call(call: &EstimateInputs) -> Result<(), OpError> {
    let (q, k): (&Tensor<4>, &Tensor<4>) = (&call.q, &call.k);
    served(&q.device().without_autodiff())?;
    check_shapes(q, k)?;
    blocksparse::ensure! { OpError; call.scale.is_finite() => "call.scale", "finite", call.scale; }
    Ok(())
}

/// That there are queries, and no more of them than keys.
pub(crate) fn check_seq_q(
    argument: &'static str,
    seq_q: usize,
    seq_kv: usize,
) -> Result<(), OpError> {
    blocksparse::ensure! { OpError; seq_q != 0 && seq_kv >= seq_q => argument, format!("between 1 and seq_kv, which is {seq_kv}"), seq_q; }
    Ok(())
}

/// That queries and keys fit each other.
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
