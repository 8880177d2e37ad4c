//! Merges of each row's own part with rows selected by an index, by their lse, and the gradients.
//!
//! ```text
//! lse = ln Σ exp(lseᵢ)    wᵢ = exp(lseᵢ − lse)    out = Σ wᵢ · xᵢ
//! dxᵢ = wᵢ · g            dlseᵢ = wᵢ · (g · xᵢ − g · out + g_lse)
//! ```
//!
//! `g` and `g_lse` are the gradients with respect to out and lse. The first launch computes everything except the gradients of the selected rows. Those are
//! gathered with the reverse index, so that every element has one writer.

use cubecl::ir::ElemType;
use cubecl::prelude::*;
use cubecl::server::Handle;

use super::columns::accumulator_of;
use super::indexed::{IndexedRows, Sizes};
use super::norm_shape::{LANE_NUMBERS, check_buffers, has, place, sum_of, tile_of};
use super::typed::Typed;
use crate::args::{address_of, buffer, optional, spread};
use crate::error::KernelError;
use crate::shared::row_tile::{Combine, RowTile, across_lanes};

/// Lower bound of lse, for rows without keys: far below any score, but finite, so that ∞ − ∞ cannot occur.
const LOWEST: f32 = -1e30;

/// Returns the lse of the row that an index entry selects.
#[cube]
fn lse_at<A: Float>(lses: &[A], index: &[i32], at: usize, first: usize, sizes: &Sizes) -> A {
    let row = index[at];
    let mut lse = A::new(LOWEST);
    if row >= 0i32 && (row as usize) < sizes.rows {
        lse = lses[first + row as usize].max(A::new(LOWEST));
    }
    lse
}

#[cube(launch_unchecked, address_type = "dynamic")]
fn merge<E: Float, A: Float, N: Size>(
    own: &[Vector<E, N>],
    own_lse: &[A],
    rows: &[Vector<E, N>],
    lses: &[A],
    index: &[i32],
    output: &mut [Vector<E, N>],
    output_lse: &mut [A],
    sizes: Sizes,
    neg_infinity: InputScalar,
    #[comptime] tile: RowTile,
    #[define(E, A)] _types: [ElemType; 2],
) {
    let vectors = comptime!(tile.lane_vectors());
    let row_vectors = comptime!(tile.row_vectors);
    let unit = UNIT_POS as usize;
    let lane = unit % comptime!(tile.lanes);
    let at = CUBE_POS * comptime!(tile.rows) + unit / comptime!(tile.lanes);
    if at < sizes.count {
        let first = at / sizes.places * sizes.rows;
        let named = at * sizes.most;
        let own_part = own_lse[at].max(A::new(LOWEST));
        let mut top = own_part;
        for j in 0..sizes.most {
            top = top.max(lse_at::<A>(lses, index, named + j, first, &sizes));
        }
        let mut total = (own_part - top).exp();
        let mut sums = Array::<Vector<A, N>>::new(vectors);
        #[unroll]
        for i in 0..vectors {
            let x = Vector::<A, N>::cast_from(own[at * row_vectors + place(lane, i, tile)]);
            sums[i] = x * Vector::<A, N>::empty().fill(total);
        }
        for j in 0..sizes.most {
            let weight = (lse_at::<A>(lses, index, named + j, first, &sizes) - top).exp();
            total += weight;
            let row = index[named + j];
            if row >= 0i32 && (row as usize) < sizes.rows {
                let start = (first + row as usize) * row_vectors;
                #[unroll]
                for i in 0..vectors {
                    let x = Vector::<A, N>::cast_from(rows[start + place(lane, i, tile)]);
                    sums[i] += x * Vector::<A, N>::empty().fill(weight);
                }
            }
        }
        let inverse = Vector::<A, N>::empty().fill(A::new(1.0) / total);
        #[unroll]
        for i in 0..vectors {
            if has(lane, i, tile) {
                output[at * row_vectors + place(lane, i, tile)] =
                    Vector::<E, N>::cast_from(sums[i] * inverse);
            }
        }
        if lane == 0 {
            let log = top + total.ln();
            output_lse[at] = select(top > A::new(LOWEST), log, neg_infinity.get::<A>());
        }
    }
}

