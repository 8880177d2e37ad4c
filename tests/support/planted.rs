//! Numbers that structure is planted in, the same wherever they are computed.

pub const ROWS: usize = 1024;
pub const DIM: usize = 64;
pub const HEADS: usize = 2;
pub const BLOCK: usize = 64;

/// The finaliser of MurmurHash3.
pub fn mix(mut x: u32) -> u32 {
    x ^= x >> 16;
    x = x.wrapping_mul(0x85eb_ca6b);
    x ^= x >> 13;
    x = x.wrapping_mul(0xc2b2_ae35);
    x ^ x >> 16
}

/// A number in [−1, 1) of a place.
pub fn uniform(of: usize, head: usize, i: usize, c: usize) -> f64 {
    let place = ((8 * of + head) * 65_536 + i) * 256 + c;
    f64::from(mix(place as u32) >> 8) / f64::from(1 << 23) - 1.0
}

/// Rows of keys, `[rows][dim]`, or of queries, `[heads][rows][dim]`.
pub fn rows(heads: usize, of: impl Fn(usize, usize, usize) -> f64) -> Vec<f64> {
    let places = (0..heads).flat_map(|head| (0..ROWS).map(move |i| (head, i)));
    let places = places.flat_map(|(head, i)| (0..DIM).map(move |c| (head, i, c)));
    places.map(|(head, i, c)| of(head, i, c)).collect()
}
