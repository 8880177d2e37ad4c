use burn::config::Config;
use burn::module::Module;
use burn::nn::transformer::{TransformerEncoder, TransformerEncoderConfig};
use burn::tensor::{Bool, Device, Tensor};
use burn_blocksparse::Pattern;

use crate::error::{Result, ensure, ensure_above_zero, ensure_dropout, ensure_positive, or_panics};
use crate::input::Padding;
use crate::layouts::Layouts;
use crate::stream::Stream;
use crate::{
    Precision, SparseMhaCache, SparseMultiHeadAttentionConfig, SparseTransformerEncoderLayer,
};

/// Configuration of [`SparseTransformerEncoder`].
#[derive(Config, Debug)]
#[must_use = "a configuration does nothing until `init`"]
pub struct SparseTransformerEncoderConfig {
    /// burn-nn's configuration: everything but the pattern.
    pub encoder: TransformerEncoderConfig,
    /// Pattern: which query attends to which key, per head.
    pub pattern: Pattern,
    /// Block size of the pattern: 8, 16, 32, 64 or 128.
    #[config(default = 32)]
    pub block_size: usize,
}

impl SparseTransformerEncoderConfig {
    or_panics! {
        /// Creates the module, initialised like burn-nn's.
        pub fn init(&self, device: &Device) -> SparseTransformerEncoder;

        /// # Errors
        /// Those of [`SparseTransformerEncoder::from_dense`]; also if a size is 0 or the heads do not divide the width, `dropout` is outside `[0, 1)`, or
        /// `layer_norm_eps` is not positive.
        pub fn try_init {
            let encoder = &self.encoder;
            let (d_model, n_heads) = (encoder.d_model, encoder.n_heads);
            SparseMultiHeadAttentionConfig::new(d_model, n_heads, self.pattern.clone()).validate()?;
            ensure_positive("d_ff", encoder.d_ff)?;
            let (dropout, epsilon) = (encoder.dropout, encoder.layer_norm_eps);
            ensure_dropout(dropout)?;
            ensure_above_zero("layer_norm_eps", epsilon)?;
            let dense = encoder.init(device);
            SparseTransformerEncoder::from_dense(&dense, self.pattern.clone(), self.block_size)
        }
    }
}

/// burn-nn's `TransformerEncoder` with a pattern instead of the mask: the same layers, post-norm or pre-norm, with the same parameters under the same names,
/// so that its records load.
///
/// Create it with [`SparseTransformerEncoderConfig`], or from a module with [`Self::from_dense`].
#[derive(Module, Debug)]
pub struct SparseTransformerEncoder {
    /// Layers, first to last.
    pub layers: Vec<SparseTransformerEncoderLayer>,
}

/// Input of [`SparseTransformerEncoder`].
#[derive(Clone, Debug)]
#[must_use = "an input does nothing until it is passed to a layer"]
pub struct SparseTransformerEncoderInput {
    tensor: Tensor<3>,
    padding: Option<Padding>,
}

impl SparseTransformerEncoderInput {
    /// # Shapes
    /// - `tensor`: `[batch, seq, d_model]`
    pub fn new(tensor: Tensor<3>) -> Self {
        Self {
            tensor,
            padding: None,
        }
    }

    /// Sets which positions are padding: see [`SparseMhaInput::mask_pad`](crate::SparseMhaInput::mask_pad). The mask is read from its device once.
    ///
    /// # Shapes
    /// - `mask`: `[batch, seq]`, `true` = padding
    pub fn mask_pad(mut self, mask: Tensor<2, Bool>) -> Self {
        self.padding = Some(Padding::Mask(Box::new(mask)));
        self
    }

    /// Sets padding at the end: batch entry `b` has `lengths[b]` real positions; all later ones are padding.
    pub fn lengths(mut self, lengths: impl IntoIterator<Item = usize>) -> Self {
        self.padding = Some(Padding::Lengths(lengths.into_iter().collect()));
        self
    }
}

impl SparseTransformerEncoder {
    /// Converts burn-nn's encoder: shares its parameters and adds a pattern. With [`Pattern::dense`] the output is the same up to rounding, and dropout has
    /// the same probabilities.
    ///
    /// # Errors
    /// Those of [`SparseMultiHeadAttention::from_dense`](crate::SparseMultiHeadAttention::from_dense); also if there are no layers.
    pub fn from_dense(
        encoder: &TransformerEncoder,
        pattern: Pattern,
        block_size: usize,
    ) -> Result<Self> {
        ensure_positive("n_layers", encoder.layers.len())?;
        let layouts = Layouts::new(pattern, encoder.n_heads, block_size)?;
        let layers = encoder.layers.iter();
        Ok(Self {
            layers: layers
                .map(|layer| SparseTransformerEncoderLayer::from_dense(layer, layouts.clone()))
                .collect::<Result<_, _>>()?,
        })
    }

