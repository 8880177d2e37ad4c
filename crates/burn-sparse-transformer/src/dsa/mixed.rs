//! DeepSeek sparse attention in the place of a layer's pattern.

use std::fmt;

use burn::module::Content;
use burn::tensor::Device;
use burn_blocksparse::Pattern;

use super::indexed::{check_pattern, context, not_replaceable};
use super::{DsaHeads, DsaHeadsConfig, DsaStage};
use crate::call::{Call, Seen};
use crate::kind::{AttentionKind, display};
use crate::{
    SparseMhaCache, SparseMhaInput, SparseMultiHeadAttention, SparseMultiHeadAttentionConfig,
    TransformerError,
};

impl SparseMultiHeadAttentionConfig {
    /// That nothing stands beside DeepSeek sparse attention that it does not have.
    pub(crate) fn validate_dsa(&self, config: &DsaHeadsConfig) -> Result<(), TransformerError> {
        config.validate()?;
        self.validate_indexed(DsaHeadsConfig::NAME)
    }

    pub(crate) fn init_dsa(
        &self,
        config: &DsaHeadsConfig,
        device: &Device,
    ) -> Result<DsaHeads, TransformerError> {
        let linear = |d_input, d_output| self.index_linear(d_input, d_output, device);
        DsaHeads::new(
            config,
            self.d_model,
            self.precision,
            self.rope.as_ref(),
            &linear,
            device,
        )
    }
}

impl AttentionKind for DsaHeads {
    fn context(
        &self,
        mha: &SparseMultiHeadAttention,
        input: SparseMhaInput,
        cache: Option<&mut SparseMhaCache>,
    ) -> Result<(Seen, Call), TransformerError> {
        context(self, mha, input, cache)
    }

    fn check_pattern(&self, pattern: &Pattern) -> Result<(), TransformerError> {
        check_pattern(DsaHeadsConfig::NAME, pattern)
    }

    fn ensure_replaceable(&self) -> Result<(), TransformerError> {
        not_replaceable(content(self))
    }

    fn pairs(&self, mha: &SparseMultiHeadAttention, seq: usize) -> Result<u64, TransformerError> {
        Ok(mha.n_heads as u64 * DsaHeads::pairs(self, seq))
    }

    fn matmul_flops_per_token(&self) -> u64 {
        match self.stage() {
            DsaStage::Sparse => DsaHeads::matmul_flops_per_token(self),
            DsaStage::Dense | DsaStage::WarmUp => 0,
        }
    }

    fn score_flops(&self, seq: usize) -> u64 {
        match self.stage() {
            DsaStage::Sparse => DsaHeads::score_flops(self, seq),
            DsaStage::Dense | DsaStage::WarmUp => 0,
        }
    }

    fn display(&self, shown: Content) -> Content {
        display(shown, &content(self), 0)
    }
}

/// As it is written.
fn content(dsa: &DsaHeads) -> String {
    fmt::from_fn(|f| dsa.config().write(f)).to_string()
}

impl SparseMultiHeadAttention {
    /// Heads of DeepSeek sparse attention, if that is what they are.
    pub fn dsa(&self) -> Option<&DsaHeads> {
        self.content.as_ref()?.dsa.as_ref()
    }

    /// The same, if they choose: in other stages of training they see what their pattern keeps.
    pub fn choosing_dsa(&self) -> Option<&DsaHeads> {
        self.dsa().filter(|dsa| dsa.stage() == DsaStage::Sparse)
    }
}
