//! A layer of DeepSeek sparse attention.

use burn::config::Config;
use burn::module::{Initializer, Module, Param};
use burn::nn::{Linear, LinearConfig, RotaryEncoding, RotaryEncodingConfig};
use burn::tensor::{DType, Device, Tensor};
use burn_blocksparse::AttentionOptions;
use burn_fused_ops::{Activation, bias_activation};

use super::{DsaHeads, DsaHeadsConfig, DsaParts};
use crate::error::{ensure_multiple, ensure_shape, or_panic};
use crate::heads::{Positions, rotate, validate_rope};
use crate::precision::project_heads;
use crate::{Precision, SparseMhaCache, TransformerError};

const AXES: [&str; 3] = ["batch", "seq", "d_model"];

/// Configuration of [`DsaAttention`].
#[derive(Config, Debug)]
#[must_use = "a configuration does nothing until `init`"]
pub struct DsaAttentionConfig {
    /// Width of the input and of the output.
    pub d_model: usize,
    /// Number of query heads.
    pub n_heads: usize,
    /// Number of key and value heads, a divisor of `n_heads`. Default: `n_heads`.
    pub n_kv_heads: Option<usize>,
    /// The indexer, and how many keys it chooses.
    #[config(default = "DsaHeadsConfig::new()")]
    pub heads: DsaHeadsConfig,
    /// Factor of the scores. Default: `1 / √d_k`.
    pub scale: Option<f64>,
    /// Rotary position embeddings of queries and keys; its `d_model` is the width of a query head. Default: none.
    pub rope: Option<RotaryEncodingConfig>,
    /// Dtype of the projections and of the attention, and of the index unless [`DsaHeadsConfig::index_precision`] says another. Its scores are f32.
    #[config(default = "Precision::F32")]
    pub precision: Precision,
    /// How the projections are initialised.
    #[config(
        default = "Initializer::KaimingUniform{gain: 1.0 / f64::sqrt(3.0), fan_out_only: false}"
    )]
    pub initializer: Initializer,
}

impl DsaAttentionConfig {
    /// Creates the module, with parameters that are initialised on first use.
    ///
    /// # Panics
    /// With the text of [`Self::try_init`]'s error.
    #[track_caller]
    pub fn init(&self, device: &Device) -> DsaAttention {
        or_panic(self.try_init(device))
    }

    /// [`Self::init`] that returns its error.
    ///
    /// # Errors
    /// If `n_heads` does not divide `d_model`, `n_kv_heads` does not divide `n_heads`, a number of `heads` is out of its range, a `rope` does not fit its heads,
    /// or the device does not compute in `precision`.
    pub fn try_init(&self, device: &Device) -> Result<DsaAttention, TransformerError> {
        let n_kv_heads = self.n_kv_heads.unwrap_or(self.n_heads);
        ensure_multiple("d_model", self.d_model, "n_heads", self.n_heads)?;
        ensure_multiple("n_heads", self.n_heads, "n_kv_heads", n_kv_heads)?;
        let width = self.d_model / self.n_heads;
        if let Some(rope) = &self.rope {
            validate_rope(rope, width)?;
        }
        self.precision.check(device)?;
        let linear = |d_input: usize, d_output: usize, bias: bool| {
            LinearConfig::new(d_input, d_output)
                .with_bias(bias)
                .with_initializer(self.initializer.clone())
                .init(device)
        };
        let of_indexer = |d_input, d_output| linear(d_input, d_output, false);
        let rope = self.rope.as_ref();
        let mut options = AttentionOptions::default().precision(self.precision.products());
        options.scale = self.scale;
        Ok(DsaAttention {
            query: linear(self.d_model, self.d_model, true),
            key: linear(self.d_model, n_kv_heads * width, true),
            value: linear(self.d_model, n_kv_heads * width, true),
            output: linear(self.d_model, self.d_model, true),
            heads: DsaHeads::new(
                &self.heads,
                self.d_model,
                self.precision,
                rope,
                &of_indexer,
                device,
            )?,
            rope: rope.map(|config| config.init(device)),
            d_model: self.d_model,
            n_heads: self.n_heads,
            n_kv_heads,
            options,
            precision: self.precision,
        })
    }
}

/// DeepSeek sparse attention (DeepSeek-V3.2-Exp, 2025, §2): of each token to the `keep` tokens up to itself that an indexer scores highest, the same ones for
/// all heads ([`Dsa`](burn_sparse_select::dsa::Dsa)). The paper's attention beside the choice, of compressed keys and values (MLA), is not a part of it: heads are those of grouped-query
/// attention.
///
/// ```
/// use burn::tensor::{Device, Distribution, Tensor};
/// use burn_sparse_transformer::SparseMhaCache;
/// use burn_sparse_transformer::dsa::{DsaAttentionConfig, DsaHeadsConfig};
///
/// let device = Device::flex();
/// let heads = DsaHeadsConfig::new()
///     .with_keep(32)
///     .with_index_heads(4)
///     .with_index_dim(16);
/// let attention = DsaAttentionConfig::new(64, 8)
///     .with_n_kv_heads(Some(1))
///     .with_heads(heads)
///     .init(&device);
/// let x = Tensor::<3>::random([2, 100, 64], Distribution::Default, &device);
/// assert_eq!(attention.forward(x.clone()).dims(), [2, 100, 64]);
/// let mut cache = SparseMhaCache::new();
/// let row = attention.forward_cache(x.narrow(1, 0, 1), &mut cache);
/// assert_eq!((row.dims(), cache.len()), ([2, 1, 64], 1));
/// ```
///
/// Should be created with [`DsaAttentionConfig`].
#[derive(Module, Debug)]
pub struct DsaAttention {
    /// `d_model` to itself.
    pub query: Linear,
    /// `d_model` to all heads of keys.
    pub key: Linear,
    /// `d_model` to all heads of values.
    pub value: Linear,
    /// `d_model` to itself.
    pub output: Linear,
    /// What chooses.
    pub heads: DsaHeads,
    /// Of queries and keys; no parameters.
    pub rope: Option<RotaryEncoding>,
    d_model: usize,
    n_heads: usize,
    n_kv_heads: usize,
    #[module(skip)]
    options: AttentionOptions,
    #[module(skip)]
    precision: Precision,
}

