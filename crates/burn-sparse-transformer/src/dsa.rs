//! A layer of DeepSeek sparse attention.

use burn::config::Config;
use burn::module::{Initializer, Module, Param};
use burn::nn::{
    LayerNorm, LayerNormConfig, Linear, LinearConfig, RotaryEncoding, RotaryEncodingConfig,
};
use burn::tensor::{DType, Device, Tensor};
use burn_blocksparse::{
    Activation, AttentionOptions, ChoiceWalk, Dsa, DsaIndex, DsaTarget, KeyLists, bias_activation,
};

use crate::attention::project_heads;
use crate::error::{ensure, ensure_multiple, ensure_positive, ensure_shape};
use crate::heads::{Positions, rotate, validate_rope};
use crate::{Precision, SparseMhaCache, TransformerError};

const AXES: [&str; 3] = ["batch", "seq", "d_model"];

/// Configuration of [`DsaAttention`]. The defaults of the indexer are the paper's.
#[derive(Config, Debug)]
#[must_use = "a configuration does nothing until `init`"]
pub struct DsaAttentionConfig {
    /// Width of the input and of the output.
    pub d_model: usize,
    /// Number of query heads.
    pub n_heads: usize,
    /// Number of key and value heads, a divisor of `n_heads`. Default: `n_heads`.
    pub n_kv_heads: Option<usize>,
    /// Keys that a token attends to, at most.
    #[config(default = 2048)]
    pub keep: usize,
    /// Keys up to a token's own that are always among them.
    #[config(default = 0)]
    pub near: usize,
    /// Heads of the indexer. 4 heads of width 64 cost a thirty-second of the paper's.
    #[config(default = 64)]
    pub index_heads: usize,
    /// Width of an indexer's head.
    #[config(default = 128)]
    pub index_dim: usize,
    /// Rotary position embeddings of queries and keys; its `d_model` is the width of a query head. Default: none.
    pub rope: Option<RotaryEncodingConfig>,
    /// The same of the first channels of the indexer's queries and keys; its `d_model` is how many. Default: none.
    pub index_rope: Option<RotaryEncodingConfig>,
    /// Whether kernels walk the lists of keys where a device has them ([`ChoiceWalk::Auto`]).
    #[config(default = true)]
    pub walk: bool,
    /// Dtype of the projections and of the attention. The indexer's scores are f32.
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
    /// # Errors
    /// If `n_heads` does not divide `d_model`, `n_kv_heads` does not divide `n_heads`, a number of the indexer is 0, `near` is above `keep`, a `rope` does
    /// not fit its heads, or the device does not compute in `precision`.
    pub fn init(&self, device: &Device) -> Result<DsaAttention, TransformerError> {
        let n_kv_heads = self.n_kv_heads.unwrap_or(self.n_heads);
        ensure_multiple("d_model", self.d_model, "n_heads", self.n_heads)?;
        ensure_multiple("n_heads", self.n_heads, "n_kv_heads", n_kv_heads)?;
        ensure_positive("index_heads", self.index_heads)?;
        ensure_positive("index_dim", self.index_dim)?;
        let dsa = Dsa::new(self.keep)?.with_near(self.near)?;
        let width = self.d_model / self.n_heads;
        if let Some(rope) = &self.rope {
            validate_rope(rope, width)?;
        }
        if let Some(rope) = &self.index_rope {
            let expected = || format!("at most {}, the width of an index head", self.index_dim);
            let fits = rope.d_model <= self.index_dim;
            ensure(fits, "index_rope.d_model", expected, rope.d_model)?;
            validate_rope(rope, rope.d_model)?;
        }
        self.precision.check(device)?;
        let linear = |d_output: usize, bias: bool| {
            LinearConfig::new(self.d_model, d_output)
                .with_bias(bias)
                .with_initializer(self.initializer.clone())
                .init(device)
        };
        let rope = |config: &Option<RotaryEncodingConfig>| {
            config.as_ref().map(|config| config.init(device))
        };
        Ok(DsaAttention {
            query: linear(self.d_model, true),
            key: linear(n_kv_heads * width, true),
            value: linear(n_kv_heads * width, true),
            output: linear(self.d_model, true),
            indexer: DsaIndexer {
                query: linear(self.index_heads * self.index_dim, false),
                key: linear(self.index_dim, false),
                norm: LayerNormConfig::new(self.index_dim).init(device),
                weights: linear(self.index_heads, false),
                rope: rope(&self.index_rope),
                heads: self.index_heads,
            },
            rope: rope(&self.rope),
            d_model: self.d_model,
            n_heads: self.n_heads,
            n_kv_heads,
            dsa,
            walk: self.walk,
            precision: self.precision,
        })
    }
}

