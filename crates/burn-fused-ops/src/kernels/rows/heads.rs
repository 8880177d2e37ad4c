//! Rows of heads side by side as tensors by heads, and back.

use cubecl::ir::ElemType;
use cubecl::prelude::*;
use cubecl::server::Handle;

use blocksparse_cubecl::args::{address_of, buffer, optional};
use blocksparse_cubecl::error::KernelError;
use blocksparse_cubecl::rows::columns::{accumulator_of, column_sums};

/// How many tensors a row may be split into.
pub const MOST_PARTS: usize = 3;

/// Units of a cube.
const UNITS: usize = 256;
/// Vectors of a row that a cube has: 512 bytes of half-precision numbers in a piece.
const COLUMN_UNITS: usize = 32;
/// Rows of a unit that are loaded together.
const UNROLLED: usize = 8;
/// Cubes that keep a large device busy while sums are made.
const CUBES: usize = 1024;

/// The heads of a part of a row: so many, of such a width.
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

/// What units do, known to the compiler.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Kind {
    /// The parts in vectors; those behind the last are empty.
    parts: [HeadsPart; MOST_PARTS],
    /// Vectors of a row.
    row_vectors: usize,
    /// Units along a row.
    columns: usize,
    /// Units along a column.
    rows: usize,
    /// Whether there is a bias, or sums for its gradient.
    bias: bool,
}

impl Kind {
    /// Where a part begins in a row.
    fn start(&self, part: usize) -> usize {
        self.parts[..part].iter().map(HeadsPart::width).sum()
    }
}

/// Where the vectors of a column lie in its part, `[batch, heads, seq, dim]`.
#[derive(CubeType, Clone, Copy)]
struct Place {
    /// Of the first row.
    start: usize,
    /// Between two positions.
    position: usize,
    /// Between two batch entries.
    batch: usize,
}

/// The part of a column and the place in it.
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

/// `[rows, Σ heads · dim]` with `bias` added, as tensors `[batch, heads, seq, dim]`.
#[cube(launch_unchecked, address_type = "dynamic")]
fn split<E: Float, P: Float, A: Float, N: Size>(
    x: &[Vector<E, N>],
    bias: ComptimeOption<Box<[Vector<P, N>]>>,
    first: &mut [Vector<E, N>],
    second: ComptimeOption<Box<[Vector<E, N>]>>,
    third: ComptimeOption<Box<[Vector<E, N>]>>,
    rows: usize,
    seq: usize,
    #[comptime] k: Kind,
    #[define(E)] _element: ElemType,
    #[define(P)] _added: ElemType,
    #[define(A)] _accumulator: ElemType,
) {
    let unit = UNIT_POS as usize;
    let column = CUBE_POS_X as usize * comptime!(k.columns) + unit % comptime!(k.columns);
    let chunk = comptime!(k.rows * UNROLLED);
    let top = CUBE_POS_Y as usize * chunk + unit / comptime!(k.columns);
    if column < comptime!(k.row_vectors) {
        let mut added = Vector::<A, N>::zeroed();
        if comptime!(k.bias) {
            let bias = bias.unwrap();
            added = Vector::<A, N>::cast_from(bias[column]);
        }
        let mut values = Array::<Vector<E, N>>::new(comptime!(UNROLLED));
        #[unroll]
        for i in 0..comptime!(UNROLLED) {
            // Units behind the last row read it once more.
            let row = min(top + i * comptime!(k.rows), rows - 1);
            let value = x[row * comptime!(k.row_vectors) + column];
            values[i] = match comptime!(k.bias) {
                true => Vector::<E, N>::cast_from(Vector::<A, N>::cast_from(value) + added),
                false => value,
            };
        }
        if in_part(column, 0usize, k) {
            let place = place_in(column, seq, 0usize, k);
            write_part::<E, N>(&values, first, place, top, rows, seq, k);
        }
        #[comptime]
        match second {
            ComptimeOption::Some(mut second) => {
                if in_part(column, 1usize, k) {
                    let place = place_in(column, seq, 1usize, k);
                    write_part::<E, N>(&values, &mut second, place, top, rows, seq, k);
                }
            }
            ComptimeOption::None => {}
        }
        #[comptime]
        match third {
            ComptimeOption::Some(mut third) => {
                if in_part(column, 2usize, k) {
                    let place = place_in(column, seq, 2usize, k);
                    write_part::<E, N>(&values, &mut third, place, top, rows, seq, k);
                }
            }
            ComptimeOption::None => {}
        }
    }
}

