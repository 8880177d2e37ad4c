//! Products without tensor cores: a unit multiplies each vector of weights that it reads by an element of x. A cube computes a strip of columns over the
//! whole depth, so that sums have one order.

use crate::kernels::few_rows::call::{BYTES, FewRows, FewRowsWeight, MOST_WEIGHTS};
use crate::kernels::prelude::*;
use blocksparse_cubecl::call::HAS_PTX;
use blocksparse_cubecl::rows::norm_shape::sum_of;
use blocksparse_cubecl::shared::curve::{Curve, value};

/// Most rows of a product.
pub const MOST_UNIT_ROWS: usize = 8;
/// Most units of a cube.
const UNITS: usize = 512;
/// Loads of a unit in flight.
const LOADS: usize = 8;
/// Units that share a column of a weight with contiguous columns.
const LANES: usize = 32;
/// Padding between the sums of two lanes, so that they lie in different banks.
const PAD: usize = 4;

/// Comptime parameters of a launch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Kind {
    /// Rows that are computed; those past the end repeat the last.
    rows: usize,
    depth: usize,
    /// Elements of a vector.
    vector: usize,
    /// Vectors per row of each weight, and the pitch in vectors.
    widths: [usize; MOST_WEIGHTS],
    pitches: [usize; MOST_WEIGHTS],
    /// Weights with strips of their own.
    count: usize,
    units: usize,
    /// Vectors of a strip; with contiguous columns, columns of a unit.
    columns: usize,
    /// Offset of each weight's rows in the result. None: rows of all weights are concatenated.
    starts: Option<[usize; MOST_WEIGHTS]>,
    /// Activation of the first weight's sums, which multiply the second's.
    gate: Option<Curve>,
}

impl Kind {
    /// Returns the number of elements of a row of the result.
    fn all(&self) -> usize {
        self.start(self.count)
    }

    fn start(&self, weight: usize) -> usize {
        self.vector * self.widths[..weight].iter().sum::<usize>()
    }

    fn strips(&self, weights: usize) -> usize {
        let strips = |width: &usize| width.div_ceil(self.columns);
        self.widths[..weights].iter().map(strips).sum()
    }

    /// Sets the widest strips that still give `busy` cubes, so that whole cache lines are read.
    fn cut(mut self, busy: usize) -> Self {
        for columns in [8, 4, 2] {
            self.columns = columns;
            if self.strips(self.count) >= busy {
                break;
            }
        }
        self
    }

    /// Returns the elements of shared memory for contiguous rows.
    fn shared(&self) -> usize {
        self.vector * (self.units + PAD) + self.units
    }

    /// Returns the number of units that share a column.
    fn lanes(&self) -> usize {
        self.units / self.columns
    }

    /// Returns the number of elements of a strip's row.
    fn outputs(&self) -> usize {
        self.columns * self.vector
    }

    /// Returns the number of lane groups of a cube for contiguous columns.
    fn groups(&self) -> usize {
        self.units / LANES
    }

    /// Returns the number of loads of a unit in flight.
    fn loads(&self) -> usize {
        self.depth.div_ceil(self.lanes()).min(LOADS)
    }
}

