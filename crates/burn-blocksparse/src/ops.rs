//! The backend trait and the values that cross it.
//!
//! Every backend serves [`BlockSparseOps`]; the default bodies are the reference implementation in
//! Burn primitives. Inputs and outputs are structs, so that an option that brings a tensor of its own
//! (a bias, sink logits) becomes a field, not another signature.

use blocksparse::BlockLayout;
use burn::backend::tensor::{BoolTensor, FloatTensor, IntTensor};
use burn::backend::{Backend, ExtensionType, backend_extension};

use crate::{AttentionOptions, reference};

/// An optional float tensor.
#[derive(ExtensionType, Clone, Debug)]
#[extension_type(fusion: cfg(feature = "fusion"))]
pub enum MaybeFloat<B: Backend> {
    /// The tensor.
    Some(FloatTensor<B>),
    /// No tensor.
    None,
}

/// The tensors attention is differentiated by.
#[derive(ExtensionType, Clone, Debug)]
#[extension_type(fusion: cfg(feature = "fusion"))]
pub struct AttentionInputs<B: Backend> {
    /// `[batch, heads, seq_q, head_dim]`
    pub q: FloatTensor<B>,
    /// `[batch, kv_heads, seq_kv, head_dim]`
    pub k: FloatTensor<B>,
    /// `[batch, kv_heads, seq_kv, value_dim]`
    pub v: FloatTensor<B>,
    /// Added to the scores: `[batch or 1, heads or 1, seq_q or 1, seq_kv]`, in the others' dtype.
    #[extension_type]
    pub bias: MaybeFloat<B>,
    /// A bias of each distance: `[heads or 1, 2 · reach + 1]`, in the dtype of sums.
    #[extension_type]
    pub relative_bias: MaybeFloat<B>,
}

/// The tensor that chooses the blocks of a layout, contiguous or not.
#[derive(ExtensionType, Clone, Debug)]
#[extension_type(fusion: cfg(feature = "fusion"))]
pub enum BlockChoice<B: Backend> {
    /// None: the host's description lists the blocks.
    Listed,
    /// `[batch or 1, heads or 1, q_blocks, kv_blocks]`: whether a block is chosen.
    Mask(BoolTensor<B>),
    /// `[batch or 1, heads or 1, q_blocks, most]`, i32: the key blocks that are chosen, or −1.
    Indices(IntTensor<B>),
    /// `[batch or 1, heads or 1, q_blocks, kv_blocks]`, f32: the highest are chosen.
    Scores(FloatTensor<B>),
}

/// A layout as backends see it: the host's description and what of it lives on the device.
/// Never on an autodiff device.
#[derive(ExtensionType, Clone, Debug)]
#[extension_type(fusion: cfg(feature = "fusion"))]
pub struct LayoutTensors<B: Backend> {
    /// The pairs that are *not* computed, for each mask of the layout's table:
    /// `[masks, block_size · block_size]`, row-major, Burn's sense (`true` = masked). A single element where
    /// kernels run: they have their own form of it.
    pub blocked: BoolTensor<B>,
    /// What chooses the blocks of a layout that is made on the device.
    #[extension_type]
    pub choice: BlockChoice<B>,
    /// The layout itself; its sizes only if it is made on the device, where kernels run.
    pub host: BlockLayout,
}

/// What the forward pass returns.
#[derive(ExtensionType, Clone, Debug)]
#[extension_type(fusion: cfg(feature = "fusion"))]
pub struct AttentionOutput<B: Backend> {
    /// `[batch, heads, seq_q, value_dim]`, in the inputs' dtype.
    pub out: FloatTensor<B>,
    /// `[batch, heads, seq_q]`, natural log of the sum of exponentials of the scaled scores;
    /// f32, or f64 for f64 inputs.
    pub lse: FloatTensor<B>,
    /// The weights `[batch, blocks, block_size, block_size]` in lse's dtype, with `WeightsMode::Store`.
    #[extension_type]
    pub weights: MaybeFloat<B>,
}

/// What the backward pass gets from the forward pass.
#[derive(ExtensionType, Clone, Debug)]
#[extension_type(fusion: cfg(feature = "fusion"))]
pub struct Saved<B: Backend> {
    /// The forward pass's inputs.
    #[extension_type]
    pub inputs: AttentionInputs<B>,
    /// Its output.
    #[extension_type]
    pub output: AttentionOutput<B>,
}

