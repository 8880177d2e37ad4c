use burn::config::Config;
use burn::nn::RotaryEncodingConfig;

use crate::error::{Result, ensure};
use crate::{QkNorm, SparseMultiHeadAttentionConfig};

/// Options that the paper's attention does not have, for a [`SparseTransformerBlock`](crate::SparseTransformerBlock) or all blocks of a
/// [`SparseTransformer`](crate::SparseTransformer). All are off by default.
///
/// ```
/// use burn::tensor::Device;
/// use burn_sparse_transformer::{BlockAttentionConfig, Factorization, Pattern, QkNorm, SparseTransformerConfig};
///
/// let attention = BlockAttentionConfig::new()
///     .with_rope_theta(Some(10_000.0))
///     .with_qk_norm(Some(QkNorm::Rms))
///     .with_sinks(true);
/// let fixed = Factorization::from(Pattern::fixed(128, 32));
/// let model = SparseTransformerConfig::new(64, 4, fixed)
///     .with_vocab_size(256)
///     .with_context(512)
///     .with_n_layers(2)
///     .with_embedding_width(Some(128))
///     .with_attention(Some(attention))
///     .with_position_embedding(Some(false)) // the rotations say where a token is
///     .init(&Device::flex());
/// ```
#[derive(Config, Debug)]
#[must_use = "a configuration does nothing until a block is made with it"]
pub struct BlockAttentionConfig {
    /// Attention dropout probability in training, in `[0, 1)`.
    #[config(default = 0.0)]
    pub dropout: f64,
    /// Factor of the scores. Default: `1 / √d_k`.
    pub scale: Option<f64>,
    /// True if scores get ALiBi's biases: see [`SparseMultiHeadAttentionConfig::alibi`].
    #[config(default = false)]
    pub alibi: bool,
    /// Reach of a relative position bias: see [`SparseMultiHeadAttentionConfig::relative_reach`]. Default: none.
    pub relative_reach: Option<usize>,
    /// True if each head learns a sink logit: see [`SparseMultiHeadAttentionConfig::sinks`].
    #[config(default = false)]
    pub sinks: bool,
    /// Normalisation of every query and key head. Default: none.
    pub qk_norm: Option<QkNorm>,
    /// Term added to the variance, or to the mean square, in `qk_norm`.
    #[config(default = 1e-6)]
    pub qk_norm_eps: f64,
    /// Base of rotary position embeddings, `θ` of Su et al. (2021), who use 10,000. Default: no rotation.
    pub rope_theta: Option<f64>,
}

impl BlockAttentionConfig {
    /// Adds these options to `config`; `context` is the length of the rotation table.
    pub(crate) fn apply(
        &self,
        config: SparseMultiHeadAttentionConfig,
        context: Option<usize>,
    ) -> Result<SparseMultiHeadAttentionConfig> {
        let known = self.rope_theta.is_none() || context.is_some();
        ensure! { known => "context", "given with rope_theta", "none"; }
        // The attention reports `n_heads = 0` as an error.
        let d_k = (config.d_key.unwrap_or(config.d_model)).checked_div(config.n_heads);
        let rope = self.rope_theta.zip(context).map(|(theta, context)| {
            RotaryEncodingConfig::new(context, d_k.unwrap_or(0)).with_theta(theta as f32)
        });
        Ok(config
            .with_dropout(self.dropout)
            .with_scale(self.scale)
            .with_alibi(self.alibi)
            .with_relative_reach(self.relative_reach)
            .with_sinks(self.sinks)
            .with_qk_norm(self.qk_norm)
            .with_qk_norm_eps(self.qk_norm_eps)
            .with_rope(rope))
    }
}
