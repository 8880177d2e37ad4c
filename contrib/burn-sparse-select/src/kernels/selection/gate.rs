//! The blocks that single queries choose by the means of their keys.
//!
//! ```text
//! means        of blocks of keys, in f32
//! halves       a mean as two numbers of the queries' type, whose sum it is but for 2⁻¹⁶ or so of it     tensor cores alone
//! products     of some queries of every head and the means that those see
//! picks        the highest of each query                                                              a unit a query
//! ```
//!
//! Where a tile of a product has all blocks, queries pick there (`linear/highest.rs`), and no product is in memory.

use cubecl::ir::{ElemType, FloatKind};
use cubecl::prelude::*;
use cubecl::server::Handle;

use crate::kernels::rows::blocks::{Blocked, RowBlocks, block_means};
use crate::kernels::selection::products::asked;
use crate::kernels::selection::products::{RowsView, pitch, products};
use crate::kernels::selection::{NUMBERS, UNITS};
use blocksparse_cubecl::args::{address_of, buffer, spread};
use blocksparse_cubecl::error::KernelError;
use blocksparse_cubecl::shared::order_key::key;
use burn_fused_ops::kernels::linear::{
    Epilogue, EpilogueTensors, Highest, ProductPlan, SeenColumns, multiply,
};

/// Sizes of a call.
#[derive(Clone, Debug, PartialEq)]
pub struct GateSizes {
    /// Batch entries times heads, of queries and of keys; these divide those.
    pub lists: [usize; 2],
    /// Queries and keys of each.
    pub seq: [usize; 2],
    /// Elements of a query.
    pub width: usize,
    /// Keys of a block.
    pub block: usize,
    /// Blocks that a query chooses, at most.
    pub most: usize,
}

/// Queries of a cube that picks, one of each unit, and blocks that it has at a time.
const ROWS: usize = 128;
const COLUMNS: usize = 32;

/// Blocks that a query picks in one pass over its scores, at most.
const AT_A_TIME: usize = 4;

/// The fewest queries whose scores are made together.
const FEWEST: usize = 128;

/// Of each query the blocks before its own whose means it has the highest products with, by falling product, of equal ones the earlier: `picks`
/// `[lists, seq_q, most]`, i32, −1 where there are fewer. `q` is `[lists, seq_q, width]`, `k` `[kv lists, seq_kv, width]`; the last query sits at the last key.
///
/// # Errors
/// [`KernelError`] if the device cannot run it.
pub fn query_picks(
    client: &Client,
    element: ElemType,
    [q, k]: [&Handle; 2],
    of: &GateSizes,
    picks: &Handle,
) -> Result<(), KernelError> {
    crate::kernels::selection::check(client)?;
    let ([lists, kv_lists], [seq_q, seq_kv]) = (of.lists, of.seq);
    let blocks = seq_kv.div_ceil(of.block);
    crate::kernels::selection::counted("the choices of queries", lists * seq_q * of.most)?;
    if lists * seq_q * of.most == 0 {
        return Ok(());
    }
    let f32 = ElemType::Float(FloatKind::F32);
    let means = client.empty(kv_lists * blocks * of.width * f32.size());
    let by_block = RowBlocks::new(kv_lists, [seq_kv, of.width], of.block);
    let blocked = Blocked {
        x: k,
        of: &by_block,
        means: &means,
    };
    block_means(client, element, blocked)?;
    // f32 queries have products in f32.
    let parts = if element == f32 { 1 } else { 2 };
    let means = match parts {
        1 => means,
        _ => halves(client, element, &means, [kv_lists * blocks, of.width])?,
    };
    let q = RowsView::new(q, [lists, seq_q, of.width]);
    let means = RowsView::new(&means, [kv_lists, blocks * parts, of.width]);
    if parts == 2 && in_products(client, element, [&q, &means], of, picks) {
        return Ok(());
    }
    let behind = seq_kv as i64 - seq_q as i64;
    // Blocks before those of queries before `end`, at least one.
    let seen = |end: usize| {
        let last = (end as i64 - 1 + behind).max(0) as usize;
        (last / of.block).clamp(1, blocks)
    };
    let mut first = 0;
    while first < seq_q {
        let all = seq_q - first;
        let numbers = |rows: usize| lists * rows * pitch(seen(first + rows) * parts);
        // As many as there is room for if they see no more than the first: fewer see less.
        let rows = NUMBERS / (lists * pitch(seen(first + 1) * parts));
        let mut rows = rows.next_multiple_of(FEWEST).clamp(FEWEST, all.max(FEWEST));
        while rows > FEWEST && numbers(rows.min(all)) > NUMBERS {
            rows -= FEWEST;
        }
        let rows = rows.min(all);
        let columns = seen(first + rows);
        crate::kernels::selection::counted("the scores of queries", numbers(rows))?;
        let x = client.empty(numbers(rows) * size_of::<f32>());
        let means = RowsView {
            rows: columns * parts,
            ..means.clone()
        };
        let q = q.rows(first, rows, element.size());
        products(client, element, [&q, &means], &x)?;
        let sizes = PicksLaunch::new(
            rows,
            first,
            seq_q,
            behind as i32,
            columns,
            pitch(columns * parts),
            of.block,
            of.most,
            lists * rows,
        );
        let count = lists * rows;
        // SAFETY: a unit below `count` reads products of its query, and writes what it picks.
        unsafe {
            pick::launch_unchecked(
                client,
                spread(client, count.div_ceil(ROWS) as u64)?,
                CubeDim::new_1d(ROWS as u32),
                AddressType::U32,
                buffer(&x, numbers(rows)),
                buffer(picks, lists * seq_q * of.most),
                sizes,
                of.most.clamp(1, AT_A_TIME),
                parts,
            );
        }
        first += rows;
    }
    Ok(())
}

