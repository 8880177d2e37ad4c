//! Partition of a matrix into cubes of neighbouring columns and chunks of rows, and sums over rows.

use crate::kernels::prelude::*;

const UNITS: usize = 256;
/// Vectors of a row that a cube has: 512 contiguous bytes in half precision.
const COLUMN_UNITS: usize = 32;

/// Comptime grid of units.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Grid {
    /// Vectors of a row.
    pub row_vectors: usize,
    /// Units along a row.
    pub columns: usize,
    /// Units along a column.
    pub rows: usize,
}

/// Adds a unit's sum over its rows to those of the units in its column, and writes the total as the cube's chunk.
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

/// Partition of a matrix.
pub struct Strips {
    pub grid: Grid,
    /// Elements of a vector.
    pub vector: usize,
    pub address: AddressType,
    /// Rows of a cube per step.
    step_rows: usize,
    /// Cubes along a row.
    columns: u32,
    most_chunks: usize,
}

impl Strips {
    /// Partitions `[rows, width]` with vectors that divide all `lengths` and `unrolled` rows of a unit per step.
    ///
    /// # Errors
    /// [`KernelError::Limit`] if there are more elements or cubes than the device supports.
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

    /// Returns the number of chunks of rows when a cube has one chunk.
    ///
    /// # Errors
    /// [`KernelError::Limit`] if the device does not support that many cubes.
    pub fn chunks(&self, rows: usize) -> Result<usize, KernelError> {
        let chunks = rows.div_ceil(self.step_rows);
        KernelError::check("cubes along rows", self.most_chunks as u64, chunks)?;
        Ok(chunks)
    }

    /// Returns the chunks of a cube and the cubes along the rows: as many cubes as possible, or, where sums are written, about `cubes` in all.
    pub fn steps(&self, rows: usize, cubes: Option<usize>) -> (usize, usize) {
        let steps = rows.div_ceil(self.step_rows);
        let most = cubes.map_or(usize::MAX, |cubes| cubes / self.columns as usize);
        let of_a_cube = steps.div_ceil(steps.min(most.clamp(1, self.most_chunks)));
        (of_a_cube, steps.div_ceil(of_a_cube))
    }
}

/// Adds the sums of chunks, `[chunks, width]`, to one row.
///
/// # Errors
/// Those of [`column_sums`].
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

/// Allocates a buffer for the sums of chunks, if sums are wanted.
pub fn partial_sums(
    client: &Client,
    sums: Option<Typed>,
    [chunks, width]: [usize; 2],
    accumulator: ElemType,
) -> Option<Handle> {
    sums.map(|_| client.empty(chunks * width * accumulator.size()))
}
