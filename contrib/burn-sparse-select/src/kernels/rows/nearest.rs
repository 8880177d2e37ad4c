//! Rows and the means of their heads: how similar each is to each, in f32, and which mean each row is nearest to.
//!
//! ```text
//! similarity = (mean · row) / √max(|row|², least)        nearest = the first of the means of the largest
//! ```
//!
//! A cube has 64 rows of a list, and all means of its head, 64 at a time. Lengths of rows are summed where rows are loaded. Of rows in bf16 tensor cores multiply
//! (split), by cubes of 128 rows.

use cubecl::ir::{ElemType, FloatKind};
use cubecl::prelude::*;
use cubecl::server::Handle;

use crate::kernels::rows::products::{
    ACROSS, OWN, ProductTile, RowsOf, SIDE, best_of_shared_row, multiply_shared, own_column,
    own_row, share_rows,
};
use crate::kernels::rows::split;
use crate::kernels::rows::split::{
    EIGHT, SplitTile, load_columns, load_rows, own_eight, products, row_squares, share_eight,
};
use blocksparse_cubecl::args::{address_of, buffer, spread};
use blocksparse_cubecl::error::KernelError;
use blocksparse_cubecl::rows::SMALLEST_SQUARE;
use blocksparse_cubecl::rows::norm_shape::check_buffers;
use blocksparse_cubecl::rows::typed::Typed;
/// What no similarity is as low as.
const LOWEST: f32 = -3.0e38;

/// Rows and means.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct RowsOfMeans {
    /// Batch entries, and heads of each.
    pub batch: usize,
    /// Heads, which have means of their own.
    pub heads: usize,
    /// Rows of a list.
    pub length: usize,
    /// Means of a head.
    pub means: usize,
    /// Elements of a row and of a mean.
    pub width: usize,
}

impl RowsOfMeans {
    /// `[batch, heads, length, width]` and `[heads, means, width]`.
    pub fn new([batch, heads, length, width]: [usize; 4], means: usize) -> Self {
        Self {
            batch,
            heads,
            length,
            means,
            width,
        }
    }

    fn lists(&self) -> usize {
        self.batch * self.heads
    }
}

/// Numbers that units put beside what is shared of products.
fn parts(t: &ProductTile) -> usize {
    SIDE * t.slots().max(ACROSS)
}

#[derive(CubeType, CubeLaunch, Clone, Copy)]
struct Sizes {
    lists: usize,
    heads: usize,
    length: usize,
    means: usize,
    /// Of a row.
    vectors: usize,
    /// Tiles of a list.
    tiles: usize,
}

