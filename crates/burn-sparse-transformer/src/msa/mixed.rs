//! MiniMax sparse attention in the place of a layer's pattern.

use std::fmt;

use burn::module::Content;
use burn::tensor::Device;
use burn_blocksparse::Pattern;

use super::{MsaHeads, MsaHeadsConfig};
use crate::call::{Call, Seen};
use crate::dsa::DsaStage;
use crate::dsa::indexed::{check_pattern, context, not_replaceable};
use crate::kind::{AttentionKind, display};
use crate::{
    SparseMhaCache, SparseMhaInput, SparseMultiHeadAttention, SparseMultiHeadAttentionConfig,
    TransformerError,
};

impl SparseMultiHeadAttentionConfig {
    /// That nothing stands beside MiniMax sparse attention that it does not have.
    pub(crate) fn validate_msa(&self, config: &MsaHeadsConfig) -> Result<(), TransformerError> {
        config.validate()?;
        self.validate_indexed(MsaHeadsConfig::NAME)
    }

    pub(crate) fn init_msa(
        &self,
        config: &MsaHeadsConfig,
        device: &Device,
    ) -> Result<MsaHeads, TransformerError> {
        let sizes = [self.d_model, self.n_kv_heads.unwrap_or(self.n_heads)];
        let linear = |d_input, d_output| self.index_linear(d_input, d_output, device);
        let rope = self.rope.as_ref();
        MsaHeads::new(config, sizes, self.precision, rope, &linear, device)
    }
}

impl AttentionKind for MsaHeads {
    fn context(
        &self,
        mha: &SparseMultiHeadAttention,
        input: SparseMhaInput,
        cache: Option<&mut SparseMhaCache>,
    ) -> Result<(Seen, Call), TransformerError> {
        context(self, mha, input, cache)
    }

    fn check_pattern(&self, pattern: &Pattern) -> Result<(), TransformerError> {
        check_pattern(MsaHeadsConfig::NAME, pattern)
    }

    fn ensure_replaceable(&self) -> Result<(), TransformerError> {
        not_replaceable(content(self))
    }

    fn pairs(&self, mha: &SparseMultiHeadAttention, seq: usize) -> Result<u64, TransformerError> {
        Ok(mha.n_heads as u64 * MsaHeads::pairs(self, seq))
    }

    fn matmul_flops_per_token(&self) -> u64 {
        match self.stage() {
            DsaStage::Sparse => MsaHeads::matmul_flops_per_token(self),
            DsaStage::Dense | DsaStage::WarmUp => 0,
        }
    }

    fn score_flops(&self, seq: usize) -> u64 {
        match self.stage() {
            DsaStage::Sparse => MsaHeads::score_flops(self, seq),
            DsaStage::Dense | DsaStage::WarmUp => 0,
        }
    }

    fn display(&self, shown: Content) -> Content {
        display(shown, &content(self), 0)
    }
}

/// As it is written.
fn content(msa: &MsaHeads) -> String {
    fmt::from_fn(|f| msa.config().write(f)).to_string()
}

impl SparseMultiHeadAttention {
    /// Heads of MiniMax sparse attention, if that is what they are.
    pub fn msa(&self) -> Option<&MsaHeads> {
        self.content.as_ref()?.msa.as_ref()
    }

    /// The same, if they choose: in other stages of training they see what their pattern keeps.
    pub fn choosing_msa(&self) -> Option<&MsaHeads> {
        self.msa().filter(|msa| msa.stage() == DsaStage::Sparse)
    }
}
