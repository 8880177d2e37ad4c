//! Attention over what a selection chooses.

use std::sync::{Arc, Mutex, PoisonError};

use blocksparse::{BlockLayout, Keep, LayoutShape, Pattern};
use burn::tensor::{DType, Int, Tensor};

use super::Selection;
use super::estimator::ScoreCall;
use super::query_lists::{ListSizes, QueryLists};
use crate::attention::attention_with_lse;
use crate::check;
use crate::device_layout::{DeviceLayout, DeviceLayoutOptions};
use crate::error::OpError;
use crate::merge::merge_parts;
use crate::options::{AttentionOptions, WeightsMode};
use crate::rows::rows_at;

/// How [`attention_selected`] chooses and attends. [`AttentionOptions`] alone are causal ones.
#[derive(Clone, Debug, PartialEq)]
#[must_use]
#[non_exhaustive]
pub struct SelectedOptions {
    /// Whether queries see no later keys. The last query sits at the last key.
    pub causal: bool,
    /// How attention is computed over what is chosen; its scale is that of the scores that choose, too.
    pub attention: AttentionOptions,
}

impl Default for SelectedOptions {
    fn default() -> Self {
        AttentionOptions::default().into()
    }
}

impl From<AttentionOptions> for SelectedOptions {
    fn from(attention: AttentionOptions) -> Self {
        Self {
            causal: true,
            attention,
        }
    }
}

impl SelectedOptions {
    /// Sets whether queries see no later keys.
    pub fn causal(mut self, causal: bool) -> Self {
        self.causal = causal;
        self
    }

    /// Sets how attention is computed.
    pub fn attention(mut self, attention: AttentionOptions) -> Self {
        self.attention = attention;
        self
    }
}

/// Attention over the blocks of keys that a [`Selection`] chooses by these queries and keys, whatever its method. Nothing is read back where kernels run;
/// gradients flow through the chosen pairs, and none through the choice.
///
/// Blocks of queries that choose together run as one call of [`attention()`](crate::attention()) over [`Selection::choose`]. Where every query chooses for
/// itself, as in MoBA (Lu et al., 2025, §2.2), its own block is attended to through a layout that is built on the host once for each size, and kept with the
/// selection; for the blocks before it the queries are packed by the block that they chose ([`QueryLists`]), attended to that block alone, and brought back;
/// and the parts are merged by their lse. That takes `places · head_dim` numbers for packed queries and as many for their outputs, where `places` is about
/// `(k − 1) · seq_q`, in both passes.
///
/// ```
/// use burn::tensor::{Device, Distribution, Tensor};
/// use burn_blocksparse::{AttentionOptions, Selection, attention_selected};
///
/// let device = Device::flex().autodiff();
/// let [q, k, v] = [(); 3].map(|_| {
///     Tensor::<4>::random([1, 2, 256, 16], Distribution::Default, &device).require_grad()
/// });
/// // Each query attends to its own block of 32 keys and to the two before it that score highest.
/// let selection: Selection = "moba:32,3".parse()?;
/// let out = attention_selected(q.clone(), k, v, &selection, AttentionOptions::default())?;
/// let gradients = out.sum().backward();
/// assert_eq!(q.grad(&gradients).unwrap().dims(), [1, 2, 256, 16]);
/// # Ok::<(), burn_blocksparse::OpError>(())
/// ```
///
/// # Shapes
/// As [`attention()`](crate::attention()).
///
/// # Errors
/// As [`attention()`](crate::attention()) and [`Selection::choose`]. Where every query chooses for itself, also if the rule is not [`Keep::TopK`] with the
/// query's own block forced alone, if queries see later keys, or for ALiBi and dropout, which depend on the places of queries.
pub fn attention_selected(
    q: Tensor<4>,
    k: Tensor<4>,
    v: Tensor<4>,
    selection: &Selection,
    options: impl Into<SelectedOptions>,
) -> Result<Tensor<4>, OpError> {
    let (out, _) = attention_selected_with_lse(q, k, v, selection, options)?;
    Ok(out)
}

