//! Rotary position embedding: rotates pairs of channels by their position.

use crate::kernels::prelude::*;
use cubecl::ir::IntKind;

const UNITS: u32 = 256;
/// Most bytes of a load.
const MOST_BYTES: usize = 16;
/// Heads that a unit rotates with one load of the table, and the number of units from which on that leaves enough units.
const HEADS: usize = 4;
const MANY: usize = 1 << 16;

/// Comptime parameters of `[batch, heads, seq, width]`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Kind {
    /// Vectors of a row, and channels of a vector.
    vectors: usize,
    lanes: usize,
    heads: usize,
    /// Heads of a unit.
    own_heads: usize,
    /// True if the rotation is reversed.
    back: bool,
}

/// Table of angles, and the table row of each row: `places`, or consecutive from `first` on.
#[derive(CubeType, CubeLaunch)]
struct Angles<A: Float, I: Int> {
    table: Box<[A]>,
    places: ComptimeOption<Box<[I]>>,
    rows: usize,
    /// Rows of a batch entry.
    seq: usize,
    first: usize,
    /// Rows of the table, and its strides in elements.
    context: usize,
    place_step: usize,
    channel_step: usize,
    sine_step: usize,
}

/// Cosines and sines of a vector's pairs.
#[derive(CubeType)]
struct Turn<A: Float> {
    cosines: Array<A>,
    sines: Array<A>,
}

/// Loads the angles of a vector of a row.
#[cube]
fn turn_of<A: Float, I: Int>(
    angles: &Angles<A, I>,
    row: usize,
    vector: usize,
    #[comptime] k: Kind,
) -> Turn<A> {
    let mut cosines = Array::<A>::new(comptime!(k.lanes / 2));
    let mut sines = Array::<A>::new(comptime!(k.lanes / 2));
    let mut place = angles.first + row % angles.seq;
    #[comptime]
    match &angles.places {
        ComptimeOption::Some(places) => place = usize::cast_from(places[row]),
        ComptimeOption::None => {}
    }
    let turns = min(place, angles.context - 1) * angles.place_step
        + vector * comptime!(k.lanes) * angles.channel_step;
    #[unroll]
    for pair in 0..comptime!(k.lanes / 2) {
        let at = turns + comptime!(2 * pair) * angles.channel_step;
        cosines[pair] = angles.table[at];
        sines[pair] = match comptime!(k.back) {
            true => -angles.table[at + angles.sine_step],
            false => angles.table[at + angles.sine_step],
        };
    }
    Turn::<A> { cosines, sines }
}

/// Rotates a vector.
#[cube]
fn turned<E: Float, A: Float, O: Float, N: Size>(
    x: Vector<E, N>,
    turn: &Turn<A>,
    #[comptime] k: Kind,
) -> Vector<O, N> {
    let value = Vector::<A, N>::cast_from(x);
    let mut turned = Vector::<A, N>::zeroed();
    #[unroll]
    for pair in 0..comptime!(k.lanes / 2) {
        let (at, next) = (comptime!(2 * pair), comptime!(2 * pair + 1));
        let (a, b) = (value.extract(at), value.extract(next));
        turned.insert(at, a * turn.cosines[pair] - b * turn.sines[pair]);
        turned.insert(next, b * turn.cosines[pair] + a * turn.sines[pair]);
    }
    Vector::<O, N>::cast_from(turned)
}

/// Rotates one vector of a position in `own_heads` heads per unit.
#[cube(launch_unchecked, address_type = "dynamic")]
fn turn<E: Float, A: Float, O: Float, I: Int, N: Size>(
    x: &[Vector<E, N>],
    angles: Angles<A, I>,
    output: &mut [Vector<O, N>],
    #[comptime] k: Kind,
    #[define(E, A, O, I)] _types: [ElemType; 4],
) {
    let groups = comptime!(k.heads.div_ceil(k.own_heads));
    let vector = ABSOLUTE_POS % comptime!(k.vectors);
    let row = ABSOLUTE_POS / comptime!(k.vectors) % angles.rows;
    let group = ABSOLUTE_POS / comptime!(k.vectors) / angles.rows;
    if group < groups {
        let turn = turn_of::<A, I>(&angles, row, vector, k);
        let head = row / angles.seq * comptime!(k.heads) + group * comptime!(k.own_heads);
        let left = comptime!(k.heads) - group * comptime!(k.own_heads);
        let start = (head * angles.seq + row % angles.seq) * comptime!(k.vectors) + vector;
        let step = angles.seq * comptime!(k.vectors);
        let mut values = Array::<Vector<E, N>>::new(k.own_heads);
        #[unroll]
        for i in 0..comptime!(k.own_heads) {
            // Units past the last head read it again.
            values[i] = x[start + min(i.runtime(), left - 1) * step];
        }
        #[unroll]
        for i in 0..comptime!(k.own_heads) {
            let turned = turned::<E, A, O, N>(values[i], &turn, k);
            if i < left {
                output[start + i * step] = turned;
            }
        }
    }
}

