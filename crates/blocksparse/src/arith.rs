//! Greatest common divisor, least common multiple and a 64-bit hash.

/// Returns the greatest common divisor. `gcd(0, n)` is `n`.
pub(crate) fn gcd(a: i64, b: i64) -> i64 {
    if b == 0 { a } else { gcd(b, a % b) }
}

/// Returns the least common multiple, or `None` if it does not fit.
pub(crate) fn lcm(a: usize, b: usize) -> Option<usize> {
    (a / gcd(a as i64, b as i64) as usize).checked_mul(b)
}

/// Computes one step of SplitMix64 (Steele et al., 2014).
pub(crate) fn split_mix(state: u64) -> u64 {
    let z = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}
