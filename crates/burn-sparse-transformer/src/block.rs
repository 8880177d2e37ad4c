use burn::config::Config;
use burn::module::Module;
use burn::nn::{Dropout, DropoutConfig, LayerNorm, LayerNormConfig};
use burn::tensor::{Device, Tensor};
use burn_blocksparse::{Pattern, Seed};
use burn_fused_ops::ElementDropout;
use burn_sparse_select::Selection;

use crate::block_shard::ShardOfBlock;
use crate::content::{ContentAttention, ContentHeads};
use crate::dropout::{Seeds, dropped};
use crate::error::{Result, ensure_above_zero, ensure_dropout, ensure_positive, or_panics};
use crate::feed_forward::{
    FeedForward, FeedForwardActivation, FeedForwardLinear, FeedForwardSparsity,
};
use crate::input::CallOptions;
use crate::layouts::Layouts;
use crate::shared_choice::ChoiceSharing;
use crate::stream::{Projected, Stream};
use crate::{
    BlockAttentionConfig, Precision, SparseMhaCache, SparseMhaInput, SparseMultiHeadAttention,
    SparseMultiHeadAttentionConfig, init,
};

/// Configuration of [`SparseTransformerBlock`].
#[derive(Config, Debug)]
#[must_use = "a configuration does nothing until `init`"]
pub struct SparseTransformerBlockConfig {
    /// Hidden size: width of the residual stream.
    pub d_model: usize,
    /// Number of query heads.
    pub n_heads: usize,
    /// Pattern: which query attends to which key, per head.
    pub pattern: Pattern,
    /// Selection of keys by content among those of the pattern; `moba` and `quest` need a causal or dense one. Default: none.
    pub selection: Option<Selection>,
    /// Content-based heads, in addition to the pattern's or instead of them. Default: all heads use the pattern.
    pub content: Option<ContentAttention>,
    /// With `content`: number of heads that use the pattern. If it is `n_heads`, there is no `content`. Default: half of them.
    pub local_heads: Option<usize>,
    /// Role in sharing a choice of keys with other layers. Default: the layer chooses for itself alone.
    pub choice_sharing: Option<ChoiceSharing>,
    /// Block size of the pattern: 8, 16, 32, 64 or 128.
    #[config(default = 32)]
    pub block_size: usize,
    /// Number of key and value heads, a divisor of `n_heads`. Default: `n_heads`.
    pub n_kv_heads: Option<usize>,
    /// Width of the query projection. Default: `d_model`.
    pub d_key: Option<usize>,
    /// Inner size of the feed-forward network. Default: `4 · d_model`.
    pub d_ff: Option<usize>,
    /// Kept blocks of the feed-forward network's weights. Default: all, as dense weights.
    pub feed_forward_sparsity: Option<FeedForwardSparsity>,
    /// Activation of the feed-forward network. Default: the paper's, `x · sigmoid(1.702 x)`.
    pub activation: Option<FeedForwardActivation>,
    /// Probability that an element of a residual branch is dropped while training.
    #[config(default = 0.0)]
    pub dropout: f64,
    /// Bounds the attention scores to ±`softcap`. Default: no bound.
    pub softcap: Option<f64>,
    /// Skips tiles of the attention whose scores are below the maxima by more than this. Default: none.
    pub softmax_threshold: Option<f64>,
    /// Further options of the attention, which the paper does not have. Default: none.
    pub attention: Option<BlockAttentionConfig>,
    /// Longest sequence, in positions. Required with `rope_theta` of `attention`.
    pub context: Option<usize>,
    /// True if attention probabilities are stored for the backward pass instead of recomputed.
    #[config(default = false)]
    pub store_weights: bool,
    /// Dtype of the matmuls and of the attention; the residual stream has the input's.
    #[config(default = "Precision::F32")]
    pub precision: Precision,
    /// Number of blocks `N` of the model. The initial weights of the two layers that write into the residual stream are scaled by `1 / √(2N)`.
    #[config(default = 1)]
    pub n_layers: usize,
    /// Term added to the variance in the layer norms.
    #[config(default = 1e-5)]
    pub layer_norm_eps: f64,
    /// Initial weights have a standard deviation of `init_scale / √d_input`; 0.125 is the paper's.
    #[config(default = 0.125)]
    pub init_scale: f64,
}

