//! The norm over many tensors, and the clipping factor.
//!
//! Squares of large numbers overflow. So each sum is computed twice: plain, and of elements scaled down by a power of two ([`Large`]), whose squares do not
//! overflow. The scaled sum says whether the plain one is large and replaces it then, stored as a negative number, which no sum of squares is.

use crate::kernels::optim::{Deal, FlatTensor, UNITS, launches, tensors_of_launch, units_of};
use crate::kernels::prelude::*;

/// Elements per partial sum.
const PART: usize = 8192;

/// Largest distance of an index past a tensor's end.
pub(crate) const MARGIN: usize = 2 * PART;

/// Units that add the partial sums.
const FINISH_UNITS: usize = 1024;

/// Thresholds of sums of squares too large for their type, as exponents of two.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Large {
    /// Elements are scaled by `2^-shrink`.
    shrink: u32,
    /// A scaled sum of at least `2^-bound` means a large sum: half of the type's largest number or more. Plain sums below that are computed without overflow.
    bound: u32,
}

impl Large {
    /// Returns the thresholds of an accumulator type.
    fn of(accumulator: ElemType) -> Self {
        let (shrink, largest) = match accumulator {
            ElemType::Float(FloatKind::F64) => (768, 1024),
            _ => (96, 128),
        };
        Self {
            shrink,
            bound: 2 * shrink - (largest - 1),
        }
    }
}

/// Returns `2^exponent`, or its reciprocal.
#[cube]
fn power_of_two<A: Float>(#[comptime] exponent: u32, #[comptime] reciprocal: bool) -> A {
    let mut result = A::new(comptime!(power(exponent % STEP, reciprocal)));
    // Constants are at most f32: multiply several.
    #[unroll]
    for _ in 0..comptime!(exponent / STEP) {
        result *= A::new(comptime!(power(STEP, reciprocal)));
    }
    result
}

/// Exponent of a power of two that f32 represents, as its reciprocal does.
const STEP: u32 = 96;

fn power(exponent: u32, reciprocal: bool) -> f32 {
    let exponent = exponent as i32;
    2f32.powi(if reciprocal { -exponent } else { exponent })
}

/// Returns how many partial sums [`sum_of_squares`] writes for a tensor of `elements`: the same on every device.
pub const fn partial_sums(elements: usize) -> usize {
    elements.div_ceil(PART)
}

/// Computes `partials[slot of the tensor + i] = Σ x²` over the `i`-th part of each tensor, or the negative sum of scaled elements if it is large.
#[cube(launch_unchecked, address_type = "dynamic")]
fn sum_parts<E: Float, A: Float, N: Size>(
    tensors: Sequence<Box<[Vector<E, N>]>>,
    partials: &mut [A],
    vectors: Sequence<usize>,
    starts: Sequence<usize>,
    slots: Sequence<usize>,
    #[comptime] count: usize,
    #[comptime] units: usize,
    #[comptime] large: Large,
    #[define(E, A)] _types: [ElemType; 2],
) {
    let mut shared = Shared::<[A]>::new_slice(comptime!(2 * units));
    let width = N::value();
    let steps = comptime!((PART / width).div_ceil(units));
    let unit = UNIT_POS as usize;
    let cube = CUBE_POS;
    let by = Vector::<A, N>::empty().fill(power_of_two::<A>(large.shrink, true));
    let mut sum = Vector::<A, N>::empty().fill(A::new(0.0));
    let mut shrunk = Vector::<A, N>::empty().fill(A::new(0.0));
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
                    let x = x * by;
                    shrunk += x * x;
                }
            }
        }
    }
    let mut total = A::new(0.0);
    let mut total_shrunk = A::new(0.0);
    #[unroll]
    for c in 0..width {
        total += sum.extract(c);
        total_shrunk += shrunk.extract(c);
    }
    sum_of_units::<A>(total, total_shrunk, &mut shared, units);
    // The last row of cubes may be past the end.
    if unit == 0 && cube < *starts.index(count) {
        let (all, shrunk) = (shared[0], shared[units]);
        partials[slot] = select(is_large::<A>(shrunk, large), -shrunk, all);
    }
}

/// Returns whether a sum of scaled elements means that the plain sum is large. NaN is not large.
#[cube]
fn is_large<A: Float>(shrunk: A, #[comptime] large: Large) -> bool {
    shrunk >= power_of_two::<A>(large.bound, true)
}