/// Computes the gradients with respect to the places' own rows. `shares` are `[2, count, most]`: the weight of each index entry, and the gradient with
/// respect to its lse.
#[cube(launch_unchecked, address_type = "dynamic")]
fn by_rows<E: Float, A: Float, N: Size>(
    own: &[Vector<E, N>],
    own_lse: &[A],
    rows: &[Vector<E, N>],
    lses: &[A],
    index: &[i32],
    grad: &[Vector<E, N>],
    grad_lse: ComptimeOption<Box<[A]>>,
    by_own: &mut [Vector<E, N>],
    by_own_lse: &mut [A],
    shares: &mut [A],
    sizes: Sizes,
    #[comptime] tile: RowTile,
    #[define(E, A)] _types: [ElemType; 2],
) {
    let vectors = comptime!(tile.lane_vectors());
    let row_vectors = comptime!(tile.row_vectors);
    let zero = Vector::<A, N>::zeroed();
    let unit = UNIT_POS as usize;
    let lane = unit % comptime!(tile.lanes);
    let asked = CUBE_POS * comptime!(tile.rows) + unit / comptime!(tile.lanes);
    // Every unit must reach every barrier.
    let exists = asked < sizes.count;
    let at = asked.min(sizes.count - 1);
    let first = at / sizes.places * sizes.rows;
    let named = at * sizes.most;
    let mut shared = Shared::<[A]>::new_slice(comptime!(tile.shared()));
    let own_part = own_lse[at].max(A::new(LOWEST));
    let mut top = own_part;
    for j in 0..sizes.most {
        top = top.max(lse_at::<A>(lses, index, named + j, first, &sizes));
    }
    let mut total = (own_part - top).exp();
    for j in 0..sizes.most {
        total += (lse_at::<A>(lses, index, named + j, first, &sizes) - top).exp();
    }
    let own_weight = (own_part - top).exp() / total;
    let mut grads = Array::<Vector<A, N>>::new(vectors);
    let mut dots = zero;
    #[unroll]
    for i in 0..vectors {
        let vector = at * row_vectors + place(lane, i, tile);
        let is_own = has(lane, i, tile);
        let g = select(is_own, Vector::<A, N>::cast_from(grad[vector]), zero);
        grads[i] = g;
        dots += g * Vector::<A, N>::cast_from(own[vector]);
        if exists && is_own {
            by_own[vector] =
                Vector::<E, N>::cast_from(g * Vector::<A, N>::empty().fill(own_weight));
        }
    }
    let own_dot = across_lanes::<A>(sum_of::<A, N>(dots), &mut shared, tile, Combine::Sum);
    let mut mean = own_weight * own_dot;
    let writes = exists && lane == 0;
    let behind = sizes.count * sizes.most;
    for j in 0..sizes.most {
        let row = index[named + j];
        let is_row = row >= 0i32 && (row as usize) < sizes.rows;
        let start = (first + select(is_row, row, 0i32) as usize) * row_vectors;
        let mut dots = zero;
        #[unroll]
        for i in 0..vectors {
            dots += grads[i] * Vector::<A, N>::cast_from(rows[start + place(lane, i, tile)]);
        }
        let dot = across_lanes::<A>(sum_of::<A, N>(dots), &mut shared, tile, Combine::Sum);
        let dot = select(is_row, dot, A::new(0.0));
        let weight = (lse_at::<A>(lses, index, named + j, first, &sizes) - top).exp() / total;
        mean += weight * dot;
        if writes {
            shares[named + j] = weight;
            shares[behind + named + j] = dot;
        }
    }
    if writes {
        let mut less = mean;
        #[comptime]
        match &grad_lse {
            ComptimeOption::Some(grad_lse) => {
                less -= select(top > A::new(LOWEST), grad_lse[at], A::new(0.0));
            }
            ComptimeOption::None => {}
        }
        let by = own_weight * (own_dot - less);
        by_own_lse[at] = select(own_part > A::new(LOWEST), by, A::new(0.0));
        for j in 0..sizes.most {
            let lse = lse_at::<A>(lses, index, named + j, first, &sizes);
            let by = shares[named + j] * (shares[behind + named + j] - less);
            shares[behind + named + j] = select(lse > A::new(LOWEST), by, A::new(0.0));
        }
    }
}

