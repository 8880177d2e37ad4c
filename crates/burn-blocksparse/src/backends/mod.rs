//! The only files that know both Burn's backends and our operation.

#[cfg(any(feature = "flex", feature = "ndarray"))]
use crate::backend::BlockSparseOps;

pub(crate) mod activation;
#[cfg(feature = "autodiff")]
mod autodiff;
pub(crate) mod block_sparse;
mod blocks;
#[cfg(feature = "cuda")]
pub(crate) mod clusters;
#[cfg(feature = "cube")]
pub(crate) mod cube;
mod dropout;
pub(crate) mod embedding;
#[cfg(feature = "cube")]
pub(crate) mod estimates;
mod fixed;
pub(crate) mod gates;
pub(crate) mod heads;
mod heads_apart;
#[cfg(feature = "cube")]
pub(crate) mod indexer;
pub(crate) mod key_lists;
pub(crate) mod linear;
#[cfg(feature = "cuda")]
pub(crate) mod listed;
pub(crate) mod loss;
mod masses;
#[cfg(all(feature = "cube", feature = "fusion"))]
pub(crate) mod matmul;
pub(crate) mod mlp;
#[cfg(feature = "cube")]
mod named_product;
mod norm;
pub(crate) mod optim;
#[cfg(feature = "cube")]
mod order;
#[cfg(feature = "autodiff")]
mod outputs;
mod page_choice;
mod page_slots;
pub(crate) mod paged;
pub(crate) mod projection;
#[cfg(feature = "autodiff")]
mod row_steps;
mod rows;
pub(crate) mod sampling;
mod selection;
#[cfg(feature = "cuda")]
mod wgmma_blocks;
#[cfg(feature = "cuda")]
mod wgmma_product;

#[cfg(feature = "flex")]
impl BlockSparseOps for burn::backend::Flex {}

#[cfg(feature = "ndarray")]
impl BlockSparseOps for burn::backend::NdArray {}
