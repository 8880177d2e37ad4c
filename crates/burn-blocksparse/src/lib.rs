//! Block-sparse attention for [Burn](burn): exact softmax attention over just the allowed
//! (query, key) pairs, forward and backward, on Burn's Flex, NdArray, WGPU and CUDA backends.
//!
//! ```
//! use burn::tensor::{Device, Distribution, Tensor};
//! use burn_blocksparse::{Pattern, sparse_attention};
//!
//! let device = Device::flex().autodiff();
//! // [batch, heads, seq, head_dim]
//! let [q, k, v] = [(); 3].map(|_| {
//!     Tensor::<4>::random([1, 2, 256, 16], Distribution::Default, &device).require_grad()
//! });
//! // The Sparse Transformer's fixed pattern in 32-wide blocks, built once and reused.
//! let layout = Pattern::fixed(128, 32).layout(2, 256, 32)?;
//! let out = sparse_attention(q.clone(), k, v, &layout)?;
//! let gradients = out.sum().backward();
//! assert_eq!(q.grad(&gradients).unwrap().dims(), [1, 2, 256, 16]);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! # Features
//! | feature | | default |
//! |---|---|---|
//! | `flex`, `ndarray` | CPU backends, which run the reference implementation | `flex` |
//! | `wgpu`, `cuda` | GPU backends, which run the kernels; with `fusion` | |
//! | `cube` | the kernels for another CubeCL backend of Burn (untested); `burn` must have that backend's feature, it does not compile without one | |
//! | `fusion` | Burn's fusion, which `burn`'s own default features turn on for GPU backends | |
//! | `autodiff` | gradients | yes |
//! | `draw` | layouts as PNG and SVG | |
//!
//! An application must enable the backend **here** as well as in `burn`: for a device whose feature is off in this crate every function returns
//! [`OpError::Backend`], which names the feature. [`check_device`] says before any tensor is made whether a device can be used.
//!
//! ## What `cuda` changes for the whole application
//! CubeCL compiles CUDA kernels by LLVM or by CUDA C++ and NVRTC. The tensor-core kernels need the second, so `cuda` turns on the feature `cpp` of
//! `cubecl-cuda`. Cargo unites features, so then **all** CubeCL kernels of the application, Burn's own too, are compiled by NVRTC: the machine it runs on
//! needs the CUDA toolkit (NVRTC and the headers under `CUDA_PATH`), not just the driver, and caches of compiled kernels begin anew.
#![recursion_limit = "256"]
#![warn(missing_docs)]
#![warn(clippy::undocumented_unsafe_blocks)]
// What the macro makes of the backend traits has no arm then, which would use the arguments.
#![cfg_attr(
    not(any(feature = "flex", feature = "ndarray", feature = "cube")),
    allow(unused_variables)
)]
#![allow(deprecated)] // Burn deprecates its NdArray backend; we serve it while it exists.

mod activation;
mod attention;
mod backends;
mod block_sparse;
mod blocks;
mod call_layout;
mod check;
mod choice;
mod clusters;
mod device;
mod device_layout;
mod dropout;
mod dsa;
mod dtype;
mod embedding;
mod error;
mod gates;
mod gradients;
mod graph;
mod heads;
mod kept;
mod kernels_run;
mod linear;
mod loss;
mod masses;
mod merge;
mod mlp;
mod norm;
mod nsa;
mod op_plan;
mod ops;
mod optim;
mod options;
mod order;
#[cfg(feature = "cube")]
mod pack;
mod paged;
mod plan;
mod projection;
mod reference;
mod rows;
mod sampling;
mod selection;
mod sums;
mod tensors;
mod top_k;
mod upload;
mod values;
mod vertical_slash;
mod weights;

