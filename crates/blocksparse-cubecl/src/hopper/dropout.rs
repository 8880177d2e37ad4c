//! Dropout of weights: the mask of [`Dropout`](blocksparse::Dropout) as bits, recomputed in every step, one for each of the unit's [pairs](super::options).

use cubecl::prelude::*;

use super::base::Base;
use super::options::{HeadOptions, PairArgs, UnitRows, position_at};
use crate::arch::sm90::*;
use crate::call::ScoreKind;
use crate::shared::addressing::PlanWords;
use crate::shared::dropout::{
    Compared, Mask, collect, compared_eight, keeps_one, kept_eights, two_compared,
};

/// Returns which of the unit's pairs are kept: bit `n mod 32` of word `n / 32` is that of its number `n`.
#[cube]
pub fn kept_pairs(
    args: &ComptimeOption<PairArgs>,
    of_head: &HeadOptions,
    rows: &UnitRows,
    plan: &PlanWords,
    entry: usize,
    #[comptime] t: Base,
) -> Array<u32> {
    let mut kept = Array::<u32>::new(comptime!(if t.score.dropout { t.cols / 64 } else { 1 }));
    if comptime!(t.score.dropout) {
        let mask = &args.as_ref().unwrap().pairs.mask;
        #[unroll]
        for word in 0..comptime!(t.cols / 64) {
            let first = comptime!(64 * word);
            kept[word] = if comptime!(t.residue) {
                each_pair(mask, of_head, rows, plan, entry, first, t)
            } else {
                shared_pairs(mask, of_head, rows, &plan.words[..], entry, first, t)
            };
        }
    }
    kept
}

/// Returns the bits of the unit's pairs in 64 columns from `first` on, one by one, because no two of their keys share a counter.
#[cube]
fn each_pair(
    mask: &Mask,
    of_head: &HeadOptions,
    rows: &UnitRows,
    plan: &PlanWords,
    entry: usize,
    #[comptime] first: usize,
    #[comptime] t: Base,
) -> u32 {
    let mut bits = 0u32;
    let quad = unit() % 4 * 2;
    for eight in 0..8u32 {
        let group = comptime!(t.group as u32);
        let col = comptime!(first as u32) + 8 * eight;
        let at = entry + (col / group * comptime!(t.entry_words() as u32)) as usize;
        let first = position_at(
            plan.words[at] * group + col % group,
            &plan.listing,
            t.residue,
        );
        for i in 0..4u32 {
            let row = select(i < 2, rows.upper, rows.lower);
            let col = first + (quad + i % 2) * plan.listing.stride as u32;
            let mut query = row;
            let mut key = col;
            if comptime!(t.columns()) {
                query = col;
                key = row;
            }
            bits |= keeps_one(mask, of_head.batch, of_head.head, query, key) << (4 * eight + i);
        }
    }
    bits
}

/// Returns the bits of the unit's pairs in 64 columns from `first` on. In a loop over rows, four lanes share the counters of two rows. In a loop over
/// columns, eight lanes share those of two groups of eight keys. Each lane computes four of the counters ([`collect`]).
#[cube]
fn shared_pairs(
    mask: &Mask,
    of_head: &HeadOptions,
    rows: &UnitRows,
    plan: &[u32],
    entry: usize,
    #[comptime] first: usize,
    #[comptime] t: Base,
) -> u32 {
    let lane = unit() % 32;
    let ab = two_dealt(mask, of_head, rows, plan, entry, first, lane, t);
    let col = comptime!(first + 32);
    let cd = two_dealt(mask, of_head, rows, plan, entry, col, lane, t);
    collect(kept_eights(&ab, &cd), lane, comptime!(t.columns()))
}

/// Computes and compares the lane's counters of 32 columns from `col` on.
#[cube]
fn two_dealt(
    mask: &Mask,
    of_head: &HeadOptions,
    rows: &UnitRows,
    plan: &[u32],
    entry: usize,
    #[comptime] col: usize,
    lane: u32,
    #[comptime] t: Base,
) -> Compared {
    let a = dealt(mask, of_head, rows, plan, entry, col, lane, t);
    let col = comptime!(col + 16);
    let b = dealt(mask, of_head, rows, plan, entry, col, lane, t);
    two_compared(&a, &b)
}

