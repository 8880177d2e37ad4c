//! Buckets of rows: which column of a rotation, or its opposite, a row is nearest to.
//!
//! ```text
//! bucket   the first of the largest of [x R; −x R]: a cube has 128 rows of a list and a rotation, 64 columns at a time
//!          products are in registers, or of rows in bf16 on tensor cores (split)
//! ```

use cubecl::ir::ElemType;
use cubecl::prelude::*;
use cubecl::server::Handle;

use crate::kernels::rows::products::{
    ACROSS, OWN, ProductTile, RowsOf, SIDE, best_of_shared_row, is_before, multiply_shared,
    own_column, share_rows,
};
use crate::kernels::rows::split;
use crate::kernels::rows::split::{EIGHT, SplitTile, load_rows, own_eight, products, share_eight};
use blocksparse_cubecl::args::{address_of, buffer, spread};
use blocksparse_cubecl::error::KernelError;
use blocksparse_cubecl::rows::columns::accumulator_of;
use blocksparse_cubecl::rows::norm_shape::check_buffers;
use blocksparse_cubecl::rows::typed::Typed;

/// Rows and units of a cube.
const TILE: usize = 128;
/// Rows of a cube, in parts of 64.
const GROUPS: usize = TILE / SIDE;

/// What is hashed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct HashedRows {
    /// Batch entries times heads.
    pub lists: usize,
    /// Rows of a list.
    pub length: usize,
    /// Elements of a row.
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

#[derive(CubeType, CubeLaunch, Clone, Copy)]
struct Sizes {
    lists: usize,
    length: usize,
    rounds: usize,
    /// Elements of a row, and vectors.
    width: usize,
    vectors: usize,
    half: usize,
    /// Cubes of a list and a round.
    tiles: usize,
}

/// What a cube has: a round of a list, and some of its rows.
#[derive(CubeType, Clone, Copy)]
struct Own {
    /// Counted through the rounds of all lists.
    group: usize,
    tile: usize,
}

/// Cubes beyond the last make it again.
#[cube]
fn own(sizes: &Sizes) -> Own {
    let cube = CUBE_POS.min(sizes.lists * sizes.rounds * sizes.tiles - 1);
    Own {
        group: cube / sizes.tiles,
        tile: cube % sizes.tiles,
    }
}

/// Fills a unit's part of the shared columns of a rotation, which has them side by side.
#[cube]
fn share_columns<A: Float, N: Size>(
    rotations: &[A],
    shared: &mut Shared<[Vector<A, N>]>,
    round: usize,
    column0: usize,
    step: usize,
    sizes: &Sizes,
    #[comptime] t: ProductTile,
) {
    #[unroll]
    for i in 0..comptime!(SIDE * t.slots() / t.units()) {
        let at = UNIT_POS as usize + comptime!(i * t.units());
        let (column, slot) = (at % SIDE, at / SIDE);
        let mut vector = Vector::<A, N>::zeroed();
        #[unroll]
        for n in 0..comptime!(t.vector) {
            let number = (step * comptime!(t.slots()) + slot) * comptime!(t.vector) + n;
            let exists = number < sizes.width && column0 + column < sizes.half;
            let from = (round * sizes.width + number) * sizes.half + column0 + column;
            let turned = rotations[select(exists, from, 0usize)];
            vector.insert(n, select(exists, turned, A::new(0.0)));
        }
        shared[column * comptime!(t.pitch()) + slot] = vector;
    }
}

/// How a cube multiplies.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct HashTile {
    shared: ProductTile,
    /// On tensor cores, if they do.
    split: Option<SplitTile>,
}

/// The bucket of the row of a unit, of which a cube has as many as rows.
#[cube]
fn bucket_of_row<E: Float, A: Float, N: Size>(
    x: &[Vector<E, N>],
    rotations: &[A],
    own: &Own,
    sizes: &Sizes,
    #[comptime] t: HashTile,
) -> u32 {
    match comptime!(t.split) {
        Some(split) => bucket_by_parts::<E, A, N>(x, rotations, own, sizes, split),
        None => bucket_by_units::<E, A, N>(x, rotations, own, sizes, t.shared),
    }
}

