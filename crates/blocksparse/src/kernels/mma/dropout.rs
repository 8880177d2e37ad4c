//! Dropout of weights: the mask of [`Dropout`](crate::Dropout), made again in every step, as bits.
//!
//! A unit keeps a word for each 16 rows and 64 columns of its warp: bit `4 · (n mod 8) + i` is of its number `i` in the `n`-th eight of
//! columns. The words of a Philox counter belong to four keys side by side, which several lanes hold: each lane makes the four of another
//! counter, and bits are exchanged.

use cubecl::prelude::*;

use super::asm::*;
use super::product::pack_left;
use super::tile::*;
use crate::kernels::shared::dropout::{Mask, unrolled_words};
use crate::kernels::shared::walk::Four;

/// Eights of columns whose bits are in one word.
const WORD_EIGHTS: usize = 8;

/// Words of 16 rows.
fn row_words(t: Tile) -> usize {
    t.eights().div_ceil(WORD_EIGHTS)
}

/// What the kept pairs of a step are worked out from.
#[derive(CubeType, Clone, Copy)]
pub struct PairPlaces {
    /// Batch entry.
    pub batch: u32,
    /// Query head.
    pub head: u32,
    /// Where the position of the unit's first row is.
    pub rows: u32,
    /// Where the position of the step's first column is.
    pub cols: u32,
    /// The unit's lane.
    pub lane: u32,
}

/// The bits of the unit's pairs of a step that are kept. In a walk over `columns` rows are keys.
#[cube]
pub fn kept_pairs(
    mask: &Mask,
    pairs: &PairPlaces,
    #[comptime] columns: bool,
    #[comptime] t: Tile,
) -> Array<u32> {
    let tiles = comptime!(t.warp_tiles);
    let per_row = comptime!(row_words(t));
    let mut kept = Array::<u32>::new(comptime!(if t.score.dropout { tiles * per_row } else { 1 }));
    if comptime!(t.score.dropout) {
        #[unroll]
        for w in 0..comptime!(tiles * per_row) {
            kept[w] = 0u32;
        }
        #[unroll]
        for w in 0..per_row {
            // Not unrolled: the bits of all eights at once need many registers.
            for n in 0..comptime!(t.eights().min(WORD_EIGHTS) as u32) {
                let cols = pairs.cols + (n + comptime!((w * WORD_EIGHTS) as u32)) * 32;
                #[unroll]
                for m in 0..tiles {
                    let rows = pairs.rows + comptime!(m as u32 * 64);
                    let bits = if comptime!(t.residue) {
                        own_bits(mask, pairs, rows, cols, columns)
                    } else {
                        dealt_bits(mask, pairs, rows, cols, columns)
                    };
                    let at = comptime!(m * per_row + w);
                    kept[at] |= bits << (n * 4);
                }
            }
        }
        if comptime!(!t.residue) {
            #[unroll]
            for w in 0..comptime!(tiles * per_row) {
                kept[w] = collect(kept[w], pairs.lane, columns);
            }
        }
    }
    kept
}

/// The bits of the unit's four pairs whose keys are anywhere.
#[cube]
fn own_bits(
    mask: &Mask,
    pairs: &PairPlaces,
    rows: u32,
    cols: u32,
    #[comptime] columns: bool,
) -> u32 {
    let mut bits = 0u32;
    let own_cols = shared_load_pair(cols + pairs.lane % 4 * 8);
    #[unroll]
    for i in 0..2usize {
        let row = shared_load(rows + comptime!(i as u32 * ROW_PAIR * 4));
        #[unroll]
        for j in 0..2usize {
            let col = own_cols.extract(j);
            let mut query = row;
            let mut key = col;
            if comptime!(columns) {
                query = col;
                key = row;
            }
            let four = keeps_four(mask, pairs, query, key / 4);
            bits |= ((four >> (key % 4)) & 1u32) << comptime!(2 * i as u32 + j as u32);
        }
    }
    bits
}