/// Multiplies by weights `[depth, width]` with contiguous rows.
#[cube(launch_unchecked, address_type = "dynamic")]
fn by_rows<E: Float, A: Float, P: Float, N: Size>(
    x: &[E],
    weights: Sequence<Box<[Vector<E, N>]>>,
    bias: ComptimeOption<Box<[P]>>,
    output: &mut [E],
    rows: usize,
    #[comptime] k: Kind,
    #[define(E, A, P)] _types: [ElemType; 3],
) {
    let unit = UNIT_POS as usize;
    let strip = CUBE_POS;
    let mut sums = Array::<Vector<A, N>>::new(k.rows);
    // Sums of the second weight, where the first is a gate.
    let mut others = Array::<Vector<A, N>>::new(k.rows);
    #[unroll]
    for row in 0..comptime!(k.rows) {
        sums[row] = Vector::<A, N>::zeroed();
        others[row] = Vector::<A, N>::zeroed();
    }
    // Position of the strip: its first column in its weight, the weight's width, the columns of the result before the weight, and the offset of the weight's
    // rows.
    let mut column = 0usize;
    let mut width = 0usize;
    let mut start = 0usize;
    let mut begin = 0usize;
    #[unroll]
    for index in 0..comptime!(k.count) {
        let first = comptime!(k.strips(index));
        if strip >= first && strip < comptime!(k.strips(index + 1)) {
            let own = (strip - first) * comptime!(k.columns);
            column = own * comptime!(k.vector);
            width = comptime!(k.widths[index] * k.vector).runtime();
            start = comptime!(k.start(index)).runtime();
            begin = comptime!(k.starts.map_or(0, |starts| starts[index])).runtime();
            let at = own + unit % comptime!(k.columns);
            if at < comptime!(k.widths[index]) {
                let pitch = comptime!(k.pitches[index]);
                accumulate::<E, A, N>(x, &weights[index], &mut sums, at, rows, pitch, k);
                if comptime!(k.gate.is_some()) {
                    let pitch = comptime!(k.pitches[1]);
                    accumulate::<E, A, N>(x, &weights[1], &mut others, at, rows, pitch, k);
                }
            }
        }
    }
    let mut shared = Shared::<[A]>::new_slice(comptime!(k.vector * (k.units + PAD)));
    let mut partial = Shared::<[A]>::new_slice(k.units);
    let place = place_of(k);
    #[unroll]
    for row in 0..comptime!(k.rows) {
        let mut sum = strip_sum::<A, N>(sums[row], &mut shared, &mut partial, k);
        if comptime!(k.gate.is_some()) {
            let other = strip_sum::<A, N>(others[row], &mut shared, &mut partial, k);
            let gate = Vector::<A, N>::empty().fill(sum);
            sum = value::<A, N>(gate, comptime!(k.gate.unwrap())).extract(0usize) * other;
        }
        let own = column + place;
        if unit < comptime!(k.outputs()) && row < rows && own < width {
            #[comptime]
            match bias.as_ref() {
                ComptimeOption::Some(bias) => sum += A::cast_from(bias[start + own]),
                ComptimeOption::None => {}
            }
            let at = match comptime!(k.starts.is_some()) {
                true => begin + row * width + own,
                false => row * comptime!(k.all()) + start + own,
            };
            output[at] = E::cast_from(sum);
        }
    }
}

/// Returns the column of a strip that a unit writes, for units below the number of columns.
#[cube]
fn place_of(#[comptime] k: Kind) -> usize {
    let own = UNIT_POS as usize % comptime!(k.outputs());
    own % comptime!(k.columns) * comptime!(k.vector) + own / comptime!(k.columns)
}

/// Sums over a cube's lanes for the column that a unit writes.
#[cube]
fn strip_sum<A: Float, N: Size>(
    sums: Vector<A, N>,
    shared: &mut [A],
    partial: &mut [A],
    #[comptime] k: Kind,
) -> A {
    let unit = UNIT_POS as usize;
    let lanes = comptime!(k.units + PAD);
    let outputs = comptime!(k.outputs());
    let parts = comptime!(k.units / k.outputs());
    let of_part = comptime!(k.lanes() / (k.units / k.outputs()));
    #[unroll]
    for i in 0..comptime!(k.vector) {
        shared[comptime!(i * lanes) + unit] = sums.extract(i);
    }
    sync_cube();
    let (own, part) = (unit % outputs, unit / outputs);
    let (vector, place) = (own % comptime!(k.columns), own / comptime!(k.columns));
    let mut sum = A::new(0.0);
    #[unroll]
    for i in 0..of_part {
        sum += shared[place * lanes + (part * of_part + i) * comptime!(k.columns) + vector];
    }
    partial[unit] = sum;
    sync_cube();
    let mut sum = A::new(0.0);
    #[unroll]
    for i in 0..parts {
        sum += partial[i * outputs + own];
    }
    sum
}

