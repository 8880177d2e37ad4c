//! From the tensor that chooses blocks to bits: one per pair of blocks, by rows and by columns. For scores, see `budget`.

use cubecl::prelude::*;
use cubecl::server::Handle;

use super::cubes;
use crate::args::buffer;

/// Numbers of blocks, and their sizes.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub struct Grid {
    /// Number of query blocks.
    pub q_blocks: usize,
    /// Number of key blocks.
    pub kv_blocks: usize,
    /// Words per row of bits.
    pub words: usize,
    /// Queries per query block.
    pub query_rows: usize,
    /// Keys per key block.
    pub block: usize,
    /// Number of queries.
    pub seq_q: usize,
    /// Position of the first query: `seq_kv − seq_q`.
    pub offset: i32,
}

/// Returns the position of the first query of a block.
#[cube]
pub fn first_position(q_block: usize, grid: &Grid) -> i32 {
    (q_block * grid.query_rows) as i32 + grid.offset
}

/// Returns the position of the last query of a block.
#[cube]
pub fn last_position(q_block: usize, grid: &Grid) -> i32 {
    (q_block * grid.query_rows + grid.query_rows).min(grid.seq_q) as i32 - 1i32 + grid.offset
}

/// Whether the causal mask allows a query of one block to attend to a key of the other.
#[cube]
pub fn seen(q_block: usize, kv_block: usize, grid: &Grid, #[comptime] causal: bool) -> bool {
    let mut result = kv_block < grid.kv_blocks;
    if comptime!(causal) {
        let start = (kv_block * grid.block) as i32;
        result = result && start <= last_position(q_block, grid);
    }
    result
}

/// Packs `mask` `[patterns, q_blocks, kv_blocks]` into `bits` `[patterns, q_blocks, words]`. A unit makes a word.
#[cube(launch_unchecked, address_type = "dynamic")]
pub fn from_mask<T: Int>(
    mask: &[T],
    bits: &mut [u32],
    grid: Grid,
    #[comptime] causal: bool,
    #[define(T)] _element: ElemType,
) {
    let at = ABSOLUTE_POS;
    if at < bits.len() {
        let row = at / grid.words;
        let first = at % grid.words * 32;
        let mut word = 0u32;
        for bit in 0..32usize {
            let kv_block = first + bit;
            if seen(row % grid.q_blocks, kv_block, &grid, causal)
                && u32::cast_from(mask[row * grid.kv_blocks + kv_block]) != 0u32
            {
                word |= 1u32 << bit as u32;
            }
        }
        bits[at] = word;
    }
}

/// Makes bits from `indices` `[patterns, q_blocks, most]`. Indices that are not a key block are skipped. A unit makes a row.
#[cube(launch_unchecked, address_type = "dynamic")]
pub fn from_indices(
    indices: &[i32],
    bits: &mut [u32],
    grid: Grid,
    most: usize,
    rows: usize,
    #[comptime] causal: bool,
) {
    let row = ABSOLUTE_POS;
    if row < rows {
        for word in 0..grid.words {
            bits[row * grid.words + word] = 0u32;
        }
        for i in 0..most {
            let index = indices[row * most + i];
            if index >= 0i32 && seen(row % grid.q_blocks, index as usize, &grid, causal) {
                let kv_block = index as usize;
                bits[row * grid.words + kv_block / 32] |= 1u32 << (kv_block % 32) as u32;
            }
        }
    }
}

/// Score of a block that cannot be chosen: a NaN that no other score has.
pub const HIDDEN: u32 = 0xffff_ffff;

/// Score that replaces every other NaN.
const NO_NUMBER: u32 = 0x7fc0_0000;

/// Location of the bits of blocks that can be chosen. A word per head has the first row of its bits, and the bits `[rows, words]` follow.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub struct Allowed {
    /// Offset of the bits, after one word per batch entry and head.
    pub bits: usize,
    /// Heads per batch entry.
    pub heads: usize,
    /// Last batch entry.
    pub last_entry: usize,
    /// Patterns of the choice per batch entry.
    pub patterns: usize,
}

/// Returns word `word` of the allowed blocks of row `row`, counted over all patterns.
#[cube]
fn allowed_word(allowed: &[u32], row: usize, word: usize, grid: &Grid, of: &Allowed) -> u32 {
    let pattern = row / grid.q_blocks;
    let entry = (pattern / of.patterns).min(of.last_entry);
    let head = entry * of.heads + pattern % of.patterns * (of.heads / of.patterns);
    let first = allowed[head] as usize;
    allowed[of.bits + (first + row % grid.q_blocks) * grid.words + word]
}

/// Copies `scores` `[patterns, q_blocks, kv_blocks]`, with [`HIDDEN`] for blocks that cannot be chosen. A unit makes a score.
#[cube(launch_unchecked, address_type = "dynamic")]
pub fn hide(scores: &[u32], allowed: &[u32], hidden: &mut [u32], grid: Grid, of: Allowed) {
    let at = ABSOLUTE_POS;
    if at < hidden.len() {
        let row = at / grid.kv_blocks;
        let block = at % grid.kv_blocks;
        let mut score = scores[at];
        if score & 0x7fff_ffffu32 > 0x7f80_0000u32 {
            score = NO_NUMBER.runtime();
        }
        let word = allowed_word(allowed, row, block / 32, &grid, &of);
        if (word >> (block % 32) as u32) & 1u32 == 0u32 {
            score = HIDDEN.runtime();
        }
        hidden[at] = score;
    }
}

