//! How kernels find what they read: tensors by their strides, positions by a plan's places, a plan's parts.

use cubecl::prelude::*;

pub use crate::arch::Four;

/// Strides of a `[batch, heads, seq, dim]` tensor in vectors, and its seq.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub struct Strides {
    /// Between batch entries.
    pub batch: usize,
    /// Between heads.
    pub head: usize,
    /// Between positions.
    pub row: usize,
    /// Positions.
    pub len: usize,
}

/// Strides of the queries, keys and values of a forward pass, as a tier counts them.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub struct InputStrides<S: CubeType + LaunchArg> {
    pub q: S,
    pub k: S,
    pub v: S,
}

/// Strides of the operands of a backward pass: those of a tile's own rows, and those of the gathered ones.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub struct OperandStrides<S: CubeType + LaunchArg> {
    pub a1: S,
    pub a2: S,
    pub b1: S,
    pub b2: S,
}

/// How a plan lists positions: place `v` is position `v mod class_len · stride + ⌊v / class_len⌋`.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub struct Listing {
    /// Distance between the positions of a class.
    pub stride: usize,
    /// Places of a class.
    pub class_len: usize,
}

/// The position at a place, listed by residue class or as it is.
#[cube]
pub fn position_of(place: usize, listing: &Listing, #[comptime] residue: bool) -> usize {
    span_of(place, listing, residue).first
}

/// Places that follow each other in one class, as those of a block do: the i-th is position `first + i · step`.
#[derive(CubeType, Clone, Copy)]
pub struct Span {
    /// The first position.
    pub first: usize,
    /// From one to the next.
    pub step: usize,
}

/// The positions from a place on, as far as its class goes.
#[cube]
pub fn span_of(place: usize, listing: &Listing, #[comptime] residue: bool) -> Span {
    let mut first = place;
    let mut step = 1usize;
    if comptime!(residue) {
        let class = place / listing.class_len;
        first = place % listing.class_len * listing.stride + class;
        step = listing.stride;
        // The last tile may reach beyond the last class: such places are beyond every sequence.
        if class >= listing.stride {
            first = usize::cast_from(u32::MAX);
            step = 0usize;
        }
    }
    Span { first, step }
}

/// Which batch entries and heads a launch is for: those of its grid come after the first ones.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub struct Slice {
    /// The first batch entry.
    pub first_batch: usize,
    /// The first head.
    pub first_head: usize,
    /// Batch entries of the call.
    // Read by kernels for tensor cores.
    pub batches: usize,
    /// Heads of the call, of what tiles are of.
    pub heads: usize,
}

/// What a launch computes of a layout.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub struct Schedule {
    /// Where the parts of the plan begin.
    pub parts: PlanParts,
    /// How the plan lists positions.
    pub listing: Listing,
    /// Batch entries and heads.
    pub slice: Slice,
}

/// The cube's batch entry.
#[cube]
pub fn batch_of(slice: &Slice) -> usize {
    slice.first_batch + CUBE_POS_Z as usize
}

/// The cube's head.
#[cube]
pub fn head_of(slice: &Slice) -> usize {
    slice.first_head + CUBE_POS_Y as usize
}

/// Where the parts of a plan's words begin: `plan::Sections` on the device.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub struct PlanParts {
    /// First tile record of each head.
    pub heads: usize,
    /// First place of each head.
    pub places: usize,
    /// Tiles by falling work, with their records.
    pub order: usize,
    /// Blocks of clustered tiles.
    pub rows: usize,
    /// Tile records.
    pub tiles: usize,
    /// Entries.
    pub entries: usize,
    /// Masks.
    pub masks: usize,
    /// Words between the heads of two batch entries: 0 if all share one layout.
    pub batch: usize,
}
