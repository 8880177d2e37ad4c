//! Products on mma.sync, for GPUs of compute capability 8.0 and up. Columns of a weight are the 16 rows of an instruction's tile, rows of x its 8 columns.
//!
//! ```text
//! a lane    16, 8 or 4 bytes of each of 8 rows of a weight, and 16 bytes of a row of x. Which numbers of the depth meet in an instruction is free, as long as
//!           both factors agree: so what a lane reads becomes its operands when halves of words change places, and goes through no shared memory
//! a warp    a strip of 64, 32 or 16 columns, and a share of the depth
//! a cube    strips with all of the depth, or two weights' same strip: warps' sums are added up in shared memory, in one order
//! ```

use std::fmt;

use crate::kernels::few_rows::call::{FewRows, FewRowsRequest, MOST_WEIGHTS};
use crate::kernels::linear::ampere;
use crate::kernels::prelude::*;
use blocksparse_cubecl::arch::Four;
use blocksparse_cubecl::arch::ptx::{Half, merge_words, uniform};
use blocksparse_cubecl::arch::sm80::{Element, multiply};
use blocksparse_cubecl::shared::curve::{Curve, value};

/// Depth that the lanes read by one load of x: that of two instructions.
const BLOCK: usize = 32;
/// Rows of a weight that a lane reads per block: as many as its load of x has halves.
const OWN: usize = 8;
/// Columns of a strip for each word that a lane reads of a row.
const COLUMNS: usize = 16;
/// Units of a warp.
const WARP: usize = 32;
/// Warps of a cube that is alone on its multiprocessor, and of one that shares it with another.
const WARPS: [usize; 2] = [16, 8];
/// Registers for operands and sums in these two kinds of cube; the first kind has 128 in all.
const REGISTERS: [usize; 2] = [96, 112];

/// Comptime partition of a product.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Cut {
    /// Groups of eight rows that are computed; rows past the end repeat the last.
    eights: usize,
    /// Words that a lane reads of a row of a weight.
    words: usize,
    /// Strips of a cube, or weights if one is a gate.
    groups: usize,
    /// Warps that share a strip's depth, and the most blocks of each.
    slices: usize,
    blocks: usize,
    /// Blocks that are read at once.
    steps: usize,
}

impl Cut {
    fn strip(&self) -> usize {
        COLUMNS * self.words
    }

    /// Returns the elements of a vector that a lane reads.
    fn vector(&self) -> usize {
        2 * self.words
    }

    fn warps(&self) -> usize {
        self.groups * self.slices
    }

    /// Returns the number of vectors of four sums of a lane.
    fn sums(&self) -> usize {
        self.words * self.eights
    }

    /// Returns the number of vectors of four sums of a warp.
    fn fours(&self) -> usize {
        WARP * self.sums()
    }

    fn shared_bytes(&self) -> usize {
        16 * self.warps() * self.fours()
    }

    /// Returns the bytes of weights that a warp has in flight.
    fn flight(&self) -> usize {
        4 * WARP * OWN * self.words * self.steps
    }

    /// Returns the registers of a lane for operands and sums.
    fn registers(&self) -> usize {
        self.steps * (OWN * self.words + 4 * self.eights) + 4 * self.sums()
    }

    /// Returns the number of strips of weights of these widths.
    fn strips(&self, widths: &[usize]) -> usize {
        widths
            .iter()
            .map(|width| width.div_ceil(self.strip()))
            .sum()
    }
}

/// Comptime parameters of a launch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Kind {
    cut: Cut,
    half: Half,
    depth: usize,
    /// Columns of each weight, and the pitch in vectors.
    widths: [usize; MOST_WEIGHTS],
    pitches: [usize; MOST_WEIGHTS],
    /// Weights with strips of their own.
    count: usize,
    /// Offset of each weight's rows in the result. None: rows of all weights are concatenated.
    starts: Option<[usize; MOST_WEIGHTS]>,
    /// Activation of the first weight's sums, which multiply the second's.
    gate: Option<Curve>,
}

impl Kind {
    /// Returns the number of columns of the result before a weight's.
    fn start(&self, weight: usize) -> usize {
        self.widths[..weight].iter().sum()
    }

    /// Returns the number of elements of a row of the result.
    fn all(&self) -> usize {
        self.start(self.count)
    }