/// Accumulates a unit's part of a column of vectors.
#[cube]
fn accumulate<E: Float, A: Float, N: Size>(
    x: &[E],
    weight: &[Vector<E, N>],
    sums: &mut Array<Vector<A, N>>,
    column: usize,
    rows: usize,
    #[comptime] pitch: usize,
    #[comptime] k: Kind,
) {
    let lane = UNIT_POS as usize / comptime!(k.columns);
    let step = comptime!(k.lanes() * k.loads());
    let steps = comptime!(k.depth.div_ceil(k.lanes() * k.loads()));
    for next in 0..steps {
        let first = next * step + lane;
        let mut loaded = Array::<Vector<E, N>>::new(comptime!(k.loads()));
        #[unroll]
        for i in 0..comptime!(k.loads()) {
            let depth = first + comptime!(i * k.lanes());
            // Units past the end read the last row again and multiply it by 0.
            loaded[i] = weight[min(depth, comptime!(k.depth - 1)) * pitch + column];
        }
        #[unroll]
        for i in 0..comptime!(k.loads()) {
            let depth = first + comptime!(i * k.lanes());
            let value = Vector::<A, N>::cast_from(loaded[i]);
            #[unroll]
            for row in 0..comptime!(k.rows) {
                let at = min(row.runtime(), rows - 1) * comptime!(k.depth);
                let factor = A::cast_from(x[at + min(depth, comptime!(k.depth - 1))]);
                let factor = select(depth < comptime!(k.depth), factor, A::new(0.0));
                sums[row] += Vector::<A, N>::empty().fill(factor) * value;
            }
        }
    }
}

/// Multiplies by a weight `[depth, width]` with contiguous columns, such as an embedding that logits are computed with.
#[cube(launch_unchecked, address_type = "dynamic")]
fn by_columns<E: Float, A: Float, N: Size>(
    x: &[Vector<E, N>],
    weight: &[Vector<E, N>],
    output: &mut [E],
    rows: usize,
    width: usize,
    #[comptime] k: Kind,
    #[define(E, A)] _types: [ElemType; 2],
) {
    let unit = UNIT_POS as usize;
    let (lane, group) = (unit % comptime!(LANES), unit / comptime!(LANES));
    let vectors = comptime!(k.depth / k.vector);
    let sums_of = comptime!(k.rows * k.columns);
    let first = (CUBE_POS * comptime!(k.groups()) + group) * comptime!(k.columns);
    let mut sums = Array::<Vector<A, N>>::new(sums_of);
    #[unroll]
    for i in 0..sums_of {
        sums[i] = Vector::<A, N>::zeroed();
    }
    for step in 0..comptime!(vectors.div_ceil(LANES)) {
        let at = step * comptime!(LANES) + lane;
        if at < vectors {
            let mut loaded = Array::<Vector<E, N>>::new(k.columns);
            #[unroll]
            for i in 0..comptime!(k.columns) {
                // Units past the last column read it again.
                loaded[i] = weight[min(first + i, width - 1) * comptime!(k.pitches[0]) + at];
            }
            #[unroll]
            for row in 0..comptime!(k.rows) {
                let factor = x[min(row.runtime(), rows - 1) * vectors + at];
                let factor = Vector::<A, N>::cast_from(factor);
                #[unroll]
                for i in 0..comptime!(k.columns) {
                    sums[comptime!(row * k.columns + i)] +=
                        factor * Vector::<A, N>::cast_from(loaded[i]);
                }
            }
        }
    }
    let pitch = comptime!(LANES + 1);
    let mut shared = Shared::<[A]>::new_slice(comptime!(sums_of * k.groups() * (LANES + 1)));
    #[unroll]
    for i in 0..sums_of {
        let place = comptime!(i * k.groups()) + group;
        shared[place * pitch + lane] = sum_of::<A, N>(sums[i]);
    }
    sync_cube();
    if unit < comptime!(sums_of * k.groups()) {
        let mut sum = A::new(0.0);
        #[unroll]
        for i in 0..comptime!(LANES) {
            sum += shared[unit * pitch + i];
        }
        let (group, own) = (unit % comptime!(k.groups()), unit / comptime!(k.groups()));
        let (row, i) = (own / comptime!(k.columns), own % comptime!(k.columns));
        let column = (CUBE_POS * comptime!(k.groups()) + group) * comptime!(k.columns) + i;
        if row < rows && column < width {
            output[row * width + column] = E::cast_from(sum);
        }
    }
}

