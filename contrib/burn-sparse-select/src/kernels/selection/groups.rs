//! Sums over antidiagonals: groups of rows as longer rows, their products, and block sums of the products' softmax.
//!
//! The sum over the antidiagonal of two groups is the product of one group with the other in reverse order. Keys are reversed, because there are fewer key
//! heads than query heads.
//!
//! ```text
//! grouped         keys with the rows of each group in reverse order; queries in order, if the last group is incomplete
//! products        groups of queries by groups of keys; some rows of blocks at a time, with the keys that they see
//! attention sums  softmax of each row and its sums by blocks; a row of blocks per cube
//! ```
//!
//! Where the matmul's epilogue can compute sums of exponentials over the groups of a block ([`RunSums`]), no product is stored, and the attention sums are
//! computed from those sums.

use std::ops::Range;

use crate::kernels::selection::products::{RowsView, RunSums, pitch, products};
use crate::kernels::selection::{NUMBERS, UNITS, lanes_of_rows};
use blocksparse_cubecl::limits::vector_of;
use blocksparse_cubecl::prelude::*;
use blocksparse_cubecl::shared::row_tile::{Combine, RowTile, across_lanes};

/// Sizes of a call.
#[derive(Clone, Debug, PartialEq)]
pub struct Antidiagonals {
    /// `batch · heads` of queries and of keys; the latter divides the former.
    pub lists: [usize; 2],
    /// Number of queries and keys per list.
    pub seq: [usize; 2],
    /// Number of elements of a query.
    pub width: usize,
    /// Number of queries, and of keys, of a block.
    pub block: usize,
    /// Number of members of a group, a divisor of the block.
    pub stride: usize,
    /// True if queries see no later keys.
    pub causal: bool,
    /// Factor of the sums before the softmax.
    pub factor: f64,
    /// Range of rows of blocks.
    pub rows: Range<usize>,
}

impl Antidiagonals {
    /// Returns the number of groups of a block.
    fn in_block(&self) -> usize {
        self.block / self.stride
    }

    /// Returns the number of groups of queries and of keys.
    fn groups(&self) -> [usize; 2] {
        self.seq.map(|seq| seq.div_ceil(self.stride))
    }

    /// Returns the sums of exponentials by blocks, for products of groups of queries from `group` on.
    fn sums(&self, group: usize) -> RunSums {
        let (stride, [seq_q, seq_kv]) = (self.stride as i64, self.seq.map(|seq| seq as i64));
        // A group sees keys up to its last query's position: groups before `group + 1 + ⌈offset / stride⌉`. An incomplete last group sees all groups.
        let first = group as i64 + 1 - (seq_q - seq_kv).div_euclid(stride);
        RunSums {
            run: self.in_block(),
            first: self.causal.then_some(first),
            factor: self.factor,
        }
    }

    /// Returns the number of groups of keys that rows of blocks before `end` see, at least one.
    fn columns(&self, end: usize) -> usize {
        let [seq_q, seq_kv] = self.seq;
        let [_, groups] = self.groups();
        if !self.causal {
            return groups;
        }
        let last = (end * self.block).min(seq_q) + seq_kv;
        last.saturating_sub(seq_q)
            .div_ceil(self.stride)
            .clamp(1, groups)
    }

    /// Returns the number of stored elements per group of queries, for this many groups of keys.
    fn elements(&self, columns: usize, by_blocks: bool) -> usize {
        match by_blocks {
            true => columns.div_ceil(self.in_block()),
            false => pitch(columns),
        }
    }

    /// Returns how many rows of blocks from `first` on are computed together. Their products, or sums by blocks, are stored.
    fn slab(&self, first: usize, by_blocks: bool) -> usize {
        let of = |rows: usize| {
            let numbers = self.elements(self.columns(first + rows), by_blocks);
            self.lists[0] * rows * self.in_block() * numbers
        };
        let all = self.rows.end - first;
        let most = (1..=all).rev().find(|&rows| of(rows) <= NUMBERS);
        let most = most.unwrap_or(1);
        // Rounds down to complete tiles of tensor cores, which have 128 rows.
        let whole = 128usize.div_ceil(self.in_block());
        match most < all && most > whole {
            true => most - most % whole,
            false => most,
        }
    }
}

