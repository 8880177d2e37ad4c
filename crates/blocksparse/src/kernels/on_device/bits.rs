//! From the tensor that chooses blocks to bits: one for each pair of blocks, by rows and by columns. Of scores, see [`keep`](super::keep).

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
    /// Queries of a row.
    pub query_rows: usize,
    /// Keys of a block.
    pub block: usize,
    /// Number of queries.
    pub seq_q: usize,
    /// Position of the first query: `seq_kv − seq_q`.
    pub offset: i32,
}

/// Position of the first query of a block.
#[cube]
pub fn first_position(q_block: usize, grid: &Grid) -> i32 {
    (q_block * grid.query_rows) as i32 + grid.offset
}

/// Position of the last query of a block.
#[cube]
pub fn last_position(q_block: usize, grid: &Grid) -> i32 {
    (q_block * grid.query_rows + grid.query_rows).min(grid.seq_q) as i32 - 1i32 + grid.offset
}

/// Whether some query of a block may see some key of another.
#[cube]
pub fn seen(q_block: usize, kv_block: usize, grid: &Grid, #[comptime] causal: bool) -> bool {
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
