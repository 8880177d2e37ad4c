//! The pages of the highest scores, by [`radix_select`](blocksparse_cubecl::primitives::radix_select) over blocks of them, a cube a row.

use blocksparse::Always;
use blocksparse_cubecl::prelude::*;
use blocksparse_cubecl::primitives::radix_select::{
    ListPlace, RadixTile, RowKeys, RowKeysExpand, Span, list_top_k,
};
use blocksparse_cubecl::shared::order_key::key;

/// What a call is.
#[derive(Clone, Copy, Debug)]
pub struct TopKPagesShape {
    /// Page lists.
    pub batch: usize,
    /// Heads of keys.
    pub kv_heads: usize,
    /// Rows of the table of a page list: 1 or `kv_heads`.
    pub tables: usize,
    /// Entries of a row of the table, which have scores.
    pub entries: usize,
    /// Slots of a page.
    pub page: usize,
    /// Pages of a block: they are kept together, by the sum of their scores.
    pub block: usize,
    /// Blocks that are chosen by score, at most, and those that have a place in a list.
    pub chosen: usize,
    pub kept: usize,
    /// Blocks that are kept whatever their score: the first, and up to the one in which a page list ends, which is one of them.
    pub forced: Always,
}

impl TopKPagesShape {
    /// Pages that are listed for each page list.
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
    /// Blocks that are chosen by score, at most, and those that have a place in a list.
    chosen: usize,
    kept: usize,
    /// Forced ones: the first, and up to the last of a page list.
    first: usize,
    local: usize,
}

/// Sums of the scores of blocks as keys.
#[derive(CubeType, Clone, Copy)]
struct BlockScores {
    /// The row's first score, and the last.
    start: usize,
    last: usize,
    /// Pages of a block.
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

/// The forced blocks of a page list and those of the highest `scores` `[batch, kv_heads, entries]` between them, ascending, as pages:
/// `[batch, kv_heads, kept · block]` entries of the table, −1 where there are fewer.
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
    // Cubes beyond the last row make it again.
    let at_row = CUBE_POS.min(sizes.rows - 1);
    let head = at_row % sizes.kv_heads;
    let page_list = at_row / sizes.kv_heads * sizes.tables + head % sizes.tables;
    let slots = max(spans[page_list * 4], 0i32) as usize;
    let pages = slots.div_ceil(page).min(sizes.entries);
    // Blocks that are chosen from, which are whole: those before and behind them are forced.
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
    // The first blocks that are forced, then the last ones, and nothing behind them.
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

/// Of each page list and head of keys the blocks of pages that are forced, that in which region one ends among them, and of the others so many with the highest
/// scores: of equal ones the earlier, and NaN is the lowest. `scores` are f32 `[batch, kv_heads, entries]`, of which those of the page list's pages count;
/// `spans` are `[batch, tables, 4]`, i32; `pages` are i32 `[batch, kv_heads, kept · block]`: entries of the table, ascending, and −1 behind them. Contiguous.
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
    // A step has few rows, each of which a cube's units wait for: four times as many as a long row's have fewer counts each.
    let columns = shape.entries.div_ceil(shape.block).saturating_mul(4);
    let tile = RadixTile::new(client, columns)?;
    let largest = rows.saturating_mul(shape.entries.max(shape.listed()));
    let address = address_of(client, largest)?;
    let cubes = spread(client, rows as u64)?;
    if rows * shape.entries * shape.kept == 0 {
        return Ok(());
    }
    // More are none's, and numbers of a kernel are small.
    let blocks = shape.entries.div_ceil(shape.block);
    // SAFETY: a cube reads the scores of its row and writes the pages of its row; the buffers have the lengths they say.
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
