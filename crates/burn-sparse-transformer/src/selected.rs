//! Attention that chooses its keys by content.

use burn::module::Content;
use burn::tensor::{Int, Tensor};
use burn_blocksparse::layout::PaddingMask;
use burn_blocksparse::{BlockLayout, DeviceLayout, Layout, OpError, Pattern};
use burn_sparse_select::{Candidates, EstimateInputs, SelectedBlocks, Selection, SelectionQuality};

use crate::call::{Call, Heads, Seen};
use crate::error::{Result, ensure, ensure_none, or_panic};
use crate::kind::AttentionKind;
use crate::layouts::Request;
use crate::shared_choice::{Chosen, SharedChoice};
use crate::stream::Stream;
use crate::{SparseMhaInput, SparseMhaOutput, SparseMultiHeadAttention, SparseTransformer};

/// Restriction of a selection's candidates, if it chooses from fewer than all keys or all earlier ones.
#[derive(Default)]
pub(crate) struct Cut {
    /// Layout of the pattern, in the selection's blocks and without padding.
    pub(crate) layout: Option<BlockLayout>,
    pub(crate) lengths: Option<Vec<usize>>,
}

impl Cut {
    fn within(&self) -> Candidates<'_> {
        let mut within = Candidates::default();
        within.layout = self.layout.as_ref();
        within.lengths = self.lengths.as_deref();
        within
    }
}

impl AttentionKind for Selection {
    fn attend(
        &self,
        mha: &SparseMultiHeadAttention,
        heads: Heads,
        request: &Request,
        call: &Call,
    ) -> Result<Seen> {
        if mha.takes_choice() {
            return call.taken_by(mha, heads);
        }
        mha.attend_chosen(heads, self, &mha.cut(self, request)?, call)
    }

    fn chooses(&self) -> bool {
        true
    }

    fn ignores_later_rows(&self) -> bool {
        self.estimator().traits().prefix_stable
    }

    fn check_pattern(&self, pattern: &Pattern) -> Result<()> {
        check_selection(pattern, Some(self))
    }

    fn ensure_pattern(&self) -> Result<()> {
        let expected = "none where layouts are the pattern's (packed sequences, weights): \
                        take it out by `with_selection(None)`";
        ensure_none("selection", true, expected)
    }

    fn ensure_decodable(&self) -> Result<()> {
        ensure! { self.ignores_later_rows() =>
        "selection", "prefix stable with a cache: later tokens influence this one's choice; take quest or moba, or let prompts alone choose: `with_choosing_prompts` of a pool", self; }
        Ok(())
    }

    fn display(&self, content: Content) -> Content {
        content.add("selection", &self.to_string())
    }
}

impl SparseMultiHeadAttention {
    /// Sets how keys are chosen by content in each call; `None` uses the pattern alone and turns sharing off. It has no parameters, so a trained module can
    /// be tried with any selection.
    ///
    /// Blocks are chosen from those that the pattern keeps, forced ones included, and a chosen block has the same pairs as in the pattern: with
    /// [`Pattern::local`], a selection chooses from a window. Batch entries with padding at the end choose as they would alone.
    ///
    /// ```
    /// use burn::tensor::{Device, Distribution, Tensor};
    /// use burn_sparse_transformer::{Pattern, SparseMhaInput, SparseMultiHeadAttentionConfig};
    ///
    /// let device = Device::flex();
    /// // Each block of 32 queries sees four of keys: the first, its own, the one before it, and of the others the one most alike.
    /// let mha = SparseMultiHeadAttentionConfig::new(64, 4, Pattern::causal())
    ///     .with_selection(Some("topk:32,4".parse()?))
    ///     .init(&device);
    /// let x = Tensor::<3>::random([1, 500, 64], Distribution::Default, &device);
    /// let y = mha.forward(SparseMhaInput::self_attn(x)).context;
    /// assert_eq!(y.dims(), [1, 500, 64]);
    /// # Ok::<(), burn_sparse_transformer::TransformerError>(())
    /// ```
    ///
    /// # Errors
    /// If every query chooses for itself by the selection and the module's pattern is neither causal nor dense attention, a parameter of the selection is out
    /// of range, it sets full layers, which only models have, or the module already has heads that choose by content.
    pub fn with_selection(mut self, selection: Option<Selection>) -> Result<Self> {
        check_selection(self.pattern(), selection.as_ref())?;
        if selection.is_some() {
            self.kind().ensure_replaceable()?;
        }
        if selection.is_none() && self.content.is_none() {
            self.choice_sharing = None;
        }
        self.selection = selection;
        Ok(self)
    }

