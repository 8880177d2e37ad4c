//! Products of block means of queries and keys, and their softmax.

use crate::kernels::rows::blocks::{Beside, Blocked, OnlyLists, RowBlocks, block_means};
use crate::kernels::rows::whole::whole_means;
use crate::kernels::selection::products::{RowsView, SeenBlocks, Wanted, dots};
use crate::kernels::selection::{UNITS, lanes_of_rows};
use blocksparse_cubecl::on_device::bits::{Grid, GridLaunch, last_position};
use blocksparse_cubecl::prelude::*;
use blocksparse_cubecl::shared::row_tile::{Combine, RowTile, across_lanes};

/// Visibility of blocks for rows of means in causal attention.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SeenRows {
    /// Number of queries and keys.
    pub seq: [usize; 2],
    /// Number of queries, and of keys, of a block.
    pub block: usize,
    /// Index of the first row's block of queries.
    pub first: usize,
}

impl SeenRows {
    fn grid(&self) -> GridLaunch {
        let [seq_q, seq_kv] = self.seq;
        let blocks = seq_kv.div_ceil(self.block);
        let offset = seq_kv as i32 - seq_q as i32;
        let rows = seq_q.div_ceil(self.block);
        GridLaunch::new(rows, blocks, 1, self.block, self.block, seq_q, offset)
    }
}

/// Sizes of products of means.
#[derive(Clone, Debug, PartialEq)]
pub struct MeanProducts {
    /// `batch · heads` of queries and of keys; the latter divides the former.
    pub lists: [usize; 2],
    /// Number of query blocks.
    pub rows: usize,
    /// Number of key blocks.
    pub blocks: usize,
    /// Number of elements of a mean.
    pub width: usize,
    /// Factor of the products.
    pub factor: f64,
    /// Visibility, if not all blocks are visible. Hidden products may be 0.
    pub seen: Option<SeenRows>,
}

/// Computes `factor · a · bᵀ` of means `[lists, rows, width]` and `[kv lists, blocks, width]`: f32 `[lists, rows, blocks]`. With `only`, the products of other
/// lists are 0.
pub fn mean_products(
    client: &Client,
    [q, k]: [&Handle; 2],
    of: &MeanProducts,
    only: Option<OnlyLists>,
    out: &Handle,
) -> Result<(), KernelError> {
    let [lists, kv_lists] = of.lists;
    let q = RowsView::new(q, [lists, of.rows, of.width]);
    let k = RowsView::new(k, [kv_lists, of.blocks, of.width]);
    let seen = of.seen.map(|seen| SeenBlocks {
        grid: seen.grid(),
        first: seen.first,
    });
    let f32 = ElemType::Float(FloatKind::F32);
    let wanted = Wanted { seen, only };
    dots(
        client,
        f32,
        [&q, &k],
        (out, of.blocks),
        of.factor as f32,
        wanted,
    )
}

/// Number of units of a row.
const LANES: usize = 32;

/// Self-similarity of blocks. Blocks below the limit are kept regardless of their means.
#[derive(Clone, Copy, Debug)]
pub struct SelfSimilarity<'a> {
    /// Self-similarity of query blocks `[lists, rows]` and of key blocks `[kv lists, blocks]`, f32.
    pub alike: [&'a Handle; 2],
    /// Number of key lists.
    pub kv_lists: usize,
    /// Least self-similarity at which a mean represents its block.
    pub limit: f32,
}

/// Replaces rows of products `x` `[lists, rows, blocks]` by their softmax over visible blocks, in place. Hidden blocks become 0. Key blocks below the
/// self-similarity limit are left out of the softmax and become +∞, and so do all blocks of query blocks below the limit.
pub fn softmax_of_seen(
    client: &Client,
    x: &Handle,
    [lists, rows, blocks]: [usize; 3],
    seen: Option<SeenRows>,
    self_similarity: Option<SelfSimilarity>,
) -> Result<(), KernelError> {
    crate::kernels::selection::check(client)?;
    let count = lists * rows;
    let tile = lanes_of_rows(client, LANES, UNITS / LANES);
    let is_seen = seen.is_some();
    let grid = match seen {
        Some(seen) => seen.grid(),
        None => GridLaunch::new(rows, blocks, 1, 1, 1, rows, 0),
    };
    let first = seen.map_or(0, |seen| seen.first);
    let kv_lists = self_similarity.map_or(lists, |of| of.kv_lists);
    let alike = |i: usize| self_similarity.map(|of| of.alike[i]);
    // SAFETY: units read and write elements of their own row, which is below `count`.
    unsafe {
        softmax_rows::launch_unchecked(
            client,
            spread(client, count.div_ceil(UNITS / LANES) as u64)?,
            CubeDim::new_1d(UNITS as u32),
            AddressType::U32,
            buffer(x, count * blocks),
            optional(alike(0), count),
            optional(alike(1), kv_lists * blocks),
            grid,
            ProductRowsLaunch::new(
                first,
                rows,
                count,
                lists / kv_lists.max(1),
                self_similarity.map_or(0.0, |of| of.limit),
                f32::INFINITY,
            ),
            is_seen,
            tile,
        );
    }
    Ok(())
}

/// Initial value of maxima, below any product.
const LOWEST: f32 = -3.0e38;

/// Sizes of rows of products.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
struct ProductRows {
    /// Index of the query block of a list's first row.
    first: usize,
    /// Number of rows of a list.
    rows: usize,
    /// Number of rows of all lists.
    count: usize,
    /// Number of lists that share keys.
    group: usize,
    /// Least self-similarity at which a mean represents its block.
    limit: f32,
    /// +∞, for which WGSL has no literal.
    infinity: f32,
}

