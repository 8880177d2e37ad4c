//! The sums of [`lines`](crate::kernels::selection::lines) without storing products: tensor cores compute the products twice, and only sums are written.
//!
//! ```text
//! logarithms   ln Σ exp over runs of keys, in the first matmul               [lists, queries, runs]
//! row logs     log2 Σ exp of each query                                      a query per cube
//! shares       attention of key blocks, where it is needed before the sums   32 blocks per cube
//! sums         weights over keys and diagonals, in the second matmul         per tile and 64 queries
//! lines        sums over tiles, for each key and each distance               one of each per unit
//! ```

use crate::kernels::selection::products::{RowsView, RunSums, asked, pitch};
use crate::kernels::selection::{NUMBERS, UNITS, across_cube};
use blocksparse_cubecl::prelude::*;
use blocksparse_cubecl::shared::row_tile::{Combine, RowTile, across_lanes};
use burn_fused_ops::kernels::linear::{
    Epilogue, EpilogueTensors, LINE_GROUPS, LINE_ROWS, ProductPlan, ProductRequest, SeenColumns,
    UNWANTED, line_elements, multiply,
};

/// Number of keys of a run.
pub(crate) const RUN: usize = 64;

/// Sums over runs of the last queries of a call, and the logarithms of their totals.
pub struct LineWeights<'a> {
    of: &'a LineSizes,
    element: ElemType,
    q: RowsView,
    k: RowsView,
    /// Plan of the matmul over all lists that computes sums over columns and diagonals.
    plan: ProductPlan,
    /// Natural logarithms, `[lists, queries, runs]`.
    runs: Handle,
    /// Base-2 logarithms of the totals, `[lists, queries]`.
    logs: Handle,
}

/// Returns views of the last queries and the keys.
fn views([q, k]: [&Handle; 2], of: &LineSizes) -> [RowsView; 2] {
    let ([lists, kv_lists], [queries, keys]) = (of.lists, of.seq);
    [
        RowsView::new(q, [lists, queries, of.width]),
        RowsView::new(k, [kv_lists, keys, of.width]),
    ]
}

/// Returns the plan of the matmul with sums over columns and diagonals.
///
/// # Errors
/// The reason why it does not run.
pub(crate) fn product_of_sums(
    client: &Client,
    element: ElemType,
    factors: [&Handle; 2],
    of: &LineSizes,
) -> Result<ProductPlan, &'static str> {
    let [queries, keys] = of.seq;
    if of.lists[0] * queries * keys.div_ceil(RUN) > NUMBERS {
        return Err("there are too many sums over runs");
    }
    let [q, k] = views(factors, of);
    if !run_sums(of).is_served(client, element, [&q, &k]) {
        return Err("the device or the type of numbers has no sums over runs");
    }
    planned(client, element, [&q, &k])
}

fn planned(
    client: &Client,
    element: ElemType,
    factors: [&RowsView; 2],
) -> Result<ProductPlan, &'static str> {
    let (_, request) = asked(element, factors).ok_or("products are of half precision")?;
    let request = ProductRequest {
        epilogue: Epilogue::LineSums,
        ..request
    };
    ProductPlan::new(client, request)
}

fn run_sums(of: &LineSizes) -> RunSums {
    RunSums {
        run: RUN,
        first: Some(first_seen(of)),
        factor: of.factor,
    }
}

/// Returns the number of keys that query 0 sees. Query `i` sees `i` more.
fn first_seen(of: &LineSizes) -> i64 {
    of.seq[1] as i64 - of.seq[0] as i64 + 1
}

