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

/// Queries and keys of a name.
pub type Planted = (&'static str, Vec<f64>, Vec<f64>);

/// What is planted: topics, needles and streams.
pub fn structures() -> [Planted; 3] {
    [topics(), needles(), streams()]
}

/// Blocks of four topics, to which both queries and keys lean.
fn topics() -> Planted {
    let lean = |i: usize, c: usize| uniform(2, 0, mix((i / BLOCK) as u32) as usize % 4, c);
    let q = rows(HEADS, |h, i, c| uniform(0, h, i, c) + 1.5 * lean(i, c));
    let k = rows(1, |_, i, c| uniform(1, 0, i, c) + lean(i, c));
    ("topics", q, k)
}

/// One key that all queries of a block look for.
fn needles() -> Planted {
    let needle = |head: usize, block: usize| match block {
        0 => None,
        _ => Some(mix((100 + 16 * head + block) as u32) as usize % (BLOCK * block)),
    };
    let q = rows(HEADS, |head, i, c| {
        let wanted = needle(head, i / BLOCK).map_or(0.0, |j| uniform(3, 0, j, c));
        uniform(0, head, i, c) + 1.5 * wanted
    });
    let is_needle = |i: usize| {
        let mut all = (0..HEADS).flat_map(|head| (1..16).map(move |block| (head, block)));
        all.any(|(head, block)| needle(head, block) == Some(i))
    };
    let found: Vec<f64> = (0..ROWS).map(|i| f64::from(is_needle(i)) * 2.0).collect();
    let k = rows(1, |_, i, c| {
        uniform(1, 0, i, c) + found[i] * uniform(3, 0, i, c)
    });
    ("needles", q, k)
}

/// A few keys that all look for, and a few distances.
fn streams() -> Planted {
    let q = rows(HEADS, |head, i, c| {
        let behind = [1, 2, 130, 131].into_iter().filter(|x| *x <= i);
        let behind: f64 = behind.map(|x| uniform(4, 0, i - x, c)).sum();
        uniform(0, head, i, c) + uniform(5, 0, 0, c) + 1.8 * behind
    });
    let k = rows(1, |_, i, c| {
        let is_sink = [0, 1, 2, 300, 301, 500].contains(&i);
        let sink = f64::from(is_sink) * 2.0 * uniform(5, 0, 0, c);
        uniform(1, 0, i, c) + uniform(4, 0, i, c) + sink
    });
    ("streams", q, k)
}
