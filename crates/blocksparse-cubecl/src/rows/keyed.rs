//! Rows of queries by an index, of keys that are the same rows made as long as 1, and of values; and the gradients, by the reverse of the index.
//!
//! ```text
//! query = x[index]    key = x[index] / √max(|x[index]|², least)    value = v[index]
//! by x = Σ by query + (k − u · (u · k)) / |x|,  k = Σ by key, u = x / |x|          by v = Σ by value
//! ```
//!
//! And rows made as long as 1 alone.

use cubecl::ir::ElemType;
use cubecl::prelude::*;
use cubecl::server::Handle;

use super::columns::accumulator_of;
use super::indexed::{IndexedRows, NUMBERS, Search, Sizes, add_two, bits_of, load_named, take_two};
use super::norm_shape::{LANE_NUMBERS, check_buffers, has, place, sum_of, tile_of};
use super::typed::Typed;
use crate::args::{address_of, buffer, optional, spread};
use crate::error::KernelError;
use crate::shared::row_tile::{Combine, RowTile, across_lanes};

/// Squares below this count as this.
pub const SMALLEST_SQUARE: f32 = 1e-24;

#[cube(launch_unchecked, address_type = "dynamic")]
fn take<E: Float, A: Float, N: Size, M: Size>(
    x: &[Vector<E, N>],
    value: &[Vector<E, M>],
    index: &[i32],
    queries: &mut [Vector<E, N>],
    keys: &mut [Vector<E, N>],
    values: &mut [Vector<E, M>],
    sizes: Sizes,
    #[comptime] tile: RowTile,
    #[comptime] value_vectors: usize,
    #[define(E)] _element: ElemType,
    #[define(A)] _accumulator: ElemType,
) {
    let vectors = comptime!(tile.lane_vectors());
    let row_vectors = comptime!(tile.row_vectors);
    let unit = UNIT_POS as usize;
    let lane = unit % comptime!(tile.lanes);
    let asked = CUBE_POS * comptime!(tile.rows) + unit / comptime!(tile.lanes);
    // Every unit meets every barrier.
    let exists = asked < sizes.count;
    let at = asked.min(sizes.count - 1);
    let row = index[at];
    let is_row = row >= 0i32 && (row as usize) < sizes.rows;
    let row = at / sizes.places * sizes.rows + select(is_row, row, 0i32) as usize;
    let mut shared = Shared::<[A]>::new_slice(comptime!(tile.shared()));
    let mut own = Array::<Vector<A, N>>::new(vectors);
    let zero = Vector::<A, N>::zeroed();
    let mut squares = zero;
    #[unroll]
    for i in 0..vectors {
        let numbers = Vector::<A, N>::cast_from(x[row * row_vectors + place(lane, i, tile)]);
        own[i] = select(is_row && has(lane, i, tile), numbers, zero);
        squares += own[i] * own[i];
    }
    let square = across_lanes::<A>(sum_of::<A, N>(squares), &mut shared, tile, Combine::Sum);
    let length = square.max(A::new(SMALLEST_SQUARE)).sqrt();
    let inverse = Vector::<A, N>::empty().fill(A::new(1.0) / length);
    if exists {
        #[unroll]
        for i in 0..vectors {
            if has(lane, i, tile) {
                let to = at * row_vectors + place(lane, i, tile);
                queries[to] = Vector::<E, N>::cast_from(own[i]);
                keys[to] = Vector::<E, N>::cast_from(own[i] * inverse);
            }
        }
        let none = Vector::<E, M>::zeroed();
        let mut i = lane;
        while i < value_vectors {
            let numbers = value[row * value_vectors + i];
            values[at * value_vectors + i] = select(is_row, numbers, none);
            i += comptime!(tile.lanes);
        }
    }
}

