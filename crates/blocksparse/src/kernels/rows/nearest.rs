//! Rows and the means of their heads: how similar each is to each, in f32, and which mean each row is nearest to.
//!
//! ```text
//! similarity = (mean · row) / √max(|row|², least)        nearest = the first of the means of the largest
//! ```
//!
//! A cube has 64 rows of a list, and all means of its head, 64 at a time; a unit has every eighth of either, so that 16 loads serve 256 products. Lengths of
//! rows are summed where rows are loaded.

use cubecl::ir::ElemType;
use cubecl::prelude::*;
use cubecl::server::Handle;

use super::norm_shape::{check_buffers, sum_of};
use super::typed::Typed;
use crate::kernels::args::{address_of, buffer, spread};
use crate::kernels::error::KernelError;

/// Rows, and means, of a tile; and numbers of each that are loaded at a time.
const SIDE: usize = 64;
const DEPTH: usize = 32;
/// Rows, and means, of a unit.
const OWN: usize = 8;
/// Units along a side of a tile.
const ACROSS: usize = SIDE / OWN;
const UNITS: usize = ACROSS * ACROSS;
/// Numbers of a vector, if rows and the device have such.
const VECTOR: usize = 4;

/// Squares below this count as this.
const SMALLEST_SQUARE: f32 = 1e-24;
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
    /// Numbers of a row and of a mean.
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

/// What is compiled into the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Tile {
    /// Numbers of a vector.
    vector: usize,
}

impl Tile {
    /// Vectors of a row that are loaded at a time.
    fn slots(&self) -> usize {
        DEPTH / self.vector
    }

    /// Vectors from a row of what is shared to the next: one more, so that rows begin in different banks.
    fn pitch(&self) -> usize {
        self.slots() + 1
    }