/// Computes and compares the lane's counter of 16 columns from `col` on.
#[cube]
fn dealt(
    mask: &Mask,
    of_head: &HeadOptions,
    rows: &UnitRows,
    plan: &[u32],
    entry: usize,
    #[comptime] col: usize,
    lane: u32,
    #[comptime] t: Base,
) -> Compared {
    let mut side = lane / 2 % 2;
    if comptime!(t.columns()) {
        side = lane / 16;
    }
    let mut at = entry + comptime!(col / t.group * t.entry_words());
    let mut within = 0u32;
    if comptime!(t.group < 16) {
        at += (side * comptime!(t.entry_words() as u32)) as usize;
    } else {
        within = comptime!((col % t.group) as u32) + side * 8;
    }
    let place = plan[at] * comptime!(t.group as u32) + within;
    if comptime!(t.columns()) {
        let query = place + lane % 4 * 2 + lane / 4 % 2;
        let key = select(lane & 8 != 0, rows.lower, rows.upper);
        compared_eight(mask, of_head.batch, of_head.head, query, key / 8)
    } else {
        let query = select(lane & 1 != 0, rows.lower, rows.upper);
        compared_eight(mask, of_head.batch, of_head.head, query, place / 8)
    }
}

/// Whether a unit's number `n` is kept.
#[cube]
pub fn is_kept(kept: &Array<u32>, #[comptime] n: usize) -> bool {
    kept[comptime!(n / 32)] & comptime!(1u32 << (n % 32)) != 0
}

/// Zeros the dropped weights. The dropout factor is applied to the sums at the end.
#[cube]
pub fn drop_out<S: Size>(
    p_in: Vector<f32, S>,
    kept: &Array<u32>,
    #[comptime] score: ScoreKind,
) -> Vector<f32, S> {
    let mut p = p_in;
    if comptime!(score.dropout) {
        #[unroll]
        for n in 0..S::value() {
            p.insert(n, select(is_kept(kept, n), p.extract(n), f32::new(0.0)));
        }
    }
    p
}

/// Rotates the bits by one, for [`drop_gradient`]. If the same word were tested twice, compilers would keep 32 predicates from the first test to the
/// second, packing and unpacking them on the way.
#[cube]
pub fn kept_again(kept: &Array<u32>, #[comptime] t: Base) -> Array<u32> {
    let words = comptime!(if t.score.dropout { t.cols / 64 } else { 1 });
    let mut turned = Array::<u32>::new(words);
    if comptime!(t.score.dropout) {
        #[unroll]
        for word in 0..words {
            turned[word] = rotate(kept[word], 1u32);
        }
    }
    turned
}

/// Computes `factor · dp − delta`, which is `−delta` for dropped pairs. `turned` has the bits of [`kept_again`].
#[cube]
pub fn drop_gradient(
    dp: f32,
    delta: f32,
    turned: &Array<u32>,
    args: &ComptimeOption<PairArgs>,
    #[comptime] n: usize,
    #[comptime] score: ScoreKind,
) -> f32 {
    let mut difference = dp - delta;
    if comptime!(score.dropout) {
        let bit = turned[comptime!(n / 32)] & comptime!((1u32 << (n % 32)).rotate_left(1));
        let factor = select(bit != 0, factor_of(args, score), f32::new(0.0));
        difference = multiply_add(dp, factor, -delta);
    }
    difference
}

/// Returns the factor of the weights that dropout keeps.
#[cube]
pub fn factor_of(args: &ComptimeOption<PairArgs>, #[comptime] score: ScoreKind) -> f32 {
    let mut factor = f32::new(1.0);
    if comptime!(score.dropout) {
        factor = args.as_ref().unwrap().pairs.factor;
    }
    factor
}
