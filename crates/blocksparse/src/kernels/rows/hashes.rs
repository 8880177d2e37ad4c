//! Buckets of rows: which column of a rotation, or its opposite, a row is nearest to.
//!
//! A unit has two rows, and sums of some columns at a time; a cube's units share those columns of the rotation. All rounds are one launch.

use cubecl::ir::ElemType;
use cubecl::prelude::*;
use cubecl::server::Handle;

use super::columns::accumulator_of;
use super::norm_shape::check_buffers;
use super::tile::RowTile;
use super::typed::Typed;
use crate::kernels::args::{address_of, buffer, spread};
use crate::kernels::error::KernelError;

/// Units of a cube, at most.
const UNITS: usize = 128;
/// Rows of a unit.
const ROWS: usize = 2;
/// Columns that are summed at a time.
const COLUMNS: usize = 16;
/// Columns of a vector, if the device has such.
const VECTOR: usize = 4;

/// What is hashed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct HashedRows {
    /// Batch entries times heads.
    pub lists: usize,
    /// Rows of a list.
    pub length: usize,
    /// Numbers of a row.
    pub width: usize,
    /// Rotations.
    pub rounds: usize,
    /// Columns of a rotation, half of the buckets.
    pub half: usize,
}

impl HashedRows {
    /// Of `[lists, length, width]` and `rounds` rotations of `half` columns.
    pub fn new([lists, length, width]: [usize; 3], [rounds, half]: [usize; 2]) -> Self {
        Self {
            lists,
            length,
            width,
            rounds,
            half,
        }
    }
}

/// What is compiled into the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Hashed {
    units: usize,
    /// Vectors of a row, and numbers of each.
    row_vectors: usize,
    vector: usize,
    /// Vectors of the columns that are summed at a time, and columns of each.
    column_vectors: usize,
    columns: usize,
}

impl Hashed {
    /// Vectors of a rotation's columns that a cube's units share.
    fn shared(&self) -> usize {
        self.row_vectors * self.vector * self.column_vectors
    }
}

#[derive(CubeType, CubeLaunch, Clone, Copy)]
struct Sizes {
    /// Of all lists.
    rows: usize,
    length: usize,
    rounds: usize,
    half: usize,
    /// Cubes of a round.
    tiles: usize,
}

#[cube(launch_unchecked, address_type = "dynamic")]
fn hash<E: Float, A: Float, N: Size, S: Size>(
    x: &[Vector<E, N>],
    rotations: &[A],
    buckets: &mut [i32],
    sizes: Sizes,
    #[comptime] h: Hashed,
    #[define(E)] _element: ElemType,
    #[define(A)] _accumulator: ElemType,
) {
    let width = comptime!(h.row_vectors * h.vector);
    let column_vectors = comptime!(h.column_vectors);
    let columns = comptime!(h.columns);
    let mut shared = Shared::<[Vector<A, S>]>::new_slice(comptime!(h.shared()));
    // Cubes beyond the last make it again.
    let cube = CUBE_POS.min(sizes.tiles * sizes.rounds - 1);
    let round = cube / sizes.tiles;
    let unit = UNIT_POS as usize;
    let first = cube % sizes.tiles * comptime!(h.units * ROWS) + unit;
    let mut highest = Array::<A>::new(ROWS);
    let mut lowest = Array::<A>::new(ROWS);
    let mut highest_at = Array::<u32>::new(ROWS);
    let mut lowest_at = Array::<u32>::new(ROWS);
    #[unroll]
    for r in 0..ROWS {
        highest[r] = A::new(-3.0e38);
        lowest[r] = A::new(3.0e38);
        highest_at[r] = 0u32.runtime();
        lowest_at[r] = 0u32.runtime();
    }
    let mut column = 0usize.runtime();
    while column < sizes.half {
        sync_cube();
        let mut i = unit;
        while i < comptime!(h.shared()) {
            let number = i / column_vectors;
            let from = column + i % column_vectors * columns;
            let mut vector = Vector::<A, S>::zeroed();
            #[unroll]
            for c in 0..columns {
                let at = (from + c).min(sizes.half - 1);
                vector.insert(c, rotations[(round * width + number) * sizes.half + at]);
            }
            shared[i] = vector;
            i += comptime!(h.units);
        }
        sync_cube();
        let mut sums = Array::<Vector<A, S>>::new(comptime!(ROWS * column_vectors));
        #[unroll]
        for i in 0..comptime!(ROWS * column_vectors) {
            sums[i] = Vector::<A, S>::zeroed();
        }
        for at in 0..comptime!(h.row_vectors) {
            #[unroll]
            for r in 0..ROWS {
                let row = (first + comptime!(r * h.units)).min(sizes.rows - 1);
                let numbers = Vector::<A, N>::cast_from(x[row * comptime!(h.row_vectors) + at]);
                #[unroll]
                for n in 0..comptime!(h.vector) {
                    let number = Vector::<A, S>::empty().fill(numbers.extract(n));
                    #[unroll]
                    for c in 0..column_vectors {
                        let turned = shared[(at * comptime!(h.vector) + n) * column_vectors + c];
                        sums[comptime!(r * column_vectors + c)] += number * turned;
                    }
                }
            }
        }
        #[unroll]
        for r in 0..ROWS {
            #[unroll]
            for c in 0..comptime!(column_vectors) {
                let vector = sums[comptime!(r * column_vectors + c)];
                #[unroll]
                for s in 0..columns {
                    let own = column + comptime!(c * h.columns + s);
                    let sum = vector.extract(s);
                    let exists = own < sizes.half;
                    let is_higher = exists && sum > highest[r];
                    highest[r] = select(is_higher, sum, highest[r]);
                    highest_at[r] = select(is_higher, own as u32, highest_at[r]);
                    let is_lower = exists && sum < lowest[r];
                    lowest[r] = select(is_lower, sum, lowest[r]);
                    lowest_at[r] = select(is_lower, own as u32, lowest_at[r]);
                }
            }
        }
        column += column_vectors * columns;
    }
    #[unroll]
    for r in 0..ROWS {
        let row = first + comptime!(r * h.units);
        if row < sizes.rows {
            let list = row / sizes.length;
            let into = (list * sizes.rounds + round) * sizes.length + row % sizes.length;
            let opposite = lowest_at[r] + sizes.half as u32;
            let is_opposite = A::new(0.0) - lowest[r] > highest[r];
            buckets[into] = select(is_opposite, opposite, highest_at[r]) as i32;
        }
    }
}

