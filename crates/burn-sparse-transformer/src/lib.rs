//! Sparse Transformer layers for [Burn](burn): attention over a [`Pattern`] instead of burn-nn's dense attention, the residual block around it, and the model
//! of "Generating Long Sequences with Sparse Transformers" (Child et al., 2019, [arXiv:1904.10509](https://arxiv.org/abs/1904.10509)).
//!
//! [`SparseMultiHeadAttention`] replaces burn-nn's `MultiHeadAttention`: the same parameters, the same records, a pattern instead of a mask.
//!
//! ```
//! use burn::tensor::{Device, Distribution, Tensor};
//! use burn_sparse_transformer::{Pattern, SparseMhaInput, SparseMultiHeadAttentionConfig};
//!
//! let device = Device::flex();
//! let pattern = Pattern::fixed(128, 32); // own window of 128, last 32 of every earlier one
//! let mha = SparseMultiHeadAttentionConfig::new(64, 4, pattern).init(&device);
//! let x = Tensor::<3>::random([2, 512, 64], Distribution::Default, &device);
//! let y = mha.forward(SparseMhaInput::self_attn(x)).context;
//! assert_eq!(y.dims(), [2, 512, 64]);
//! ```
//!
//! [`SparseAttention`], a module without parameters, is for models with their own projections and KV cache. Every `forward` and `init` panics with the text
//! of the error that its `try_forward` or `try_init` returns.
//!
//! [`SparseMultiHeadAttention::from_dense`] and [`SparseTransformerEncoder::from_dense`] make trained modules of burn-nn sparse; see
//! `cargo run -p burn-sparse-transformer --example convert`.
//!
//! # From burn-nn
#![doc = ""]
#![doc = include_str!("../from-burn-nn.md")]
//!
//! With the feature `store`, `weights` reads and writes files of other programs: safetensors, PyTorch's state dicts, GPT-2's and Longformer's names. It also
//! reads llama.cpp's GGUF files.
//!
//! # Which item for which job
//! | job | item |
//! |---|---|
//! | burn-nn's `MultiHeadAttention`, sparse | [`SparseMultiHeadAttention`] |
//! | a decoder-only model, a residual block, an encoder | [`SparseTransformer`], [`SparseTransformerBlock`], [`SparseTransformerEncoder`] |
//! | Llama, Mistral, Qwen2, Qwen3, SmolLM2 | [`llama`] |
//! | Longformer | [`longformer`] |
//! | decoding with your own cache or model | [`decoder`] |
//! | a paged KV cache, eviction, int8 and fp8, text generation | the crate `burn-paged-attention` |
//! | linear layers in mixed precision or with block-sparse weights | [`linear`], [`feed_forward`] |
//! | experimental: NSA, DSA, MSA, routing, LSH | [`nsa`], [`dsa`], [`msa`], [`content`] |
//!
//! # The model and backends
//!
//! [`SparseTransformer`] is the whole model: [`forward`](SparseTransformer::forward) for logits,
//! [`loss`](SparseTransformer::loss) for training with Burn's learner,
//! [`forward_cache`](SparseTransformer::forward_cache) for sampling, and
//! `loss_and_gradients` (feature `autodiff`) for gradients that store nothing but the residual stream.
//!
//! The features `flex`, `ndarray`, `wgpu` and `cuda` enable backends, as in `burn-blocksparse`. An application must enable them here as well as in `burn`: on
//! a device of any other backend a call returns [`OpError::Backend`], which names the feature.
#![warn(missing_docs)]

mod attention;
mod attention_cache;
mod attention_config;
mod attention_density;
mod attention_flops;
mod block;
mod block_attention;
mod block_shard;
mod cache;
mod call;
mod choice_attention;
pub mod content;
mod convert;
pub mod decoder;
mod dropout;
pub mod dsa;
mod embedding;
mod encoder;
mod encoder_layer;
mod error;
mod factorization;
pub mod feed_forward;
mod head_selections;
mod heads;
mod in_graph;
mod init;
mod input;
#[doc(hidden)]
pub mod internal;
mod kind;
mod layouts;
pub mod linear;
pub mod llama;
pub mod longformer;
pub mod msa;
mod notation;
pub mod nsa;
mod parts;
mod precision;
#[cfg(feature = "autodiff")]
mod recompute;
mod recompute_mode;
mod results;
mod rope_scaling;
mod selected;
mod shards;
mod shared_choice;
mod sparse_attention;
mod stream;
mod transformer;
#[cfg(feature = "autodiff")]
mod warm_up;
#[cfg(feature = "store")]
pub mod weights;

pub use attention::{SparseMhaOutput, SparseMultiHeadAttention};
pub use attention_config::SparseMultiHeadAttentionConfig;
pub use block::{SparseTransformerBlock, SparseTransformerBlockConfig};
pub use block_attention::BlockAttentionConfig;
pub use burn_blocksparse::{
    BlockLayout, BlockSparseTensor, DeviceLayout, Layout, LayoutError, OpError, Pattern, Seed,
};
pub use burn_sparse_select::{Selection, SelectionQuality};
pub use cache::{SparseMhaCache, SparseTransformerCache};
pub use embedding::PositionEmbedding;
pub use encoder::{
    SparseTransformerEncoder, SparseTransformerEncoderConfig, SparseTransformerEncoderInput,
};
pub use encoder_layer::SparseTransformerEncoderLayer;
pub use error::TransformerError;
pub use factorization::Factorization;
pub use head_selections::HeadSelections;
pub use heads::{HeadNorm, QkNorm};
pub use input::SparseMhaInput;
pub use precision::Precision;
#[cfg(feature = "autodiff")]
pub use recompute::StepLosses;
pub use recompute_mode::Recompute;
pub use rope_scaling::RopeScaling;
pub use shards::TransformerShard;
pub use sparse_attention::{SparseAttention, SparseAttentionConfig};
pub use transformer::{SparseTransformer, SparseTransformerConfig};