impl DsaAttention {
    /// What each token sees.
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
    /// If the shape does not fit, or the sequence is longer than the table of a `rope`.
    pub fn try_forward(&self, x: Tensor<3>) -> Result<Tensor<3>, TransformerError> {
        let dtype = x.dtype();
        let parts = self.parts(x, 0)?;
        let seen = self.heads.attend(parts, &self.options, false)?;
        self.finish(dtype, seen.heads)
    }

    /// The same, and the loss of the indexer over the keys that were chosen ([`DsaTarget::Chosen`](burn_sparse_select::dsa::DsaTarget::Chosen)), which is to be added
    /// to the model's.
    ///
    /// # Panics
    /// With the text of [`Self::try_forward_with_loss`]'s error.
    #[track_caller]
    pub fn forward_with_loss(&self, x: Tensor<3>) -> (Tensor<3>, Tensor<1>) {
        or_panic(self.try_forward_with_loss(x))
    }

    /// [`Self::forward_with_loss`] that returns its error.
    ///
    /// # Errors
    /// As [`Self::try_forward`].
    pub fn try_forward_with_loss(
        &self,
        x: Tensor<3>,
    ) -> Result<(Tensor<3>, Tensor<1>), TransformerError> {
        let dtype = x.dtype();
        let parts = self.parts(x, 0)?;
        let seen = self.heads.attend(parts, &self.options, true)?;
        let loss = seen.aux_loss.expect("an indexer that learns has a loss");
        Ok((self.finish(dtype, seen.heads)?, loss))
    }

    /// The loss of the indexer over all keys, against dense attention: what its warm-up trains, and nothing else of the layer.
    ///
    /// # Errors
    /// As [`Self::forward`].
    pub fn warm_up_loss(&self, x: Tensor<3>) -> Result<Tensor<1>, TransformerError> {
        let DsaParts {
            heads: [q, k, _],
            index,
        } = self.parts(x, 0)?;
        let scale = self.options.scale;
        self.heads.warm_up_loss(&index, [&q, &k], scale)
    }

    /// What new tokens see of those in `cache`, of each other and of themselves, for decoding: the same as [`Self::forward`] of the whole sequence gives for
    /// them. The cache keeps all keys and values, and the indexer's keys; it may be truncated. After an error it is as it was.
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
    /// As [`Self::try_forward`]; also if the batch differs from the cache's, or the cache is full or another layer's.
    pub fn try_forward_cache(
        &self,
        x: Tensor<3>,
        cache: &mut SparseMhaCache,
    ) -> Result<Tensor<3>, TransformerError> {
        let before = cache.len();
        let result = self.run_cache(x, cache);
        if result.is_err() {
            cache.truncate(before);
        }
        result
    }

    fn run_cache(
        &self,
        x: Tensor<3>,
        cache: &mut SparseMhaCache,
    ) -> Result<Tensor<3>, TransformerError> {
        let dtype = x.dtype();
        let parts = self.parts(x, cache.len())?;
        let [batch, kv_heads, new, width] = parts.heads[1].dims();
        cache.check([batch, kv_heads, width], new)?;
        let parts = self.heads.behind(parts, cache)?;
        let seen = self.heads.attend(parts, &self.options, false)?;
        self.finish(dtype, seen.heads)
    }

    /// Heads of queries, keys and values of tokens from a position on, and what the indexer makes of them.
    fn parts(&self, x: Tensor<3>, start: usize) -> Result<DsaParts, TransformerError> {
        ensure_shape("x", x.dims(), [None, None, Some(self.d_model)], AXES)?;
        let seq = x.dims()[1];
        let positions = Positions::From(start);
        if let Some(rope) = &self.rope {
            positions.check(rope, seq)?;
        }
        let index = self.heads.index(x.clone(), &positions)?;
        let layers = [&self.query, &self.key, &self.value];
        let heads = [self.n_heads, self.n_kv_heads, self.n_kv_heads];
        let [q, k, v] = project_heads(self.precision, layers, x, heads)?;
        let rotated = |x: Tensor<4>| match &self.rope {
            None => Ok(x),
            Some(rope) => {
                let dtype = x.dtype();
                rotate(rope, x, &positions).map(|x| x.cast(dtype))
            }
        };
        Ok(DsaParts {
            heads: [rotated(q)?, rotated(k)?, v],
            index,
        })
    }

    fn finish(&self, dtype: DType, context: Tensor<4>) -> Result<Tensor<3>, TransformerError> {
        let context = self.precision.merged(&self.output, context)?;
        let bias = self.output.bias.as_ref().map(Param::val);
        Ok(bias_activation(context, bias, Activation::None)?.cast(dtype))
    }
}
