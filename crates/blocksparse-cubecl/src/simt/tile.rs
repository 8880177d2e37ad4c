//! The shape of a tile, and where its rows and columns are.

use cubecl::prelude::*;

use crate::call::ScoreKind;
use crate::shared::addressing::*;
use blocksparse::plan::Mainloop;

/// The comptime shape of a kernel: its key in the cache of compiled kernels, so nothing of it depends
/// on sequence lengths or patterns.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Tile {
    /// Whose rows a tile's are.
    pub mainloop: Mainloop,
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
    /// Whether columns are queries and rows keys, and not the other way round.
    pub fn columns(&self) -> bool {
        self.mainloop == Mainloop::Columns
    }

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

/// A unit's place among those of its cube.
#[derive(CubeType, Clone, Copy)]
pub struct Unit {
    /// Within a row of units.
    pub x: usize,
    /// Of the row.
    pub y: usize,
}

/// The unit's place.
#[cube]
pub fn unit_of_cube(#[comptime] t: Tile) -> Unit {
    Unit {
        x: UNIT_POS_X as usize % comptime!(t.units_x),
        y: UNIT_POS_X as usize / comptime!(t.units_x),
    }
}

/// The position at a place.
#[cube]
pub fn position_at(place: usize, listing: &Listing, #[comptime] t: Tile) -> usize {
    position_of(place, listing, t.residue)
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

/// The tile `tile` of a head.
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

/// The place of row `row` of a tile whose rows are at `rows`: its first place, or the word of its first block.
#[cube]
pub fn row_place(plan: &PlanWords, rows: usize, row: usize, #[comptime] t: Tile) -> usize {
    let mut place = rows + row;
    if comptime!(t.clustered) {
        // A step is at least a block wide, so that an entry is a block.
        let block = comptime!(t.group);
        place = plan.words[rows + row / block] as usize * block + row % block;
    }
    place
}

/// The positions of a unit's rows, the first of which is row `row` of a tile: not more than a block has.
#[cube]
pub fn row_span(plan: &PlanWords, rows: usize, row: usize, #[comptime] t: Tile) -> Span {
    let place = row_place(plan, rows, row, t);
    span_of(place, &plan.listing, t.residue)
}

/// The rows of a unit among those of a contiguous tensor.
#[derive(CubeType, Clone, Copy)]
pub struct UnitRows {
    /// Their positions.
    pub span: Span,
    /// The row of the head's first position,
    pub first: usize,
    /// and its positions.
    pub len: usize,
}

/// The unit's rows of a tile.
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

/// The place of column `col` of a step whose first entry is at word `entry`.
#[cube]
pub fn place(plan: &PlanWords, entry: usize, col: usize, #[comptime] t: Tile) -> usize {
    let group = comptime!(t.group);
    plan.words[entry + col / group * comptime!(t.entry_words())] as usize * group + col % group
}

/// The positions of a unit's columns in a step. A block has at least four, so that they follow each other.
#[cube]
pub fn column_span(plan: &PlanWords, entry: usize, unit_x: usize, #[comptime] t: Tile) -> Span {
    let place = place(plan, entry, unit_x * 4, t);
    span_of(place, &plan.listing, t.residue)
}