impl<'a> LineWeights<'a> {
    /// Computes the logarithms for queries and keys as in [`line_sums`](crate::kernels::selection::lines::line_sums). `None` if their products must be stored.
    pub fn new(
        client: &Client,
        element: ElemType,
        factors: [&Handle; 2],
        of: &'a LineSizes,
    ) -> Result<Option<Self>, KernelError> {
        let Ok(plan) = product_of_sums(client, element, factors, of) else {
            return Ok(None);
        };
        let [q, k] = views(factors, of);
        let (rows, runs) = (of.lists[0] * of.seq[0], of.seq[1].div_ceil(RUN));
        let made = |len: usize| client.empty(len * size_of::<f32>());
        let (x, logs) = (made(rows * runs), made(rows));
        run_sums(of).log_sums(client, element, [&q, &k], &x)?;
        let tile = across_cube(client);
        // SAFETY: a cube reads the runs of its row and writes its logarithm.
        unsafe {
            row_logs::launch_unchecked(
                client,
                spread(client, rows as u64)?,
                CubeDim::new_1d(UNITS as u32),
                AddressType::U32,
                buffer(&x, rows * runs),
                buffer(&logs, rows),
                runs,
                rows,
                of.launched(0, of.lists[0]),
                tile,
            );
        }
        Ok(Some(Self {
            of,
            element,
            q,
            k,
            plan,
            runs: x,
            logs,
        }))
    }

    /// Returns the base-2 logarithms of queries' totals, `[lists, queries]`. If the first one of a list is [`UNWANTED`], its sums are skipped and 0.
    pub fn logs(&self) -> &Handle {
        &self.logs
    }

    /// Computes the attention from all queries to key blocks: `out` `[lists, blocks]`. The block is a multiple of [`RUN`].
    pub fn by_blocks(
        &self,
        client: &Client,
        block: usize,
        out: &Handle,
    ) -> Result<(), KernelError> {
        let ([lists, _], [queries, keys]) = (self.of.lists, self.of.seq);
        let (runs, blocks) = (keys.div_ceil(RUN), keys.div_ceil(block));
        let cubes = lists * blocks.div_ceil(BLOCKS);
        // SAFETY: a cube reads runs of its list and writes blocks of it.
        unsafe {
            shares_of_blocks::launch_unchecked(
                client,
                spread(client, cubes as u64)?,
                CubeDim::new_1d(UNITS as u32),
                AddressType::U32,
                buffer(&self.runs, lists * queries * runs),
                buffer(&self.logs, lists * queries),
                buffer(out, lists * blocks),
                queries,
                runs,
                block / RUN,
                blocks,
                cubes,
            );
        }
        Ok(())
    }

    /// Computes the sums of [`line_sums`](crate::kernels::selection::lines::line_sums).
    pub fn sums(&self, client: &Client, sums: &Handle) -> Result<(), KernelError> {
        let ([lists, kv_lists], [queries, keys]) = (self.of.lists, self.of.seq);
        let (group, bytes) = (lists / kv_lists, self.element.size());
        let numbers_of = |plan: &ProductPlan| {
            let cols = plan.tile_cols();
            keys.div_ceil(cols) * LINE_GROUPS * line_elements(cols)
        };
        let together = (NUMBERS / (group * numbers_of(&self.plan))).clamp(1, kv_lists);
        for first in (0..kv_lists).step_by(together) {
            let count = together.min(kv_lists - first);
            let here = count * group;
            let q = self.q.matrices(first * group, here, bytes);
            let k = self.k.matrices(first, count, bytes);
            let offset = first * group * queries * size_of::<f32>();
            let logs = self.logs.clone().offset_start(offset as u64);
            let plan = match count == kv_lists {
                true => self.plan,
                // Fewer matrices may select other tiles.
                false => planned(client, self.element, [&q, &k])
                    .map_err(|_| KernelError::Factor { factor: "b" })?,
            };
            let of_list = numbers_of(&plan);
            let parts = client.empty(here * of_list * size_of::<f32>());
            let Some(([left, right], _)) = asked(self.element, [&q, &k]) else {
                return Err(KernelError::Factor { factor: "b" });
            };
            let beside = EpilogueTensors {
                seen: Some(SeenColumns {
                    first: first_seen(self.of),
                    columns: keys,
                    factor: self.of.factor,
                }),
                logs: Some(&logs),
                ..EpilogueTensors::default()
            };
            multiply(client, &plan, [&left, &right], &parts, &beside)?;
            let numbers = here * 2 * keys;
            // SAFETY: a unit below `numbers` reads the tiles' sums of its key or distance and writes their total.
            unsafe {
                lines_of_parts::launch_unchecked(
                    client,
                    spread(client, numbers.div_ceil(UNITS) as u64)?,
                    CubeDim::new_1d(UNITS as u32),
                    AddressType::U32,
                    buffer(&parts, here * of_list),
                    buffer(&logs, here * queries),
                    buffer(sums, lists * 2 * keys),
                    self.of.launched(first * group, here),
                    plan.tile_cols(),
                );
            }
        }
        Ok(())
    }
}

