//! From bits to the words of a launch plan, as in [`TilePlan`](blocksparse::plan::TilePlan), in buffers whose sizes the host knows.
//!
//! ```text
//! count     number of masked and full entries per tile      one unit per tile
//! offsets   first entry of each tile                        one cube per pattern
//! rank      order of tiles, most work first                 one unit per tile
//! entries   masked entries, padding, full entries           one unit per tile
//! ```
//!
//! [`tables`](super::tables) makes the masks, and the first tile of each head.
//!
//! If patterns have few tiles, [`at_once`](super::at_once) does all of it in one launch.
//!
//! A tile's mask depends on the offset between its rows and the entry's columns, and on which of its block rows have the block. All possible masks are in a
//! table, and a mask's id encodes which one it is.

use cubecl::prelude::*;

use blocksparse::plan::Mainloop;

/// Division of bits into tiles and steps: the compile-time shape of the kernels.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Cut {
    /// Whether rows are queries or keys.
    pub mainloop: Mainloop,
    /// Positions per tile.
    pub rows: usize,
    /// Entries per step.
    pub per_step: usize,
    /// Positions per entry.
    pub group: usize,
    /// Positions per block.
    pub block: usize,
    /// Whether queries attend to no later keys.
    pub causal: bool,
}

impl Cut {
    /// Block rows per tile.
    pub fn height(&self) -> usize {
        (self.rows / self.block).max(1)
    }

    /// Entries per block in a tile.
    pub fn parts(&self) -> usize {
        self.block / self.group
    }

    /// Words per row of a mask.
    pub fn mask_words(&self) -> usize {
        self.group.div_ceil(32)
    }

    /// Spacing of the distances at which a diagonal may cross an entry.
    pub fn distance_step(&self) -> usize {
        self.rows.min(self.group)
    }

    /// Least distance below the diagonal at which an entry has no allowed pair.
    pub fn below(&self) -> usize {
        match self.mainloop {
            Mainloop::Rows => self.rows,
            Mainloop::Columns => self.group,
        }
    }

    /// Least distance above the diagonal at which all pairs of an entry are allowed.
    fn above(&self) -> usize {
        match self.mainloop {
            Mainloop::Rows => self.group - 1,
            Mainloop::Columns => self.rows - 1,
        }
    }

    /// Number of ways in which a diagonal may cross an entry. One more id means no crossing.
    pub fn crossings(&self) -> usize {
        match self.causal {
            true => (self.below() + self.above()) / self.distance_step() + 1,
            false => 0,
        }
    }

    /// Number of masks of the table: full, empty, and every subset of block rows with every crossing and both sequence ends.
    pub fn masks(&self) -> usize {
        2 + (1 << self.height()) * (self.crossings() + 1) * 4
    }
}

/// Sizes of a pattern's bits and tiles.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub struct Extent {
    /// Tiles per pattern.
    pub tiles: usize,
    /// Block rows per pattern.
    pub lines: usize,
    /// Words of a block row's bits.
    pub words: usize,
    /// Number of positions of rows.
    pub row_len: i32,
    /// Number of positions of columns.
    pub col_len: i32,
    /// Position of the first query.
    pub offset: i32,
    /// Entries reserved per pattern.
    pub room: usize,
}

/// Offsets of a plan's sections.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub struct Places {
    /// First tile record of each head.
    pub heads: usize,
    /// Tiles by decreasing work, with their records.
    pub order: usize,
    /// Tile records.
    pub tiles: usize,
    /// Masks.
    pub masks: usize,
    /// Entries.
    pub entries: usize,
}

/// Id of the full mask.
pub const FULL: u32 = blocksparse::FULL;
/// Id of the mask without allowed pairs.
pub const EMPTY: u32 = blocksparse::plan::EMPTY;

/// Returns the id of the mask of an entry whose columns begin at `col`, in a tile whose rows begin at `row` and whose block rows in `subset` have the block.
#[cube]
fn mask_id(subset: u32, row: i32, col: i32, extent: &Extent, #[comptime] cut: Cut) -> u32 {
    let crossings = comptime!(cut.crossings() as u32);
    let mut crossing = 0u32;
    crossing += crossings;
    let mut empty = col >= extent.col_len;
    if comptime!(cut.causal) {
        let below = comptime!(cut.below() as i32);
        let above = comptime!(cut.above() as i32);
        let distance = distance(row, col, extent, cut);
        empty = empty || distance <= -below;
        if distance > -below && distance < above {
            crossing = (distance + below) as u32 / comptime!(cut.distance_step() as u32);
        }
    }
    let row_end = select(
        row + comptime!(cut.rows as i32) > extent.row_len,
        1u32,
        0u32,
    );
    let col_end = select(
        col + comptime!(cut.group as i32) > extent.col_len,
        1u32,
        0u32,
    );
    let id = 2u32 + ((subset * (crossings + 1u32) + crossing) * 2u32 + row_end) * 2u32 + col_end;
    let all = comptime!((1u32 << cut.height()) - 1);
    let full = subset == all && crossing == crossings && row_end + col_end == 0u32;
    select(empty, EMPTY, select(full, FULL, id))
}