/// Launches a checked product.
///
/// # Errors
/// [`KernelError`] if there are more than [`MOST_UNIT_ROWS`] rows, or the device lacks a type, units, shared memory or vectors of 16 bytes.
pub fn launch(client: &Client, call: &FewRows) -> Result<(), KernelError> {
    let (element, [rows, depth]) = (call.x.1, call.lengths);
    let widths: Vec<usize> = call.weights.iter().map(|weight| weight.width).collect();
    let vector = BYTES / element.size();
    KernelError::check("rows", MOST_UNIT_ROWS as u64, rows)?;
    let accumulator = accumulator_of(element);
    let added = call.bias.map_or(accumulator, |bias| bias.1);
    let properties = client.properties();
    check_types(properties, [element, accumulator, added])?;
    let hardware = &properties.hardware;
    let most = most_units(properties);
    let units = [UNITS, UNITS / 2, UNITS / 4]
        .into_iter()
        .find(|u| *u <= most);
    let Some(units) = units.filter(|_| vector <= hardware.max_vector_size) else {
        return Err(KernelError::limit(
            "units of a cube",
            most as u64,
            UNITS / 4,
        ));
    };
    let mut kind = Kind {
        rows: rows.next_power_of_two(),
        depth,
        vector,
        widths: [0; MOST_WEIGHTS],
        pitches: [0; MOST_WEIGHTS],
        count: if call.gate.is_some() { 1 } else { widths.len() },
        units,
        columns: 1,
        starts: call.starts,
        gate: call.gate.map(|activation| Curve {
            activation,
            fast: HAS_PTX && element.size() == 2 && client.name() == "cuda",
        }),
    };
    for (index, weight) in call.weights.iter().enumerate() {
        kind.widths[index] = weight.width / vector;
        kind.pitches[index] = weight.pitch / vector;
    }
    let reach = |weight: &FewRowsWeight| call.reach(weight);
    let largest = call.weights.iter().map(reach).max().unwrap_or(0);
    let address = address_of(client, largest.max(rows * depth))?;
    let dim = CubeDim::new_1d(units as u32);
    if call.transposed {
        kind.columns = if kind.rows <= 2 { 4 } else { 1 };
        let width = widths[0];
        let cubes = width.div_ceil(kind.groups() * kind.columns);
        let cubes = spread(client, cubes as u64)?;
        // SAFETY: a unit reads vectors of rows below `rows` and of columns below `width`, and writes only those; the buffers have the declared lengths (see
        // `buffer`).
        unsafe {
            by_columns::launch_unchecked(
                client,
                cubes,
                dim,
                address,
                vector,
                buffer(call.x.0, rows * depth / vector),
                buffer(call.weights[0].handle, largest / vector),
                buffer(call.output, rows * width),
                rows,
                width,
                kind,
                [element, accumulator],
            );
        }
        return Ok(());
    }
    let multiprocessors = hardware.num_streaming_multiprocessors.unwrap_or(64) as usize;
    kind = kind.cut(multiprocessors * 3 / 4);
    // A cube that is alone on its multiprocessor needs twice the units to hide the latency of loads.
    let mut twice = kind;
    twice.units = 2 * UNITS;
    let alone = kind.strips(kind.count) <= multiprocessors && kind.rows <= 2;
    let fits = twice.units <= most
        && twice.shared() * accumulator.size() <= hardware.max_shared_memory_size;
    if alone && fits && kind.gate.is_none() {
        kind = twice;
    }
    let mut weights = SequenceArg::new();
    for weight in call.weights {
        weights.push(buffer(weight.handle, reach(weight) / vector));
    }
    let cubes = spread(client, kind.strips(kind.count) as u64)?;
    // SAFETY: a unit reads x below `rows`, weights below their lengths and the bias, and writes columns of rows below `rows`; the buffers have the declared
    // lengths (see `buffer`).
    unsafe {
        by_rows::launch_unchecked(
            client,
            cubes,
            CubeDim::new_1d(kind.units as u32),
            address,
            vector,
            buffer(call.x.0, rows * depth),
            weights,
            optional(call.bias.map(|bias| bias.0), kind.all()),
            buffer(call.output, call.numbers),
            rows,
            kind,
            [element, accumulator, added],
        );
    }
    Ok(())
}
