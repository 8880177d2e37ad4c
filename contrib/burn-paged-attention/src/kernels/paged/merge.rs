//! Kernel that joins the shares of each query.

use blocksparse_cubecl::limits::{most_units, vector_of};
use blocksparse_cubecl::prelude::*;
use blocksparse_cubecl::shared::score::{LOW, LOWEST_MAX};

/// Shape of a cube that merges a row: `ways` groups of `columns` units, each with every `ways`-th share.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct MergeTile {
    /// Units along the row.
    pub columns: usize,
    /// Units along the shares.
    pub ways: usize,
    /// Elements of a value.
    pub value_width: usize,
    /// Elements of a load.
    pub vector: usize,
    /// Whether there are sinks.
    pub sinks: bool,
}

impl MergeTile {
    /// Returns the tile for rows of `value_width` elements with about `shares` shares.
    pub fn new(
        properties: &DeviceProperties,
        value_width: usize,
        element: ElemType,
        shares: usize,
        sinks: bool,
    ) -> Self {
        let vector = vector_of(properties, element.size().max(4), &[value_width]);
        let units = most_units(properties).min(256);
        let columns = (value_width / vector)
            .next_power_of_two()
            .min(1 << units.ilog2());
        let ways = shares
            .min(8)
            .next_power_of_two()
            .min(1 << (units / columns).ilog2());
        Self {
            columns,
            ways,
            value_width,
            vector,
            sinks,
        }
    }

    /// Returns the units of a cube.
    pub fn units(&self) -> usize {
        self.columns * self.ways
    }

    fn vectors(&self) -> usize {
        self.value_width / self.vector
    }
}

/// Runtime sizes of a call.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub struct MergeSizes {
    /// Queries of all heads and sequences.
    pub rows: usize,
    /// Queries of a KV head.
    pub group_rows: usize,
    /// Queries of a head.
    pub head_rows: usize,
    /// Number of query heads.
    pub heads: usize,
    /// KV heads that share a table row.
    pub shared_heads: usize,
    /// Offset of the shares of page lists in the statistics.
    pub info: usize,
}

/// Shares that a unit loads at a time.
const UNROLLED: usize = 4;

/// Joins the shares of each row in order: `lse = ln(Σ_x exp(lse_x) + exp(sink))` and `out = Σ_x exp(lse_x − lse) · out_x`, one cube per row.
///
/// `partial` `[items, shared_heads, group_rows, value_width]` and `stats` are the outputs of `attend`; `out` `[rows, value_width]`, `lse` `[rows]`.
#[cube(launch_unchecked, address_type = "dynamic")]
pub fn merge<E: Float, A: Float, N: Size>(
    partial: &[Vector<A, N>],
    stats: &[A],
    sinks: ComptimeOption<Box<[A]>>,
    out: &mut [Vector<E, N>],
    lse: &mut [A],
    sizes: MergeSizes,
    neg_infinity: InputScalar,
    #[comptime] t: MergeTile,
    #[define(E, A)] _types: [ElemType; 2],
) {
    let units = comptime!(t.units());
    let vectors = comptime!(t.vectors());
    let unit = UNIT_POS as usize;
    let column = unit % comptime!(t.columns);
    let way = unit / comptime!(t.columns);
    let mut logs = Shared::<[A]>::new_slice(units);
    let mut sums = Shared::<[Vector<A, N>]>::new_slice(comptime!(t.ways * t.columns));
    let row = CUBE_POS;
    if row < sizes.rows {
        let kv_head = row / sizes.group_rows;
        let page_list = kv_head / sizes.shared_heads;
        let first = usize::cast_from(stats[sizes.info + 2 * page_list]);
        let items = usize::cast_from(stats[sizes.info + 2 * page_list + 1]);
        // Row of the first share; the rows of the next ones are `step` apart.
        let start = (first * sizes.shared_heads + kv_head % sizes.shared_heads) * sizes.group_rows
            + row % sizes.group_rows;
        let step = sizes.shared_heads * sizes.group_rows;

        let mut sink = A::new(LOW);
        if comptime!(t.sinks) {
            sink = sinks.as_ref().unwrap()[row / sizes.head_rows % sizes.heads];
        }
        let mut top = sink.max(A::new(LOWEST_MAX));
        let mut round = 0usize;
        while round < items {
            if round + unit < items {
                logs[unit] = stats[start + (round + unit) * step];
            }
            sync_cube();
            for other in 0..min(units, items - round) {
                top = top.max(logs[other]);
            }
            sync_cube();
            round += units;
        }
        let mut total = (sink - top).exp();
        let mut round = 0usize;
        // In wide rows a unit has several vectors, and iterates over the shares for each.
        let mut vector = column;
        while round < items {
            if round + unit < items {
                logs[unit] = (stats[start + (round + unit) * step] - top).exp();
            }
            sync_cube();
            for other in 0..min(units, items - round) {
                total += logs[other];
            }
            sync_cube();
            round += units;
        }
        let is_one = total > A::new(0.0);
        let inverse = A::new(1.0) / select(is_one, total, A::new(1.0));
        for _ in 0..comptime!(vectors.div_ceil(t.columns)) {
            let at = min(vector, comptime!(vectors - 1));
            let mut sum = Vector::<A, N>::zeroed();
            let mut item = way;
            while item < items {
                let mut x = Array::<Vector<A, N>>::new(UNROLLED);
                let mut weights = Array::<A>::new(UNROLLED);
                #[unroll]
                for i in 0..UNROLLED {
                    let other = item + comptime!(i * t.ways);
                    let place = start + min(other, items - 1) * step;
                    x[i] = partial[place * vectors + at];
                    let weight = (stats[place] - top).exp();
                    weights[i] = select(other < items, weight, A::new(0.0));
                }
                #[unroll]
                for i in 0..UNROLLED {
                    sum += x[i] * Vector::<A, N>::empty().fill(weights[i]);
                }
                item += comptime!(t.ways * UNROLLED);
            }
            sums[unit] = sum;
            sync_cube();
            if way == 0 && vector < vectors {
                let mut sum = sums[column];
                #[unroll]
                for other in 1..t.ways {
                    sum += sums[column + comptime!(other * t.columns)];
                }
                let sum = sum * Vector::<A, N>::empty().fill(inverse);
                out[row * vectors + vector] = Vector::<E, N>::cast_from(sum);
            }
            sync_cube();
            vector += comptime!(t.columns);
        }
        if unit == 0 {
            let log = top + select(is_one, total, A::new(1.0)).ln();
            lse[row] = select(is_one, log, neg_infinity.get::<A>());
        }
    }
}