    /// [`Self::forward`] over a layout that depends on the projected queries and keys, normalised and rotated, instead of the module's pattern: `choose` gets
    /// `[batch, n_heads, seq_q, d_k]` and `[batch, n_kv_heads, seq_kv, d_k]`.
    ///
    /// # Panics
    /// With the text of [`Self::try_forward_choosing`]'s error.
    ///
    /// ```
    /// use burn::tensor::{Device, Distribution, Tensor};
    /// use burn_sparse_select::{TopKOptions, top_k_blocks_on_device};
    /// use burn_sparse_transformer::{Pattern, SparseMhaInput, SparseMultiHeadAttentionConfig};
    ///
    /// let device = Device::flex();
    /// let mha = SparseMultiHeadAttentionConfig::new(64, 4, Pattern::causal()).init(&device);
    /// let x = Tensor::<3>::random([1, 500, 64], Distribution::Default, &device);
    /// // Each block sees four: the first, its own, the one before it, and of the others the one most alike.
    /// let four = TopKOptions::new(32, 4);
    /// let choose = |query, key| top_k_blocks_on_device(query, key, four);
    /// let y = mha.forward_choosing(SparseMhaInput::self_attn(x), choose).context;
    /// assert_eq!(y.dims(), [1, 500, 64]);
    /// ```
    #[track_caller]
    pub fn forward_choosing<L>(
        &self,
        input: SparseMhaInput,
        choose: impl FnOnce(Tensor<4>, Tensor<4>) -> Result<L, OpError>,
    ) -> SparseMhaOutput
    where
        for<'a> &'a L: Into<Layout<'a>>,
    {
        or_panic(self.try_forward_choosing(input, choose))
    }

    /// Fallible variant of [`Self::forward_choosing`].
    ///
    /// # Errors
    /// Those of [`Self::try_forward`] and `choose`; also if the input has padding, which the layout would have to mask.
    pub fn try_forward_choosing<L>(
        &self,
        input: SparseMhaInput,
        choose: impl FnOnce(Tensor<4>, Tensor<4>) -> Result<L, OpError>,
    ) -> Result<SparseMhaOutput>
    where
        for<'a> &'a L: Into<Layout<'a>>,
    {
        let expected = "none: a chosen layout says what takes part";
        ensure_none("padding", input.padding.is_some(), expected)?;
        self.kind().ensure_replaceable()?;
        let (call, _) = self.prepare(&input, 0)?;
        let heads = self.project(input, &call)?;
        let layout = choose(heads[0].clone(), heads[1].clone())?;
        let context = self.attend(heads, &layout, &call)?;
        self.finish(context, &call)
    }

    /// Returns the selection, if there is one.
    pub fn selection(&self) -> Option<&Selection> {
        self.selection.as_ref()
    }

    /// Returns the layout that [`Self::forward`] would choose or take for this input, for inspection or for [`recall`](burn_sparse_select::recall). `None`
    /// without a selection.
    ///
    /// # Errors
    /// Those of [`Self::forward`]; also if every query chooses for itself by the selection: see [`Selection::query_lists`].
    pub fn chosen(&self, input: SparseMhaInput) -> Result<Option<DeviceLayout>> {
        let Some(selection) = &self.selection else {
            return Ok(None);
        };
        let (call, request) = self.prepare(&input, 0)?;
        if self.takes_choice()
            && let Some(layout) = call.taken()?.layout()
        {
            return Ok(Some(layout.clone()));
        }
        let cut = self.cut(selection, &request)?;
        let [query, key, _] = self.project(input, &call)?;
        Ok(Some(self.choose(selection, &cut, query, key)?))
    }

    pub(crate) fn cut(&self, selection: &Selection, request: &Request) -> Result<Cut> {
        self.cut_of(selection, request, self.layouts.heads())
    }

    /// [`Self::cut`] for some of the heads.
    pub(crate) fn cut_of(
        &self,
        selection: &Selection,
        request: &Request,
        heads: usize,
    ) -> Result<Cut> {
        let lengths = lengths_of(request)?;
        if is_by_query(selection) || (is_whole(self.pattern()) && lengths.is_none()) {
            let layout = None;
            return Ok(Cut { layout, lengths });
        }
        let block = selection.estimator().grid().block;
        let layouts = self.layouts.of_shape(heads, block)?;
        let layout = Some(layouts.get(&Request::new(request.seq_q, request.seq_kv))?);
        Ok(Cut { layout, lengths })
    }