#[cube(launch_unchecked, address_type = "dynamic")]
fn gradients<E: Float, A: Float, N: Size, M: Size>(
    x: &[Vector<E, N>],
    users: &[i32],
    by_queries: &[Vector<E, N>],
    by_keys: &[Vector<E, N>],
    by_values: &[Vector<E, M>],
    by_x: &mut [Vector<E, N>],
    by_value: &mut [Vector<E, M>],
    sizes: Sizes,
    #[comptime] tile: RowTile,
    #[comptime] value_vectors: usize,
    #[comptime] search: Search,
    #[define(E)] _element: ElemType,
    #[define(A)] _accumulator: ElemType,
) {
    let vectors = comptime!(tile.lane_vectors());
    let row_vectors = comptime!(tile.row_vectors);
    let zero = Vector::<A, N>::zeroed();
    let unit = UNIT_POS as usize;
    let lane = unit % comptime!(tile.lanes);
    let asked = CUBE_POS * comptime!(tile.rows) + unit / comptime!(tile.lanes);
    // Every unit meets every barrier.
    let exists = asked < sizes.count;
    let at = asked.min(sizes.count - 1);
    let first = at / sizes.places * sizes.rows;
    let mut shared = Shared::<[A]>::new_slice(comptime!(tile.shared()));
    let mut own = Array::<Vector<A, N>>::new(vectors);
    let mut queries = Array::<Vector<A, N>>::new(vectors);
    let mut keys = Array::<Vector<A, N>>::new(vectors);
    let mut squares = zero;
    #[unroll]
    for i in 0..vectors {
        let numbers = Vector::<A, N>::cast_from(x[at * row_vectors + place(lane, i, tile)]);
        own[i] = select(has(lane, i, tile), numbers, zero);
        squares += own[i] * own[i];
        queries[i] = zero;
        keys[i] = zero;
    }
    if comptime!(search.ahead().is_none()) {
        for part in 0..sizes.most.div_ceil(comptime!(NUMBERS)) {
            let mut bits = bits_of(users, asked, part, &sizes, tile, search);
            while !bits.is_empty() {
                let two = take_two(users, &mut bits, at, part, &sizes);
                let one = A::new(1.0);
                add_two::<E, A, N>(by_queries, &two, one, one, &mut queries, tile);
                add_two::<E, A, N>(by_keys, &two, one, one, &mut keys, tile);
            }
        }
    } else {
        let ahead = comptime!(search.ahead().unwrap());
        let mut named_rows = Array::<i32>::new(ahead);
        for group in 0..sizes.most.div_ceil(ahead) {
            load_named(users, &mut named_rows, at, group * ahead, &sizes, ahead);
            #[unroll]
            for j in 0..ahead {
                if named_rows[j] >= 0i32 {
                    let start = (first + named_rows[j] as usize) * row_vectors;
                    #[unroll]
                    for i in 0..vectors {
                        let from = start + place(lane, i, tile);
                        queries[i] += Vector::<A, N>::cast_from(by_queries[from]);
                        keys[i] += Vector::<A, N>::cast_from(by_keys[from]);
                    }
                }
            }
        }
    }
    let mut products = zero;
    #[unroll]
    for i in 0..vectors {
        products += own[i] * keys[i];
    }
    let square = across_lanes::<A>(sum_of::<A, N>(squares), &mut shared, tile, Combine::Sum);
    let product = across_lanes::<A>(sum_of::<A, N>(products), &mut shared, tile, Combine::Sum);
    let is_long = square > A::new(SMALLEST_SQUARE);
    let square = square.max(A::new(SMALLEST_SQUARE));
    // Of vectors as short as that the length is a constant.
    let share = select(is_long, product / square, A::new(0.0));
    let inverse = Vector::<A, N>::empty().fill(A::new(1.0) / square.sqrt());
    let share = Vector::<A, N>::empty().fill(share);
    if exists {
        #[unroll]
        for i in 0..vectors {
            if has(lane, i, tile) {
                let sum = queries[i] + (keys[i] - own[i] * share) * inverse;
                by_x[at * row_vectors + place(lane, i, tile)] = Vector::<E, N>::cast_from(sum);
            }
        }
    }
    // As many steps for each unit.
    for step in 0..value_vectors.div_ceil(comptime!(tile.lanes)) {
        let i = step * comptime!(tile.lanes) + lane;
        let is_there = exists && i < value_vectors;
        let i = i.min(value_vectors - 1);
        let mut sum = Vector::<A, M>::zeroed();
        if comptime!(search.ahead().is_none()) {
            for part in 0..sizes.most.div_ceil(comptime!(NUMBERS)) {
                let mut bits = bits_of(users, asked, part, &sizes, tile, search);
                while !bits.is_empty() {
                    let two = take_two(users, &mut bits, at, part, &sizes);
                    let x = by_values[two.one * value_vectors + i];
                    let y = by_values[two.other * value_vectors + i];
                    sum += Vector::<A, M>::cast_from(x);
                    let none = Vector::<A, M>::zeroed();
                    sum += select(two.are_two, Vector::<A, M>::cast_from(y), none);
                }
            }
        } else {
            let ahead = comptime!(search.ahead().unwrap());
            let mut named_rows = Array::<i32>::new(ahead);
            for group in 0..sizes.most.div_ceil(ahead) {
                load_named(users, &mut named_rows, at, group * ahead, &sizes, ahead);
                #[unroll]
                for j in 0..ahead {
                    if named_rows[j] >= 0i32 {
                        let from = (first + named_rows[j] as usize) * value_vectors + i;
                        sum += Vector::<A, M>::cast_from(by_values[from]);
                    }
                }
            }
        }
        if is_there {
            by_value[at * value_vectors + i] = Vector::<E, M>::cast_from(sum);
        }
    }
}