    fn strips(&self, weights: usize) -> usize {
        self.cut.strips(&self.widths[..weights])
    }

    /// Returns whether every warp has whole blocks only.
    fn whole(&self) -> bool {
        self.depth == self.cut.slices * self.cut.blocks * BLOCK
    }

    /// Returns the number of units that write a strip.
    fn writers(&self) -> usize {
        match self.gate {
            Some(_) => WARP * self.cut.warps(),
            None => WARP * self.cut.slices,
        }
    }
}

/// Multiplies by weights `[depth, width]` with contiguous rows. `W` is the cut's `words`.
#[cube(launch_unchecked, address_type = "dynamic")]
fn by_warps<E: Float, P: Float, W: Size>(
    x: &[Vector<u32, Four>],
    weights: Sequence<Box<[Vector<u32, W>]>>,
    bias: ComptimeOption<Box<[P]>>,
    output: &mut [E],
    rows: usize,
    #[comptime] k: Kind,
    #[define(E, P)] _types: [ElemType; 2],
) {
    let cut = comptime!(k.cut);
    let warp = uniform(UNIT_POS / comptime!(WARP as u32)) as usize;
    let lane = (UNIT_POS % comptime!(WARP as u32)) as usize;
    let (group, slice) = (warp / comptime!(cut.slices), warp % comptime!(cut.slices));
    let mut sums = Array::<Vector<f32, Four>>::new(comptime!(cut.sums()));
    #[unroll]
    for i in 0..comptime!(cut.sums()) {
        sums[i] = Vector::<f32, Four>::zeroed();
    }
    let strip = match comptime!(k.gate.is_some()) {
        true => CUBE_POS,
        false => CUBE_POS * comptime!(cut.groups) + group,
    };
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
            column = (strip - first) * comptime!(cut.strip());
            width = comptime!(k.widths[index]).runtime();
            start = comptime!(k.start(index)).runtime();
            begin = comptime!(k.starts.map_or(0, |starts| starts[index])).runtime();
            if comptime!(k.gate.is_none()) {
                accumulate::<W>(
                    x,
                    &weights[index],
                    &mut sums,
                    column,
                    slice,
                    lane,
                    rows,
                    index,
                    k,
                );
            }
        }
    }
    if comptime!(k.gate.is_some()) {
        #[unroll]
        for index in 0..2usize {
            if group == index {
                accumulate::<W>(
                    x,
                    &weights[index],
                    &mut sums,
                    column,
                    slice,
                    lane,
                    rows,
                    index,
                    k,
                );
            }
        }
    }
    let fours = comptime!(cut.fours());
    let mut shared = Shared::<[Vector<f32, Four>]>::new_slice(comptime!(cut.warps() * cut.fours()));
    #[unroll]
    for i in 0..comptime!(cut.sums()) {
        shared[warp * fours + comptime!(i * WARP) + lane] = sums[i];
    }
    sync_cube();
    let writers = comptime!(k.writers());
    let own = match comptime!(k.gate.is_some()) {
        true => 0usize.runtime(),
        false => group,
    };
    let writer = match comptime!(k.gate.is_some()) {
        true => UNIT_POS as usize,
        false => slice * comptime!(WARP) + lane,
    };
    #[unroll]
    for turn in 0..comptime!(k.cut.fours().div_ceil(k.writers())) {
        let at = turn * writers + writer;
        if at < fours {
            let mut sum = added::<Four>(&shared, own, at, cut);
            if comptime!(k.gate.is_some()) {
                let other = added::<Four>(&shared, 1usize.runtime(), at, cut);
                sum = value::<f32, Four>(sum, comptime!(k.gate.unwrap())) * other;
            }
            // A lane holds two columns of two rows of an instruction's sums.
            let (of, lane) = (at / comptime!(WARP), at % comptime!(WARP));
            let (word, eight) = (of / comptime!(cut.eights), of % comptime!(cut.eights));
            let first = column + lane / 4 * comptime!(cut.vector()) + word * 2;
            let top = eight * 8 + lane % 4 * 2;
            #[unroll]
            for i in 0..4usize {
                let (row, own) = (top + comptime!(i % 2), first + comptime!(i / 2));
                if row < rows && own < width {
                    let mut number = sum.extract(i);
                    #[comptime]
                    match bias.as_ref() {
                        ComptimeOption::Some(bias) => number += f32::cast_from(bias[start + own]),
                        ComptimeOption::None => {}
                    }
                    let place = match comptime!(k.starts.is_some()) {
                        true => begin + row * width + own,
                        false => row * comptime!(k.all()) + start + own,
                    };
                    output[place] = E::cast_from(number);
                }
            }
        }
    }
}