/// Picks in one product of all queries, if the device and the call are for it. `BLOCKSPARSE_PICKS=0` leaves that out, for comparing.
fn in_products(
    client: &Client,
    element: ElemType,
    [q, means]: [&RowsView; 2],
    of: &GateSizes,
    picks: &Handle,
) -> bool {
    if !blocksparse_cubecl::Tuning::or_default().picks {
        return false;
    }
    let Some(([left, right], request)) = asked(element, [q, means]) else {
        return false;
    };
    let parts = 2;
    let highest = Highest {
        most: of.most,
        parts,
        step: of.block,
    };
    let Ok(plan) = ProductPlan::new(client, request.with(Epilogue::Highest(highest))) else {
        return false;
    };
    let beside = EpilogueTensors {
        seen: Some(SeenColumns {
            first: of.seq[1] as i64 - of.seq[0] as i64,
            columns: means.rows / parts,
            factor: 1.0,
        }),
        ..EpilogueTensors::default()
    };
    multiply(client, &plan, [&left, &right], picks, &beside).is_ok()
}

/// Rows of f32 numbers as two rows each of another type: the numbers as they are there, and what that leaves.
fn halves(
    client: &Client,
    element: ElemType,
    x: &Handle,
    [rows, width]: [usize; 2],
) -> Result<Handle, KernelError> {
    let made = client.empty(2 * rows * width * element.size());
    // SAFETY: a unit below the rows' numbers reads one and writes two.
    unsafe {
        halve::launch_unchecked(
            client,
            spread(client, (rows * width).div_ceil(UNITS) as u64)?,
            CubeDim::new_1d(UNITS as u32),
            address_of(client, 2 * rows * width)?,
            buffer(x, rows * width),
            buffer(&made, 2 * rows * width),
            width,
            rows * width,
            element,
        );
    }
    Ok(made)
}

#[cube(launch_unchecked, address_type = "dynamic")]
fn halve<E: Float>(
    x: &[f32],
    out: &mut [E],
    width: usize,
    count: usize,
    #[define(E)] _element: ElemType,
) {
    let at = ABSOLUTE_POS;
    if at < count {
        let (row, column) = (at / width, at % width);
        let number = x[at];
        let high = E::cast_from(number);
        out[row * 2 * width + column] = high;
        out[(row * 2 + 1) * width + column] = E::cast_from(number - f32::cast_from(high));
    }
}

