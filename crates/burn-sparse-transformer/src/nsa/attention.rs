//! A layer of native sparse attention.

use burn::config::Config;
use burn::module::{Initializer, Module, Param};
use burn::nn::{Linear, LinearConfig, RotaryEncoding, RotaryEncodingConfig};
use burn::tensor::{Device, Tensor};
use burn_fused_ops::{Activation, bias_activation};

use super::heads::{NsaSizes, Placing, Projections};
use super::{NsaHeads, NsaHeadsConfig};
use crate::error::{ensure, ensure_multiple, ensure_shape, or_panic};
use crate::heads::{Positions, validate_rope};
use crate::linear::linear_flops;
use crate::precision::project_heads;
use crate::{Precision, SparseMhaCache, TransformerError};

const AXES: [&str; 3] = ["batch", "seq", "d_model"];

/// Configuration of [`NsaAttention`].
#[derive(Config, Debug)]
#[must_use = "a configuration does nothing until `init`"]
pub struct NsaAttentionConfig {
    /// Width of the input and of the output.
    pub d_model: usize,
    /// Number of query heads.
    pub n_heads: usize,
    /// Number of key and value heads, a divisor of `n_heads`; heads that share keys share one choice. Default: `n_heads`; the paper has 4 of 64.
    pub n_kv_heads: Option<usize>,
    /// Width of all query heads. Default: `d_model`.
    pub d_key: Option<usize>,
    /// Width of all heads' values. Default: `d_model`.
    pub d_value: Option<usize>,
    /// The branches.
    #[config(default = "NsaHeadsConfig::new()")]
    pub heads: NsaHeadsConfig,
    /// Whether tokens see earlier ones only, which is what NSA is defined for.
    #[config(default = true)]
    pub causal: bool,
    /// Factor of the scores. Default: `1 / √d_k`.
    pub scale: Option<f64>,
    /// Rotary position embeddings of queries and keys; its `d_model` is the width of a query head. Default: none.
    pub rope: Option<RotaryEncodingConfig>,
    /// Dtype of the projections and of the attention.
    #[config(default = "Precision::F32")]
    pub precision: Precision,
    /// How the projections are initialised.
    #[config(
        default = "Initializer::KaimingUniform{gain: 1.0 / f64::sqrt(3.0), fan_out_only: false}"
    )]
    pub initializer: Initializer,
}

impl NsaAttentionConfig {
    /// Creates the module, with parameters that are initialised on first use.
    ///
    /// # Panics
    /// With the text of [`Self::try_init`]'s error.
    #[track_caller]
    pub fn init(&self, device: &Device) -> NsaAttention {
        or_panic(self.try_init(device))
    }

    /// [`Self::init`] that returns its error.
    ///
    /// # Errors
    /// If `causal` is false, `n_heads` does not divide `d_key` or `d_value`, `n_kv_heads` does not divide `n_heads`, a number of the branches is out of its
    /// range, `rope` does not fit the heads, or the device does not compute in `precision`.
    pub fn try_init(&self, device: &Device) -> Result<NsaAttention, TransformerError> {
        let expected = || "true for nsa, whose tokens see earlier ones alone".into();
        ensure(self.causal, "causal", expected, self.causal)?;
        let (d_key, d_value) = (
            self.d_key.unwrap_or(self.d_model),
            self.d_value.unwrap_or(self.d_model),
        );
        let n_kv_heads = self.n_kv_heads.unwrap_or(self.n_heads);
        ensure_multiple("d_key", d_key, "n_heads", self.n_heads)?;
        ensure_multiple("d_value", d_value, "n_heads", self.n_heads)?;
        ensure_multiple("n_heads", self.n_heads, "n_kv_heads", n_kv_heads)?;
        let sizes = NsaSizes {
            d_model: self.d_model,
            n_heads: self.n_heads,
            n_kv_heads,
            d_k: d_key / self.n_heads,
            d_v: d_value / self.n_heads,
        };
        if let Some(rope) = &self.rope {
            validate_rope(rope, sizes.d_k)?;
        }
        self.precision.check(device)?;
        let linear = |d_input: usize, d_output: usize| {
            LinearConfig::new(d_input, d_output)
                .with_initializer(self.initializer.clone())
                .init(device)
        };
        let products = self.precision.products();
        Ok(NsaAttention {
            query: linear(self.d_model, d_key),
            key: linear(self.d_model, n_kv_heads * sizes.d_k),
            value: linear(self.d_model, n_kv_heads * sizes.d_v),
            output: linear(d_value, self.d_model),
            heads: NsaHeads::new(&self.heads, sizes, self.scale, products, &linear, device)?,
            rope: self.rope.as_ref().map(|config| config.init(device)),
            d_model: self.d_model,
            n_heads: self.n_heads,
            n_kv_heads,
            precision: self.precision,
        })
    }
}