    /// Returns the same module in another precision. With [`Precision::Bf16`] products and attention are in bf16; parameters, the stream and the norms'
    /// statistics are unchanged.
    ///
    /// # Errors
    /// [`TransformerError::Precision`](crate::TransformerError::Precision) if the parameters' device does not support it.
    pub fn with_precision(mut self, precision: Precision) -> Result<Self> {
        for layer in &mut self.layers {
            precision.check(&layer.norm_1.gamma.device())?;
            layer.set_precision(precision);
        }
        Ok(self)
    }

    /// Returns the same module with another pattern in every layer.
    ///
    /// # Errors
    /// If the pattern does not match the heads and the block size.
    pub fn with_pattern(mut self, pattern: Pattern, block_size: usize) -> Result<Self> {
        let n_heads = self.layers.first().map_or(1, |layer| layer.mha.n_heads());
        let layouts = Layouts::new(pattern, n_heads, block_size)?;
        for layer in &mut self.layers {
            layer.mha = layer.mha.clone().with_layouts(layouts.clone());
        }
        Ok(self)
    }

    or_panics! {
        /// Applies the layers.
        ///
        /// # Shapes
        /// - input and output: `[batch, seq, d_model]`
        pub fn forward(&self, input: SparseTransformerEncoderInput) -> Tensor<3>;

        /// # Errors
        /// Those of [`SparseMultiHeadAttention::try_forward`](crate::SparseMultiHeadAttention::forward).
        pub fn try_forward {
            let mut stream = Stream::new(input.tensor);
            let padding = input.padding.map(Padding::read);
            for layer in &self.layers {
                stream = layer.residual(stream, |mut input| {
                    input.padding = padding.clone();
                    layer.mha.forward_projected(input)
                })?;
            }
            stream.finish()
        }
    }

    or_panics! {
        /// Applies the layers to several sequences concatenated without padding.
        ///
        /// # Shapes
        /// - `x` and output: `[1, total, d_model]`
        /// - `cu_seqlens`: see [`SparseMultiHeadAttention::forward_packed`](crate::SparseMultiHeadAttention::forward_packed)
        pub fn forward_packed(&self, x: Tensor<3>, cu_seqlens: &[usize]) -> Tensor<3>;

        /// # Errors
        /// Those of [`SparseMultiHeadAttention::try_forward_packed`](crate::SparseMultiHeadAttention::forward_packed).
        pub fn try_forward_packed {
            let stream = (self.layers.iter()).try_fold(Stream::new(x), |stream, layer| {
                layer.residual(stream, |input| {
                    layer.mha.project_seen(layer.mha.packed_context(input, cu_seqlens)?)
                })
            });
            stream?.finish()
        }
    }

    or_panics! {
        /// Applies the layers to new positions, which also attend to those in `caches`: one for each layer, from [`Self::new_caches`].
        ///
        /// # Shapes
        /// - `x` and output: `[batch, new, d_model]`
        pub fn forward_cache(&self, x: Tensor<3>, caches: &mut [SparseMhaCache]) -> Tensor<3>;

        /// # Errors
        /// Those of [`SparseMultiHeadAttention::try_forward_cache`](crate::SparseMultiHeadAttention::forward_cache); the caches are unchanged then.
        pub fn try_forward_cache { self.cached(x, caches, false) }
    }

    or_panics! {
        /// [`Self::forward_cache`] for the last positions of a sequence, which may end anywhere.
        pub fn forward_cache_last(&self, x: Tensor<3>, caches: &mut [SparseMhaCache]) -> Tensor<3>;

        pub fn try_forward_cache_last { self.cached(x, caches, true) }
    }

    fn cached(&self, x: Tensor<3>, caches: &mut [SparseMhaCache], last: bool) -> Result<Tensor<3>> {
        ensure! { caches.len() == self.layers.len() =>
        "caches", format!("{}, one for each layer", self.layers.len()), caches.len(); }
        let before: Vec<usize> = caches.iter().map(SparseMhaCache::len).collect();
        let mut layers = self.layers.iter().zip(caches.iter_mut());
        let result = layers
            .try_fold(Stream::new(x), |stream, (layer, cache)| {
                layer.residual(stream, |input| {
                    (layer.mha).project_seen(layer.mha.cached_context(input, cache, last)?)
                })
            })
            .and_then(Stream::finish);
        if result.is_err() {
            for (cache, len) in caches.iter_mut().zip(before) {
                cache.truncate(len);
            }
        }
        result
    }

    /// Returns empty caches for [`Self::forward_cache`].
    pub fn new_caches(&self) -> Vec<SparseMhaCache> {
        vec![SparseMhaCache::new(); self.layers.len()]
    }
}