/// Computes the base-2 logarithm of each row's total, one row per cube. `x` is `[rows, runs]`, `logs` `[rows]`.
#[cube(launch_unchecked, address_type = "dynamic")]
fn row_logs(
    x: &[f32],
    logs: &mut [f32],
    runs: usize,
    rows: usize,
    of: Lines,
    #[comptime] tile: RowTile,
) {
    // Surplus cubes repeat the last row.
    let row = CUBE_POS.min(rows - 1);
    let start = row * runs;
    let mut shared = Shared::<[f32]>::new_slice(comptime!(tile.shared()));
    let mut top = comptime!(-3.0e38f32).runtime();
    let mut run = UNIT_POS as usize;
    while run < runs {
        top = max(top, x[start + run]);
        run += comptime!(UNITS);
    }
    let top = across_lanes::<f32>(top, &mut shared, tile, Combine::Max);
    let mut whole = 0.0f32.runtime();
    let mut run = UNIT_POS as usize;
    while run < runs {
        whole += (x[start + run] - top).exp();
        run += comptime!(UNITS);
    }
    let whole = across_lanes::<f32>(whole, &mut shared, tile, Combine::Sum);
    if UNIT_POS == 0 {
        let log = (top + whole.ln()) * comptime!(std::f32::consts::LOG2_E);
        // A query that sees no key contributes nothing.
        logs[row] = select(seen(row % of.queries, &of) > 0, log, 0.0f32);
    }
}

/// Number of blocks of a cube, and of units that share a block's queries.
const BLOCKS: usize = 32;
const SHARERS: usize = UNITS / BLOCKS;

/// Sums the attention of each key block over all queries. `x` is `[lists, queries, runs]`, `logs` `[lists, queries]`, `out` `[lists, blocks]`.
#[cube(launch_unchecked, address_type = "dynamic")]
fn shares_of_blocks(
    x: &[f32],
    logs: &[f32],
    out: &mut [f32],
    queries: usize,
    runs: usize,
    in_block: usize,
    blocks: usize,
    count: usize,
) {
    let chunks = blocks.div_ceil(comptime!(BLOCKS));
    // Surplus cubes repeat the last blocks.
    let at = CUBE_POS.min(count - 1);
    let list = at / chunks;
    let unit = UNIT_POS as usize;
    let block = at % chunks * comptime!(BLOCKS) + unit % comptime!(BLOCKS);
    let mut shared = Shared::<[f32]>::new_slice(comptime!(UNITS));
    let mut sum = 0.0f32.runtime();
    let end = ((block + 1) * in_block).min(runs);
    let mut query = unit / comptime!(BLOCKS);
    while query < queries {
        let row = list * queries + query;
        let log = logs[row] * comptime!(std::f32::consts::LN_2);
        let mut run = block * in_block;
        while run < end {
            // A query that sees no key has logarithms below any product, so it adds 0.
            sum += (x[row * runs + run] - log).exp();
            run += 1;
        }
        query += comptime!(SHARERS);
    }
    shared[unit] = sum;
    sync_cube();
    if unit < comptime!(BLOCKS) && block < blocks {
        let mut total = shared[unit];
        #[unroll]
        for other in 1..comptime!(SHARERS) {
            total += shared[unit + comptime!(other * BLOCKS)];
        }
        out[list * blocks + block] = total;
    }
}