pub use activation::values::{ActivationGrads, ActivationInputs, ActivationSaved, ActivationTask};
pub use activation::{Activation, bias_activation};
pub use attention::{SparseAttentionCall, SparseAttentionOutput, sparse_attention};
#[cfg(all(feature = "cube", feature = "fusion"))]
pub use backends::matmul::{accelerate_matmul, accelerated_products};
pub use block_sparse::values::{
    SparseLinearCall, SparseLinearInputs, SparseLinearOutput, SparseLinearSaved,
};
pub use block_sparse::{BlockSparseLinearOptions, block_sparse_linear};
pub use blocks::BlockSparseTensorOps;
#[cfg(feature = "draw")]
pub use blocksparse::font;
pub use blocksparse::{
    BLOCK_SIZES, BlockLayout, BlockMask, Dropout, EstimateKind, Forced, Keep, LayoutError,
    LayoutShape, Pattern, PositionRule, Quantization, ROTATED_WIDTHS, Reach, Restriction,
    RotatedRows, Rule, ScoreGrid, Seed, SeedTable, StreamDropout, WEIGHT_BLOCK_SIZES, WeightLayout,
    WeightPattern, pages, philox,
};
pub use call_layout::Layout;
pub use choice::TopKOptions;
pub use clusters::{routed_attention, routed_attention_plan};
pub use device::{check_collectives, check_device};
pub use device_layout::{DeviceLayout, DeviceLayoutOptions};
pub use dropout::dropout;
pub use dsa::{Dsa, DsaIndex, DsaPages, DsaTarget};
pub use embedding::{embedding, embedding_backward};
pub use error::OpError;
pub use gates::values::{GatedGrads, GatedInputs, GatedSaved, GatedTask};
#[cfg(feature = "autodiff")]
pub use gradients::attention_hvp;
pub use gradients::{AttentionGradients, attention_gradients};
pub use graph::{DeviceSeed, Fixed, FixedKind, Replayed, check_not_recording, prepare_seed};
pub use heads::apart::{heads_apart, heads_together};
pub use heads::values::{HeadParts, JoinCall, Joined, SplitInputs};
pub use heads::{join_heads, split_heads};
pub use kept::values::KeptAttention;
pub use kept::{attention_given, attention_keeping};
pub use kernels_run::runs_kernels;
pub use linear::values::{LinearGrads, LinearInputs, LinearOutput, LinearSaved, LinearTask};
pub use linear::{LinearOptions, linear, linear_joined};
pub use loss::values::{LossDtypes, LossGrads, LossInputs, LossOutput, LossSaved, LossTask};
pub use loss::{CrossEntropyOptions, Reduction, linear_cross_entropy};
pub use masses::{AttentionMasses, MassOptions, attention_masses};
pub use merge::{merge_attention, merge_attention_at};
pub use mlp::values::{MlpActive, MlpCall, MlpInnerInputs, MlpInputs, MlpOuterSaved, MlpOuterTask};
pub use mlp::{MlpOptions, MlpParams, mlp};
pub use norm::values::{
    NormBackwardCall, NormCall, NormGrads, NormInputs, NormOutput, NormOutputGrads, NormSaved,
};
pub use norm::{Branch, Norm, NormParams, ResidualNormOptions, norm, residual_add, residual_norm};
pub use nsa::{Nsa, NsaBranches, NsaKeysValues, NsaOptions, NsaStrides};
pub use op_plan::OpPlan;
pub use ops::{
    ActivationOps, AdamWInputs, AdamWNumbers, AdamWOutput, AttentionMassOps, BlockSparseLinearOps,
    BlockSparseOps, ClipFactor, DropoutOps, EmbeddingOps, FixedOps, GateOps, HeadOps, LinearOps,
    LossOps, MlpOps, NormOps, OptimOps, PageChoiceOps, PageSlotOps, PagedOps, ProjectionOps,
    RowOps, SamplingOps, TensorList,
};
pub use optim::{AdamWControl, FusedAdamW, FusedAdamWConfig, clip_gradients, gradient_norm};
pub use options::{AttentionOptions, ChoiceWalk, ProductPrecision, WeightsMode, alibi_slopes};
pub use order::{
    AttractedRows, HighestInRows, TokensInRounds, attracted_rows, hash_rows, highest_in_rows,
    highest_rows, sort_buckets, sort_hashes, sort_rounds,
};
pub use paged::values::{
    AppendInputs, AppendPacked, MaybeInt, PackedPages, PageChoiceCall, PageScoreInputs, PagedCall,
    PagedInputs, PagedRows, Pages, StoredPages, SummarizeInputs,
};
pub use paged::{
    PageChoice, PageSummaries, PagedKeysValues, PagedOptions, PagedOutput, PagedStore,
    PagedVisibility, QuantizedPages, append_quantized, append_rows, dequantize, highest_pages,
    page_scores, paged_attention, select_pages, summarize_pages, summarize_stored,
};
pub use plan::AttentionPlan;
pub use projection::values::{
    MergeGrads, MergeInputs, MergeOutput, MergeSaved, MergeTask, ProjectionCall, ProjectionInputs,
    ProjectionOutput,
};
pub use projection::{linear_from_heads, linear_to_heads};
pub use rows::{keyed_rows_at, means_at, rows_at, sums_at, unit_rows};
pub use sampling::{SampleOptions, sample_tokens};
pub use selection::key_lists::{KeyLists, attention_with_keys};
pub use selection::layouts::KeptLayouts;
pub use selection::lists::attention_with_lists;
pub use selection::{
    Antidiagonals, BlockEstimator, BlockMeans, Chosen, DenseCall, EstimateGrid, EstimatorTraits,
    FlexHead, FlexPrefill, MixtureOfBlocks, PageBounds, PageSummary, QueryLists, ScoreCall,
    SelectedOptions, Selection, SelectionQuality, Sharing, SpargeBlocks, VerticalSlash, Within,
    attention_selected, attention_selected_with_lse, recall,
};
pub use sums::sum_all;
pub use tensors::AttentionTensors;
pub use top_k::{top_k_blocks, top_k_blocks_on_device};
pub use values::{
    AttentionGrads, AttentionInputs, AttentionOutput, BlockChoice, GivenOutput, KernelPlan,
    LayoutTensors, MassInputs, MassOutput, MaybeFloat, OutputGrads, Saved, ScoreTensors,
    ThreeFloats, WantedGrads,
};
pub use vertical_slash::{vertical_slash_layout, vertical_slash_layout_async};
pub use weights::BlockSparseTensor;