/// The bits of the counter that is dealt to the unit, of those that it and its neighbours need. Places of four are positions of four,
/// since blocks are.
///
/// ```text
/// rows of queries: two lanes have two keys each of the four, in rows r and r + 8: a lane makes one of the rows
/// rows of keys:    four lanes have one key each of the four, in rows r and r + 8, for two queries: a lane makes one of the four
/// ```
#[cube]
fn dealt_bits(
    mask: &Mask,
    pairs: &PairPlaces,
    rows: u32,
    cols: u32,
    #[comptime] columns: bool,
) -> u32 {
    let lane = pairs.lane;
    if comptime!(columns) {
        let of_four = lane / 4 % 4;
        let key = shared_load(rows - of_four * 4 + of_four / 2 * comptime!(ROW_PAIR * 4));
        let query = shared_load(cols + lane % 4 * 8 + of_four % 2 * 4);
        keeps_four(mask, pairs, query, key / 4)
    } else {
        let query = shared_load(rows + lane % 2 * comptime!(ROW_PAIR * 4));
        let key = shared_load(cols + lane % 4 / 2 * 16);
        keeps_four(mask, pairs, query, key / 4)
    }
}

/// The unit's own bits of what was dealt: a transposition between neighbours.
#[cube]
fn collect(dealt: u32, lane: u32, #[comptime] columns: bool) -> u32 {
    let mut bits = dealt;
    if comptime!(columns) {
        let other = trade(bits, 4u32);
        bits = select(
            lane & 4u32 == 0u32,
            (bits & 0x5555_5555u32) | ((other & 0x5555_5555u32) << 1),
            (bits & 0xaaaa_aaaau32) | ((other & 0xaaaa_aaaau32) >> 1),
        );
        let other = trade(bits, 8u32);
        bits = select(
            lane & 8u32 == 0u32,
            (bits & 0x3333_3333u32) | ((other & 0x3333_3333u32) << 2),
            (bits & 0xcccc_ccccu32) | ((other & 0xcccc_ccccu32) >> 2),
        );
    } else {
        let other = trade(bits, 1u32);
        bits = select(
            lane & 1u32 == 0u32,
            (bits & 0x3333_3333u32) | ((other & 0x3333_3333u32) << 2),
            (bits & 0xcccc_ccccu32) | ((other & 0xcccc_ccccu32) >> 2),
        );
    }
    bits
}

/// Whether a query and the keys from `4 · four` on are kept, a bit each.
#[cube]
fn keeps_four(mask: &Mask, pairs: &PairPlaces, query: u32, four: u32) -> u32 {
    let words = unrolled_words(mask, pairs.batch, pairs.head, query, four);
    select(words.w0 < mask.threshold, 1u32, 0u32)
        | select(words.w1 < mask.threshold, 2u32, 0u32)
        | select(words.w2 < mask.threshold, 4u32, 0u32)
        | select(words.w3 < mask.threshold, 8u32, 0u32)
}

/// Number `i` of the fours in rows of 16 `m` and the `n`-th eight, or 0 if its pair is not kept.
#[cube]
pub fn if_kept(
    x: f32,
    kept: &Array<u32>,
    #[comptime] m: usize,
    #[comptime] n: usize,
    #[comptime] i: usize,
    #[comptime] t: Tile,
) -> f32 {
    let word = kept[comptime!(m * row_words(t) + n / WORD_EIGHTS)];
    let bit = comptime!(1u32 << (n % WORD_EIGHTS * 4 + i));
    select(word & bit != 0u32, x, f32::new(0.0))
}

/// Weights as left operands, of the pairs that are kept.
#[cube]
pub fn pack_kept(
    s: &Array<Vector<f32, Four>>,
    kept: &Array<u32>,
    #[comptime] t: Tile,
) -> Array<Vector<u32, Four>> {
    if comptime!(t.score.dropout) {
        let mut weights = Array::<Vector<f32, Four>>::new(comptime!(t.warp_tiles * t.eights()));
        #[unroll]
        for m in 0..comptime!(t.warp_tiles) {
            #[unroll]
            for n in 0..comptime!(t.eights()) {
                let at = comptime!(m * t.eights() + n);
                let mut four = s[at];
                #[unroll]
                for i in 0..4usize {
                    four.insert(i, if_kept(four.extract(i), kept, m, n, i, t));
                }
                weights[at] = four;
            }
        }
        pack_left(&weights, t)
    } else {
        pack_left(s, t)
    }
}
