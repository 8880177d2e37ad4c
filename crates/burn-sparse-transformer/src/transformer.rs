use burn::config::Config;
use burn::module::Module;
use burn::nn::{Embedding, LayerNorm, LayerNormConfig, Linear};
use burn::tensor::{Device, Int, Tensor};
use burn_fused_ops::{CrossEntropyOptions, LinearOptions, embedding, linear, linear_cross_entropy};
use burn_sparse_select::Selection;

use crate::attention_config::RopeTables;
use crate::block::Pass;
use crate::content::ContentAttention;
use crate::dsa::DsaStage;
use crate::error::{Result, ensure, ensure_multiple, ensure_positive, ensure_shape, or_panics};
use crate::feed_forward::{FeedForwardActivation, FeedForwardSparsity};
use crate::heads::Positions;
use crate::layouts::LayoutPool;
use crate::linear::linear_flops;
use crate::selected::of_layer;
use crate::shared_choice::ChoiceSharing;
use crate::stream::Stream;
use crate::{
    BlockAttentionConfig, Factorization, PositionEmbedding, Precision, SparseTransformerBlock,
    SparseTransformerBlockConfig, SparseTransformerCache, TransformerError, init,
};

/// Configuration of [`SparseTransformer`].
///
/// ```
/// use burn::{module::Module, tensor::Device};
/// use burn_sparse_transformer::{Factorization, Pattern, SparseTransformerConfig};
///
/// // The paper's enwik8 model: 12,288 bytes of context, 30 layers, 8 heads, width 512.
/// let fixed = Factorization::Merged(vec![Pattern::fixed(128, 32)]);
/// let config = SparseTransformerConfig::new(512, 8, fixed)
///     .with_vocab_size(256)
///     .with_context(12_288)
///     .with_n_layers(30)
///     .with_embedding_width(Some(128))
///     .with_dropout(0.40);
/// let model = config.init(&Device::flex());
/// assert_eq!(model.num_params(), 94_949_376);
/// ```
#[derive(Config, Debug)]
#[must_use = "a configuration does nothing until `init`"]
pub struct SparseTransformerConfig {
    /// Hidden size: width of the residual stream.
    pub d_model: usize,
    /// Number of query heads of each block.
    pub n_heads: usize,
    /// Attention patterns, and which layers and heads use which. A language model needs causal ones.
    pub factorization: Factorization,
    /// Size of the vocabulary. Required: 0 is an error.
    #[config(default = 0)]
    pub vocab_size: usize,
    /// Longest sequence, in positions. Required: 0 is an error.
    #[config(default = 0)]
    pub context: usize,
    /// Number of blocks. Required: 0 is an error.
    #[config(default = 0)]
    pub n_layers: usize,
    /// Width of the matrix that positions are arranged in for their embeddings, usually the stride of the patterns: position `i` is in row `i / width` and
    /// column `i mod width`. Unused without `position_embedding`. Default: a power of two near `√context`.
    pub embedding_width: Option<usize>,
    /// Bytes of a pixel, if sequences are images, row by row. Then `embedding_width` is that of a row, a multiple of `embedding_channels`, and a position's
    /// embedding is the sum of those of its row, column and channel (§5.3, `n_emb = 3`). Default: none, `n_emb = 2`.
    pub embedding_channels: Option<usize>,
    /// Selections of keys by content among those of the patterns, which layers use in turn; `moba` and `quest` need causal or dense patterns. Default: none.
    pub selections: Option<Vec<Selection>>,
    /// Content-based heads (Roy et al., 2021; Kitaev et al., 2020; or all heads: Yuan et al., 2025, DeepSeek, 2025, MiniMax, 2026). Patterns must be
    /// causal; local heads use them. Default: none.
    pub content: Option<ContentAttention>,
    /// With `content`: number of heads of each layer that use the pattern, one for all layers or one for each; a layer with `n_heads` of them has no
    /// content-based heads. Default: half of them.
    pub local_heads: Option<Vec<usize>>,
    /// Number of last layers with full attention (MoBA: Lu et al., 2025, §3.2). Default: 0.
    pub full_last_layers: Option<usize>,
    /// Number of layers that share one choice of keys by content: the first chooses, the next ones attend to the same keys (Bai et al., 2026; GLM-5.2). Works
    /// with one selection, `dsa` or `msa`. Layers that take a choice have no indexer; the indexer of the layer that chose learns from that layer alone.
    /// Groups begin at the first layer that chooses. Default: 1, every layer chooses.
    pub share_every: Option<usize>,
    /// Block size of the patterns: 8, 16, 32, 64 or 128.
    #[config(default = 32)]
    pub block_size: usize,
    /// Width of the query projections. Default: `d_model`; the paper's half-size models use half of it.
    pub d_key: Option<usize>,
    /// Width of the feed-forward networks. Default: `4 · d_model`; half-size models use `2 · d_model`.
    pub d_ff: Option<usize>,
    /// Kept blocks of the feed-forward networks' weights. Default: all, as dense weights.
    pub feed_forward_sparsity: Option<FeedForwardSparsity>,
    /// Activation of the feed-forward networks. Default: the paper's, `x · sigmoid(1.702 x)`.
    pub activation: Option<FeedForwardActivation>,
    /// Number of key and value heads, a divisor of `n_heads`. Default: `n_heads`.
    pub n_kv_heads: Option<usize>,
    /// Probability that an element of a residual branch is dropped while training.
    #[config(default = 0.0)]
    pub dropout: f64,
    /// Bounds the attention scores to ±`softcap`. Default: no bound.
    pub softcap: Option<f64>,
    /// Skips tiles of the attention whose scores are below the maxima of their rows by more than this:
    /// [`SparseMultiHeadAttentionConfig::softmax_threshold`](crate::SparseMultiHeadAttentionConfig). Default: none.
    pub softmax_threshold: Option<f64>,
    /// Options of every block's attention that the paper does not have: rotary embeddings, ALiBi, relative position biases, sinks, normalised queries and
    /// keys, attention dropout. Default: none.
    pub attention: Option<BlockAttentionConfig>,
    /// True if learned embeddings of positions are added to those of tokens, as in the paper. Default: yes; with `Some(false)` positions are encoded by the
    /// patterns and by `attention` only.
    pub position_embedding: Option<bool>,
    /// True if attention probabilities are stored for the backward pass instead of recomputed.
    #[config(default = false)]
    pub store_weights: bool,
    /// Dtype of the blocks' matrix products and attention: mixed precision if it is not f32. Parameters, their gradients, the residual stream, layer norms,
    /// logits and the loss stay f32.
    #[config(default = "Precision::F32")]
    pub precision: Precision,
    /// Term added to the variance in the layer norms.
    #[config(default = 1e-5)]
    pub layer_norm_eps: f64,
    /// Initial weights have a standard deviation of `init_scale / √width`; 0.125 is the paper's.
    #[config(default = 0.125)]
    pub init_scale: f64,
}

