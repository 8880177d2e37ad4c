//! How the heads of a layer find their keys.

use burn::module::Content;
use burn_blocksparse::Pattern;

use crate::call::{Call, Heads, Seen};
use crate::error::{Result, ensure, ensure_none};
use crate::layouts::Request;
use crate::{SparseMhaCache, SparseMhaInput, SparseMultiHeadAttention};

/// What differs between a pattern and the choices by content. What is not said is the pattern's. A new kind implements it in a file of its own and has a row in
/// [`SparseMultiHeadAttention::kind`].
pub(crate) trait AttentionKind {
    /// That an input has nothing that the kind does not know.
    fn check_input(&self, _: &SparseMhaInput) -> Result<()> {
        Ok(())
    }

    /// What the heads see of an input, with a cache also of the positions in it. After an error the cache may hold some of the input's.
    fn context(
        &self,
        mha: &SparseMultiHeadAttention,
        input: SparseMhaInput,
        cache: Option<&mut SparseMhaCache>,
    ) -> Result<(Seen, Call)> {
        self.attend_projected(mha, input, cache)
    }

    /// [`Self::attend`] of an input's projected heads.
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

    /// Returns whether rows after a sequence's end change nothing of what the others see, without a layout that leaves them out.
    fn ignores_later_rows(&self) -> bool {
        false
    }

    /// That another pattern can take the place of the layer's.
    fn check_pattern(&self, _: &Pattern) -> Result<()> {
        Ok(())
    }

    /// That a call may choose in its own way.
    fn ensure_replaceable(&self) -> Result<()> {
        Ok(())
    }

    /// That layouts are the pattern's, for calls that know nothing else.
    fn ensure_pattern(&self) -> Result<()> {
        self.ensure_replaceable()
    }

    /// That tokens that come later change no choice.
    fn ensure_decodable(&self) -> Result<()> {
        Ok(())
    }

    /// Pairs that are computed for a sequence, of all heads.
    fn pairs(&self, mha: &SparseMultiHeadAttention, seq: usize) -> Result<u64> {
        Ok(mha.layout(seq, seq)?.allowed_pairs())
    }

    fn matmul_flops_per_token(&self) -> u64 {
        0
    }

    /// Operations of its own scores for one sequence, forward.
    fn score_flops(&self, _seq: usize) -> u64 {
        0
    }

    fn display(&self, content: Content) -> Content {
        content
    }
}

/// That an input is self-attention without padding and biases, which heads by content do not know.
pub(crate) fn check_input(name: &str, input: &SparseMhaInput) -> Result<()> {
    let none = format!("none with {name}");
    ensure_none("padding", input.padding.is_some(), &none)?;
    ensure_none("bias", input.options.bias.is_some(), &none)?;
    let is_own = input.is_self_attention();
    ensure! { is_own => "input", format!("self-attention with {name}"), "another key or value"; }
    Ok(())
}

/// With keys and values behind those of a cache, which has them then.
pub(crate) fn appended(cache: Option<&mut SparseMhaCache>, heads: Heads) -> Heads {
    let Some(cache) = cache else { return heads };
    let [query, key, value] = heads;
    let [key, value] = cache.append([key, value]);
    [query, key, value]
}

/// That a pattern can stand in a layer with heads that choose by content.
pub(crate) fn check_causal(pattern: &Pattern) -> Result<()> {
    ensure! { pattern.is_causal() => "pattern", "causal next to content-based heads", pattern; }
    Ok(())
}

/// Which keys are seen is the pattern's alone.
struct ByPattern;

impl AttentionKind for ByPattern {}

impl SparseMultiHeadAttention {
    /// How the heads find their keys.
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