/// Native sparse attention (Yuan et al., 2025): of each token to all earlier ones in compressed form, to a few blocks of them as they are, and to those of a
/// window, each by keys and values of its own, added with gates that the token sets.
///
/// ```text
/// output = concat_h(Σ over branches sigmoid(x W_gate)_{h, branch} · branch_h) W_output + b_output
/// ```
///
/// ```
/// use burn::tensor::{Device, Distribution, Tensor};
/// use burn_sparse_transformer::nsa::{NsaAttentionConfig, NsaHeadsConfig};
///
/// let device = Device::flex();
/// let heads = NsaHeadsConfig::new()
///     .with_block(16)
///     .with_stride(8)
///     .with_selected_block(16)
///     .with_keep(6)
///     .with_window(64);
/// // Eight heads of queries on two of keys.
/// let attention = NsaAttentionConfig::new(64, 8)
///     .with_n_kv_heads(Some(2))
///     .with_heads(heads)
///     .init(&device);
/// let x = Tensor::<3>::random([2, 500, 64], Distribution::Default, &device);
/// assert_eq!(attention.forward(x).dims(), [2, 500, 64]);
/// ```
///
/// Should be created with [`NsaAttentionConfig`].
#[derive(Module, Debug)]
pub struct NsaAttention {
    /// `d_model` to `n_heads · d_k`, of all branches.
    pub query: Linear,
    /// `d_model` to `n_kv_heads · d_k`, of the blocks that are chosen.
    pub key: Linear,
    /// `d_model` to `n_kv_heads · d_v`, of the blocks that are chosen.
    pub value: Linear,
    /// `n_heads · d_v` to `d_model`.
    pub output: Linear,
    /// The other branches, and the gates.
    pub heads: NsaHeads,
    /// Of queries and keys; no parameters.
    pub rope: Option<RotaryEncoding>,
    d_model: usize,
    n_heads: usize,
    n_kv_heads: usize,
    #[module(skip)]
    precision: Precision,
}

impl NsaAttention {
    /// What each token sees of the earlier ones and itself.
    ///
    /// # Shapes
    /// - `x` and the result: `[batch, seq, d_model]`
    ///
    /// # Panics
    /// With the text of [`Self::try_forward`]'s error.
    #[track_caller]
    pub fn forward(&self, x: Tensor<3>) -> Tensor<3> {
        or_panic(self.try_forward(x))
    }

    /// [`Self::forward`] that returns its error.
    ///
    /// # Errors
    /// If the shape does not fit, or the sequence is longer than the table of `rope`.
    pub fn try_forward(&self, x: Tensor<3>) -> Result<Tensor<3>, TransformerError> {
        self.run(x, None)
    }

    /// What new tokens see of those in `cache`, of each other and of themselves, for decoding: the same as [`Self::forward`] of the whole sequence gives for
    /// them. The cache keeps all keys and values of all branches, and one more of each block every `stride` tokens; it may be truncated. After an error it is
    /// as it was.
    ///
    /// # Shapes
    /// - `x` and the result: `[batch, new, d_model]`
    ///
    /// # Panics
    /// With the text of [`Self::try_forward_cache`]'s error.
    #[track_caller]
    pub fn forward_cache(&self, x: Tensor<3>, cache: &mut SparseMhaCache) -> Tensor<3> {
        or_panic(self.try_forward_cache(x, cache))
    }

    /// [`Self::forward_cache`] that returns its error.
    ///
    /// # Errors
    /// As [`Self::try_forward`]; also if the batch differs from the cache's, or the cache is full.
    pub fn try_forward_cache(
        &self,
        x: Tensor<3>,
        cache: &mut SparseMhaCache,
    ) -> Result<Tensor<3>, TransformerError> {
        let before = cache.len();
        let result = self.run(x, Some(cache));
        if result.is_err() {
            cache.truncate(before);
        }
        result
    }

    fn run(
        &self,
        x: Tensor<3>,
        cache: Option<&mut SparseMhaCache>,
    ) -> Result<Tensor<3>, TransformerError> {
        let expected = [None, None, Some(self.d_model)];
        ensure_shape("x", x.dims(), expected, AXES)?;
        let (dtype, [batch, seq, _]) = (x.dtype(), x.dims());
        let start = cache.as_ref().map_or(0, |cache| cache.len());
        if let Some(cache) = &cache {
            let [_, d_key] = self.key.weight.lazy_shape().dims::<2>();
            let width = d_key / self.n_kv_heads;
            cache.check([batch, self.n_kv_heads, width], seq)?;
        }
        let start = Positions::From(start);
        if let Some(rope) = &self.rope {
            start.check(rope, seq)?;
        }
        let layers = [&self.query, &self.key, &self.value];
        let heads = [self.n_heads, self.n_kv_heads, self.n_kv_heads];
        let [query, key, value] = project_heads(self.precision, layers, x.clone(), heads)?;
        let placing = Placing {
            norm: None,
            eps: 0.0,
            rope: self.rope.as_ref(),
        };
        let heads = Projections {
            query: placing.rotated(query, &start)?,
            key,
            value,
        };
        let context = match cache {
            None => self.heads.forward(x, heads, &placing, self.precision)?,
            Some(cache) => {
                let precision = self.precision;
                (self.heads).forward_cache(x, heads, cache, &placing, precision)?
            }
        };
        let context = self.precision.merged(&self.output, context)?;
        let bias = self.output.bias.as_ref().map(Param::val);
        Ok(bias_activation(context, bias, Activation::None)?.cast(dtype))
    }

    /// Operations of the products with weights for one position, forward.
    pub fn matmul_flops_per_token(&self) -> u64 {
        let layers = [&self.query, &self.key, &self.value, &self.output];
        let layers: u64 = layers.map(linear_flops).iter().sum();
        layers + self.heads.matmul_flops_per_token()
    }

    /// Operations of the attention of all branches for one sequence, forward: four per pair and channel when keys and values are equally wide.
    pub fn attention_flops(&self, seq: usize) -> u64 {
        let width = |layer: &Linear| layer.weight.lazy_shape().dims::<2>();
        let ([_, d_key], [d_value, _]) = (width(&self.query), width(&self.output));
        2 * self.heads.pairs(seq) * (d_key + d_value) as u64
    }
}