/// How rows of keys and of values are shared.
struct Shape {
    tile: RowTile,
    value_vector: usize,
    value_vectors: usize,
    address: AddressType,
    cubes: CubeCount,
}

impl Shape {
    fn new(
        client: &Client,
        of: &IndexedRows,
        value_width: usize,
        element: ElemType,
    ) -> Result<Self, KernelError> {
        let tile = tile_of(client.properties(), of.width, element, LANE_NUMBERS)?;
        let values = tile_of(client.properties(), value_width, element, LANE_NUMBERS)?;
        let widest = IndexedRows {
            width: of.width.max(value_width),
            ..*of
        };
        check_buffers(client, 7)?;
        let count = of.lists * of.places;
        Ok(Self {
            tile,
            value_vector: values.vector,
            value_vectors: values.row_vectors,
            address: address_of(client, widest.len())?,
            cubes: spread(client, count.div_ceil(tile.rows) as u64)?,
        })
    }
}

/// Rows of queries, of keys and of values at each place, 0 where an index is negative: `[lists, places, width]` twice, and `[lists, places, value_width]`, of
/// `x` `[lists, rows, width]` and `value` `[lists, rows, value_width]` of the same element. The index is i32 `[lists, places]`. Contiguous.
///
/// # Errors
/// [`KernelError`] if the device does not index as many numbers, bind as many buffers, or has no cube for a row.
pub fn keyed_rows(
    client: &Client,
    of: &IndexedRows,
    value_width: usize,
    (x, element): Typed,
    [value, index]: [&Handle; 2],
    [queries, keys, values]: [&Handle; 3],
) -> Result<(), KernelError> {
    let shape = Shape::new(client, of, value_width, element)?;
    let Shape { tile, .. } = shape;
    let (count, all) = (of.lists * of.places, of.lists * of.rows);
    if count * all == 0 {
        return Ok(());
    }
    let sizes = IndexedRows { most: 1, ..*of }.sizes();
    // SAFETY: a unit below `count` reads rows of its list below `rows`, and writes its place's rows.
    unsafe {
        take::launch_unchecked(
            client,
            shape.cubes,
            CubeDim::new_1d(tile.units() as u32),
            shape.address,
            tile.vector,
            shape.value_vector,
            buffer(x, all * tile.row_vectors),
            buffer(value, all * shape.value_vectors),
            buffer(index, count),
            buffer(queries, count * tile.row_vectors),
            buffer(keys, count * tile.row_vectors),
            buffer(values, count * shape.value_vectors),
            sizes,
            tile,
            shape.value_vectors,
            element,
            accumulator_of(element),
        );
    }
    Ok(())
}

/// The gradients of [`keyed_rows`] by `x` and by values, `[lists, places, width]` and `[lists, places, value_width]`: here places are the rows that were
/// taken, and `users`, i32 `[lists, places, most]`, say where, of `rows` rows of a list that have gradients, negative for none.
///
/// # Errors
/// As [`keyed_rows`].
pub fn keyed_rows_backward(
    client: &Client,
    of: &IndexedRows,
    value_width: usize,
    (x, element): Typed,
    users: &Handle,
    [by_queries, by_keys, by_values]: [&Handle; 3],
    [by_x, by_value]: [&Handle; 2],
) -> Result<(), KernelError> {
    let shape = Shape::new(client, of, value_width, element)?;
    let Shape { tile, .. } = shape;
    let (count, all) = (of.lists * of.places, of.lists * of.rows);
    if count * all == 0 {
        return Ok(());
    }
    // SAFETY: a unit below `count` reads its own row and gradients of its list below `rows`, and writes its own.
    unsafe {
        gradients::launch_unchecked(
            client,
            shape.cubes,
            CubeDim::new_1d(tile.units() as u32),
            shape.address,
            tile.vector,
            shape.value_vector,
            buffer(x, count * tile.row_vectors),
            buffer(users, count * of.most),
            buffer(by_queries, all * tile.row_vectors),
            buffer(by_keys, all * tile.row_vectors),
            buffer(by_values, all * shape.value_vectors),
            buffer(by_x, count * tile.row_vectors),
            buffer(by_value, count * shape.value_vectors),
            of.sizes(),
            tile,
            shape.value_vectors,
            Search::new(client, of, &tile),
            element,
            accumulator_of(element),
        );
    }
    Ok(())
}

