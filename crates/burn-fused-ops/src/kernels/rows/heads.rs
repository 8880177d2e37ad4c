//! Splitting rows into tensors by heads, and joining them.

use crate::kernels::prelude::*;
use crate::kernels::rows::strips::{Grid, Strips, partial_sums, store_sums, sum_up};

/// Most tensors that a row is split into.
pub const MOST_PARTS: usize = 3;

/// Rows that a unit loads at once.
const UNROLLED: usize = 8;
/// Cubes that keep a large device busy while it sums.
const CUBES: usize = 1024;

/// Heads of a part of a row.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct HeadsPart {
    /// Number of heads.
    pub heads: usize,
    /// Elements of a head.
    pub dim: usize,
}

impl HeadsPart {
    fn width(&self) -> usize {
        self.heads * self.dim
    }
}

/// Comptime parameters of a launch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Kind {
    /// Parts, in vectors; unused ones at the end are empty.
    parts: [HeadsPart; MOST_PARTS],
    grid: Grid,
    /// True if there is a bias, or sums for its gradient.
    bias: bool,
}

impl Kind {
    /// Returns the offset of a part in a row.
    fn start(&self, part: usize) -> usize {
        self.parts[..part].iter().map(HeadsPart::width).sum()
    }
}

/// Offset and strides of a column's vectors in its part, `[batch, heads, seq, dim]`.
#[derive(CubeType, Clone, Copy)]
struct Place {
    /// Offset in the first row.
    start: usize,
    /// Stride between positions.
    position: usize,
    /// Stride between batch entries.
    batch: usize,
}

/// Returns the offset and strides of a column in its part.
#[cube]
fn place_in(column: usize, seq: usize, #[comptime] part: usize, #[comptime] k: Kind) -> Place {
    let dim = comptime!(k.parts[part].dim);
    let own = column - comptime!(k.start(part));
    Place {
        start: (own / dim) * seq * dim + own % dim,
        position: dim.runtime(),
        batch: seq * comptime!(k.parts[part].width()),
    }
}

#[cube]
fn in_part(column: usize, #[comptime] part: usize, #[comptime] k: Kind) -> bool {
    column >= comptime!(k.start(part)) && column < comptime!(k.start(part + 1))
}

/// Splits `[rows, Σ heads · dim]` plus `bias` into tensors `[batch, heads, seq, dim]`.
#[cube(launch_unchecked, address_type = "dynamic")]
fn split<E: Float, P: Float, A: Float, N: Size>(
    x: &[Vector<E, N>],
    bias: ComptimeOption<Box<[Vector<P, N>]>>,
    first: ComptimeOption<Box<[Vector<E, N>]>>,
    second: ComptimeOption<Box<[Vector<E, N>]>>,
    third: ComptimeOption<Box<[Vector<E, N>]>>,
    rows: usize,
    seq: usize,
    #[comptime] k: Kind,
    #[define(E, P, A)] _types: [ElemType; 3],
) {
    let unit = UNIT_POS as usize;
    let column = CUBE_POS_X as usize * comptime!(k.grid.columns) + unit % comptime!(k.grid.columns);
    let chunk = comptime!(k.grid.rows * UNROLLED);
    let top = CUBE_POS_Y as usize * chunk + unit / comptime!(k.grid.columns);
    if column < comptime!(k.grid.row_vectors) {
        let mut added = Vector::<A, N>::zeroed();
        if comptime!(k.bias) {
            let bias = bias.unwrap();
            added = Vector::<A, N>::cast_from(bias[column]);
        }
        let mut values = Array::<Vector<E, N>>::new(comptime!(UNROLLED));
        #[unroll]
        for i in 0..comptime!(UNROLLED) {
            // Units past the last row read it again.
            let row = min(top + i * comptime!(k.grid.rows), rows - 1);
            let value = x[row * comptime!(k.grid.row_vectors) + column];
            values[i] = match comptime!(k.bias) {
                true => Vector::<E, N>::cast_from(Vector::<A, N>::cast_from(value) + added),
                false => value,
            };
        }
        write_part::<E, N>(&values, first, column, top, rows, seq, 0usize, k);
        write_part::<E, N>(&values, second, column, top, rows, seq, 1usize, k);
        write_part::<E, N>(&values, third, column, top, rows, seq, 2usize, k);
    }
}

/// Writes a column's values to part `index`, if the column belongs to it.
#[cube]
fn write_part<E: Float, N: Size>(
    values: &Array<Vector<E, N>>,
    part: ComptimeOption<Box<[Vector<E, N>]>>,
    column: usize,
    top: usize,
    rows: usize,
    seq: usize,
    #[comptime] index: usize,
    #[comptime] k: Kind,
) {
    #[comptime]
    match part {
        ComptimeOption::Some(mut part) => {
            if in_part(column, index, k) {
                let place = place_in(column, seq, index, k);
                #[unroll]
                for i in 0..comptime!(UNROLLED) {
                    let row = top + i * comptime!(k.grid.rows);
                    if row < rows {
                        let at = row / seq * place.batch + row % seq * place.position + place.start;
                        part[at] = values[i];
                    }
                }
            }
        }
        ComptimeOption::None => {}
    }
}