/// Returns by how much the queries of an entry are after its keys. Row `r` and column `c` are an allowed pair if `c − r`, or in a loop over columns
/// `r − c`, is at most that.
#[cube]
fn distance(row: i32, col: i32, extent: &Extent, #[comptime] cut: Cut) -> i32 {
    let mut distance = row + extent.offset - col;
    if comptime!(matches!(cut.mainloop, Mainloop::Columns)) {
        distance = col + extent.offset - row;
    }
    distance
}

/// Returns the bits in word `word` that any of a tile's block rows has.
#[cube]
fn union(
    bits: &[u32],
    line: usize,
    word: usize,
    end: usize,
    extent: &Extent,
    #[comptime] cut: Cut,
) -> u32 {
    let mut union = 0u32;
    #[unroll]
    for k in 0..comptime!(cut.height()) {
        if line + k < end {
            union |= bits[(line + k) * extent.words + word];
        }
    }
    union
}

/// Returns which of a tile's block rows have block `bit` of word `word`.
#[cube]
pub fn subset(
    bits: &[u32],
    line: usize,
    word: usize,
    bit: u32,
    end: usize,
    extent: &Extent,
    #[comptime] cut: Cut,
) -> u32 {
    let mut subset = 1u32;
    if comptime!(cut.height() > 1) {
        subset = 0u32;
        #[unroll]
        for k in 0..comptime!(cut.height()) {
            if line + k < end {
                let kept = (bits[(line + k) * extent.words + word] >> bit) & 1u32;
                subset |= kept << comptime!(k as u32);
            }
        }
    }
    subset
}

/// Returns the bits in word `word` that all of a tile's block rows have.
#[cube]
fn whole(
    bits: &[u32],
    line: usize,
    word: usize,
    end: usize,
    extent: &Extent,
    #[comptime] cut: Cut,
) -> u32 {
    let mut whole = 0xffff_ffffu32.runtime();
    #[unroll]
    for k in 0..comptime!(cut.height()) {
        let mut own = 0u32.runtime();
        if line + k < end {
            own = bits[(line + k) * extent.words + word];
        }
        whole &= own;
    }
    whole
}

/// Whether entries of word `word` that all block rows of a tile have are full. That is so if no diagonal crosses them, and none is at an end of the
/// sequence. The tile's rows begin at `row`.
#[cube]
fn is_clear(row: i32, word: usize, extent: &Extent, #[comptime] cut: Cut) -> bool {
    let first = (word * comptime!(32 * cut.block)) as i32;
    let last = first + comptime!((32 * cut.block - cut.group) as i32);
    let mut clear = row + comptime!(cut.rows as i32) <= extent.row_len
        && last + comptime!(cut.group as i32) <= extent.col_len;
    if comptime!(cut.causal) {
        // In a loop over columns, later entries are farther from the diagonal. In a loop over rows, they are nearer.
        let nearest = match comptime!(cut.mainloop) {
            Mainloop::Rows => last,
            Mainloop::Columns => first,
        };
        clear = clear && distance(row, nearest, extent, cut) >= comptime!(cut.above() as i32);
    }
    clear
}

/// Location of a tile in the bits and in the sequence.
#[derive(CubeType, Clone, Copy)]
pub struct Place {
    /// Its first block row, counted over all patterns.
    pub line: usize,
    /// First block row of the next pattern.
    pub end: usize,
    /// Its first row.
    row: i32,
}

/// Returns the location of tile `at`, counted over all patterns.
#[cube]
pub fn place(at: usize, extent: &Extent, #[comptime] cut: Cut) -> Place {
    let first = at / extent.tiles * extent.lines;
    let row = at % extent.tiles * comptime!(cut.rows);
    Place {
        line: first + row / comptime!(cut.block),
        end: first + extent.lines,
        row: row as i32,
    }
}