/// Sums one lane's vector over the warps of a group.
#[cube]
fn added<N: Size>(
    shared: &[Vector<f32, N>],
    group: usize,
    at: usize,
    #[comptime] cut: Cut,
) -> Vector<f32, N> {
    let first = group * comptime!(cut.slices * cut.fours()) + at;
    let mut sum = shared[first];
    #[unroll]
    for slice in 1..comptime!(cut.slices) {
        sum += shared[first + comptime!(slice * cut.fours())];
    }
    sum
}

/// Loads a lane's part of a block: the weight from vector `at` on, x from `place` on, in units of `OWN` elements.
#[cube]
fn read_block<W: Size>(
    x: &[Vector<u32, Four>],
    weight: &[Vector<u32, W>],
    read: &mut Array<Vector<u32, W>>,
    factors: &mut Array<Vector<u32, Four>>,
    at: usize,
    place: usize,
    row: usize,
    rows: usize,
    #[comptime] step: usize,
    #[comptime] pitch: usize,
    #[comptime] k: Kind,
) {
    let eights = comptime!(k.cut.eights);
    #[unroll]
    for i in 0..OWN {
        let depth = place * comptime!(OWN) + i;
        read[comptime!(step * OWN + i)] = weight[depth * pitch + at];
    }
    #[unroll]
    for eight in 0..eights {
        let row = min(row + comptime!(8 * eight), rows - 1);
        factors[comptime!(step * eights + eight)] = x[row * comptime!(k.depth / OWN) + place];
    }
}

/// Accumulates a warp's part of a strip.
#[cube]
fn accumulate<W: Size>(
    x: &[Vector<u32, Four>],
    weight: &[Vector<u32, W>],
    sums: &mut Array<Vector<f32, Four>>,
    column: usize,
    slice: usize,
    lane: usize,
    rows: usize,
    #[comptime] index: usize,
    #[comptime] k: Kind,
) {
    let pitch = comptime!(k.pitches[index]);
    let eights = comptime!(k.cut.eights);
    let steps = comptime!(k.cut.steps);
    let (row, quarter) = (lane / 4, lane % 4);
    // Lanes past the last column read it again.
    let last = comptime!(k.widths[index] / k.cut.vector() - 1);
    let at = min(column / comptime!(k.cut.vector()) + row, last);
    // Position in the depth, in units of `OWN` elements.
    let begin = slice * comptime!(k.cut.blocks * BLOCK / OWN) + quarter;
    for round in 0..comptime!(k.cut.blocks / k.cut.steps) {
        let first = begin + round * comptime!(k.cut.steps * BLOCK / OWN);
        let mut read = Array::<Vector<u32, W>>::new(comptime!(OWN * k.cut.steps));
        let mut factors = Array::<Vector<u32, Four>>::new(comptime!(k.cut.eights * k.cut.steps));
        #[unroll]
        for step in 0..steps {
            let place = first + comptime!(step * BLOCK / OWN);
            if comptime!(!k.whole()) {
                #[unroll]
                for i in 0..OWN {
                    read[comptime!(step * OWN + i)] = Vector::<u32, W>::zeroed();
                }
                #[unroll]
                for eight in 0..eights {
                    factors[comptime!(step * eights + eight)] = Vector::<u32, Four>::zeroed();
                }
            }
            // With whole blocks only, the condition is comptime.
            if comptime!(k.whole()).runtime() || place < comptime!(k.depth / OWN) {
                read_block::<W>(
                    x,
                    weight,
                    &mut read,
                    &mut factors,
                    at,
                    place,
                    row,
                    rows,
                    step,
                    pitch,
                    k,
                );
            }
        }
        #[unroll]
        for half in 0..comptime!(2 * k.cut.steps) {
            let of = comptime!(half * OWN / 2);
            #[unroll]
            for word in 0..comptime!(k.cut.words) {
                let mut four = Vector::<u32, Four>::zeroed();
                #[unroll]
                for i in 0..4usize {
                    let low = read[comptime!(of + i / 2 * 2)].extract(word);
                    let high = read[comptime!(of + i / 2 * 2 + 1)].extract(word);
                    four.insert(i, merge_words(low, high, comptime!(i % 2 == 1)));
                }
                #[unroll]
                for eight in 0..eights {
                    let factor = factors[comptime!(half / 2 * eights + eight)];
                    let sum = comptime!(word * eights + eight);
                    sums[sum] = multiply(
                        four,
                        factor.extract(comptime!(half % 2 * 2)),
                        factor.extract(comptime!(half % 2 * 2 + 1)),
                        sums[sum],
                        comptime!(Element::Half(k.half)),
                    );
                }
            }
        }
    }
}

