//! The golden input: small values that are exact in any dtype, for externally computed results.

/// Returns a multiple of 1/8: for queries (0), keys (1) or values (2).
pub(crate) fn val(of: usize, head: usize, i: usize, c: usize) -> f64 {
    let sum = 131 * of + 61 * head + 31 * i + 17 * c + 5 * i * c + 7 * i * i;
    ((sum % 23) as f64 - 11.0) / 8.0
}

/// Returns `val` of heads, `[heads][rows][4]`.
pub(crate) fn vals(of: usize, heads: usize, rows: usize) -> Vec<f64> {
    let places = (0..heads).flat_map(|head| (0..rows).map(move |i| (head, i)));
    let places = places.flat_map(|(head, i)| (0..4).map(move |c| (head, i, c)));
    places.map(|(head, i, c)| val(of, head, i, c)).collect()
}
