//! The gradient with respect to an embedding table.

use crate::kernels::prelude::*;

/// Entries of the vocabulary, and channels, of a cube.
const TILE: usize = 64;
/// Groups of units of a cube. The units of a group share the channels of an entry; a group has every fourth entry.
const GROUPS: usize = 4;
/// Units of a cube; each examines one position of a step.
const UNITS: usize = TILE * GROUPS;
/// Positions whose order is determined by scanning the units before.
const SEGMENT: usize = 16;
/// Rows that are loaded at once.
const UNROLLED: usize = 8;
/// Cubes that keep a large device busy.
const CUBES: usize = 1024;
/// Most bytes of the partial tables of all position ranges.
const PARTIAL_BYTES: usize = 64 << 20;

/// Computes `output[range, v, c] = Σ grad[t, c]` over the positions `t` of a range with `ids[t] = v`, in order.
///
/// A step covers as many positions as there are units. The positions of each group are first listed in order, so that several rows can be loaded at once.
#[cube(launch_unchecked, address_type = "dynamic")]
fn sum_entries<E: Float, A: Float, O: Float, I: Int>(
    ids: &[I],
    grad: &[E],
    output: &mut [O],
    positions: usize,
    range_positions: usize,
    ranges: usize,
    vocab: usize,
    width: usize,
    #[define(E, A, O, I)] _types: [ElemType; 4],
) {
    let mut sums = Shared::<[A]>::new_slice(comptime!(TILE * TILE));
    let mut keys = Shared::<[u32]>::new_slice(comptime!(UNITS));
    let mut counts = Shared::<[u32]>::new_slice(comptime!(UNITS / SEGMENT * GROUPS));
    let mut list = Shared::<[u32]>::new_slice(comptime!(UNITS * GROUPS));
    let unit = UNIT_POS as usize;
    let lane = unit % comptime!(TILE);
    let group = unit / comptime!(TILE);
    let column_tiles = width.div_ceil(comptime!(TILE));
    let entry_tiles = vocab.div_ceil(comptime!(TILE));
    let column = CUBE_POS % column_tiles * comptime!(TILE) + lane;
    let entry = CUBE_POS / column_tiles % entry_tiles * comptime!(TILE);
    let range = CUBE_POS / column_tiles / entry_tiles;
    let last = min(entry + comptime!(TILE), vocab);
    let none = comptime!(TILE as u32).runtime();
    // Cubes past the last range have no positions.
    let mut first = min(range * range_positions, positions);
    let mut end = min(first + range_positions, positions);
    if range >= ranges {
        first = 0usize;
        end = 0usize;
    }
    #[unroll]
    for next in 0..comptime!(TILE / GROUPS) {
        sums[(group + next * comptime!(GROUPS)) * comptime!(TILE) + lane] = A::new(0.0);
    }
    while first < end {
        let mut key = none;
        if first + unit < end {
            let id = ids[first + unit];
            if id >= I::cast_from(entry) && id < I::cast_from(last) {
                key = u32::cast_from(id - I::cast_from(entry));
            }
        }
        keys[unit] = key;
        sync_cube();
        // Index among the positions of the same group and segment.
        let own = key % comptime!(GROUPS as u32);
        let segment = unit / comptime!(SEGMENT);
        let mut place = 0u32;
        for other in segment * comptime!(SEGMENT)..unit {
            let other = keys[other];
            let before = other != none && other % comptime!(GROUPS as u32) == own;
            place += select(before, 1u32, 0u32);
        }
        if unit < comptime!(UNITS / SEGMENT * GROUPS) {
            let of = (unit % comptime!(GROUPS)) as u32;
            let start = unit / comptime!(GROUPS) * comptime!(SEGMENT);
            let mut count = 0u32;
            for other in start..start + comptime!(SEGMENT) {
                let other = keys[other];
                let is_one = other != none && other % comptime!(GROUPS as u32) == of;
                count += select(is_one, 1u32, 0u32);
            }
            counts[unit] = count;
        }
        sync_cube();
        let mut length = 0u32;
        for other in 0..comptime!(UNITS / SEGMENT) {
            length += counts[other * comptime!(GROUPS) + group];
        }
        if key != none {
            for other in 0..segment {
                place += counts[other * comptime!(GROUPS) + own as usize];
            }
            list[own as usize * comptime!(UNITS) + place as usize] =
                unit as u32 * comptime!(TILE as u32) + key;
        }
        sync_cube();
        if column < width {
            let start = group * comptime!(UNITS);
            let length = length as usize;
            let mut next = 0usize;
            while next + comptime!(UNROLLED) <= length {
                let mut rows = Array::<A>::new(comptime!(UNROLLED));
                #[unroll]
                for i in 0..comptime!(UNROLLED) {
                    let position = list[start + next + i] as usize / comptime!(TILE);
                    rows[i] = A::cast_from(grad[(first + position) * width + column]);
                }
                #[unroll]
                for i in 0..comptime!(UNROLLED) {
                    let key = list[start + next + i] as usize % comptime!(TILE);
                    sums[key * comptime!(TILE) + lane] += rows[i];
                }
                next += comptime!(UNROLLED);
            }
            while next < length {
                let item = list[start + next] as usize;
                let row = first + item / comptime!(TILE);
                sums[item % comptime!(TILE) * comptime!(TILE) + lane] +=
                    A::cast_from(grad[row * width + column]);
                next += 1usize;
            }
        }
        first += comptime!(UNITS);
    }
    // A unit reads only the sums that it wrote itself, so no synchronization is needed.
    if column < width && range < ranges {
        #[unroll]
        for next in 0..comptime!(TILE / GROUPS) {
            let key = group + next * comptime!(GROUPS);
            if entry + key < last {
                output[(range * vocab + entry + key) * width + column] =
                    O::cast_from(sums[key * comptime!(TILE) + lane]);
            }
        }
    }
}

