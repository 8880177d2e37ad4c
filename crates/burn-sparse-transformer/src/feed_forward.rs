//! Feed-forward network of a block.

use burn::config::Config;
use burn::module::{
    Content, Module, ModuleDisplay, ModuleDisplayDefault, ModuleMapper, ModuleVisitor, Param,
};
use burn::nn::Linear;
use burn::tensor::{Device, FloatDType, Tensor};
use burn_fused_ops::sparse_linear::{WeightLayout, WeightPattern};
use burn_fused_ops::{
    Activation, LinearOptions, MlpOptions, MlpParams, bias_activation, linear, mlp,
};

use serde::{Deserialize, Serialize};

use crate::Precision;
use crate::error::{Result, or_panics};
use crate::linear::{BlockSparseLinear, linear_flops};
use crate::stream::Projected;

/// Kept blocks of the feed-forward networks' weights: the same share of both weights, drawn with different seeds.
///
/// ```
/// use burn::tensor::Device;
/// use burn_sparse_transformer::{Factorization, Pattern, SparseTransformerConfig};
/// use burn_sparse_transformer::feed_forward::FeedForwardSparsity;
///
/// let fixed = Factorization::from(Pattern::fixed(128, 32));
/// let model = SparseTransformerConfig::new(64, 4, fixed)
///     .with_vocab_size(256)
///     .with_context(512)
///     .with_n_layers(2)
///     .with_feed_forward_sparsity(Some(FeedForwardSparsity::new(0.25).with_block(16)))
///     .init(&Device::flex());
/// ```
#[derive(Config, Debug)]
#[must_use = "it does nothing until a model is made with it"]
pub struct FeedForwardSparsity {
    /// Share of each weight's blocks that is kept, in `(0, 1]`.
    pub density: f64,
    /// Side of a block: 16, 32, 64 or 128. Divides `d_model` and `d_ff`.
    #[config(default = 64)]
    pub block: usize,
    /// Pattern of the kept blocks.
    #[config(default = "WeightPattern::SmallWorld")]
    pub pattern: WeightPattern,
    /// Seed of random patterns. Matrix `i` of the model (0 and 1 are the first block's) uses `seed + i`.
    #[config(default = 0)]
    pub seed: u64,
}

impl FeedForwardSparsity {
    /// Returns the sparsity of block `layer` of a model.
    pub(crate) fn of_layer(self, layer: usize) -> Self {
        let seed = self.seed.wrapping_add(2 * layer as u64);
        self.with_seed(seed)
    }

    /// Returns the layout of the inner (0) or the outer weight (1).
    pub(crate) fn layout(&self, shape: [usize; 2], matrix: u64) -> Result<WeightLayout> {
        let seed = self.seed.wrapping_add(matrix);
        Ok((self.pattern).layout(shape, self.block, self.density, seed)?)
    }
}

/// Layer of [`FeedForward`]. Both kinds have the same parameter names.
#[derive(Clone, Debug)]
pub enum FeedForwardLinear {
    /// Dense weight.
    Dense(Linear),
    /// Block-sparse weight: [`FeedForwardSparsity`].
    BlockSparse(BlockSparseLinear),
}

/// Evaluates the same expression for either kind of layer.
macro_rules! either {
    ($of:expr, $layer:ident => $made:expr) => {
        match $of {
            FeedForwardLinear::Dense($layer) => $made,
            FeedForwardLinear::BlockSparse($layer) => $made,
        }
    };
}

impl FeedForwardLinear {
    /// Returns the layer, if it is dense.
    pub fn as_dense(&self) -> Option<&Linear> {
        match self {
            Self::Dense(layer) => Some(layer),
            Self::BlockSparse(_) => None,
        }
    }

    /// Returns the layer mutably, if it is dense.
    pub fn as_dense_mut(&mut self) -> Option<&mut Linear> {
        match self {
            Self::Dense(layer) => Some(layer),
            Self::BlockSparse(_) => None,
        }
    }

    /// Returns the layer, if it is block sparse.
    pub fn as_block_sparse(&self) -> Option<&BlockSparseLinear> {
        match self {
            Self::Dense(_) => None,
            Self::BlockSparse(layer) => Some(layer),
        }
    }

    /// Returns the bias, `[d_output]`.
    pub fn bias(&self) -> Option<&Param<Tensor<1>>> {
        either!(self, layer => layer.bias.as_ref())
    }

    /// Returns `x · W`, without the bias, in `dtype`.
    fn product(&self, x: Tensor<3>, dtype: FloatDType) -> Result<Tensor<3>> {
        match self {
            Self::Dense(layer) => {
                let options = LinearOptions::default().dtype(dtype);
                Ok(linear(x, layer.weight.val(), &options)?)
            }
            Self::BlockSparse(layer) => layer.product(x, None, dtype),
        }
    }

    fn flops(&self) -> u64 {
        match self {
            Self::Dense(layer) => linear_flops(layer),
            Self::BlockSparse(layer) => 2 * layer.weight.lazy_shape().num_elements() as u64,
        }
    }
}

