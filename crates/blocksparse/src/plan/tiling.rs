//! Tilings of a layout and the sections of a plan.

use crate::{BlockLayout, BlockMask, Run};

/// Side of the layout that the rows of a tile come from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Mainloop {
    /// Tiles of queries against the keys they attend to: forward and dQ.
    Rows,
    /// Tiles of keys against the queries that attend to them: dK and dV.
    Columns,
}

impl Mainloop {
    /// Orders a value for queries and a value for keys as the tile's own side and the other side.
    pub fn sides<T>(self, queries: T, keys: T) -> [T; 2] {
        match self {
            Self::Rows => [queries, keys],
            Self::Columns => [keys, queries],
        }
    }

    /// Returns the number of positions of a layout's [sides](Self::sides).
    pub fn lengths(self, layout: &BlockLayout) -> [usize; 2] {
        self.sides(layout.seq_q(), layout.seq_kv())
    }

    /// Returns the blocks of a row of a pattern, or of a column.
    pub(super) fn runs(self, layout: &BlockLayout, pattern: usize, line: usize) -> &[Run] {
        match self {
            Self::Rows => layout.row_runs(pattern, line),
            Self::Columns => layout.column_runs(pattern, line),
        }
    }

    /// Returns whether a mask allows the pair at a row and column of a tile.
    pub(super) fn allows(self, mask: &BlockMask, row: usize, col: usize) -> bool {
        let [query, key] = self.sides(row, col);
        mask.get(query, key)
    }

    /// Returns the number of blocks of a layout's [sides](Self::sides).
    pub fn blocks(self, layout: &BlockLayout) -> [usize; 2] {
        self.sides(layout.q_blocks(), layout.kv_blocks())
    }
}

/// Parameters by which a plan cuts a layout.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Tiling {
    /// Side of the tile rows.
    pub mainloop: Mainloop,
    /// Number of positions of a tile.
    pub rows: usize,
    /// Number of positions of a step.
    pub cols: usize,
    /// True if entries store the index of their block's weights. A tile then lies within one block row.
    pub places: bool,
    /// True if a tile consists of similar block rows, false if of adjacent ones.
    pub clustered: bool,
    /// True if entries store how many earlier tiles have the same entry: the order in which tiles add to shared sums. All patterns then share one order of
    /// tiles, and entries are in the order in which a tile processes them.
    pub visits: bool,
    /// With visits, true if tiles that are much longer than the others count their visits separately, since they add to separate sums.
    pub apart: bool,
    /// True if an entry is a whole step of adjacent positions with a bit for each block of the tile in it. Otherwise entries are
    /// blocks, or parts of a block, at any position.
    pub coarse: bool,
}

impl Tiling {
    /// Creates a tiling whose entries are blocks or parts of blocks, without places or visits.
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

    /// Drops the places, for callers that need only the blocks of tiles.
    pub(super) fn without_places(self) -> Self {
        Self {
            places: false,
            ..self
        }
    }

    /// Returns the number of block rows of a tile, at least 1.
    pub fn height(&self, layout: &BlockLayout) -> usize {
        (self.rows / layout.block_size()).max(1)
    }

    /// Returns the number of words of an entry.
    pub fn entry_words(&self) -> usize {
        self.bits_at() + if self.coarse { BIT_WORDS } else { 0 }
    }

    /// Returns the number of words of a coarse entry before its bits.
    pub fn bits_at(&self) -> usize {
        2 + usize::from(self.places || self.visits)
    }

    /// Returns the number of positions of an entry, for blocks of size `b`.
    pub fn group(&self, b: usize) -> usize {
        match self.coarse {
            true => self.cols,
            false => self.cols.min(b),
        }
    }

    /// Returns whether entries can be coarse for blocks of size `b`: tiles and steps consist of whole blocks, and no more than there are bits.
    pub fn may_be_coarse(&self, b: usize) -> bool {
        let whole = self.rows.is_multiple_of(b) && self.cols.is_multiple_of(b);
        whole && self.rows / b * (self.cols / b) <= 32 * BIT_WORDS
    }
}

/// Words for the bits of a coarse entry.
pub const BIT_WORDS: usize = 2;

/// The visit of a padding entry, and the mask of the visit bits.
pub const NO_VISIT: u32 = u32::MAX >> 2;
/// Flag of a visit: no later tile visits these columns. No entry has it if tiles count visits separately.
pub const LAST_VISIT: u32 = 1 << 30;
/// Flag of the visit of a step's first entry: the masks of this step matter.
pub const MASKED_STEP: u32 = 1 << 31;

/// Mask id of a padding entry without any pair. Id 0 is the full entry.
pub const EMPTY: u32 = 1;

/// Offsets of the sections of `TilePlan::words`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sections {
    /// `[batch | 1, heads]`: first tile record of the head's pattern.
    pub heads: usize,
    /// `[batch | 1, heads]`: index of the head's first block among the stored weights.
    pub places: usize,
    /// `[patterns, tiles, 4]`: tile indices, those with most steps first, each followed by the tile's record.
    pub order: usize,
    /// `[patterns · tiles, rows / block]`: block rows of each tile of a clustered plan, with indices beyond the last row as padding.
    /// Empty otherwise.
    pub rows: usize,
    /// `[patterns · tiles, 3]`: first entry, number of steps, number of steps whose masks matter.
    pub tiles: usize,
    /// `[entries, entry_words]`: position / group, mask id, place or visit if present, and the bits of a coarse entry. Bit `i · cols / block + k` says whether
    /// the tile's block row `i` keeps the `k`-th block of the entry.
    pub entries: usize,
    /// `[masks, rows, mask_words]`: bit `c % 32` of word `c / 32` is column `c`.
    pub masks: usize,
}