/// [`attention_selected`], and lse over the chosen keys, as [`attention_with_lse`](crate::attention_with_lse) has it: `exp(lse − lse of full attention)` is
/// the share of each query's attention that the choice keeps ([`recall`](crate::recall)).
///
/// # Errors
/// As [`attention_selected`].
pub fn attention_selected_with_lse(
    q: Tensor<4>,
    k: Tensor<4>,
    v: Tensor<4>,
    selection: &Selection,
    options: impl Into<SelectedOptions>,
) -> Result<(Tensor<4>, Tensor<3>), OpError> {
    let SelectedOptions { causal, attention } = options.into();
    let call = ScoreCall::new(q.clone(), k.clone()).causal(causal);
    let scale = attention.scale_for(q.dims()[3].max(1));
    let call = call.scale(scale);
    if !selection.is_by_query() {
        let layout = selection.choose(&call)?.layout;
        return attention_with_lse(q, k, v, &layout, attention);
    }
    check_options(&attention)?;
    let sizes = selection.list_sizes(&call)?;
    let own = selection.own_blocks(&call)?;
    check::call(&q, &k, &v, (&own).into(), &attention)?;
    let Some(sizes) = sizes else {
        return attention_with_lse(q, k, v, &own, attention);
    };
    let lists = selection.lists(&call, &sizes)?.for_heads(q.dims()[1]);
    let near = attention_with_lse(q.clone(), k.clone(), v.clone(), &own, attention.clone())?;
    let far = attention_of_lists(q, k, v, &lists, attention)?;
    merge_parts(near, far, lists.places, lists.choices)
}

/// What does not follow queries to other places.
fn check_options(options: &AttentionOptions) -> Result<(), OpError> {
    let expected = "none where every query chooses for itself";
    if options.alibi.is_some() {
        return Err(OpError::argument("options.alibi", expected, "slopes"));
    }
    if let Some(dropout) = options.active_dropout() {
        let got = dropout.probability;
        return Err(OpError::argument("options.dropout", expected, got));
    }
    match options.weights {
        WeightsMode::Recompute => Ok(()),
        WeightsMode::Store => Err(OpError::argument(
            "options.weights",
            "Recompute where every query chooses for itself",
            "Store",
        )),
    }
}

/// Attention of the queries at each place to the block of its tile: out `[batch, heads, places, value_dim]` and lse.
fn attention_of_lists(
    q: Tensor<4>,
    k: Tensor<4>,
    v: Tensor<4>,
    lists: &QueryLists,
    options: AttentionOptions,
) -> Result<(Tensor<4>, Tensor<3>), OpError> {
    let layout = layout_of(lists, k.dims()[2])?;
    let packed = rows_at(q, lists.queries.clone(), lists.places.clone())?;
    attention_with_lse(packed, k, v, &layout, options)
}

/// The layout of tiles of packed queries, each with one block, which is several of the layout's.
fn layout_of(lists: &QueryLists, seq_kv: usize) -> Result<DeviceLayout, OpError> {
    let [batch, heads, tiles] = lists.tile_blocks.dims();
    let device = lists.tile_blocks.device();
    let parts = lists.block / lists.tile;
    let dims = [batch, heads, tiles, parts];
    let part = Tensor::<1, Int>::arange(0..parts as i64, (&device, DType::I32));
    let part = part.reshape([1, 1, 1, parts]).expand(dims);
    // Parts of block −1 are negative, too.
    let blocks = lists.tile_blocks.clone().unsqueeze_dim::<4>(3);
    let indices = blocks.mul_scalar(parts as i32).expand(dims) + part;
    let counts = Tensor::<3, Int>::full([batch, heads, tiles], parts as i32, (&device, DType::I32));
    let shape = LayoutShape {
        heads,
        seq_q: tiles * lists.tile,
        seq_kv,
        block_size: lists.tile,
    };
    DeviceLayout::from_block_indices(indices, counts, DeviceLayoutOptions::new(shape))
}