/// Computes the attention from blocks of queries to blocks of keys by antidiagonals: f32 `out` `[lists, rows, blocks]`. `q` is `[lists, seq_q, width]` and `k`
/// likewise, of a type that the products support.
pub fn antidiagonal_attention_sums(
    client: &Client,
    element: ElemType,
    [q, k]: [&Handle; 2],
    of: &Antidiagonals,
    out: &Handle,
) -> Result<(), KernelError> {
    crate::kernels::selection::check(client)?;
    if of.rows.is_empty() || of.seq.contains(&0) {
        return Ok(());
    }
    let bytes = element.size();
    let [q_groups, k_groups] = of.groups();
    let long = of.stride * of.width;
    let copied = |x: &Handle, which: usize, turned: bool| {
        let lists = of.lists[which];
        let to = [of.seq[which], of.groups()[which] * of.stride];
        grouped(client, element, x, [lists, of.width], to, of.stride, turned)
    };
    let k = match of.stride {
        1 => k.clone(),
        _ => copied(k, 1, true)?,
    };
    let q = match of.seq[0].is_multiple_of(of.stride) {
        true => q.clone(),
        false => copied(q, 0, false)?,
    };
    let q = RowsView::new(&q, [of.lists[0], q_groups, long]);
    let k = RowsView::new(&k, [of.lists[1], k_groups, long]);
    // The groups of queries of a range of rows of blocks, and the groups of keys that they see.
    let part = |first: usize, rows: usize| {
        let start = (first * of.in_block()).min(q_groups - 1);
        let groups = (rows * of.in_block()).min(q_groups - start);
        let keys = RowsView {
            rows: of.columns(first + rows),
            ..k.clone()
        };
        (start, [q.rows(start, groups, bytes), keys])
    };
    let by_blocks = {
        let (start, [q, k]) = part(of.rows.start, of.slab(of.rows.start, true));
        of.sums(start).is_served(client, element, [&q, &k])
    };
    let mut first = of.rows.start;
    while first < of.rows.end {
        let rows = of.slab(first, by_blocks);
        let (start, [q, k]) = part(first, rows);
        let (groups, columns) = (q.rows, of.elements(k.rows, by_blocks));
        let numbers = of.lists[0] * groups * columns;
        crate::kernels::selection::counted("the products of groups", numbers)?;
        let x = client.empty(numbers * size_of::<f32>());
        match by_blocks {
            true => of.sums(start).log_sums(client, element, [&q, &k], &x)?,
            false => products(client, element, [&q, &k], &x)?,
        }
        let made = Made {
            x: &x,
            queries: groups,
            pitch: columns,
            by_blocks,
        };
        attention_sums(client, &made, of, first..first + rows, out)?;
        first += rows;
    }
    Ok(())
}

/// Pads rows to `padded`, a multiple of `stride`, with zeros and groups them; `turned` reverses the rows of each group.
fn grouped(
    client: &Client,
    element: ElemType,
    x: &Handle,
    [lists, width]: [usize; 2],
    [rows, padded]: [usize; 2],
    stride: usize,
    turned: bool,
) -> Result<Handle, KernelError> {
    let vector = vector_of(client.properties(), element.size(), &[width]);
    let vectors = width / vector;
    let count = lists * padded * vectors;
    let made = client.empty(count * vector * element.size());
    let address = address_of(client, count * vector)?;
    let cubes = spread(client, count.div_ceil(UNITS) as u64)?;
    // SAFETY: a unit below `count` reads a vector of a row below `rows` and writes its own.
    unsafe {
        group_rows::launch_unchecked(
            client,
            cubes,
            CubeDim::new_1d(UNITS as u32),
            address,
            vector,
            buffer(x, lists * rows * vectors),
            buffer(&made, count),
            rows,
            padded,
            vectors,
            stride,
            count,
            turned,
            element,
        );
    }
    Ok(made)
}

#[cube(launch_unchecked, address_type = "dynamic")]
fn group_rows<E: Float, N: Size>(
    x: &[Vector<E, N>],
    out: &mut [Vector<E, N>],
    rows: usize,
    padded: usize,
    vectors: usize,
    stride: usize,
    count: usize,
    #[comptime] turned: bool,
    #[define(E)] _element: ElemType,
) {
    let at = ABSOLUTE_POS;
    if at < count {
        let vector = at % vectors;
        let row = at / vectors % padded;
        let list = at / vectors / padded;
        let mut source = row;
        if comptime!(turned) {
            source = row / stride * stride + (stride - 1 - row % stride);
        }
        let number = x[(list * rows + source.min(rows - 1)) * vectors + vector];
        out[at] = select(source < rows, number, Vector::<E, N>::zeroed());
    }
}

