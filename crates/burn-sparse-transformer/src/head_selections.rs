//! Layers whose heads choose their keys in different ways.

use std::fmt;
use std::str::FromStr;

use burn::module::Content;
use burn::tensor::{Int, Tensor};
use burn_blocksparse::Pattern;
use burn_sparse_select::{Selection, SelectionQuality};
use serde::{Deserialize, Serialize};

use crate::call::{Call, Heads, Seen};
use crate::error::{Result, ensure, ensure_none};
use crate::kind::AttentionKind;
use crate::layouts::Request;
use crate::selected::check_selection;
use crate::{SparseMhaInput, SparseMultiHeadAttention, SparseTransformer, TransformerError};

/// Selections of a layer's heads, which take them in turn. The text form separates them with `/`, and has `pattern` for heads that use the layer's pattern,
/// like patterns by head:
///
/// ```
/// use burn_sparse_transformer::HeadSelections;
///
/// let heads: HeadSelections = "topk:64,8 / minference:64,100,100 / pattern".parse()?;
/// assert_eq!(heads.of(3).unwrap().to_string(), "topk:64,8");
/// assert!(heads.of(2).is_none());
/// # Ok::<(), burn_sparse_transformer::TransformerError>(())
/// ```
///
/// MInference (Jiang et al., 2024, §3) finds one for each head offline.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(into = "String", try_from = "String")]
pub struct HeadSelections(Vec<Option<Selection>>);

/// Text of a head without a selection.
const PATTERN: &str = "pattern";

impl HeadSelections {
    /// Returns selections that heads take in turn; `None` leaves a head to the pattern.
    ///
    /// # Errors
    /// If there are none.
    pub fn new(choices: Vec<Option<Selection>>) -> Result<Self> {
        let count = choices.len();
        ensure! { count > 0 => "choices", "at least 1", count; }
        Ok(Self(choices))
    }

    /// Returns the selection of a head.
    pub fn of(&self, head: usize) -> Option<&Selection> {
        self.0[head % self.0.len()].as_ref()
    }

    /// Returns the number of selections; heads take them in turn.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Returns `false`: there is always at least one.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    fn parts(&self, heads: usize) -> Vec<(Option<&Selection>, Vec<usize>)> {
        let mut parts: Vec<(Option<&Selection>, Vec<usize>)> = Vec::new();
        for head in 0..heads {
            let own = self.of(head);
            match parts.iter_mut().find(|(known, _)| *known == own) {
                Some((_, of)) => of.push(head),
                None => parts.push((own, vec![head])),
            }
        }
        parts
    }
}

impl fmt::Display for HeadSelections {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, choice) in self.0.iter().enumerate() {
            if index > 0 {
                f.write_str(" / ")?;
            }
            match choice {
                Some(selection) => selection.fmt(f)?,
                None => f.write_str(PATTERN)?,
            }
        }
        Ok(())
    }
}

impl FromStr for HeadSelections {
    type Err = TransformerError;

    fn from_str(text: &str) -> Result<Self> {
        let choices = text.split('/').map(|part| match part.trim() {
            PATTERN => Ok(None),
            part => Ok(Some(part.parse()?)),
        });
        Self::new(choices.collect::<Result<_>>()?)
    }
}

impl From<HeadSelections> for String {
    fn from(heads: HeadSelections) -> Self {
        heads.to_string()
    }
}

impl TryFrom<String> for HeadSelections {
    type Error = TransformerError;

    fn try_from(text: String) -> Result<Self> {
        text.parse()
    }
}

impl AttentionKind for HeadSelections {
    /// One call of attention for all heads that choose alike.
    fn attend(
        &self,
        mha: &SparseMultiHeadAttention,
        [query, key, value]: Heads,
        request: &Request,
        call: &Call,
    ) -> Result<Seen> {
        let expected = "none where heads choose in different ways";
        ensure_none("bias", call.options.bias.is_some(), expected)?;
        let dropout = mha.options_of(&query, call).dropout.is_some();
        ensure_none("dropout", dropout, expected)?;
        let group = mha.n_heads / mha.n_kv_heads;
        let mut found: Vec<Option<Tensor<4>>> = vec![None; mha.n_heads];
        for (selection, members) in self.parts(mha.n_heads) {
            let of = |x: &Tensor<4>, group: usize| of_heads(x, &members, group);
            let part = [of(&query, 1), of(&key, group), of(&value, group)];
            let context = match selection {
                Some(selection) => {
                    let cut = mha.cut_of(selection, request, members.len())?;
                    mha.attend_chosen(part, selection, &cut, call)?.heads
                }
                None => {
                    let layouts = mha.layouts.of_shape(members.len(), mha.block_size())?;
                    mha.attend(part, &layouts.get(request)?, call)?
                }
            };
            for (at, &head) in members.iter().enumerate() {
                found[head] = Some(context.clone().slice_dim(1, at..at + 1));
            }
        }
        let found = found
            .into_iter()
            .map(|head| head.expect("each head has a choice"));
        Ok(Tensor::cat(found.collect(), 1).into())
    }

    fn chooses(&self) -> bool {
        true
    }

    fn check_pattern(&self, _: &Pattern) -> Result<()> {
        self.ensure_replaceable()
    }

    fn ensure_replaceable(&self) -> Result<()> {
        let expected = "none here: take it out by `with_head_selections(None)`";
        ensure_none("head_selections", true, expected)
    }

    fn ensure_decodable(&self) -> Result<()> {
        self.ensure_replaceable()
    }

    fn display(&self, content: Content) -> Content {
        content.add("head_selections", &self.to_string())
    }
}

