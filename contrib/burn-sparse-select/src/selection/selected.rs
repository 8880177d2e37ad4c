//! Attention over what a selection chooses.

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

/// Options of [`attention_selected`]. [`AttentionOptions`] alone are causal ones.
#[derive(Clone, Debug, PartialEq)]
#[must_use]
#[non_exhaustive]
pub struct SelectedOptions {
    /// True if queries see no later keys. The last query sits at the last key.
    pub causal: bool,
    /// Options of the attention over the selection; its scale is also that of the estimate.
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
        /// Sets the options of the attention.
        attention: AttentionOptions,
    }
}

/// Attention over the blocks of keys that a [`Selection`] of any method chooses by these queries and keys. Nothing is read back where kernels run.
/// Gradients flow through the chosen pairs, not through the choice.
///
/// Methods by block of queries run as one call of [`sparse_attention`](burn_blocksparse::sparse_attention) over [`Selection::choose`]. For methods by
/// query, as MoBA (Lu et al., 2025, §2.2), a layout of the forced blocks is built on the host once for each size. For the other blocks queries
/// iterate over their lists, or are packed by the block that they chose ([`SelectedBlocks`]). The parts are merged by lse. Packing takes `places ·
/// (head_dim + value_dim)` elements per head, with about `(k − forced) · seq_q` places: for all heads in training, otherwise for some heads at a
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
/// As [`sparse_attention`](burn_blocksparse::sparse_attention).
///
/// # Errors
/// As [`sparse_attention`](burn_blocksparse::sparse_attention) and [`Selection::choose`]. Where every query chooses for itself, also if the rule is not [`Budget::TopK`](blocksparse::Budget::TopK) with the
/// query's own block among the forced ones, if queries see later keys, or for ALiBi and dropout, which depend on the places of queries.
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

/// [`attention_selected`], and lse over the chosen keys, as [`SparseAttentionCall::lse`](burn_blocksparse::SparseAttentionCall::lse) has it: `exp(lse − lse of full attention)` is
/// the share of each query's attention that the choice keeps ([`recall`](crate::selection::recall)).
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
    /// Returns whether every query chooses for itself.
    pub(crate) fn is_by_query(&self) -> bool {
        self.estimator.grid().query_rows == 1 && self.estimator.grid().block > 1
    }

    /// Returns the blocks that each query selects in addition to the forced ones, and the queries of each block, for a selection whose queries select separately.
    /// `None` if no query has a block to choose, or only forced ones are kept. Nothing is read back.
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
    /// As [`attention_selected`], and if queries choose together.
    pub fn query_lists(&self, call: &EstimateInputs) -> Result<Option<SelectedBlocks>, OpError> {
        self.check_by_query()?;
        match self.list_sizes(call)? {
            Some(sizes) => self.lists(call, &sizes).map(Some),
            None => Ok(None),
        }
    }

    /// Attends to the blocks of [`query_lists`](Self::query_lists) and to each query's forced ones: out and lse. The lists may be those of other queries and
    /// keys of the same sizes, as of an earlier layer. Differentiable in q, k and v.
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
    /// As [`attention_selected`], if queries choose together, and if the lists are of other sizes.
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

    /// How long the lists of a call are, and the forced blocks, once all of it fits.
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

    /// Checks the call, and says how long its lists are.
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
