//! How a launch cuts a layout, and where the parts of a plan lie.

use crate::{BlockLayout, BlockMask, Run};

/// Side of the layout that the tiles' rows are.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Mainloop {
    /// Tiles of queries against the keys they attend to: forward and dQ.
    Rows,
    /// Tiles of keys against the queries that attend to them: dK and dV.
    Columns,
}

impl Mainloop {
    /// What there is of queries and of keys, as the tiles' own side and the other one.
    pub fn sides<T>(self, queries: T, keys: T) -> [T; 2] {
        match self {
            Self::Rows => [queries, keys],
            Self::Columns => [keys, queries],
        }
    }

    /// Positions of a layout's [sides](Self::sides).
    pub fn lengths(self, layout: &BlockLayout) -> [usize; 2] {
        self.sides(layout.seq_q(), layout.seq_kv())
    }

    /// The blocks of one of a pattern's rows, or of its columns.
    pub(super) fn runs(self, layout: &BlockLayout, pattern: usize, line: usize) -> &[Run] {
        match self {
            Self::Rows => layout.row_runs(pattern, line),
            Self::Columns => layout.column_runs(pattern, line),
        }
    }

    /// Returns whether a mask has the pair at a row and column of a tile.
    pub(super) fn allows(self, mask: &BlockMask, row: usize, col: usize) -> bool {
        let [query, key] = self.sides(row, col);
        mask.get(query, key)
    }

    /// Blocks of a layout's [sides](Self::sides).
    pub fn blocks(self, layout: &BlockLayout) -> [usize; 2] {
        self.sides(layout.q_blocks(), layout.kv_blocks())
    }
}

/// Parameters by which a plan cuts a layout.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Tiling {
    /// Side of the rows.
    pub mainloop: Mainloop,
    /// Positions of a tile.
    pub rows: usize,
    /// Positions of a step.
    pub cols: usize,
    /// True if entries say where their block's stored weights are. Then a tile lies within one block row.
    pub places: bool,
    /// True if a tile's block rows are chosen to be alike. Otherwise they are adjacent.
    pub clustered: bool,
    /// True if entries say how many tiles before theirs have the same entry: the order in which tiles add to what they
    /// share. Then all patterns share one order of tiles, and entries are in the order in which a tile should go through them.
    pub visits: bool,
    /// With visits: whether tiles that are much longer than the others count them for themselves, since they add to sums of
    /// their own.
    pub apart: bool,
    /// True if an entry is a whole step, of adjacent positions, and has a bit for each block of the tile in it. Otherwise entries are
    /// blocks, or parts of one, from anywhere.
    pub coarse: bool,
}

impl Tiling {
    /// Of entries that are blocks, or parts of one, and say nothing else.
    pub const fn new(mainloop: Mainloop, rows: usize, cols: usize) -> Self {
        Self {
            mainloop,
            rows,
            cols,
            places: false,
            clustered: false,
            visits: false,
            apart: false,
            coarse: false,
        }
    }

    /// For who asks only which blocks tiles have.
    pub(super) fn without_places(self) -> Self {
        Self {
            places: false,
            ..self
        }
    }

    /// Block rows of a tile, 1 of one that is lower than a block.
    pub fn height(&self, layout: &BlockLayout) -> usize {
        (self.rows / layout.block_size()).max(1)
    }

    /// Words of an entry.
    pub fn entry_words(&self) -> usize {
        self.bits_at() + if self.coarse { BIT_WORDS } else { 0 }
    }

    /// Words of a coarse entry before its bits.
    pub fn bits_at(&self) -> usize {
        2 + usize::from(self.places || self.visits)
    }

    /// Positions that an entry names, in blocks of `b`.
    pub fn group(&self, b: usize) -> usize {
        match self.coarse {
            true => self.cols,
            false => self.cols.min(b),
        }
    }

    /// Returns whether entries can be coarse, in blocks of `b`: tiles and steps have whole blocks, and not more than there are bits.
    pub fn may_be_coarse(&self, b: usize) -> bool {
        let whole = self.rows.is_multiple_of(b) && self.cols.is_multiple_of(b);
        whole && self.rows / b * (self.cols / b) <= 32 * BIT_WORDS
    }
}

/// Words of a coarse entry's bits.
pub const BIT_WORDS: usize = 2;

/// The visit of an entry that only fills up a step; the bits of visits.
pub const NO_VISIT: u32 = u32::MAX >> 2;
/// Bit of a visit: nobody visits these columns later. No entry has it where tiles count visits for themselves.
pub const LAST_VISIT: u32 = 1 << 30;
/// Bit of the visit of a step's first entry: the masks of this step matter.
pub const MASKED_STEP: u32 = 1 << 31;

/// Mask id of an entry without any pair, which fills up a step. Id 0 is the full entry.
pub const EMPTY: u32 = 1;

/// Where the parts of `TilePlan::words` begin.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sections {
    /// `[batch | 1, heads]`: the first of the tile records of this head's pattern.
    pub heads: usize,
    /// `[batch | 1, heads]`: the place of the head's first block among the stored weights.
    pub places: usize,
    /// `[patterns, tiles, 4]`: tile indices, those with most steps first, each with the tile's record.
    pub order: usize,
    /// `[patterns · tiles, rows / block]`: the block rows of each tile of a clustered plan, beyond the last where there
    /// are too few. Empty otherwise.
    pub rows: usize,
    /// `[patterns · tiles, 3]`: first entry, steps, steps whose masks matter.
    pub tiles: usize,
    /// `[entries, entry_words]`: position / group, mask id, place or visit if there is one, and of a coarse entry the bits: bit
    /// `i · cols / block + k` says whether the tile's block row `i` keeps the `k`-th block of the entry.
    pub entries: usize,
    /// `[masks, rows, mask_words]`, bit `c % 32` of word `c / 32` is column `c`.
    pub masks: usize,
}
