//! The shape of a tile, and where its rows and columns are.

use cubecl::prelude::*;

use crate::call::ScoreKind;

use crate::shared::addressing::*;

/// The comptime shape of a kernel: its key in the cache of compiled kernels, so nothing of it depends
/// on sequence lengths or patterns.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Tile {
    /// Rows of a tile.
    pub rows: usize,
    /// Units side by side in a row; each has four columns of a step.
    pub units_x: usize,
    /// Rows of a unit.
    pub unit_rows: usize,
    /// Width of queries and keys.
    pub head_dim: usize,
    /// Width of values.
    pub value_dim: usize,
    /// Consecutive positions an entry names.
    pub group: usize,
    /// Words of a mask's row.
    pub mask_words: usize,
    /// Whether weights are stored, and the block size they are stored in.
    pub store: Option<usize>,
    /// What scores are besides scaled products.
    pub score: ScoreKind,
    /// Whether the forward kernel writes each row's largest score.
    pub max_scores: bool,
    /// Whether the backward kernel makes the bias's gradient, and not that of its inputs.
    pub bias_gradient: bool,
    /// Whether the backward kernel makes all gradients in its loop over columns.
    pub fused: bool,
    /// Whether plane operations reduce rows; else shared memory does.
    pub planes: bool,
    /// Whether positions are listed by residue class.
    pub residue: bool,
    /// Whether the kernel carries on from what an earlier part of the pattern left in its outputs.
    pub carry: bool,
    /// Whether the tile's rows are gathered from like blocks.
    pub clustered: bool,
}

impl Tile {
    /// Columns of a step.
    pub fn cols(&self) -> usize {
        4 * self.units_x
    }

    /// Rows of units, a power of two.
    pub fn units_y(&self) -> usize {
        self.rows / self.unit_rows
    }

    /// Units of a cube.
    pub fn units(&self) -> usize {
        self.units_x * self.units_y()
    }

    /// Words of an entry.
    pub fn entry_words(&self) -> usize {
        2 + usize::from(self.store.is_some())
    }

    /// Entries of a step.
    pub fn entries(&self) -> usize {
        self.cols() / self.group
    }

    /// Fours of an output row that one unit owns.
    pub fn unit_fours(&self, dim: usize) -> usize {
        fours(dim).div_ceil(self.units_x)
    }

    /// Whether the halves of a step can be left out.
    pub fn has_halves(&self) -> bool {
        self.planes && self.units_x > 1
    }

    /// Fours between two rows of the weights in shared memory.
    pub fn weight_pitch(&self) -> usize {
        self.units_x | 1
    }
}

/// Fours of a row.
pub fn fours(dim: usize) -> usize {
    dim.div_ceil(4)
}

/// Fours between two rows in shared memory: odd, so that eight consecutive rows lie in different banks.
pub fn pitch(dim: usize) -> usize {
    fours(dim) | 1
}

/// The position at a place.
#[cube]
pub fn position_at(place: usize, listing: &Listing, #[comptime] t: Tile) -> usize {
    position_of(place, listing, comptime!(t.residue))
}

/// The tile a cube works on.
#[derive(CubeType, Clone, Copy)]
pub struct TileSteps {
    /// Its index among the tiles of a head.
    pub tile: usize,
    /// Where its own rows are: see [`row_place`].
    pub rows: usize,
    /// Word of its first entry.
    pub entry: usize,
    /// Its steps.
    pub steps: usize,
    /// Of them, those whose masks matter.
    pub masked: usize,
}

/// The tile ranked `rank` of a head.
#[cube]
pub fn tile_steps(
    plan: &[u32],
    parts: &PlanParts,
    batch: usize,
    head: usize,
    rank: usize,
    #[comptime] t: Tile,
) -> TileSteps {
    let first = plan[parts.heads + batch * parts.batch + head] as usize;
    let ranked = parts.order + (first + rank) * 4;
    tile_steps_at(plan, parts, first, plan[ranked] as usize, ranked + 1, t)
}

/// The tile `tile` of the head whose records start at `first`.
#[cube]
pub fn tile_steps_of(
    plan: &[u32],
    parts: &PlanParts,
    first: usize,
    tile: usize,
    #[comptime] t: Tile,
) -> TileSteps {
    let record = parts.tiles + (first + tile) * 3;
    tile_steps_at(plan, parts, first, tile, record, t)
}

#[cube]
fn tile_steps_at(
    plan: &[u32],
    parts: &PlanParts,
    first: usize,
    tile: usize,
    record: usize,
    #[comptime] t: Tile,
) -> TileSteps {
    let mut rows = tile * comptime!(t.rows);
    if comptime!(t.clustered) {
        rows = parts.rows + (first + tile) * comptime!(t.rows / t.group);
    }
    TileSteps {
        tile,
        rows,
        entry: parts.entries + plan[record] as usize * comptime!(t.entry_words()),
        steps: plan[record + 1] as usize,
        masked: plan[record + 2] as usize,
    }
}

/// The place of row `row` of a tile whose rows are at `rows`: its first place, or the word of its first block.
#[cube]
pub fn row_place(plan: &[u32], rows: usize, row: usize, #[comptime] t: Tile) -> usize {
    let mut place = rows + row;
    if comptime!(t.clustered) {
        // A step is at least a block wide, so that an entry is a block.
        let block = comptime!(t.group);
        place = plan[rows + row / block] as usize * block + row % block;
    }
    place
}

/// The positions of a unit's rows, the first of which is row `row` of a tile: not more than a block has.
#[cube]
pub fn row_span(
    plan: &[u32],
    rows: usize,
    row: usize,
    listing: &Listing,
    #[comptime] t: Tile,
) -> Span {
    span_of(row_place(plan, rows, row, t), listing, comptime!(t.residue))
}

/// The place of column `col` of a step whose first entry is at word `entry`.
#[cube]
pub fn place(plan: &[u32], entry: usize, col: usize, #[comptime] t: Tile) -> usize {
    let group = comptime!(t.group);
    plan[entry + col / group * comptime!(t.entry_words())] as usize * group + col % group
}

/// The positions of a unit's columns in a step. A block has at least four, so that they follow each other.
#[cube]
pub fn column_span(
    plan: &[u32],
    entry: usize,
    unit_x: usize,
    listing: &Listing,
    #[comptime] t: Tile,
) -> Span {
    span_of(
        place(plan, entry, unit_x * 4, t),
        listing,
        comptime!(t.residue),
    )
}