/// Layouts of queries' own blocks, the latest of a few sizes.
#[derive(Clone, Debug, Default)]
pub(crate) struct OwnBlocks(Arc<Mutex<Vec<BlockLayout>>>);

/// Sizes whose layouts are kept.
const KEPT_SIZES: usize = 8;

impl OwnBlocks {
    /// The layout in which a query sees what comes before it of its own block of `block` keys.
    fn layout(&self, block: usize, shape: LayoutShape) -> Result<BlockLayout, OpError> {
        let mut known = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(at) = known.iter().position(|layout| *layout.shape() == shape) {
            let layout = known.remove(at);
            known.push(layout.clone());
            return Ok(layout);
        }
        let layout = BlockLayout::new(&Pattern::chunked(block).and_causal(), shape)?;
        if known.len() == KEPT_SIZES {
            known.remove(0);
        }
        known.push(layout.clone());
        Ok(layout)
    }
}

impl Selection {
    /// Whether every query chooses for itself.
    pub(crate) fn is_by_query(&self) -> bool {
        self.estimator.grid().query_rows == 1 && self.estimator.grid().block > 1
    }

    /// Which blocks before its own every query of a call chooses, and the queries of each block, for a selection whose queries choose each for itself. `None`
    /// if no query has a block before its own, or only its own is kept. Nothing is read back.
    ///
    /// ```
    /// use burn::tensor::{Device, Distribution, Tensor};
    /// use burn_blocksparse::{ScoreCall, Selection};
    ///
    /// let [q, k] = [(); 2]
    ///     .map(|_| Tensor::<4>::random([1, 2, 256, 16], Distribution::Default, &Device::flex()));
    /// let selection: Selection = "moba:32,3".parse()?;
    /// let lists = selection.query_lists(&ScoreCall::new(q, k))?.unwrap();
    /// assert_eq!(lists.blocks.dims(), [1, 2, 256, 2]);
    /// # Ok::<(), burn_blocksparse::OpError>(())
    /// ```
    ///
    /// # Errors
    /// As [`attention_selected`], and if queries choose together.
    pub fn query_lists(&self, call: &ScoreCall) -> Result<Option<QueryLists>, OpError> {
        if !self.is_by_query() {
            let got = self.estimator.grid().query_rows;
            return Err(OpError::argument("query_rows", "1", got));
        }
        match self.list_sizes(call)? {
            Some(sizes) => self.lists(call, &sizes).map(Some),
            None => Ok(None),
        }
    }

    fn lists(&self, call: &ScoreCall, sizes: &ListSizes) -> Result<QueryLists, OpError> {
        let call = ScoreCall {
            q: call.q.clone().without_autodiff(),
            k: call.k.clone().without_autodiff(),
            ..*call
        };
        QueryLists::new(&*self.estimator, self.sharing, &call, sizes)
    }

    /// Checks the call, and says how long its lists are.
    fn list_sizes(&self, call: &ScoreCall) -> Result<Option<ListSizes>, OpError> {
        self.check_for(call)?;
        if !call.causal {
            let expected = "true where every query chooses for itself";
            return Err(OpError::argument("call.causal", expected, false));
        }
        let Keep::TopK(keep) = self.keep else {
            let expected = "a number of blocks where every query chooses for itself";
            return Err(OpError::argument(
                "keep",
                expected,
                format!("{:?}", self.keep),
            ));
        };
        let own = blocksparse::Forced { first: 0, local: 1 };
        if self.forced != own {
            let expected = format!("{own:?} where every query chooses for itself");
            return Err(OpError::argument(
                "forced",
                expected,
                format!("{:?}", self.forced),
            ));
        }
        let _ = self.query_shape(call.q.dims(), call.k.dims()[2])?;
        Ok(ListSizes::new(call.grid(self.estimator.grid()), keep))
    }

    fn own_blocks(&self, call: &ScoreCall) -> Result<BlockLayout, OpError> {
        let shape = self.query_shape(call.q.dims(), call.k.dims()[2])?;
        self.own.layout(self.estimator.grid().block, shape)
    }
}
