//! Dropout of weights: the mask of [`Dropout`](blocksparse::Dropout) as bits, recomputed in every step.
//!
//! A unit has a word per 16 rows and 64 columns of its warp. Bit `4 · (n mod 8) + i` belongs to its number `i` in the `n`-th group of eight columns. The
//! numbers of a counter belong to eight consecutive keys, which several lanes hold. So each lane computes a different counter, and the lanes exchange bits.

use cubecl::prelude::*;

use super::product::pack_left;
use super::tile::*;
use crate::arch::sm80::*;
use crate::shared::addressing::Four;
use crate::shared::dropout::{
    Compared, Mask, collect, compared_eight, keeps_one, kept_eights, nothing_compared, two_compared,
};

/// Groups of eight columns per word.
const WORD_EIGHTS: usize = 8;

/// Words per 16 rows.
fn row_words(t: Tile) -> usize {
    t.eights().div_ceil(WORD_EIGHTS)
}

/// Locations of a step's pairs for dropout.
#[derive(CubeType, Clone, Copy)]
pub struct PairPlaces {
    /// Batch entry.
    pub batch: u32,
    /// Query head.
    pub head: u32,
    /// Address of the position of the unit's first row.
    pub rows: u32,
    /// Address of the position of the step's first column.
    pub cols: u32,
    /// The unit's lane.
    pub lane: u32,
}

/// Returns one bit for each of the unit's pairs of a step that dropout keeps. In a loop over `columns`, rows are keys.
#[cube]
pub fn kept_pairs(mask: &Mask, pairs: &PairPlaces, #[comptime] t: Tile) -> Array<u32> {
    let tiles = comptime!(t.warp_tiles);
    let per_row = comptime!(row_words(t));
    let mut kept = Array::<u32>::new(comptime!(if t.score.dropout { tiles * per_row } else { 1 }));
    if comptime!(t.score.dropout) {
        #[unroll]
        for w in 0..per_row {
            let cols = pairs.cols + comptime!((w * WORD_EIGHTS * 32) as u32);
            let eights = comptime!(t.eights().min(WORD_EIGHTS));
            #[unroll]
            for m in 0..tiles {
                let rows = pairs.rows + comptime!(m as u32 * 64);
                kept[comptime!(m * per_row + w)] = if comptime!(t.residue) {
                    own_bits(mask, pairs, rows, cols, eights, comptime!(t.columns()))
                } else {
                    shared_bits(mask, pairs, rows, cols, eights, comptime!(t.columns()))
                };
            }
        }
    }
    kept
}

/// Returns the bits of the unit's pairs in 16 rows and `eights` groups of eight columns, with keys at arbitrary positions.
#[cube]
fn own_bits(
    mask: &Mask,
    pairs: &PairPlaces,
    rows: u32,
    cols: u32,
    #[comptime] eights: usize,
    #[comptime] columns: bool,
) -> u32 {
    let mut bits = 0u32;
    // Not unrolled, because all groups' bits at once need many registers.
    for n in 0..comptime!(eights as u32) {
        let own_cols = shared_load_pair(cols + n * 32 + pairs.lane % 4 * 8);
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
                let kept = keeps_one(mask, pairs.batch, pairs.head, query, key);
                bits |= kept << (n * 4 + comptime!(2 * i as u32 + j as u32));
            }
        }
    }
    bits
}

/// Returns the bits of the unit's pairs in 16 rows and `eights` groups of eight columns. For every two groups, each lane computes one of the counters that
/// it and its neighbours need ([`collect`]). Eight consecutive places are eight consecutive positions, since blocks are.
#[cube]
fn shared_bits(
    mask: &Mask,
    pairs: &PairPlaces,
    rows: u32,
    cols: u32,
    #[comptime] eights: usize,
    #[comptime] columns: bool,
) -> u32 {
    let ab = two_dealt(mask, pairs, rows, cols, comptime!(eights.min(4)), columns);
    let cd = if comptime!(eights > 4) {
        let eights = comptime!(eights - 4);
        two_dealt(mask, pairs, rows, cols + 128, eights, columns)
    } else {
        nothing_compared()
    };
    collect(kept_eights(&ab, &cd), pairs.lane, columns)
}

/// Computes and compares the lane's counters of two or four groups of eight columns.
#[cube]
fn two_dealt(
    mask: &Mask,
    pairs: &PairPlaces,
    rows: u32,
    cols: u32,
    #[comptime] eights: usize,
    #[comptime] columns: bool,
) -> Compared {
    let a = dealt(mask, pairs, rows, cols, columns);
    let b = if comptime!(eights > 2) {
        dealt(mask, pairs, rows, cols + 64, columns)
    } else {
        nothing_compared()
    };
    two_compared(&a, &b)
}

/// Computes and compares the lane's counter of two groups of eight columns.
#[cube]
fn dealt(
    mask: &Mask,
    pairs: &PairPlaces,
    rows: u32,
    cols: u32,
    #[comptime] columns: bool,
) -> Compared {
    let lane = pairs.lane;
    if comptime!(columns) {
        let key = shared_load(rows - lane / 4 * 4 + lane / 8 % 2 * comptime!(ROW_PAIR * 4));
        let query = shared_load(cols + lane / 16 * 32 + lane % 4 * 8 + lane / 4 % 2 * 4);
        compared_eight(mask, pairs.batch, pairs.head, query, key / 8)
    } else {
        let query = shared_load(rows + lane % 2 * comptime!(ROW_PAIR * 4));
        let key = shared_load(cols + lane / 2 % 2 * 32);
        compared_eight(mask, pairs.batch, pairs.head, query, key / 8)
    }
}

/// Returns `x`, or 0 if dropout removes its pair: number `i` in 16-row tile `m` and group `n` of eight columns.
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

/// Packs the weights that dropout keeps as left operands.
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
