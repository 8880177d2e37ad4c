use burn::config::Config;
use burn::nn::{EmbeddingConfig, LinearConfig, RmsNormConfig, RotaryEncodingConfig};
use burn::tensor::Device;
use burn_blocksparse::Pattern;
use burn_sparse_select::Selection;

use super::model::{Llama, LlamaBlock, LlamaMlp};
use crate::error::{Result, ensure_above_zero, ensure_positive, or_panics};
use crate::{Precision, QkNorm, RopeScaling, SparseMultiHeadAttentionConfig};

/// Configuration of [`Llama`].
///
/// ```
/// use burn::tensor::Device;
/// use burn_sparse_transformer::{Pattern, llama::LlamaConfig};
///
/// // SmolLM2-135M's sizes, with a window of 1,024 and four attention sinks.
/// let model = LlamaConfig::new(576, 9)
///     .with_n_kv_heads(Some(3))
///     .with_vocab_size(49_152)
///     .with_n_layers(30)
///     .with_d_ff(Some(1536))
///     .with_context(8192)
///     .with_rope_theta(100_000.0)
///     .with_pattern(Pattern::streaming(1024, 4))
///     .init(&Device::flex());
/// assert_eq!(model.layers.len(), 30);
/// ```
#[derive(Config, Debug)]
#[must_use = "a configuration does nothing until `init`"]
pub struct LlamaConfig {
    /// Hidden size: width of the residual stream.
    pub d_model: usize,
    /// Number of query heads.
    pub n_heads: usize,
    /// Number of key and value heads, a divisor of `n_heads`. Default: `n_heads`.
    pub n_kv_heads: Option<usize>,
    /// Width of a head. Default: `d_model / n_heads`.
    pub head_dim: Option<usize>,
    /// Size of the vocabulary.
    #[config(default = 256)]
    pub vocab_size: usize,
    /// Number of blocks.
    #[config(default = 12)]
    pub n_layers: usize,
    /// Inner size of the feed-forward network. Default: `4 · d_model`.
    pub d_ff: Option<usize>,
    /// Longest sequence, in positions: the length of the rotation table.
    #[config(default = 2048)]
    pub context: usize,
    /// Base of the rotary position embeddings.
    #[config(default = 10_000.0)]
    pub rope_theta: f64,
    /// Scaling of RoPE for contexts longer than a model was trained for. Default: none.
    pub rope_scaling: Option<RopeScaling>,
    /// True if every query and key head has an RMS norm, as in Qwen3.
    #[config(default = false)]
    pub qk_norm: bool,
    /// True if the projections to queries, keys and values have biases, as in Qwen2.
    #[config(default = false)]
    pub qkv_bias: bool,
    /// True if the output projection of the attention has a bias.
    #[config(default = false)]
    pub output_bias: bool,
    /// True if the output head is the transposed token embedding.
    #[config(default = true)]
    pub tied_embedding: bool,
    /// Term added to the mean square in the norms.
    #[config(default = 1e-5)]
    pub rms_norm_eps: f64,
    /// Pattern: which query attends to which key, per head.
    #[config(default = "Pattern::causal()")]
    pub pattern: Pattern,
    /// Selections of keys by content, which layers use in turn. Default: none.
    pub selections: Option<Vec<Selection>>,
    /// Block size of the pattern: 8, 16, 32, 64 or 128.
    #[config(default = 64)]
    pub block_size: usize,
    /// Skips tiles of the attention whose scores are far below the maxima: [`SparseMultiHeadAttentionConfig::softmax_threshold`]. Default: nothing is
    /// skipped.
    pub softmax_threshold: Option<f64>,
    /// Dtype of the matmuls and of the attention; the residual stream has the parameters' dtype.
    #[config(default = "Precision::F32")]
    pub precision: Precision,
}

impl LlamaConfig {
    or_panics! {
        /// Creates the model, with parameters that are initialised on first use.
        pub fn init(&self, device: &Device) -> Llama;

        /// # Errors
        /// If a size is 0; also those of [`SparseMultiHeadAttentionConfig::try_init`].
        pub fn try_init {
            ensure_positive("vocab_size", self.vocab_size)?;
            ensure_positive("n_layers", self.n_layers)?;
            ensure_positive("context", self.context)?;
            ensure_positive("d_ff", self.d_ff())?;
            ensure_above_zero("rms_norm_eps", self.rms_norm_eps)?;
            let norm = || {
                let config = RmsNormConfig::new(self.d_model).with_epsilon(self.rms_norm_eps);
                config.init(device)
            };
            let linear = |d_input, d_output| {
                let config = LinearConfig::new(d_input, d_output).with_bias(false);
                config.init(device)
            };
            let attentions = self.attention().try_init_many(self.n_layers, device)?;
            let block = |attention| LlamaBlock {
                attention_norm: norm(),
                attention,
                mlp_norm: norm(),
                mlp: LlamaMlp {
                    gate: linear(self.d_model, self.d_ff()),
                    up: linear(self.d_model, self.d_ff()),
                    down: linear(self.d_ff(), self.d_model),
                },
            };
            let model = Llama {
                embed: EmbeddingConfig::new(self.vocab_size, self.d_model).init(device),
                layers: attentions.into_iter().map(block).collect(),
                norm: norm(),
                head: (!self.tied_embedding).then(|| linear(self.d_model, self.vocab_size)),
                context: self.context,
                precision: self.precision,
            };
            model.with_selections(self.selections.as_deref().unwrap_or_default())
        }
    }

    fn d_ff(&self) -> usize {
        self.d_ff.unwrap_or(self.d_model.saturating_mul(4))
    }

    fn attention(&self) -> SparseMultiHeadAttentionConfig {
        // The attention reports `n_heads = 0` as an error.
        let by_heads = || self.d_model.checked_div(self.n_heads).unwrap_or(0);
        let rope = RotaryEncodingConfig::new(self.context, self.head_dim.unwrap_or_else(by_heads))
            .with_theta(self.rope_theta as f32);
        SparseMultiHeadAttentionConfig::new(self.d_model, self.n_heads, self.pattern.clone())
            .with_n_kv_heads(self.n_kv_heads)
            .with_head_dim(self.head_dim)
            .with_block_size(self.block_size)
            .with_softmax_threshold(self.softmax_threshold)
            .with_rope(Some(rope))
            .with_rope_scaling(self.rope_scaling.clone())
            .with_qk_norm(self.qk_norm.then_some(QkNorm::Rms))
            .with_qk_norm_eps(self.rms_norm_eps)
            .with_query_bias(self.qkv_bias)
            .with_key_bias(self.qkv_bias)
            .with_value_bias(self.qkv_bias)
            .with_output_bias(self.output_bias)
            .with_precision(self.precision)
    }
}