/// Products of some queries.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
struct Picks {
    /// Queries of a list here, the first of them, and all.
    rows: usize,
    first: usize,
    seq_q: usize,
    /// Position of the first of all.
    behind: i32,
    /// Blocks that have products here.
    columns: usize,
    /// Elements of a row of products.
    pitch: usize,
    block: usize,
    most: usize,
    /// Queries here of all lists.
    count: usize,
}

/// `x` `[lists, rows, pitch]`, of every block `parts` products that are to be added; `picks` `[lists, seq_q, most]`. Units load each other's products, so that
/// neighbours read neighbours.
#[cube(launch_unchecked, address_type = "dynamic")]
fn pick(
    x: &[f32],
    picks: &mut [i32],
    of: Picks,
    #[comptime] at_a_time: usize,
    #[comptime] parts: usize,
) {
    let unit = UNIT_POS as usize;
    let cube = CUBE_POS * comptime!(ROWS);
    let own = cube + unit;
    let at = own.min(of.count - 1);
    let query = at % of.rows + of.first;
    let position = max(query as i32 + of.behind, 0i32) as usize;
    // Blocks before the query's own.
    let candidates = (position / of.block).min(of.columns);
    let mut shared = Shared::<[f32]>::new_slice(comptime!(ROWS * (COLUMNS + 1)));
    // What was picked last: what follows has a lower key, or the same and a later block.
    let mut bound = 0xffff_ffffu32.runtime();
    let mut from = 0usize.runtime();
    let mut keys = Array::<u32>::new(at_a_time);
    let mut blocks = Array::<i32>::new(at_a_time);
    for pass in 0..of.most.div_ceil(at_a_time) {
        #[unroll]
        for i in 0..at_a_time {
            keys[i] = 0u32.runtime();
            blocks[i] = (-1i32).runtime();
        }
        for chunk in 0..of.columns.div_ceil(comptime!(COLUMNS)) {
            let column0 = chunk * comptime!(COLUMNS);
            #[unroll]
            for step in 0..comptime!(COLUMNS) {
                let place = unit + comptime!(step * ROWS);
                let (row, column) = (place / comptime!(COLUMNS), place % comptime!(COLUMNS));
                let source = (cube + row).min(of.count - 1) * of.pitch;
                let source = source + (column0 + column).min(of.columns - 1) * parts;
                let mut score = x[source];
                if comptime!(parts == 2) {
                    score += x[source + 1];
                }
                shared[row * comptime!(COLUMNS + 1) + column] = score;
            }
            sync_cube();
            let end = candidates.max(column0) - column0;
            for column in 0..end.min(comptime!(COLUMNS)) {
                let score = shared[unit * comptime!(COLUMNS + 1) + column];
                let block = column0 + column;
                let mut key = key(u32::reinterpret(score));
                let follows = key < bound || (key == bound && block >= from);
                // Below all of them, it stays out.
                if follows && key > keys[comptime!(at_a_time - 1)] {
                    let mut its = block as i32;
                    let mut is_in = false.runtime();
                    #[unroll]
                    for i in 0..at_a_time {
                        // From its place on, all move down.
                        is_in = is_in || key > keys[i];
                        let (here, other) = (keys[i], blocks[i]);
                        keys[i] = select(is_in, key, here);
                        blocks[i] = select(is_in, its, other);
                        key = select(is_in, here, key);
                        its = select(is_in, other, its);
                    }
                }
            }
            sync_cube();
        }
        #[unroll]
        for i in 0..at_a_time {
            let number = pass * at_a_time + comptime!(i);
            if own < of.count && number < of.most {
                let list = at / of.rows;
                picks[(list * of.seq_q + query) * of.most + number] = blocks[i];
            }
        }
        bound = keys[comptime!(at_a_time - 1)];
        from = (blocks[comptime!(at_a_time - 1)] + 1i32) as usize;
    }
}
