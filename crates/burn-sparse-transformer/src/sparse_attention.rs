//! Attention over a pattern as a module without parameters, for models with their own projections.

use burn::config::Config;
use burn::module::{Content, DisplaySettings, Module, ModuleDisplay};
use burn::nn::{Dropout, DropoutConfig};
use burn::tensor::{Device, Tensor};
use burn_blocksparse::{
    AttentionOptions, AttentionTensors, BlockLayout, Pattern, SparseAttentionCall, alibi_slopes,
};

use crate::Precision;
use crate::dropout::{Seeds, training_dropout};
use crate::error::{Result, ensure_dropout, ensure_scores, or_panics};
use crate::layouts::{Layouts, Request};

/// Configuration of [`SparseAttention`].
///
/// A configuration whose pattern is a callback ([`Pattern::from_fn`]) works, but does not serialize.
#[derive(Config, Debug)]
#[must_use = "a configuration does nothing until `init`"]
pub struct SparseAttentionConfig {
    /// Pattern: which query attends to which key, per head.
    pub pattern: Pattern,
    /// Block size of the pattern: 8, 16, 32, 64 or 128.
    #[config(default = 32)]
    pub block_size: usize,
    /// Factor of the scores. Default: `1 / √head_dim`.
    pub scale: Option<f64>,
    /// Bounds the scores to ±`softcap` with a tanh before the softmax. Default: no bound.
    pub softcap: Option<f64>,
    /// True if scores get ALiBi's biases, `−slope · |distance|`, with the slopes of Press et al. (2022).
    #[config(default = false)]
    pub alibi: bool,
    /// Attention dropout probability in training, in `[0, 1)`.
    #[config(default = 0.0)]
    pub dropout: f64,
    /// Dtype of the attention. With [`Precision::Bf16`] its inputs are rounded to bf16; the output has the inputs' dtype.
    #[config(default = "Precision::F32")]
    pub precision: Precision,
}

impl SparseAttentionConfig {
    or_panics! {
        /// Creates the module.
        pub fn init(&self, device: &Device) -> SparseAttention;

        /// # Errors
        /// If `block_size` or a parameter of the pattern is out of range, `scale` is not finite, `softcap` is not positive, `dropout` is outside `[0, 1)`, or
        /// the device does not support `precision`.
        pub fn try_init {
            ensure_dropout(self.dropout)?;
            ensure_scores(self.scale, self.softcap)?;
            self.precision.check(device)?;
            let mut options = AttentionOptions::default().precision(self.precision.products());
            options.scale = self.scale;
            options.softcap = self.softcap;
            Ok(SparseAttention {
                dropout: DropoutConfig::new(self.dropout).init(),
                seeds: Seeds::default(),
                layouts: Layouts::of_any_heads(self.pattern.clone(), self.block_size)?,
                alibi: self.alibi,
                options,
                precision: self.precision,
            })
        }
    }
}

/// Softmax attention of queries to the keys that a [`Pattern`] allows, for a model with its own projections, rotations and KV cache. It replaces the lines
/// from `repeat_kv` to `softmax · v`. No parameters.
///
/// The last query is at the position of the last key: query `i` is at `i + seq_kv − seq_q`. So prompts, chunks of prompts and single tokens after a KV cache
/// attend to the same keys as in the whole sequence. Keys and values may have fewer heads than queries (GQA).
///
/// A layout is built once for each (heads, seq_q, seq_kv). Clones share layouts, and the 8 most recently used are cached
/// ([`keep_layouts`](Self::keep_layouts)). A cache that grows by a token needs a new layout, which takes time proportional to the kept blocks of one row, and
/// on a GPU also a launch plan. Decoding from pages needs none (`KvPool` and `paged_attention` of `burn-paged-attention`).
///
/// ```
/// use burn::tensor::{Device, Distribution, Tensor};
/// use burn_sparse_transformer::{Pattern, SparseAttentionConfig};
///
/// let device = Device::flex();
/// let attention = SparseAttentionConfig::new(Pattern::streaming(64, 4)).init(&device);
/// let random = |heads, seq| Tensor::<4>::random([1, heads, seq, 16], Distribution::Default, &device);
/// // A prompt of 100 tokens: 8 heads of queries, 2 of keys and values.
/// let (k, v) = (random(2, 100), random(2, 100));
/// let out = attention.forward(random(8, 100), k.clone(), v.clone());
/// assert_eq!(out.dims(), [1, 8, 100, 16]);
/// // The next token, after the KV cache has grown by it.
/// let k = Tensor::cat(vec![k, random(2, 1)], 2);
/// let v = Tensor::cat(vec![v, random(2, 1)], 2);
/// let out = attention.forward(random(8, 1), k, v);
/// assert_eq!(out.dims(), [1, 8, 1, 16]);
/// ```
///
/// Create it with [`SparseAttentionConfig`].
#[derive(Module, Debug)]
#[module(custom_display)]
pub struct SparseAttention {
    /// Attention dropout, active on a device with autodiff. Its masks are not drawn from the backend's generator but are a function of a seed, one for each
    /// call.
    pub dropout: Dropout,
    #[module(skip)]
    seeds: Seeds,
    #[module(skip)]
    layouts: Layouts,
    alibi: bool,
    #[module(skip)]
    options: AttentionOptions,
    #[module(skip)]
    precision: Precision,
}