impl SparseTransformerBlockConfig {
    or_panics! {
        /// Creates the block, with parameters that are initialised on first use.
        ///
        /// Weights are drawn from `N(0, init_scale / √d_input)`, biases are 0 (Child et al., 2019, §6).
        pub fn init(&self, device: &Device) -> SparseTransformerBlock;

        /// # Errors
        /// Those of [`SparseMultiHeadAttentionConfig::init`]; also if `d_ff` or `n_layers` is 0, `dropout` is outside `[0, 1)`, `layer_norm_eps` or
        /// `init_scale` is not positive, `feed_forward_sparsity` has no layout for `d_model` and `d_ff`, or `rope_theta` is set without `context`.
        pub fn try_init {
            self.validate()?;
            let layouts = Layouts::new(self.pattern.clone(), self.pattern_heads()?, self.block_size)?;
            self.init_with(layouts, device)
        }
    }

    /// [`Self::init`] with layouts that other blocks may share.
    pub(crate) fn init_with(
        &self,
        layouts: Layouts,
        device: &Device,
    ) -> Result<SparseTransformerBlock> {
        self.validate()?;
        let residual_scale = self.init_scale / ((2 * self.n_layers) as f64).sqrt();
        let norm = LayerNormConfig::new(self.d_model).with_epsilon(self.layer_norm_eps);
        Ok(SparseTransformerBlock {
            mha: self.init_attention(layouts, residual_scale, device)?,
            norm_1: norm.init(device),
            pwff: FeedForward {
                linear_inner: self.feed_forward_linear(0, self.init_scale, device)?,
                linear_outer: self.feed_forward_linear(1, residual_scale, device)?,
                activation: self.activation.unwrap_or_default(),
                precision: self.precision,
            },
            norm_2: norm.init(device),
            dropout: DropoutConfig::new(self.dropout).init(),
            layer_norm_eps: self.layer_norm_eps,
            precision: self.precision,
            seeds: Seeds::default(),
        })
    }

    /// Creates the inner (0) or outer layer (1) of the feed-forward network.
    fn feed_forward_linear(
        &self,
        matrix: u64,
        scale: f64,
        device: &Device,
    ) -> Result<FeedForwardLinear> {
        let mut shape = [self.d_model, self.d_ff()];
        if matrix == 1 {
            shape.reverse();
        }
        let [d_input, d_output] = shape;
        Ok(match &self.feed_forward_sparsity {
            None => init::linear(d_input, d_output, scale, device).into(),
            Some(sparsity) => {
                let layout = sparsity.layout(shape, matrix)?;
                init::block_sparse_linear(layout, scale, device).into()
            }
        })
    }

    /// Creates the attention with the paper's initialisation instead of burn-nn's.
    fn init_attention(
        &self,
        layouts: Layouts,
        residual_scale: f64,
        device: &Device,
    ) -> Result<SparseMultiHeadAttention> {
        let mut mha = self.mha()?.init_with(layouts, device)?;
        for projection in [&mut mha.query, &mut mha.key, &mut mha.value] {
            let [d_input, d_output] = projection.weight.lazy_shape().dims();
            *projection = init::linear(d_input, d_output, self.init_scale, device);
        }
        for layer in mha.content.iter_mut().flat_map(ContentHeads::layers_mut) {
            let [d_input, d_output] = layer.weight.lazy_shape().dims();
            let drawn = init::linear(d_input, d_output, self.init_scale, device);
            layer.weight = drawn.weight;
            layer.bias = layer.bias.take().and(drawn.bias);
        }
        mha.output = init::linear(self.d_model, self.d_model, residual_scale, device);
        Ok(mha)
    }