/// Numbers of steps of a tile.
#[derive(CubeType, Clone, Copy)]
pub struct Counted {
    /// Number of steps.
    pub steps: u32,
    /// Number of steps with masks. They come first.
    pub masked: u32,
}

/// Numbers of entries of a tile.
#[derive(CubeType, Clone, Copy)]
pub struct Entries {
    /// Entries with masks.
    pub masked: u32,
    /// Full entries.
    pub full: u32,
}

/// Counts the entries of a tile in words `from..to` of its bits.
#[cube]
pub fn entries_of(
    bits: &[u32],
    place: &Place,
    from: usize,
    to: usize,
    extent: &Extent,
    #[comptime] cut: Cut,
) -> Entries {
    let mut masked = 0u32;
    let mut full = 0u32;
    for word in from..to {
        let union = union(bits, place.line, word, place.end, extent, cut);
        if union != 0u32 {
            let mut left = union;
            if is_clear(place.row, word, extent, cut) {
                let parts = comptime!(cut.parts() as u32);
                let whole = whole(bits, place.line, word, place.end, extent, cut);
                full += whole.count_ones() * parts;
                masked += (union & !whole).count_ones() * parts;
                left = 0u32;
            }
            while left != 0u32 {
                let bit = left.trailing_zeros();
                left &= left - 1u32;
                let subset = subset(bits, place.line, word, bit, place.end, extent, cut);
                let col = (word * 32 + bit as usize) * comptime!(cut.block);
                for part in 0..comptime!(cut.parts()) {
                    let col = (col + part * comptime!(cut.group)) as i32;
                    let id = mask_id(subset, place.row, col, extent, cut);
                    if id == FULL {
                        full += 1u32;
                    } else if id != EMPTY {
                        masked += 1u32;
                    }
                }
            }
        }
    }
    Entries { masked, full }
}

/// Returns the numbers of steps of a tile's entries.
#[cube]
pub fn in_steps(entries: &Entries, #[comptime] cut: Cut) -> Counted {
    let per_step = comptime!(cut.per_step as u32);
    let (masked, full) = (entries.masked, entries.full);
    let steps = (masked + full).div_ceil(per_step);
    let fill = steps * per_step - masked - full;
    Counted {
        steps,
        masked: (masked + fill).div_ceil(per_step),
    }
}

/// Returns the numbers of steps of tile `at`.
#[cube]
pub fn counted(bits: &[u32], at: usize, extent: &Extent, #[comptime] cut: Cut) -> Counted {
    let place = place(at, extent, cut);
    let entries = entries_of(bits, &place, 0usize, extent.words, extent, cut);
    in_steps(&entries, cut)
}

/// Counts the entries of each tile into its record: 0, number of steps, number of steps with masks.
#[cube(launch_unchecked, address_type = "dynamic")]
pub fn count(
    bits: &[u32],
    plan: &mut [u32],
    extent: Extent,
    places: Places,
    tiles: usize,
    #[comptime] cut: Cut,
) {
    let at = ABSOLUTE_POS;
    if at < tiles {
        let counted = counted(bits, at, &extent, cut);
        let record = places.tiles + at * 3;
        plan[record] = 0u32;
        plan[record + 1] = counted.steps;
        plan[record + 2] = counted.masked;
    }
}

/// Units that compute the offsets of a pattern.
pub const OFFSET_UNITS: usize = 64;

/// Computes the first entry of each tile. Entries of a pattern are consecutive, and patterns are `extent.room` entries apart.
#[cube(launch_unchecked, address_type = "dynamic")]
pub fn offsets(
    plan: &mut [u32],
    extent: Extent,
    places: Places,
    patterns: usize,
    #[comptime] per_step: usize,
) {
    // Cubes beyond the last pattern repeat it.
    let pattern = CUBE_POS.min(patterns - 1);
    let mut shared = Shared::<[u32]>::new_slice(OFFSET_UNITS);
    let own = extent.tiles.div_ceil(OFFSET_UNITS);
    let first = (UNIT_POS as usize * own).min(extent.tiles);
    let end = (first + own).min(extent.tiles);
    let records = places.tiles + pattern * extent.tiles * 3;
    let mut steps = 0u32;
    for tile in first..end {
        steps += plan[records + tile * 3 + 1];
    }
    shared[UNIT_POS as usize] = steps;
    sync_cube();
    let mut before = 0u32;
    for unit in 0..UNIT_POS as usize {
        before += shared[unit];
    }
    for tile in first..end {
        let record = records + tile * 3;
        plan[record] = (pattern * extent.room) as u32 + before * comptime!(per_step as u32);
        before += plan[record + 1];
    }
}