impl SparseAttention {
    or_panics! {
        /// Computes attention of each query to the keys that its pattern allows. A query without allowed keys gets zeros.
        ///
        /// # Shapes
        /// - `q`: `[batch, heads, seq_q, head_dim]`
        /// - `k`: `[batch, kv_heads, seq_kv, head_dim]`, `kv_heads` a divisor of `heads`
        /// - `v`: `[batch, kv_heads, seq_kv, value_dim]`
        /// - returns `[batch, heads, seq_q, value_dim]`, in the inputs' dtype
        pub fn forward(&self, q: Tensor<4>, k: Tensor<4>, v: Tensor<4>) -> Tensor<4>;

        /// # Errors
        /// If shapes, dtypes or devices do not match, the pattern has no layout for these heads and lengths, or the device cannot run the call.
        pub fn try_forward { self.try_forward_with(q, k, v, AttentionTensors::default()) }
    }

    or_panics! {
        /// [`Self::forward`] with sinks or biases, which are parameters of the surrounding model.
        pub fn forward_with(&self, q: Tensor<4>, k: Tensor<4>, v: Tensor<4>, tensors: AttentionTensors) -> Tensor<4>;

        /// # Errors
        /// Those of [`Self::try_forward`]; also if a tensor does not match the others.
        pub fn try_forward_with {
            let mut tensors = tensors;
            let [_, heads, seq_q, _] = q.dims();
            let [_, _, seq_kv, _] = k.dims();
            let layout = self.layout(heads, seq_q, seq_kv)?;
            let dtype = q.dtype();
            let [q, k, v] = [q, k, v].map(|x| {
                let dtype = self.precision.dtype(x.dtype());
                x.cast(dtype)
            });
            tensors.bias = (tensors.bias).map(|bias| {
                let dtype = self.precision.dtype(bias.dtype());
                bias.cast(dtype)
            });
            let mut options = self.options.clone();
            if self.alibi {
                options = options.alibi(alibi_slopes(heads));
            }
            if q.device().is_autodiff() {
                options.dropout = training_dropout(&self.dropout, || self.seeds.next());
            }
            let call = SparseAttentionCall::new(q, k, v, &layout);
            let out = call.tensors(tensors).options(options).run()?.out;
            Ok(out.cast(dtype))
        }
    }

    /// Returns the layout that [`Self::forward`] uses for these numbers of query heads, queries and keys.
    ///
    /// # Errors
    /// If the pattern has no layout for them.
    pub fn layout(&self, heads: usize, seq_q: usize, seq_kv: usize) -> Result<BlockLayout> {
        self.layouts
            .get(&Request::new(seq_q, seq_kv).with_heads(heads))
    }

    /// Returns the pattern.
    pub fn pattern(&self) -> &Pattern {
        self.layouts.pattern()
    }

    /// Returns the block size of the pattern.
    pub fn block_size(&self) -> usize {
        self.layouts.block_size()
    }

    /// Caches the `most` recently used layouts, in all clones. The default is 8. A server whose requests have more lengths than that rebuilds layouts again
    /// and again. 0 keeps none.
    pub fn keep_layouts(&self, most: usize) {
        self.layouts.keep(most);
    }
}

impl ModuleDisplay for SparseAttention {
    fn custom_settings(&self) -> Option<DisplaySettings> {
        DisplaySettings::new()
            .with_new_line_after_attribute(false)
            .optional()
    }

    fn custom_content(&self, content: Content) -> Option<Content> {
        content
            .add("pattern", &self.pattern().to_string())
            .add("block_size", &self.block_size())
            .optional()
    }
}