/// Joins tensors `[batch, heads, seq, dim]` into `[rows, Σ heads · dim]`, and sums over the rows of each chunk. A missing tensor counts as 0.
#[cube(launch_unchecked, address_type = "dynamic")]
fn join<E: Float, A: Float, N: Size>(
    first: ComptimeOption<Box<[Vector<E, N>]>>,
    second: ComptimeOption<Box<[Vector<E, N>]>>,
    third: ComptimeOption<Box<[Vector<E, N>]>>,
    x: &mut [Vector<E, N>],
    sums: ComptimeOption<Box<[Vector<A, N>]>>,
    rows: usize,
    seq: usize,
    steps: usize,
    #[comptime] k: Kind,
    #[define(E, A)] _types: [ElemType; 2],
) {
    let unit = UNIT_POS as usize;
    let column = CUBE_POS_X as usize * comptime!(k.grid.columns) + unit % comptime!(k.grid.columns);
    let step_rows = comptime!(k.grid.rows * UNROLLED);
    let top = CUBE_POS_Y as usize * steps * step_rows + unit / comptime!(k.grid.columns);
    let mut sum = Vector::<A, N>::zeroed();
    if column < comptime!(k.grid.row_vectors) {
        for step in 0..steps {
            let top = top + step * step_rows;
            let mut values = Array::<Vector<E, N>>::new(comptime!(UNROLLED));
            #[unroll]
            for i in 0..comptime!(UNROLLED) {
                values[i] = Vector::<E, N>::zeroed();
            }
            read_part::<E, N>(&mut values, &first, column, top, rows, seq, 0usize, k);
            read_part::<E, N>(&mut values, &second, column, top, rows, seq, 1usize, k);
            read_part::<E, N>(&mut values, &third, column, top, rows, seq, 2usize, k);
            #[unroll]
            for i in 0..comptime!(UNROLLED) {
                let row = top + i * comptime!(k.grid.rows);
                if row < rows {
                    x[row * comptime!(k.grid.row_vectors) + column] = values[i];
                    if comptime!(k.bias) {
                        sum += Vector::<A, N>::cast_from(values[i]);
                    }
                }
            }
        }
    }
    store_sums::<A, N>(sums, sum, column, k.grid);
}

/// Reads a column's values from part `index`, if the column belongs to it.
#[cube]
fn read_part<E: Float, N: Size>(
    values: &mut Array<Vector<E, N>>,
    part: &ComptimeOption<Box<[Vector<E, N>]>>,
    column: usize,
    top: usize,
    rows: usize,
    seq: usize,
    #[comptime] index: usize,
    #[comptime] k: Kind,
) {
    #[comptime]
    match part {
        ComptimeOption::Some(part) => {
            if in_part(column, index, k) {
                let place = place_in(column, seq, index, k);
                #[unroll]
                for i in 0..comptime!(UNROLLED) {
                    // Units past the last row read it again.
                    let row = min(top + i * comptime!(k.grid.rows), rows - 1);
                    let at = row / seq * place.batch + row % seq * place.position + place.start;
                    values[i] = part[at];
                }
            }
        }
        ComptimeOption::None => {}
    }
}

/// Returns the grid of the rows and the comptime parameters.
fn launch_of(
    client: &Client,
    [rows, seq]: [usize; 2],
    parts: &[HeadsPart],
    element: ElemType,
    bias: bool,
) -> Result<(Strips, Kind), KernelError> {
    KernelError::check_u32("the positions of a sequence", seq)?;
    let width = parts.iter().map(HeadsPart::width).sum();
    let dims: Vec<usize> = parts.iter().map(|part| part.dim).collect();
    let strips = Strips::new(client, [rows, width], &dims, UNROLLED, element)?;
    let mut in_vectors = [HeadsPart { heads: 0, dim: 1 }; MOST_PARTS];
    for (part, vectors) in parts.iter().zip(&mut in_vectors) {
        *vectors = HeadsPart {
            heads: part.heads,
            dim: part.dim / strips.vector,
        };
    }
    let kind = Kind {
        parts: in_vectors,
        grid: strips.grid,
        bias,
    };
    Ok((strips, kind))
}

/// Returns the non-empty parts: an empty part's buffer may be shorter than a vector, which WGPU does not bind.
fn with_numbers<T: Copy>(parts: &[T], part: impl Fn(&T) -> HeadsPart) -> Vec<T> {
    let parts = parts.iter().filter(|of| part(of).width() > 0);
    parts.copied().collect()
}

