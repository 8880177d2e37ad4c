//! The generator of [`Dropout`](crate::Dropout), Philox, as kernels run it.

use cubecl::prelude::*;

use crate::dropout::{MULTIPLIERS, ROUNDS, WEYL};

/// The generator's key, and what keeps a pair.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub struct Mask {
    /// Lower half of the seed.
    pub seed_low: u32,
    /// Its upper half.
    pub seed_high: u32,
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
