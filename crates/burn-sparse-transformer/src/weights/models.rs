//! Configurations of models with known maps.

use crate::feed_forward::FeedForwardActivation;
use crate::longformer::{LongformerAttentionConfig, LongformerEncoderConfig};
use crate::{Factorization, Pattern, SparseMultiHeadAttentionConfig, SparseTransformerConfig};

/// Returns the configuration of GPT-2 (Radford et al., 2019) with a pattern: pre-activation blocks with the tanh approximation of GELU and a table of
/// positions, for [`KeyMap::gpt2`](super::KeyMap::gpt2). The original attention is `Pattern::causal()`; any other causal pattern makes the trained model
/// sparse.
///
/// The arguments are called `n_embd`, `n_head`, `n_layer`, `n_positions` and `vocab_size` in the configuration of `transformers`. The inner width is
/// `4 · d_model` and the norms' epsilon 1e-5, as in all of OpenAI's models.
///
/// ```
/// use burn::module::Module;
/// use burn::tensor::Device;
/// use burn_sparse_transformer::weights::gpt2_config;
/// use burn_sparse_transformer::{Factorization, Pattern};
///
/// let pattern = Factorization::from(Pattern::local(256));
/// let model = gpt2_config(768, 12, 12, 1024, 50_257, pattern).init(&Device::flex());
/// // The 124,439,808 of GPT-2 and, not tied, the head and a row of positions that is 0.
/// assert_eq!(model.num_params(), 124_439_808 + 50_257 * 768 + 768);
/// ```
pub fn gpt2_config(
    d_model: usize,
    n_heads: usize,
    n_layers: usize,
    context: usize,
    vocab_size: usize,
    factorization: Factorization,
) -> SparseTransformerConfig {
    SparseTransformerConfig::new(d_model, n_heads, factorization)
        .with_n_layers(n_layers)
        .with_context(context)
        .with_vocab_size(vocab_size)
        .with_embedding_width(Some(context))
        .with_activation(Some(FeedForwardActivation::GeluTanh))
}

/// Returns the configuration of Longformer's encoder (Beltagy et al., 2020) in `transformers`, for [`KeyMap::longformer`](super::KeyMap::longformer). Its
/// `attention_window` of `w` keys is `Pattern::window(w / 2)`; any other pattern can be used instead.
///
/// `context` is two less than `max_position_embeddings`.
pub fn longformer_config(
    d_model: usize,
    n_heads: usize,
    n_layers: usize,
    context: usize,
    vocab_size: usize,
    pattern: Pattern,
) -> LongformerEncoderConfig {
    let attention = SparseMultiHeadAttentionConfig::new(d_model, n_heads, pattern);
    LongformerEncoderConfig::new(LongformerAttentionConfig::new(attention))
        .with_n_layers(n_layers)
        .with_context(context)
        .with_vocab_size(vocab_size)
}
