//! Attention over the blocks that a selection chooses.

use blocksparse::BlockLayout;
use burn::tensor::Tensor;

use crate::selection::Selection;
use crate::selection::by_query::top_k;
use crate::selection::estimator::EstimateInputs;
use crate::selection::lists::{attention_of_choice, check_options, selected_blocks_attention};
use crate::selection::query_lists::{ListSizes, SelectedBlocks};
use crate::selection::sharing::GqaReduction;
use burn_blocksparse::internal::check;
use burn_blocksparse::{AttentionOptions, OpError, SparseAttentionCall};

/// Options of [`attention_selected`]. Converts from [`AttentionOptions`], with `causal` true.
#[derive(Clone, Debug, PartialEq)]
#[must_use]
#[non_exhaustive]
pub struct SelectedOptions {
    /// True if queries see no later keys. The last query is at the position of the last key.
    pub causal: bool,
    /// Options of the attention over the selection. Its scale is also that of the block scores.
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
    blocksparse::setters! {
        /// Sets whether queries see no later keys.
        causal: bool,
        /// Sets the options of the attention over the selection.
        attention: AttentionOptions,
    }
}

/// Computes attention over the key blocks that a [`Selection`] of any method chooses for these queries and keys. Reads nothing back where kernels run.
/// Gradients flow through the selected pairs, not through the selection.
///
/// Methods that select per block of queries run as one call of [`sparse_attention`](burn_blocksparse::sparse_attention) over [`Selection::choose`]. Methods
/// that select per query, such as MoBA (Lu et al., 2025, §2.2), split the work: forced blocks form a layout, which is built on the host once for each size. For
/// the other blocks, queries iterate over their lists or are packed by the block they selected ([`SelectedBlocks`]). The parts are merged by lse. Packing takes
/// `places · (head_dim + value_dim)` elements per head, with about `(k − forced) · seq_q` places: for all heads in training, otherwise for some heads at a
/// time, up to 2³¹ elements or one head.
///
/// ```
/// use burn::tensor::{Device, Distribution, Tensor};
/// use burn_blocksparse::AttentionOptions;
/// use burn_sparse_select::{Selection, attention_selected};
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
/// Those of [`sparse_attention`](burn_blocksparse::sparse_attention).
///
/// # Errors
/// Those of [`sparse_attention`](burn_blocksparse::sparse_attention) and [`Selection::choose`]. A per-query selection also fails if its rule is not
/// [`Budget::TopK`](blocksparse::Budget::TopK) with the query's own block among the forced ones, if queries see later keys, and with ALiBi or dropout, which
/// depend on the positions of queries.
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

/// Computes [`attention_selected`] and the lse over the selected keys, defined as in [`SparseAttentionCall::lse`](burn_blocksparse::SparseAttentionCall::lse).
/// `exp(lse − lse of full attention)` is the share of each query's attention that the selection covers ([`recall`](crate::selection::recall)).
///
/// # Errors
/// Those of [`attention_selected`].
pub fn attention_selected_with_lse(
    q: Tensor<4>,
    k: Tensor<4>,
    v: Tensor<4>,
    selection: &Selection,
    options: impl Into<SelectedOptions>,
) -> Result<(Tensor<4>, Tensor<3>), OpError> {
    let SelectedOptions { causal, attention } = options.into();
    let call = EstimateInputs::new(q.clone(), k.clone()).causal(causal);
    let scale = attention.scale_for(q.dims()[3].max(1));
    let call = call.scale(scale);
    if !selection.is_by_query() {
        let layout = selection.choose(&call)?.layout;
        return SparseAttentionCall::new(q, k, v, &layout)
            .options(attention)
            .run_with_lse();
    }
    let (sizes, own) = selection.prepared(&call, &v, &attention)?;
    let lists = match sizes {
        Some(sizes) => Some(selection.lists(&call, &sizes)?),
        None => None,
    };
    attention_of_choice([q, k, v], &own, lists, &attention)
}

impl Selection {
    /// Returns whether every query selects separately.
    pub(crate) fn is_by_query(&self) -> bool {
        self.estimator.grid().query_rows == 1 && self.estimator.grid().block > 1
    }

    /// Returns the blocks that each query selects in addition to the forced ones, and the queries of each block. `None` if no query has a block to select, or
    /// only forced blocks fit the budget. Reads nothing back.
    ///
    /// ```
    /// use burn::tensor::{Device, Distribution, Tensor};
    /// use burn_sparse_select::{EstimateInputs, Selection};
    ///
    /// let [q, k] = [(); 2]
    ///     .map(|_| Tensor::<4>::random([1, 2, 256, 16], Distribution::Default, &Device::flex()));
    /// let selection: Selection = "moba:32,3".parse()?;
    /// let lists = selection.query_lists(&EstimateInputs::new(q, k))?.unwrap();
    /// assert_eq!(lists.blocks.dims(), [1, 2, 256, 2]);
    /// # Ok::<(), burn_blocksparse::OpError>(())
    /// ```
    ///
    /// # Errors
    /// Those of [`attention_selected`]. Also if blocks of queries share a selection.
    pub fn query_lists(&self, call: &EstimateInputs) -> Result<Option<SelectedBlocks>, OpError> {
        self.check_by_query()?;
        match self.list_sizes(call)? {
            Some(sizes) => self.lists(call, &sizes).map(Some),
            None => Ok(None),
        }
    }