/// Computes the gradients with respect to the selected rows. `choices[at]` has the place that selects row `at`, times `most`, plus the entry.
#[cube(launch_unchecked, address_type = "dynamic")]
fn by_places<E: Float, A: Float, N: Size>(
    grad: &[Vector<E, N>],
    shares: &[A],
    choices: &[i32],
    by_rows: &mut [Vector<E, N>],
    by_lses: &mut [A],
    sizes: Sizes,
    all: usize,
    #[comptime] tile: RowTile,
    #[define(E, A)] _types: [ElemType; 2],
) {
    let row_vectors = comptime!(tile.row_vectors);
    let unit = UNIT_POS as usize;
    let lane = unit % comptime!(tile.lanes);
    let at = CUBE_POS * comptime!(tile.rows) + unit / comptime!(tile.lanes);
    if at < all {
        let list = at / sizes.rows;
        let choice = choices[at];
        let is_chosen = choice >= 0i32 && (choice as usize) < sizes.places * sizes.most;
        let choice = select(is_chosen, choice, 0i32) as usize;
        let share = list * sizes.places * sizes.most + choice;
        let row = list * sizes.places + choice / sizes.most;
        let weight = select(is_chosen, shares[share], A::new(0.0));
        let factor = Vector::<A, N>::empty().fill(weight);
        #[unroll]
        for i in 0..comptime!(tile.lane_vectors()) {
            if has(lane, i, tile) {
                let vector = place(lane, i, tile);
                let g = Vector::<A, N>::cast_from(grad[row * row_vectors + vector]);
                by_rows[at * row_vectors + vector] = Vector::<E, N>::cast_from(g * factor);
            }
        }
        if lane == 0 {
            let by = shares[sizes.count * sizes.most + share];
            by_lses[at] = select(is_chosen, by, A::new(0.0));
        }
    }
}

/// Operands of a merge, all contiguous.
#[derive(Clone, Copy, Debug)]
pub struct MergedParts<'a> {
    /// The own row of each place of [`IndexedRows`]: `[lists, places, width]`.
    pub own: Typed<'a>,
    /// lse of the own rows, `[lists, places]`, in the accumulator type.
    pub own_lse: &'a Handle,
    /// Rows that the index selects from: `[lists, rows, width]`, of the same element type.
    pub rows: &'a Handle,
    /// lse of these rows, `[lists, rows]`.
    pub lses: &'a Handle,
    /// Index of the rows of each place: i32 `[lists, places, most]`, negative for none.
    pub index: &'a Handle,
}

/// Gradients that [`merge_rows_backward`] reads and writes.
#[derive(Clone, Copy, Debug)]
pub struct MergedGradients<'a> {
    /// Gradient with respect to the output.
    pub grad: &'a Handle,
    /// Gradient with respect to the output's lse, if there is one.
    pub grad_lse: Option<&'a Handle>,
    /// Reverse index: for each row, the place that selects it times `most`, plus the entry there. i32 `[lists, rows]`, negative for none.
    pub choices: &'a Handle,
    /// Gradient with respect to each place's own row.
    pub by_own: &'a Handle,
    /// Gradient with respect to the own rows' lse.
    pub by_own_lse: &'a Handle,
    /// Gradient with respect to the selected rows.
    pub by_rows: &'a Handle,
    /// Gradient with respect to the selected rows' lse.
    pub by_lses: &'a Handle,
}

