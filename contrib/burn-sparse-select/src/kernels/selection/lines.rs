//! Sums of the last queries' attention over columns (keys) and over diagonals (distances back to a key).
//!
//! ```text
//! products     last queries of some heads times all keys                     [heads, queries, keys]
//! stats        maximum and sum of exponentials of parts of a row             a part per cube
//! sums         sums over queries, for each key and each distance             one of each per unit
//! ```
//!
//! Where tensor cores can compute the products twice ([`line_weights`](crate::kernels::selection::line_weights)), they are not stored.
//!
//! Each cube that needs a row's stats combines those of its parts. A unit has key `j`, and the distance at which the last query sees it. For every query, the
//! keys at these distances are adjacent for adjacent units, so loads coalesce.

use std::fmt;

use crate::kernels::selection::line_weights::{
    LineSizes, LineWeights, Lines, PART, PART_NUMBERS, product_of_sums, seen,
};
use crate::kernels::selection::products::{RowsView, pitch, products};
use crate::kernels::selection::{NUMBERS, UNITS, across_cube};
use blocksparse_cubecl::prelude::*;
use blocksparse_cubecl::shared::row_tile::{Combine, RowTile, across_lanes};

/// Plan of the last queries' sums.
#[derive(Clone, Debug, PartialEq)]
pub enum LinesPlan {
    /// Products are computed twice and never stored; the text is the plan of the second matmul.
    Twice(String),
    /// Products are stored, for this reason.
    InMemory(&'static str),
}

impl LinesPlan {
    /// Returns the plan of a call of [`line_sums`].
    pub fn new(client: &Client, element: ElemType, factors: [&Handle; 2], of: &LineSizes) -> Self {
        match product_of_sums(client, element, factors, of) {
            Ok(plan) => Self::Twice(plan.to_string()),
            Err(reason) => Self::InMemory(reason),
        }
    }
}

impl fmt::Display for LinesPlan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Twice(plan) => write!(f, "products made twice, not in memory: {plan}"),
            Self::InMemory(reason) => write!(f, "products in memory: {reason}"),
        }
    }
}

/// Number of queries that a cube processes at a time.
const QUERIES: usize = 64;

/// Number of queries that a unit processes at a time.
const AT_A_TIME: usize = 4;

/// Computes the sums over queries: f32 `sums` `[lists, 2, seq_kv]`, of each key and of each distance from a query back to a key. `q` is
/// `[lists, queries, width]`; its last query is at the position of the last key and sees all keys. `k` is `[kv lists, seq_kv, width]`.
pub fn line_sums(
    client: &Client,
    element: ElemType,
    factors: [&Handle; 2],
    of: &LineSizes,
    sums: &Handle,
) -> Result<(), KernelError> {
    crate::kernels::selection::check(client)?;
    let [q, k] = factors;
    let ([lists, kv_lists], [queries, keys]) = (of.lists, of.seq);
    let (group, bytes) = (lists / kv_lists, element.size());
    let k = RowsView::new(k, [kv_lists, keys, of.width]);
    // The query heads of a KV head form one matrix of queries.
    let q = RowsView::new(q, [kv_lists, group * queries, of.width]);
    let numbers = queries * pitch(keys);
    crate::kernels::selection::counted("the sums of the last queries", lists * 2 * keys)?;
    if let Some(weights) = LineWeights::new(client, element, factors, of)? {
        return weights.sums(client, sums);
    }
    crate::kernels::selection::counted("the products of the last queries", numbers)?;
    let members = (NUMBERS / numbers).clamp(1, group);
    let together = match members == group {
        true => (NUMBERS / (numbers * group)).clamp(1, kv_lists),
        false => 1,
    };
    for first in (0..kv_lists).step_by(together) {
        let count = together.min(kv_lists - first);
        let (q, k) = (
            q.matrices(first, count, bytes),
            k.matrices(first, count, bytes),
        );
        for member in (0..group).step_by(members) {
            let here = members.min(group - member);
            let q = q.rows(member * queries, here * queries, bytes);
            let x = client.empty(count * here * numbers * size_of::<f32>());
            products(client, element, [&q, &k], &x)?;
            summed(client, &x, of, count * here, first * group + member, sums)?;
        }
    }
    Ok(())
}

/// Computes the sums from products `[lists, queries, pitch]`, for lists from `first` on.
fn summed(
    client: &Client,
    x: &Handle,
    of: &LineSizes,
    lists: usize,
    first: usize,
    sums: &Handle,
) -> Result<(), KernelError> {
    let [queries, keys] = of.seq;
    let (parts, pitch) = (keys.div_ceil(PART), pitch(keys));
    let rows = lists * queries;
    let tile = across_cube(client);
    let made = || client.empty(rows * parts * size_of::<f32>());
    let (tops, wholes) = (made(), made());
    let sizes = || of.launched(first, lists);
    let (dim, address) = (CubeDim::new_1d(UNITS as u32), AddressType::U32);
    let chunks = keys.div_ceil(UNITS);
    // SAFETY: cubes read products of existing queries and keys; a part's first unit writes the stats of the part, and a unit below `keys` the sums of its key
    // and its distance.
    unsafe {
        parts_of_rows::launch_unchecked(
            client,
            spread(client, (rows * parts) as u64)?,
            dim,
            address,
            buffer(x, rows * pitch),
            buffer(&tops, rows * parts),
            buffer(&wholes, rows * parts),
            sizes(),
            tile,
        );
        sums_of_lines::launch_unchecked(
            client,
            spread(client, (lists * chunks) as u64)?,
            dim,
            address,
            buffer(x, rows * pitch),
            buffer(&tops, rows * parts),
            buffer(&wholes, rows * parts),
            buffer(sums, of.lists[0] * 2 * keys),
            sizes(),
        );
    }
    Ok(())
}