    pub(crate) fn choose(
        &self,
        selection: &Selection,
        cut: &Cut,
        query: Tensor<4>,
        key: Tensor<4>,
    ) -> Result<DeviceLayout> {
        let call = self.score_call(query, key);
        Ok(selection.choose_among(&call, cut.within())?.layout)
    }

    pub(crate) fn attend_chosen(
        &self,
        heads: Heads,
        selection: &Selection,
        cut: &Cut,
        call: &Call,
    ) -> Result<Seen> {
        let [query, key, _] = heads.clone();
        let chosen = self.choice_of(selection, cut, query, key)?;
        SharedChoice::from(chosen).attend(self, heads, call)
    }

    /// Chooses keys for queries.
    fn choice_of(
        &self,
        selection: &Selection,
        cut: &Cut,
        query: Tensor<4>,
        key: Tensor<4>,
    ) -> Result<Chosen> {
        if !is_by_query(selection) {
            return self.choose(selection, cut, query, key).map(Chosen::Layout);
        }
        let lists = selection.query_lists(&self.score_call(query, key))?;
        Ok(Chosen::Blocks(Box::new(selection.clone()), lists))
    }

    /// Attends to blocks that a selection listed for each query, and to its forced ones.
    pub(crate) fn attend_blocks(
        &self,
        [query, key, value]: Heads,
        selection: &Selection,
        lists: Option<SelectedBlocks>,
        call: &Call,
    ) -> Result<Tensor<4>> {
        let tensors = self.tensors_of(&query, call);
        for (argument, given) in [
            ("sinks", tensors.sinks.is_some()),
            ("bias", tensors.bias.is_some()),
            ("relative_bias", tensors.relative_bias.is_some()),
        ] {
            let expected = "none with a selection by which every query chooses for itself";
            ensure_none(argument, given, expected)?;
        }
        let options = self.options_of(&query, call);
        let (out, _) = selection.attention(query, key, value, lists, options)?;
        // Padding is at the end and later than real keys, so real queries never choose it; the outputs of padded queries are set to 0.
        Ok(match &call.padding {
            Some(padding) => {
                let padding = padding.clone().unsqueeze_dim::<4>(1);
                let dims = out.dims();
                out.mask_fill(padding.expand(dims), 0.0)
            }
            None => out,
        })
    }

    /// Checks that later tokens do not change a choice.
    ///
    /// # Errors
    /// [`TransformerError::Argument`](crate::TransformerError::Argument) that names the property of the module that prevents decoding.
    pub fn ensure_decodable(&self) -> Result<()> {
        self.kind().ensure_decodable()
    }

    pub(crate) fn score_call(&self, query: Tensor<4>, key: Tensor<4>) -> EstimateInputs {
        let call = EstimateInputs::new(query, key).causal(self.pattern().is_causal());
        match self.options.scale {
            Some(scale) => call.scale(scale),
            None => call,
        }
    }

    /// Measures a selection on an input of this module, for each head: see [`Selection::quality`]. Biases, softcaps and sinks are ignored.
    ///
    /// # Errors
    /// Those of [`Self::forward`]; also if the input has padding, or the device returns no data.
    pub fn selection_quality(
        &self,
        input: SparseMhaInput,
        selection: &Selection,
    ) -> Result<Vec<SelectionQuality>> {
        ensure_none("padding", input.padding.is_some(), "none")?;
        self.ensure_no_content()?;
        check_choice(self.pattern(), selection)?;
        let (call, request) = self.prepare(&input, 0)?;
        let cut = self.cut(selection, &request)?;
        let [query, key, _] = self.project(input, &call)?;
        let call = self.score_call(query, key);
        Ok(selection.quality_within(&call, cut.layout.as_ref())?)
    }
}

/// Checks that a selection can choose in one layer from the pairs that a pattern allows.
pub(crate) fn check_selection(pattern: &Pattern, selection: Option<&Selection>) -> Result<()> {
    let Some(selection) = selection else {
        return Ok(());
    };
    let estimator = selection.estimator();
    let full = [estimator.full_first_layers(), estimator.full_last_layers()];
    ensure! { full == [0; 2] =>
    "selection", "one without full layers for a layer alone: a model's `selections` have them", selection; }
    check_choice(pattern, selection)
}

/// [`check_selection`] without the check of full layers, for a selection of a model.
fn check_choice(pattern: &Pattern, selection: &Selection) -> Result<()> {
    selection.check()?;
    ensure! { is_whole(pattern) || !is_by_query(selection) =>
    "pattern", "the dense causal pattern, or dense, with a selection by which every query chooses for itself", pattern; }
    Ok(())
}