#[cube(launch_unchecked, address_type = "dynamic")]
fn compare<E: Float, N: Size>(
    x: &[Vector<E, N>],
    means: &[Vector<f32, N>],
    similarities: &mut [f32],
    nearest: &mut [i32],
    sizes: Sizes,
    #[comptime] t: ProductTile,
    #[define(E)] _element: ElemType,
) {
    let mut left = Shared::<[Vector<f32, N>]>::new_slice(comptime!(t.left()));
    let mut right = Shared::<[Vector<f32, N>]>::new_slice(comptime!(t.right()));
    let mut parts = Shared::<[f32]>::new_slice(comptime!(parts(&t)));
    let mut scales = Shared::<[f32]>::new_slice(SIDE);
    let mut highest_at = Shared::<[u32]>::new_slice(comptime!(SIDE * ACROSS));
    // Cubes beyond the last tile make it again.
    let cube = CUBE_POS.min(sizes.lists * sizes.tiles - 1);
    let list = cube / sizes.tiles;
    let head = list % sizes.heads;
    let first = cube % sizes.tiles * SIDE;
    let rows = RowsOf {
        start: list * sizes.length * sizes.vectors,
        first,
        rows: sizes.length,
        vectors: sizes.vectors,
    };
    let unit = UNIT_POS as usize;
    let mut best = Array::<f32>::new(OWN);
    let mut best_at = Array::<u32>::new(OWN);
    #[unroll]
    for i in 0..OWN {
        best[i] = comptime!(LOWEST).runtime();
        best_at[i] = 0u32.runtime();
    }
    let mut squares = Array::<f32>::new(comptime!(t.slots()));
    let mut sums = Array::<f32>::new(comptime!(OWN * OWN));
    for tile in 0..sizes.means.div_ceil(SIDE) {
        let mean0 = tile * SIDE;
        let own_means = RowsOf {
            start: head * sizes.means * sizes.vectors,
            first: mean0,
            rows: sizes.means,
            vectors: sizes.vectors,
        };
        #[unroll]
        for i in 0..comptime!(t.slots()) {
            squares[i] = 0.0f32.runtime();
        }
        #[unroll]
        for i in 0..comptime!(OWN * OWN) {
            sums[i] = 0.0f32.runtime();
        }
        for step in 0..sizes.vectors.div_ceil(comptime!(t.slots())) {
            sync_cube();
            share_rows::<E, f32, N>(x, &mut left, &mut squares, &rows, step, SIDE, true, t);
            share_rows::<f32, f32, N>(
                means,
                &mut right,
                &mut squares,
                &own_means,
                step,
                SIDE,
                false,
                t,
            );
            sync_cube();
            multiply_shared::<f32, N>(&left, &right, &mut sums, t);
        }
        #[unroll]
        for i in 0..comptime!(t.slots()) {
            let row = unit / comptime!(t.slots()) + comptime!(i * t.units() / t.slots());
            parts[row * comptime!(t.slots()) + unit % comptime!(t.slots())] = squares[i];
        }
        sync_cube();
        // As many units as rows.
        let mut square = 0.0f32.runtime();
        #[unroll]
        for i in 0..comptime!(t.slots()) {
            square += parts[unit * comptime!(t.slots()) + i];
        }
        scales[unit] = 1.0f32 / square.max(SMALLEST_SQUARE).sqrt();
        sync_cube();
        #[unroll]
        for i in 0..OWN {
            let within = own_row(i);
            let scale = scales[within];
            let row = first + within;
            #[unroll]
            for j in 0..OWN {
                let mean = mean0 + own_column(j);
                let similarity = sums[comptime!(i * OWN + j)] * scale;
                if row < sizes.length && mean < sizes.means {
                    similarities[(list * sizes.means + mean) * sizes.length + row] = similarity;
                }
                let is_higher = mean < sizes.means && similarity > best[i];
                best[i] = select(is_higher, similarity, best[i]);
                best_at[i] = select(is_higher, mean as u32, best_at[i]);
            }
        }
    }
    sync_cube();
    let mean = best_of_shared_row::<f32>(&best, &best_at, &mut parts, &mut highest_at);
    if first + unit < sizes.length {
        nearest[list * sizes.length + first + unit] = (head * sizes.means + mean as usize) as i32;
    }
}

/// [`compare`] on tensor cores.
#[cube(launch_unchecked, address_type = "dynamic")]
fn compare_by_parts(
    x: &[u32],
    means: &[f32],
    similarities: &mut [f32],
    nearest: &mut [i32],
    sizes: Sizes,
    #[comptime] t: SplitTile,
) {
    let shared: Shared<[u32]> = Shared::new_aligned_slice(comptime!(t.bytes() / 4), 16usize);
    // Cubes beyond the last tile make it again.
    let cube = CUBE_POS.min(sizes.lists * sizes.tiles - 1);
    let list = cube / sizes.tiles;
    let head = list % sizes.heads;
    let first = cube % sizes.tiles * comptime!(split::ROWS);
    let width = comptime!(t.width());
    let mut rows = Array::<u32>::new(comptime!(t.words()));
    load_rows::<u32>(x, &mut rows, list * sizes.length, first, sizes.length, t);
    let mut scales = Array::<f32>::new(split::OWN);
    row_squares(&rows, &mut scales, t);
    let mut best = Array::<f32>::new(split::OWN);
    let mut best_at = Array::<u32>::new(split::OWN);
    #[unroll]
    for i in 0..comptime!(split::OWN) {
        scales[i] = 1.0f32 / scales[i].max(SMALLEST_SQUARE).sqrt();
        best[i] = comptime!(LOWEST).runtime();
        best_at[i] = 0u32.runtime();
    }
    let mut numbers = Array::<f32>::new(EIGHT);
    let mut sums = Array::<f32>::new(comptime!(2 * split::OWN));
    for tile in 0..sizes.means.div_ceil(comptime!(split::COLUMNS)) {
        let mean0 = tile * comptime!(split::COLUMNS);
        sync_cube();
        #[unroll]
        for i in 0..comptime!(t.eights()) {
            let eight = own_eight(i, t);
            let mean = mean0 + eight.column;
            let exists = mean < sizes.means;
            let mean = head * sizes.means + select(exists, mean, 0usize);
            load_columns(
                means,
                &mut numbers,
                mean * width + eight.number,
                eight.number,
                select(exists, width, 0usize),
            );
            share_eight(&numbers, &shared, eight.offset);
        }
        sync_cube();
        let eights = (sizes.means - mean0)
            .min(comptime!(split::COLUMNS))
            .div_ceil(EIGHT);
        for eight in 0..eights {
            products(&rows, &shared, eight, &mut sums, t);
            let first_mean = mean0 + eight * EIGHT + split::own_column();
            #[unroll]
            for i in 0..comptime!(split::OWN) {
                let row = first + split::own_row(i);
                #[unroll]
                for j in 0..2usize {
                    let mean = first_mean + j;
                    let similarity = sums[comptime!(2 * i + j)] * scales[i];
                    if row < sizes.length && mean < sizes.means {
                        similarities[(list * sizes.means + mean) * sizes.length + row] = similarity;
                    }
                    let is_higher = mean < sizes.means && similarity > best[i];
                    best[i] = select(is_higher, similarity, best[i]);
                    best_at[i] = select(is_higher, mean as u32, best_at[i]);
                }
            }
        }
    }
    let mean = split::best_of_own_row(&mut best, &mut best_at) as usize;
    let row = first + UNIT_POS as usize;
    if row < sizes.length {
        nearest[list * sizes.length + row] = (head * sizes.means + mean) as i32;
    }
}

