//! The online softmax of a step of the forward kernel.

use cubecl::prelude::*;

use super::bits::keeps;
use super::tiles::Tile;
use crate::arch::sm90::*;
use crate::shared::score::SLACK;

/// `m` is set this far below the largest exponent, and replaced if an exponent exceeds it by more than the slack, so weights are at most 2⁸.
const FP8_BELOW: f32 = 7.0;
const FP8_SLACK: f32 = 8.0;
/// Equals 2²³ + 127. Subtracting an integer `n` leaves the biased exponent of `2⁻ⁿ` in the last mantissa bits.
const EXPONENTS: f32 = 8_388_735.0;

#[derive(CubeType)]
pub struct Softmax<S: Size> {
    pub p: Vector<f32, S>,
    // Softmax state of the unit's two rows, with `l` over its own columns.
    pub m0: f32,
    pub m1: f32,
    pub l0: f32,
    pub l1: f32,
    /// Factors of the earlier sums.
    pub a0: f32,
    pub a1: f32,
    /// The step's largest scores.
    pub top0: f32,
    pub top1: f32,
}

/// Performs a step of online softmax. With coarse entries, which have `blocks` blocks per row, only blocks whose bits are set in `kept` count; scores of
/// the others are arbitrary.
#[cube]
pub fn softmax<S: Size>(
    s: Vector<f32, S>,
    kept: u32,
    old_m0: f32,
    old_m1: f32,
    old_l0: f32,
    old_l1: f32,
    log2_scale: f32,
    #[comptime] blocks: Option<usize>,
) -> Softmax<S> {
    let width = S::value();
    let count = comptime!(blocks.unwrap_or(1));
    let eights = comptime!(width / 4 / count);
    let infinity = f32::new(f32::NEG_INFINITY);
    let x = largest_kept::<S>(s, kept, blocks);
    let top0 = quad_max(x.upper);
    let m0 = next_max(old_m0, top0, log2_scale);
    let top1 = quad_max(x.lower);
    let m1 = next_max(old_m1, top1, log2_scale);
    let n0 = -m0 * log2_scale;
    let n1 = -m1 * log2_scale;
    // The factor is exactly 1 if the maximum stays.
    let a0 = exp2((old_m0 - m0) * log2_scale);
    let a1 = exp2((old_m1 - m1) * log2_scale);
    let mut p = s;
    let mut l0 = old_l0 * a0;
    let mut l1 = old_l1 * a1;
    let mut l2 = f32::new(0.0);
    let mut l3 = f32::new(0.0);
    #[unroll]
    for block in 0..count {
        // Adding −∞ to a score makes its weight 0. This takes two selects per block instead of one per element.
        let (n0, n1) = if comptime!(blocks.is_some()) {
            let its = keeps(kept, block);
            (select(its, n0, infinity), select(its, n1, infinity))
        } else {
            (n0, n1)
        };
        #[unroll]
        for eight in 0..eights {
            let at = comptime!(4 * (block * eights + eight));
            let e = weights_of_eight::<S>(s, &mut p, at, log2_scale, n0, n1);
            l0 += e.upper0;
            l2 += e.upper1;
            l1 += e.lower0;
            l3 += e.lower1;
        }
    }
    Softmax::<S> {
        p,
        m0,
        m1,
        l0: l0 + l2,
        l1: l1 + l3,
        a0,
        a1,
        top0,
        top1,
    }
}

