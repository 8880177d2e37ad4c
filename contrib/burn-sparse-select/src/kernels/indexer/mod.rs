//! The indexer of DeepSeek sparse attention: its scores, selections and loss. On any CubeCL runtime, with products in f32; half precision runs on tensor cores
//! where available.
//!
//! ```text
//! pairs        sizes and inputs of a call: all visible pairs or listed ones, the sum over heads, its epilogue
//! rows         rows in shared memory, and their products
//! sums         sum over heads for each pair: index scores, or attention weights
//! blocks       index scores of the keys of blocks that queries list, on wgmma
//! top_k        keys of the highest scores of each query
//! top_k_parts  the same for a few long rows, split over cubes
//! compare      loss of each query: attention against the softmax of its scores; gradient with respect to the scores
//! gradients    gradients with respect to queries and weights, or to keys
//! mma          sums and gradients of half precision on mma.sync
//! warpgroups   sums of many heads on wgmma
//! rounding     rows rotated and rounded to 8 bits, and packed as bytes
//! ```
//!
//! ```text
//! x[i, j] = factor · Σ_u w[u, i] · relu(q[u, i] · k[j])          t[i, j] = 1/H Σ_h exp(scale · q[h, i] · k[j] − lse[h, i])
//! loss[i] = Σ_j t' · ln(t' / softmax(x))                          t' = t / Σ_j t          g = softmax(x) − t'
//! by q    = Σ_j g · w · [q · k > 0] · k        by w = Σ_j g · relu(q · k)        by k = Σ_i Σ_u g · w · [q · k > 0] · q
//! ```
//!
//! Products are recomputed where they are needed. Of all numbers per pair only `x` and `t` are stored, for some queries at a time. Every element has one writer
//! and sums have a fixed order, so the same input gives the same bits on a device.

mod blocks;
mod compare;
mod gradients;
mod mma;
mod pairs;
mod rounding;
mod rows;
mod sums;
mod top_k;
mod top_k_parts;
mod warpgroups;

pub use blocks::{QueriesOfBlocks, block_sums, has_block_sums, keys_of_places};
pub use compare::{Compared, compare, spread_listed};
pub use gradients::{IndexerGradients, by_keys, by_queries, key_parts};
pub use pairs::{KeyBytes, MOST_WIDTH, PairInputs, PairSizes, PairSum, check};
pub use rounding::{check_rounding, round_rows};
pub use sums::{key_bytes, pair_sums};
pub use top_k::top_k_keys;
pub use top_k_parts::TopKKeys;
