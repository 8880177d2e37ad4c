//! The least that is kept of a few very long lines, by several cubes each: a launch finds four bits.
//!
//! A cube adds up the elements of a part of a line by their next digit. The next launch adds up the parts' totals, in every cube of the line and in the same order,
//! so that each knows the digit; the first of them writes what is known by then for the launch after it.

use crate::kernels::rows::blocks::{OnlyLists, numbers_of};
use crate::kernels::selection::digits::{
    BITS, DIGITS, Search, SearchLines, SearchLinesLaunch, add_up, first_reached, wanted_len,
};
use blocksparse_cubecl::prelude::*;

/// Elements of a line from which on it is parted, and of a part.
const PARTED: usize = 1 << 17;
const PART: usize = 1 << 15;

/// The most parts.
const MOST: usize = 32;

/// Launches that find a digit, and one that writes the number.
const DIGIT_PASSES: usize = 32 / BITS as usize;

/// Words that are known of a line: the bits that are found, what numbers above weigh, and what is wanted.
const KNOWN: usize = 3;

/// Whether so many lines of a length have several cubes each: where one each would leave half of the multiprocessors without any.
pub(crate) fn is_parted(client: &Client, [lines, len]: [usize; 2]) -> bool {
    let hardware = &client.properties().hardware;
    let multiprocessors = hardware.num_streaming_multiprocessors.unwrap_or(64) as usize;
    len >= PARTED && 2 * lines <= multiprocessors
}

/// [`least_kept`](crate::kernels::selection::least_kept) of lines `[lines, len]` by a share.
pub(crate) fn digits_of_parts(
    client: &Client,
    (numbers, reach): (&Handle, usize),
    [lines, len]: [usize; 2],
    only: Option<OnlyLists>,
    sizes: impl Fn() -> SearchLinesLaunch,
    search: Search,
    least: &Handle,
) -> Result<(), KernelError> {
    let parts = len.div_ceil(PART).min(MOST);
    let count = lines * parts;
    let totals_len = DIGIT_PASSES * count * DIGITS;
    let known_len = (DIGIT_PASSES + 1) * lines * KNOWN;
    let totals = client.empty(totals_len * size_of::<f32>());
    let known = client.empty(known_len * size_of::<u32>());
    for pass in 0..=DIGIT_PASSES {
        // SAFETY: a cube reads elements of its line, below `len`, and what the launch before wrote; it writes the totals of its own part, and the first of a line
        // what is known, and the least.
        unsafe {
            digit_of_parts::launch_unchecked(
                client,
                spread(client, count as u64)?,
                CubeDim::new_1d(search.tile.lanes as u32),
                address_of(client, reach)?,
                buffer(numbers, reach),
                buffer(&totals, totals_len),
                buffer(&known, known_len),
                buffer(least, lines),
                numbers_of(only),
                sizes(),
                parts,
                pass,
                search,
            );
        }
    }
    Ok(())
}

/// `totals` `[digits, lines, parts, 16]`, `known` `[digits + 1, lines, 3]`, `least` `[lines]`.
#[cube(launch_unchecked, address_type = "dynamic")]
fn digit_of_parts(
    numbers: &[f32],
    totals: &mut [f32],
    known: &mut [u32],
    least: &mut [f32],
    only: ComptimeOption<Box<[f32]>>,
    of: SearchLines,
    parts: usize,
    pass: usize,
    #[comptime] c: Search,
) {
    let units = comptime!(c.tile.lanes);
    // Cubes beyond the last part make it again.
    let at = CUBE_POS.min(of.lines * parts - 1);
    let (line, part) = (at / parts, at % parts);
    let unit = UNIT_POS as usize;
    let mut bins = Shared::<[f32]>::new_slice(comptime!(DIGITS * units));
    let mut sums = Shared::<[f32]>::new_slice(units);
    let mut of_digits = Shared::<[f32]>::new_slice(comptime!(DIGITS));
    let mut low = 0u32.runtime();
    let mut above = 0.0f32.runtime();
    let mut limit = 0.0f32.runtime();
    if pass > 0 {
        let before = (pass - 1) * of.lines + line;
        if unit < comptime!(DIGITS) {
            let mut sum = 0.0f32.runtime();
            for other in 0..parts {
                sum += totals[(before * parts + other) * comptime!(DIGITS) + unit];
            }
            of_digits[unit] = sum;
        }
        sync_cube();
        if pass > 1 {
            let own = before * comptime!(KNOWN);
            low = known[own];
            above = f32::reinterpret(known[own + 1]);
            limit = f32::reinterpret(known[own + 2]);
        } else {
            // The first digits are those of all numbers.
            let mut whole = 0.0f32.runtime();
            #[unroll]
            for digit in 0..comptime!(DIGITS) {
                whole += of_digits[digit];
            }
            limit = of.share * whole;
        }
        let found = first_reached(&of_digits, above, limit);
        above = found.above;
        low |= found.digit << (comptime!(32u32).runtime() - pass as u32 * comptime!(BITS));
        sync_cube();
    }
    if pass < comptime!(DIGIT_PASSES) {
        let len = wanted_len(&only, line, &of, c);
        let each = of.len.div_ceil(parts);
        let from = part * each;
        let shift = comptime!(32 - BITS).runtime() - pass as u32 * comptime!(BITS);
        // All ones above the digit.
        let mut found = 0u32.runtime();
        if pass > 0 {
            found = comptime!(u32::MAX).runtime() << (shift + comptime!(BITS));
        }
        add_up(
            numbers,
            line * of.step,
            from,
            (from + each).min(len),
            low,
            found,
            shift,
            &mut bins,
            &mut sums,
            &mut of_digits,
            c,
        );
        let own = (pass * of.lines + line) * parts + part;
        if unit < comptime!(DIGITS) {
            totals[own * comptime!(DIGITS) + unit] = of_digits[unit];
        }
    }
    if part == 0 && unit == 0 {
        let own = (pass * of.lines + line) * comptime!(KNOWN);
        known[own] = low;
        known[own + 1] = u32::reinterpret(above);
        known[own + 2] = u32::reinterpret(limit);
        if pass == comptime!(DIGIT_PASSES) {
            least[line] = f32::reinterpret(low);
        }
    }
}