/// Performs a step of online softmax over products in FP8, with the factors of their blocks of keys. `m` is a base-2 exponent, below the largest one.
#[cube]
pub fn softmax_of_products<S: Size>(
    s: Vector<f32, S>,
    factors: &Array<f32>,
    old_m0: f32,
    old_m1: f32,
    old_l0: f32,
    old_l1: f32,
) -> Softmax<S> {
    let width = S::value();
    let each = comptime!(FP8_COLUMNS / 2);
    let blocks = comptime!(width / each);
    let mut top0 = f32::new(f32::NEG_INFINITY);
    let mut top1 = f32::new(f32::NEG_INFINITY);
    #[unroll]
    for block in 0..blocks {
        let x = largest_of_eights::<S>(s, comptime!(block * each), comptime!(each / 4));
        let (factor, log) = (
            factors[comptime!(2 * block)],
            factors[comptime!(2 * block + 1)],
        );
        top0 = larger(top0, multiply_add(x.upper, factor, log));
        top1 = larger(top1, multiply_add(x.lower, factor, log));
    }
    let (top0, top1) = (quad_max(top0), quad_max(top1));
    let m0 = select(top0 - old_m0 > FP8_SLACK, top0 - FP8_BELOW, old_m0);
    let m1 = select(top1 - old_m1 > FP8_SLACK, top1 - FP8_BELOW, old_m1);
    // The factor is exactly 1 if the maximum stays.
    let (a0, a1) = (exp2(old_m0 - m0), exp2(old_m1 - m1));
    let mut p = s;
    let mut l0 = old_l0 * a0;
    let mut l1 = old_l1 * a1;
    #[unroll]
    for block in 0..blocks {
        let (factor, log) = (
            factors[comptime!(2 * block)],
            factors[comptime!(2 * block + 1)],
        );
        let (n0, n1) = (log - m0, log - m1);
        let mut sum0 = f32::new(0.0);
        let mut sum1 = f32::new(0.0);
        #[unroll]
        for eight in 0..comptime!(each / 4) {
            let at = comptime!(block * each + 4 * eight);
            let e = weights_of_eight::<S>(s, &mut p, at, factor, n0, n1);
            sum0 += e.upper0 + e.upper1;
            sum1 += e.lower0 + e.lower1;
        }
        let inverse = f32::reinterpret(u32::reinterpret(EXPONENTS - log) << 23);
        l0 = multiply_add(sum0, inverse, l0);
        l1 = multiply_add(sum1, inverse, l1);
    }
    Softmax::<S> {
        p,
        m0,
        m1,
        l0,
        l1,
        a0,
        a1,
        top0,
        top1,
    }
}

/// The unit's weights in eight columns: two of its upper row, and two of its lower row.
#[derive(CubeType, Clone, Copy)]
struct EightWeights {
    upper0: f32,
    upper1: f32,
    lower0: f32,
    lower1: f32,
}

/// Computes `exp2(s · factor + n)` of the scores from element `at` on, with the `n` of each row, and stores the weights in `p`.
#[cube]
fn weights_of_eight<S: Size>(
    s: Vector<f32, S>,
    p: &mut Vector<f32, S>,
    #[comptime] at: usize,
    factor: f32,
    n0: f32,
    n1: f32,
) -> EightWeights {
    let upper0 = exp2(multiply_add(s.extract(at), factor, n0));
    let upper1 = exp2(multiply_add(s.extract(comptime!(at + 1)), factor, n0));
    let lower0 = exp2(multiply_add(s.extract(comptime!(at + 2)), factor, n1));
    let lower1 = exp2(multiply_add(s.extract(comptime!(at + 3)), factor, n1));
    p.insert(at, upper0);
    p.insert(comptime!(at + 1), upper1);
    p.insert(comptime!(at + 2), lower0);
    p.insert(comptime!(at + 3), lower1);
    EightWeights {
        upper0,
        upper1,
        lower0,
        lower1,
    }
}

/// The largest scores of a unit's two rows.
#[derive(CubeType, Clone, Copy)]
pub struct Largest {
    pub upper: f32,
    pub lower: f32,
}

/// Returns the largest scores over the unit's columns.
#[cube]
pub fn largest<S: Size>(s: Vector<f32, S>) -> Largest {
    let width = S::value();
    let mut x0 = s.extract(0usize);
    let mut x1 = s.extract(2usize);
    let mut x2 = s.extract(1usize);
    let mut x3 = s.extract(3usize);
    #[unroll]
    for j in 1..comptime!(width / 4) {
        x0 = larger(x0, s.extract(comptime!(4 * j)));
        x2 = larger(x2, s.extract(comptime!(4 * j + 1)));
        x1 = larger(x1, s.extract(comptime!(4 * j + 2)));
        x3 = larger(x3, s.extract(comptime!(4 * j + 3)));
    }
    Largest {
        upper: larger(x0, x2),
        lower: larger(x1, x3),
    }
}