/// Sizes of a launch over rows of groups.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
struct Groups {
    /// Number of rows of blocks of this launch, per list.
    rows: usize,
    /// Index of the first of them among all rows, and among the rows that are written.
    first: usize,
    target: usize,
    /// Number of rows of blocks of a list in the output.
    all: usize,
    /// Number of key blocks.
    blocks: usize,
    /// Number of groups of queries of this launch, and of groups of keys.
    queries: usize,
    keys: usize,
    /// Number of elements of a row.
    pitch: usize,
    stride: usize,
    seq_q: usize,
    /// Position of the first query.
    offset: i32,
    factor: f32,
    /// Number of rows of blocks of this launch, over all lists.
    count: usize,
}

/// Compile-time parameters of the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct GroupTile {
    /// Units that share a group's row.
    tile: RowTile,
    /// Number of groups of a block.
    in_block: usize,
    /// Number of elements of a row per key block: one per group, or one.
    columns: usize,
    causal: bool,
}

/// Rows of groups in memory.
struct Made<'a> {
    /// `[lists, queries, pitch]`.
    x: &'a Handle,
    queries: usize,
    pitch: usize,
    /// True if `x` holds logarithms of sums over blocks instead of products with groups.
    by_blocks: bool,
}

fn attention_sums(
    client: &Client,
    made: &Made,
    of: &Antidiagonals,
    rows: Range<usize>,
    out: &Handle,
) -> Result<(), KernelError> {
    let &Made {
        x, queries, pitch, ..
    } = made;
    let [seq_q, seq_kv] = of.seq;
    let (lists, count) = (of.lists[0], of.lists[0] * rows.len());
    let blocks = seq_kv.div_ceil(of.block);
    let all = of.rows.len();
    let (columns, factor) = match made.by_blocks {
        true => (1, 1.0),
        false => (of.in_block(), of.factor as f32),
    };
    let lanes = UNITS / of.in_block();
    let tile = lanes_of_rows(client, lanes, of.in_block());
    let groups = GroupsLaunch::new(
        rows.len(),
        rows.start,
        rows.start - of.rows.start,
        all,
        blocks,
        queries,
        of.groups()[1],
        pitch,
        of.stride,
        seq_q,
        seq_kv as i32 - seq_q as i32,
        factor,
        count,
    );
    crate::kernels::selection::counted("the attention sums of blocks", lists * all * blocks)?;
    // SAFETY: a cube reads existing rows of products and writes the blocks of its own row.
    unsafe {
        group_attention_sums::launch_unchecked(
            client,
            spread(client, count as u64)?,
            CubeDim::new_1d(UNITS as u32),
            AddressType::U32,
            buffer(x, lists * queries * pitch),
            buffer(out, lists * all * blocks),
            groups,
            GroupTile {
                tile,
                in_block: of.in_block(),
                columns,
                causal: of.causal,
            },
        );
    }
    Ok(())
}

/// Initial value of maxima, below any product.
const LOWEST: f32 = -3.0e38;

/// Number of products that a unit loads at a time.
const AT_A_TIME: usize = 4;

/// Returns how many groups of keys a group of queries sees.
#[cube]
fn seen(group: usize, g: &Groups, #[comptime] causal: bool) -> usize {
    let mut result = g.keys;
    if comptime!(causal) {
        let last = (group * g.stride + g.stride).min(g.seq_q) as i32 - 1i32 + g.offset;
        let before = last.max(0i32) as usize / g.stride + 1;
        result = select(last < 0i32, 0usize, before.min(g.keys));
    }
    select(group * g.stride < g.seq_q, result, 0usize)
}