/// Rotates one vector of a position in one head of queries or keys per unit.
#[cube(launch_unchecked, address_type = "dynamic")]
fn turn_both<E: Float, A: Float, O: Float, I: Int, N: Size>(
    queries: &[Vector<E, N>],
    keys: &[Vector<E, N>],
    angles: Angles<A, I>,
    turned_queries: &mut [Vector<O, N>],
    turned_keys: &mut [Vector<O, N>],
    #[comptime] k: Kind,
    #[comptime] key_heads: usize,
    #[define(E, A, O, I)] _types: [ElemType; 4],
) {
    let vector = ABSOLUTE_POS % comptime!(k.vectors);
    let row = ABSOLUTE_POS / comptime!(k.vectors) % angles.rows;
    let head = ABSOLUTE_POS / comptime!(k.vectors) / angles.rows;
    if head < comptime!(k.heads + key_heads) {
        let turn = turn_of::<A, I>(&angles, row, vector, k);
        let (entry, within) = (row / angles.seq, row % angles.seq);
        if head < comptime!(k.heads) {
            let head = entry * comptime!(k.heads) + head;
            let at = (head * angles.seq + within) * comptime!(k.vectors) + vector;
            turned_queries[at] = turned::<E, A, O, N>(queries[at], &turn, k);
        } else {
            let head = entry * key_heads + head - comptime!(k.heads);
            let at = (head * angles.seq + within) * comptime!(k.vectors) + vector;
            turned_keys[at] = turned::<E, A, O, N>(keys[at], &turn, k);
        }
    }
}

/// Table `[context, width, 2]` of cosines and sines, repeated for both channels of a pair.
#[derive(Clone, Copy, Debug)]
pub struct RopeTable<'a> {
    /// Buffer and type, beginning at the first element.
    pub numbers: Typed<'a>,
    /// Number of rows.
    pub context: usize,
    /// Strides of the dimensions, in elements.
    pub strides: [usize; 3],
}

impl RopeTable<'_> {
    /// Returns the number of elements from the first to the last.
    fn reach(&self, width: usize) -> usize {
        let [place_step, channel_step, sine_step] = self.strides;
        (self.context - 1) * place_step + (width - 1) * channel_step + sine_step + 1
    }

    /// Returns the kernel argument for `rows` rows, `seq` of them in each batch entry.
    fn angles<A: Float, I: Int>(
        &self,
        width: usize,
        [rows, seq]: [usize; 2],
        (places, first): (Option<Typed>, usize),
    ) -> AnglesLaunch<A, I> {
        let [place_step, channel_step, sine_step] = self.strides;
        AnglesLaunch::new(
            buffer(self.numbers.0, self.reach(width)),
            optional(places.map(|places| places.0), rows),
            rows,
            seq,
            first,
            self.context,
            place_step,
            channel_step,
            sine_step,
        )
    }

    /// Returns the types of a launch.
    fn types(&self, [x, output]: [ElemType; 2], places: Option<Typed>) -> [ElemType; 4] {
        let index = places.map_or(ElemType::Int(IntKind::I32), |places| places.1);
        [x, self.numbers.1, output, index]
    }

    /// Returns the channels of a load for rows of this width.
    fn lanes(
        &self,
        client: &Client,
        [x, output]: [ElemType; 2],
        width: usize,
    ) -> Result<usize, KernelError> {
        check_types(client.properties(), [x, self.numbers.1, output])?;
        if !width.is_multiple_of(2) || self.context == 0 {
            return Err(KernelError::limit("pairs of a row", 0u32, width));
        }
        let hardware = &client.properties().hardware;
        let most = (MOST_BYTES / x.size().max(output.size())).min(hardware.max_vector_size);
        let lanes = [8, 4, 2];
        let fits = |lanes: &usize| *lanes <= most && width.is_multiple_of(*lanes);
        Ok(lanes.into_iter().find(fits).unwrap_or(2))
    }
}

