use burn::module::Module;
use burn::nn::{Embedding, Linear, RmsNorm};
use burn::tensor::{Int, Tensor};
use burn_blocksparse::Pattern;
use burn_fused_ops::{
    Activation, AddNormOptions, LinearOptions, NormKind, NormParams, embedding, linear,
};
use burn_sparse_select::Selection;

use crate::decoder::{Attend, Decoder};
use crate::error::{Result, ensure_shape, or_panics};
use crate::heads::Positions;
use crate::layouts::LayoutPool;
use crate::selected::of_layer;
use crate::stream::{Projected, Stream};
use crate::transformer::mean_loss;
use crate::{Precision, SparseMhaInput, SparseMultiHeadAttention, SparseTransformerCache};

/// Llama-style decoder-only model.
///
/// ```text
/// h = x + attention(rms_norm(x))
/// x' = h + down(silu(gate(rms_norm(h))) · up(rms_norm(h)))
/// logits = rms_norm(x_N) · W_head
/// ```
///
/// The crate `burn-paged-attention` decodes it from a paged KV cache, with eviction and `generate`: it is a [`Decoder`].
///
/// ```
/// use burn::tensor::{Device, Int, Tensor};
/// use burn_sparse_transformer::llama::LlamaConfig;
///
/// let device = Device::flex();
/// let config = LlamaConfig::new(64, 4).with_n_kv_heads(Some(2)).with_n_layers(2);
/// let model = config.with_context(128).init(&device);
/// let tokens = Tensor::<2, Int>::from_data([[84, 104, 101, 32]], &device);
/// assert_eq!(model.forward(tokens).dims(), [1, 4, 256]);
/// ```
///
/// Create it with [`LlamaConfig`](super::LlamaConfig).
#[derive(Module, Debug)]
pub struct Llama {
    /// Token embedding, `[vocab_size, d_model]`.
    pub embed: Embedding,
    /// Blocks, first to last.
    pub layers: Vec<LlamaBlock>,
    /// Norm before the logits.
    pub norm: RmsNorm,
    /// Projection from `d_model` to `vocab_size`, unless the output head is the embedding.
    pub head: Option<Linear>,
    pub(super) context: usize,
    #[module(skip)]
    pub(super) precision: Precision,
}

/// Block of a [`Llama`].
#[derive(Module, Debug)]
pub struct LlamaBlock {
    /// Norm before the attention.
    pub attention_norm: RmsNorm,
    /// Self-attention.
    pub attention: SparseMultiHeadAttention,
    /// Norm before the feed-forward network.
    pub mlp_norm: RmsNorm,
    /// Feed-forward network.
    pub mlp: LlamaMlp,
}

/// SwiGLU feed-forward network, `down(silu(gate(x)) · up(x))` (Shazeer, 2020).
#[derive(Module, Debug)]
pub struct LlamaMlp {
    /// Projection from `d_model` to `d_ff`.
    pub gate: Linear,
    /// Projection from `d_model` to `d_ff`.
    pub up: Linear,
    /// Projection from `d_ff` to `d_model`.
    pub down: Linear,
}

/// Rows computed at once outside of training: for a longer prompt the inner activations, `d_ff` wide, would dominate memory.
const ROWS: usize = 1 << 15;

impl LlamaMlp {
    fn forward(&self, x: Tensor<3>, precision: Precision) -> Result<Projected> {
        let shape @ [batch, seq, width] = x.dims();
        if batch * seq <= ROWS || x.is_tracked() {
            return Ok(Projected::new(self.product(x, precision)?, None));
        }
        let rows = x.reshape([1, batch * seq, width]).split(ROWS, 1);
        let rows = rows.into_iter().map(|x| self.product(x, precision));
        let out = Tensor::cat(rows.collect::<Result<_>>()?, 1);
        Ok(Projected::new(out.reshape(shape), None))
    }

    fn product(&self, x: Tensor<3>, precision: Precision) -> Result<Tensor<3>> {
        let hidden = precision.gated(&self.gate, &self.up, x, Activation::Silu)?;
        Ok(precision.product(&self.down, hidden)?)
    }
}

