//! Attention layer of the Reformer.

use burn::config::Config;
use burn::module::{Initializer, Module};
use burn::nn::{Linear, LinearConfig};
use burn::tensor::{Device, Tensor};
use burn_blocksparse::Seed;

use super::lsh::{LshHeads, LshHeadsConfig};
use crate::Precision;
use crate::dropout::Seeds;
use crate::error::{Result, ensure_multiple, ensure_shape, or_panics};
use crate::precision::project_heads;

const AXES: [&str; 3] = ["batch", "seq", "d_model"];

/// Configuration of [`LshAttention`].
#[derive(Config, Debug)]
#[must_use = "a configuration does nothing until `init`"]
pub struct LshAttentionConfig {
    /// Hidden size: width of the input and of the output.
    pub d_model: usize,
    /// Number of heads, a divisor of `d_model`.
    pub n_heads: usize,
    /// Configuration of the hashing heads.
    #[config(default = "LshHeadsConfig::new()")]
    pub heads: LshHeadsConfig,
    /// Dtype of the projections and of the attention's products. Hashes are computed in f32.
    #[config(default = "Precision::F32")]
    pub precision: Precision,
    /// Initialisation of the projections.
    #[config(
        default = "Initializer::KaimingUniform{gain: 1.0 / f64::sqrt(3.0), fan_out_only: false}"
    )]
    pub initializer: Initializer,
}

impl LshAttentionConfig {
    or_panics! {
        /// Creates the module, with parameters that are initialised on first use.
        pub fn init(&self, device: &Device) -> LshAttention;

        /// # Errors
        /// If `n_heads` does not divide `d_model`, or the device does not support `precision`; also those of [`LshHeadsConfig::init`].
        pub fn try_init {
            ensure_multiple("d_model", self.d_model, "n_heads", self.n_heads)?;
            let heads = self.heads.try_init()?;
            self.precision.check(device)?;
            let linear = || {
                LinearConfig::new(self.d_model, self.d_model)
                    .with_initializer(self.initializer.clone())
                    .init(device)
            };
            Ok(LshAttention {
                query: linear(),
                value: linear(),
                output: linear(),
                heads,
                d_model: self.d_model,
                n_heads: self.n_heads,
                precision: self.precision,
                seeds: Seeds::default(),
            })
        }
    }
}

/// Multi-head attention within hash buckets (Kitaev et al., 2020): projections around [`lsh_attention`](crate::content::lsh_attention()). Keys are the
/// queries, normalised to unit length.
///
/// ```
/// use burn::tensor::{Device, Distribution, Tensor};
/// use burn_sparse_transformer::content::{LshAttentionConfig, LshHeadsConfig};
///
/// let device = Device::flex();
/// let attention = LshAttentionConfig::new(64, 4)
///     .with_heads(LshHeadsConfig::new().with_bucket(32).with_rounds(2))
///     .init(&device);
/// let x = Tensor::<3>::random([2, 500, 64], Distribution::Default, &device);
/// assert_eq!(attention.forward(x, None).dims(), [2, 500, 64]);
/// ```
///
/// Create it with [`LshAttentionConfig`].
#[derive(Module, Debug)]
pub struct LshAttention {
    /// Projection of queries and keys, from `d_model` to `d_model`.
    pub query: Linear,
    /// Projection from `d_model` to `d_model`.
    pub value: Linear,
    /// Projection from `d_model` to `d_model`.
    pub output: Linear,
    #[module(skip)]
    heads: LshHeads,
    d_model: usize,
    n_heads: usize,
    #[module(skip)]
    precision: Precision,
    #[module(skip)]
    seeds: Seeds,
}

impl LshAttention {
    or_panics! {
        /// Computes attention of each token to those with the same hashes. Rotations are drawn from `seed`; without one they are new in every call on an
        /// autodiff device, and the configuration's elsewhere.
        ///
        /// # Shapes
        /// - `x` and the result: `[batch, seq, d_model]`
        pub fn forward(&self, x: Tensor<3>, seed: Option<Seed>) -> Tensor<3>;

        /// # Errors
        /// If the shape does not match.
        pub fn try_forward {
            let expected = [None, None, Some(self.d_model)];
            ensure_shape("x", x.dims(), expected, AXES)?;
            let dtype = x.dtype();
            let seed = seed.or_else(|| x.is_autodiff().then(|| self.seeds.next()));
            let layers = [&self.query, &self.value];
            let [qk, value] = project_heads(self.precision, layers, x, [self.n_heads; 2])?;
            let context = self.heads.try_forward(qk, value, seed)?;
            let context = self.precision.merged_linear(&self.output, context)?;
            Ok(context.cast(dtype))
        }
    }
}