    /// Attends to the blocks of [`query_lists`](Self::query_lists) and to each query's forced blocks: out and lse. The lists may come from other queries and
    /// keys of the same sizes, such as those of an earlier layer. Differentiable in q, k and v.
    ///
    /// ```
    /// use burn::tensor::{Device, Distribution, Tensor};
    /// use burn_blocksparse::AttentionOptions;
    /// use burn_sparse_select::{EstimateInputs, Selection};
    ///
    /// let [q, k, v, next_q, next_k, next_v] = [(); 6]
    ///     .map(|_| Tensor::<4>::random([1, 2, 256, 16], Distribution::Default, &Device::flex()));
    /// let selection: Selection = "moba:32,3".parse()?;
    /// let lists = selection.query_lists(&EstimateInputs::new(q.clone(), k.clone()))?;
    /// let (out, _) = selection.attention(q, k, v, lists.clone(), AttentionOptions::default())?;
    /// let (next, _) = selection.attention(next_q, next_k, next_v, lists, AttentionOptions::default())?;
    /// assert_eq!(next.dims(), out.dims());
    /// # Ok::<(), burn_blocksparse::OpError>(())
    /// ```
    ///
    /// # Errors
    /// Those of [`attention_selected`]. Also if blocks of queries share a selection, or the lists have other sizes.
    pub fn attention(
        &self,
        q: Tensor<4>,
        k: Tensor<4>,
        v: Tensor<4>,
        lists: Option<SelectedBlocks>,
        options: AttentionOptions,
    ) -> Result<(Tensor<4>, Tensor<3>), OpError> {
        self.check_by_query()?;
        let call = EstimateInputs::new(q.clone(), k.clone());
        let (sizes, own) = self.prepared(&call, &v, &options)?;
        let expected = sizes.map_or(0, |sizes| sizes.most());
        let listed = lists.as_ref().map_or(0, |lists| lists.blocks.dims()[3]);
        OpError::expect_same("lists' width", expected, "the selection's", listed)?;
        match lists {
            None => attention_of_choice([q, k, v], &own, None, &options),
            Some(lists) => {
                let block = self.estimator.grid().block;
                OpError::expect_same("lists' block", block, "the selection's", lists.block)?;
                selected_blocks_attention(q, k, v, &own, lists, options)
            }
        }
    }

    fn check_by_query(&self) -> Result<(), OpError> {
        blocksparse::ensure! { OpError; self.is_by_query() => "query_rows", "1", self.estimator.grid().query_rows; }
        Ok(())
    }

    /// Checks a call, and returns the sizes of its lists and the layout of forced blocks.
    fn prepared(
        &self,
        call: &EstimateInputs,
        v: &Tensor<4>,
        options: &AttentionOptions,
    ) -> Result<(Option<ListSizes>, BlockLayout), OpError> {
        check_options(options)?;
        let sizes = self.list_sizes(call)?;
        let own = self.own_blocks(call)?;
        check::call(&call.q, &call.k, v, (&own).into(), options)?;
        Ok((sizes, own))
    }

    fn lists(&self, call: &EstimateInputs, sizes: &ListSizes) -> Result<SelectedBlocks, OpError> {
        let call = call.without_autodiff();
        if call.group() == 1 || self.sharing == GqaReduction::PerHead {
            let between = sizes.between_forced();
            let k = match between == (0..call.k.dims()[2]) {
                true => call.k.clone(),
                false => call.k.clone().slice_dim(2, between),
            };
            let between = EstimateInputs { k, ..call.clone() };
            if let Some(picks) = self.estimator.picks(&between, sizes.most()) {
                return Ok(SelectedBlocks::of_choices(sizes.of_call(picks), sizes));
            }
        }
        let [batch, heads, ..] = call.q.dims();
        let scores = |rows| {
            let scores = self.estimator.scores(&call, rows)?;
            Ok(self.sharing.reduce(scores, call.group()))
        };
        SelectedBlocks::new(scores, sizes.rows_at_a_time(batch * heads), sizes)
    }

    /// Checks the call and returns the sizes of its lists.
    fn list_sizes(&self, call: &EstimateInputs) -> Result<Option<ListSizes>, OpError> {
        self.check_for(call)?;
        blocksparse::ensure! { OpError; call.causal => "call.causal", "true where every query chooses for itself", false; }
        let expected = "a number of blocks where every query chooses for itself";
        let keep = top_k(self.keep, expected)?;
        blocksparse::ensure! {
            OpError;
            self.forced.local > 0 => "forced.local", "at least 1, the query's own block, where every query chooses for itself", 0;
        }
        let _ = self.query_shape(call.q.dims(), call.k.dims()[2])?;
        let grid = call.grid(self.estimator.grid());
        Ok(ListSizes::new(grid, keep, self.forced))
    }

    fn own_blocks(&self, call: &EstimateInputs) -> Result<BlockLayout, OpError> {
        let shape = self.query_shape(call.q.dims(), call.k.dims()[2])?;
        let grid = call.grid(self.estimator.grid());
        self.layouts.of_forced(&grid, self.forced, shape)
    }
}
