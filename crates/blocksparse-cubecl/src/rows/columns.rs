//! Sums over rows.

use cubecl::ir::ElemType;
use cubecl::prelude::*;
use cubecl::server::Handle;

use crate::args::{address_of, buffer};
pub use crate::call::accumulator_of;
use crate::error::KernelError;
use crate::limits::{most_units, vector_of};

/// Units per cube.
const UNITS: usize = 256;
/// Vectors of columns per cube: 512 bytes of f32 of a row.
const COLUMN_UNITS: usize = 32;
/// Minimum number of rows per unit before a matrix is cut into chunks of rows.
const LEAST_ROWS: usize = 8;
/// Rows that a unit loads at once.
const UNROLLED: usize = 8;
/// Largest number of rows that one launch sums.
const FEW_ROWS: usize = 2048;
/// Rows per unit, in matrices of few rows.
const ROWS_OF_FEW: usize = 16;
/// Vectors of columns per cube, in matrices of few rows: still 128 bytes of f32.
const NARROW_UNITS: usize = 8;
/// Number of cubes that keep a large device busy.
const CUBES: usize = 1024;

/// Distribution of a chunk of rows over the units of a cube, as `columns × rows` units, and the columns to sum.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Shape {
    /// Units along a row, each with a vector.
    columns: usize,
    /// Units along a column, each with every `rows`-th row.
    rows: usize,
    /// The window in vectors.
    window: Window,
}

/// A window of columns: `width` from `start` on, in every `pitch` columns. All columns are summed if `width` equals `pitch`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Window {
    /// First column.
    pub start: usize,
    /// Number of columns.
    pub width: usize,
    /// Number of columns after which the window repeats.
    pub pitch: usize,
}

impl Window {
    /// All columns.
    const ALL: Self = Self {
        start: 0,
        width: 1,
        pitch: 1,
    };

    fn divided(self, vector: usize) -> Self {
        match self == Self::ALL {
            true => self,
            false => Self {
                start: self.start / vector,
                width: self.width / vector,
                pitch: self.pitch / vector,
            },
        }
    }

    /// Boundaries that vectors must not cross.
    fn edges(&self) -> [usize; 3] {
        match *self == Self::ALL {
            true => [0; 3],
            false => [self.start, self.width, self.pitch],
        }
    }
}

/// Computes `output[chunk, column] = Σ input[row, column]` over the rows of each chunk, in `A`.
#[cube(launch_unchecked, address_type = "dynamic")]
fn sum_chunks<E: Float, A: Float, O: Float, N: Size>(
    input: &[Vector<E, N>],
    output: &mut [Vector<O, N>],
    rows: usize,
    row_vectors: usize,
    chunk_rows: usize,
    #[comptime] shape: Shape,
    #[define(E, A, O)] _types: [ElemType; 3],
) {
    let mut shared = Shared::<[Vector<A, N>]>::new_slice(comptime!(shape.columns * shape.rows));
    let unit = UNIT_POS as usize;
    let x = unit % comptime!(shape.columns);
    let y = unit / comptime!(shape.columns);
    let column = CUBE_POS_X as usize * comptime!(shape.columns) + x;
    let chunk = CUBE_POS_Y as usize;
    let first = chunk * chunk_rows;
    let end = min(first + chunk_rows, rows);
    let mut sum = Vector::<A, N>::empty().fill(A::new(0.0));
    let window = comptime!(shape.window);
    let pitch = row_vectors / comptime!(window.width) * comptime!(window.pitch);
    let read = column / comptime!(window.width) * comptime!(window.pitch)
        + column % comptime!(window.width)
        + comptime!(window.start);
    if column < row_vectors {
        let mut row = first + y;
        // Several loads are in flight at a time.
        let step = comptime!(shape.rows * UNROLLED);
        while row + comptime!(shape.rows * (UNROLLED - 1)) < end {
            let mut part = Vector::<A, N>::empty().fill(A::new(0.0));
            #[unroll]
            for next in 0..comptime!(UNROLLED) {
                let at = (row + next * comptime!(shape.rows)) * pitch + read;
                part += Vector::<A, N>::cast_from(input[at]);
            }
            sum += part;
            row += step;
        }
        while row < end {
            sum += Vector::<A, N>::cast_from(input[row * pitch + read]);
            row += comptime!(shape.rows);
        }
    }
    shared[unit] = sum;
    sync_cube();
    if y == 0 && column < row_vectors {
        #[unroll]
        for other in 1..comptime!(shape.rows) {
            sum += shared[x + other * comptime!(shape.columns)];
        }
        output[chunk * row_vectors + column] = Vector::<O, N>::cast_from(sum);
    }
}

/// Sums over rows: `output[column] = Σ input[row, column]`, always added in the same order.
///
/// `input` is contiguous `[rows, width]` of `element`. `output` has `width` elements of `output_element`. The sums are computed in f32, f64 for f64 inputs.
/// A tall matrix is cut into chunks of rows, whose sums a second launch adds. Without rows the sums are 0.
///
/// # Errors
/// [`KernelError::Limit`] if the matrix has more elements than the device indexes.
pub fn column_sums(
    client: &Client,
    input: (&Handle, ElemType),
    matrix: [usize; 2],
    output: (&Handle, ElemType),
) -> Result<(), KernelError> {
    sums_in(client, input, matrix, Window::ALL, output)
}