impl SparseMultiHeadAttention {
    /// Sets how each head chooses its keys by content in each call, instead of one selection for all ([`Self::with_selection`]). Heads that choose alike
    /// share one call of attention, with a copy of their keys and values.
    ///
    /// ```
    /// use burn::tensor::{Device, Distribution, Tensor};
    /// use burn_sparse_transformer::{Pattern, SparseMhaInput, SparseMultiHeadAttentionConfig};
    ///
    /// let device = Device::flex();
    /// let mha = SparseMultiHeadAttentionConfig::new(64, 4, Pattern::causal()).init(&device);
    /// let mha = mha.with_head_selections(Some("topk:32,4 / pattern".parse()?))?;
    /// let x = Tensor::<3>::random([1, 500, 64], Distribution::Default, &device);
    /// assert_eq!(mha.forward(SparseMhaInput::self_attn(x)).context.dims(), [1, 500, 64]);
    /// # Ok::<(), burn_sparse_transformer::TransformerError>(())
    /// ```
    ///
    /// # Errors
    /// If the pattern differs by head, a selection does not support the pattern, or the module has a selection, heads that choose single keys by content,
    /// sinks, relative position biases, ALiBi or the quiet softmax.
    pub fn with_head_selections(mut self, heads: Option<HeadSelections>) -> Result<Self> {
        if let Some(heads) = &heads {
            self.check_head_selections(heads)?;
        }
        self.head_selections = heads;
        Ok(self)
    }

    /// Returns the selection of each head, if they differ.
    pub fn head_selections(&self) -> Option<&HeadSelections> {
        self.head_selections.as_ref()
    }

    fn check_head_selections(&self, heads: &HeadSelections) -> Result<()> {
        self.ensure_no_content()?;
        let by_head = self.pattern().is_by_head();
        ensure! { !by_head =>
        "pattern", "one for all heads where heads choose in different ways", self.pattern(); }
        let expected = "none where heads choose in different ways";
        ensure_none("selection", self.selection.is_some(), expected)?;
        let sinks = self.sinks.is_some() || self.quiet_softmax;
        ensure_none("sinks", sinks, expected)?;
        ensure_none("relative_bias", self.relative_bias.is_some(), expected)?;
        ensure_none("alibi", self.options.alibi.is_some(), expected)?;
        for head in 0..heads.len() {
            check_selection(self.pattern(), heads.of(head))?;
        }
        Ok(())
    }

    /// Measures each head's selection on an input: see [`Selection::quality`]. A head that uses the pattern alone has recall 1.
    ///
    /// # Errors
    /// Those of [`Self::with_head_selections`] and [`Self::selection_quality`].
    pub fn head_selection_quality(
        &self,
        input: SparseMhaInput,
        heads: &HeadSelections,
    ) -> Result<Vec<SelectionQuality>> {
        ensure_none("padding", input.padding.is_some(), "none")?;
        self.check_head_selections(heads)?;
        let (call, request) = self.prepare(&input, 0)?;
        let [query, key, _] = self.project(input, &call)?;
        let group = self.n_heads / self.n_kv_heads;
        let mut found = vec![SelectionQuality::ALL; self.n_heads];
        for (selection, members) in heads.parts(self.n_heads) {
            let Some(selection) = selection else {
                continue;
            };
            let cut = self.cut_of(selection, &request, members.len())?;
            let [query, key] =
                [(&query, 1), (&key, group)].map(|(x, group)| of_heads(x, &members, group));
            let call = self.score_call(query, key);
            let of_part = selection.quality_within(&call, cut.layout.as_ref())?;
            for (&head, quality) in members.iter().zip(of_part) {
                found[head] = quality;
            }
        }
        Ok(found)
    }
}

/// Gathers the queries of some heads, or the keys or values that `group` heads share.
fn of_heads(x: &Tensor<4>, members: &[usize], group: usize) -> Tensor<4> {
    let heads = members.iter().map(|head| {
        let head = head / group;
        x.clone().slice_dim(1, head..head + 1)
    });
    Tensor::cat(heads.collect(), 1)
}

impl SparseTransformer {
    /// Measures selections of heads on tokens, one entry for each layer, without changing the layers. Returns the quality per layer and head.
    ///
    /// # Errors
    /// If the number of entries is not the number of layers; also those of [`SparseMultiHeadAttention::head_selection_quality`].
    pub fn head_selection_quality(
        &self,
        tokens: Tensor<2, Int>,
        layers: &[HeadSelections],
    ) -> Result<Vec<Vec<SelectionQuality>>> {
        self.ensure_layers(layers.len())?;
        self.quality_by_layer(tokens, |layer, mha, input| {
            mha.head_selection_quality(input, &layers[layer])
        })
    }

    fn ensure_layers(&self, count: usize) -> Result<()> {
        ensure! { count == self.blocks.len() =>
        "layers", format!("{}, the model's", self.blocks.len()), count; }
        Ok(())
    }

    /// Sets how each head of each layer chooses its keys by content: one entry for each layer, `None` for one that uses its pattern. The layers' selections
    /// are removed. Parameters are unchanged.
    ///
    /// # Errors
    /// If the number of entries is not the number of layers; also those of [`SparseMultiHeadAttention::with_head_selections`].
    pub fn with_head_selections(self, layers: Vec<Option<HeadSelections>>) -> Result<Self> {
        let mut model = self.with_selections(&[], 0)?;
        model.ensure_layers(layers.len())?;
        for (block, heads) in model.blocks.iter_mut().zip(layers) {
            if let Some(heads) = &heads {
                block.mha.check_head_selections(heads)?;
            }
            block.mha.head_selections = heads;
        }
        Ok(model)
    }
}
