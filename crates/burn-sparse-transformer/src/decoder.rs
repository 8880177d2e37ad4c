//! Models whose attention the caller computes, so that they decode from caches that this crate does not know.

pub use crate::heads::Positions;

use burn::module::Module;
use burn::tensor::{Int, Tensor};

use crate::block::Pass;
use crate::error::Result;
use crate::stream::Stream;
use crate::{SparseMhaInput, SparseMultiHeadAttention, SparseTransformer};

/// Callback with which a [`Decoder`] runs each layer's attention. It gets the layer's index, its attention and its input, `[batch, seq, d_model]`, and
/// returns the heads' outputs, `[batch, heads, seq, d_v]`.
pub type Attend<'a> =
    dyn FnMut(usize, &SparseMultiHeadAttention, Tensor<3>) -> Result<Tensor<4>> + 'a;

/// Model that leaves its attention to the caller: dense, from a cache, or from the pages of `burn-paged-attention`, which decodes, evicts and generates text
/// with it.
///
/// ```
/// use burn::module::Module;
/// use burn::nn::{Embedding, EmbeddingConfig, RmsNorm, RmsNormConfig};
/// use burn::tensor::{Device, Int, Tensor};
/// use burn_sparse_transformer::decoder::{Attend, Decoder, Positions};
/// use burn_sparse_transformer::{Pattern, SparseMhaCache};
/// use burn_sparse_transformer::{SparseMultiHeadAttention, SparseMultiHeadAttentionConfig, TransformerError};
///
/// #[derive(Module, Debug)]
/// struct Model {
///     embed: Embedding,
///     layers: Vec<(RmsNorm, SparseMultiHeadAttention)>,
/// }
///
/// impl Decoder for Model {
///     fn attentions(&self) -> Vec<&SparseMultiHeadAttention> {
///         self.layers.iter().map(|(_, attention)| attention).collect()
///     }
///
///     fn hidden(&self, tokens: Tensor<2, Int>, _: &Positions, attend: &mut Attend) -> Result<Tensor<3>, TransformerError> {
///         let mut x = self.embed.forward(tokens);
///         for (layer, (norm, attention)) in self.layers.iter().enumerate() {
///             let heads = attend(layer, attention, norm.forward(x.clone()))?;
///             x = x + attention.output_projection(heads)?;
///         }
///         Ok(x)
///     }
///
///     fn logits(&self, hidden: Tensor<3>) -> Result<Tensor<3>, TransformerError> {
///         Ok(hidden.matmul(self.embed.weight.val().transpose().unsqueeze()))
///     }
///
///     fn vocab_size(&self) -> usize {
///         256
///     }
/// }
///
/// let device = Device::flex();
/// let attention = SparseMultiHeadAttentionConfig::new(32, 4, Pattern::causal());
/// let model = Model {
///     embed: EmbeddingConfig::new(256, 32).init(&device),
///     layers: (0..2).map(|_| (RmsNormConfig::new(32).init(&device), attention.init(&device))).collect(),
/// };
/// let tokens = Tensor::<2, Int>::from_data([[84, 104, 101]], &device);
/// let whole = model.hidden(tokens.clone(), &Positions::From(0), &mut |_, attention, x| attention.forward_heads(x))?;
/// let mut caches = vec![SparseMhaCache::new(); 2];
/// for at in 0..3 {
///     let token = tokens.clone().narrow(1, at, 1);
///     let attend = &mut |layer: usize, attention: &SparseMultiHeadAttention, x| attention.forward_heads_cache(x, &mut caches[layer]);
///     let row = model.hidden(token, &Positions::From(at), attend)?;
///     row.into_data().assert_approx_eq::<f32>(&whole.clone().narrow(1, at, 1).into_data(), Default::default());
/// }
/// # Ok::<(), TransformerError>(())
/// ```
pub trait Decoder: Module {
    /// Returns the attention of its layers, first to last.
    fn attentions(&self) -> Vec<&SparseMultiHeadAttention>;

    /// Returns the output of the last layer, `[batch, seq, d_model]`, for tokens `[batch, seq]` at positions, which only models with position embeddings
    /// read. Calls `attend` once for each layer, in order.
    fn hidden(
        &self,
        tokens: Tensor<2, Int>,
        positions: &Positions,
        attend: &mut Attend,
    ) -> Result<Tensor<3>>;

    /// Returns the logits `[batch, seq, vocab_size]` of rows of [`Self::hidden`]'s output.
    fn logits(&self, hidden: Tensor<3>) -> Result<Tensor<3>>;

    /// Returns the size of the vocabulary.
    fn vocab_size(&self) -> usize;

    /// Returns the number of positions, unless the layers' rotation tables determine it.
    fn max_positions(&self) -> Option<usize> {
        None
    }
}

impl Decoder for SparseTransformer {
    fn attentions(&self) -> Vec<&SparseMultiHeadAttention> {
        self.blocks.iter().map(|block| &block.mha).collect()
    }

    fn hidden(
        &self,
        tokens: Tensor<2, Int>,
        positions: &Positions,
        attend: &mut Attend,
    ) -> Result<Tensor<3>> {
        let mut stream = Stream::new(self.embed_at(tokens, positions)?);
        for (layer, block) in self.blocks.iter().enumerate() {
            let attend = |input: SparseMhaInput| {
                let heads = attend(layer, &block.mha, input.query)?;
                block.mha.output_product(heads)
            };
            stream = block.residual(stream, attend, Pass::default())?;
        }
        stream.finish()
    }

    fn logits(&self, hidden: Tensor<3>) -> Result<Tensor<3>> {
        self.head_logits(Stream::new(hidden))
    }

    fn vocab_size(&self) -> usize {
        let [_, vocab] = self.output.weight.dims();
        vocab
    }

    fn max_positions(&self) -> Option<usize> {
        Some(self.context())
    }
}