/// Sums over the units, plain and scaled, into elements 0 and `units` of `shared`. Every unit of the cube must call this.
#[cube]
fn sum_of_units<A: Float>(plain: A, shrunk: A, shared: &mut [A], #[comptime] units: usize) {
    let unit = UNIT_POS as usize;
    shared[unit] = plain;
    shared[units + unit] = shrunk;
    sync_cube();
    #[unroll]
    for step in 0..comptime!(units.ilog2()) {
        let half = comptime!(units >> (step + 1));
        if unit < half {
            let other = shared[unit + half];
            shared[unit] += other;
            let other = shared[units + unit + half];
            shared[units + unit] += other;
        }
        sync_cube();
    }
}

/// Computes `norm = √(Σ partials)` and `factor = min(1, limit / norm)`, in one cube.
#[cube(launch_unchecked, address_type = "dynamic")]
fn finish<A: Float>(
    partials: &[A],
    control: &[A],
    norm: &mut [A],
    factor: &mut [A],
    length: usize,
    #[comptime] units: usize,
    #[comptime] limit: usize,
    #[comptime] large: Large,
    #[define(A)] _accumulator: ElemType,
) {
    let mut shared = Shared::<[A]>::new_slice(comptime!(2 * units));
    let unit = UNIT_POS as usize;
    let by = power_of_two::<A>(large.shrink, true);
    // Drivers fold two constant factors into their product, which underflows f32; this factor is not constant to them.
    let by_again = select(length == 0, A::new(1.0), by);
    let mut sum = A::new(0.0);
    let mut sum_shrunk = A::new(0.0);
    let mut at = unit;
    while at < length {
        let part = partials[at];
        let is_shrunk = part < A::new(0.0);
        sum += select(is_shrunk, A::new(0.0), part);
        sum_shrunk += select(is_shrunk, -part, part * by * by_again);
        at += units;
    }
    sum_of_units::<A>(sum, sum_shrunk, &mut shared, units);
    if unit == 0 {
        let (all, shrunk) = (shared[0], shared[units]);
        let takes_shrunk = is_large::<A>(shrunk, large);
        let root = select(takes_shrunk, shrunk, all).sqrt();
        let back = select(
            takes_shrunk,
            power_of_two::<A>(large.shrink, false),
            A::new(1.0),
        );
        let whole = root * back;
        norm[0] = whole;
        let most = control[limit];
        // Guarded, so that the limit is not divided by 0 and no minimum is taken with NaN.
        let mut kept = A::new(1.0);
        if whole > most {
            // The norm may be infinite where the factor is not 0.
            kept = most / root * select(takes_shrunk, by, A::new(1.0));
        }
        factor[0] = kept;
    }
}

/// Writes the sums of squares of each tensor's parts to `partials`, in the type `accumulator`, from index `first` on: [`partial_sums`] for each tensor, the
/// tensors in order. A sum of half of the type's largest number or more is stored as the negative sum of squares of elements scaled by 2⁻⁹⁶ (2⁻⁷⁶⁸ in f64).
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
    let units = units_of(client, UNITS);
    for ((dtype, vector), held) in launches {
        let elements = held.iter().map(|(tensor, _)| tensor.elements);
        let deal = Deal::new(client, elements.clone(), PART, length)?;
        // SAFETY: a unit reads vectors of a tensor below its length, and the first of a cube writes the cube's sum; the buffers have the declared lengths
        // (see `buffer`).
        unsafe {
            sum_parts::launch_unchecked(
                client,
                deal.cubes,
                CubeDim::new_1d(units as u32),
                deal.address,
                vector,
                held.iter().map(|(tensor, _)| tensor.arg(vector)).collect(),
                buffer(partials, length),
                elements.map(|elements| elements / vector).collect(),
                deal.starts.into_iter().collect(),
                held.iter().map(|(_, slot)| *slot).collect(),
                held.len(),
                units,
                Large::of(accumulator),
                [dtype, accumulator],
            );
        }
    }
    Ok(())
}

/// Computes the norm whose sums of squares are `partials`, and `min(1, limit / norm)`. The limit is element `limit` of `control`; `norm` and `factor` have
/// one element, and all are of type `accumulator`.
///
/// # Errors
/// [`KernelError::Limit`] if the device cannot index that many partial sums.
pub fn clip_factor(
    client: &Client,
    (partials, length): (&Handle, usize),
    (control, limit): (&Handle, usize),
    [norm, factor]: [&Handle; 2],
    accumulator: ElemType,
) -> Result<(), KernelError> {
    let units = units_of(client, FINISH_UNITS);
    let address = address_of(client, length + units)?;
    // SAFETY: units read below the length, and the first writes both results; the buffers have the declared lengths (see `buffer`).
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
            Large::of(accumulator),
            accumulator,
        );
    }
    Ok(())
}
