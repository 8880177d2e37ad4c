//! Native sparse attention in place of a layer's pattern.

use burn::tensor::Tensor;

use super::NsaHeads;
use super::heads::{Placing, Projections};
use crate::call::{Call, Seen};
use crate::error::Result;
use crate::heads::{Positions, rotate_apart};
use crate::precision::project_heads;
use crate::{SparseMhaCache, SparseMhaInput, SparseMultiHeadAttention};

impl NsaHeads {
    /// Computes the heads' outputs.
    pub(crate) fn context(
        &self,
        mha: &SparseMultiHeadAttention,
        input: SparseMhaInput,
        cache: Option<&mut SparseMhaCache>,
    ) -> Result<(Seen, Call)> {
        let before = cache.as_ref().map_or(0, |cache| cache.len());
        let (call, _) = mha.prepare(&input, before)?;
        let x = input.query;
        let (heads, placing) = mha.nsa_projections(x.clone(), &call.query)?;
        let context = match cache {
            None => self.forward(x, heads, &placing)?,
            Some(cache) => self.forward_cache(x, heads, cache, &placing)?,
        };
        Ok((context.into(), call))
    }
}

impl SparseMultiHeadAttention {
    /// Returns the heads of native sparse attention, if the layer has them.
    pub fn nsa(&self) -> Option<&NsaHeads> {
        self.content.as_ref()?.nsa.as_ref()
    }

    /// Returns the projected heads, and the norms and rotations to apply to keys.
    #[doc(hidden)]
    pub fn nsa_projections(
        &self,
        x: Tensor<3>,
        positions: &Positions,
    ) -> Result<(Projections, Placing<'_>)> {
        let layers = [&self.query, &self.key, &self.value];
        let heads = [self.n_heads, self.n_kv_heads, self.n_kv_heads];
        let [query, key, value] = project_heads(self.precision, layers, x, heads)?;
        let heads = Projections {
            query: self.place_by(rotate_apart, query, &self.query_norm, positions)?,
            key,
            value,
        };
        let placing = Placing {
            norm: self.key_norm.as_ref(),
            eps: self.qk_norm_eps,
            rope: self.rope.as_ref(),
        };
        Ok((heads, placing))
    }
}