    fn mha(&self) -> Result<SparseMultiHeadAttentionConfig> {
        let (d_model, pattern) = (self.d_model, self.pattern.clone());
        let mha = SparseMultiHeadAttentionConfig::new(d_model, self.n_heads, pattern)
            .with_selection(self.selection.clone())
            .with_block_size(self.block_size)
            .with_content(self.content()?)
            .with_local_heads(self.local_heads.filter(|&heads| heads != self.n_heads))
            .with_choice_sharing(self.choice_sharing)
            .with_n_kv_heads(self.n_kv_heads)
            .with_d_key(self.d_key)
            .with_softcap(self.softcap)
            .with_softmax_threshold(self.softmax_threshold)
            .with_store_weights(self.store_weights)
            .with_precision(self.precision);
        match &self.attention {
            Some(attention) => attention.apply(mha, self.context),
            None => Ok(mha),
        }
    }

    /// Returns the content-based heads, if any.
    fn content(&self) -> Result<Option<ContentAttention>> {
        match (&self.content, self.context) {
            (Some(_), _) if self.local_heads == Some(self.n_heads) => Ok(None),
            (Some(content), Some(context)) => content.clone().for_context(context).map(Some),
            (content, _) => Ok(content.clone()),
        }
    }

    pub(crate) fn pattern_heads(&self) -> Result<usize> {
        Ok(self.mha()?.pattern_heads())
    }

    fn d_ff(&self) -> usize {
        self.d_ff.unwrap_or(self.d_model.saturating_mul(4))
    }

    pub(crate) fn validate(&self) -> Result<()> {
        self.mha()?.validate()?;
        ensure_positive("d_ff", self.d_ff())?;
        ensure_positive("n_layers", self.n_layers)?;
        ensure_dropout(self.dropout)?;
        ensure_above_zero("layer_norm_eps", self.layer_norm_eps)?;
        ensure_above_zero("init_scale", self.init_scale)
    }
}

/// A pre-activation residual block (Child et al., 2019, §5.2):
///
/// ```text
/// a = dropout(attention(norm_1(H)))
/// b = dropout(ff(norm_2(H + a)))
/// H + a + b
/// ```
///
/// The parameters have the names of burn-nn's `TransformerEncoderLayer`. With `norm_first`, however, that layer applies its `norm_2` before the attention.
///
/// Create it with [`SparseTransformerBlockConfig`].
#[derive(Module, Debug)]
pub struct SparseTransformerBlock {
    /// Self-attention.
    pub mha: SparseMultiHeadAttention,
    /// Layer norm before the attention.
    pub norm_1: LayerNorm,
    /// Position-wise feed-forward network.
    pub pwff: FeedForward,
    /// Layer norm before the feed-forward network.
    pub norm_2: LayerNorm,
    /// Dropout at the end of both residual branches; there is no other.
    pub dropout: Dropout,
    layer_norm_eps: f64,
    #[module(skip)]
    precision: Precision,
    #[module(skip)]
    seeds: Seeds,
}

impl SparseTransformerBlock {
    or_panics! {
        /// Applies the block to the residual stream.
        ///
        /// # Shapes
        /// - input and output: `[batch, seq, d_model]`
        pub fn forward(&self, x: Tensor<3>) -> Tensor<3>;

        /// # Errors
        /// If the shape does not match, or the pattern has no layout for `seq`.
        pub fn try_forward {
            let pass = self.pass(x.is_autodiff());
            self.step(Stream::new(x), pass)?.finish()
        }
    }

    /// [`Self::forward`] on a stream that may have a pending branch, with `pass` instead of the block's own.
    pub(crate) fn step(&self, stream: Stream, mut pass: Pass) -> Result<Stream> {
        let shard = pass.shard.take();
        let attend = |input| match &shard {
            Some(shard) => self.mha.forward_shard(input, shard),
            None => self.mha.forward_projected(input),
        };
        self.residual(stream, attend, pass)
    }

    or_panics! {
        /// Applies the block to new positions, which also attend to those in `cache`.
        ///
        /// # Shapes
        /// - input and output: `[batch, new, d_model]`
        pub fn forward_cache(&self, x: Tensor<3>, cache: &mut SparseMhaCache) -> Tensor<3>;

        pub fn try_forward_cache { self.cached(Stream::new(x), cache, false)?.finish() }
    }

    or_panics! {
        /// [`Self::forward_cache`] for the last positions of a sequence, which may end anywhere.
        pub fn forward_cache_last(&self, x: Tensor<3>, cache: &mut SparseMhaCache) -> Tensor<3>;

        pub fn try_forward_cache_last { self.cached(Stream::new(x), cache, true)?.finish() }
    }

