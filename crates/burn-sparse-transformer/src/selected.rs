//! Attention that chooses its keys by content.

use burn::tensor::{Int, Tensor};
use burn_blocksparse::{
    DeviceLayout, Pattern, ScoreCall, SelectedOptions, Selection, SelectionQuality,
    attention_selected,
};

use crate::call::Call;
use crate::error::{ensure, ensure_none};
use crate::stream::Stream;
use crate::{SparseMhaInput, SparseMultiHeadAttention, SparseTransformer, TransformerError};

impl SparseMultiHeadAttention {
    /// Sets how keys are chosen by content, anew in each call; `None` leaves the choice to the pattern. No parameter belongs to it, so a trained module
    /// can be tried with any.
    ///
    /// ```
    /// use burn::tensor::{Device, Distribution, Tensor};
    /// use burn_sparse_transformer::{Pattern, SparseMhaInput, SparseMultiHeadAttentionConfig};
    ///
    /// let device = Device::flex();
    /// // Each block of 32 queries sees four of keys: the first, its own, the one before it, and of the others the one most alike.
    /// let mha = SparseMultiHeadAttentionConfig::new(64, 4, Pattern::causal())
    ///     .with_selection(Some("topk:32,4".parse()?))
    ///     .init(&device)?;
    /// let x = Tensor::<3>::random([1, 500, 64], Distribution::Default, &device);
    /// let y = mha.forward(SparseMhaInput::self_attn(x))?.context;
    /// assert_eq!(y.dims(), [1, 500, 64]);
    /// # Ok::<(), burn_sparse_transformer::TransformerError>(())
    /// ```
    ///
    /// # Errors
    /// If the module's pattern is neither causal nor dense attention, which is what the choice is taken from, a number of the selection is out of its range, or
    /// the module has heads that choose by content already.
    pub fn with_selection(
        mut self,
        selection: Option<Selection>,
    ) -> Result<Self, TransformerError> {
        check_selection(self.pattern(), selection.as_ref())?;
        if selection.is_some() {
            self.ensure_no_content()?;
        }
        self.selection = selection;
        Ok(self)
    }

    /// How keys are chosen by content, if they are.
    pub fn selection(&self) -> Option<&Selection> {
        self.selection.as_ref()
    }

    /// What [`Self::forward`] would choose for this input: to look at, or to measure by [`recall`](burn_blocksparse::recall). `None` without a selection.
    ///
    /// # Errors
    /// As [`Self::forward`], and for a selection by which every query chooses for itself: see [`Selection::query_lists`].
    pub fn chosen(&self, input: SparseMhaInput) -> Result<Option<DeviceLayout>, TransformerError> {
        let Some(selection) = &self.selection else {
            return Ok(None);
        };
        let (call, _) = self.prepare(&input, 0)?;
        let (query, key, _) = self.project(input, &call)?;
        Ok(Some(self.choose(selection, query, key)?))
    }

    pub(crate) fn choose(
        &self,
        selection: &Selection,
        query: Tensor<4>,
        key: Tensor<4>,
    ) -> Result<DeviceLayout, TransformerError> {
        Ok(selection.choose(&self.score_call(query, key))?.layout)
    }

    /// Attention of projected queries, keys and values over what a selection chooses.
    pub(crate) fn attend_chosen(
        &self,
        heads: (Tensor<4>, Tensor<4>, Tensor<4>),
        selection: &Selection,
        call: &Call,
    ) -> Result<Tensor<4>, TransformerError> {
        if selection.estimator().grid().query_rows > 1 {
            let layout = self.choose(selection, heads.0.clone(), heads.1.clone())?;
            return self.attend(heads, &layout, call);
        }
        let (query, key, value) = heads;
        let tensors = self.tensors_of(&query, call);
        for (argument, given) in [
            ("sinks", tensors.sinks.is_some()),
            ("bias", tensors.bias.is_some()),
            ("relative_bias", tensors.relative_bias.is_some()),
        ] {
            let expected = "none with a selection by which every query chooses for itself";
            ensure_none(argument, given, expected)?;
        }
        let options = SelectedOptions::from(self.options_of(&query, call));
        let options = options.causal(self.pattern().is_causal());
        Ok(attention_selected(query, key, value, selection, options)?)
    }

