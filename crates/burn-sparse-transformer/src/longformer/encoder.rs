use burn::config::Config;
use burn::module::Module;
use burn::nn::{
    Dropout, DropoutConfig, Embedding, EmbeddingConfig, LayerNorm, LayerNormConfig, Linear,
    LinearConfig,
};
use burn::tensor::{Bool, Device, Int, Tensor};
use burn_fused_ops::{Activation, MlpOptions, MlpParams, embedding, mlp};

use super::{LongformerAttention, LongformerAttentionConfig, LongformerInput};
use crate::error::{
    Result, ensure, ensure_above_zero, ensure_dropout, ensure_positive, ensure_shape, or_panics,
};
use crate::stream::{Projected, Stream};

/// Configuration of [`LongformerEncoder`].
#[derive(Config, Debug)]
#[must_use = "a configuration does nothing until `init`"]
pub struct LongformerEncoderConfig {
    /// Attention of every layer: width, heads and pattern.
    pub attention: LongformerAttentionConfig,
    /// Patterns of the layers, one for each, instead of `attention`'s. Default: `attention`'s in all layers.
    pub patterns: Option<Vec<crate::Pattern>>,
    /// Size of the vocabulary. Required: 0 is an error.
    #[config(default = 0)]
    pub vocab_size: usize,
    /// Longest sequence, in positions. Required: 0 is an error.
    #[config(default = 0)]
    pub context: usize,
    /// Number of layers. Required: 0 is an error.
    #[config(default = 0)]
    pub n_layers: usize,
    /// Number of token types.
    #[config(default = 1)]
    pub token_types: usize,
    /// Width of the feed-forward networks. Default: `4 · d_model`.
    pub d_ff: Option<usize>,
    /// Probability that an element of the embeddings or of a residual branch is dropped while training.
    #[config(default = 0.1)]
    pub dropout: f64,
    /// Term added to the variance in the layer norms.
    #[config(default = 1e-5)]
    pub layer_norm_eps: f64,
}

impl LongformerEncoderConfig {
    or_panics! {
        /// Creates the encoder, initialised like burn-nn's layers.
        pub fn init(&self, device: &Device) -> LongformerEncoder;

        /// # Errors
        /// Those of [`LongformerAttentionConfig::init`]; also if a size is 0, the number of `patterns` is not that of layers, `dropout` is outside `[0, 1)`
        /// or `layer_norm_eps` is not positive.
        pub fn try_init {
            let d_model = self.attention.attention.d_model;
            let d_ff = self.d_ff.unwrap_or(d_model.saturating_mul(4));
            for (argument, size) in [
                ("vocab_size", self.vocab_size),
                ("context", self.context),
                ("n_layers", self.n_layers),
                ("token_types", self.token_types),
                ("d_ff", d_ff),
            ] {
                ensure_positive(argument, size)?;
            }
            ensure_dropout(self.dropout)?;
            ensure_above_zero("layer_norm_eps", self.layer_norm_eps)?;
            let patterns = self.patterns.as_ref();
            ensure! { patterns.is_none_or(|patterns| patterns.len() == self.n_layers) =>
                "patterns", format!("{}, one for each layer", self.n_layers), patterns.map_or(0, Vec::len); }
            let table = |rows| EmbeddingConfig::new(rows, d_model).init(device);
            let norm = LayerNormConfig::new(d_model).with_epsilon(self.layer_norm_eps);
            let dropout = DropoutConfig::new(self.dropout);
            let layer = |layer: usize| {
                let mut attention = self.attention.clone();
                if let Some(patterns) = patterns {
                    attention.attention.pattern = patterns[layer].clone();
                }
                Ok(LongformerLayer {
                    attention: attention.try_init(device)?,
                    norm_1: norm.init(device),
                    linear_inner: LinearConfig::new(d_model, d_ff).init(device),
                    linear_outer: LinearConfig::new(d_ff, d_model).init(device),
                    norm_2: norm.init(device),
                    dropout: dropout.init(),
                    layer_norm_eps: self.layer_norm_eps,
                })
            };
            Ok(LongformerEncoder {
                token_embedding: table(self.vocab_size),
                position_embedding: table(self.context),
                type_embedding: table(self.token_types),
                norm: norm.init(device),
                layers: (0..self.n_layers).map(layer).collect::<Result<_>>()?,
                dropout: dropout.init(),
                layer_norm_eps: self.layer_norm_eps,
            })
        }
    }
}

/// Longformer's encoder (Beltagy et al., 2020): embeddings of tokens, positions and types, and post-norm layers with [`LongformerAttention`].
///
/// ```text
/// x_0 = norm(token + position + type)
/// a_k = norm_1(x_k + attention(x_k))
/// x_{k+1} = norm_2(a_k + W_2 gelu(W_1 a_k + b_1) + b_2)
/// ```
///
/// Trained weights of `transformers` load with `weights::KeyMap::longformer`, feature `store`. Create it with [`LongformerEncoderConfig`].
#[derive(Module, Debug)]
pub struct LongformerEncoder {
    /// Token embeddings, `[vocab_size, d_model]`.
    pub token_embedding: Embedding,
    /// Position embeddings, `[context, d_model]`.
    pub position_embedding: Embedding,
    /// Type embeddings, `[token_types, d_model]`.
    pub type_embedding: Embedding,
    /// Norm of the sum of the embeddings.
    pub norm: LayerNorm,
    /// Layers, first to last.
    pub layers: Vec<LongformerLayer>,
    /// Dropout of the embeddings.
    pub dropout: Dropout,
    layer_norm_eps: f64,
}

