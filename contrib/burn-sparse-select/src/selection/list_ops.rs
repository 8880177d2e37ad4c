//! The backend trait of queries that walk lists of their own.

use burn::backend::tensor::{FloatTensor, IntTensor};
use burn::backend::{Backend, ExtensionType, backend_extension};

use burn_blocksparse::AttentionOptions;
use burn_blocksparse::internal::values::{LayoutTensors, OutputGrads};

/// Sizes of lists that are in none of their shapes.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub struct BlockIndicesCall {
    /// Keys of a block.
    pub block: usize,
    /// Places of a tile of queries.
    pub tile: usize,
    /// The share that the lists of adjacent queries are expected to have in common, from 0 to 1.
    pub overlap: f64,
}

impl BlockIndicesCall {
    pub(crate) fn new(block: usize, tile: usize, overlap: f64) -> Self {
        Self {
            block,
            tile,
            overlap,
        }
    }
}

/// What attention over a layout and lists takes.
#[derive(ExtensionType, Clone, Debug)]
#[extension_type(fusion: cfg(feature = "fusion"))]
#[non_exhaustive]
pub struct BlockIndicesInputs<B: Backend> {
    /// `[batch, heads, seq_q, head_dim]`
    pub q: FloatTensor<B>,
    /// `[batch, kv_heads, seq_kv, head_dim]`
    pub k: FloatTensor<B>,
    /// `[batch, kv_heads, seq_kv, value_dim]`
    pub v: FloatTensor<B>,
    /// The blocks that each query sees whole beside the layout: i32 `[batch, kv_heads, seq_q, most]`, negative for none.
    pub blocks: IntTensor<B>,
    /// The same by blocks, as [`SelectedBlocks`](crate::selection::SelectedBlocks) has them: the query at each place, i32 `[batch, kv_heads, places]`,
    pub queries: IntTensor<B>,
    /// and the block of each tile of places, i32 `[batch, kv_heads, tiles]`.
    pub tile_blocks: IntTensor<B>,
}

/// Out and lse over all keys.
#[derive(ExtensionType, Clone, Debug)]
#[extension_type(fusion: cfg(feature = "fusion"))]
#[non_exhaustive]
pub struct BlockIndicesOutput<B: Backend> {
    /// `[batch, heads, seq_q, value_dim]`, in the inputs' dtype.
    pub out: FloatTensor<B>,
    /// `[batch, heads, seq_q]`, f32.
    pub lse: FloatTensor<B>,
}

/// What the backward pass gets from the forward pass.
#[derive(ExtensionType, Clone, Debug)]
#[extension_type(fusion: cfg(feature = "fusion"))]
#[non_exhaustive]
pub struct BlockIndicesSaved<B: Backend> {
    /// Its inputs.
    #[extension_type]
    pub inputs: BlockIndicesInputs<B>,
    /// Its output.
    #[extension_type]
    pub output: BlockIndicesOutput<B>,
}

/// Gradients, each of its input's shape and dtype.
#[derive(ExtensionType, Clone, Debug)]
#[extension_type(fusion: cfg(feature = "fusion"))]
#[non_exhaustive]
pub struct BlockIndicesGrads<B: Backend> {
    /// `[batch, heads, seq_q, head_dim]`
    pub q: FloatTensor<B>,
    /// `[batch, kv_heads, seq_kv, head_dim]`
    pub k: FloatTensor<B>,
    /// `[batch, kv_heads, seq_kv, value_dim]`
    pub v: FloatTensor<B>,
}

/// Attention over a layout and, beside it, over lists, as a backend operation. It is asked for only where a plan of kernels takes the call: elsewhere the same
/// is composed of other operations.
#[backend_extension(
    Flex: cfg(feature = "flex"),
    NdArray: cfg(feature = "ndarray"),
    Cube: cfg(feature = "cube"),
    Autodiff: cfg(feature = "autodiff"),
    Fusion: cfg(feature = "fusion"),
)]
pub trait BlockIndicesOps: Backend {
    /// The forward pass.
    #[fusion(meta = meta::forward)]
    fn listed_attention(
        #[extension_type] inputs: BlockIndicesInputs<Self>,
        #[extension_type] layout: LayoutTensors<Self>,
        options: AttentionOptions,
        call: BlockIndicesCall,
    ) -> BlockIndicesOutput<Self> {
        let _ = (inputs, layout, options, call);
        unimplemented!("lists are walked only where a plan of kernels says so")
    }

    /// The backward pass: gradients of a loss whose gradients with respect to the outputs are `grads`.
    #[fusion(meta = meta::backward)]
    fn listed_attention_backward(
        #[extension_type] saved: BlockIndicesSaved<Self>,
        #[extension_type] grads: OutputGrads<Self>,
        #[extension_type] layout: LayoutTensors<Self>,
        options: AttentionOptions,
        call: BlockIndicesCall,
    ) -> BlockIndicesGrads<Self> {
        let _ = (saved, grads, layout, options, call);
        unimplemented!("lists are walked only where a plan of kernels says so")
    }
}

/// Output shapes and dtypes for fusion.
#[cfg(feature = "fusion")]
mod meta {
    use burn::backend::fusion::custom::TensorSpec;

    use super::*;
    use burn_blocksparse::internal::dtype::accumulate_in;
    use burn_blocksparse::internal::values::{LayoutTensorsMetadata, OutputGradsMetadata};

    pub fn forward(
        inputs: &BlockIndicesInputsMetadata,
        _layout: &LayoutTensorsMetadata,
        _options: &AttentionOptions,
        _call: &BlockIndicesCall,
    ) -> BlockIndicesOutputMetadata {
        let [batch, heads, seq_q, _] = inputs.q.shape.dims::<4>();
        let value_dim = inputs.v.shape[3];
        let sums = accumulate_in(inputs.q.dtype.into()).into();
        BlockIndicesOutputMetadata {
            out: TensorSpec::new([batch, heads, seq_q, value_dim].into(), inputs.q.dtype),
            lse: TensorSpec::new([batch, heads, seq_q].into(), sums),
        }
    }

    pub fn backward(
        saved: &BlockIndicesSavedMetadata,
        _grads: &OutputGradsMetadata,
        _layout: &LayoutTensorsMetadata,
        _options: &AttentionOptions,
        _call: &BlockIndicesCall,
    ) -> BlockIndicesGradsMetadata {
        BlockIndicesGradsMetadata {
            q: saved.inputs.q.clone(),
            k: saved.inputs.k.clone(),
            v: saved.inputs.v.clone(),
        }
    }
}