/// Orders the tiles of each pattern by decreasing work, each with its record.
#[cube(launch_unchecked, address_type = "dynamic")]
pub fn rank(plan: &mut [u32], extent: Extent, places: Places, tiles: usize) {
    let at = ABSOLUTE_POS;
    if at < tiles {
        let first = at / extent.tiles * extent.tiles;
        let record = places.tiles + at * 3;
        let steps = plan[record + 1];
        let mut rank = first;
        for tile in first..first + extent.tiles {
            let others = plan[places.tiles + tile * 3 + 1];
            if others > steps || (others == steps && tile < at) {
                rank += 1;
            }
        }
        let target = places.order + rank * 4;
        plan[target] = (at - first) as u32;
        plan[target + 1] = plan[record];
        plan[target + 2] = steps;
        plan[target + 3] = plan[record + 2];
    }
}

/// Makes the entries of each tile, in the order of [`listed`].
#[cube(launch_unchecked, address_type = "dynamic")]
pub fn entries(
    bits: &[u32],
    plan: &mut [u32],
    extent: Extent,
    places: Places,
    tiles: usize,
    #[comptime] cut: Cut,
) {
    let at = ABSOLUTE_POS;
    if at < tiles {
        let record = places.tiles + at * 3;
        let first = places.entries + plan[record] as usize * 2;
        let steps = plan[record + 1];
        listed(bits, plan, at, first, steps, &extent, cut);
    }
}

/// Lists the entries of tile `at` from word `first` on: masked ones from the front, full ones from the back, and between them the padding of the steps.
#[cube]
fn listed(
    bits: &[u32],
    plan: &mut [u32],
    at: usize,
    first: usize,
    steps: u32,
    extent: &Extent,
    #[comptime] cut: Cut,
) {
    let place = place(at, extent, cut);
    let end = first + steps as usize * comptime!(cut.per_step * 2);
    let words = extent.words;
    let left = listed_words(bits, plan, &place, 0usize, words, first, end, extent, cut);
    filled(plan, left.front, left.back);
}

/// The unused words of a plan from `front` up to `back`.
#[derive(CubeType, Clone, Copy)]
pub struct Gap {
    pub front: usize,
    pub back: usize,
}

/// Lists the entries of words `from..to` of a tile's bits in the gap from `front` to `back`: masked ones from its front, full ones from its back. Returns
/// the remaining gap.
#[cube]
pub fn listed_words(
    bits: &[u32],
    plan: &mut [u32],
    place: &Place,
    from: usize,
    to: usize,
    front: usize,
    back: usize,
    extent: &Extent,
    #[comptime] cut: Cut,
) -> Gap {
    let mut front = front;
    let mut back = back;
    for word in from..to {
        let union = union(bits, place.line, word, place.end, extent, cut);
        if union != 0u32 {
            let mut clear = 0u32.runtime();
            if is_clear(place.row, word, extent, cut) {
                clear = whole(bits, place.line, word, place.end, extent, cut);
            }
            let mut left = union;
            while left != 0u32 {
                let bit = left.trailing_zeros();
                left &= left - 1u32;
                let block = word * 32 + bit as usize;
                if (clear >> bit) & 1u32 == 1u32 {
                    for part in 0..comptime!(cut.parts()) {
                        back -= 2;
                        plan[back] = (block * comptime!(cut.parts()) + part) as u32;
                        plan[back + 1] = FULL;
                    }
                } else {
                    let subset = subset(bits, place.line, word, bit, place.end, extent, cut);
                    for part in 0..comptime!(cut.parts()) {
                        let entry = block * comptime!(cut.parts()) + part;
                        let col = (entry * comptime!(cut.group)) as i32;
                        let id = mask_id(subset, place.row, col, extent, cut);
                        if id == FULL {
                            back -= 2;
                            plan[back] = entry as u32;
                            plan[back + 1] = FULL;
                        } else if id != EMPTY {
                            plan[front] = entry as u32;
                            plan[front + 1] = id;
                            front += 2;
                        }
                    }
                }
            }
        }
    }
    Gap { front, back }
}

/// Fills a gap with entries without allowed pairs.
#[cube]
pub fn filled(plan: &mut [u32], front: usize, back: usize) {
    let mut front = front;
    while front < back {
        plan[front] = 0u32;
        plan[front + 1] = EMPTY;
        front += 2;
    }
}