/// Like [`column_sums`], for a window of the columns of matrices `[inner, window.pitch]`: `output` is `[inner, window.width]`.
///
/// # Errors
/// Those of [`column_sums`].
pub fn window_sums(
    client: &Client,
    input: (&Handle, ElemType),
    [rows, inner]: [usize; 2],
    window: Window,
    output: (&Handle, ElemType),
) -> Result<(), KernelError> {
    sums_in(client, input, [rows, inner * window.width], window, output)
}

fn sums_in(
    client: &Client,
    (input, element): (&Handle, ElemType),
    [rows, width]: [usize; 2],
    window: Window,
    (output, output_element): (&Handle, ElemType),
) -> Result<(), KernelError> {
    if width == 0 {
        return Ok(());
    }
    // The buffer of a matrix without rows may be shorter than a vector, and WGPU does not bind such buffers.
    let no_rows = (rows == 0).then(|| client.empty(16));
    let input = no_rows.as_ref().unwrap_or(input);
    let accumulator = accumulator_of(element);
    let launch = Launch::new(
        client,
        [rows, width],
        [element, accumulator, output_element],
        window,
    )?;
    let chunks = launch.chunks(rows);
    if chunks == 1 {
        let output = (output, output_element);
        launch.run(client, launch.shape, (input, element), [rows, rows], output);
        return Ok(());
    }
    let partial = client.empty(chunks * width * accumulator.size());
    let sums = (&partial, accumulator);
    let chunk_rows = rows.div_ceil(chunks);
    launch.run(
        client,
        launch.shape,
        (input, element),
        [rows, chunk_rows],
        sums,
    );
    let joined = Shape {
        window: Window::ALL,
        ..launch.shape
    };
    let output = (output, output_element);
    launch.run(client, joined, sums, [chunks, chunks], output);
    Ok(())
}

/// Launch parameters of sums over rows of a given width.
struct Launch {
    vector: usize,
    row_vectors: usize,
    shape: Shape,
    address: AddressType,
    accumulator: ElemType,
    most_chunks: usize,
}

impl Launch {
    fn new(
        client: &Client,
        [rows, width]: [usize; 2],
        elements: [ElemType; 3],
        window: Window,
    ) -> Result<Self, KernelError> {
        let hardware = &client.properties().hardware;
        let [.., accumulator, _] = elements;
        let row_length = width / window.width * window.pitch;
        // The vector width depends on the input's element, since most elements are the input's.
        let edges = [&[width], &window.edges()[..]].concat();
        let vector = vector_of(client.properties(), elements[0].size(), &edges);
        let row_vectors = width / vector;
        let units = UNITS.min(most_units(client.properties()));
        // Few rows of few columns, such as the partial sums of other kernels, get more cubes, so that one launch suffices.
        let few = rows <= FEW_ROWS && row_vectors < CUBES * COLUMN_UNITS;
        let most = match few {
            true => (units * ROWS_OF_FEW / rows.max(1)).clamp(NARROW_UNITS, COLUMN_UNITS),
            false => COLUMN_UNITS,
        };
        let most = 1 << most.ilog2();
        let columns = row_vectors.next_power_of_two().min(most).min(units);
        let shape = Shape {
            columns,
            rows: units / columns,
            window: window.divided(vector),
        };
        let (x_most, y_most, _) = hardware.max_cube_count;
        let columns = row_vectors.div_ceil(columns);
        KernelError::check("cubes along columns", x_most, columns)?;
        Ok(Self {
            vector,
            row_vectors,
            shape,
            // The last row of a chunk may be past the end.
            address: address_of(client, (rows + rows.isqrt() + 1) * row_length)?,
            accumulator,
            most_chunks: y_most as usize,
        })
    }

    /// Returns the number of chunks that the rows are cut into.
    fn chunks(&self, rows: usize) -> usize {
        if rows <= FEW_ROWS {
            return 1;
        }
        let cubes = self.row_vectors.div_ceil(self.shape.columns);
        let wanted = (CUBES / cubes).min(rows / (self.shape.rows * LEAST_ROWS));
        wanted.clamp(1, self.most_chunks)
    }

    /// Launches the sums of all columns, or of those in a window.
    fn run(
        &self,
        client: &Client,
        shape: Shape,
        (input, element): (&Handle, ElemType),
        [rows, chunk_rows]: [usize; 2],
        (output, output_element): (&Handle, ElemType),
    ) {
        let chunks = rows.div_ceil(chunk_rows.max(1)).max(1);
        let columns = self.row_vectors.div_ceil(self.shape.columns);
        let read = self.row_vectors / shape.window.width * shape.window.pitch;
        // SAFETY: a unit reads its vectors of rows below `rows` and writes one vector of its chunk. The buffers have the stated lengths (see `buffer`).
        unsafe {
            sum_chunks::launch_unchecked(
                client,
                CubeCount::Static(columns as u32, chunks as u32, 1),
                CubeDim::new_1d((self.shape.columns * self.shape.rows) as u32),
                self.address,
                self.vector,
                buffer(input, rows * read),
                buffer(output, chunks * self.row_vectors),
                rows,
                self.row_vectors,
                chunk_rows,
                shape,
                [element, self.accumulator, output_element],
            );
        }
    }
}