/// Sums the parts of each key and distance over tiles. `parts` is `[lists, tiles, 2, line_elements]`, `sums` `[all lists, 2, keys]`.
#[cube(launch_unchecked, address_type = "dynamic")]
fn lines_of_parts(
    parts: &[f32],
    logs: &[f32],
    sums: &mut [f32],
    of: Lines,
    #[comptime] cols: usize,
) {
    let at = ABSOLUTE_POS;
    if at < of.lists * 2 * of.keys {
        let numbers = comptime!(line_elements(cols));
        let (line, place) = (at / of.keys, at % of.keys);
        let list = line / 2;
        let tiles = of.keys.div_ceil(cols);
        let start = list * tiles;
        let mut sum = 0.0f32.runtime();
        if logs[list * of.queries] < comptime!(UNWANTED) {
            for group in 0..of.queries.div_ceil(comptime!(LINE_ROWS)) {
                if line % 2 == 0 {
                    let tile = (start + place / cols) * comptime!(LINE_GROUPS) + group;
                    sum += parts[tile * numbers + place % cols];
                } else {
                    // Virtual key at which the distance has diagonal 0. A distance spans two tiles; in the earlier one its diagonal is larger by a tile's
                    // number of columns.
                    let first = (of.keys + group * comptime!(LINE_ROWS) + comptime!(LINE_ROWS - 1))
                        as i32
                        - (of.queries + place) as i32;
                    let from = first.max(0i32) as usize;
                    let (own, diagonal) = (from / cols, from % cols);
                    if first >= 0i32 && own < tiles {
                        let tile = (start + own) * comptime!(LINE_GROUPS) + group;
                        sum += parts[tile * numbers + cols + diagonal];
                    }
                    if first >= 0i32 && own > 0 && diagonal < comptime!(LINE_ROWS - 1) {
                        let tile = (start + own - 1) * comptime!(LINE_GROUPS) + group;
                        sum += parts[tile * numbers + cols + cols + diagonal];
                    }
                }
            }
        }
        sums[(of.first * 2 + line) * of.keys + place] = sum;
    }
}

/// Number of elements per unit of a part.
pub const PART_NUMBERS: usize = 16;

/// Number of elements of a part of a row.
pub const PART: usize = UNITS * PART_NUMBERS;

/// Sizes of a call.
#[derive(Clone, Debug, PartialEq)]
pub struct LineSizes {
    /// `batch · heads` of queries and of keys; the latter divides the former.
    pub lists: [usize; 2],
    /// Number of last queries, which are all that `q` contains, and number of keys.
    pub seq: [usize; 2],
    /// Number of elements of a query.
    pub width: usize,
    /// Factor of the products before the softmax.
    pub factor: f64,
}

impl LineSizes {
    /// Returns launch arguments for `lists` lists from `first` on.
    pub(crate) fn launched(&self, first: usize, lists: usize) -> LinesLaunch {
        let [queries, keys] = self.seq;
        let (parts, factor) = (keys.div_ceil(PART), self.factor as f32);
        LinesLaunch::new(lists, first, queries, keys, pitch(keys), parts, factor)
    }
}

/// Sizes of the products of the last queries of some lists.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub struct Lines {
    pub lists: usize,
    /// Index of the first list.
    pub first: usize,
    pub queries: usize,
    pub keys: usize,
    /// Number of elements of a row of products.
    pub pitch: usize,
    /// Number of parts of a row.
    pub parts: usize,
    pub factor: f32,
}

/// Returns how many keys a query sees.
#[cube]
pub fn seen(query: usize, of: &Lines) -> usize {
    let behind = of.queries - 1 - query;
    of.keys.max(behind) - behind
}
