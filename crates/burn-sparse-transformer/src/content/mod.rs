//! Experimental: heads that choose single keys by content, by clusters (Routing Transformer) or by hashes (Reformer).
//!
//! Where kernels run, nothing is read from the device.

// which places   clusters.rs (the nearest tokens of each mean)
// attention      routing.rs (over clusters), lsh.rs (over chunks of a sorted sequence), lsh_places.rs (the same, by kernels)
// state          means.rs (means and how they follow queries), rotations.rs (planes that are drawn from a seed)
// modules        routing_attention.rs, lsh_attention.rs; kind.rs and mixed.rs (beside the heads of a pattern)

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

/// Squares below this count as 0 where a vector is normalised to unit length.
const SMALLEST_SQUARE: f64 = 1e-24;

/// Vectors of length 1 along the last dimension, in f32 at least; a vector of zeros stays one, with finite gradients.
fn unit<const D: usize>(x: Tensor<D>) -> Tensor<D> {
    let x = widened(x);
    let square = x.clone().powi_scalar(2).sum_dim(D - 1);
    x / square.clamp_min(SMALLEST_SQUARE).sqrt()
}

/// In f32 at least.
fn widened<const D: usize>(x: Tensor<D>) -> Tensor<D> {
    match x.dtype() {
        DType::F64 => x,
        _ => in_dtype(x, DType::F32),
    }
}

/// In a dtype: a cast to the same one would be an operation.
fn in_dtype<const D: usize>(x: Tensor<D>, dtype: DType) -> Tensor<D> {
    match x.dtype() == dtype {
        true => x,
        false => x.cast(dtype),
    }
}

/// 1 where it is true, i32.
fn ones<const D: usize>(x: Tensor<D, burn::tensor::Bool>) -> Tensor<D, Int> {
    x.int().cast(DType::I32)
}