/// Computes block sums of the softmax of each row. `x` is `[lists, queries, pitch]`, where a key block has `c.columns` elements of a row; `out` is
/// `[lists, all, blocks]`. Each cube computes a row of blocks: units first share the rows of its groups for their maxima and sums, and then its columns.
#[cube(launch_unchecked, address_type = "dynamic")]
fn group_attention_sums(x: &[f32], out: &mut [f32], g: Groups, #[comptime] c: GroupTile) {
    // Surplus cubes repeat the last row.
    let at = CUBE_POS.min(g.count - 1);
    let list = at / g.rows;
    let row = at % g.rows;
    let in_block = comptime!(c.in_block);
    let lanes = comptime!(c.tile.lanes);
    let unit = UNIT_POS as usize;
    let own = unit / lanes;
    let lane = unit % lanes;
    let first_group = (g.first + row) * in_block;
    let first_row = list * g.queries;
    let mut shared = Shared::<[f32]>::new_slice(comptime!(c.tile.shared()));
    let mut tops = Shared::<[f32]>::new_slice(in_block);
    let mut parts = Shared::<[f32]>::new_slice(in_block);
    let mut ends = Shared::<[u32]>::new_slice(in_block);
    let mut sums = Shared::<[f32]>::new_slice(comptime!(c.tile.units()));

    let mut own_end = seen(first_group + own, &g, comptime!(c.causal));
    if comptime!(c.columns < c.in_block) {
        own_end = own_end.div_ceil(in_block);
    }
    let start = (first_row + (row * in_block + own).min(g.queries - 1)) * g.pitch;
    let mut largest = comptime!(LOWEST).runtime();
    let mut whole = 0.0f32.runtime();
    let mut column = lane;
    while column < own_end {
        let mut numbers = Array::<f32>::new(comptime!(AT_A_TIME));
        let mut top = largest;
        #[unroll]
        for i in 0..comptime!(AT_A_TIME) {
            let place = column + comptime!(i * lanes);
            let number = x[start + place.min(own_end - 1)] * g.factor;
            numbers[i] = number;
            top = max(top, number);
        }
        whole *= (largest - top).exp();
        #[unroll]
        for i in 0..comptime!(AT_A_TIME) {
            let is_there = column + comptime!(i * lanes) < own_end;
            whole += select(is_there, (numbers[i] - top).exp(), 0.0f32);
        }
        largest = top;
        column += comptime!(AT_A_TIME * lanes);
    }
    let top = across_lanes::<f32>(largest, &mut shared, comptime!(c.tile), Combine::Max);
    whole *= (largest - top).exp();
    let whole = across_lanes::<f32>(whole, &mut shared, comptime!(c.tile), Combine::Sum);
    if lane == 0 {
        tops[own] = top;
        parts[own] = select(own_end > 0, 1.0f32 / whole, 0.0f32);
        ends[own] = own_end as u32;
    }
    sync_cube();

    let mut end = 0u32.runtime();
    for other in 0..in_block {
        end = end.max(ends[other]);
    }
    let end = end as usize;
    let columns = comptime!(c.columns);
    let at_once = comptime!(c.tile.units() / columns);
    let target = (list * g.all + g.target + row) * g.blocks;
    for chunk in 0..g.blocks.div_ceil(at_once) {
        let column = chunk * comptime!(c.tile.units()) + unit;
        let mut sum = 0.0f32.runtime();
        if column < end {
            #[unroll(c.in_block <= 16)]
            for other in 0..in_block {
                let place = (first_row + (row * in_block + other).min(g.queries - 1)) * g.pitch;
                let number = x[place + column] * g.factor;
                let p = (number - tops[other]).exp() * parts[other];
                sum += select(column < ends[other] as usize, p, 0.0f32);
            }
        }
        sums[unit] = sum;
        sync_cube();
        let block = chunk * at_once + unit;
        if unit < at_once && block < g.blocks {
            let mut attention_sum = 0.0f32.runtime();
            #[unroll(c.columns <= 16)]
            for other in 0..columns {
                attention_sum += sums[unit * columns + other];
            }
            out[target + block] = attention_sum;
        }
        sync_cube();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Slabs cover every row once within the memory bound, and include the groups of keys that their rows see.
    #[test]
    fn slabs_cover_rows() {
        for (lists, seq, block, stride, causal) in [
            (32, [65_536, 65_536], 128, 16, true),
            (32, [65_536, 65_536], 128, 8, true),
            (32, [16_384, 16_384], 128, 16, false),
            (3, [1_000, 70_001], 64, 1, true),
            (1, [70_001, 1_000], 8, 8, true),
            (1, [1, 1], 16, 2, true),
        ] {
            let of = Antidiagonals {
                lists: [lists, 1],
                seq,
                width: 8,
                block,
                stride,
                causal,
                factor: 1.0,
                rows: 0..seq[0].div_ceil(block),
            };
            for by_blocks in [false, true] {
                let what = format!("{of:?} {by_blocks}");
                let mut first = 0;
                let mut slabs = 0;
                while first < of.rows.end {
                    let rows = of.slab(first, by_blocks);
                    assert!((1..=of.rows.end - first).contains(&rows), "{what}");
                    let columns = of.columns(first + rows);
                    let numbers = lists * rows * of.in_block() * of.elements(columns, by_blocks);
                    assert!(rows == 1 || numbers <= NUMBERS, "{what}");
                    // Position of the last query of the slab.
                    let last = ((first + rows) * block).min(seq[0]) as i64 - 1;
                    let last = last + seq[1] as i64 - seq[0] as i64;
                    let seen = match causal {
                        true => (last + 1).clamp(0, seq[1] as i64) as usize,
                        false => seq[1],
                    };
                    assert!(columns * stride >= seen, "{what}, {first}");
                    assert!(columns <= of.groups()[1], "{what}");
                    first += rows;
                    slabs += 1;
                }
                assert!(slabs <= of.rows.len(), "{what}");
            }
        }
    }
}