/// Clears the bits `[patterns, q_blocks, words]` of blocks that cannot be chosen. A unit makes a word.
#[cube(launch_unchecked, address_type = "dynamic")]
pub fn cut(bits: &mut [u32], allowed: &[u32], grid: Grid, of: Allowed) {
    let at = ABSOLUTE_POS;
    if at < bits.len() {
        let own = allowed_word(allowed, at / grid.words, at % grid.words, &grid, &of);
        let kept = bits[at] & own;
        bits[at] = kept;
    }
}

/// Counts the bits of each row. A unit counts a row.
#[cube(launch_unchecked, address_type = "dynamic")]
pub fn count_rows(bits: &[u32], counts: &mut [i32], words: usize) {
    let row = ABSOLUTE_POS;
    if row < counts.len() {
        let mut count = 0u32;
        for word in 0..words {
            count += bits[row * words + word].count_ones();
        }
        counts[row] = count as i32;
    }
}

/// Transposes bits to columns, `[patterns, kv_blocks, column_words]`. A unit makes a word.
#[cube(launch_unchecked, address_type = "dynamic")]
pub fn transpose(bits: &[u32], columns: &mut [u32], grid: Grid, column_words: usize) {
    let at = ABSOLUTE_POS;
    if at < columns.len() {
        let column = at / column_words;
        let first = at % column_words * 32;
        let kv_block = column % grid.kv_blocks;
        let row0 = column / grid.kv_blocks * grid.q_blocks;
        let mut word = 0u32;
        for bit in 0..32usize {
            let q_block = first + bit;
            if q_block < grid.q_blocks {
                let source = bits[(row0 + q_block) * grid.words + kv_block / 32];
                let kept = (source >> (kv_block % 32) as u32) & 1u32;
                word |= kept << bit as u32;
            }
        }
        columns[at] = word;
    }
}

/// Rows and columns of the tile of pairs that a cube transposes, and its units.
const SQUARE_ROWS: usize = 256;
const SQUARE_COLS: usize = 512;
const SQUARE_UNITS: usize = 128;

/// Transposes bits of pairs `[patterns, rows, words of columns]`.
pub fn turn_pairs(
    client: &Client,
    bits: &Handle,
    patterns: usize,
    [rows, cols]: [usize; 2],
) -> Handle {
    let [row_len, len] =
        [(rows, cols), (cols, rows)].map(|(one, other)| patterns * one * other.div_ceil(32));
    let made = client.empty(len * size_of::<u32>());
    let squares = rows.div_ceil(SQUARE_ROWS) * cols.div_ceil(SQUARE_COLS);
    // SAFETY: a cube reads the existing words of its tile of rows and columns, and writes the same bits by columns.
    unsafe {
        transpose_pairs::launch_unchecked(
            client,
            cubes(client, patterns * squares),
            CubeDim::new_1d(SQUARE_UNITS as u32),
            AddressType::U32,
            buffer(bits, row_len),
            buffer(&made, len),
            patterns,
            rows,
            cols,
        );
    }
    made
}

/// Transposes bits of pairs `[patterns, rows, words of columns]` to `[patterns, cols, words of rows]`. A cube transposes a tile in shared memory, so that
/// loads and stores are 32 contiguous bytes.
#[cube(launch_unchecked, address_type = "dynamic")]
fn transpose_pairs(bits: &[i32], columns: &mut [i32], patterns: usize, rows: usize, cols: usize) {
    let words = comptime!(SQUARE_COLS / 32);
    let groups = comptime!(SQUARE_ROWS / 32);
    let row_words = cols.div_ceil(32);
    let column_words = rows.div_ceil(32);
    let across = cols.div_ceil(comptime!(SQUARE_COLS));
    let of_pattern = across * rows.div_ceil(comptime!(SQUARE_ROWS));
    // Every unit of a cube reaches the barrier. A cube beyond the last pattern writes nothing.
    let is_one = CUBE_POS < patterns * of_pattern;
    let square = CUBE_POS.min(patterns * of_pattern - 1);
    let pattern = square / of_pattern;
    let first_row = square % of_pattern / across * comptime!(SQUARE_ROWS);
    let first_word = square % across * words;
    // One word of padding after every 32 rows, so that units of consecutive groups read different banks.
    let mut tile =
        Shared::<[u32]>::new_slice(comptime!(SQUARE_ROWS * SQUARE_COLS / 32 + SQUARE_ROWS / 32));
    let mut at = UNIT_POS as usize;
    while at < comptime!(SQUARE_ROWS * SQUARE_COLS / 32) {
        let row = at / words;
        let word = at % words;
        let mut found = 0u32;
        if first_row + row < rows && first_word + word < row_words {
            found = bits[(pattern * rows + first_row + row) * row_words + first_word + word] as u32;
        }
        tile[at + row / 32] = found;
        at += comptime!(SQUARE_UNITS);
    }
    sync_cube();
    let mut at = UNIT_POS as usize;
    while at < SQUARE_COLS * groups {
        let group = at % groups;
        let column = at / groups;
        let from = group * comptime!(32 * SQUARE_COLS / 32 + 1) + column / 32;
        let shift = (column % 32) as u32;
        let mut made = 0u32;
        #[unroll]
        for bit in 0..32usize {
            let word = tile[from + bit * words];
            made |= ((word >> shift) & 1u32) << comptime!(bit as u32);
        }
        let column = first_word * 32 + column;
        let word = first_row / 32 + group;
        if is_one && column < cols && word < column_words {
            columns[(pattern * cols + column) * column_words + word] = made as i32;
        }
        at += comptime!(SQUARE_UNITS);
    }
}
