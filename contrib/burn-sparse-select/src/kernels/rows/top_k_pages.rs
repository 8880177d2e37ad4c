//! Top-k of pages by [`radix_select`](blocksparse_cubecl::primitives::radix_select) over blocks of pages, one row per cube.

use blocksparse::Always;
use blocksparse_cubecl::prelude::*;
use blocksparse_cubecl::primitives::radix_select::{
    ListPlace, RadixTile, RowKeys, RowKeysExpand, Span, list_top_k,
};
use blocksparse_cubecl::shared::order_key::key;

/// Sizes of a call.
#[derive(Clone, Copy, Debug)]
pub struct TopKPagesShape {
    /// Number of page lists.
    pub batch: usize,
    pub kv_heads: usize,
    /// Number of rows of a page list's table: 1 or `kv_heads`.
    pub tables: usize,
    /// Number of entries of a table row, each of which has a score.
    pub entries: usize,
    /// Number of slots of a page.
    pub page: usize,
    /// Number of pages of a block. They are selected together, by the sum of their scores.
    pub block: usize,
    /// Upper bound of the blocks that are selected by score, and capacity of a list in blocks.
    pub chosen: usize,
    pub kept: usize,
    /// Blocks that are selected regardless of their score: the first ones, and the last ones up to the end of a page list, at least the last block.
    pub forced: Always,
}

impl TopKPagesShape {
    /// Returns the number of pages of a result list.
    fn listed(&self) -> usize {
        self.kept.saturating_mul(self.block)
    }
}

#[derive(CubeType, CubeLaunch, Clone, Copy)]
struct Sizes {
    rows: usize,
    kv_heads: usize,
    tables: usize,
    entries: usize,
    /// Upper bound of the blocks that are selected by score, and capacity of a list in blocks.
    chosen: usize,
    kept: usize,
    /// Number of forced blocks at the start and at the end of a page list.
    first: usize,
    local: usize,
}

/// Sums of scores of blocks, as sort keys.
#[derive(CubeType, Clone, Copy)]
struct BlockScores {
    /// Index of the row's first and last score.
    start: usize,
    last: usize,
    /// Number of pages of a block.
    #[cube(comptime)]
    block: usize,
}

#[cube]
impl RowKeys for BlockScores {
    fn load<N: Size>(&self, numbers: &[Vector<u32, N>], vector: usize) -> Vector<u32, N> {
        let first = self.start + vector * self.block;
        let mut score = Vector::<f32, N>::reinterpret(numbers[first]);
        for page in 1..self.block {
            score += Vector::<f32, N>::reinterpret(numbers[(first + page).min(self.last)]);
        }
        Vector::<u32, N>::reinterpret(score)
    }

    fn key(&self, number: u32, _at: usize) -> u32 {
        key(number)
    }
}

/// Returns the forced blocks of a page list and those with the highest `scores` `[batch, kv_heads, entries]` between them, ascending, as pages:
/// `[batch, kv_heads, kept · block]` table entries, −1 where there are fewer.
#[cube(launch_unchecked, address_type = "dynamic")]
fn top_k<N: Size>(
    scores: &[Vector<u32, N>],
    spans: &[i32],
    pages_of: &mut [i32],
    sizes: Sizes,
    #[comptime] page: usize,
    #[comptime] block: usize,
    #[comptime] t: RadixTile,
) {
    // Surplus cubes repeat the last row.
    let at_row = CUBE_POS.min(sizes.rows - 1);
    let head = at_row % sizes.kv_heads;
    let page_list = at_row / sizes.kv_heads * sizes.tables + head % sizes.tables;
    let slots = max(spans[page_list * 4], 0i32) as usize;
    let pages = slots.div_ceil(page).min(sizes.entries);
    // Candidate blocks, all of them complete. The blocks before and after are forced.
    let own_blocks = (max(pages, 1usize) - 1) / block + 1;
    let high = own_blocks - min(sizes.local, own_blocks);
    let low = min(sizes.first, high);
    let wanted = min(sizes.chosen, high - low);
    let start = at_row * sizes.entries;
    let keys = BlockScores {
        start,
        last: start + sizes.entries - 1,
        block,
    };
    let span = Span {
        begin: low,
        end: high,
    };
    let mut looked = high - low;
    if comptime!(!t.sums.by_planes()) {
        looked = sizes.entries;
    }
    let place = ListPlace::new(at_row * sizes.kept + low, looked);
    let mut places = ComptimeOption::new_None();
    list_top_k::<N, BlockScores>(
        scores,
        &keys,
        &span,
        wanted as u32,
        pages_of,
        &mut places,
        &place,
        block,
        t,
    );
    // Writes the first forced blocks, then the last ones, and −1 after them.
    let into = at_row * sizes.kept * block;
    let mut at = UNIT_POS as usize;
    while at < low * block {
        pages_of[into + at] = at as i32;
        at += comptime!(t.units);
    }
    let behind = (low + wanted) * block;
    let mut at = behind + UNIT_POS as usize;
    while at < sizes.kept * block {
        let entry = high * block + (at - behind);
        pages_of[into + at] = select(entry < pages, entry as i32, -1i32);
        at += comptime!(t.units);
    }
}

/// Selects blocks of pages for each page list and KV head: the forced ones, including the one in which the list ends, and those with the highest scores; ties
/// in favor of the earlier, NaN lowest. `scores` are f32 `[batch, kv_heads, entries]`, of which those of the list's pages count; `spans` are i32
/// `[batch, tables, 4]`; `pages` are i32 `[batch, kv_heads, kept · block]`: table entries, ascending, then −1. All contiguous.
///
/// # Errors
/// [`KernelError`] if the device cannot index the scores, or its cubes are too small.
pub fn topk_pages(
    client: &Client,
    shape: &TopKPagesShape,
    scores: &Handle,
    spans: &Handle,
    pages: &Handle,
) -> Result<(), KernelError> {
    let rows = shape.batch * shape.kv_heads;
    // There are few rows per decoding step, and each waits for a single cube. Passing four times the columns selects a tile with more units, each with fewer
    // elements.
    let columns = shape.entries.div_ceil(shape.block).saturating_mul(4);
    let tile = RadixTile::new(client, columns)?;
    let largest = rows.saturating_mul(shape.entries.max(shape.listed()));
    let address = address_of(client, largest)?;
    let cubes = spread(client, rows as u64)?;
    if rows * shape.entries * shape.kept == 0 {
        return Ok(());
    }
    // Clamped to the number of blocks, because kernel arguments are narrow.
    let blocks = shape.entries.div_ceil(shape.block);
    // SAFETY: a cube reads the scores of its row and writes the pages of its row; the buffers have the lengths that `buffer` gets.
    unsafe {
        top_k::launch_unchecked(
            client,
            cubes,
            CubeDim::new_1d(tile.units as u32),
            address,
            1,
            buffer(scores, rows * shape.entries),
            buffer(spans, shape.batch * shape.tables * 4),
            buffer(pages, rows * shape.listed()),
            SizesLaunch::new(
                rows,
                shape.kv_heads,
                shape.tables,
                shape.entries,
                shape.chosen,
                shape.kept,
                shape.forced.first.min(blocks),
                shape.forced.local.min(blocks),
            ),
            shape.page,
            shape.block,
            tile,
        );
    }
    Ok(())
}
