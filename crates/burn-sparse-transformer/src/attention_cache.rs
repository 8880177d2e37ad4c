//! Attention to cached positions, and the positions where a cache may stop.

use burn_blocksparse::layout::LastUse;

use crate::call::{Call, Seen};
use crate::error::{Result, or_panics};
use crate::{
    SparseMhaCache, SparseMhaInput, SparseMhaOutput, SparseMultiHeadAttention, TransformerError,
};

impl SparseMultiHeadAttention {
    or_panics! {
        /// Computes attention of new positions to themselves and to those in `cache`, for autoregressive decoding.
        ///
        /// The keys and values of `input` are appended to the cache, keys normalised and rotated; its queries are the last positions in the cache then.
        /// Feeding a sequence in pieces gives the same as [`Self::forward`] for the whole, provided that pieces end where no earlier query sees a later key:
        /// anywhere with a causal pattern, with others where [`Pattern::allows_boundary`](crate::Pattern::allows_boundary) says so. Use
        /// [`Self::forward_cache_last`] for the end of a sequence. After an error the cache is unchanged.
        ///
        /// # Shapes
        /// - input: `[batch, new, d_model]`, new positions only
        /// - `context`: `[batch, new, d_model]`
        pub fn forward_cache(&self, input: SparseMhaInput, cache: &mut SparseMhaCache) -> SparseMhaOutput;

        /// # Errors
        /// Those of [`Self::try_forward`]; also if the batch differs from the cache's, or the cache is full. [`TransformerError::Boundary`] if the cache
        /// cannot stop where the input begins or ends. Also if a selection or heads that choose by content let later tokens change what earlier ones see.
        pub fn try_forward_cache { self.finish_seen(self.cached_context(input, cache, false)?) }
    }

    or_panics! {
        /// [`Self::forward_cache`] for the last positions of a sequence, which may end anywhere.
        pub fn forward_cache_last(&self, input: SparseMhaInput, cache: &mut SparseMhaCache) -> SparseMhaOutput;

        pub fn try_forward_cache_last { self.finish_seen(self.cached_context(input, cache, true)?) }
    }

    /// Checks that a cache may stop at a position.
    fn check_boundary(&self, position: usize) -> Result<()> {
        let pattern = self.layouts.pattern();
        let last = match pattern.furthest_key(self.n_heads, position) {
            LastUse::Never => return Ok(()),
            LastUse::At(last) => usize::try_from(last).ok(),
            LastUse::Always => None,
        };
        Err(TransformerError::Boundary {
            position,
            last,
            next: pattern.next_boundary(self.n_heads, position),
        })
    }

    /// Computes the heads' outputs for new positions and a cache. With `last`, a sequence may end there.
    pub(crate) fn cached_context(
        &self,
        input: SparseMhaInput,
        cache: &mut SparseMhaCache,
        last: bool,
    ) -> Result<(Seen, Call)> {
        let (_, new) = self.check(&input)?;
        let [batch, ..] = input.key.dims();
        let after = cache.check([batch, self.n_kv_heads, self.d_k()], new)?;
        let before = cache.len();
        self.check_boundary(before)?;
        if !last {
            self.check_boundary(after)?;
        }
        self.kind().ensure_decodable()?;
        let context = self.context_with(input, Some(cache));
        if context.is_err() {
            cache.truncate(before);
        }
        context
    }
}