/// The bucket of the row of a unit by tensor cores.
#[cube]
fn bucket_by_parts<E: Float, A: Float, N: Size>(
    x: &[Vector<E, N>],
    rotations: &[A],
    own: &Own,
    sizes: &Sizes,
    #[comptime] t: SplitTile,
) -> u32 {
    let shared: Shared<[u32]> = Shared::new_aligned_slice(comptime!(t.bytes() / 4), 16usize);
    let round = own.group % sizes.rounds;
    let list = own.group / sizes.rounds * sizes.length;
    let half = sizes.half as u32;
    let mut rows = Array::<u32>::new(comptime!(t.words()));
    load_rows::<Vector<E, N>>(
        x,
        &mut rows,
        list,
        own.tile * comptime!(split::ROWS),
        sizes.length,
        t,
    );
    let mut best = Array::<f32>::new(split::OWN);
    let mut best_at = Array::<u32>::new(split::OWN);
    #[unroll]
    for i in 0..comptime!(split::OWN) {
        best[i] = (-3.0e38f32).runtime();
        best_at[i] = 0u32.runtime();
    }
    let mut numbers = Array::<f32>::new(EIGHT);
    let mut sums = Array::<f32>::new(comptime!(2 * split::OWN));
    for tile in 0..sizes.half.div_ceil(comptime!(split::COLUMNS)) {
        let column0 = tile * comptime!(split::COLUMNS);
        sync_cube();
        #[unroll]
        for i in 0..comptime!(t.eights()) {
            let eight = own_eight(i, t);
            let column = column0 + eight.column;
            #[unroll]
            for n in 0..EIGHT {
                let number = eight.number + n;
                let exists = number < sizes.width && column < sizes.half;
                let from = (round * sizes.width + number) * sizes.half + column;
                let turned = f32::cast_from(rotations[select(exists, from, 0usize)]);
                numbers[n] = select(exists, turned, 0.0f32);
            }
            share_eight(&numbers, &shared, eight.offset);
        }
        sync_cube();
        let eights = (sizes.half - column0)
            .min(comptime!(split::COLUMNS))
            .div_ceil(EIGHT);
        for eight in 0..eights {
            products(&rows, &shared, eight, &mut sums, t);
            let first = column0 + eight * EIGHT + split::own_column();
            #[unroll]
            for i in 0..comptime!(split::OWN) {
                #[unroll]
                for j in 0..2usize {
                    let column = first + j;
                    let sum = sums[comptime!(2 * i + j)];
                    let is_opposite = sum < 0.0f32;
                    let size = select(is_opposite, 0.0f32 - sum, sum);
                    let at = column as u32 + select(is_opposite, half, 0u32);
                    let is_better =
                        column < sizes.half && is_before::<f32>(size, at, best[i], best_at[i]);
                    best[i] = select(is_better, size, best[i]);
                    best_at[i] = select(is_better, at, best_at[i]);
                }
            }
        }
    }
    split::best_of_own_row(&mut best, &mut best_at)
}

/// The bucket of the row of a unit.
#[cube]
fn bucket_by_units<E: Float, A: Float, N: Size>(
    x: &[Vector<E, N>],
    rotations: &[A],
    own: &Own,
    sizes: &Sizes,
    #[comptime] t: ProductTile,
) -> u32 {
    let mut left = Shared::<[Vector<A, N>]>::new_slice(comptime!(t.left()));
    let mut right = Shared::<[Vector<A, N>]>::new_slice(comptime!(t.right()));
    let mut parts = Shared::<[A]>::new_slice(comptime!(t.units() * ACROSS));
    let mut parts_at = Shared::<[u32]>::new_slice(comptime!(t.units() * ACROSS));
    let round = own.group % sizes.rounds;
    let rows = RowsOf {
        start: own.group / sizes.rounds * sizes.length * sizes.vectors,
        first: own.tile * comptime!(t.units()),
        rows: sizes.length,
        vectors: sizes.vectors,
    };
    let half = sizes.half as u32;
    let mut best = Array::<A>::new(OWN);
    let mut best_at = Array::<u32>::new(OWN);
    #[unroll]
    for i in 0..OWN {
        best[i] = A::new(-3.0e38);
        best_at[i] = 0u32.runtime();
    }
    // Nobody asks for them.
    let mut squares = Array::<A>::new(1usize);
    let mut sums = Array::<A>::new(comptime!(OWN * OWN));
    for tile in 0..sizes.half.div_ceil(SIDE) {
        let column0 = tile * SIDE;
        #[unroll]
        for i in 0..comptime!(OWN * OWN) {
            sums[i] = A::new(0.0);
        }
        for step in 0..sizes.vectors.div_ceil(comptime!(t.slots())) {
            sync_cube();
            share_rows::<E, A, N>(
                x,
                &mut left,
                &mut squares,
                &rows,
                step,
                comptime!(t.units()),
                false,
                t,
            );
            share_columns::<A, N>(rotations, &mut right, round, column0, step, sizes, t);
            sync_cube();
            multiply_shared::<A, N>(&left, &right, &mut sums, t);
        }
        #[unroll]
        for i in 0..OWN {
            #[unroll]
            for j in 0..OWN {
                let column = column0 + own_column(j);
                let sum = sums[comptime!(i * OWN + j)];
                // Of a column and its opposite the larger, and of equal ones the first.
                let is_opposite = sum < A::new(0.0);
                let size = select(is_opposite, A::new(0.0) - sum, sum);
                let at = column as u32 + select(is_opposite, half, 0u32);
                let is_better =
                    column < sizes.half && is_before::<A>(size, at, best[i], best_at[i]);
                best[i] = select(is_better, size, best[i]);
                best_at[i] = select(is_better, at, best_at[i]);
            }
        }
    }
    best_of_shared_row::<A>(&best, &best_at, &mut parts, &mut parts_at)
}