/// The lightning indexer: what it makes of tokens. Tokens are detached, so that the indexer learns nothing by the model's loss, and the model nothing by the
/// indexer's.
#[derive(Module, Debug)]
pub struct DsaIndexer {
    /// `d_model` to `index_heads · index_dim`, without bias.
    pub query: Linear,
    /// `d_model` to `index_dim`, without bias.
    pub key: Linear,
    /// Of keys.
    pub norm: LayerNorm,
    /// `d_model` to `index_heads`, without bias.
    pub weights: Linear,
    /// Of the first channels of queries and keys; no parameters.
    pub rope: Option<RotaryEncoding>,
    heads: usize,
}

impl DsaIndexer {
    /// Queries and keys of tokens from position `start` on, and weights.
    fn parts(
        &self,
        x: Tensor<3>,
        start: usize,
    ) -> Result<(Tensor<4>, Tensor<4>, Tensor<3>), TransformerError> {
        let x = x.detach();
        let [batch, seq, _] = x.dims();
        let positions = Positions::From(start);
        let rotated = |x: Tensor<4>| match &self.rope {
            None => Ok(x),
            Some(rope) => {
                let [.., width] = x.dims();
                let [_, turned, _] = rope.freq_complex.dims();
                let first = rotate(rope, x.clone().narrow(3, 0, turned), &positions)?;
                let first = first.cast(x.dtype());
                Ok::<_, TransformerError>(match turned == width {
                    true => first,
                    false => Tensor::cat(vec![first, x.narrow(3, turned, width - turned)], 3),
                })
            }
        };
        let q = self.query.forward(x.clone());
        let width = q.dims()[2] / self.heads;
        let q = q.reshape([batch, seq, self.heads, width]).swap_dims(1, 2);
        let k = self.norm.forward(self.key.forward(x.clone()));
        let k = k.reshape([batch, 1, seq, width]);
        let weights = self.weights.forward(x).swap_dims(1, 2);
        Ok((rotated(q)?, rotated(k)?, weights))
    }
}

/// What [`DsaAttention::forward_cache`] keeps of earlier tokens: keys and values, and the indexer's keys.
#[derive(Clone, Debug, Default)]
#[must_use]
pub struct DsaCache {
    attention: SparseMhaCache,
    index: SparseMhaCache,
}

impl DsaCache {
    /// An empty cache that grows without bound.
    pub fn new() -> Self {
        Self::default()
    }

    /// Positions in the cache.
    pub fn len(&self) -> usize {
        self.attention.len()
    }

    /// Whether it holds none.
    pub fn is_empty(&self) -> bool {
        self.attention.is_empty()
    }

    /// Forgets every position from `len` on.
    pub fn truncate(&mut self, len: usize) {
        self.attention.truncate(len);
        self.index.truncate(len);
    }
}

/// DeepSeek sparse attention (DeepSeek-V3.2-Exp, 2025, §2): of each token to the `keep` tokens up to itself that an indexer scores highest, the same ones for
/// all heads ([`Dsa`]). The paper's attention beside the choice, of compressed keys and values (MLA), is not a part of it: heads are those of grouped-query
/// attention.
///
/// ```
/// use burn::tensor::{Device, Distribution, Tensor};
/// use burn_sparse_transformer::{DsaAttentionConfig, DsaCache};
///
/// let device = Device::flex();
/// let attention = DsaAttentionConfig::new(64, 8)
///     .with_n_kv_heads(Some(1))
///     .with_keep(32)
///     .with_index_heads(4)
///     .with_index_dim(16)
///     .init(&device)?;
/// let x = Tensor::<3>::random([2, 100, 64], Distribution::Default, &device);
/// assert_eq!(attention.forward(x.clone())?.dims(), [2, 100, 64]);
/// let mut cache = DsaCache::new();
/// let row = attention.forward_cache(x.narrow(1, 0, 1), &mut cache)?;
/// assert_eq!((row.dims(), cache.len()), ([2, 1, 64], 1));
/// # Ok::<(), burn_sparse_transformer::TransformerError>(())
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
    pub indexer: DsaIndexer,
    /// Of queries and keys; no parameters.
    pub rope: Option<RotaryEncoding>,
    d_model: usize,
    n_heads: usize,
    n_kv_heads: usize,
    #[module(skip)]
    dsa: Dsa,
    walk: bool,
    #[module(skip)]
    precision: Precision,
}

