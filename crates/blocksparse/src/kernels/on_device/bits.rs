//! From the tensor that chooses blocks to bits: one for each pair of blocks, by rows and by columns.

use cubecl::prelude::*;

/// The pairs of blocks there are.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub struct Grid {
    /// Rows of query blocks.
    pub q_blocks: usize,
    /// Columns of key blocks.
    pub kv_blocks: usize,
    /// Words of a row of bits.
    pub words: usize,
    /// Positions of a block.
    pub block: usize,
    /// Number of queries.
    pub seq_q: usize,
    /// Position of the first query: `seq_kv − seq_q`.
    pub offset: i32,
}

/// Position of the first query of a block.
#[cube]
fn first_position(q_block: usize, grid: &Grid) -> i32 {
    (q_block * grid.block) as i32 + grid.offset
}

/// Position of the last query of a block.
#[cube]
fn last_position(q_block: usize, grid: &Grid) -> i32 {
    (q_block * grid.block + grid.block).min(grid.seq_q) as i32 - 1i32 + grid.offset
}

/// Whether some query of a block may see some key of another.
#[cube]
fn seen(q_block: usize, kv_block: usize, grid: &Grid, #[comptime] causal: bool) -> bool {
    let mut result = kv_block < grid.kv_blocks;
    if comptime!(causal) {
        let start = (kv_block * grid.block) as i32;
        result = result && start <= last_position(q_block, grid);
    }
    result
}

/// `mask` `[patterns, q_blocks, kv_blocks]`, a bit for each; `bits` `[patterns, q_blocks, words]`. A unit makes a word.
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

/// `indices` `[patterns, q_blocks, most]`, of which those of no key block count for nothing. A unit makes a row.
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

/// How the highest scores of a row are chosen.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub struct TopK {
    /// Blocks of a row, the forced ones among them.
    pub k: u32,
    /// How many blocks up to the queries' own are forced, at most one more than there are.
    pub local: usize,
    /// How many of the first key blocks are forced.
    pub first: usize,
}

/// Units of a row of scores. A unit has whole words of it.
pub const ROW_UNITS: usize = 64;

/// `scores` `[patterns, q_blocks, kv_blocks]`, the bits of f32 numbers. A cube makes a row:
///
/// ```text
/// m = k − forced blocks
/// t = the largest number that m or more keys of the other blocks reach      found bit by bit
/// chosen: the forced blocks, keys above t, and the first of those that equal t, up to m
/// ```
#[cube(launch_unchecked, address_type = "dynamic")]
pub fn from_scores(
    scores: &[u32],
    bits: &mut [u32],
    grid: Grid,
    top: TopK,
    rows: usize,
    #[comptime] causal: bool,
) {
    // Cubes beyond the last row make it again.
    let row = CUBE_POS.min(rows - 1);
    let q_block = row % grid.q_blocks;
    let base = row * grid.kv_blocks;
    let mut shared = Shared::<[u32]>::new_slice(ROW_UNITS);
    let own_words = grid.words.div_ceil(ROW_UNITS);
    let first_word = (UNIT_POS as usize * own_words).min(grid.words);
    let end_word = (first_word + own_words).min(grid.words);

    let mut forced_blocks = 0u32;
    let mut others = 0u32;
    for kv_block in first_word * 32..end_word * 32 {
        if seen(q_block, kv_block, &grid, causal) {
            if forced(q_block, kv_block, &grid, &top) {
                forced_blocks += 1u32;
            } else {
                others += 1u32;
            }
        }
    }
    let forced_blocks = total(forced_blocks, &mut shared);
    let others = total(others, &mut shared);
    let wanted = (top.k.max(forced_blocks) - forced_blocks).min(others);

    let mut threshold = 0u32;
    for bit in 0..32u32 {
        let candidate = threshold | (1u32 << (31u32 - bit));
        let mut reached = 0u32;
        for kv_block in first_word * 32..end_word * 32 {
            if seen(q_block, kv_block, &grid, causal)
                && !forced(q_block, kv_block, &grid, &top)
                && key(scores[base + kv_block]) >= candidate
            {
                reached += 1u32;
            }
        }
        if total(reached, &mut shared) >= wanted {
            threshold = candidate;
        }
    }

    let mut above = 0u32;
    let mut equal = 0u32;
    for kv_block in first_word * 32..end_word * 32 {
        if seen(q_block, kv_block, &grid, causal) && !forced(q_block, kv_block, &grid, &top) {
            let key = key(scores[base + kv_block]);
            if key > threshold {
                above += 1u32;
            }
            if key == threshold {
                equal += 1u32;
            }
        }
    }
    let mut left = wanted - total(above, &mut shared);
    // Equal ones of the units before.
    let all = total(equal, &mut shared);
    let mut before = 0u32;
    for unit in 0..UNIT_POS as usize {
        before += shared[unit];
    }
    left = left.min(all);
    left = left.max(before) - before;
    for word in first_word..end_word {
        let mut kept = 0u32;
        for bit in 0..32usize {
            let kv_block = word * 32 + bit;
            if seen(q_block, kv_block, &grid, causal) {
                if forced(q_block, kv_block, &grid, &top) {
                    kept |= 1u32 << bit as u32;
                } else {
                    let key = key(scores[base + kv_block]);
                    if key > threshold {
                        kept |= 1u32 << bit as u32;
                    }
                    if key == threshold && left > 0u32 {
                        kept |= 1u32 << bit as u32;
                        left -= 1u32;
                    }
                }
            }
        }
        bits[row * grid.words + word] = kept;
    }
}

/// Whether a block is chosen whatever its score.
#[cube]
fn forced(q_block: usize, kv_block: usize, grid: &Grid, top: &TopK) -> bool {
    let start = (kv_block * grid.block) as i32;
    let near = start <= last_position(q_block, grid)
        && first_position(q_block, grid) - start < (top.local * grid.block) as i32;
    kv_block < top.first || (top.local != 0 && near)
}

/// A number that orders f32 numbers, given as bits: NaN is the lowest, −0 equals 0.
#[cube]
fn key(number: u32) -> u32 {
    let size = number & 0x7fff_ffffu32;
    let mut bits = number;
    if size > 0x7f80_0000u32 {
        bits = 0xff80_0000u32;
    }
    if size == 0u32 {
        bits = 0u32;
    }
    select(bits >> 31u32 == 1u32, !bits, bits | 0x8000_0000u32)
}

/// The sum over the units of a cube; `shared` keeps their values.
#[cube]
fn total(value: u32, shared: &mut Shared<[u32]>) -> u32 {
    sync_cube();
    shared[UNIT_POS as usize] = value;
    sync_cube();
    let mut sum = 0u32;
    for unit in 0..ROW_UNITS {
        sum += shared[unit];
    }
    sum
}

/// The bits by columns, `[patterns, kv_blocks, column_words]`. A unit makes a word.
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
