//! Sums of pair records by key, see [`spread`](crate::kernels::listed::spread).

use cubecl::prelude::*;

use blocksparse_cubecl::arch::ptx::{Half, pack, unpack};
use blocksparse_cubecl::shared::addressing::Four;

/// Number of units of a cube.
pub const UNITS: usize = 128;

/// Records of a chunk of queries, and whether other chunks precede or follow it.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub struct Gathered {
    /// Number of keys over all KV heads.
    pub rows: usize,
    /// Number of keys of a KV head.
    pub keys: usize,
    /// Number of words of a key's bits.
    pub words: usize,
    /// Maximum number of records of a KV head.
    pub room: usize,
    /// 1 for the first chunk.
    pub begins: u32,
    /// 1 for the last chunk.
    pub ends: u32,
}

/// Adds a key's records in order to `sums`, and in the last chunk to its gradients. A unit has eight elements of a key. `firsts` come from
/// [`pair_places`](blocksparse_cubecl::on_device::pair_places); `sums` are `[lists · keys, pieces, 8]`; `grad_k` and `grad_v` are contiguous vectors of 16
/// bytes.
#[cube(launch_unchecked)]
pub fn gather(
    records: &[Vector<u32, Four>],
    firsts: &[u32],
    sums: &mut [Vector<f32, Four>],
    grad_k: &mut [Vector<u32, Four>],
    grad_v: &mut [Vector<u32, Four>],
    of: Gathered,
    #[comptime] widths: [usize; 2],
    #[comptime] half: Half,
) {
    let pieces = comptime!((widths[0] + widths[1]) / 8);
    let unit = ABSOLUTE_POS;
    let row = unit / pieces;
    let piece = unit % pieces;
    if row < of.rows {
        let at = row * (of.words + 1);
        let list = row / of.keys * of.room;
        let mut place = list + firsts[at] as usize;
        let end = list + firsts[at + of.words] as usize;
        if place < end || of.begins != 0u32 || of.ends != 0u32 {
            let mut low = Vector::<f32, Four>::zeroed();
            let mut high = Vector::<f32, Four>::zeroed();
            if of.begins == 0u32 {
                low = sums[unit * 2];
                high = sums[unit * 2 + 1];
            }
            // Four loads are in flight at a time; they are added in order.
            while place + 4 <= end {
                let mut four = Array::<Vector<u32, Four>>::new(4usize);
                #[unroll]
                for i in 0..4usize {
                    four[i] = records[(place + i) * pieces + piece];
                }
                #[unroll]
                for i in 0..4usize {
                    low += numbers(four[i], false, half);
                    high += numbers(four[i], true, half);
                }
                place += 4;
            }
            while place < end {
                let words = records[place * pieces + piece];
                low += numbers(words, false, half);
                high += numbers(words, true, half);
                place += 1;
            }
            if of.ends == 0u32 {
                sums[unit * 2] = low;
                sums[unit * 2 + 1] = high;
            } else if piece < comptime!(widths[0] / 8) {
                let at = row * comptime!(widths[0] / 8) + piece;
                let there = grad_k[at];
                grad_k[at] = packed(low, high, there, half);
            } else {
                let at = row * comptime!(widths[1] / 8) + piece - comptime!(widths[0] / 8);
                let there = grad_v[at];
                grad_v[at] = packed(low, high, there, half);
            }
        }
    }
}

/// Unpacks the first or the last four of eight elements.
#[cube]
fn numbers(
    words: Vector<u32, Four>,
    #[comptime] last: bool,
    #[comptime] half: Half,
) -> Vector<f32, Four> {
    let mut four = Vector::<f32, Four>::zeroed();
    #[unroll]
    for i in 0..4usize {
        let word = words.extract(comptime!(if last { 2 + i / 2 } else { i / 2 }));
        four.insert(i, unpack(word, comptime!(i % 2 == 1), half));
    }
    four
}

/// Adds sums to packed elements.
#[cube]
fn packed(
    low: Vector<f32, Four>,
    high: Vector<f32, Four>,
    there: Vector<u32, Four>,
    #[comptime] half: Half,
) -> Vector<u32, Four> {
    let mut words = Vector::<u32, Four>::zeroed();
    let before = numbers(there, false, half);
    let behind = numbers(there, true, half);
    #[unroll]
    for i in 0..2usize {
        let (first, second) = (comptime!(2 * i), comptime!(2 * i + 1));
        words.insert(
            i,
            pack(
                low.extract(first) + before.extract(first),
                low.extract(second) + before.extract(second),
                half,
            ),
        );
        words.insert(
            comptime!(2 + i),
            pack(
                high.extract(first) + behind.extract(first),
                high.extract(second) + behind.extract(second),
                half,
            ),
        );
    }
    words
}