impl DsaAttention {
    /// What each token sees.
    ///
    /// # Shapes
    /// - `x` and the result: `[batch, seq, d_model]`
    ///
    /// # Errors
    /// If the shape does not fit, or the sequence is longer than the table of a `rope`.
    pub fn forward(&self, x: Tensor<3>) -> Result<Tensor<3>, TransformerError> {
        let ([q, k, v], index) = self.parts(x.clone(), 0)?;
        let lists = self.dsa.choose(&index)?;
        self.attend(x.dtype(), [q, k, v], lists)
    }

    /// The same, and the loss of the indexer over the keys that were chosen ([`DsaTarget::Chosen`]), which is to be added to the model's.
    ///
    /// # Errors
    /// As [`Self::forward`].
    pub fn forward_with_loss(
        &self,
        x: Tensor<3>,
    ) -> Result<(Tensor<3>, Tensor<1>), TransformerError> {
        let ([q, k, v], index) = self.parts(x.clone(), 0)?;
        let lists = self.dsa.choose(&index)?;
        let over = DsaTarget::Chosen(&lists);
        let loss = self.dsa.loss(&index, [&q, &k], None, over)?;
        Ok((self.attend(x.dtype(), [q, k, v], lists.clone())?, loss))
    }

    /// The loss of the indexer over all keys, against dense attention: what its warm-up trains, and nothing else of the layer.
    ///
    /// # Errors
    /// As [`Self::forward`].
    pub fn warm_up_loss(&self, x: Tensor<3>) -> Result<Tensor<1>, TransformerError> {
        let ([q, k, _], index) = self.parts(x, 0)?;
        Ok(self.dsa.loss(&index, [&q, &k], None, DsaTarget::All)?)
    }

    /// What new tokens see of those in `cache`, of each other and of themselves, for decoding: the same as [`Self::forward`] of the whole sequence gives for
    /// them. After an error the cache is as it was.
    ///
    /// # Shapes
    /// - `x` and the result: `[batch, new, d_model]`
    ///
    /// # Errors
    /// As [`Self::forward`]; also if the batch differs from the cache's.
    pub fn forward_cache(
        &self,
        x: Tensor<3>,
        cache: &mut DsaCache,
    ) -> Result<Tensor<3>, TransformerError> {
        let before = cache.len();
        let result = self.run_cache(x, cache);
        if result.is_err() {
            cache.truncate(before);
        }
        result
    }

    fn run_cache(&self, x: Tensor<3>, cache: &mut DsaCache) -> Result<Tensor<3>, TransformerError> {
        let ([q, k, v], index) = self.parts(x.clone(), cache.len())?;
        let [batch, kv_heads, new, width] = k.dims();
        let [_, _, _, index_width] = index.k.dims();
        cache.attention.check([batch, kv_heads, width], new)?;
        cache.index.check([batch, 1, index_width], new)?;
        let (k, v) = cache.attention.append(k, v);
        // Of the indexer there are no values.
        let no_values = index.k.clone().narrow(3, 0, 1);
        let (keys, _) = cache.index.append(index.k, no_values);
        let index = DsaIndex::new(index.q, keys, index.weights)?;
        let lists = self.dsa.choose(&index)?;
        self.attend(x.dtype(), [q, k, v], lists)
    }

    /// Heads of queries, keys and values of tokens from a position on, and what the indexer makes of them.
    fn parts(
        &self,
        x: Tensor<3>,
        start: usize,
    ) -> Result<([Tensor<4>; 3], DsaIndex), TransformerError> {
        ensure_shape("x", x.dims(), [None, None, Some(self.d_model)], AXES)?;
        let seq = x.dims()[1];
        let positions = Positions::From(start);
        for rope in [&self.rope, &self.indexer.rope].into_iter().flatten() {
            positions.check(rope, seq)?;
        }
        let (q, k, weights) = self.indexer.parts(x.clone(), start)?;
        let index = DsaIndex::new(q, k, weights)?;
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
        Ok(([rotated(q)?, rotated(k)?, v], index))
    }

    fn attend(
        &self,
        dtype: DType,
        [q, k, v]: [Tensor<4>; 3],
        lists: KeyLists,
    ) -> Result<Tensor<3>, TransformerError> {
        let walk = match self.walk {
            true => ChoiceWalk::Auto,
            false => ChoiceWalk::Packed,
        };
        let options = AttentionOptions::default()
            .choice_walk(walk)
            .precision(self.precision.products());
        let context = self.dsa.attention(q, k, v, lists, options)?;
        let context = self.precision.merged(&self.output, context)?;
        let bias = self.output.bias.as_ref().map(Param::val);
        Ok(bias_activation(context, bias, Activation::None)?.cast(dtype))
    }
}
