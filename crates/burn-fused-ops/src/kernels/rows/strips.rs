//! How cubes of neighbouring columns and some rows each go over a matrix, and the sums over rows that they leave.

use crate::kernels::prelude::*;

/// Units of a cube.
const UNITS: usize = 256;
/// Vectors of a row that a cube has: 512 bytes of half-precision numbers in a piece.
const COLUMN_UNITS: usize = 32;

/// How units share the matrix, known to the compiler.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Grid {
    /// Vectors of a row.
    pub row_vectors: usize,
    /// Units along a row.
    pub columns: usize,
    /// Units along a column.
    pub rows: usize,
}

/// Writes a unit's sum over its rows, added to those of the units below it, as that of the cube's chunk.
#[cube]
pub fn store_sums<A: Float, N: Size>(
    sums: ComptimeOption<Box<[Vector<A, N>]>>,
    sum: Vector<A, N>,
    column: usize,
    #[comptime] grid: Grid,
) {
    #[comptime]
    match sums {
        ComptimeOption::Some(mut sums) => {
            let unit = UNIT_POS as usize;
            let mut sum = sum;
            let mut shared =
                Shared::<[Vector<A, N>]>::new_slice(comptime!(grid.columns * grid.rows));
            shared[unit] = sum;
            sync_cube();
            if unit < comptime!(grid.columns) && column < comptime!(grid.row_vectors) {
                #[unroll]
                for other in 1..comptime!(grid.rows) {
                    sum += shared[unit + other * comptime!(grid.columns)];
                }
                sums[CUBE_POS_Y as usize * comptime!(grid.row_vectors) + column] = sum;
            }
        }
        ComptimeOption::None => {}
    }
}

/// What such a launch is made of.
pub struct Strips {
    pub grid: Grid,
    /// Numbers of a vector.
    pub vector: usize,
    pub address: AddressType,
    /// Rows of a cube at a time.
    step_rows: usize,
    /// Cubes along a row.
    columns: u32,
    most_chunks: usize,
}

impl Strips {
    /// Over `[rows, width]` of vectors that divide all `lengths`, with so many rows of a unit at a time.
    ///
    /// # Errors
    /// [`KernelError::Limit`] if there are more elements or cubes than the device counts.
    pub fn new(
        client: &Client,
        [rows, width]: [usize; 2],
        lengths: &[usize],
        unrolled: usize,
        element: ElemType,
    ) -> Result<Self, KernelError> {
        let hardware = &client.properties().hardware;
        let vector = vector_of(client.properties(), element.size(), lengths);
        let row_vectors = width / vector;
        let units = UNITS.min(most_units(client.properties()));
        let columns = row_vectors.next_power_of_two().min(COLUMN_UNITS).min(units);
        let grid = Grid {
            row_vectors,
            columns,
            rows: units / columns,
        };
        let (x_most, y_most, _) = hardware.max_cube_count;
        let cubes = row_vectors.div_ceil(columns);
        KernelError::check("cubes along a row", x_most, cubes)?;
        let step_rows = grid.rows * unrolled;
        Ok(Self {
            grid,
            vector,
            address: address_of(client, (rows + step_rows) * width)?,
            step_rows,
            columns: cubes as u32,
            most_chunks: y_most as usize,
        })
    }

    pub fn dim(&self) -> CubeDim {
        CubeDim::new_1d((self.grid.columns * self.grid.rows) as u32)
    }

    pub fn cubes(&self, chunks: usize) -> CubeCount {
        CubeCount::Static(self.columns, chunks as u32, 1)
    }

    /// Chunks of rows where a cube goes over one.
    ///
    /// # Errors
    /// [`KernelError::Limit`] if they are more cubes than the device counts.
    pub fn chunks(&self, rows: usize) -> Result<usize, KernelError> {
        let chunks = rows.div_ceil(self.step_rows);
        KernelError::check("cubes along rows", self.most_chunks as u64, chunks)?;
        Ok(chunks)
    }

    /// Chunks of a cube and cubes along the rows: as many as there can be, or, where they leave sums, the `cubes` in all that keep a device busy.
    pub fn steps(&self, rows: usize, cubes: Option<usize>) -> (usize, usize) {
        let steps = rows.div_ceil(self.step_rows);
        let most = cubes.map_or(usize::MAX, |cubes| cubes / self.columns as usize);
        let of_a_cube = steps.div_ceil(steps.min(most.clamp(1, self.most_chunks)));
        (of_a_cube, steps.div_ceil(of_a_cube))
    }
}

/// The sums that chunks left, `[chunks, width]`, as one row.
///
/// # Errors
/// As [`column_sums`].
pub fn sum_up(
    client: &Client,
    partial: Option<Typed>,
    matrix: [usize; 2],
    sums: Option<Typed>,
) -> Result<(), KernelError> {
    match partial.zip(sums) {
        Some((partial, sums)) => column_sums(client, partial, matrix, sums),
        None => Ok(()),
    }
}

/// A buffer for the sums of so many chunks.
pub fn partial_sums(
    client: &Client,
    sums: Option<Typed>,
    [chunks, width]: [usize; 2],
    accumulator: ElemType,
) -> Option<Handle> {
    sums.map(|_| client.empty(chunks * width * accumulator.size()))
}