impl Llama {
    or_panics! {
        /// Returns the logits of every position.
        ///
        /// # Shapes
        /// - `tokens`: `[batch, seq]`
        /// - result: `[batch, seq, vocab_size]`
        pub fn forward(&self, tokens: Tensor<2, Int>) -> Tensor<3>;

        /// # Errors
        /// If there are no tokens, or more than the context; also those of [`SparseMultiHeadAttention::try_forward`].
        pub fn try_forward { self.logits(self.try_forward_hidden(tokens)?) }
    }

    /// Returns the output of the last norm, `[batch, seq, d_model]`; [`Decoder::logits`] takes any rows of it.
    ///
    /// # Errors
    /// Those of [`Self::try_forward`].
    pub fn try_forward_hidden(&self, tokens: Tensor<2, Int>) -> Result<Tensor<3>> {
        self.run(tokens, |_, attention, x| {
            attention.forward_projected(SparseMhaInput::self_attn(x))
        })
    }

    or_panics! {
        /// Returns the mean cross-entropy of the next tokens, `[1]`, without storing logits.
        ///
        /// # Shapes
        /// - `tokens`, `targets`: `[batch, seq]`; the target of a token is the next one
        pub fn loss(&self, tokens: Tensor<2, Int>, targets: Tensor<2, Int>) -> Tensor<1>;

        /// # Errors
        /// Those of [`Self::try_forward`]; also if the shapes differ.
        pub fn try_loss {
            let expected = tokens.dims().map(Some);
            ensure_shape("targets", targets.dims(), expected, ["batch", "seq"])?;
            let hidden = self.try_forward_hidden(tokens)?;
            mean_loss(hidden, self.head_weight(), targets)
        }
    }

    /// Returns an empty cache for [`Self::forward_cache`].
    pub fn new_cache(&self) -> SparseTransformerCache {
        SparseTransformerCache::new(self.layers.len(), self.context)
    }

    or_panics! {
        /// Returns the logits of new tokens, which also attend to those in `cache` and are appended to it.
        ///
        /// # Shapes
        /// - `tokens`: `[batch, new]`
        /// - result: `[batch, new, vocab_size]`
        pub fn forward_cache(&self, tokens: Tensor<2, Int>, cache: &mut SparseTransformerCache) -> Tensor<3>;

        /// # Errors
        /// Those of [`Self::try_forward`]; also if the cache is another model's, the batch differs from the cache's, or the cache is full. The cache is
        /// unchanged then.
        pub fn try_forward_cache {
            let [_, new] = tokens.dims();
            let hidden = cache.advance(self.layers.len(), new, |_, caches| {
                self.run(tokens, |layer, attention, x| {
                    let input = SparseMhaInput::self_attn(x);
                    let seen = attention.cached_context(input, &mut caches[layer], false)?;
                    attention.project_seen(seen)
                })
            });
            self.logits(hidden?)
        }
    }

    /// Returns the same weights with another pattern for all layers.
    ///
    /// ```
    /// use burn::tensor::Device;
    /// use burn_sparse_transformer::{Pattern, llama::LlamaConfig};
    ///
    /// let trained = LlamaConfig::new(64, 4).with_n_layers(2).init(&Device::flex());
    /// let window = trained.clone().with_pattern(Pattern::streaming(1024, 4), 64)?;
    /// let by_content = trained.with_selections(&["moba:64,8,first=1,local=2".parse()?])?;
    /// # Ok::<(), burn_sparse_transformer::TransformerError>(())
    /// ```
    ///
    /// # Errors
    /// If the pattern does not match the heads, the block size or the layers' selections.
    pub fn with_pattern(mut self, pattern: Pattern, block_size: usize) -> Result<Self> {
        let mut pool = LayoutPool::default();
        for LlamaBlock { attention, .. } in &mut self.layers {
            attention.kind().check_pattern(&pattern)?;
            attention.layouts = pool.get(&pattern, attention.pattern_heads(), block_size)?;
        }
        Ok(self)
    }