    /// That tokens that come later change no choice.
    pub(crate) fn ensure_decodable(&self) -> Result<(), TransformerError> {
        self.ensure_no_content()?;
        let leaks = |selection: &&Selection| !selection.estimator().traits().prefix_stable;
        match self.selection.as_ref().filter(leaks) {
            None => Ok(()),
            Some(selection) => Err(TransformerError::argument(
                "selection",
                "prefix stable with a cache: later tokens take part in this one's choices; take it out by `with_selection(None)`",
                selection,
            )),
        }
    }

    fn score_call(&self, query: Tensor<4>, key: Tensor<4>) -> ScoreCall {
        let call = ScoreCall::new(query, key).causal(self.pattern().is_causal());
        match self.options.scale {
            Some(scale) => call.scale(scale),
            None => call,
        }
    }

    /// How well a selection would serve this module on an input, of each head: see [`Selection::quality`]. Biases, softcaps and sinks do not count.
    ///
    /// # Errors
    /// As [`Self::forward`], if the input has padding, and if the device gives nothing back.
    pub fn selection_quality(
        &self,
        input: SparseMhaInput,
        selection: &Selection,
    ) -> Result<Vec<SelectionQuality>, TransformerError> {
        ensure_none("padding", input.padding.is_some(), "none")?;
        self.ensure_no_content()?;
        check_selection(self.pattern(), Some(selection))?;
        let (call, _) = self.prepare(&input, 0)?;
        let (query, key, _) = self.project(input, &call)?;
        Ok(selection.quality(&self.score_call(query, key))?)
    }

    /// That a call that knows patterns alone is not one of a module that chooses.
    pub(crate) fn ensure_unselected(&self) -> Result<(), TransformerError> {
        self.ensure_no_content()?;
        let expected = "none where layouts are the pattern's (padding, packed sequences, weights): \
                        take it out by `with_selection(None)`";
        ensure_none("selection", self.selection.is_some(), expected)
    }
}

/// That a selection can choose from the pairs that a pattern allows.
pub(crate) fn check_selection(
    pattern: &Pattern,
    selection: Option<&Selection>,
) -> Result<(), TransformerError> {
    let Some(selection) = selection else {
        return Ok(());
    };
    selection.check()?;
    let is_whole = [Pattern::causal(), Pattern::dense()].contains(pattern);
    ensure(
        is_whole,
        "pattern",
        || "causal or dense with a selection, which chooses from all keys".into(),
        pattern,
    )
}

/// The selection of layer `layer`: they take turns, but the first and the last layers have none where a selection says so, the last ones also where the
/// model does.
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
    (layer >= full_first && layer + full_last < n_layers).then(|| selection.clone())
}

impl SparseTransformer {
    /// Sets how the layers choose their keys by content, in turn, but for the last `full_last` ones, which leave it to their patterns; none of them does with
    /// no selections. Parameters stay as they are.
    ///
    /// # Errors
    /// As [`SparseMultiHeadAttention::with_selection`].
    pub fn with_selections(
        mut self,
        selections: &[Selection],
        full_last: usize,
    ) -> Result<Self, TransformerError> {
        let n_layers = self.blocks.len();
        for (layer, block) in self.blocks.iter_mut().enumerate() {
            let selection = of_layer(selections, layer, n_layers, full_last);
            check_selection(block.mha.pattern(), selection.as_ref())?;
            if selection.is_some() {
                block.mha.ensure_no_content()?;
            }
            block.mha.selection = selection;
        }
        Ok(self)
    }

    /// How well selections serve on tokens, of each layer and head: `selection` in all layers, which changes nothing of what the layers compute, or without
    /// one each layer's own; a layer without either has no heads in the result.
    ///
    /// # Errors
    /// As [`Self::forward`], and [`SparseMultiHeadAttention::selection_quality`].
    pub fn selection_quality(
        &self,
        tokens: Tensor<2, Int>,
        selection: Option<&Selection>,
    ) -> Result<Vec<Vec<SelectionQuality>>, TransformerError> {
        let mut stream = Stream::new(self.embed(tokens, 0)?);
        let mut found = Vec::with_capacity(self.blocks.len());
        for block in &self.blocks {
            let attend = |input: SparseMhaInput| {
                found.push(match selection.or(block.mha.selection()) {
                    Some(selection) => block.mha.selection_quality(input.clone(), selection)?,
                    None => Vec::new(),
                });
                block.mha.forward_projected(input)
            };
            stream = block.residual(stream, attend, block.pass(false))?;
        }
        Ok(found)
    }
}