#[cube(launch_unchecked, address_type = "dynamic")]
fn hash<E: Float, A: Float, N: Size>(
    x: &[Vector<E, N>],
    rotations: &[A],
    buckets: &mut [i32],
    sizes: Sizes,
    #[comptime] t: HashTile,
    #[define(E)] _element: ElemType,
    #[define(A)] _accumulator: ElemType,
) {
    let own = own(&sizes);
    let bucket = bucket_of_row::<E, A, N>(x, rotations, &own, &sizes, t);
    let row = own.tile * comptime!(TILE) + UNIT_POS as usize;
    if row < sizes.length {
        buckets[own.group * sizes.length + row] = bucket as i32;
    }
}

/// How hashes are launched.
struct Launch {
    tile: HashTile,
    accumulator: ElemType,
    address: AddressType,
    cubes: CubeCount,
    tiles: usize,
}

impl Launch {
    fn new(
        client: &Client,
        of: &HashedRows,
        element: ElemType,
        [x, rotations]: [&Handle; 2],
    ) -> Result<Self, KernelError> {
        let accumulator = accumulator_of(element);
        let others = TILE * ACROSS * (accumulator.size() + 4);
        let shared = ProductTile::new(client, of.width, accumulator, GROUPS, others)?;
        let split = SplitTile::new(client, of.width, (x, element), rotations);
        let tile = HashTile { shared, split };
        check_buffers(client, 4)?;
        let rows = of.lists * of.length;
        let numbers = of.rounds * of.width * of.half;
        let most = (rows * of.width).max(rows * of.rounds).max(numbers);
        let tiles = of.length.div_ceil(TILE);
        KernelError::check_u32("buckets", 2 * of.half)?;
        Ok(Self {
            tile,
            accumulator,
            address: address_of(client, most)?,
            cubes: spread(client, (of.lists * of.rounds * tiles) as u64)?,
            tiles,
        })
    }

    fn sizes(&self, of: &HashedRows) -> SizesLaunch {
        let vectors = of.width / self.tile.shared.vector;
        SizesLaunch::new(
            of.lists, of.length, of.rounds, of.width, vectors, of.half, self.tiles,
        )
    }
}

/// The buckets of rows `x` `[lists, length, width]`: the first of the largest of `[x R; −x R]` for each rotation `R` of `rotations`,
/// `[rounds, width, half]` in the type of sums. `buckets` are i32 `[lists, rounds, length]`, below `2 · half`. Contiguous.
///
/// # Errors
/// [`KernelError`] if the device does not index as many numbers, or has too few units or bytes.
pub fn lsh_hash(
    client: &Client,
    of: &HashedRows,
    (x, element): Typed,
    rotations: &Handle,
    buckets: &Handle,
) -> Result<(), KernelError> {
    let launch = Launch::new(client, of, element, [x, rotations])?;
    let rows = of.lists * of.length;
    if rows * of.rounds * of.half * of.width == 0 {
        return Ok(());
    }
    let sizes = launch.sizes(of);
    // SAFETY: a unit reads numbers of rows of its list and of the rotation of its round, or the first of either, and writes its row's bucket if there is such a
    // row.
    unsafe {
        hash::launch_unchecked(
            client,
            launch.cubes,
            CubeDim::new_1d(TILE as u32),
            launch.address,
            launch.tile.shared.vector,
            buffer(x, rows * of.width / launch.tile.shared.vector),
            buffer(rotations, of.rounds * of.width * of.half),
            buffer(buckets, rows * of.rounds),
            sizes,
            launch.tile,
            element,
            launch.accumulator,
        );
    }
    Ok(())
}