/// Plan of a product.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WarpsPlan {
    request: FewRowsRequest,
    cut: Cut,
    cubes: usize,
}

/// Bandwidth of the device's memory, and the most that one multiprocessor gets, in bytes per nanosecond.
const MEMORY_BYTES: f64 = 4000.0;
const OWN_BYTES: f64 = 50.0;
/// Latency of a load under full bandwidth, in nanoseconds.
const LATENCY: f64 = 900.0;
/// Bandwidth of a multiprocessor's shared memory, in bytes per nanosecond.
const SHARED_BYTES: f64 = 200.0;

impl WarpsPlan {
    /// Returns all plans, the fastest by a model of the device first.
    ///
    /// # Errors
    /// The reason why the kernel does not support the product.
    pub fn all(client: &Client, request: &FewRowsRequest) -> Result<Vec<Self>, &'static str> {
        let (multiprocessors, shared) = ampere(client)?;
        half_of(request.element).ok_or("mma.sync multiplies bf16 and f16")?;
        if request.transposed {
            return Err("the weight's columns are contiguous");
        }
        let mut plans: Vec<_> = cuts(request, shared)
            .map(|cut| {
                let plan = Self {
                    request: *request,
                    cut,
                    cubes: cubes(request, &cut),
                };
                (plan.nanoseconds(multiprocessors), plan)
            })
            .collect();
        plans.sort_by(|(a, _), (b, _)| a.total_cmp(b));
        match plans.is_empty() {
            true => Err("no cut fits the registers and the shared memory"),
            false => Ok(plans.into_iter().map(|(_, plan)| plan).collect()),
        }
    }

    fn nanoseconds(&self, multiprocessors: usize) -> f64 {
        let (cut, [_, depth]) = (&self.cut, self.request.lengths);
        let columns: usize = self.request.widths.iter().sum();
        let turns = self.cubes.div_ceil(multiprocessors);
        let resident = turns.min(if cut.warps() > WARPS[1] { 1 } else { 2 });
        let weights = (turns * 2 * depth * cut.strip() * cut.groups) as f64;
        let x = (turns * 2 * depth * 8 * cut.eights) as f64;
        let flight = (resident * cut.warps() * cut.flight()) as f64;
        let slowest = [
            (2 * depth * columns) as f64 / MEMORY_BYTES,
            (weights + x) / OWN_BYTES,
            weights / flight * LATENCY,
        ];
        let slowest = slowest.into_iter().fold(0.0, f64::max);
        // Cache lines of 128 bytes are read whole, or by several cubes.
        let lines = [1.15, 1.05, 1.0][cut.words / 2];
        slowest * lines + (turns / resident * 2 * cut.shared_bytes()) as f64 / SHARED_BYTES
    }
}

fn half_of(element: ElemType) -> Option<Half> {
    match element {
        ElemType::Float(FloatKind::BF16) => Some(Half::Bf16),
        ElemType::Float(FloatKind::F16) => Some(Half::F16),
        _ => None,
    }
}

fn cubes(request: &FewRowsRequest, cut: &Cut) -> usize {
    let strips = cut.strips(&request.widths[..request.count()]);
    match request.gated {
        true => strips,
        false => strips.div_ceil(cut.groups),
    }
}

