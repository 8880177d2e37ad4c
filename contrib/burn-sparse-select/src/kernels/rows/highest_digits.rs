//! A bound that so many of a cube's numbers reach, found digit by digit.
//!
//! ```text
//! low, high       what all of the highest are between: the lowest of units' highest numbers, if no fewer units than wanted have one, and the highest of all
//! until found     (number − low) >> shift, a digit, of those from low to high: counted in shared memory, as many digits as units
//!                 from the highest digit on the first with which enough numbers are counted: low and high are its first and last number
//! found           if all numbers of the digit are wanted: low; or if it has one number: low, and so many of those that equal it
//! ```
//!
//! So a first digit is as fine as the numbers between `low` and `high` let it be, however few exponents they have: of 128 of 8,192 normal numbers it leaves some
//! five, which the next one tells apart. Counts are whole numbers that units add to in any order.

use cubecl::prelude::*;

use blocksparse_cubecl::arch::planes;
use blocksparse_cubecl::shared::bins::Bins;
use blocksparse_cubecl::shared::unit_sums::{UnitSums, before_and_all};

/// How digits are counted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Digits {
    /// Units of a cube, a power of two, as many as there are digits.
    pub units: usize,
}

impl Digits {
    /// Words that units leave for others: what was found, and what planes have.
    pub const WORDS: usize = FOUND + 2 * planes::LANES;

    pub fn bins(&self) -> usize {
        self.units
    }

    fn bits(&self) -> u32 {
        self.units.ilog2()
    }
}

/// Words of a digit that was found: itself, how many numbers are above it, and how many have it.
const FOUND: usize = 3;

/// Bounds of what is looked for.
#[derive(CubeType, Clone, Copy)]
struct Between {
    low: u32,
    high: u32,
}

/// The highest of all numbers, and one that `most` reach. Both are above 0, as numbers are, but for what is behind the last.
#[cube]
fn bounds(
    own: &Array<u32>,
    shared: &mut Shared<[u32]>,
    most: u32,
    #[comptime] held: usize,
    #[comptime] d: Digits,
) -> Between {
    let unit = UNIT_POS as usize;
    let lane = unit % comptime!(planes::LANES);
    let groups = comptime!(d.units / planes::LANES);
    let mut high = own[0];
    #[unroll]
    for i in 1..held {
        high = max(high, own[i]);
    }
    let mut low = high;
    if most > comptime!(d.units as u32) {
        low = 0u32.runtime();
    }
    let high = planes::highest(high, true);
    let low = planes::lowest(low, true);
    if lane == 0 {
        shared[FOUND + unit / comptime!(planes::LANES)] = high;
        shared[comptime!(FOUND + planes::LANES) + unit / comptime!(planes::LANES)] = low;
    }
    sync_cube();
    let plane = lane.min(comptime!(groups - 1));
    Between {
        high: planes::highest(shared[FOUND + plane], true),
        low: max(
            planes::lowest(shared[comptime!(FOUND + planes::LANES) + plane], true),
            1u32,
        ),
    }
}

/// A bound that at least `most` of a cube's numbers reach, and fewer than that are above: or as many as that reach it. And the step of
/// [`before_and_all`] that comes next. Numbers are keys, 0 behind the last.
#[cube]
pub(crate) fn bound_by_digits(
    own: &Array<u32>,
    partial: &mut Shared<[u32]>,
    most: u32,
    #[comptime] held: usize,
    #[comptime] d: Digits,
    #[comptime] sums: UnitSums,
) -> (u32, usize) {
    let mut found = Shared::<[u32]>::new_slice(comptime!(Digits::WORDS));
    let bins = Bins::new(comptime!(d.bins()), true);
    let unit = UNIT_POS as usize;
    bins.clear(unit, true);
    let between = bounds(own, &mut found, most, held, d);
    let mut low = between.low;
    let mut high = between.high;
    let mut left = most;
    let mut step = 0usize.runtime();
    let mut is_found = false.runtime();
    while !is_found {
        // As many bits as the difference has, less those of a digit.
        let leading = (high - low).leading_zeros();
        let shift = comptime!(32 - d.bits()) - min(leading, comptime!(32 - d.bits()));
        #[unroll]
        for i in 0..held {
            // Those below are far above.
            let above = own[i] - low;
            bins.count_up_to((above >> shift) as usize, above, high - low, true);
        }
        sync_cube();
        let digit = comptime!(d.units as u32 - 1) - unit as u32;
        let count = bins.get(digit as usize, true);
        let (before, _) = before_and_all(count, partial, step, sums);
        // All have read their counts.
        bins.clear(digit as usize, true);
        if before < left && before + count >= left {
            found[0] = digit;
            found[1] = before;
            found[2] = count;
        }
        sync_cube();
        low += found[0] << shift;
        // Of the last digit the difference is what is left: no sum leaves 32 bits.
        high = low + min(high - low, (1u32 << shift) - 1u32);
        left -= found[1];
        is_found = found[2] == left || shift == 0u32;
        step += 1usize;
    }
    (low, step)
}