    /// Returns the same weights with selections, which layers use in turn; an empty list removes them.
    ///
    /// # Errors
    /// If a selection does not support the pattern.
    pub fn with_selections(mut self, selections: &[Selection]) -> Result<Self> {
        let n_layers = self.layers.len();
        let layers = self.layers.into_iter().enumerate();
        let layers = layers.map(|(layer, mut block)| {
            let selection = of_layer(selections, layer, n_layers, 0);
            block.attention = block.attention.with_selection(selection)?;
            Ok(block)
        });
        self.layers = layers.collect::<Result<_>>()?;
        Ok(self)
    }

    /// Returns the longest sequence, in positions.
    pub fn context(&self) -> usize {
        self.context
    }

    /// [`Self::try_forward_hidden`] with a given attention: `attend` returns what each layer's attention adds to the stream.
    fn run(
        &self,
        tokens: Tensor<2, Int>,
        mut attend: impl FnMut(usize, &SparseMultiHeadAttention, Tensor<3>) -> Result<Projected>,
    ) -> Result<Tensor<3>> {
        ensure_shape("tokens", tokens.dims(), [None, None], ["batch", "seq"])?;
        // Ids have no gradient.
        let x = embedding(self.embed.weight.val(), tokens.without_autodiff())?;
        let dtype = x.dtype();
        let mut stream = Stream::new(x);
        let products = self.precision.dtype(dtype);
        for (layer, block) in self.layers.iter().enumerate() {
            let (x, normed) = stream.normed(
                rms(&block.attention_norm).dtype(products),
                gain(&block.attention_norm),
            )?;
            let x = x.push(attend(layer, &block.attention, normed)?, None)?;
            let (x, normed) =
                x.normed(rms(&block.mlp_norm).dtype(products), gain(&block.mlp_norm))?;
            stream = x.push(block.mlp.forward(normed, self.precision)?, None)?;
        }
        let (_, normed) = stream.normed(rms(&self.norm).dtype(dtype.into()), gain(&self.norm))?;
        Ok(normed)
    }

    fn head_weight(&self) -> Tensor<2> {
        match &self.head {
            Some(head) => head.weight.val(),
            None => self.embed.weight.val().transpose(),
        }
    }
}

fn rms(norm: &RmsNorm) -> AddNormOptions {
    AddNormOptions::default()
        .norm(NormKind::Rms)
        .epsilon(norm.epsilon)
}

fn gain(norm: &RmsNorm) -> NormParams {
    NormParams::new(norm.gamma.val())
}

impl Decoder for Llama {
    fn attentions(&self) -> Vec<&SparseMultiHeadAttention> {
        self.layers.iter().map(|block| &block.attention).collect()
    }

    fn hidden(
        &self,
        tokens: Tensor<2, Int>,
        _: &Positions,
        attend: &mut Attend,
    ) -> Result<Tensor<3>> {
        self.run(tokens, |layer, attention, x| {
            attention.output_product(attend(layer, attention, x)?)
        })
    }

    fn logits(&self, hidden: Tensor<3>) -> Result<Tensor<3>> {
        Ok(linear(
            hidden,
            self.head_weight(),
            &LinearOptions::default(),
        )?)
    }

    fn vocab_size(&self) -> usize {
        let [vocab, _] = self.embed.weight.dims();
        vocab
    }

    fn max_positions(&self) -> Option<usize> {
        Some(self.context)
    }
}

#[cfg(test)]
mod tests {
    use burn::tensor::{Device, Distribution};

    use super::*;
    use crate::llama::LlamaConfig;

    #[test]
    fn rows_of_a_long_prompt_in_turn_give_what_all_at_once_give() {
        let device = Device::flex();
        let mlp = &LlamaConfig::new(4, 1).with_n_layers(1).init(&device).layers[0].mlp;
        let x = Tensor::random([2, ROWS / 2 + 3, 4], Distribution::Default, &device);
        let whole = mlp.product(x.clone(), Precision::F32).unwrap();
        let in_turn = mlp.forward(x, Precision::F32).unwrap().x;
        let difference = (whole - in_turn).abs().max().into_scalar::<f32>();
        assert!(difference < 1e-6, "{difference}");
    }
}