impl SparseTransformerConfig {
    /// Returns the paper's half-size variant: query and key projections of `d_model / 2`, feed-forward networks of `2 · d_model` (§5.2).
    pub fn half_size(self) -> Self {
        let (d_key, d_ff) = (self.d_model / 2, self.d_model.saturating_mul(2));
        self.with_d_key(Some(d_key)).with_d_ff(Some(d_ff))
    }

    or_panics! {
        /// Creates the model, with parameters that are initialised on first use.
        ///
        /// The initialisation is the paper's (§6), with its scale of 0.125 by default (`init_scale`): tokens `N(0, 0.125 / √d)`, positions
        /// `N(0, 0.125 / √(2d))` (`√(3d)` for images), other weights `N(0, 0.125 / √d_input)` with those that write into the residual stream scaled by
        /// `1 / √(2 · n_layers)`, biases 0, and the output matrix 0.
        pub fn init(&self, device: &Device) -> SparseTransformer;

        /// # Errors
        /// If a size is 0, `embedding_width` exceeds `context`, or a block rejects its part of the configuration (see
        /// [`SparseTransformerBlockConfig::init`]).
        pub fn try_init {
            self.validate()?;
            let (context, d_model) = (self.context, self.d_model);
            Ok(SparseTransformer {
                token_embedding: Embedding {
                    weight: init::embedding(self.vocab_size, d_model, 1, self.init_scale, device),
                },
                position_embedding: self.embeds_positions().then(|| {
                    let (width, scale) = (self.embedding_width(), self.init_scale);
                    PositionEmbedding::new(
                        context,
                        width,
                        self.embedding_channels,
                        d_model,
                        scale,
                        device,
                    )
                }),
                blocks: self.init_blocks(device)?,
                norm: LayerNormConfig::new(d_model)
                    .with_epsilon(self.layer_norm_eps)
                    .init(device),
                output: init::zero_linear(d_model, self.vocab_size, device),
                context,
                layer_norm_eps: self.layer_norm_eps,
                precision: self.precision,
            })
        }
    }

