//! The norm of many tensors together, and the factor of clipping.

use cubecl::ir::ElemType;
use cubecl::prelude::*;
use cubecl::server::Handle;

use super::{Deal, FlatTensor, address_of, buffer, launches, tensors_of_launch, units_of};
use crate::kernels::args::spread;
use crate::kernels::error::KernelError;

/// Elements of a partial sum.
const PART: usize = 8192;

/// How far behind a tensor's end an index may be.
pub(super) const MARGIN: usize = 2 * PART;

/// Units that add the partial sums.
const FINISH_UNITS: usize = 1024;

/// How many partial sums [`sum_of_squares`] makes of a tensor of `elements`: the same on every device.
pub const fn partial_sums(elements: usize) -> usize {
    elements.div_ceil(PART)
}

/// `partials[slot of the tensor + i] = Σ x²` over the `i`-th part of each tensor.
#[cube(launch_unchecked, address_type = "dynamic")]
fn sum_parts<E: Float, A: Float, N: Size>(
    tensors: Sequence<Box<[Vector<E, N>]>>,
    partials: &mut [A],
    vectors: Sequence<usize>,
    starts: Sequence<usize>,
    slots: Sequence<usize>,
    #[comptime] count: usize,
    #[comptime] units: usize,
    #[define(E)] _element: ElemType,
    #[define(A)] _accumulator: ElemType,
) {
    let mut shared = Shared::<[A]>::new_slice(units);
    let width = N::value();
    let steps = comptime!((PART / width).div_ceil(units));
    let unit = UNIT_POS as usize;
    let cube = CUBE_POS;
    let mut sum = Vector::<A, N>::empty().fill(A::new(0.0));
    let mut slot = 0usize.runtime();
    #[unroll]
    for i in 0..count {
        let start = *starts.index(i);
        if cube >= start && cube < *starts.index(comptime!(i + 1)) {
            let tensor = tensors.index(i);
            let end = *vectors.index(i);
            let first = (cube - start) * comptime!(PART / width) + unit;
            slot = *slots.index(i) + (cube - start);
            #[unroll]
            for step in 0..steps {
                let at = first + comptime!(step * units);
                if at < end {
                    let x = Vector::<A, N>::cast_from(tensor[at]);
                    sum += x * x;
                }
            }
        }
    }
    let mut total = A::new(0.0);
    #[unroll]
    for c in 0..width {
        total += sum.extract(c);
    }
    let all = sum_of_units::<A>(total, &mut shared, units);
    // The last row of cubes may be past the end.
    if unit == 0 && cube < *starts.index(count) {
        partials[slot] = all;
    }
}

/// The sum of the units' numbers, in the first unit. Every unit of the cube gets here.
#[cube]
fn sum_of_units<A: Float>(value: A, shared: &mut [A], #[comptime] units: usize) -> A {
    let unit = UNIT_POS as usize;
    shared[unit] = value;
    sync_cube();
    #[unroll]
    for step in 0..comptime!(units.ilog2()) {
        let half = comptime!(units >> (step + 1));
        if unit < half {
            let other = shared[unit + half];
            shared[unit] += other;
        }
        sync_cube();
    }
    shared[0]
}

/// `norm = √(Σ partials)` and `factor = min(1, limit / norm)`, by one cube.
#[cube(launch_unchecked, address_type = "dynamic")]
fn finish<A: Float>(
    partials: &[A],
    control: &[A],
    norm: &mut [A],
    factor: &mut [A],
    length: usize,
    #[comptime] units: usize,
    #[comptime] limit: usize,
    #[define(A)] _accumulator: ElemType,
) {
    let mut shared = Shared::<[A]>::new_slice(units);
    let unit = UNIT_POS as usize;
    let mut sum = A::new(0.0);
    let mut at = unit;
    while at < length {
        sum += partials[at];
        at += units;
    }
    let all = sum_of_units::<A>(sum, &mut shared, units);
    if unit == 0 {
        let root = all.sqrt();
        norm[0] = root;
        let most = control[limit];
        // Not a division of the limit by 0, nor a smallest of numbers that are not.
        let mut kept = A::new(1.0);
        if root > most {
            kept = most / root;
        }
        factor[0] = kept;
    }
}

/// Writes the sums of squares of parts of each tensor to `partials`, in the type `accumulator`: those of a tensor behind each other, the first tensor's from
/// `first` on, so that [`partial_sums`] of all tensors are written.
///
/// # Errors
/// [`KernelError::Limit`] if a tensor has more elements than the device indexes, or the device binds too few buffers.
pub fn sum_of_squares(
    client: &Client,
    tensors: &[FlatTensor],
    (partials, length): (&Handle, usize),
    first: usize,
    accumulator: ElemType,
) -> Result<(), KernelError> {
    let most = tensors_of_launch(client, 1, 1)?;
    let mut slot = first;
    let tensors = tensors.iter().filter(|tensor| tensor.elements > 0);
    let tensors = tensors.map(|tensor| {
        let own = slot;
        slot += partial_sums(tensor.elements);
        let widest = tensor.dtype.size().max(accumulator.size());
        let key = (tensor.dtype, tensor.vector(client, widest));
        (key, (tensor, own))
    });
    let launches = launches(tensors, most);
    let units = units_of(client);
    for ((dtype, vector), held) in launches {
        let deal = Deal::new(held.iter().map(|(tensor, _)| tensor.elements), PART);
        let largest = held.iter().map(|(tensor, _)| tensor.elements).max();
        let cubes = spread(client, deal.cubes() as u64)?;
        let address = address_of(client, largest.unwrap_or(0).max(length) + MARGIN)?;
        // SAFETY: a unit reads vectors of a tensor below its length, and the first of a cube writes the cube's number; the buffers have the lengths they
        // say (see `buffer`).
        unsafe {
            sum_parts::launch_unchecked(
                client,
                cubes,
                CubeDim::new_1d(units as u32),
                address,
                vector,
                held.iter()
                    .map(|(tensor, _)| buffer(&tensor.handle, tensor.elements / vector))
                    .collect(),
                buffer(partials, length),
                held.iter()
                    .map(|(tensor, _)| tensor.elements / vector)
                    .collect(),
                deal.arg(),
                held.iter().map(|(_, slot)| *slot).collect(),
                held.len(),
                units,
                dtype,
                accumulator,
            );
        }
    }
    Ok(())
}

/// The norm of what has these `partials` as sums of squares, and `min(1, limit / norm)`. The limit is element `limit` of `control`; `norm` and
/// `factor` have one number, and all are of `accumulator`.
///
/// # Errors
/// [`KernelError::Limit`] if there are more partial sums than the device indexes.
pub fn clip_factor(
    client: &Client,
    (partials, length): (&Handle, usize),
    (control, limit): (&Handle, usize),
    [norm, factor]: [&Handle; 2],
    accumulator: ElemType,
) -> Result<(), KernelError> {
    let hardware = &client.properties().hardware;
    let most = (hardware.max_units_per_cube as usize).min(hardware.max_cube_dim.0 as usize);
    let units = 1 << FINISH_UNITS.min(most.max(1)).ilog2();
    let address = address_of(client, length + units)?;
    // SAFETY: units read below the length, and the first writes both numbers; the buffers have the lengths they say (see `buffer`).
    unsafe {
        finish::launch_unchecked(
            client,
            CubeCount::new_single(),
            CubeDim::new_1d(units as u32),
            address,
            buffer(partials, length),
            buffer(control, limit + 1),
            buffer(norm, 1),
            buffer(factor, 1),
            length,
            units,
            limit,
            accumulator,
        );
    }
    Ok(())
}