/// Layer of [`LongformerEncoder`].
#[derive(Module, Debug)]
pub struct LongformerLayer {
    /// Self-attention.
    pub attention: LongformerAttention,
    /// Norm after the attention.
    pub norm_1: LayerNorm,
    /// Projection from `d_model` to `d_ff`, followed by GELU (with erf).
    pub linear_inner: Linear,
    /// Projection from `d_ff` to `d_model`.
    pub linear_outer: Linear,
    /// Norm after the feed-forward network.
    pub norm_2: LayerNorm,
    /// Dropout at the end of both residual branches.
    pub dropout: Dropout,
    layer_norm_eps: f64,
}

/// Input of [`LongformerEncoder`].
#[derive(Clone, Debug)]
#[must_use = "an input does nothing until it is passed to a module"]
pub struct LongformerEncoderInput {
    tokens: Tensor<2, Int>,
    types: Option<Tensor<2, Int>>,
    global: Option<Vec<Vec<usize>>>,
    padding: Option<Tensor<2, Bool>>,
}

impl LongformerEncoderInput {
    /// # Shapes
    /// - `tokens`: `[batch, seq]`
    pub fn new(tokens: Tensor<2, Int>) -> Self {
        Self {
            tokens,
            types: None,
            global: None,
            padding: None,
        }
    }

    blocksparse::setters! {
        /// Sets the tokens' types, `[batch, seq]`; by default all are 0.
        types: Some(Tensor<2, Int>),
        /// Sets which positions are padding. It must be at the end, since positions are counted from the first one.
        ///
        /// # Shapes
        /// - `mask`: `[batch, seq]`, `true` = padding
        mask_pad => padding: Some(Tensor<2, Bool>),
    }

    /// Sets the positions of the global tokens of each batch entry.
    pub fn global_per_entry(mut self, tokens: impl IntoIterator<Item = Vec<usize>>) -> Self {
        self.global = Some(tokens.into_iter().collect());
        self
    }
}

impl LongformerEncoder {
    or_panics! {
        /// Applies the embeddings and the layers.
        ///
        /// # Shapes
        /// - output: `[batch, seq, d_model]`, undefined at padded positions
        pub fn forward(&self, input: LongformerEncoderInput) -> Tensor<3>;

        /// # Errors
        /// If `seq` is 0 or above the context, or the types' shape is not the tokens'; also those of [`LongformerAttention::forward`].
        pub fn try_forward {
            let [batch, seq] = input.tokens.dims();
            let [context, _] = self.position_embedding.weight.dims();
            ensure! { (1..=context).contains(&seq) =>
                "tokens' seq", format!("between 1 and {context}, the context"), seq; }
            let tokens = embedding(self.token_embedding.weight.val(), input.tokens)?;
            let positions = self.position_embedding.weight.val().narrow(0, 0, seq);
            let types = match input.types {
                Some(types) => {
                    let expected = [Some(batch), Some(seq)];
                    ensure_shape("types", types.dims(), expected, ["batch", "seq"])?;
                    embedding(self.type_embedding.weight.val(), types)?
                }
                None => (self.type_embedding.weight.val())
                    .narrow(0, 0, 1)
                    .unsqueeze(),
            };
            let x = tokens + positions.unsqueeze::<3>() + types;
            let dtype = x.dtype().into();
            let (_, x) = Stream::new(x).norm(&self.norm, self.layer_norm_eps, dtype)?;
            let mut x = self.dropout.forward(x);
            for layer in &self.layers {
                let mut attended = LongformerInput::new(x);
                if let Some(global) = &input.global {
                    attended = attended.global_per_entry(global.clone());
                }
                if let Some(padding) = &input.padding {
                    attended = attended.mask_pad(padding.clone());
                }
                x = layer.try_forward(attended)?;
            }
            Ok(x)
        }
    }
}

impl LongformerLayer {
    or_panics! {
        /// Applies the layer.
        ///
        /// # Shapes
        /// - input and output: `[batch, seq, d_model]`
        pub fn forward(&self, input: LongformerInput) -> Tensor<3>;

        pub fn try_forward {
            let x = input.tensor().clone();
            let attended = self.attention.try_forward(input)?.context;
            let x = self.add(x, attended, None, &self.norm_1)?;
            let mut params = MlpParams::new(
                self.linear_inner.weight.val(),
                self.linear_outer.weight.val(),
            );
            params.bias = self.linear_inner.bias.as_ref().map(|bias| bias.val());
            let options = MlpOptions::default().dtype(x.dtype().into());
            let branch = mlp(x.clone(), params, Activation::GeluErf, &options)?;
            let bias = self.linear_outer.bias.as_ref().map(|bias| bias.val());
            self.add(x, branch, bias, &self.norm_2)
        }
    }

    /// Adds a branch to the stream and norms the sum.
    fn add(
        &self,
        x: Tensor<3>,
        branch: Tensor<3>,
        bias: Option<Tensor<1>>,
        norm: &LayerNorm,
    ) -> Result<Tensor<3>> {
        let dtype = x.dtype().into();
        // Dropout applies to the branch with its bias.
        let branch = match bias {
            Some(bias) => branch + bias.unsqueeze(),
            None => branch,
        };
        let branch = Projected::new(self.dropout.forward(branch), None);
        let stream = Stream::new(x).push(branch, None)?;
        let (_, x) = stream.norm(norm, self.layer_norm_eps, dtype)?;
        Ok(x)
    }
}