/// Enumerates the partitions of a product.
fn cuts(request: &FewRowsRequest, shared: usize) -> impl Iterator<Item = Cut> {
    let [rows, depth] = request.lengths;
    let eights = rows.div_ceil(8).next_power_of_two();
    let all = depth.div_ceil(BLOCK);
    let groups: &[usize] = if request.gated { &[2] } else { &[1, 2] };
    let kinds = WARPS.into_iter().zip(REGISTERS);
    let each = kinds.flat_map(move |kind| groups.iter().map(move |groups| (kind, *groups)));
    let each = each.flat_map(|of| [4, 2, 1].map(|words| (of, words)));
    each.filter_map(move |(((warps, registers), groups), words)| {
        let blocks = all.div_ceil(warps / groups);
        let of = |steps| Cut {
            eights,
            words,
            groups,
            slices: all.div_ceil(blocks),
            blocks,
            steps,
        };
        let fits = |cut: &Cut| {
            let cubes = if warps == WARPS[0] { 1 } else { 2 };
            blocks.is_multiple_of(cut.steps)
                && cut.registers() <= registers
                && cubes * cut.shared_bytes() <= shared
        };
        (1..=OWN).rev().map(of).find(fits)
    })
}

impl fmt::Display for WarpsPlan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (cut, cubes) = (&self.cut, self.cubes);
        write!(f, "mma, strips of {} columns, ", cut.strip())?;
        write!(
            f,
            "{} warps, the depth in {} parts, ",
            cut.warps(),
            cut.slices
        )?;
        write!(
            f,
            "{} rows of weights at a time, {cubes} cubes",
            BLOCK * cut.steps
        )
    }
}

/// Launches a checked and planned product.
///
/// # Errors
/// [`KernelError`] if the call differs from the planned one, or the device lacks a type.
pub fn launch(
    client: &Client,
    plan: &WarpsPlan,
    request: &FewRowsRequest,
    call: &FewRows,
) -> Result<(), KernelError> {
    let (element, [rows, depth], cut) = (call.x.1, call.lengths, plan.cut);
    let Some(half) = half_of(element).filter(|_| plan.request == *request) else {
        return Err(KernelError::Factor { factor: "weight" });
    };
    let added = call
        .bias
        .map_or(ElemType::Float(FloatKind::F32), |bias| bias.1);
    check_types(client.properties(), [added])?;
    let vector = cut.vector();
    let mut kind = Kind {
        cut,
        half,
        depth,
        widths: request.widths,
        pitches: [0; MOST_WEIGHTS],
        count: request.count(),
        starts: call.starts,
        gate: call.gate.map(|activation| Curve {
            activation,
            fast: true,
        }),
    };
    let mut weights = SequenceArg::new();
    let mut largest = (rows * depth).max(call.numbers);
    for (weight, pitch) in call.weights.iter().zip(&mut kind.pitches) {
        *pitch = weight.pitch / vector;
        let reach = call.reach(weight);
        largest = largest.max(reach);
        weights.push(buffer(weight.handle, reach / vector));
    }
    let address = address_of(client, largest)?;
    let cubes = spread(client, plan.cubes as u64)?;
    // SAFETY: a unit reads x below `rows`, weights below their lengths and the bias, and writes columns of rows below `rows`; the buffers have the declared
    // lengths (see `buffer`).
    unsafe {
        by_warps::launch_unchecked(
            client,
            cubes,
            CubeDim::new_1d((WARP * cut.warps()) as u32),
            address,
            cut.words,
            buffer(call.x.0, rows * depth / 8),
            weights,
            optional(call.bias.map(|bias| bias.0), kind.all()),
            buffer(call.output, call.numbers),
            rows,
            kind,
            [element, added],
        );
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    const BF16: ElemType = ElemType::Float(FloatKind::BF16);

    /// Every block of the depth belongs to a warp, and the registers and shared memory of an H200 suffice for a cube.
    #[test]
    fn cuts_cover_the_depth() {
        for depth in [8, 64, 576, 1000, 1536, 4096, 14_336] {
            for rows in [1, 8, 9, 17, 33, 64] {
                for gated in [false, true] {
                    let widths = [264; 2];
                    let of = FewRowsRequest::new(BF16, [rows, depth], &widths, [false, gated]);
                    let of = of.unwrap();
                    let all: Vec<Cut> = cuts(&of, 232_448).collect();
                    assert!(!all.is_empty(), "{of:?}");
                    for cut in all {
                        assert!(cut.slices * cut.blocks * BLOCK >= depth);
                        assert!((cut.slices - 1) * cut.blocks * BLOCK < depth);
                        assert_eq!(cut.blocks % cut.steps, 0);
                        assert!(cut.warps() <= WARPS[0] && 8 * cut.eights >= rows);
                    }
                }
            }
        }
    }
}
