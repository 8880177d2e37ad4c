//! Attention layer of the Routing Transformer.

use burn::config::Config;
use burn::module::{Initializer, Module};
use burn::nn::{Linear, LinearConfig};
use burn::tensor::{Device, Tensor};
use burn_blocksparse::Seed;

use super::routing::{RoutingHeads, RoutingHeadsConfig};
use crate::Precision;
use crate::error::{
    Result, ensure, ensure_multiple, ensure_none, ensure_positive, ensure_shape, or_panics,
};
use crate::precision::project_heads;

const AXES: [&str; 3] = ["batch", "seq", "d_model"];

/// Configuration of [`RoutingAttention`].
#[derive(Config, Debug)]
#[must_use = "a configuration does nothing until `init`"]
pub struct RoutingAttentionConfig {
    /// Hidden size: width of the input and of the output.
    pub d_model: usize,
    /// Number of heads, a divisor of `d_model`.
    pub n_heads: usize,
    /// Tokens of a cluster.
    pub window: usize,
    /// Longest sequence, which determines the default of `clusters`.
    pub context: usize,
    /// Clusters of each head. Default: `context / window`, rounded up.
    pub clusters: Option<usize>,
    /// True if tokens see earlier ones only.
    #[config(default = true)]
    pub causal: bool,
    /// True if keys are the queries, normalised to unit length. Default: `causal`. Attention that is not causal must not share them.
    pub shared_qk: Option<bool>,
    /// Decay of the moving averages: share of a mean that an update keeps.
    #[config(default = 0.999)]
    pub means_decay: f64,
    /// Factor of the commitment loss.
    #[config(default = 1e-4)]
    pub commitment: f64,
    /// Dtype of the projections and of the attention. Clusters are computed in f32.
    #[config(default = "Precision::F32")]
    pub precision: Precision,
    /// Initialisation of the projections.
    #[config(
        default = "Initializer::KaimingUniform{gain: 1.0 / f64::sqrt(3.0), fan_out_only: false}"
    )]
    pub initializer: Initializer,
}

impl RoutingAttentionConfig {
    or_panics! {
        /// Creates the module, with parameters that are initialised on first use.
        pub fn init(&self, device: &Device) -> RoutingAttention;

        /// # Errors
        /// If `n_heads` does not divide `d_model`, a number is out of range, `shared_qk` is true without `causal`, or the device does not support
        /// `precision`.
        pub fn try_init {
            ensure_multiple("d_model", self.d_model, "n_heads", self.n_heads)?;
            ensure_positive("context", self.context)?;
            let shared = self.shared_qk.unwrap_or(self.causal);
            ensure! { !shared || self.causal =>
                "shared_qk", "false without causal attention: queries that are keys see earlier tokens", shared; }
            self.precision.check(device)?;
            let heads = RoutingHeadsConfig::new(self.window)
                .with_clusters(self.clusters)
                .with_means_decay(self.means_decay)
                .with_commitment(self.commitment);
            let head_dim = self.d_model / self.n_heads;
            let mut heads = heads.try_init(self.n_heads, head_dim, self.context, device)?;
            heads.products = self.precision.products();
            let linear = || {
                LinearConfig::new(self.d_model, self.d_model)
                    .with_initializer(self.initializer.clone())
                    .init(device)
            };
            Ok(RoutingAttention {
                query: linear(),
                key: (!shared).then(linear),
                value: linear(),
                output: linear(),
                heads,
                d_model: self.d_model,
                n_heads: self.n_heads,
                causal: self.causal,
                precision: self.precision,
            })
        }
    }
}

/// Multi-head attention within clusters of similar tokens (Roy et al., 2021): projections around [`RoutingHeads`].
///
/// ```
/// use burn::tensor::{Device, Distribution, Tensor};
/// use burn_sparse_transformer::content::{RoutingAttentionConfig, RoutingAttentionInput};
///
/// let device = Device::flex();
/// // Sequences of up to 512 tokens, in 8 clusters of 64.
/// let attention = RoutingAttentionConfig::new(64, 4, 64, 512).init(&device);
/// let x = Tensor::<3>::random([2, 500, 64], Distribution::Default, &device);
/// let y = attention.forward(RoutingAttentionInput::new(x)).context;
/// assert_eq!(y.dims(), [2, 500, 64]);
/// ```
///
/// Create it with [`RoutingAttentionConfig`].
#[derive(Module, Debug)]
pub struct RoutingAttention {
    /// Projection from `d_model` to `d_model`.
    pub query: Linear,
    /// Projection from `d_model` to `d_model`, if keys are not the queries.
    pub key: Option<Linear>,
    /// Projection from `d_model` to `d_model`.
    pub value: Linear,
    /// Projection from `d_model` to `d_model`.
    pub output: Linear,
    /// Clusters and their means.
    pub heads: RoutingHeads,
    d_model: usize,
    n_heads: usize,
    causal: bool,
    #[module(skip)]
    precision: Precision,
}