/// Gradients of a loss by what the forward pass returned.
#[derive(ExtensionType, Clone, Debug)]
#[extension_type(fusion: cfg(feature = "fusion"))]
pub struct OutputGrads<B: Backend> {
    /// By `out`: `[batch, heads, seq_q, value_dim]`, in its dtype.
    pub out: FloatTensor<B>,
    /// By `lse`: `[batch, heads, seq_q]`, in its dtype. None: 0.
    #[extension_type]
    pub lse: MaybeFloat<B>,
}

/// Gradients, each of its input's shape and dtype.
#[derive(ExtensionType, Clone, Debug)]
#[extension_type(fusion: cfg(feature = "fusion"))]
pub struct AttentionGrads<B: Backend> {
    /// `[batch, heads, seq_q, head_dim]`
    pub q: FloatTensor<B>,
    /// `[batch, kv_heads, seq_kv, head_dim]`
    pub k: FloatTensor<B>,
    /// `[batch, kv_heads, seq_kv, value_dim]`
    pub v: FloatTensor<B>,
    /// By the bias, if there is one and its gradient is wanted.
    #[extension_type]
    pub bias: MaybeFloat<B>,
    /// By the biases of distances, likewise.
    #[extension_type]
    pub relative_bias: MaybeFloat<B>,
}

/// Which gradients are wanted besides those of q, k and v.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct WantedGrads {
    /// The bias's.
    pub bias: bool,
    /// That of the biases of distances.
    pub relative_bias: bool,
}

/// Block-sparse attention as a backend operation. Arguments are checked by the public functions.
#[backend_extension(
    Flex: cfg(feature = "flex"),
    NdArray: cfg(feature = "ndarray"),
    Cube: cfg(feature = "cube"),
    Autodiff: cfg(feature = "autodiff"),
    Fusion: cfg(feature = "fusion"),
)]
pub trait BlockSparseOps: Backend {
    /// The forward pass.
    #[fusion(meta = meta::forward)]
    fn block_sparse_attention(
        #[extension_type] inputs: AttentionInputs<Self>,
        #[extension_type] layout: LayoutTensors<Self>,
        options: AttentionOptions,
    ) -> AttentionOutput<Self> {
        reference::forward::<Self>(inputs, &layout, &options)
    }

    /// The backward pass: gradients of a loss whose gradients with respect to the outputs are `grads`; the biases' only if they are `wanted`.
    #[fusion(meta = meta::backward)]
    fn block_sparse_attention_backward(
        #[extension_type] saved: Saved<Self>,
        #[extension_type] grads: OutputGrads<Self>,
        #[extension_type] layout: LayoutTensors<Self>,
        options: AttentionOptions,
        wanted: WantedGrads,
    ) -> AttentionGrads<Self> {
        reference::backward::<Self>(saved, grads, &layout, &options, wanted)
    }
}

/// Output shapes and dtypes for fusion, which never compares them with what the backend returns.
#[cfg(feature = "fusion")]
mod meta {
    use burn::backend::fusion::custom::TensorSpec;

    use super::*;
    use crate::{WeightsMode, weights};

    pub fn forward(
        inputs: &AttentionInputsMetadata,
        layout: &LayoutTensorsMetadata,
        options: &AttentionOptions,
    ) -> AttentionOutputMetadata {
        let [batch, heads, seq_q, _] = inputs.q.shape.dims::<4>();
        let value_dim = inputs.v.shape[3];
        let dtype = reference::accumulate_in(inputs.q.dtype.into()).into();
        AttentionOutputMetadata {
            out: TensorSpec::new([batch, heads, seq_q, value_dim].into(), inputs.q.dtype),
            lse: TensorSpec::new([batch, heads, seq_q].into(), dtype),
            weights: match options.weights {
                WeightsMode::Recompute => MaybeFloatMetadata::None,
                WeightsMode::Store => MaybeFloatMetadata::Some(TensorSpec::new(
                    weights::shape(&layout.host, batch).into(),
                    dtype,
                )),
            },
        }
    }

    pub fn backward(
        saved: &SavedMetadata,
        _grads: &OutputGradsMetadata,
        _layout: &LayoutTensorsMetadata,
        _options: &AttentionOptions,
        wanted: &WantedGrads,
    ) -> AttentionGradsMetadata {
        let only = |input: &MaybeFloatMetadata, wanted: bool| match input {
            MaybeFloatMetadata::Some(input) if wanted => MaybeFloatMetadata::Some(input.clone()),
            _ => MaybeFloatMetadata::None,
        };
        AttentionGradsMetadata {
            q: saved.inputs.q.clone(),
            k: saved.inputs.k.clone(),
            v: saved.inputs.v.clone(),
            bias: only(&saved.inputs.bias, wanted.bias),
            relative_bias: only(&saved.inputs.relative_bias, wanted.relative_bias),
        }
    }
}