    pub(crate) fn cached(
        &self,
        stream: Stream,
        cache: &mut SparseMhaCache,
        last: bool,
    ) -> Result<Stream> {
        let pass = self.pass(stream.x().is_autodiff());
        let mut seen = |input| self.mha.cached_context(input, cache, last);
        self.residual(stream, |input| self.mha.project_seen(seen(input)?), pass)
    }

    or_panics! {
        /// Applies the block to several sequences concatenated without padding.
        ///
        /// # Shapes
        /// - input and output: `[1, total, d_model]`
        /// - `cu_seqlens`: see [`SparseMultiHeadAttention::forward_packed`]
        pub fn forward_packed(&self, x: Tensor<3>, cu_seqlens: &[usize]) -> Tensor<3>;

        pub fn try_forward_packed {
            let pass = self.pass(x.is_autodiff());
            let attend = |input| self.mha.project_seen(self.mha.packed_context(input, cu_seqlens)?);
            self.residual(Stream::new(x), attend, pass)?.finish()
        }
    }

    pub(crate) fn residual(
        &self,
        mut stream: Stream,
        attend: impl FnOnce(SparseMhaInput) -> Result<Projected>,
        pass: Pass,
    ) -> Result<Stream> {
        let choice = stream.aside.choice.take();
        let (stream, normed) = self.norm(stream, &self.norm_1)?;
        let mut input = SparseMhaInput::self_attn(normed);
        input.options = pass.attention.clone();
        input.options.choice = choice.filter(|_| self.mha.takes_choice());
        let a = attend(input)?;
        let stream = stream.push(a, pass.branch(0))?;
        let (stream, normed) = self.norm(stream, &self.norm_2)?;
        let branch = self.pwff.forward_projected(normed, pass.mlp)?;
        stream.push(branch, pass.branch(1))
    }

    fn norm(&self, stream: Stream, norm: &LayerNorm) -> Result<(Stream, Tensor<3>)> {
        let x = stream.x();
        self.mha.check_input("x", x)?;
        let dtype = self.precision.dtype(x.dtype());
        stream.norm(norm, self.layer_norm_eps, dtype)
    }

    /// Returns the next pass, with dropout if `training`.
    pub(crate) fn pass(&self, training: bool) -> Pass {
        match training {
            true => self.pass_of(self.seeds.next()),
            false => Pass::default(),
        }
    }

    pub(crate) fn pass_of(&self, seed: Seed) -> Pass {
        Pass::new(&self.mha, &self.dropout, seed)
    }

    /// Returns the operations of the matrix products outside attention for one position, forward.
    pub fn matmul_flops_per_token(&self) -> u64 {
        self.mha.matmul_flops_per_token() + self.pwff.matmul_flops_per_token()
    }
}

/// Dropout and recomputation of one pass of a block.
#[derive(Clone, Debug, Default)]
pub(crate) struct Pass {
    pub(crate) attention: CallOptions,
    /// Dropout of both branches: probability and seed.
    pub(crate) branches: Option<(f64, Seed)>,
    /// Rows of the batch before this part of it.
    pub(crate) first_row: u32,
    /// True if the backward pass computes the feed-forward network's first product again.
    pub(crate) mlp: bool,
    /// Shard that the rows belong to, if several devices share sequences.
    pub(crate) shard: Option<ShardOfBlock>,
}

impl Pass {
    /// Returns a training pass of a layer with this attention and this dropout of its branches.
    pub(crate) fn new(mha: &SparseMultiHeadAttention, branches: &Dropout, seed: Seed) -> Self {
        Self {
            attention: CallOptions {
                dropout_seed: Some(seed),
                dropout: mha.training_dropout(|| seed),
                ..CallOptions::default()
            },
            branches: dropped(branches).map(|probability| (probability, seed)),
            ..Self::default()
        }
    }

    /// Returns the dropout of the branch of the attention (0) or of the feed-forward network (1).
    pub(crate) fn branch(&self, site: u32) -> Option<ElementDropout> {
        (self.branches).map(|(probability, seed)| {
            ElementDropout::new(probability, seed, site).with_first_row(self.first_row)
        })
    }
}
