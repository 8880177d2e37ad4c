//! Shape of a tile, and the locations of its rows and columns.

use cubecl::prelude::*;

use crate::call::ScoreKind;
use crate::shared::addressing::*;
use blocksparse::plan::Mainloop;

/// Compile-time shape of a kernel. It is part of the key in the cache of compiled kernels, so it does not depend on sequence lengths or patterns.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Tile {
    /// Whether a tile's rows are queries or keys.
    pub mainloop: Mainloop,
    /// Rows per tile.
    pub rows: usize,
    /// Units along a row. Each has four columns of a step.
    pub units_x: usize,
    /// Rows per unit.
    pub unit_rows: usize,
    /// Width of queries and keys.
    pub head_dim: usize,
    /// Width of values.
    pub value_dim: usize,
    /// Consecutive positions per entry.
    pub group: usize,
    /// Words per row of a mask.
    pub mask_words: usize,
    /// Block size of the stored weights, if weights are stored.
    pub store: Option<usize>,
    /// Options of scores besides scaled products.
    pub score: ScoreKind,
    /// Whether the forward kernel writes each row's largest score.
    pub max_scores: bool,
    /// Whether the backward kernel computes the bias's gradient instead of those of its inputs.
    pub bias_gradient: bool,
    /// Whether the backward kernel computes all gradients in its loop over columns.
    pub fused: bool,
    /// Whether rows are reduced with plane operations. Otherwise through shared memory.
    pub planes: bool,
    /// Whether positions are listed by residue class.
    pub residue: bool,
    /// Whether the kernel continues from the outputs of an earlier part of the pattern.
    pub carry: bool,
    /// Whether the tile's rows are gathered from blocks with similar patterns.
    pub clustered: bool,
}

impl Tile {
    /// Whether rows are keys and columns queries.
    pub fn columns(&self) -> bool {
        self.mainloop == Mainloop::Columns
    }

    /// Columns per step.
    pub fn cols(&self) -> usize {
        4 * self.units_x
    }

    /// Rows of units, a power of two.
    pub fn units_y(&self) -> usize {
        self.rows / self.unit_rows
    }

    /// Units per cube.
    pub fn units(&self) -> usize {
        self.units_x * self.units_y()
    }

    /// Words per entry.
    pub fn entry_words(&self) -> usize {
        2 + usize::from(self.store.is_some())
    }

    /// Entries per step.
    pub fn entries(&self) -> usize {
        self.cols() / self.group
    }

    /// Vectors of four per unit in an output row.
    pub fn unit_fours(&self, dim: usize) -> usize {
        fours(dim).div_ceil(self.units_x)
    }

    /// Whether halves of a step can be skipped.
    pub fn has_halves(&self) -> bool {
        self.planes && self.units_x > 1
    }

    /// Row stride of the weights in shared memory, in vectors of four.
    pub fn weight_pitch(&self) -> usize {
        self.units_x | 1
    }
}

/// Vectors of four per row.
pub fn fours(dim: usize) -> usize {
    dim.div_ceil(4)
}

/// Row stride in shared memory, in vectors of four. It is odd, so that eight consecutive rows are in different banks.
pub fn pitch(dim: usize) -> usize {
    fours(dim) | 1
}

/// Index of a unit in its cube.
#[derive(CubeType, Clone, Copy)]
pub struct Unit {
    /// Index within a row of units.
    pub x: usize,
    /// Index of the row of units.
    pub y: usize,
}

/// Returns the unit's index.
#[cube]
pub fn unit_of_cube(#[comptime] t: Tile) -> Unit {
    Unit {
        x: UNIT_POS_X as usize % comptime!(t.units_x),
        y: UNIT_POS_X as usize / comptime!(t.units_x),
    }
}

/// Returns the position at a place.
#[cube]
pub fn position_at(place: usize, listing: &Listing, #[comptime] t: Tile) -> usize {
    position_of(place, listing, t.residue)
}