/// Input of [`RoutingAttention`].
#[derive(Clone, Debug)]
#[must_use = "an input does nothing until it is passed to a layer"]
pub struct RoutingAttentionInput {
    x: Tensor<3>,
    padded: bool,
}

impl RoutingAttentionInput {
    /// # Shapes
    /// - `x`: `[batch, seq, d_model]`
    pub fn new(x: Tensor<3>) -> Self {
        Self { x, padded: false }
    }

    /// Sets the lengths of the sequences. Clusters do not support padding, so lengths other than that of `x` are an error of the call.
    pub fn lengths(mut self, lengths: impl IntoIterator<Item = usize>) -> Self {
        let [_, seq, _] = self.x.dims();
        self.padded = lengths.into_iter().any(|length| length != seq);
        self
    }
}

/// Output of [`RoutingAttention`].
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct RoutingAttentionOutput {
    /// `[batch, seq, d_model]`, in the input's dtype.
    pub context: Tensor<3>,
    /// Commitment loss, `[1]`, to add to the loss: see [`RoutingOutput::commitment`](crate::content::RoutingOutput::commitment).
    pub commitment: Option<Tensor<1>>,
}

impl RoutingAttention {
    or_panics! {
        /// Computes attention of each token to the tokens of its clusters. The output of a token in no cluster is the output projection's bias.
        ///
        /// # Shapes
        /// - input and `context`: `[batch, seq, d_model]`
        pub fn forward(&self, input: RoutingAttentionInput) -> RoutingAttentionOutput;

        /// # Errors
        /// If the shape does not match, or there is padding.
        pub fn try_forward {
            let expected = "none with clusters, which would also take padding";
            ensure_none("padding", input.padded, expected)?;
            let x = input.x;
            let dtype = x.dtype();
            self.check(&x)?;
            let heads = self.n_heads;
            let out = match &self.key {
                None => {
                    let layers = [&self.query, &self.value];
                    let [query, value] = project_heads(self.precision, layers, x, [heads; 2])?;
                    self.heads.try_forward(query, value)?
                }
                Some(key) => {
                    let layers = [&self.query, key, &self.value];
                    let [query, key, value] = project_heads(self.precision, layers, x, [heads; 3])?;
                    match self.causal {
                        true => self.heads.try_forward_unshared_causal(query, key, value)?,
                        false => self.heads.try_forward_unshared(query, key, value)?,
                    }
                }
            };
            let context = self.precision.merged_linear(&self.output, out.context)?;
            Ok(RoutingAttentionOutput {
                context: context.cast(dtype),
                commitment: out.commitment,
            })
        }
    }

    /// [`RoutingHeads::settle`] on the projected queries (and keys, if they have their own clusters) of an input.
    ///
    /// # Errors
    /// Those of [`Self::forward`] and [`RoutingHeads::settle`].
    pub fn settle(&mut self, x: Tensor<3>, seed: impl Into<Seed>) -> Result<()> {
        self.check(&x)?;
        let heads = self.n_heads;
        let x = match &self.key {
            None => {
                let [query] = project_heads(self.precision, [&self.query], x, [heads])?;
                query
            }
            Some(key) => {
                let layers = [&self.query, key];
                let both = project_heads(self.precision, layers, x, [heads; 2])?;
                Tensor::cat(both.to_vec(), 2)
            }
        };
        self.heads.settle(x, seed)
    }

    /// [`RoutingHeads::ema_update`].
    pub fn ema_update(&mut self) {
        self.heads.ema_update();
    }

    fn check(&self, x: &Tensor<3>) -> Result<()> {
        let expected = [None, None, Some(self.d_model)];
        ensure_shape("x", x.dims(), expected, AXES)
    }
}
