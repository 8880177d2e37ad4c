//! DeepSeek sparse attention in the place of a layer's pattern.

use std::fmt;

use burn::module::Content;
use burn::nn::LinearConfig;
use burn::tensor::Device;
use burn_blocksparse::Pattern;

use super::heads::DsaParts;
use super::{DsaHeads, DsaHeadsConfig, DsaStage};
use crate::call::{Call, Seen};
use crate::error::{ensure, ensure_none};
use crate::kind::{AttentionKind, display};
use crate::{
    SparseMhaCache, SparseMhaInput, SparseMultiHeadAttention, SparseMultiHeadAttentionConfig,
    TransformerError,
};

/// That tokens see all earlier ones, from which DeepSeek sparse attention chooses.
fn check_pattern(pattern: &Pattern) -> Result<(), TransformerError> {
    let expected = || "causal with dsa, whose tokens choose from all earlier ones".into();
    ensure(*pattern == Pattern::causal(), "pattern", expected, pattern)
}

impl SparseMultiHeadAttentionConfig {
    /// That nothing stands beside DeepSeek sparse attention that it does not have.
    pub(crate) fn validate_dsa(&self, config: &DsaHeadsConfig) -> Result<(), TransformerError> {
        config.validate()?;
        check_pattern(&self.pattern)?;
        let expected = "none with dsa, which is all heads of a layer";
        ensure_none("local_heads", self.local_heads.is_some(), expected)?;
        self.ensure_no_options(expected)
    }

    pub(crate) fn init_dsa(
        &self,
        config: &DsaHeadsConfig,
        device: &Device,
    ) -> Result<DsaHeads, TransformerError> {
        let linear = |d_input: usize, d_output: usize| {
            LinearConfig::new(d_input, d_output)
                .with_bias(false)
                .with_initializer(self.initializer.clone())
                .init(device)
        };
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
        ensure_none("padding", input.padding.is_some(), "none with dsa")?;
        ensure_none("bias", input.bias.is_some(), "none with dsa")?;
        let own = input.is_self_attention();
        let expected = || "self-attention with dsa".into();
        ensure(own, "input", expected, "another key or value")?;
        let before = cache.as_ref().map_or(0, |cache| cache.len());
        let (call, request) = mha.prepare(&input, before)?;
        // Nothing is learned from a cache.
        let learns = input.query.is_autodiff() && cache.is_none();
        let x = input.query.clone();
        let heads = mha.project(input, &call)?;
        if self.stage() == DsaStage::Sparse {
            let (q, k, v) = heads;
            let parts = DsaParts {
                heads: [q, k, v],
                index: self.index(x, &call.key)?,
            };
            let parts = match cache {
                Some(cache) => self.behind(parts, cache)?,
                None => parts,
            };
            return Ok((self.attend(parts, &mha.options, learns)?, call));
        }
        let aux_loss = match learns && self.stage() == DsaStage::WarmUp {
            true => {
                let index = self.index(x, &call.key)?;
                let pair = [&heads.0, &heads.1];
                Some(self.warm_up_loss(&index, pair, mha.options.scale)?)
            }
            false => None,
        };
        let (q, k, v) = heads;
        let (k, v) = match cache {
            Some(cache) => cache.append(k, v),
            None => (k, v),
        };
        let heads = mha.attend((q, k, v), &mha.layouts.get(&request)?, &call)?;
        Ok((Seen { heads, aux_loss }, call))
    }

    fn check_pattern(&self, pattern: &Pattern) -> Result<(), TransformerError> {
        check_pattern(pattern)
    }

    fn ensure_replaceable(&self) -> Result<(), TransformerError> {
        let expected =
            "none with padding, packed sequences and weights, which know nothing of its indexer";
        Err(TransformerError::argument(
            "content",
            expected,
            content(self),
        ))
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