/// Returns the largest scores over `eights` groups of eight columns from element `first` on.
#[cube]
fn largest_of_eights<S: Size>(
    s: Vector<f32, S>,
    #[comptime] first: usize,
    #[comptime] eights: usize,
) -> Largest {
    let mut upper = larger(s.extract(first), s.extract(comptime!(first + 1)));
    let at = comptime!(first + 2);
    let mut lower = larger(s.extract(at), s.extract(comptime!(at + 1)));
    #[unroll]
    for eight in 1..eights {
        let at = comptime!(first + 4 * eight);
        upper = larger(upper, larger(s.extract(at), s.extract(comptime!(at + 1))));
        let at = comptime!(at + 2);
        lower = larger(lower, larger(s.extract(at), s.extract(comptime!(at + 1))));
    }
    Largest { upper, lower }
}

/// Returns the largest scores over all columns, or over the blocks whose bits are set in `kept`.
#[cube]
pub fn largest_kept<S: Size>(
    s: Vector<f32, S>,
    kept: u32,
    #[comptime] blocks: Option<usize>,
) -> Largest {
    if comptime!(blocks.is_some()) {
        largest_of_blocks::<S>(s, kept, comptime!(blocks.unwrap()))
    } else {
        largest::<S>(s)
    }
}

#[cube]
fn largest_of_blocks<S: Size>(s: Vector<f32, S>, kept: u32, #[comptime] blocks: usize) -> Largest {
    let width = S::value();
    let eights = comptime!(width / 4 / blocks);
    let infinity = f32::new(f32::NEG_INFINITY);
    let mut upper = infinity;
    let mut lower = infinity;
    #[unroll]
    for block in 0..blocks {
        let first = comptime!(4 * block * eights);
        let x = largest_of_eights::<S>(s, first, eights);
        let its = keeps(kept, block);
        upper = larger(upper, select(its, x.upper, infinity));
        lower = larger(lower, select(its, x.lower, infinity));
    }
    Largest { upper, lower }
}

/// Returns the old maximum, unless the new one exceeds it by more than the slack.
#[cube]
pub fn next_max(old: f32, new: f32, log2_scale: f32) -> f32 {
    select((new - old) * log2_scale > f32::new(SLACK), new, old)
}

/// Returns the maximum over the four neighbouring lanes that share a row.
#[cube]
pub fn quad_max(x: f32) -> f32 {
    let x = larger(x, shuffle_xor(x, 1u32));
    larger(x, shuffle_xor(x, 2u32))
}

#[cube]
pub fn rescale<O: Size>(
    o_in: Vector<f32, O>,
    a0: f32,
    a1: f32,
    #[comptime] t: Tile,
) -> Vector<f32, O> {
    let mut o = o_in;
    if any_differ(a0 * a1, 1.0f32) != 0 {
        #[unroll]
        for j in 0..comptime!(t.value_dim / 8) {
            o.insert(comptime!(4 * j), o.extract(comptime!(4 * j)) * a0);
            o.insert(comptime!(4 * j + 1), o.extract(comptime!(4 * j + 1)) * a0);
            o.insert(comptime!(4 * j + 2), o.extract(comptime!(4 * j + 2)) * a1);
            o.insert(comptime!(4 * j + 3), o.extract(comptime!(4 * j + 3)) * a1);
        }
    }
    o
}

/// Computes `a · o + x`.
#[cube]
pub fn add_scaled<O: Size>(
    o_in: Vector<f32, O>,
    x: Vector<f32, O>,
    a0: f32,
    a1: f32,
    #[comptime] value_dim: usize,
) -> Vector<f32, O> {
    let mut o = o_in;
    #[unroll]
    for j in 0..comptime!(value_dim / 8) {
        #[unroll]
        for i in 0..2usize {
            let at = comptime!(4 * j + i);
            o.insert(at, multiply_add(o.extract(at), a0, x.extract(at)));
            let at = comptime!(at + 2);
            o.insert(at, multiply_add(o.extract(at), a1, x.extract(at)));
        }
    }
    o
}
