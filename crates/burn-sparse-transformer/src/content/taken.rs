//! Layers whose keys an indexer of an earlier layer chose.

use burn::module::Content;
use burn_blocksparse::Pattern;

use super::kind::ContentAttention;
use crate::call::{Call, Seen};
use crate::dsa::DsaStage;
use crate::dsa::indexed::{check_pattern, not_replaceable, seen};
use crate::kind::{AttentionKind, Heads, check_input, display};
use crate::layouts::Request;
use crate::{SparseMhaInput, SparseMultiHeadAttention, TransformerError};

/// In the place of heads with an indexer: no parameters.
#[derive(Clone, Debug)]
pub(crate) struct TakenHeads {
    /// How the earlier layer chooses.
    pub(crate) config: ContentAttention,
    pub(crate) stage: DsaStage,
}

impl TakenHeads {
    pub(crate) fn new(config: &ContentAttention) -> Self {
        Self {
            config: config.clone(),
            stage: DsaStage::default(),
        }
    }
}

impl AttentionKind for TakenHeads {
    fn check_input(&self, input: &SparseMhaInput) -> Result<(), TransformerError> {
        check_input(self.config.name(), input)
    }

    fn attend(
        &self,
        mha: &SparseMultiHeadAttention,
        heads: Heads,
        request: &Request,
        call: &Call,
    ) -> Result<Seen, TransformerError> {
        match self.stage {
            DsaStage::Sparse => call.taken_by(mha, heads),
            DsaStage::Dense | DsaStage::WarmUp => {
                Ok((mha.attend(heads, &mha.layouts.get(request)?, call)?).into())
            }
        }
    }

    fn check_pattern(&self, pattern: &Pattern) -> Result<(), TransformerError> {
        check_pattern(self.config.name(), pattern)
    }

    fn ensure_replaceable(&self) -> Result<(), TransformerError> {
        Err(not_replaceable(&self.config))
    }

    fn pairs(&self, mha: &SparseMultiHeadAttention, seq: usize) -> Result<u64, TransformerError> {
        let pairs = match (self.stage, &self.config) {
            (DsaStage::Sparse, ContentAttention::Dsa(dsa)) => seen(seq, dsa.keep),
            (DsaStage::Sparse, ContentAttention::Msa(msa)) => msa.pairs(seq)?,
            _ => seen(seq, seq),
        };
        Ok(mha.n_heads as u64 * pairs)
    }

    fn display(&self, shown: Content) -> Content {
        display(shown, &self.config, 0)
    }
}
