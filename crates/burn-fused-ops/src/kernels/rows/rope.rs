//! Rotary position embedding: pairs of channels, turned by their position.

use cubecl::ir::{ElemType, IntKind};
use cubecl::prelude::*;

use blocksparse_cubecl::args::{address_of, buffer, optional, spread};
use blocksparse_cubecl::error::KernelError;
use blocksparse_cubecl::rows::typed::Typed;

/// Units of a cube.
const UNITS: u32 = 256;
/// Bytes of a load.
const MOST_BYTES: usize = 16;
/// Heads that a unit turns by one load of the table, and the units from which on that leaves enough of them.
const HEADS: usize = 4;
const MANY: usize = 1 << 16;

/// `[batch, heads, seq, width]`, with what the compiler knows of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Kind {
    /// Vectors of a row, and channels of a vector.
    vectors: usize,
    lanes: usize,
    heads: usize,
    /// Heads of a unit.
    own_heads: usize,
    /// Whether it turns back.
    back: bool,
}

/// A unit turns one vector of a position, in some heads.
#[cube(launch_unchecked, address_type = "dynamic")]
fn turn<E: Float, A: Float, O: Float, I: Int, N: Size>(
    x: &[Vector<E, N>],
    table: &[A],
    places: ComptimeOption<Box<[I]>>,
    output: &mut [Vector<O, N>],
    rows: usize,
    seq: usize,
    first: usize,
    context: usize,
    place_step: usize,
    channel_step: usize,
    sine_step: usize,
    #[comptime] k: Kind,
    #[define(E)] _element: ElemType,
    #[define(A)] _accumulator: ElemType,
    #[define(O)] _output_type: ElemType,
    #[define(I)] _index: ElemType,
) {
    let groups = comptime!(k.heads.div_ceil(k.own_heads));
    let vector = ABSOLUTE_POS % comptime!(k.vectors);
    let row = ABSOLUTE_POS / comptime!(k.vectors) % rows;
    let group = ABSOLUTE_POS / comptime!(k.vectors) / rows;
    if group < groups {
        let mut place = first + row % seq;
        #[comptime]
        match places {
            ComptimeOption::Some(places) => place = usize::cast_from(places[row]),
            ComptimeOption::None => {}
        }
        let pairs = comptime!(k.lanes / 2);
        let turns =
            min(place, context - 1) * place_step + vector * comptime!(k.lanes) * channel_step;
        let mut cosines = Array::<A>::new(pairs);
        let mut sines = Array::<A>::new(pairs);
        #[unroll]
        for pair in 0..pairs {
            let turn = turns + comptime!(2 * pair) * channel_step;
            cosines[pair] = table[turn];
            sines[pair] = match comptime!(k.back) {
                true => -table[turn + sine_step],
                false => table[turn + sine_step],
            };
        }
        let head = row / seq * comptime!(k.heads) + group * comptime!(k.own_heads);
        let left = comptime!(k.heads) - group * comptime!(k.own_heads);
        let start = (head * seq + row % seq) * comptime!(k.vectors) + vector;
        let step = seq * comptime!(k.vectors);
        let mut values = Array::<Vector<E, N>>::new(comptime!(k.own_heads));
        #[unroll]
        for i in 0..comptime!(k.own_heads) {
            // Units behind the last head read it once more.
            values[i] = x[start + min(i.runtime(), left - 1) * step];
        }
        #[unroll]
        for i in 0..comptime!(k.own_heads) {
            let value = Vector::<A, N>::cast_from(values[i]);
            let mut turned = Vector::<A, N>::zeroed();
            #[unroll]
            for pair in 0..pairs {
                let (at, next) = (comptime!(2 * pair), comptime!(2 * pair + 1));
                let (a, b) = (value.extract(at), value.extract(next));
                turned.insert(at, a * cosines[pair] - b * sines[pair]);
                turned.insert(next, b * cosines[pair] + a * sines[pair]);
            }
            if i < left {
                output[start + i * step] = Vector::<O, N>::cast_from(turned);
            }
        }
    }
}

/// The table `[context, width, 2]`: cosines and sines, once for each channel of a pair.
#[derive(Clone, Copy, Debug)]
pub struct RopeTable<'a> {
    /// From its first number on.
    pub numbers: Typed<'a>,
    /// Its rows.
    pub context: usize,
    /// Numbers from one to the next, in each dimension.
    pub strides: [usize; 3],
}

/// Pairs of channels of `x`, `[batch, heads, seq, width]`, turned by their row of the table: row `places[batch · seq]`, or those from `first` on. Contiguous but
/// for the table, in whose type it is computed.
///
/// # Errors
/// [`KernelError`] if the device lacks a type or cannot index the numbers, or the width is odd.
pub fn rope(
    client: &Client,
    (x, output): (Typed, Typed),
    [batch, heads, seq, width]: [usize; 4],
    table: &RopeTable,
    (places, first): (Option<Typed>, usize),
    back: bool,
) -> Result<(), KernelError> {
    for element in [x.1, table.numbers.1, output.1] {
        if !client.properties().supports_type(element) {
            let dtype = format!("{element:?}");
            return Err(KernelError::Dtype { dtype });
        }
    }
    let numbers = batch * heads * seq * width;
    if numbers == 0 {
        return Ok(());
    }
    if !width.is_multiple_of(2) || table.context == 0 {
        return Err(KernelError::limit("pairs of a row", 0u32, width));
    }
    let hardware = &client.properties().hardware;
    let most = (MOST_BYTES / x.1.size().max(output.1.size())).min(hardware.max_vector_size);
    let lanes = [8, 4, 2]
        .into_iter()
        .find(|lanes| *lanes <= most && width.is_multiple_of(*lanes))
        .unwrap_or(2);
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
    let dim = UNITS.min(hardware.max_units_per_cube);
    let [place_step, channel_step, sine_step] = table.strides;
    let reach = (table.context - 1) * place_step + (width - 1) * channel_step + sine_step + 1;
    let address = address_of(client, numbers.max(reach))?;
    let cubes = spread(client, units.div_ceil(dim as usize) as u64)?;
    // SAFETY: a unit reads and writes one vector of a row below `rows` in heads below `heads`, and reads a row of the table below `context`; the buffers have
    // the lengths they say (see `buffer`).
    unsafe {
        turn::launch_unchecked(
            client,
            cubes,
            CubeDim::new_1d(dim),
            address,
            lanes,
            buffer(x.0, numbers / lanes),
            buffer(table.numbers.0, reach),
            optional(places.map(|places| places.0), rows),
            buffer(output.0, numbers / lanes),
            rows,
            seq,
            first,
            table.context,
            place_step,
            channel_step,
            sine_step,
            kind,
            x.1,
            table.numbers.1,
            output.1,
            places.map_or(ElemType::Int(IntKind::I32), |places| places.1),
        );
    }
    Ok(())
}