/// Sizes and types of a table's gradient.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct EmbeddingKind {
    /// Number of entries of the table.
    pub vocab: usize,
    /// Number of channels of an entry.
    pub width: usize,
    /// Type of the gradient with respect to the rows.
    pub grad: ElemType,
    /// Type of the gradient with respect to the table.
    pub table: ElemType,
    /// Type of ids.
    pub index: ElemType,
}

impl EmbeddingKind {
    /// Returns the kind of a table `[vocab, width]` with the types of the rows' gradient, of the table's gradient, and of ids.
    pub fn new([vocab, width]: [usize; 2], [grad, table, index]: [ElemType; 3]) -> Self {
        Self {
            vocab,
            width,
            grad,
            table,
            index,
        }
    }

    /// Returns the type of sums: f64 if either gradient is.
    fn accumulator(&self) -> ElemType {
        match accumulator_of(self.table) == self.table {
            true => self.table,
            false => accumulator_of(self.grad),
        }
    }

    /// Returns the number of ranges that positions are split into.
    fn ranges(&self, client: &Client, positions: usize) -> Result<usize, KernelError> {
        let properties = client.properties();
        let accumulator = self.accumulator();
        check_types(properties, [self.grad, self.table, self.index, accumulator])?;
        let hardware = &properties.hardware;
        let units = most_units(properties);
        KernelError::check("units of a cube", units as u32, UNITS)?;
        let lists = (UNITS + UNITS / SEGMENT * GROUPS + UNITS * GROUPS) * size_of::<u32>();
        let bytes = TILE * TILE * accumulator.size() + lists;
        let most = hardware.max_shared_memory_size as u32;
        KernelError::check("bytes of shared memory", most, bytes)?;
        let cubes = self.vocab.div_ceil(TILE) * self.width.div_ceil(TILE);
        let table = self.vocab * self.width * accumulator.size();
        let most = (PARTIAL_BYTES / table.max(1)).min(positions.div_ceil(UNITS));
        Ok((CUBES / cubes.max(1)).min(most).max(1))
    }
}

/// Describes the launches of [`embedding_table_gradient`].
///
/// # Errors
/// [`KernelError`] if the device lacks a type, units or shared memory.
pub fn embedding_text(
    client: &Client,
    kind: &EmbeddingKind,
    positions: usize,
) -> Result<String, KernelError> {
    let ranges = kind.ranges(client, positions)?;
    Ok(format!(
        "embedding: {TILE} entries of {TILE} channels, {UNITS} units a cube, {ranges} ranges of positions"
    ))
}

/// Computes `table[v] = Σ grad[t]` over the positions `t` with `ids[t] = v`: in order within a range of positions, then over the ranges. Ids outside the
/// vocabulary are skipped.
///
/// `ids` is `[positions]`, `grad` `[positions, width]`, `table` `[vocab, width]`, all contiguous.
///
/// # Errors
/// Those of [`embedding_text`]; also if the device cannot index the gradients.
pub fn embedding_table_gradient(
    client: &Client,
    kind: &EmbeddingKind,
    positions: usize,
    [ids, grad]: [&Handle; 2],
    table: &Handle,
) -> Result<(), KernelError> {
    let ranges = kind.ranges(client, positions)?;
    let EmbeddingKind { vocab, width, .. } = *kind;
    if vocab * width == 0 {
        return Ok(());
    }
    // The last range may begin past the end.
    let range_positions = positions.div_ceil(ranges).next_multiple_of(UNITS);
    let numbers = ranges * vocab * width;
    let largest = numbers.max((positions + ranges * UNITS) * width.max(1));
    let address = address_of(client, largest)?;
    let tiles = vocab.div_ceil(TILE) * width.div_ceil(TILE);
    let cubes = spread(client, (tiles * ranges) as u64)?;
    let accumulator = kind.accumulator();
    let partial = (ranges > 1).then(|| client.empty(numbers * accumulator.size()));
    let (output, output_element) = match &partial {
        Some(partial) => (partial, accumulator),
        None => (table, kind.table),
    };
    // SAFETY: a unit reads ids and rows of positions below `positions`, and writes its channel of its entries in a range below `ranges`; the buffers have the
    // declared lengths (see `buffer`).
    unsafe {
        sum_entries::launch_unchecked(
            client,
            cubes,
            CubeDim::new_1d(UNITS as u32),
            address,
            buffer(ids, positions),
            buffer(grad, positions * width),
            buffer(output, numbers),
            positions,
            range_positions,
            ranges,
            vocab,
            width,
            [kind.grad, accumulator, output_element, kind.index],
        );
    }
    match &partial {
        Some(partial) => column_sums(
            client,
            (partial, accumulator),
            [ranges, vocab * width],
            (table, kind.table),
        ),
        None => Ok(()),
    }
}