/// Describes the launches of [`split_heads`] and [`join_heads`].
///
/// # Errors
/// Those of the launches.
pub fn heads_text(
    client: &Client,
    [rows, seq]: [usize; 2],
    parts: &[HeadsPart],
    element: ElemType,
) -> Result<String, KernelError> {
    let parts = with_numbers(parts, |part| *part);
    let (strips, _) = launch_of(client, [rows, seq], &parts, element, false)?;
    Ok(format!(
        "heads: {} numbers a load, {} × {} units a cube",
        strips.vector, strips.grid.columns, strips.grid.rows
    ))
}

/// Splits `x`, contiguous `[batch · seq, Σ heads · dim]`, plus `bias` into contiguous tensors `[batch, heads, seq, dim]`, rounded once.
///
/// # Errors
/// [`KernelError::Limit`] if there are more elements, positions or cubes than the device supports.
pub fn split_heads(
    client: &Client,
    (x, element): Typed,
    bias: Option<Typed>,
    [rows, seq]: [usize; 2],
    parts: &[(HeadsPart, &Handle)],
) -> Result<(), KernelError> {
    let parts = with_numbers(parts, |(part, _)| *part);
    let shapes: Vec<HeadsPart> = parts.iter().map(|(part, _)| *part).collect();
    let width: usize = shapes.iter().map(HeadsPart::width).sum();
    if rows == 0 || width == 0 {
        return Ok(());
    }
    let (strips, kind) = launch_of(client, [rows, seq], &shapes, element, bias.is_some())?;
    let chunks = strips.chunks(rows)?;
    let part = |index: usize| parts.get(index).map(|(_, handle)| *handle);
    let count =
        |index: usize| part(index).map_or(0, |_| rows * shapes[index].width() / strips.vector);
    let accumulator = accumulator_of(element);
    // SAFETY: a unit reads its vector of rows below `rows` and of the bias, and writes as many vectors of the column's part; the buffers have the declared
    // lengths (see `buffer`).
    unsafe {
        split::launch_unchecked(
            client,
            strips.cubes(chunks),
            strips.dim(),
            strips.address,
            strips.vector,
            buffer(x, rows * kind.grid.row_vectors),
            optional(bias.map(|(bias, _)| bias), kind.grid.row_vectors),
            optional(part(0), count(0)),
            optional(part(1), count(1)),
            optional(part(2), count(2)),
            rows,
            seq,
            kind,
            [
                element,
                bias.map_or(accumulator, |(_, element)| element),
                accumulator,
            ],
        );
    }
    Ok(())
}

/// Joins the tensors into `x`, the inverse of [`split_heads`] without a bias. Missing tensors count as 0. `sums` receives the sums over all rows, in its own
/// type.
///
/// # Errors
/// Those of [`split_heads`].
pub fn join_heads(
    client: &Client,
    parts: &[(HeadsPart, Option<&Handle>)],
    [rows, seq]: [usize; 2],
    (x, element): Typed,
    sums: Option<Typed>,
) -> Result<(), KernelError> {
    let parts = with_numbers(parts, |(part, _)| *part);
    let shapes: Vec<HeadsPart> = parts.iter().map(|(part, _)| *part).collect();
    let width: usize = shapes.iter().map(HeadsPart::width).sum();
    if width == 0 {
        return Ok(());
    }
    let accumulator = accumulator_of(element);
    if rows == 0 {
        return sum_up(client, Some((x, element)), [0, width], sums);
    }
    let (strips, kind) = launch_of(client, [rows, seq], &shapes, element, sums.is_some())?;
    let (steps, chunks) = strips.steps(rows, sums.map(|_| CUBES));
    let part = |index: usize| parts.get(index).and_then(|(_, handle)| *handle);
    let count =
        |index: usize| part(index).map_or(0, |_| rows * shapes[index].width() / strips.vector);
    let partial = partial_sums(client, sums, [chunks, width], accumulator);
    // SAFETY: a unit reads its vector of rows below `rows` of the column's part, and writes as many of `x` and one of its chunk's sums; the buffers have the
    // declared lengths (see `buffer`).
    unsafe {
        join::launch_unchecked(
            client,
            strips.cubes(chunks),
            strips.dim(),
            strips.address,
            strips.vector,
            optional(part(0), count(0)),
            optional(part(1), count(1)),
            optional(part(2), count(2)),
            buffer(x, rows * kind.grid.row_vectors),
            optional(partial.as_ref(), chunks * kind.grid.row_vectors),
            rows,
            seq,
            steps,
            kind,
            [element, accumulator],
        );
    }
    let partial = partial.as_ref().map(|partial| (partial, accumulator));
    sum_up(client, partial, [chunks, width], sums)
}