/// Initial value of maxima, below any product.
const LOWEST: f32 = -3.0e38;

/// Computes the maximum and the sum of exponentials of each part of a row, one part per cube. `x` is `[lists, queries, pitch]`; `tops` and `wholes` are
/// `[lists, queries, parts]`.
#[cube(launch_unchecked, address_type = "dynamic")]
fn parts_of_rows(
    x: &[f32],
    tops: &mut [f32],
    wholes: &mut [f32],
    of: Lines,
    #[comptime] tile: RowTile,
) {
    // Surplus cubes repeat the last part.
    let at = CUBE_POS.min(of.lists * of.queries * of.parts - 1);
    let row = at / of.parts;
    let first = at % of.parts * comptime!(PART) + UNIT_POS as usize;
    let end = seen(row % of.queries, &of);
    let mut shared = Shared::<[f32]>::new_slice(comptime!(tile.shared()));
    let mut numbers = Array::<f32>::new(comptime!(PART_NUMBERS));
    let mut top = comptime!(LOWEST).runtime();
    #[unroll]
    for i in 0..comptime!(PART_NUMBERS) {
        let key = first + comptime!(i * UNITS);
        let number = x[row * of.pitch + key.min(of.keys - 1)] * of.factor;
        numbers[i] = number;
        top = max(top, select(key < end, number, comptime!(LOWEST).runtime()));
    }
    let top = across_lanes::<f32>(top, &mut shared, tile, Combine::Max);
    let mut whole = 0.0f32.runtime();
    #[unroll]
    for i in 0..comptime!(PART_NUMBERS) {
        let key = first + comptime!(i * UNITS);
        whole += select(key < end, (numbers[i] - top).exp(), 0.0f32);
    }
    let whole = across_lanes::<f32>(whole, &mut shared, tile, Combine::Sum);
    if UNIT_POS == 0 {
        tops[at] = top;
        wholes[at] = whole;
    }
}

/// Sums the attention over columns and diagonals, with a key and a distance per unit. `sums` is `[all lists, 2, keys]`.
#[cube(launch_unchecked, address_type = "dynamic")]
fn sums_of_lines(x: &[f32], tops: &[f32], wholes: &[f32], sums: &mut [f32], of: Lines) {
    let chunks = of.keys.div_ceil(comptime!(UNITS));
    // Surplus cubes repeat the last keys.
    let at = CUBE_POS.min(of.lists * chunks - 1);
    let list = at / chunks;
    let unit = UNIT_POS as usize;
    let key = at % chunks * comptime!(UNITS) + unit;
    let mut row_tops = Shared::<[f32]>::new_slice(comptime!(QUERIES));
    let mut shares = Shared::<[f32]>::new_slice(comptime!(QUERIES));
    let mut of_key = 0.0f32.runtime();
    let mut of_distance = 0.0f32.runtime();
    for chunk in 0..of.queries.div_ceil(comptime!(QUERIES)) {
        let first = chunk * comptime!(QUERIES);
        if unit < comptime!(QUERIES) {
            let query = first + unit;
            let row = list * of.queries + query.min(of.queries - 1);
            let mut top = comptime!(LOWEST).runtime();
            for part in 0..of.parts {
                top = max(top, tops[row * of.parts + part]);
            }
            let mut whole = 0.0f32.runtime();
            for part in 0..of.parts {
                let own = row * of.parts + part;
                whole += wholes[own] * (tops[own] - top).exp();
            }
            let is_there = query < of.queries && seen(query.min(of.queries - 1), &of) > 0;
            row_tops[unit] = top;
            shares[unit] = select(is_there, 1.0f32 / whole, 0.0f32);
        }
        sync_cube();
        if key < of.keys {
            let here = (of.queries - first).min(comptime!(QUERIES));
            for step in 0..here.div_ceil(comptime!(AT_A_TIME)) {
                #[unroll]
                for i in 0..comptime!(AT_A_TIME) {
                    let within = step * comptime!(AT_A_TIME) + comptime!(i);
                    let query = (first + within).min(of.queries - 1);
                    let is_there = first + within < of.queries;
                    let behind = of.queries - 1 - query;
                    let start = (list * of.queries + query) * of.pitch;
                    let (top, share) = (row_tops[within], shares[within]);
                    let p = (x[start + key] * of.factor - top).exp() * share;
                    of_key += select(is_there && key + behind < of.keys, p, 0.0f32);
                    // The key at the distance at which the last query sees `key`.
                    let beside = key.max(behind) - behind;
                    let p = (x[start + beside] * of.factor - top).exp() * share;
                    of_distance += select(is_there && key >= behind, p, 0.0f32);
                }
            }
        }
        sync_cube();
    }
    if key < of.keys {
        let target = (of.first + list) * 2 * of.keys;
        sums[target + key] = of_key;
        sums[target + of.keys + (of.keys - 1 - key)] = of_distance;
    }
}