#[cube]
fn write_part<E: Float, N: Size>(
    values: &Array<Vector<E, N>>,
    part: &mut [Vector<E, N>],
    place: Place,
    top: usize,
    rows: usize,
    seq: usize,
    #[comptime] k: Kind,
) {
    #[unroll]
    for i in 0..comptime!(UNROLLED) {
        let row = top + i * comptime!(k.rows);
        if row < rows {
            let at = row / seq * place.batch + row % seq * place.position + place.start;
            part[at] = values[i];
        }
    }
}

/// Tensors `[batch, heads, seq, dim]` as `[rows, Σ heads · dim]`, and the sums over the rows of each chunk. A tensor that is not there is 0.
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
    #[define(E)] _element: ElemType,
    #[define(A)] _accumulator: ElemType,
) {
    let unit = UNIT_POS as usize;
    let column = CUBE_POS_X as usize * comptime!(k.columns) + unit % comptime!(k.columns);
    let step_rows = comptime!(k.rows * UNROLLED);
    let top = CUBE_POS_Y as usize * steps * step_rows + unit / comptime!(k.columns);
    let mut sum = Vector::<A, N>::zeroed();
    if column < comptime!(k.row_vectors) {
        for step in 0..steps {
            let top = top + step * step_rows;
            let mut values = Array::<Vector<E, N>>::new(comptime!(UNROLLED));
            #[unroll]
            for i in 0..comptime!(UNROLLED) {
                values[i] = Vector::<E, N>::zeroed();
            }
            #[comptime]
            match first.as_ref() {
                ComptimeOption::Some(first) => {
                    if in_part(column, 0usize, k) {
                        let place = place_in(column, seq, 0usize, k);
                        read_part::<E, N>(&mut values, first, place, top, rows, seq, k);
                    }
                }
                ComptimeOption::None => {}
            }
            #[comptime]
            match second.as_ref() {
                ComptimeOption::Some(second) => {
                    if in_part(column, 1usize, k) {
                        let place = place_in(column, seq, 1usize, k);
                        read_part::<E, N>(&mut values, second, place, top, rows, seq, k);
                    }
                }
                ComptimeOption::None => {}
            }
            #[comptime]
            match third.as_ref() {
                ComptimeOption::Some(third) => {
                    if in_part(column, 2usize, k) {
                        let place = place_in(column, seq, 2usize, k);
                        read_part::<E, N>(&mut values, third, place, top, rows, seq, k);
                    }
                }
                ComptimeOption::None => {}
            }
            #[unroll]
            for i in 0..comptime!(UNROLLED) {
                let row = top + i * comptime!(k.rows);
                if row < rows {
                    x[row * comptime!(k.row_vectors) + column] = values[i];
                    if comptime!(k.bias) {
                        sum += Vector::<A, N>::cast_from(values[i]);
                    }
                }
            }
        }
    }
    #[comptime]
    match sums {
        ComptimeOption::Some(mut sums) => {
            let mut shared = Shared::<[Vector<A, N>]>::new_slice(comptime!(k.columns * k.rows));
            shared[unit] = sum;
            sync_cube();
            if unit < comptime!(k.columns) && column < comptime!(k.row_vectors) {
                #[unroll]
                for other in 1..comptime!(k.rows) {
                    sum += shared[unit + other * comptime!(k.columns)];
                }
                sums[CUBE_POS_Y as usize * comptime!(k.row_vectors) + column] = sum;
            }
        }
        ComptimeOption::None => {}
    }
}

#[cube]
fn read_part<E: Float, N: Size>(
    values: &mut Array<Vector<E, N>>,
    part: &[Vector<E, N>],
    place: Place,
    top: usize,
    rows: usize,
    seq: usize,
    #[comptime] k: Kind,
) {
    #[unroll]
    for i in 0..comptime!(UNROLLED) {
        // Units behind the last row read it once more.
        let row = min(top + i * comptime!(k.rows), rows - 1);
        let at = row / seq * place.batch + row % seq * place.position + place.start;
        values[i] = part[at];
    }
}