    fn embedding_width(&self) -> usize {
        let near_the_root = || self.context.isqrt().next_power_of_two();
        self.embedding_width.unwrap_or_else(near_the_root)
    }

    fn embeds_positions(&self) -> bool {
        self.position_embedding.unwrap_or(true)
    }

    /// Creates the blocks. Those with equal patterns share their layouts; all share one rotation table, and one of indexers.
    fn init_blocks(&self, device: &Device) -> Result<Vec<SparseTransformerBlock>> {
        let mut pool = LayoutPool::default();
        let mut tables = RopeTables::default();
        (0..self.n_layers)
            .map(|layer| {
                let config = self.block(layer)?;
                config.validate()?;
                let heads = config.pattern_heads()?;
                let layouts = pool.get(&config.pattern, heads, self.block_size)?;
                let mut block = config.init_with(layouts, device)?;
                tables.share_with(&mut block.mha);
                Ok(block)
            })
            .collect()
    }

    /// Returns the configuration of block `layer`, counted from 0.
    ///
    /// # Errors
    /// If the factorization has no patterns.
    pub fn block(&self, layer: usize) -> Result<SparseTransformerBlockConfig> {
        let pattern = self.factorization.pattern(layer)?;
        Ok(
            SparseTransformerBlockConfig::new(self.d_model, self.n_heads, pattern)
                .with_selection(self.selection(layer))
                .with_content(self.content.clone())
                .with_local_heads(self.local_heads(layer))
                .with_choice_sharing(self.choice_sharing(layer))
                .with_block_size(self.block_size)
                .with_n_kv_heads(self.n_kv_heads)
                .with_d_key(self.d_key)
                .with_d_ff(self.d_ff)
                .with_feed_forward_sparsity(
                    (self.feed_forward_sparsity.clone()).map(|sparsity| sparsity.of_layer(layer)),
                )
                .with_activation(self.activation)
                .with_dropout(self.dropout)
                .with_softcap(self.softcap)
                .with_softmax_threshold(self.softmax_threshold)
                .with_attention(self.attention.clone())
                .with_context(Some(self.context))
                .with_store_weights(self.store_weights)
                .with_precision(self.precision)
                .with_n_layers(self.n_layers)
                .with_layer_norm_eps(self.layer_norm_eps)
                .with_init_scale(self.init_scale),
        )
    }

    /// Returns the number of a layer's heads that use the pattern.
    fn local_heads(&self, layer: usize) -> Option<usize> {
        let heads = self.local_heads.as_deref()?;
        // A single number applies to all layers.
        heads.get(layer).or(heads.first()).copied()
    }

    /// Returns the selection of a layer.
    fn selection(&self, layer: usize) -> Option<Selection> {
        of_layer(
            self.selections.as_deref().unwrap_or_default(),
            layer,
            self.n_layers,
            self.full_last_layers.unwrap_or_default(),
        )
    }

    /// Returns whether a layer chooses its keys by content, in a way that others can share.
    fn chooses(&self, layer: usize) -> bool {
        let indexed = (self.content.as_ref()).is_some_and(ContentAttention::has_indexer);
        let indexed = indexed && self.local_heads(layer) != Some(self.n_heads);
        layer < self.n_layers && (indexed || self.selection(layer).is_some())
    }

    /// Returns a layer's role; a layer alone in its group shares with none.
    fn choice_sharing(&self, layer: usize) -> Option<ChoiceSharing> {
        let every = self.share_every.filter(|&every| every > 1)?;
        let first = (0..=layer).find(|&layer| self.chooses(layer))?;
        match (layer - first) % every {
            _ if !self.chooses(layer) => None,
            0 => self.chooses(layer + 1).then_some(ChoiceSharing::Gives),
            _ => Some(ChoiceSharing::Takes),
        }
    }

