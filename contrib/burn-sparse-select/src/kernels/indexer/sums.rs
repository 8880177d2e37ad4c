//! Sums over heads for each pair of a query and a key, in f32 on any device; half precision runs on tensor cores where available (`mma`). A cube has some
//! queries and some keys, or one query and some of its listed keys. A unit has four keys and eight rows of products. The rows are the heads of as few queries
//! as possible, so no other unit shares its sums.

// Compile-time conditions stay separate from runtime ones.
#![allow(clippy::collapsible_if)]

use crate::kernels::indexer::pairs::{
    Ending, Epilogue, KeyBytes, PairInputs, PairSizes, PairSum, Sizes, check, key_of,
};
use crate::kernels::indexer::rounding::{PACKED, pack_keys};
use crate::kernels::indexer::rows::{ACROSS, DEPTH, PITCH, fill, multiply};
use crate::kernels::indexer::warpgroups::{ByteSums, GroupSums};
use crate::kernels::indexer::{mma, warpgroups};
use blocksparse_cubecl::prelude::*;
use blocksparse_cubecl::shared::addressing::Four;

/// Number of rows of products of a unit.
const OWN: usize = 8;

/// Compile-time parameters of the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct SumTile {
    /// Number of elements of a query or a key.
    width: usize,
    /// Number of units along keys and along queries.
    across: usize,
    down: usize,
    /// Number of rows of a unit, and of heads of a query among them.
    own: usize,
    heads: usize,
    is_listed: bool,
    is_weights: bool,
    /// True to include keys after a query's position.
    all: bool,
}

impl SumTile {
    fn new(sizes: &PairSizes, sum: &PairSum) -> Self {
        let group = sizes.heads[0] / sizes.heads[1];
        let heads = group.next_power_of_two().min(OWN);
        let (across, down, own) = match sizes.listed {
            None => (ACROSS, ACROSS, OWN),
            Some(most) => {
                let across = most.div_ceil(4).next_power_of_two().clamp(ACROSS, 64);
                (across, 1, heads)
            }
        };
        Self {
            width: sizes.width,
            across,
            down,
            own,
            heads,
            is_listed: sizes.listed.is_some(),
            is_weights: matches!(sum, PairSum::Weights { .. }),
            all: matches!(sum, PairSum::Scores { all: true, .. }),
        }
    }

    fn units(&self) -> usize {
        self.across * self.down
    }

    fn queries(&self) -> usize {
        self.down * self.unit_queries()
    }

    fn unit_queries(&self) -> usize {
        self.own / self.heads
    }

    fn rows(&self) -> usize {
        self.down * self.own
    }

    fn columns(&self) -> usize {
        4 * self.across
    }
}

