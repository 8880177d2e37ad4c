//! Arithmetic on periods.

/// The greatest common divisor; that of 0 and a number is the number.
pub(crate) fn gcd(a: i64, b: i64) -> i64 {
    if b == 0 { a } else { gcd(b, a % b) }
}

/// The least common multiple; `None` if it does not fit.
pub(crate) fn lcm(a: usize, b: usize) -> Option<usize> {
    (a / gcd(a as i64, b as i64) as usize).checked_mul(b)
}
