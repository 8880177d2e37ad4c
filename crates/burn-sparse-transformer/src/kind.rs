//! Kinds of attention: how the heads of a layer find their keys.

use burn::module::Content;
use burn_blocksparse::Pattern;

use crate::call::{Call, Heads, Seen};
use crate::error::{Result, ensure, ensure_none};
use crate::layouts::Request;
use crate::{SparseMhaCache, SparseMhaInput, SparseMultiHeadAttention};

/// Behaviour that differs between a pattern and choices by content. The defaults are those of a pattern. Implement a new kind in its own file and add it to
/// [`SparseMultiHeadAttention::kind`].
pub(crate) trait AttentionKind {
    /// Checks that an input has nothing that the kind does not support.
    fn check_input(&self, _: &SparseMhaInput) -> Result<()> {
        Ok(())
    }

    /// Computes the heads' outputs for an input, with a cache also over its positions. After an error the cache may hold some positions of the input.
    fn context(
        &self,
        mha: &SparseMultiHeadAttention,
        input: SparseMhaInput,
        cache: Option<&mut SparseMhaCache>,
    ) -> Result<(Seen, Call)> {
        self.attend_projected(mha, input, cache)
    }

    /// [`Self::attend`] for an input's projected heads.
    fn attend_projected(
        &self,
        mha: &SparseMultiHeadAttention,
        input: SparseMhaInput,
        cache: Option<&mut SparseMhaCache>,
    ) -> Result<(Seen, Call)> {
        let before = cache.as_ref().map_or(0, |cache| cache.len());
        let (call, request) = mha.prepare(&input, before)?;
        let heads = appended(cache, mha.project(input, &call)?);
        let seen = self.attend(mha, heads, &request, &call)?;
        Ok((seen, call))
    }

    fn attend(
        &self,
        mha: &SparseMultiHeadAttention,
        heads: Heads,
        request: &Request,
        call: &Call,
    ) -> Result<Seen> {
        Ok((mha.attend(heads, &mha.layouts.get(request)?, call)?).into())
    }

    /// Returns whether keys are chosen by content from projected heads alone.
    fn chooses(&self) -> bool {
        false
    }

    /// Returns whether rows after a sequence's end do not affect the others, even without a layout that excludes them.
    fn ignores_later_rows(&self) -> bool {
        false
    }

    /// Checks that another pattern can replace the layer's.
    fn check_pattern(&self, _: &Pattern) -> Result<()> {
        Ok(())
    }

    /// Checks that a call may override how keys are chosen.
    fn ensure_replaceable(&self) -> Result<()> {
        Ok(())
    }

    /// Checks that the pattern alone determines layouts, for calls that support nothing else.
    fn ensure_pattern(&self) -> Result<()> {
        self.ensure_replaceable()
    }

    /// Checks that later tokens do not change a choice.
    fn ensure_decodable(&self) -> Result<()> {
        Ok(())
    }

    /// Returns the number of pairs computed for a sequence, over all heads.
    fn pairs(&self, mha: &SparseMultiHeadAttention, seq: usize) -> Result<u64> {
        Ok(mha.layout(seq, seq)?.allowed_pairs())
    }

    fn matmul_flops_per_token(&self) -> u64 {
        0
    }

    /// Returns the operations of its own scores for one sequence, forward.
    fn score_flops(&self, _seq: usize) -> u64 {
        0
    }

    fn display(&self, content: Content) -> Content {
        content
    }
}

/// Checks that an input is self-attention without padding and biases, which content-based heads do not support.
pub(crate) fn check_input(name: &str, input: &SparseMhaInput) -> Result<()> {
    let none = format!("none with {name}");
    ensure_none("padding", input.padding.is_some(), &none)?;
    ensure_none("bias", input.options.bias.is_some(), &none)?;
    let is_own = input.is_self_attention();
    ensure! { is_own => "input", format!("self-attention with {name}"), "another key or value"; }
    Ok(())
}

/// Appends keys and values to a cache, if there is one, and returns all of its keys and values.
pub(crate) fn appended(cache: Option<&mut SparseMhaCache>, heads: Heads) -> Heads {
    let Some(cache) = cache else { return heads };
    let [query, key, value] = heads;
    let [key, value] = cache.append([key, value]);
    [query, key, value]
}

/// Checks that a pattern can be used next to heads that choose by content.
pub(crate) fn check_causal(pattern: &Pattern) -> Result<()> {
    ensure! { pattern.is_causal() => "pattern", "causal next to content-based heads", pattern; }
    Ok(())
}

/// The pattern alone determines which keys are seen.
struct ByPattern;

impl AttentionKind for ByPattern {}

impl SparseMultiHeadAttention {
    /// Returns the kind of attention.
    pub(crate) fn kind(&self) -> &dyn AttentionKind {
        if let Some(content) = &self.content {
            return content;
        }
        match (&self.selection, &self.head_selections) {
            (Some(selection), _) => selection,
            (None, Some(selections)) => selections,
            (None, None) => &ByPattern,
        }
    }
}