    /// Checks that layers which share a choice would choose alike, from the same keys.
    fn validate_sharing(&self) -> Result<()> {
        let every = self.share_every.unwrap_or(1);
        ensure_positive("share_every", every)?;
        if every == 1 {
            return Ok(());
        }
        let chooses = (0..self.n_layers).any(|layer| self.chooses(layer));
        ensure! { chooses => "share_every", "1 where no layer chooses by a selection, dsa or msa", every; }
        let selections = self.selections.as_ref().map_or(1, Vec::len);
        ensure! { selections == 1 => "selections", "one, where layers share a choice", selections; }
        for layer in 1..self.n_layers {
            if self.choice_sharing(layer) == Some(ChoiceSharing::Takes) {
                let own = self.factorization.pattern(layer)?;
                let given = self.factorization.pattern(layer - 1)?;
                ensure! { own == given =>
                "factorization", format!("{given} in layer {layer}, which shares a choice"), &own; }
            }
        }
        Ok(())
    }

    fn validate(&self) -> Result<()> {
        self.validate_sharing()?;
        let heads = self.local_heads.as_ref().map(Vec::len);
        ensure! { heads.is_none_or(|count| count == 1 || count == self.n_layers) =>
        "local_heads", format!("one number, or {}, one for each layer", self.n_layers), heads.unwrap_or_default(); }
        ensure_positive("vocab_size", self.vocab_size)?;
        ensure_positive("context", self.context)?;
        ensure_positive("n_layers", self.n_layers)?;
        ensure_positive("d_model", self.d_model)?;
        ensure! { !self.embeds_positions() || (1..=self.context).contains(&self.embedding_width()) =>
        "embedding_width", format!("between 1 and {}, the context", self.context), self.embedding_width(); }
        let channels = self.embedding_channels.unwrap_or(1);
        ensure_positive("embedding_channels", channels)?;
        ensure_multiple(
            "embedding_width",
            self.embedding_width(),
            "embedding_channels",
            channels,
        )
    }
}

/// The model of "Generating Long Sequences with Sparse Transformers" (Child et al., 2019, §5).
///
/// ```text
/// H_0 = token embedding + row embedding + column embedding     (the latter two unless switched off; in pictures
///                                                              a channel's, too)
/// H_k = block_k(H_{k−1})
/// logits = norm(H_N) · W_output
/// ```
///
/// Token ids must be below the vocabulary's size. They are not checked: reading them would wait for the device.
///
/// Create it with [`SparseTransformerConfig`].
#[derive(Module, Debug)]
pub struct SparseTransformer {
    /// Token embedding, `[vocab_size, d_model]`.
    pub token_embedding: Embedding,
    /// Embeddings of the row and column of each position.
    pub position_embedding: Option<PositionEmbedding>,
    /// Residual blocks, first to last.
    pub blocks: Vec<SparseTransformerBlock>,
    /// Layer norm before the output.
    pub norm: LayerNorm,
    /// Projection from `d_model` to `vocab_size`, without bias.
    pub output: Linear,
    context: usize,
    layer_norm_eps: f64,
    #[module(skip)]
    pub(crate) precision: Precision,
}

impl SparseTransformer {
    or_panics! {
        /// Returns the logits of the next token at every position.
        ///
        /// # Shapes
        /// - `tokens`: `[batch, seq]`, `seq ≤ context`
        /// - output: `[batch, seq, vocab_size]`
        pub fn forward(&self, tokens: Tensor<2, Int>) -> Tensor<3>;

        /// # Errors
        /// If `tokens` is empty or longer than the context, or a pattern has no layout for `seq`.
        pub fn try_forward { self.head_logits(self.stream(tokens)?) }
    }

    fn stream(&self, tokens: Tensor<2, Int>) -> Result<Stream> {
        let x = self.embed(tokens, 0)?;
        let training = x.is_autodiff();
        self.through_blocks(x, |_, block| block.pass(training))
    }

