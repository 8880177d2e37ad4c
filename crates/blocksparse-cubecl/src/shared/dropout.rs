//! The generator of [`Dropout`](blocksparse::Dropout), Philox, and its comparison with the threshold in kernels.
//!
//! A counter yields eight numbers. Bit `j` of each of its 16 bytes belongs to number `j`, so a few logical operations compare all eight at once, bit by
//! bit, and leave the results as the bits of a byte. Tensor-core tiers compare four counters at a time, and exchange bits with the lanes that need them.

use cubecl::prelude::*;

use crate::arch::ptx::{bytes_of, multiply_wide, rotate, trade};
use blocksparse::internal::{MULTIPLIERS, ROUNDS, WEYL, last_kept};

/// The generator's key and threshold.
#[derive(CubeType, CubeLaunch)]
pub struct Mask {
    /// Lower half of the seed, or its index in `table`.
    pub seed_low: u32,
    /// Upper half of the seed.
    pub seed_high: u32,
    /// Words of a table of seeds.
    pub table: ComptimeOption<Box<[u32]>>,
    /// Bits of the largest number that is kept, for the comparison with the first word of a counter.
    pub last0: u32,
    /// For the second word.
    pub last1: u32,
    /// For the third word.
    pub last2: u32,
    /// For the fourth word.
    pub last3: u32,
}

/// Dropout of weights as kernel arguments.
#[derive(CubeType, CubeLaunch)]
pub struct DropoutArgs<F: CubeType + LaunchArg> {
    /// The generator's key and threshold.
    pub mask: Mask,
    /// Factor of the weights that are kept.
    pub factor: F,
}

/// Returns the arguments of a seed, given as its halves or as an index in a table, and of a threshold.
pub fn mask_launch(
    [low, high]: [u32; 2],
    table: ComptimeOptionArgs<Box<[u32]>>,
    threshold: u32,
) -> MaskLaunch {
    let [last0, last1, last2, last3] = last_kept(threshold);
    MaskLaunch::new(low, high, table, last0, last1, last2, last3)
}

/// Both halves of a 64-bit product.
#[derive(CubeType, Clone, Copy)]
struct Product {
    high: u32,
    low: u32,
}

/// Multiplies. PTX has one instruction for both halves.
#[cube]
fn product(x: u32, #[comptime] factor: u32, #[comptime] ptx: bool) -> Product {
    if comptime!(ptx) {
        let both = multiply_wide(x, factor.runtime());
        Product {
            high: both.extract(1usize),
            low: both.extract(0usize),
        }
    } else {
        let factor = u32::new(comptime!(factor as i64));
        Product {
            high: factor.mul_hi(x),
            low: factor * x,
        }
    }
}

#[derive(CubeType, Clone, Copy)]
struct Key {
    low: u32,
    high: u32,
}

#[cube]
fn key_of(mask: &Mask) -> Key {
    let mut low = mask.seed_low;
    let mut high = mask.seed_high;
    #[comptime]
    match mask.table.as_ref() {
        ComptimeOption::Some(table) => {
            low = table[mask.seed_low as usize];
            high = table[mask.seed_low as usize + 1];
        }
        ComptimeOption::None => {}
    }
    Key { low, high }
}

/// Results of the comparison over the four bits in the same byte of each word: one bit per number. `above` has the numbers greater than the largest kept
/// one.
#[derive(CubeType, Clone, Copy)]
pub struct Compared {
    above: u32,
    /// Numbers that differ from it.
    differs: u32,
}

#[cube]
fn compare(w0: u32, w1: u32, w2: u32, w3: u32, mask: &Mask) -> Compared {
    // The lowest bit comes first. A higher one overrides it if it differs.
    let differs0 = w0 ^ mask.last0;
    let differs1 = w1 ^ mask.last1;
    let differs2 = w2 ^ mask.last2;
    let differs3 = w3 ^ mask.last3;
    let above = decide(differs1, w1, w0 & differs0);
    let above = decide(differs2, w2, above);
    Compared {
        above: decide(differs3, w3, above),
        differs: differs0 | differs1 | differs2 | differs3,
    }
}

/// Selects `high` where bits differ, and `low` elsewhere.
#[cube]
fn decide(differs: u32, high: u32, low: u32) -> u32 {
    low ^ (differs & (low ^ high))
}

/// Returns which numbers of a counter keep their pairs, one bit each from bit 0 on.
#[cube]
pub fn kept_eight(mask: &Mask, batch: u32, head: u32, query: u32, eight: u32) -> u32 {
    kept_of(&numbers_of(mask, batch, head, query, eight, false))
}

/// Compares a counter's numbers, in PTX and without loops.
#[cube]
pub fn compared_eight(mask: &Mask, batch: u32, head: u32, query: u32, eight: u32) -> Compared {
    numbers_of(mask, batch, head, query, eight, true)
}

