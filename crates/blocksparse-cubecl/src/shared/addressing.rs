//! Addressing in kernels: tensors by strides, positions by a plan's places, sections of a plan.

use cubecl::prelude::*;

pub use crate::arch::Four;

/// Strides of a `[batch, heads, seq, dim]` tensor in vectors, and its sequence length.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub struct Strides {
    /// Stride of batch entries.
    pub batch: usize,
    /// Stride of heads.
    pub head: usize,
    /// Stride of positions.
    pub row: usize,
    /// Number of positions.
    pub len: usize,
}

/// The tensors of a forward pass, or a value for each of them.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub struct Qkv<T: CubeType + LaunchArg> {
    pub q: T,
    pub k: T,
    pub v: T,
}

/// The operands of a mainloop of the backward pass, or a value for each of them: `a` for a tile's own rows, `b` for the gathered rows.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub struct MainloopOperands<T: CubeType + LaunchArg> {
    pub a1: T,
    pub a2: T,
    pub b1: T,
    pub b2: T,
}

/// A tensor whose outer dimensions have any strides.
#[derive(CubeType, CubeLaunch)]
pub struct RowTensor<T: CubePrimitive> {
    pub vectors: Box<[T]>,
    pub strides: Strides,
}

/// Outputs of a forward pass, contiguous.
#[derive(CubeType, CubeLaunch)]
pub struct ForwardOutputs<O: CubePrimitive, F: CubePrimitive> {
    /// `[batch, heads, seq_q, value_dim]`
    pub out: Box<[O]>,
    /// `[batch, heads, seq_q]`
    pub lse: Box<[F]>,
    /// `[batch, heads, seq_q]`, if asked for.
    pub max_scores: ComptimeOption<Box<[F]>>,
}

/// Order of positions in a plan: place `v` is position `v mod class_len · stride + ⌊v / class_len⌋`.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub struct Listing {
    /// Distance between the positions of a class.
    pub stride: usize,
    /// Places per class.
    pub class_len: usize,
}

/// Returns the position at a place, listed by residue class or in order.
#[cube]
pub fn position_of(place: usize, listing: &Listing, #[comptime] residue: bool) -> usize {
    span_of(place, listing, residue).first
}

/// Consecutive places of one class, such as those of a block. The i-th is position `first + i · step`.
#[derive(CubeType, Clone, Copy)]
pub struct Span {
    /// First position.
    pub first: usize,
    /// Distance between neighbours.
    pub step: usize,
}

/// Returns the positions from a place on, valid up to the end of its class.
#[cube]
pub fn span_of(place: usize, listing: &Listing, #[comptime] residue: bool) -> Span {
    let mut first = place;
    let mut step = 1usize;
    if comptime!(residue) {
        let class = place / listing.class_len;
        first = place % listing.class_len * listing.stride + class;
        step = listing.stride;
        // The last tile may extend past the last class. Such places get positions beyond every sequence.
        if class >= listing.stride {
            first = usize::cast_from(u32::MAX);
            step = 0usize;
        }
    }
    Span { first, step }
}

/// Batch entries and heads of a launch. Those of its grid are offset by the first ones.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub struct Slice {
    /// First batch entry.
    pub first_batch: usize,
    /// First head.
    pub first_head: usize,
    /// Number of batch entries of the call.
    // Only tensor-core kernels read it.
    pub batches: usize,
    /// Number of heads of the call, on the side of the tiles' own rows.
    pub heads: usize,
}

/// A plan on the device.
#[derive(CubeType, CubeLaunch)]
pub struct PlanWords {
    pub words: Box<[u32]>,
    /// Order of positions in the plan.
    pub listing: Listing,
}

/// The launch's tiles: plan and slice.
#[derive(CubeType, CubeLaunch)]
pub struct Schedule {
    /// Offsets of the plan's sections.
    pub parts: PlanParts,
    pub plan: PlanWords,
    /// Batch entries and heads.
    pub slice: Slice,
}

/// Returns the cube's batch entry.
#[cube]
pub fn batch_of(slice: &Slice) -> usize {
    slice.first_batch + CUBE_POS_Z as usize
}

/// Returns the cube's head.
#[cube]
pub fn head_of(slice: &Slice) -> usize {
    slice.first_head + CUBE_POS_Y as usize
}

/// Heads of a tile in the backward pass of the tensor-core tiers.
#[derive(CubeType, Clone, Copy)]
pub struct TileHeads {
    /// Head of its own rows.
    pub own: u32,
    /// First query head of its steps.
    pub first: u32,
    /// Number of query heads of its steps.
    pub turns: u32,
    /// Number of query heads per batch entry.
    pub all: u32,
    /// Query heads per head of gathered rows.
    pub divisor: u32,
}

/// Returns the heads of tile head `outer` of `heads`. In a loop over `columns`, a tile of keys loops over all query heads of its group, unless tiles are
/// per query head (`each`).
#[cube]
pub fn heads_of_tile(
    outer: u32,
    heads: u32,
    heads_per_kv: u32,
    #[comptime] columns: bool,
    #[comptime] each: bool,
) -> TileHeads {
    let mut first = outer;
    let mut turns = 1u32;
    let mut all = heads;
    let mut divisor = heads_per_kv;
    let mut own = outer;
    if comptime!(each) {
        own = outer / heads_per_kv;
        divisor = 1u32;
    } else if comptime!(columns) {
        first = outer * heads_per_kv;
        turns = heads_per_kv;
        all *= heads_per_kv;
        divisor = 1u32;
    }
    TileHeads {
        own,
        first,
        turns,
        all,
        divisor,
    }
}

/// Offsets of a plan's sections: `plan::Sections` on the device.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub struct PlanParts {
    /// First tile record of each head.
    pub heads: usize,
    /// First place of each head.
    pub places: usize,
    /// Tiles by decreasing work, with their records.
    pub order: usize,
    /// Blocks of each clustered tile.
    pub rows: usize,
    /// Tile records.
    pub tiles: usize,
    /// Entries of the tiles' steps.
    pub entries: usize,
    /// Masks.
    pub masks: usize,
    /// Words between the heads of two batch entries, 0 if all share one layout.
    pub batch: usize,
}