/// How similar each row of `x`, `[batch, heads, length, width]` of any floats but f64, is to each of its head's `means`, f32 `[heads, means, width]`: the
/// products of these and of rows made as long as 1, in f32. `similarities` are f32 `[batch, heads, means, length]`; `nearest`, i32 `[batch, heads, length]`, says
/// of each row the first of the means of the largest, counted through those of all heads. Contiguous.
///
/// # Errors
/// [`KernelError`] if the device does not index as many numbers, or has too few units, buffers or bytes.
pub fn compare_with_means(
    client: &Client,
    of: &RowsOfMeans,
    (x, element): Typed,
    means: &Handle,
    [similarities, nearest]: [&Handle; 2],
) -> Result<(), KernelError> {
    let f32 = ElemType::Float(FloatKind::F32);
    // Of rows whose vectors are single numbers.
    let others = SIDE * (32 + 1 + ACROSS) * f32.size();
    let tile = ProductTile::new(client, of.width, f32, 1, others)?;
    let vector = tile.vector;
    check_buffers(client, 4)?;
    let lists = of.lists();
    let [rows, all_means] = [lists * of.length, of.heads * of.means];
    let counts = [rows * of.width, all_means * of.width, rows * of.means];
    let address = address_of(client, counts.into_iter().max().unwrap_or(0))?;
    KernelError::check_u32("means of all heads", all_means)?;
    if rows * all_means * of.width == 0 {
        return Ok(());
    }
    if let Some(tile) = SplitTile::new(client, of.width, (x, element), means) {
        let tiles = of.length.div_ceil(split::ROWS);
        let cubes = spread(client, (lists * tiles) as u64)?;
        // SAFETY: as below; two elements of a row are a word.
        unsafe {
            compare_by_parts::launch_unchecked(
                client,
                cubes,
                CubeDim::new_1d(split::ROWS as u32),
                address,
                buffer(x, rows * of.width / 2),
                buffer(means, all_means * of.width),
                buffer(similarities, rows * of.means),
                buffer(nearest, rows),
                SizesLaunch::new(lists, of.heads, of.length, of.means, 0, tiles),
                tile,
            );
        }
        return Ok(());
    }
    let tiles = of.length.div_ceil(SIDE);
    let cubes = spread(client, (lists * tiles) as u64)?;
    let vectors = of.width / vector;
    // SAFETY: a unit reads vectors of rows and means of its list, or the first of either, and writes numbers of rows and means that there are.
    unsafe {
        compare::launch_unchecked(
            client,
            cubes,
            CubeDim::new_1d(tile.units() as u32),
            address,
            vector,
            buffer(x, rows * vectors),
            buffer(means, all_means * vectors),
            buffer(similarities, rows * of.means),
            buffer(nearest, rows),
            SizesLaunch::new(lists, of.heads, of.length, of.means, vectors, tiles),
            tile,
            element,
        );
    }
    Ok(())
}
