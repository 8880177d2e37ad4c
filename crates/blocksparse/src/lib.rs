//! Block-sparse attention patterns and the layouts built from them.
//!
//! A [`Pattern`] defines which (query, key) pairs attend. A [`BlockLayout`] is a pattern cut into `block_size × block_size` blocks, of which only the non-empty
//! ones are kept. A [`WeightLayout`] lists the kept blocks of a weight. `burn-blocksparse` computes attention over a layout in Burn with the kernels of
//! `blocksparse-cubecl`; this crate depends on neither.
//!
//! # Features
//! - `draw`: layouts draw themselves as PNG and SVG.
//!
//! ```
//! use blocksparse::Pattern;
//!
//! // The Sparse Transformer's "fixed" pattern: own block of 8, plus the last 2 columns of each.
//! let layout = Pattern::fixed(8, 2).layout(1, 32, 8)?;
//! assert_eq!(layout.blocks(), 10);
//! assert!(layout.density() < 0.25);
//! println!("{layout}");
//! # Ok::<(), blocksparse::LayoutError>(())
//! ```
#![warn(missing_docs)]

mod arith;
mod dropout;
mod ensure;
mod error;
#[doc(hidden)]
pub mod internal;
mod known;
mod layout;
mod pattern;
#[doc(hidden)]
pub mod plan;
mod precision;
mod quantization;
mod rotated;
mod rule;
mod seed;
mod setters;
mod shards;
mod stream_dropout;
mod weights;

pub use dropout::{Dropout, philox};
pub use error::LayoutError;
#[cfg(feature = "draw")]
#[doc(hidden)]
pub use layout::font;
pub use layout::{
    BlockLayout, BlockMask, BlockSource, DeviceChoice, Entry, FULL, LayoutShape, PaddingMask, Part,
    PositionMask, Residue, Run,
};
pub use pattern::{LastUse, Pattern, PatternFn};
#[doc(hidden)]
pub use plan::lines;
pub use precision::ProductPrecision;
pub use quantization::Quantization;
pub use rotated::{HADAMARD_WIDTHS, HadamardFp8};
pub use rule::{Always, Budget, EstimateKind, Rule, ScoreGrid};
pub use seed::{Seed, SeedPlace, SeedTable};
pub use shards::ShardPlan;
pub use stream_dropout::ElementDropout;
pub use weights::{WEIGHT_BLOCK_SIZES, WeightLayout, WeightPattern};

/// Valid block sizes of a layout.
pub const BLOCK_SIZES: [usize; 5] = [8, 16, 32, 64, 128];