/// What both directions are launched by.
struct Launch {
    kind: Kind,
    vector: usize,
    /// Rows of a cube at a time.
    step_rows: usize,
    address: AddressType,
    /// Cubes along a row.
    columns: u32,
    most_chunks: usize,
}

impl Launch {
    fn new(
        client: &Client,
        [rows, seq]: [usize; 2],
        parts: &[HeadsPart],
        element: ElemType,
        bias: bool,
    ) -> Result<Self, KernelError> {
        KernelError::check_u32("the positions of a sequence", seq)?;
        let hardware = &client.properties().hardware;
        let most = (16 / element.size()).min(hardware.max_vector_size.max(1));
        let vector = [8, 4, 2, 1]
            .into_iter()
            .find(|vector| {
                *vector <= most && parts.iter().all(|part| part.dim.is_multiple_of(*vector))
            })
            .unwrap_or(1);
        let mut in_vectors = [HeadsPart { heads: 0, dim: 1 }; MOST_PARTS];
        for (part, vectors) in parts.iter().zip(&mut in_vectors) {
            *vectors = HeadsPart {
                heads: part.heads,
                dim: part.dim / vector,
            };
        }
        let row_vectors: usize = in_vectors.iter().map(HeadsPart::width).sum();
        let units = UNITS
            .min(hardware.max_units_per_cube as usize)
            .min(hardware.max_cube_dim.0 as usize);
        let columns = row_vectors.next_power_of_two().min(COLUMN_UNITS).min(units);
        let kind = Kind {
            parts: in_vectors,
            row_vectors,
            columns,
            rows: units / columns,
            bias,
        };
        let (x_most, y_most, _) = hardware.max_cube_count;
        let cubes = row_vectors.div_ceil(columns);
        if cubes > x_most as usize {
            return Err(KernelError::limit("cubes along a row", x_most, cubes));
        }
        let step_rows = kind.rows * UNROLLED;
        Ok(Self {
            kind,
            vector,
            step_rows,
            address: address_of(client, (rows + step_rows) * row_vectors * vector)?,
            columns: cubes as u32,
            most_chunks: y_most as usize,
        })
    }

    /// Steps of a cube along the rows, and cubes: as many as there can be, or as many as keep a device busy.
    fn chunks(&self, rows: usize, most: usize) -> Result<(usize, u32), KernelError> {
        let steps = rows.div_ceil(self.step_rows);
        let wanted = steps.min(most.clamp(1, self.most_chunks));
        let of_a_cube = steps.div_ceil(wanted);
        let chunks = steps.div_ceil(of_a_cube);
        Ok((of_a_cube, chunks as u32))
    }
}

/// The parts that have numbers: the buffer of one that has none may be shorter than a vector, which WGPU does not bind.
fn with_numbers<T: Copy>(parts: &[T], part: impl Fn(&T) -> HeadsPart) -> Vec<T> {
    let parts = parts.iter().filter(|of| part(of).width() > 0);
    parts.copied().collect()
}

/// How [`split_heads`] and [`join_heads`] are launched.
///
/// # Errors
/// As theirs.
pub fn heads_text(
    client: &Client,
    [rows, seq]: [usize; 2],
    parts: &[HeadsPart],
    element: ElemType,
) -> Result<String, KernelError> {
    let parts = with_numbers(parts, |part| *part);
    let launch = Launch::new(client, [rows, seq], &parts, element, false)?;
    Ok(format!(
        "heads: {} numbers a load, {} × {} units a cube",
        launch.vector, launch.kind.columns, launch.kind.rows
    ))
}

