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

/// The tensors of a forward pass, or what belongs to each of them.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub struct Qkv<T: CubeType + LaunchArg> {
    pub q: T,
    pub k: T,
    pub v: T,
}

/// The operands of a mainloop of the backward pass, or what belongs to each: of a tile's own rows, and of the gathered ones.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub struct MainloopOperands<T: CubeType + LaunchArg> {
    pub a1: T,
    pub a2: T,
    pub b1: T,
    pub b2: T,
}

/// A tensor with any strides of its outer dimensions.
#[derive(CubeType, CubeLaunch)]
pub struct RowTensor<T: CubePrimitive> {
    pub vectors: Box<[T]>,
    pub strides: Strides,
}

/// What a forward pass writes, contiguous.
#[derive(CubeType, CubeLaunch)]
pub struct ForwardOutputs<O: CubePrimitive, F: CubePrimitive> {
    /// `[batch, heads, seq_q, value_dim]`
    pub out: Box<[O]>,
    /// `[batch, heads, seq_q]`
    pub lse: Box<[F]>,
    /// `[batch, heads, seq_q]`, where they are asked for.
    pub max_scores: ComptimeOption<Box<[F]>>,
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

/// A plan on the device.
#[derive(CubeType, CubeLaunch)]
pub struct PlanWords {
    pub words: Box<[u32]>,
    /// How it lists positions.
    pub listing: Listing,
}

/// What a launch computes of a layout.
#[derive(CubeType, CubeLaunch)]
pub struct Schedule {
    /// Where the parts of the plan begin.
    pub parts: PlanParts,
    pub plan: PlanWords,
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

/// The heads of a tile in the backward pass of the tensor-core tiers.
#[derive(CubeType, Clone, Copy)]
pub struct TileHeads {
    /// That of its own rows.
    pub own: u32,
    /// Query heads of its steps: the first one,
    pub first: u32,
    /// and how many.
    pub turns: u32,
    /// Query heads of a batch entry.
    pub all: u32,
    /// Query heads to a head of gathered rows.
    pub divisor: u32,
}

/// Those of the `outer`-th of `heads`. In a loop over `columns` a tile of keys goes through all query heads of its group, or tiles are of `each` query
/// head.
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
