//! The generator of [`Dropout`](crate::Dropout), Philox, as kernels run it.
//!
//! It is written twice: [`words`] runs on every device, [`unrolled_words`] has the instruction that makes both halves of a product
//! and keeps its four words in registers.

use cubecl::prelude::*;

#[cfg(feature = "cuda-asm")]
use super::asm::multiply_wide;
use crate::dropout::{MULTIPLIERS, ROUNDS, WEYL};

/// The generator's key, and what keeps a pair.
#[derive(CubeType, CubeLaunch)]
pub struct Mask {
    /// Lower half of the seed; of one in a table, where it is there.
    pub seed_low: u32,
    /// Its upper half.
    pub seed_high: u32,
    /// The words of a table of seeds.
    pub table: ComptimeOption<Box<[u32]>>,
    /// Words below it keep their pair.
    pub threshold: u32,
}

/// The words of a query and of the keys from `4 · four` on.
#[cube]
pub fn words(mask: &Mask, batch: usize, head: usize, query: usize, four: usize) -> Array<u32> {
    let mut c0 = u32::cast_from(query);
    let mut c1 = u32::cast_from(four);
    let mut c2 = u32::cast_from(head);
    let mut c3 = u32::cast_from(batch);
    let mut k0 = mask.seed_low;
    let mut k1 = mask.seed_high;
    #[comptime]
    match mask.table.as_ref() {
        ComptimeOption::Some(table) => {
            k0 = table[mask.seed_low as usize];
            k1 = table[mask.seed_low as usize + 1];
        }
        ComptimeOption::None => {}
    }
    for _ in 0..comptime!(ROUNDS) {
        let m0 = u32::new(comptime!(MULTIPLIERS[0] as i64));
        let m1 = u32::new(comptime!(MULTIPLIERS[1] as i64));
        let high0 = m0.mul_hi(c0);
        let low0 = m0 * c0;
        let high1 = m1.mul_hi(c2);
        let low1 = m1 * c2;
        c0 = high1 ^ c1 ^ k0;
        c1 = low1;
        c2 = high0 ^ c3 ^ k1;
        c3 = low0;
        k0 += u32::new(comptime!(WEYL[0] as i64));
        k1 += u32::new(comptime!(WEYL[1] as i64));
    }
    let mut words = Array::<u32>::new(4usize);
    words[0] = c0;
    words[1] = c1;
    words[2] = c2;
    words[3] = c3;
    words
}

/// The four words of a counter.
#[cfg(feature = "cuda-asm")]
#[derive(CubeType, Clone, Copy)]
pub struct Words {
    /// That of the first key.
    pub w0: u32,
    /// Of the second,
    pub w1: u32,
    /// the third
    pub w2: u32,
    /// and the fourth.
    pub w3: u32,
}

/// As [`words`], without loops, for the tensor-core tiers.
#[cfg(feature = "cuda-asm")]
#[cube]
pub fn unrolled_words(mask: &Mask, batch: u32, head: u32, query: u32, four: u32) -> Words {
    let mut c0 = query;
    let mut c1 = four;
    let mut c2 = head;
    let mut c3 = batch;
    let mut k0 = mask.seed_low;
    let mut k1 = mask.seed_high;
    #[comptime]
    match mask.table.as_ref() {
        ComptimeOption::Some(table) => {
            k0 = table[mask.seed_low as usize];
            k1 = table[mask.seed_low as usize + 1];
        }
        ComptimeOption::None => {}
    }
    #[unroll]
    for _ in 0..comptime!(ROUNDS) {
        let product0 = multiply_wide(c0, comptime!(MULTIPLIERS[0]).runtime());
        let product1 = multiply_wide(c2, comptime!(MULTIPLIERS[1]).runtime());
        c0 = product1.extract(1usize) ^ c1 ^ k0;
        c1 = product1.extract(0usize);
        c2 = product0.extract(1usize) ^ c3 ^ k1;
        c3 = product0.extract(0usize);
        k0 += comptime!(WEYL[0]).runtime();
        k1 += comptime!(WEYL[1]).runtime();
    }
    Words {
        w0: c0,
        w1: c1,
        w2: c2,
        w3: c3,
    }
}