/// The buckets of rows `x` `[lists, length, width]`: the first of the largest of `[x R; −x R]` for each rotation `R` of `rotations`,
/// `[rounds, width, half]` in the type of sums. `buckets` are i32 `[lists, rounds, length]`, below `2 · half`. Contiguous.
///
/// # Errors
/// [`KernelError`] if the device does not index as many numbers, or has no room for columns of a rotation.
pub fn hash_rows(
    client: &Client,
    of: &HashedRows,
    (x, element): Typed,
    rotations: &Handle,
    buckets: &Handle,
) -> Result<(), KernelError> {
    let properties = client.properties();
    let hardware = &properties.hardware;
    let accumulator = accumulator_of(element);
    let Some(RowTile {
        vector,
        row_vectors,
        ..
    }) = RowTile::new(properties, of.width, element, usize::MAX)
    else {
        return Err(KernelError::limit("a row's numbers", 0u32, of.width));
    };
    let of_columns = VECTOR.min(hardware.max_vector_size.max(1));
    let shared = of.width * COLUMNS * accumulator.size();
    if shared > hardware.max_shared_memory_size {
        let what = "the bytes of a rotation's columns";
        return Err(KernelError::limit(
            what,
            hardware.max_shared_memory_size as u64,
            shared,
        ));
    }
    check_buffers(client, 3)?;
    let rows = of.lists * of.length;
    let numbers = [
        rows * of.width,
        rows * of.rounds,
        of.rounds * of.width * of.half,
    ];
    let address = address_of(client, numbers.into_iter().max().unwrap_or(0))?;
    if rows * of.rounds * of.half * of.width == 0 {
        return Ok(());
    }
    let most = (hardware.max_units_per_cube).min(hardware.max_cube_dim.0) as usize;
    let units = UNITS.min(most.max(1));
    let tiles = rows.div_ceil(units * ROWS);
    let cubes = spread(client, (tiles * of.rounds) as u64)?;
    // SAFETY: a unit reads its own rows, or the last, and writes their buckets if there are such rows; a cube reads the rotation of its round.
    unsafe {
        hash::launch_unchecked(
            client,
            cubes,
            CubeDim::new_1d(units as u32),
            address,
            vector,
            of_columns,
            buffer(x, rows * row_vectors),
            buffer(rotations, of.rounds * of.width * of.half),
            buffer(buckets, rows * of.rounds),
            SizesLaunch::new(rows, of.length, of.rounds, of.half, tiles),
            Hashed {
                units,
                row_vectors,
                vector,
                column_vectors: COLUMNS / of_columns,
                columns: of_columns,
            },
            element,
            accumulator,
        );
    }
    Ok(())
}
