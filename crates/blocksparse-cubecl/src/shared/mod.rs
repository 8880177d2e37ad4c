//! Kernel code that several tiers share.

pub mod addressing;
pub mod biases;
pub mod bins;
pub mod codec;
pub mod curve;
pub(crate) mod delta;
pub mod distances;
pub mod dropout;
pub mod order_key;
pub(crate) mod own_rows;
#[doc(hidden)]
pub mod row_tile;
pub mod score;
pub mod softcap;
pub mod unit_sums;