/// Returns whether a pattern masks no keys, or only later ones.
fn is_whole(pattern: &Pattern) -> bool {
    [Pattern::causal(), Pattern::dense()].contains(pattern)
}

pub(crate) fn is_by_query(selection: &Selection) -> bool {
    selection.estimator().grid().query_rows == 1
}

fn lengths_of(request: &Request) -> Result<Option<Vec<usize>>> {
    if request.restrictions.is_empty() {
        return Ok(None);
    }
    let length = |entry: &PaddingMask| {
        let keys = entry.keys.as_ref()?;
        let length = keys.iter().filter(|&&real| real).count();
        let is_end = keys[..length].iter().all(|&real| real);
        (is_end && entry.queries == entry.keys).then_some(length)
    };
    let lengths: Option<Vec<usize>> = request.restrictions.iter().map(length).collect();
    ensure! { lengths.is_some() =>
    "padding", "at the end of self-attention's sequences with a selection", "other padding"; }
    Ok(lengths)
}

/// Returns the selection of layer `layer`: layers use selections in turn, except the first and last layers that a selection excludes, and the last
/// `full_last` ones.
pub(crate) fn of_layer(
    selections: &[Selection],
    layer: usize,
    n_layers: usize,
    full_last: usize,
) -> Option<Selection> {
    if selections.is_empty() {
        return None;
    }
    let selection = &selections[layer % selections.len()];
    let full_last = full_last.max(selection.estimator().full_last_layers());
    let full_first = selection.estimator().full_first_layers();
    let chooses = layer >= full_first && full_last < n_layers.saturating_sub(layer);
    chooses.then(|| selection.clone().for_layer())
}

impl SparseTransformer {
    /// Sets how the layers choose their keys by content, in turn, except the last `full_last` ones, which use their patterns; an empty list removes
    /// selections. This also removes selections per head and the sharing of choices. Parameters are unchanged.
    ///
    /// # Errors
    /// Those of [`SparseMultiHeadAttention::with_selection`].
    pub fn with_selections(mut self, selections: &[Selection], full_last: usize) -> Result<Self> {
        let n_layers = self.blocks.len();
        for (layer, block) in self.blocks.iter_mut().enumerate() {
            let selection = of_layer(selections, layer, n_layers, full_last);
            check_selection(block.mha.pattern(), selection.as_ref())?;
            if selection.is_some() {
                block.mha.ensure_no_content()?;
            }
            block.mha.selection = selection;
            block.mha.head_selections = None;
            if block.mha.content.is_none() {
                block.mha.choice_sharing = None;
            }
        }
        Ok(self)
    }

    /// Measures selections on tokens, for each layer and head, without changing the layers: `selection` in all layers, or without one each layer's own,
    /// including those of its heads. A layer without a selection, or that takes an earlier layer's choice, has no heads in the result.
    ///
    /// # Errors
    /// Those of [`Self::forward`] and [`SparseMultiHeadAttention::selection_quality`].
    pub fn selection_quality(
        &self,
        tokens: Tensor<2, Int>,
        selection: Option<&Selection>,
    ) -> Result<Vec<Vec<SelectionQuality>>> {
        self.quality_by_layer(tokens, |_, mha, input| {
            let own = mha.selection().filter(|_| !mha.takes_choice());
            match (selection.or(own), mha.head_selections()) {
                (Some(selection), _) => mha.selection_quality(input, selection),
                (None, Some(heads)) => mha.head_selection_quality(input, heads),
                (None, None) => Ok(Vec::new()),
            }
        })
    }

    /// Returns the result of `measure` for each layer's index, attention and input.
    pub(crate) fn quality_by_layer(
        &self,
        tokens: Tensor<2, Int>,
        measure: impl Fn(
            usize,
            &SparseMultiHeadAttention,
            SparseMhaInput,
        ) -> Result<Vec<SelectionQuality>>,
    ) -> Result<Vec<Vec<SelectionQuality>>> {
        let mut stream = Stream::new(self.embed(tokens, 0)?);
        let mut found = Vec::with_capacity(self.blocks.len());
        for (layer, block) in self.blocks.iter().enumerate() {
            let attend = |input: SparseMhaInput| {
                found.push(measure(layer, &block.mha, input.clone())?);
                block.mha.forward_projected(input)
            };
            stream = block.residual(stream, attend, block.pass(false))?;
        }
        Ok(found)
    }
}