/// Computes the merged rows `[lists, places, width]` and their lse `[lists, places]`, which is −∞ if no part has keys.
///
/// # Errors
/// [`KernelError`] if the device does not index as many elements, bind as many buffers, or has no cube for a row.
pub fn merge_rows(
    client: &Client,
    of: &IndexedRows,
    parts: &MergedParts,
    [output, output_lse]: [&Handle; 2],
) -> Result<(), KernelError> {
    let (own, element) = parts.own;
    let tile = tile_of(client.properties(), of.width, element, LANE_NUMBERS)?;
    let count = of.lists * of.places;
    let address = address_of(client, of.len())?;
    let cubes = spread(client, count.div_ceil(tile.rows) as u64)?;
    check_buffers(client, 7)?;
    if count == 0 {
        return Ok(());
    }
    let accumulator = accumulator_of(element);
    // SAFETY: a unit below `count` reads its place's index entries and rows of its list below `rows`, and writes its place's row. The first unit of a row
    // writes its lse.
    unsafe {
        merge::launch_unchecked(
            client,
            cubes,
            CubeDim::new_1d(tile.units() as u32),
            address,
            tile.vector,
            buffer(own, count * tile.row_vectors),
            buffer(parts.own_lse, count),
            buffer(parts.rows, of.lists * of.rows * tile.row_vectors),
            buffer(parts.lses, of.lists * of.rows),
            buffer(parts.index, count * of.most),
            buffer(output, count * tile.row_vectors),
            buffer(output_lse, count),
            of.sizes(),
            InputScalar::new(f64::NEG_INFINITY, accumulator),
            tile,
            [element, accumulator],
        );
    }
    Ok(())
}

/// Computes the gradients of [`merge_rows`], in two launches.
///
/// # Errors
/// Those of [`merge_rows`].
pub fn merge_rows_backward(
    client: &Client,
    of: &IndexedRows,
    parts: &MergedParts,
    grads: &MergedGradients,
) -> Result<(), KernelError> {
    let (own, element) = parts.own;
    let tile = tile_of(client.properties(), of.width, element, LANE_NUMBERS)?;
    let (count, all) = (of.lists * of.places, of.lists * of.rows);
    let address = address_of(client, of.len().max(2 * count * of.most))?;
    let cubes = |rows: usize| spread(client, rows.div_ceil(tile.rows) as u64);
    let launches = [cubes(count)?, cubes(all)?];
    check_buffers(client, 10)?;
    if count * all == 0 {
        return Ok(());
    }
    let accumulator = accumulator_of(element);
    let numbers = 2 * count * of.most;
    let shares = client.empty(numbers * accumulator.size());
    let dim = CubeDim::new_1d(tile.units() as u32);
    let [of_rows, of_places] = launches;
    // SAFETY: a unit reads its place's index entries and rows of its list below `rows`, and writes its own place's elements. In the second launch it writes
    // those of its own row, below `all`, and reads those of a place of its list.
    unsafe {
        by_rows::launch_unchecked(
            client,
            of_rows,
            dim,
            address,
            tile.vector,
            buffer(own, count * tile.row_vectors),
            buffer(parts.own_lse, count),
            buffer(parts.rows, all * tile.row_vectors),
            buffer(parts.lses, all),
            buffer(parts.index, count * of.most),
            buffer(grads.grad, count * tile.row_vectors),
            optional(grads.grad_lse, count),
            buffer(grads.by_own, count * tile.row_vectors),
            buffer(grads.by_own_lse, count),
            buffer(&shares, numbers),
            of.sizes(),
            tile,
            [element, accumulator],
        );
        by_places::launch_unchecked(
            client,
            of_places,
            dim,
            address,
            tile.vector,
            buffer(grads.grad, count * tile.row_vectors),
            buffer(&shares, numbers),
            buffer(grads.choices, all),
            buffer(grads.by_rows, all * tile.row_vectors),
            buffer(grads.by_lses, all),
            of.sizes(),
            all,
            tile,
            [element, accumulator],
        );
    }
    Ok(())
}