    /// Runs all blocks, each with its pass.
    pub(crate) fn through_blocks(
        &self,
        x: Tensor<3>,
        pass: impl Fn(usize, &SparseTransformerBlock) -> Pass,
    ) -> Result<Stream> {
        let mut blocks = self.blocks.iter().enumerate();
        blocks.try_fold(Stream::new(x), |stream, (layer, block)| {
            block.step(stream, pass(layer, block))
        })
    }

    or_panics! {
        /// Returns the logits of new tokens that follow those in `cache`, for autoregressive decoding.
        ///
        /// Feeding a sequence in pieces gives the same as [`Self::forward`] for the whole. With patterns that are not causal, pieces must end where every
        /// block's pattern allows a boundary ([`Pattern::allows_boundary`](crate::Pattern::allows_boundary)). Call it on the copy that [`Module::valid`]
        /// returns: on an autodiff device the cache would hold the graph of every step. After an error the cache is unchanged.
        ///
        /// # Shapes
        /// - `tokens`: `[batch, new]`
        /// - output: `[batch, new, vocab_size]`
        pub fn forward_cache(&self, tokens: Tensor<2, Int>, cache: &mut SparseTransformerCache) -> Tensor<3>;

        /// # Errors
        /// If `tokens` is empty, a position is past the context, the batch differs from the cache's, or the cache was created by a model with another number
        /// of blocks; [`TransformerError::Boundary`] if it cannot stop where the tokens begin or end.
        pub fn try_forward_cache { self.cached(tokens, cache, false) }
    }

    or_panics! {
        /// [`Self::forward_cache`] for the last tokens of a sequence, which may end anywhere.
        pub fn forward_cache_last(&self, tokens: Tensor<2, Int>, cache: &mut SparseTransformerCache) -> Tensor<3>;

        pub fn try_forward_cache_last { self.cached(tokens, cache, true) }
    }

    fn cached(
        &self,
        tokens: Tensor<2, Int>,
        cache: &mut SparseTransformerCache,
        last: bool,
    ) -> Result<Tensor<3>> {
        let [_, new] = tokens.dims();
        let stream = cache.advance(self.blocks.len(), new, |position, caches| {
            let x = Stream::new(self.embed(tokens, position)?);
            let mut blocks = self.blocks.iter().zip(caches);
            blocks.try_fold(x, |stream, (block, cache)| {
                block.cached(stream, cache, last)
            })
        })?;
        self.head_logits(stream)
    }

    /// Returns an empty cache for [`Self::forward_cache`].
    pub fn new_cache(&self) -> SparseTransformerCache {
        SparseTransformerCache::new(self.blocks.len(), self.context)
    }

    or_panics! {
        /// Returns the mean cross-entropy of the targets, in nats per token.
        ///
        /// The softmax is computed in f32 or higher precision. On an autodiff device the commitment losses of heads that choose by clusters and the losses of
        /// indexers ([`DsaStage`]) are added; in the indexers' warm-up only those have gradients.
        ///
        /// # Shapes
        /// - `tokens`, `targets`: `[batch, seq]`; `targets[b, i]` is the token after `tokens[b, i]`
        /// - output: `[1]`
        pub fn loss(&self, tokens: Tensor<2, Int>, targets: Tensor<2, Int>) -> Tensor<1>;

        /// # Errors
        /// Those of [`Self::try_forward`]; also if the shapes differ.
        pub fn try_loss {
            self.check_targets(&tokens, &targets)?;
            let mut stream = self.stream(tokens)?;
            let aux_loss = stream.aside.aux_loss.take();
            let loss = self.head_loss(stream, targets)?;
            Ok(match aux_loss {
                Some(aux_loss) if self.dsa_stage() == Some(DsaStage::WarmUp) => {
                    loss.detach() + aux_loss
                }
                Some(aux_loss) => loss + aux_loss,
                None => loss,
            })
        }
    }

    /// Returns the longest sequence, in positions.
    pub fn context(&self) -> usize {
        self.context
    }

    /// Caches up to `most` layouts per pattern: see [`SparseMultiHeadAttention::keep_layouts`](crate::SparseMultiHeadAttention::keep_layouts).
    pub fn keep_layouts(&self, most: usize) {
        for block in &self.blocks {
            block.mha.keep_layouts(most);
        }
    }

