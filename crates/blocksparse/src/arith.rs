//! Arithmetic on periods, and a hash.

/// The greatest common divisor; that of 0 and a number is the number.
pub(crate) fn gcd(a: i64, b: i64) -> i64 {
    if b == 0 { a } else { gcd(b, a % b) }
}

/// The least common multiple; `None` if it does not fit.
pub(crate) fn lcm(a: usize, b: usize) -> Option<usize> {
    (a / gcd(a as i64, b as i64) as usize).checked_mul(b)
}

/// One step of SplitMix64 (Steele et al., 2014).
pub(crate) fn split_mix(state: u64) -> u64 {
    let z = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}
