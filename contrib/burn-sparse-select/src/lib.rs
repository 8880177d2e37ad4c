//! Content-based sparse attention for Burn: queries select their keys at run time.
//!
//! A [`Selection`] is a method with its rule, also written as text (`topk:32,4`, `moba:…`, `quest:…`); [`attention_selected`] runs it. [`nsa`], [`dsa`] and
//! [`msa`] are trained selections, [`pages`] selects pages of a KV cache by scores, and [`SelectedBlocks`] and [`TokenIndices`] take index lists of your own.
//!
//! All of it computes on the tensors of [`burn_blocksparse`], with its kernels where they run.
#![recursion_limit = "256"]
#![warn(missing_docs)]
#![warn(clippy::undocumented_unsafe_blocks)]
// Without a backend, the arms that the macro generates for the backend traits are empty and leave their arguments unused.
#![cfg_attr(
    not(any(feature = "flex", feature = "ndarray", feature = "cube")),
    allow(unused_variables)
)]
#![allow(deprecated)] // Burn deprecates its NdArray backend; we serve it while it exists.

pub mod backend;
pub mod dsa;
mod gates;
#[doc(hidden)]
pub mod internal;
#[cfg(feature = "cube")]
#[doc(hidden)]
pub mod kernels;
pub mod msa;
pub mod nsa;
pub mod pages;
mod selection;
mod vertical_slash;

pub use selection::{
    AccumulatedAttention, AccumulatedAttentionOptions, Always, BlockEstimator, Budget, Candidates,
    DispatchMode, EstimateGrid, EstimateInputs, EstimateKind, EstimatorTraits, FlexHead,
    FlexPrefill, GqaReduction, MeanPool, Moba, PageSummary, Quest, ReferenceInputs, Rule,
    ScoreGrid, SelectedBlocks, SelectedLayout, SelectedOptions, Selection, SelectionQuality,
    SpargeAttn, TokenIndices, TopKOptions, VerticalSlash, XAttention, accumulated_attention,
    attention_selected, attention_selected_with_lse, recall, selected_blocks_attention,
    token_sparse_attention, top_k_blocks, top_k_blocks_on_device, vertical_slash_layout,
    vertical_slash_layout_async,
};