#[cube(launch_unchecked, address_type = "dynamic")]
fn sums<E: Float, N: Size>(
    q: &[Vector<E, N>],
    k: &[Vector<E, N>],
    of_rows: &[f32],
    keys: ComptimeOption<Box<[i32]>>,
    out: &mut [f32],
    s: Sizes,
    // Number of tiles along keys, along queries, and of all.
    column_tiles: usize,
    row_tiles: usize,
    tiles: usize,
    ending: Ending,
    #[comptime] t: SumTile,
    #[define(E)] _element: ElemType,
) {
    // Surplus cubes repeat the last tile.
    let tile = CUBE_POS.min(tiles - 1);
    let column0 = tile % column_tiles * comptime!(t.columns());
    let row0 = tile / column_tiles % row_tiles * comptime!(t.queries());
    let entry = tile / column_tiles / row_tiles;
    let unit = UNIT_POS as usize;
    let unit_x = unit % comptime!(t.across);
    let unit_y = unit / comptime!(t.across);
    let group = s.heads / s.kv_heads;
    let groups = group.div_ceil(comptime!(t.heads));
    let fours = comptime!(t.width.div_ceil(4));

    let mut left = Shared::<[Vector<f32, Four>]>::new_slice(comptime!(t.rows() * PITCH));
    let mut right = Shared::<[Vector<f32, Four>]>::new_slice(comptime!(t.columns() * PITCH));
    let mut sums = Array::<f32>::new(comptime!(t.unit_queries() * 4));
    #[unroll]
    for i in 0..comptime!(t.unit_queries() * 4) {
        sums[i] = 0.0f32;
    }
    let mut products = Array::<f32>::new(comptime!(t.own * 4));
    let last_row = (row0 + comptime!(t.queries() - 1)).min(s.rows - 1);
    let mut parts = s.kv_heads * groups;
    let is_seen = column0 <= s.position(last_row);
    if comptime!(!t.is_listed && !t.all) && !is_seen {
        parts = 0usize.runtime();
    }
    // Tiles after the end of a list have no keys.
    if comptime!(t.is_listed) {
        if key_of(&keys, entry, row0, column0, &s, true) < 0i32 {
            parts = 0usize.runtime();
        }
    }
    for part in 0..parts {
        let kv_head = part / groups;
        let head0 = part % groups * comptime!(t.heads);
        let k_start = (entry * s.kv_heads + kv_head) * s.seq_kv;
        let q_start = (entry * s.heads + kv_head * group) * s.seq_q + s.start;
        #[unroll]
        for i in 0..comptime!(t.own * 4) {
            products[i] = 0.0f32;
        }
        for depth in range_stepped(0usize, fours, DEPTH) {
            sync_cube();
            let mut at = unit;
            while at < comptime!(t.rows() * DEPTH) {
                let own = at / comptime!(DEPTH);
                let four = at % comptime!(DEPTH);
                let row = row0 + own / comptime!(t.heads);
                let head = head0 + own % comptime!(t.heads);
                let is_there = row < s.rows && head < group && depth + four < fours;
                let start = (q_start + head * s.seq_q + row) * comptime!(t.width);
                let place = own * comptime!(PITCH) + four;
                fill::<E, N>(q, &mut left, place, start, depth + four, is_there, t.width);
                at += comptime!(t.units());
            }
            at = unit;
            while at < comptime!(t.columns() * DEPTH) {
                let own = at / comptime!(DEPTH);
                let four = at % comptime!(DEPTH);
                let column = (column0 + own).min(s.columns - 1);
                let key = key_of(&keys, entry, row0, column, &s, t.is_listed);
                let is_there = column0 + own < s.columns && key >= 0 && depth + four < fours;
                let start = (k_start + max(key, 0i32) as usize) * comptime!(t.width);
                let place = own * comptime!(PITCH) + four;
                fill::<E, N>(k, &mut right, place, start, depth + four, is_there, t.width);
                at += comptime!(t.units());
            }
            sync_cube();
            let first_row = unit_y * comptime!(t.own);
            multiply(
                &left,
                &right,
                &mut products,
                first_row,
                unit_x,
                t.own,
                t.across,
            );
        }
        #[unroll]
        for i in 0..comptime!(t.own) {
            let row = row0 + unit_y * comptime!(t.unit_queries()) + comptime!(i / t.heads);
            let head = head0 + comptime!(i % t.heads);
            let is_there = row < s.rows && head < group;
            let at = q_start + head * s.seq_q + row;
            let of_row = of_rows[select(is_there, at, q_start)];
            #[unroll]
            for j in 0..4usize {
                let product = products[comptime!(i * 4 + j)];
                let mut term = of_row * max(product, 0.0f32);
                if comptime!(t.is_weights) {
                    term = (product * ending.factor - of_row).exp();
                }
                sums[comptime!(i / t.heads * 4 + j)] += select(is_there, term, 0.0f32);
            }
        }
    }
    if parts > 0 {
        #[unroll]
        for i in 0..comptime!(t.unit_queries()) {
            let row = row0 + unit_y * comptime!(t.unit_queries()) + i;
            #[unroll]
            for j in 0..4usize {
                let column = column0 + unit_x + comptime!(j * t.across);
                if row < s.rows && column < s.columns {
                    let key = key_of(&keys, entry, row, column, &s, t.is_listed);
                    let position = s.position(row);
                    let sum = sums[comptime!(i * 4 + j)];
                    let mut value = sum * ending.factor;
                    if comptime!(t.is_weights) {
                        let is_seen = key <= position as i32;
                        value = select(is_seen, sum / f32::cast_from(s.heads), 0.0f32);
                    } else {
                        let is_near = ending.near > 0 && key + ending.near as i32 > position as i32;
                        value = select(is_near, ending.highest, value);
                    }
                    out[(entry * s.rows + row) * s.columns + column] = value;
                }
            }
        }
    }
}