/// Returns whether a block's self-similarity is below the limit.
#[cube]
fn is_unlike(alike: &ComptimeOption<Box<[f32]>>, at: usize, limit: f32) -> bool {
    let mut unlike = false.runtime();
    #[comptime]
    match alike {
        ComptimeOption::Some(alike) => unlike = alike[at] < limit,
        ComptimeOption::None => {}
    }
    unlike
}

#[cube(launch_unchecked, address_type = "dynamic")]
fn softmax_rows(
    x: &mut [f32],
    q_alike: ComptimeOption<Box<[f32]>>,
    k_alike: ComptimeOption<Box<[f32]>>,
    grid: Grid,
    of: ProductRows,
    #[comptime] is_seen: bool,
    #[comptime] tile: RowTile,
) {
    let unit = UNIT_POS as usize;
    let lane = unit % comptime!(LANES);
    let own = CUBE_POS * comptime!(UNITS / LANES) + unit / comptime!(LANES);
    let row = own.min(of.count - 1);
    let start = row * grid.kv_blocks;
    let keys = row / of.rows / of.group * grid.kv_blocks;
    let mut end = grid.kv_blocks;
    if comptime!(is_seen) {
        let last = last_position(row % of.rows + of.first, &grid);
        let before = last.max(0i32) as usize / grid.block + 1;
        end = select(last < 0i32, 0usize, before.min(end));
    }
    let mut shared = Shared::<[f32]>::new_slice(comptime!(tile.shared()));
    let mut top = comptime!(LOWEST).runtime();
    let mut block = lane;
    while block < end {
        let is_left_out = is_unlike(&k_alike, keys + block, of.limit);
        top = max(
            top,
            select(is_left_out, comptime!(LOWEST), x[start + block]),
        );
        block += comptime!(LANES);
    }
    let top = across_lanes::<f32>(top, &mut shared, tile, Combine::Max);
    let mut whole = 0.0f32.runtime();
    let mut block = lane;
    while block < end {
        let is_left_out = is_unlike(&k_alike, keys + block, of.limit);
        whole += select(is_left_out, 0.0f32, (x[start + block] - top).exp());
        block += comptime!(LANES);
    }
    let whole = across_lanes::<f32>(whole, &mut shared, tile, Combine::Sum);
    let part = select(whole > 0.0f32, 1.0f32 / whole, 0.0f32);
    if own < of.count {
        let keeps_all = is_unlike(&q_alike, row, of.limit);
        let mut block = lane;
        while block < grid.kv_blocks {
            let p = (x[start + block] - top).exp() * part;
            let weighed = select(block < end, p, 0.0f32);
            let is_kept = keeps_all || is_unlike(&k_alike, keys + block, of.limit);
            x[start + block] = select(is_kept, of.infinity, weighed);
            block += comptime!(LANES);
        }
    }
}

/// Request for softmax scores of self-similar blocks.
#[derive(Clone, Debug, PartialEq)]
pub struct AlikeScores {
    /// Sizes of the products of means; `rows` counts blocks of the passed queries.
    pub products: MeanProducts,
    /// Number of passed queries, and of keys.
    pub seq: [usize; 2],
    /// Number of queries, and of keys, of a block.
    pub block: usize,
    /// Least self-similarity at which a mean represents its block: the mean cosine of all pairs of its rows.
    pub similarity: f64,
    /// True to subtract the mean over the sequence from the keys.
    pub smooth: bool,
}

/// Computes the softmax of products of means over the blocks that rows see, `[lists, rows, blocks]`, with self-similarities as in [`softmax_of_seen`]. `q` is
/// contiguous `[lists, queries, width]`, `k` `[kv lists, keys, width]`.
///
/// ```text
/// means of all keys              if they are subtracted from the keys                     two launches
/// means and self-similarities    of key blocks and query blocks; reads each block once    a block per cube
/// products of means
/// softmax of the products        +∞ for blocks below the self-similarity limit            a row per plane
/// ```
pub fn alike_scores(
    client: &Client,
    element: ElemType,
    [q, k]: [&Handle; 2],
    of: &AlikeScores,
    out: &Handle,
) -> Result<(), KernelError> {
    crate::kernels::selection::check(client)?;
    let ([lists, kv_lists], width) = (of.products.lists, of.products.width);
    let [queries, keys] = of.seq;
    let made = |numbers: usize| client.empty(numbers * size_of::<f32>());
    let q_blocks = RowBlocks::new(lists, [queries, width], of.block);
    let k_blocks = RowBlocks::new(kv_lists, [keys, width], of.block);
    let [q_count, k_count] = [&q_blocks, &k_blocks].map(|of| of.lists * of.blocks());
    let less = match of.smooth {
        true => Some(whole_means(client, element, k, [kv_lists, keys, width])?),
        false => None,
    };
    let [q_means, k_means] = [q_count, k_count].map(|count| made(count * width));
    let [q_alike, k_alike] = [q_count, k_count].map(made);
    let of_queries = Blocked {
        x: q,
        of: &q_blocks,
        means: &q_means,
    };
    let of_keys = Blocked {
        x: k,
        of: &k_blocks,
        means: &k_means,
    };
    let beside = Beside {
        second: Some(of_queries),
        alike: Some([&k_alike, &q_alike]),
        less: less.as_ref(),
        only: None,
    };
    block_means(client, element, of_keys, beside)?;
    let MeanProducts { rows, blocks, .. } = of.products;
    mean_products(client, [&q_means, &k_means], &of.products, None, out)?;
    let self_similarity = SelfSimilarity {
        alike: [&q_alike, &k_alike],
        kv_lists,
        limit: of.similarity as f32,
    };
    let dims = [lists, rows, blocks];
    softmax_of_seen(client, out, dims, of.products.seen, Some(self_similarity))
}