/// Rotates pairs of channels of `x`, `[batch, heads, seq, width]`, by their row of the table: `places[batch · seq]`, or consecutive rows from `first` on.
/// Everything but the table is contiguous; computation is in the table's type.
///
/// # Errors
/// [`KernelError`] if the device lacks a type or cannot index the elements, or the width is odd.
pub fn rope(
    client: &Client,
    (x, output): (Typed, Typed),
    [batch, heads, seq, width]: [usize; 4],
    table: &RopeTable,
    (places, first): (Option<Typed>, usize),
    back: bool,
) -> Result<(), KernelError> {
    let numbers = batch * heads * seq * width;
    if numbers == 0 {
        return Ok(());
    }
    let lanes = table.lanes(client, [x.1, output.1], width)?;
    let (vectors, rows) = (width / lanes, batch * seq);
    let own_heads = match rows * vectors * heads / HEADS < MANY {
        true => 1,
        false => HEADS.min(heads),
    };
    let kind = Kind {
        vectors,
        lanes,
        heads,
        own_heads,
        back,
    };
    let units = rows * vectors * heads.div_ceil(own_heads);
    let dim = UNITS.min(client.properties().hardware.max_units_per_cube);
    let reach = table.reach(width);
    let address = address_of(client, numbers.max(reach))?;
    let cubes = spread(client, units.div_ceil(dim as usize) as u64)?;
    // SAFETY: a unit reads and writes one vector of a row below `rows` in heads below `heads`, and reads a row of the table below `context`; the buffers have
    // the declared lengths (see `buffer`).
    unsafe {
        turn::launch_unchecked(
            client,
            cubes,
            CubeDim::new_1d(dim),
            address,
            lanes,
            buffer(x.0, numbers / lanes),
            table.angles(width, [rows, seq], (places, first)),
            buffer(output.0, numbers / lanes),
            kind,
            table.types([x.1, output.1], places),
        );
    }
    Ok(())
}

/// [`rope`] of queries and keys, each `[batch, heads, seq, width]` with its own number of heads, of one type. One launch, unless there are so many rows that
/// a unit rotates several heads.
///
/// # Errors
/// Those of [`rope`]; also if there are no queries or no keys.
pub fn rope_both(
    client: &Client,
    inputs: [Typed; 2],
    outputs: [Typed; 2],
    ([batch, seq, width], heads): ([usize; 3], [usize; 2]),
    table: &RopeTable,
    (places, first): (Option<Typed>, usize),
    back: bool,
) -> Result<(), KernelError> {
    let rows = batch * seq;
    let numbers = heads.map(|heads| rows * heads * width);
    let ([query, key], [turned_query, turned_key]) = (inputs, outputs);
    let positions = (places, first);
    if numbers.contains(&0) || query.1 != key.1 || turned_query.1 != turned_key.1 {
        return Err(KernelError::limit("heads", 1u32, 0));
    }
    let lanes = table.lanes(client, [query.1, turned_query.1], width)?;
    if numbers[0] / lanes / HEADS >= MANY {
        for ((x, output), heads) in inputs.into_iter().zip(outputs).zip(heads) {
            let shape = [batch, heads, seq, width];
            rope(client, (x, output), shape, table, positions, back)?;
        }
        return Ok(());
    }
    let kind = Kind {
        vectors: width / lanes,
        lanes,
        heads: heads[0],
        own_heads: 1,
        back,
    };
    let units = numbers.iter().sum::<usize>() / lanes;
    let dim = UNITS.min(client.properties().hardware.max_units_per_cube);
    let reach = table.reach(width);
    let address = address_of(client, numbers[0].max(numbers[1]).max(reach).max(units))?;
    let cubes = spread(client, units.div_ceil(dim as usize) as u64)?;
    // SAFETY: a unit reads and writes one vector of a row below `rows` in an existing head, and reads a row of the table below `context`; the buffers have
    // the declared lengths (see `buffer`).
    unsafe {
        turn_both::launch_unchecked(
            client,
            cubes,
            CubeDim::new_1d(dim),
            address,
            lanes,
            buffer(query.0, numbers[0] / lanes),
            buffer(key.0, numbers[1] / lanes),
            table.angles(width, [rows, seq], (places, first)),
            buffer(turned_query.0, numbers[0] / lanes),
            buffer(turned_key.0, numbers[1] / lanes),
            kind,
            heads[1],
            table.types([query.1, turned_query.1], places),
        );
    }
    Ok(())
}