/// Computes the sums over heads of the pairs of the computed queries: f32 `[batch, rows, columns]`. Some entries after the end of a list are not written.
///
/// # Errors
/// Those of [`check`], or if there are more tiles than a launch has cubes.
pub fn pair_sums(
    client: &Client,
    sizes: &PairSizes,
    inputs: &PairInputs,
    sum: &PairSum,
    out: &Handle,
) -> Result<(), KernelError> {
    check(client, inputs.element, sizes)?;
    let epilogue = Epilogue::new(sizes, sum);
    if let Some(keys) = inputs.bytes
        && let Some(t) = ByteSums::new(client, sizes, sum)
    {
        return warpgroups::launch_bytes(client, sizes, inputs, keys, epilogue, out, t);
    }
    if let Ok(t) = mma::SumTile::new(client, sizes, inputs, sum) {
        if let Some(groups) = GroupSums::new(client, sizes, &t) {
            return warpgroups::launch(client, sizes, inputs, epilogue, out, groups);
        }
        return mma::launch(client, sizes, inputs, epilogue, out, t);
    }
    let t = SumTile::new(sizes, sum);
    let vector = inputs.vector(client, sizes.width);
    let column_tiles = sizes.columns().div_ceil(t.columns());
    let row_tiles = sizes.rows[1].div_ceil(t.queries());
    let tiles = sizes.batch * row_tiles * column_tiles;
    let [q, k] = sizes.inputs();
    let address = address_of(client, q.max(k).max(sizes.elements()).max(2 * tiles))?;
    let cubes = spread(client, tiles as u64)?;
    // SAFETY: a unit reads existing rows of queries and keys, and writes its own entries of existing rows and columns; lists hold keys of the sequence or
    // negative numbers. The buffers have the lengths that `buffer` gets.
    unsafe {
        sums::launch_unchecked(
            client,
            cubes,
            CubeDim::new_1d(t.units() as u32),
            address,
            vector,
            buffer(inputs.q, q / vector),
            buffer(inputs.k, k / vector),
            buffer(inputs.of_rows, sizes.row_elements()),
            optional(inputs.keys, sizes.list_elements()),
            buffer(out, sizes.elements()),
            sizes.launch(),
            column_tiles,
            row_tiles,
            tiles,
            // This kernel uses natural exponentials.
            epilogue.ending(false),
            t,
            inputs.element,
        );
    }
    Ok(())
}

/// Packs the keys in fp8, if queries and keys come from [`round_rows`](crate::kernels::indexer::round_rows) and a kernel computes these sums in fp8, which has
/// twice the matmul throughput.
///
/// # Errors
/// [`KernelError`] if there are more keys than a launch has cubes for.
pub fn key_bytes(
    client: &Client,
    sizes: &PairSizes,
    inputs: &PairInputs,
    sum: &PairSum,
) -> Result<Option<KeyBytes>, KernelError> {
    if inputs.vector(client, sizes.width) == PACKED && ByteSums::new(client, sizes, sum).is_some() {
        return pack_keys(client, sizes, inputs).map(Some);
    }
    Ok(None)
}