impl From<Linear> for FeedForwardLinear {
    fn from(layer: Linear) -> Self {
        Self::Dense(layer)
    }
}

impl From<BlockSparseLinear> for FeedForwardLinear {
    fn from(layer: BlockSparseLinear) -> Self {
        Self::BlockSparse(layer)
    }
}

/// Implemented by hand: Burn's derive for enums adds the variant's name to parameter names.
impl Module for FeedForwardLinear {
    fn visit<V: ModuleVisitor>(&self, visitor: &mut V) {
        either!(self, layer => layer.visit(visitor))
    }

    fn map<M: ModuleMapper>(self, mapper: &mut M) -> Self {
        either!(self, layer => layer.map(mapper).into())
    }

    fn to_device(self, device: &Device) -> Self {
        either!(self, layer => layer.to_device(device).into())
    }

    fn fork(self, device: &Device) -> Self {
        either!(self, layer => layer.fork(device).into())
    }

    fn collect_devices(&self, devices: Vec<Device>) -> Vec<Device> {
        either!(self, layer => layer.collect_devices(devices))
    }

    fn valid(&self) -> Self {
        either!(self, layer => layer.valid().into())
    }

    fn train(self) -> Self {
        either!(self, layer => layer.train().into())
    }

    fn materialize(self) -> Self {
        either!(self, layer => layer.materialize().into())
    }
}

impl ModuleDisplayDefault for FeedForwardLinear {
    fn content(&self, content: Content) -> Option<Content> {
        either!(self, layer => content.add_single(layer).optional())
    }
}

impl ModuleDisplay for FeedForwardLinear {}

/// Activation function of the feed-forward networks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub enum FeedForwardActivation {
    /// `x · sigmoid(1.702 x)`, the Sparse Transformer's (Child et al., 2019, §5.2).
    #[default]
    GeluSigmoid,
    /// `x / 2 · (1 + tanh(√(2/π) (x + 0.044715 x³)))`, GPT-2's (`gelu_new` in `transformers`).
    GeluTanh,
    /// `x / 2 · (1 + erf(x / √2))`, BERT's and Longformer's.
    GeluErf,
    /// `max(x, 0)`.
    Relu,
}

impl From<FeedForwardActivation> for Activation {
    fn from(activation: FeedForwardActivation) -> Self {
        match activation {
            FeedForwardActivation::GeluSigmoid => Self::GeluSigmoid,
            FeedForwardActivation::GeluTanh => Self::GeluTanh,
            FeedForwardActivation::GeluErf => Self::GeluErf,
            FeedForwardActivation::Relu => Self::Relu,
        }
    }
}

/// Feed-forward network `W_2 f(W_1 x + b_1) + b_2` with an activation `f`, by default `x · sigmoid(1.702 x)`.
///
/// The layers have the names of burn-nn's `PositionWiseFeedForward`. There is no dropout inside.
#[derive(Module, Debug)]
pub struct FeedForward {
    /// `W_1`, `b_1`: `d_model` to `d_ff`.
    pub linear_inner: FeedForwardLinear,
    /// `W_2`, `b_2`: `d_ff` to `d_model`.
    pub linear_outer: FeedForwardLinear,
    #[module(skip)]
    pub(crate) activation: FeedForwardActivation,
    #[module(skip)]
    pub(crate) precision: Precision,
}

impl FeedForward {
    or_panics! {
        /// Applies the network to every position. The result has the input's dtype.
        ///
        /// # Shapes
        /// - input and output: `[batch, seq, d_model]`
        pub fn forward(&self, x: Tensor<3>) -> Tensor<3>;

        /// # Errors
        /// If the last axis is not `d_model`.
        pub fn try_forward {
            let dtype = x.dtype();
            let Projected { x, bias, .. } = self.forward_projected(x, false)?;
            Ok(bias_activation(x, bias, Activation::None)?.cast(dtype))
        }
    }

    /// [`Self::forward`] without its last bias. With `recompute` the backward pass computes the first product again, if both layers are dense.
    pub(crate) fn forward_projected(&self, x: Tensor<3>, recompute: bool) -> Result<Projected> {
        let (inner, outer) = (&self.linear_inner, &self.linear_outer);
        let dtype = self.precision.dtype(x.dtype());
        let inner_bias = inner.bias().map(Param::val);
        let activation = Activation::from(self.activation);
        let x = match (inner.as_dense(), outer.as_dense()) {
            (Some(inner), Some(outer)) => {
                let mut params = MlpParams::new(inner.weight.val(), outer.weight.val());
                params.bias = inner_bias;
                let options = MlpOptions::default().dtype(dtype).recompute(recompute);
                mlp(x, params, activation, &options)?
            }
            _ => {
                let hidden = inner.product(x, dtype)?;
                let active = bias_activation(hidden, inner_bias, activation)?;
                outer.product(active, dtype)?
            }
        };
        let bias = outer.bias().map(Param::val);
        Ok(Projected::new(x, bias))
    }

    /// Returns the operations of both layers for one position, forward: two per weight.
    pub fn matmul_flops_per_token(&self) -> u64 {
        self.linear_inner.flops() + self.linear_outer.flops()
    }
}