    /// Returns the operations of the matrix products outside attention for one token, forward; the backward pass has twice as many.
    pub fn matmul_flops_per_token(&self) -> u64 {
        let blocks: u64 = self.blocks.iter().map(|b| b.matmul_flops_per_token()).sum();
        blocks + linear_flops(&self.output)
    }

    /// Returns the operations of all blocks' attention for one sequence of `seq` tokens, forward. Only allowed pairs are counted, whatever else a kernel
    /// computes. With selections these are the pairs that they choose from.
    ///
    /// # Errors
    /// If a pattern has no layout for `seq`.
    pub fn attention_flops(&self, seq: usize) -> Result<u64> {
        self.blocks.iter().map(|b| b.mha.attention_flops(seq)).sum()
    }

    /// Returns `H_0` of tokens at the positions from `start` on.
    pub(crate) fn embed(&self, tokens: Tensor<2, Int>, start: usize) -> Result<Tensor<3>> {
        let [_, seq] = tokens.dims();
        ensure_shape("tokens", tokens.dims(), [None, None], ["batch", "seq"])?;
        let (context, end) = (self.context, start + seq);
        if end > context {
            return Err(TransformerError::ContextExceeded {
                context,
                limit: "the model's context",
                start,
                end,
            });
        }
        let embedded = self.embed_tokens(tokens)?;
        Ok(match &self.position_embedding {
            Some(positions) => embedded + positions.forward(start, seq),
            None => embedded,
        })
    }

    /// Returns `H_0` of tokens at any positions.
    pub(crate) fn embed_at(
        &self,
        tokens: Tensor<2, Int>,
        positions: &Positions,
    ) -> Result<Tensor<3>> {
        let places = match positions {
            Positions::From(start) => return self.embed(tokens, *start),
            Positions::Listed(places) => places,
            Positions::Documents(_) => {
                let (expected, got) = ("from one on, or listed", "documents");
                return Err(TransformerError::argument("positions", expected, got));
            }
        };
        let embedded = self.embed_tokens(tokens)?;
        Ok(match &self.position_embedding {
            Some(positions) => {
                let dims = embedded.dims();
                embedded + positions.at(places).reshape(dims)
            }
            None => embedded,
        })
    }

    fn embed_tokens(&self, tokens: Tensor<2, Int>) -> Result<Tensor<3>> {
        // Ids have no gradient. Without their autodiff context they can come from any device setting.
        let table = self.token_embedding.weight.val();
        Ok(embedding(table, tokens.without_autodiff())?)
    }

    /// Returns `norm(H_N)`, in the stream's dtype.
    fn head_input(&self, stream: Stream) -> Result<Tensor<3>> {
        let dtype = stream.x().dtype();
        let (_, x) = stream.norm(&self.norm, self.layer_norm_eps, dtype.into())?;
        Ok(x)
    }

    /// Returns `norm(H_N) · W_output`.
    pub(crate) fn head_logits(&self, stream: Stream) -> Result<Tensor<3>> {
        let x = self.head_input(stream)?;
        Ok(linear(
            x,
            self.output.weight.val(),
            &LinearOptions::default(),
        )?)
    }

    pub(crate) fn head_loss(&self, stream: Stream, targets: Tensor<2, Int>) -> Result<Tensor<1>> {
        let x = self.head_input(stream)?;
        mean_loss(x, self.output.weight.val(), targets)
    }

    pub(crate) fn check_targets(
        &self,
        tokens: &Tensor<2, Int>,
        targets: &Tensor<2, Int>,
    ) -> Result<()> {
        let [batch, seq] = tokens.dims();
        let expected = [Some(batch), Some(seq)];
        ensure_shape("targets", targets.dims(), expected, ["batch", "seq"])
    }
}

/// Returns the mean cross-entropy of targets `[batch, seq]` for the logits `x · weight`, which are not stored.
pub(crate) fn mean_loss(
    x: Tensor<3>,
    weight: Tensor<2>,
    targets: Tensor<2, Int>,
) -> Result<Tensor<1>> {
    let [batch, seq, width] = x.dims();
    let x = x.reshape([batch * seq, width]);
    let targets = targets.without_autodiff().reshape([batch * seq]);
    // Checking the targets would read them and wait for the device.
    let options = CrossEntropyOptions::default().check_targets(false);
    Ok(linear_cross_entropy(x, weight, targets, &options)?)
}