/// Joins the results of the four bytes.
#[cube]
fn kept_of(compared: &Compared) -> u32 {
    // Bytes 1 and 3 get the results of pairs of bytes, then the last byte the result of both pairs.
    let above = decide(compared.differs, compared.above, compared.above << 8);
    let differs = compared.differs | (compared.differs << 8);
    (decide(differs, above, above << 16) >> 24) ^ 255
}

/// Generates and compares a counter's numbers.
#[cube]
fn numbers_of(
    mask: &Mask,
    batch: u32,
    head: u32,
    query: u32,
    eight: u32,
    #[comptime] ptx: bool,
) -> Compared {
    let key = key_of(mask);
    let mut k0 = key.low;
    let mut k1 = key.high;
    let mut c0 = eight;
    let mut c1 = head;
    let mut c2 = query;
    let mut c3 = batch;
    #[unroll(ptx)]
    for _ in 0..comptime!(ROUNDS) {
        let product0 = product(c0, comptime!(MULTIPLIERS[0]), ptx);
        let product1 = product(c2, comptime!(MULTIPLIERS[1]), ptx);
        c0 = product1.high ^ c1 ^ k0;
        c1 = product1.low;
        c2 = product0.high ^ c3 ^ k1;
        c3 = product0.low;
        k0 += u32::new(comptime!(WEYL[0] as i64));
        k1 += u32::new(comptime!(WEYL[1] as i64));
    }
    compare(c0, c1, c2, c3, mask)
}

/// Returns 1 if a pair is kept, else 0. Uses one number of its counter.
#[cube]
pub fn keeps_one(mask: &Mask, batch: u32, head: u32, query: u32, key: u32) -> u32 {
    (kept_of(&compared_eight(mask, batch, head, query, key / 8)) >> (key % 8)) & 1
}

/// Returns results of no counter.
#[cube]
pub fn nothing_compared() -> Compared {
    Compared {
        above: 0u32,
        differs: 0u32,
    }
}

/// Joins bytes of two counters' results: two bytes each.
#[cube]
pub fn two_compared(a: &Compared, b: &Compared) -> Compared {
    let differs = bytes_of(a.differs, b.differs, true);
    Compared {
        above: decide(
            differs,
            bytes_of(a.above, b.above, true),
            bytes_of(a.above, b.above, false),
        ),
        differs: differs | bytes_of(a.differs, b.differs, false),
    }
}

/// Returns which numbers of two times two counters keep their pairs, one byte per counter.
#[cube]
pub fn kept_eights(ab: &Compared, cd: &Compared) -> u32 {
    let above = decide(
        bytes_of(ab.differs, cd.differs, true),
        bytes_of(ab.above, cd.above, true),
        bytes_of(ab.above, cd.above, false),
    );
    above ^ u32::new(0xffff_ffffi64)
}

/// Exchanges bits between lanes so that each lane gets those of its own pairs. A lane has rows `g` and `g + 8` of 16, `g = lane / 4`, and columns
/// `8 n + 2 t` and the next, `t = lane mod 4`, in groups `n` of eight columns. Before, byte `c` of a lane has the results of the counter of
///
/// ```text
/// rows are queries    key group 2 c + t / 2, query of row g + 8 · (t mod 2)
/// rows are keys       keys of the eight rows from 8 · (g / 2 mod 2) on, query of column 8 · (2 c + g / 4) + 2 t + g mod 2
/// ```
///
/// After, it has those of its own pairs: bit `4 n + 2 · (row of two) + column of two`. Each step swaps a bit of the lane index with one of the bit index.
#[cube]
pub fn collect(dealt: u32, lane: u32, #[comptime] columns: bool) -> u32 {
    let mut bits = dealt;
    if comptime!(columns) {
        bits = swap(bits, lane, 16u32, 4u32, 0x0f0f_0f0fu32);
        bits = swap(bits, lane, 8u32, 2u32, 0x3333_3333u32);
        bits = swap(bits, lane, 4u32, 1u32, 0x5555_5555u32);
    } else {
        bits = swap(bits, lane, 2u32, 4u32, 0x0f0f_0f0fu32);
        bits = swap(bits, lane, 1u32, 2u32, 0x3333_3333u32);
    }
    bits
}

/// Swaps bit `distance` of the lane index with bit `shift` of the bit index. `low` masks the bits whose index has the latter clear.
#[cube]
fn swap(
    bits: u32,
    lane: u32,
    #[comptime] distance: u32,
    #[comptime] shift: u32,
    #[comptime] low: u32,
) -> u32 {
    let upper = lane & distance != 0u32;
    let own = select(upper, comptime!(!low).runtime(), low.runtime());
    let turn = select(upper, comptime!(32 - shift).runtime(), shift.runtime());
    let other = rotate(trade(bits, distance), turn);
    decide(own, bits, other)
}
