//! The means of what clusters have of a token.
//!
//! A cube has 32 tokens, of which each cluster has a word of flags: whose bits say which of them it has, and where.

use cubecl::prelude::*;

use blocksparse_cubecl::arch::sm90::*;
use blocksparse_cubecl::shared::walk::Four;

/// Tokens of a cube: those of a word.
const TOKENS: usize = 32;

/// Units of a token.
const LANES: usize = 8;

/// Units of a cube.
pub const UNITS: usize = TOKENS * LANES;

/// Clusters that are looked at together: bits of two words.
const CLUSTERS: usize = 64;

/// What is compiled into the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct MeanTile {
    /// The type of the rows.
    pub half: Half,
    /// Numbers of a row, a multiple of 8.
    pub dim: usize,
}

impl MeanTile {
    /// Pieces of 16 bytes that a unit has of a row.
    fn pieces(&self) -> usize {
        (self.dim / 8).div_ceil(LANES)
    }
}

/// `out[token] = Σ rows[place] / count` over the clusters that have the token, 0 if none has. `flags` are words and what lists have before them, as
/// [`highest_flags_of_rows`](crate::kernels::rows::highest::highest_flags_of_rows) writes them; `rows` and `out` are in eights of elements.
#[cube(launch_unchecked)]
pub fn mean(
    rows: &[Vector<u32, Four>],
    flags: &[Vector<u32, Const<2>>],
    out: &mut [Vector<u32, Four>],
    // Words of all lists, of each, clusters of a list, and tokens of a list.
    count: usize,
    words: usize,
    clusters: usize,
    length: usize,
    // Rows of a cluster.
    width: usize,
    #[comptime] t: MeanTile,
) {
    let mut shared = Shared::<[Vector<u32, Const<2>>]>::new_slice(CLUSTERS);
    let unit = UNIT_POS as usize;
    let lanes = comptime!(LANES);
    let (lane, own) = (unit % lanes, (unit / lanes) as u32);
    // Cubes beyond the last word make it again.
    let at = CUBE_POS.min(count - 1);
    let (list, word) = (at / words, at % words);
    let bit = 1u32 << own;
    let eights = comptime!(t.dim / 8);
    let mut sums = Array::<f32>::new(comptime!(8 * t.pieces()));
    #[unroll]
    for i in 0..comptime!(8 * t.pieces()) {
        sums[i] = 0.0f32;
    }
    let mut there = 0u32.runtime();
    let mut from = 0usize.runtime();
    while from < clusters {
        if unit < CLUSTERS {
            let mut two = Vector::<u32, Const<2>>::zeroed();
            if from + unit < clusters {
                two = flags[(list * clusters + from + unit) * words + word];
            }
            shared[unit] = two;
        }
        sync_cube();
        // Each of a token's lanes looks at some clusters.
        let mut low = 0u32.runtime();
        let mut high = 0u32.runtime();
        #[unroll]
        for i in 0..comptime!(CLUSTERS / 2 / LANES) {
            let cluster = comptime!(i * LANES) + lane;
            let has = shared[cluster].extract(0usize) >> own & 1u32;
            low |= has << cluster as u32;
            let has = shared[cluster + comptime!(CLUSTERS / 2)].extract(0usize) >> own & 1u32;
            high |= has << cluster as u32;
        }
        #[unroll]
        for trade in 0..comptime!(LANES.ilog2()) {
            low |= shuffle_word(low, comptime!(1u32 << trade));
            high |= shuffle_word(high, comptime!(1u32 << trade));
        }
        there += low.count_ones() + high.count_ones();
        while (low | high) != 0u32 {
            let in_low = low != 0u32;
            let lowest = select(in_low, low, high).trailing_zeros();
            let cluster = (lowest + select(in_low, 0u32, comptime!(CLUSTERS as u32 / 2))) as usize;
            high = select(in_low, high, high & (high - 1u32));
            low = select(in_low, low & (low - 1u32), 0u32);
            let two = shared[cluster];
            let before = (two.extract(0usize) & (bit - 1u32)).count_ones();
            let place = two.extract(1usize) + before;
            let row = (list * clusters + from + cluster) * width + place as usize;
            #[unroll]
            for piece in 0..comptime!(t.pieces()) {
                let eight = comptime!(piece * LANES) + lane;
                if eight < eights {
                    let four = rows[row * eights + eight];
                    #[unroll]
                    for i in 0..4usize {
                        let at = comptime!(8 * piece + 2 * i);
                        sums[at] += unpack(four.extract(i), false, t.half);
                        sums[comptime!(at + 1)] += unpack(four.extract(i), true, t.half);
                    }
                }
            }
        }
        // Before the next words come.
        sync_cube();
        from += CLUSTERS;
    }
    let share = 1.0f32 / f32::cast_from(max(there, 1u32));
    let token = word * TOKENS + own as usize;
    if token < length {
        #[unroll]
        for piece in 0..comptime!(t.pieces()) {
            let eight = comptime!(piece * LANES) + lane;
            if eight < eights {
                let mut four = Vector::<u32, Four>::zeroed();
                #[unroll]
                for i in 0..4usize {
                    let at = comptime!(8 * piece + 2 * i);
                    four.insert(
                        i,
                        pack(sums[at] * share, sums[comptime!(at + 1)] * share, t.half),
                    );
                }
                out[(list * length + token) * eights + eight] = four;
            }
        }
    }
}

/// A word of another lane, whose number differs in the mask's bits.
#[cube]
fn shuffle_word(x: u32, #[comptime] mask: u32) -> u32 {
    u32::reinterpret(shuffle_xor(f32::reinterpret(x), mask))
}
