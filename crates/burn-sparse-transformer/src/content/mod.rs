//! Experimental: heads that choose single keys by content, by clusters (Routing Transformer) or by hashes (Reformer).
//!
//! On devices with kernels, nothing is read back.

// assignment     clusters.rs (the nearest tokens of each mean)
// attention      routing.rs (within clusters), lsh.rs (within chunks of a sorted sequence), lsh_places.rs (the same, by kernels)
// state          means.rs (means and their updates), rotations.rs (rotations drawn from a seed)
// modules        routing_attention.rs, lsh_attention.rs; kind.rs and mixed.rs (next to the heads of a pattern)

mod clusters;
mod kind;
mod lsh;
mod lsh_attention;
mod lsh_places;
mod means;
mod mixed;
mod rotations;
mod routing;
mod routing_attention;

pub use crate::shared_choice::{ChoiceSharing, SharedChoice};
pub use kind::ContentAttention;
pub use lsh::{LshHeads, LshHeadsConfig, LshOptions, lsh_attention};
pub use lsh_attention::{LshAttention, LshAttentionConfig};
pub use mixed::ContentHeads;
pub use routing::{RoutingHeads, RoutingHeadsConfig, RoutingOutput};
pub use routing_attention::{
    RoutingAttention, RoutingAttentionConfig, RoutingAttentionInput, RoutingAttentionOutput,
};

use burn::tensor::{DType, Int, Tensor};

/// Squared norms below this count as 0 when vectors are normalised.
const SMALLEST_SQUARE: f64 = 1e-24;

/// Normalises vectors along the last dimension, in f32 or higher precision; a zero vector stays zero, with finite gradients.
fn unit<const D: usize>(x: Tensor<D>) -> Tensor<D> {
    let x = widened(x);
    let square = x.clone().powi_scalar(2).sum_dim(D - 1);
    x / square.clamp_min(SMALLEST_SQUARE).sqrt()
}

/// Casts to f32 unless the tensor is f64.
fn widened<const D: usize>(x: Tensor<D>) -> Tensor<D> {
    match x.dtype() {
        DType::F64 => x,
        _ => in_dtype(x, DType::F32),
    }
}

/// Casts only if necessary: a cast to the same dtype would be an operation.
fn in_dtype<const D: usize>(x: Tensor<D>, dtype: DType) -> Tensor<D> {
    match x.dtype() == dtype {
        true => x,
        false => x.cast(dtype),
    }
}

/// Returns 1 where the mask is true, else 0, as i32.
fn ones<const D: usize>(x: Tensor<D, burn::tensor::Bool>) -> Tensor<D, Int> {
    x.int().cast(DType::I32)
}