/// `x`, contiguous `[batch · seq, Σ heads · dim]`, plus `bias` as contiguous tensors `[batch, heads, seq, dim]`, rounded once.
///
/// # Errors
/// [`KernelError::Limit`] if there are more elements, positions or cubes than the device counts.
pub fn split_heads(
    client: &Client,
    (x, element): (&Handle, ElemType),
    bias: Option<(&Handle, ElemType)>,
    [rows, seq]: [usize; 2],
    parts: &[(HeadsPart, &Handle)],
) -> Result<(), KernelError> {
    let parts = with_numbers(parts, |(part, _)| *part);
    let shapes: Vec<HeadsPart> = parts.iter().map(|(part, _)| *part).collect();
    let width: usize = shapes.iter().map(HeadsPart::width).sum();
    if rows == 0 || width == 0 {
        return Ok(());
    }
    let launch = Launch::new(client, [rows, seq], &shapes, element, bias.is_some())?;
    let chunks = rows.div_ceil(launch.step_rows);
    if chunks > launch.most_chunks {
        let most = launch.most_chunks as u64;
        return Err(KernelError::limit("cubes along rows", most, chunks));
    }
    let vectors = |index: usize| rows * shapes[index].width() / launch.vector;
    let part = |index: usize| parts.get(index).map(|(_, handle)| *handle);
    let count = |index: usize| part(index).map_or(0, |_| vectors(index));
    let accumulator = accumulator_of(element);
    // SAFETY: a unit reads its vector of rows below `rows` and of the bias, and writes as many vectors of the part that the column is in; the
    // buffers have the lengths they say (see `buffer`).
    unsafe {
        split::launch_unchecked(
            client,
            CubeCount::Static(launch.columns, chunks as u32, 1),
            CubeDim::new_1d((launch.kind.columns * launch.kind.rows) as u32),
            launch.address,
            launch.vector,
            buffer(x, rows * launch.kind.row_vectors),
            optional(bias.map(|(bias, _)| bias), launch.kind.row_vectors),
            buffer(parts[0].1, vectors(0)),
            optional(part(1), count(1)),
            optional(part(2), count(2)),
            rows,
            seq,
            launch.kind,
            element,
            bias.map_or(accumulator, |(_, element)| element),
            accumulator,
        );
    }
    Ok(())
}

/// The inverse of [`split_heads`] without a bias: `x` from the tensors, those that are not there as 0; and `sums`, the sums over all rows
/// in the type that comes with it.
///
/// # Errors
/// As [`split_heads`].
pub fn join_heads(
    client: &Client,
    parts: &[(HeadsPart, Option<&Handle>)],
    [rows, seq]: [usize; 2],
    (x, element): (&Handle, ElemType),
    sums: Option<(&Handle, ElemType)>,
) -> Result<(), KernelError> {
    let parts = with_numbers(parts, |(part, _)| *part);
    let shapes: Vec<HeadsPart> = parts.iter().map(|(part, _)| *part).collect();
    let width: usize = shapes.iter().map(HeadsPart::width).sum();
    if width == 0 {
        return Ok(());
    }
    let accumulator = accumulator_of(element);
    if rows == 0 {
        return match sums {
            Some(sums) => column_sums(client, (x, element), [0, width], sums),
            None => Ok(()),
        };
    }
    let launch = Launch::new(client, [rows, seq], &shapes, element, sums.is_some())?;
    let most = match sums {
        Some(_) => CUBES / launch.columns as usize,
        None => usize::MAX,
    };
    let (steps, chunks) = launch.chunks(rows, most)?;
    let part = |index: usize| parts.get(index).and_then(|(_, handle)| *handle);
    let count =
        |index: usize| part(index).map_or(0, |_| rows * shapes[index].width() / launch.vector);
    let partial =
        (sums.as_ref()).map(|_| client.empty(chunks as usize * width * accumulator.size()));
    // SAFETY: a unit reads its vector of rows below `rows` of the part that the column is in, and writes as many of `x` and one of its chunk's sums;
    // the buffers have the lengths they say (see `buffer`).
    unsafe {
        join::launch_unchecked(
            client,
            CubeCount::Static(launch.columns, chunks, 1),
            CubeDim::new_1d((launch.kind.columns * launch.kind.rows) as u32),
            launch.address,
            launch.vector,
            optional(part(0), count(0)),
            optional(part(1), count(1)),
            optional(part(2), count(2)),
            buffer(x, rows * launch.kind.row_vectors),
            optional(partial.as_ref(), chunks as usize * launch.kind.row_vectors),
            rows,
            seq,
            steps,
            launch.kind,
            element,
            accumulator,
        );
    }
    match (sums, &partial) {
        (Some(sums), Some(partial)) => column_sums(
            client,
            (partial, accumulator),
            [chunks as usize, width],
            sums,
        ),
        _ => Ok(()),
    }
}