    fn shared(&self) -> usize {
        SIDE * self.pitch()
    }
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

/// Fills a unit's share of what is shared, with zeros behind the last row and the last number: its vector of every so many rows. Their squares are added.
#[cube]
fn fill<E: Float, N: Size>(
    x: &[Vector<E, N>],
    shared: &mut Shared<[Vector<f32, N>]>,
    squares: &mut Array<f32>,
    start: usize,
    first: usize,
    rows: usize,
    vectors: usize,
    step: usize,
    #[comptime] t: Tile,
) {
    let slot = UNIT_POS as usize % comptime!(t.slots());
    let vector = step * comptime!(t.slots()) + slot;
    #[unroll]
    for i in 0..comptime!(t.slots()) {
        let row = UNIT_POS as usize / comptime!(t.slots()) + comptime!(i * UNITS / t.slots());
        let exists = first + row < rows && vector < vectors;
        let at = start + (first + row) * vectors + vector;
        let numbers = Vector::<f32, N>::cast_from(x[select(exists, at, start)]);
        let numbers = select(exists, numbers, Vector::<f32, N>::zeroed());
        shared[row * comptime!(t.pitch()) + slot] = numbers;
        squares[i] += sum_of::<f32, N>(numbers * numbers);
    }
}

#[cube(launch_unchecked, address_type = "dynamic")]
fn compare<E: Float, N: Size>(
    x: &[Vector<E, N>],
    means: &[Vector<f32, N>],
    similarities: &mut [f32],
    nearest: &mut [i32],
    sizes: Sizes,
    #[comptime] t: Tile,
    #[define(E)] _element: ElemType,
) {
    let mut left = Shared::<[Vector<f32, N>]>::new_slice(comptime!(t.shared()));
    let mut right = Shared::<[Vector<f32, N>]>::new_slice(comptime!(t.shared()));
    let mut parts = Shared::<[f32]>::new_slice(comptime!(SIDE * t.slots().max(ACROSS)));
    let mut scales = Shared::<[f32]>::new_slice(SIDE);
    let mut highest_at = Shared::<[u32]>::new_slice(comptime!(SIDE * ACROSS));
    // Cubes beyond the last tile make it again.
    let cube = CUBE_POS.min(sizes.lists * sizes.tiles - 1);
    let list = cube / sizes.tiles;
    let head = list % sizes.heads;
    let first = cube % sizes.tiles * SIDE;
    let x_start = list * sizes.length * sizes.vectors;
    let means_start = head * sizes.means * sizes.vectors;
    let unit = UNIT_POS as usize;
    let across = unit % ACROSS;
    let down = unit / ACROSS;
    let mut best = Array::<f32>::new(OWN);
    let mut best_at = Array::<u32>::new(OWN);
    #[unroll]
    for i in 0..OWN {
        best[i] = comptime!(LOWEST).runtime();
        best_at[i] = 0u32.runtime();
    }
    let mut of_means = Array::<f32>::new(comptime!(t.slots()));
    let mut squares = Array::<f32>::new(comptime!(t.slots()));
    let mut sums = Array::<f32>::new(comptime!(OWN * OWN));
    for tile in 0..sizes.means.div_ceil(SIDE) {
        let mean0 = tile * SIDE;
        #[unroll]
        for i in 0..comptime!(t.slots()) {
            squares[i] = 0.0f32.runtime();
            // Nobody asks for theirs.
            of_means[i] = 0.0f32.runtime();
        }
        #[unroll]
        for i in 0..comptime!(OWN * OWN) {
            sums[i] = 0.0f32.runtime();
        }
        for step in 0..sizes.vectors.div_ceil(comptime!(t.slots())) {
            sync_cube();
            fill::<E, N>(
                x,
                &mut left,
                &mut squares,
                x_start,
                first,
                sizes.length,
                sizes.vectors,
                step,
                t,
            );
            fill::<f32, N>(
                means,
                &mut right,
                &mut of_means,
                means_start,
                mean0,
                sizes.means,
                sizes.vectors,
                step,
                t,
            );
            sync_cube();
            for slot in 0..comptime!(t.slots()) {
                let mut own = Array::<Vector<f32, N>>::new(OWN);
                #[unroll]
                for i in 0..OWN {
                    own[i] = left[(across + comptime!(i * ACROSS)) * comptime!(t.pitch()) + slot];
                }
                #[unroll]
                for j in 0..OWN {
                    let mean = right[(down + comptime!(j * ACROSS)) * comptime!(t.pitch()) + slot];
                    #[unroll]
                    for i in 0..OWN {
                        #[unroll]
                        for n in 0..comptime!(t.vector) {
                            sums[comptime!(i * OWN + j)] += own[i].extract(n) * mean.extract(n);
                        }
                    }
                }
            }
        }
        #[unroll]
        for i in 0..comptime!(t.slots()) {
            let row = unit / comptime!(t.slots()) + comptime!(i * UNITS / t.slots());
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
            let within = across + comptime!(i * ACROSS);
            let scale = scales[within];
            let row = first + within;
            #[unroll]
            for j in 0..OWN {
                let mean = mean0 + down + comptime!(j * ACROSS);
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
    #[unroll]
    for i in 0..OWN {
        let at = (across + comptime!(i * ACROSS)) * ACROSS + down;
        parts[at] = best[i];
        highest_at[at] = best_at[i];
    }
    sync_cube();
    let mut highest = parts[unit * ACROSS];
    let mut mean = highest_at[unit * ACROSS];
    #[unroll]
    for other in 1..ACROSS {
        let number = parts[unit * ACROSS + other];
        let at = highest_at[unit * ACROSS + other];
        let is_higher = number > highest || (number == highest && at < mean);
        highest = select(is_higher, number, highest);
        mean = select(is_higher, at, mean);
    }
    if first + unit < sizes.length {
        nearest[list * sizes.length + first + unit] = (head * sizes.means + mean as usize) as i32;
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
    let hardware = &client.properties().hardware;
    let most = hardware.max_units_per_cube.min(hardware.max_cube_dim.0);
    if (most as usize) < UNITS {
        return Err(KernelError::limit("units of a cube", most, UNITS));
    }
    let widest = hardware.max_vector_size.clamp(1, VECTOR);
    let fits = |vector: &usize| *vector <= widest && of.width.is_multiple_of(*vector);
    let vector = [VECTOR, 2, 1].into_iter().find(fits).unwrap_or(1);
    let tile = Tile { vector };
    let numbers =
        2 * tile.shared() * vector + SIDE * tile.slots().max(ACROSS) + SIDE + SIDE * ACROSS;
    let bytes = numbers * size_of::<f32>();
    if bytes > hardware.max_shared_memory_size {
        let (what, limit) = ("the bytes of a tile", hardware.max_shared_memory_size);
        return Err(KernelError::limit(what, limit as u64, bytes));
    }
    check_buffers(client, 4)?;
    let lists = of.lists();
    let [rows, all_means] = [lists * of.length, of.heads * of.means];
    let counts = [rows * of.width, all_means * of.width, rows * of.means];
    let address = address_of(client, counts.into_iter().max().unwrap_or(0))?;
    KernelError::check_u32("means of all heads", all_means)?;
    if rows * all_means * of.width == 0 {
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
            CubeDim::new_1d(UNITS as u32),
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
