//! Recomputation of a step's weights, `p = exp2(s · log2_scale − lse)`, and the gradients of its scores, `ds = p ∘ (dp − delta)`.

use cubecl::prelude::*;

use super::backward_loads::Loads;
use super::dropout::if_kept;
use super::tile::*;
use crate::arch::sm80::*;
use crate::shared::addressing::Four;
use crate::shared::own_rows::own_place;
use crate::shared::score::ScoreScalars;

/// lse and delta of the queries of a step. Only for queries that are rows; in a loop over columns they are in shared memory.
#[derive(CubeType)]
pub struct QueryStats {
    lse: Array<f32>,
    delta: Array<f32>,
}

/// Loads the stats of the unit's rows, if they are queries, in the head of the cube.
#[cube]
pub fn row_stats(
    stats: &[f32],
    plan: &[u32],
    loads: &Loads,
    outer: u32,
    rows: u32,
    first_row: u32,
    #[comptime] t: Tile,
) -> QueryStats {
    let count = comptime!(2 * t.warp_tiles);
    let mut lse = Array::<f32>::new(count);
    let mut delta = Array::<f32>::new(count);
    #[unroll]
    for i in 0..count {
        lse[i] = f32::new(0.0);
        delta[i] = f32::new(0.0);
        if comptime!(!t.columns()) {
            let row = first_row + comptime!(i as u32 * ROW_PAIR);
            let place = own_place(plan, rows, row, comptime!(t.own_shape()));
            if place < loads.pitch {
                // Computed here, because otherwise registers would keep it until the end.
                let first = (loads.batch * loads.heads + outer) * loads.pitch;
                let at = (first + place) as usize * 2;
                lse[i] = stats[at];
                delta[i] = stats[at + 1];
            }
        }
    }
    QueryStats { lse, delta }
}

/// Returns lse and delta of the unit's two columns in the `n`-th group of eight: first column, then second.
#[cube]
fn column_stats(stats: u32, #[comptime] n: usize, #[comptime] t: Tile) -> Vector<f32, Four> {
    let mut four = Vector::<f32, Four>::zeroed();
    if comptime!(t.columns()) {
        four = shared_load_four(stats + comptime!(n as u32 * 64));
    }
    four
}

/// Returns the derivative of the softcap, `1 − (s / softcap)²`, if scores are capped.
#[cube]
pub fn cap_slopes(
    s: &Array<Vector<f32, Four>>,
    softcap: f32,
    #[comptime] t: Tile,
) -> Array<Vector<f32, Four>> {
    let fours = comptime!(t.warp_tiles * t.eights());
    let mut slopes =
        Array::<Vector<f32, Four>>::new(comptime!(if t.score.softcap { fours } else { 1 }));
    if comptime!(t.score.softcap) {
        let inverse = Vector::new(reciprocal(softcap));
        #[unroll]
        for n in 0..fours {
            let ratio = s[n] * inverse;
            slopes[n] = Vector::new(1.0f32) - ratio * ratio;
        }
    }
    slopes
}

/// Turns scores into weights. `stats` is the address of the stats of a step's columns.
#[cube]
pub fn weigh(
    s: &mut Array<Vector<f32, Four>>,
    of_rows: &QueryStats,
    stats: u32,
    log2_scale: f32,
    #[comptime] t: Tile,
) {
    let eights = comptime!(t.eights());
    #[unroll]
    for n in 0..eights {
        let of_columns = column_stats(stats, n, t);
        #[unroll]
        for m in 0..comptime!(t.warp_tiles) {
            let at = comptime!(m * eights + n);
            let mut four = s[at];
            #[unroll]
            for i in 0..4usize {
                let mut log = of_rows.lse[comptime!(2 * m + i / 2)];
                if comptime!(t.columns()) {
                    log = of_columns.extract(comptime!(i % 2 * 2));
                }
                let power = multiply_add(four.extract(i), log2_scale, -log);
                four.insert(i, exp2(power));
            }
            s[at] = four;
        }
    }
}

/// Whether any of the warp's weights is at least `exp(−threshold)`.
#[cube]
pub fn weights_count(
    p: &Array<Vector<f32, Four>>,
    numbers: &ScoreScalars,
    #[comptime] t: Tile,
) -> bool {
    if comptime!(t.score.threshold) {
        let mut most = f32::new(0.0);
        #[unroll]
        for n in 0..comptime!(t.warp_tiles * t.eights()) {
            #[unroll]
            for i in 0..4usize {
                most = larger(most, p[n].extract(i));
            }
        }
        let near = most >= exp2(-numbers.threshold.unwrap());
        above_any(select(near, 1u32, 0u32)) != 0
    } else {
        true.runtime()
    }
}

/// Turns gradients of weights into gradients of scores. With dropout, only `kept` weights have one. For a bias, without the softcap's derivative.
#[cube]
pub fn gradients_of_scores(
    dp: &mut Array<Vector<f32, Four>>,
    p: &Array<Vector<f32, Four>>,
    of_rows: &QueryStats,
    stats: u32,
    kept: &Array<u32>,
    dropout_factor: f32,
    slopes: &Array<Vector<f32, Four>>,
    #[comptime] t: Tile,
) {
    let eights = comptime!(t.eights());
    #[unroll]
    for n in 0..eights {
        let of_columns = column_stats(stats, n, t);
        #[unroll]
        for m in 0..comptime!(t.warp_tiles) {
            let at = comptime!(m * eights + n);
            let mut four = dp[at];
            let p = p[at];
            #[unroll]
            for i in 0..4usize {
                let mut delta = of_rows.delta[comptime!(2 * m + i / 2)];
                if comptime!(t.columns()) {
                    delta = of_columns.extract(comptime!(i % 2 * 2 + 1));
                }
                let mut by_weight = four.extract(i);
                if comptime!(t.score.dropout) {
                    by_weight = if_kept(by_weight * dropout_factor, kept, m, n, i, t);
                }
                four.insert(i, p.extract(i) * (by_weight - delta));
            }
            if comptime!(t.score.softcap && !t.bias_gradient) {
                four *= slopes[at];
            }
            dp[at] = four;
        }
    }
}