/// A row over its length, or with `grad` the gradient by the row.
#[cube(launch_unchecked, address_type = "dynamic")]
fn unit<E: Float, A: Float, O: Float, N: Size>(
    x: &[Vector<E, N>],
    grad: ComptimeOption<Box<[Vector<A, N>]>>,
    output: &mut [Vector<O, N>],
    rows: usize,
    #[comptime] tile: RowTile,
    #[define(E)] _element: ElemType,
    #[define(A)] _accumulator: ElemType,
    #[define(O)] _output_element: ElemType,
) {
    let vectors = comptime!(tile.lane_vectors());
    let row_vectors = comptime!(tile.row_vectors);
    let zero = Vector::<A, N>::zeroed();
    let lane = UNIT_POS as usize % comptime!(tile.lanes);
    let asked = CUBE_POS * comptime!(tile.rows) + UNIT_POS as usize / comptime!(tile.lanes);
    // Every unit meets every barrier.
    let exists = asked < rows;
    let row = asked.min(rows - 1) * row_vectors;
    let mut shared = Shared::<[A]>::new_slice(comptime!(tile.shared()));
    let mut own = Array::<Vector<A, N>>::new(vectors);
    let mut grads = Array::<Vector<A, N>>::new(vectors);
    let mut squares = zero;
    let mut products = zero;
    #[unroll]
    for i in 0..vectors {
        let at = row + place(lane, i, tile);
        own[i] = select(has(lane, i, tile), Vector::<A, N>::cast_from(x[at]), zero);
        squares += own[i] * own[i];
        grads[i] = own[i];
        #[comptime]
        match &grad {
            ComptimeOption::Some(grad) => {
                grads[i] = grad[at];
                products += own[i] * grads[i];
            }
            ComptimeOption::None => {}
        }
    }
    let square = across_lanes::<A>(sum_of::<A, N>(squares), &mut shared, tile, Combine::Sum);
    let mut share = A::new(0.0);
    #[comptime]
    match &grad {
        ComptimeOption::Some(_) => {
            let product =
                across_lanes::<A>(sum_of::<A, N>(products), &mut shared, tile, Combine::Sum);
            let is_long = square > A::new(SMALLEST_SQUARE);
            share = select(
                is_long,
                product / square.max(A::new(SMALLEST_SQUARE)),
                A::new(0.0),
            );
        }
        ComptimeOption::None => {}
    }
    let length = square.max(A::new(SMALLEST_SQUARE)).sqrt();
    let inverse = Vector::<A, N>::empty().fill(A::new(1.0) / length);
    let share = Vector::<A, N>::empty().fill(share);
    if exists {
        #[unroll]
        for i in 0..vectors {
            if has(lane, i, tile) {
                let number = (grads[i] - own[i] * share) * inverse;
                output[row + place(lane, i, tile)] = Vector::<O, N>::cast_from(number);
            }
        }
    }
}

/// Rows `[rows, width]` made as long as 1, in the type of sums; or with the gradient by them, in that type, the gradient by `x`, in its. Contiguous.
///
/// # Errors
/// As [`keyed_rows`].
pub fn l2_normalize(
    client: &Client,
    [rows, width]: [usize; 2],
    (x, element): Typed,
    grad: Option<&Handle>,
    output: &Handle,
) -> Result<(), KernelError> {
    let accumulator = accumulator_of(element);
    let tile = tile_of(client.properties(), width, accumulator, LANE_NUMBERS)?;
    let address = address_of(client, rows * width)?;
    let cubes = spread(client, rows.div_ceil(tile.rows) as u64)?;
    if rows * width == 0 {
        return Ok(());
    }
    let vectors = rows * tile.row_vectors;
    let written = if grad.is_some() { element } else { accumulator };
    // SAFETY: a unit reads its own row, or the last, and writes its own, below `rows`.
    unsafe {
        unit::launch_unchecked(
            client,
            cubes,
            CubeDim::new_1d(tile.units() as u32),
            address,
            tile.vector,
            buffer(x, vectors),
            optional(grad, vectors),
            buffer(output, vectors),
            rows,
            tile,
            element,
            accumulator,
            written,
        );
    }
    Ok(())
}