/// The steps of a cube's tile.
#[derive(CubeType, Clone, Copy)]
pub struct TileSteps {
    /// Its index among the tiles of a head.
    pub tile: usize,
    /// Location of its own rows: see [`row_place`].
    pub rows: usize,
    /// Word of its first entry.
    pub entry: usize,
    /// Number of steps.
    pub steps: usize,
    /// Number of steps with masks. They come first.
    pub masked: usize,
}

/// Returns the steps of the tile with rank `rank` of a head.
#[cube]
pub fn tile_steps(
    schedule: &Schedule,
    batch: usize,
    head: usize,
    rank: usize,
    #[comptime] t: Tile,
) -> TileSteps {
    let words = &schedule.plan.words;
    let first = words[schedule.parts.heads + batch * schedule.parts.batch + head] as usize;
    let ranked = schedule.parts.order + (first + rank) * 4;
    tile_steps_at(schedule, first, words[ranked] as usize, ranked + 1, t)
}

/// Returns the steps of tile `tile` of a head.
#[cube]
pub fn tile_steps_of(
    schedule: &Schedule,
    batch: usize,
    head: usize,
    tile: usize,
    #[comptime] t: Tile,
) -> TileSteps {
    let words = &schedule.plan.words;
    let first = words[schedule.parts.heads + batch * schedule.parts.batch + head] as usize;
    let record = schedule.parts.tiles + (first + tile) * 3;
    tile_steps_at(schedule, first, tile, record, t)
}

#[cube]
fn tile_steps_at(
    schedule: &Schedule,
    first: usize,
    tile: usize,
    record: usize,
    #[comptime] t: Tile,
) -> TileSteps {
    let words = &schedule.plan.words;
    let mut rows = tile * comptime!(t.rows);
    if comptime!(t.clustered) {
        rows = schedule.parts.rows + (first + tile) * comptime!(t.rows / t.group);
    }
    TileSteps {
        tile,
        rows,
        entry: schedule.parts.entries + words[record] as usize * comptime!(t.entry_words()),
        steps: words[record + 1] as usize,
        masked: words[record + 2] as usize,
    }
}

/// Returns the place of row `row` of a tile. `rows` is the tile's first place, or the word of its first block if clustered.
#[cube]
pub fn row_place(plan: &PlanWords, rows: usize, row: usize, #[comptime] t: Tile) -> usize {
    let mut place = rows + row;
    if comptime!(t.clustered) {
        // A step is at least a block wide, so an entry is a block.
        let block = comptime!(t.group);
        place = plan.words[rows + row / block] as usize * block + row % block;
    }
    place
}

/// Returns the positions of a unit's rows, from row `row` of a tile on. They are within one block.
#[cube]
pub fn row_span(plan: &PlanWords, rows: usize, row: usize, #[comptime] t: Tile) -> Span {
    let place = row_place(plan, rows, row, t);
    span_of(place, &plan.listing, t.residue)
}

/// Rows of a unit in a contiguous tensor.
#[derive(CubeType, Clone, Copy)]
pub struct UnitRows {
    /// Their positions.
    pub span: Span,
    /// Row of the head's first position.
    pub first: usize,
    /// Positions per head.
    pub len: usize,
}

/// Returns the unit's rows of a tile.
#[cube]
pub fn unit_rows(
    schedule: &Schedule,
    rows: usize,
    head_row: usize,
    len: usize,
    unit: &Unit,
    #[comptime] t: Tile,
) -> UnitRows {
    UnitRows {
        span: row_span(&schedule.plan, rows, unit.y * comptime!(t.unit_rows), t),
        first: head_row * len,
        len,
    }
}

/// Returns the place of column `col` of a step whose first entry is at word `entry`.
#[cube]
pub fn place(plan: &PlanWords, entry: usize, col: usize, #[comptime] t: Tile) -> usize {
    let group = comptime!(t.group);
    plan.words[entry + col / group * comptime!(t.entry_words())] as usize * group + col % group
}

/// Returns the positions of a unit's columns in a step. A block has at least four, so they are consecutive.
#[cube]
pub fn column_span(plan: &PlanWords, entry: usize, unit_x: usize, #[comptime] t: Tile) -> Span {
    let place = place(plan, entry, unit_x * 4, t);
    span_of(place, &plan.listing, t.residue)
}
