//! Recomputation of a step's weights, and the gradients of its scores: `ds = p ∘ (dp − delta)`.

use cubecl::prelude::*;

use super::mask::weight_place;
use super::score::*;
use super::tile::*;
use crate::shared::addressing::*;
use crate::shared::biases::BiasStrides;

/// lse and delta of a unit's queries, which are its rows or its columns.
#[derive(CubeType)]
pub struct QueryStats<A: Float> {
    lse: Array<A>,
    delta: Array<A>,
}

/// Loads the stats of a head with `len` queries. Zeros beyond the last query, or if these positions are not queries.
#[cube]
pub fn query_stats<A: Float>(
    stats: &[A],
    span: &Span,
    head_row: usize,
    len: usize,
    #[comptime] count: usize,
    #[comptime] are_queries: bool,
) -> QueryStats<A> {
    let mut lse = Array::<A>::new(count);
    let mut delta = Array::<A>::new(count);
    #[unroll]
    for i in 0..count {
        lse[i] = A::new(0.0);
        delta[i] = A::new(0.0);
        if comptime!(are_queries) {
            let query = span.first + i * span.step;
            if query < len {
                let at = (head_row * len + query) * 2;
                lse[i] = stats[at];
                delta[i] = stats[at + 1];
            }
        }
    }
    QueryStats::<A> { lse, delta }
}

/// Returns the value of row `i` or of column `j`, whichever is the query.
#[cube]
fn query_value<A: Float>(
    rows: &Array<A>,
    cols: &Array<A>,
    #[comptime] i: usize,
    #[comptime] j: usize,
    #[comptime] t: Tile,
) -> A {
    if comptime!(t.columns()) {
        cols[j]
    } else {
        rows[i]
    }
}

/// Locations of a unit's stored weights.
#[derive(CubeType, Clone, Copy)]
pub struct StoredPlaces {
    /// First block of the head.
    pub first: usize,
    /// Word of the step's first entry.
    pub entry: usize,
    /// The unit's first row, and its index along the columns.
    pub row: usize,
    pub unit_x: usize,
}

/// Weights of a unit's pairs of a step, `[unit_rows · 4]`.
#[derive(CubeType)]
pub struct PairWeights<A: Float> {
    /// Weights before dropout.
    p: Array<A>,
    /// With a softcap, its derivative `1 − (s / softcap)²`.
    slope: Array<A>,
}

#[cube]
fn no_weights<A: Float>(#[comptime] t: Tile) -> PairWeights<A> {
    let pairs = comptime!(t.unit_rows * 4);
    PairWeights::<A> {
        p: Array::<A>::new(pairs),
        slope: Array::<A>::new(comptime!(if t.score.softcap { pairs } else { 1 })),
    }
}

/// Returns stored weights. `biases` are subtracted to recover the softcapped scores, for the derivative of the softcap.
#[cube]
pub fn stored_weights<A: Float>(
    weights: &ComptimeOption<Box<[A]>>,
    plan: &PlanWords,
    places: &StoredPlaces,
    biases: &Array<A>,
    rows: &QueryStats<A>,
    cols: &QueryStats<A>,
    of_head: &HeadScores<A>,
    #[comptime] t: Tile,
) -> PairWeights<A> {
    let weights = weights.as_ref().unwrap();
    let between = comptime!(if t.columns() { t.store.unwrap() } else { 1 });
    let inverse = A::new(1.0) / of_head.softcap;
    let mut pairs = no_weights::<A>(t);
    #[unroll]
    for i in 0..comptime!(t.unit_rows) {
        let row = places.row + i;
        let at = weight_place(plan, places.first, places.entry, row, places.unit_x, t);
        #[unroll]
        for j in 0..4usize {
            let index = comptime!(4 * i + j);
            pairs.p[index] = A::new(0.0);
            if at.kept {
                pairs.p[index] = weights[at.element + comptime!(j * between)];
            }
            if comptime!(t.score.softcap) {
                let weight = pairs.p[index];
                let mut s = weight.ln() + query_value(&rows.lse, &cols.lse, i, j, t);
                if comptime!(t.score.biased()) {
                    s -= biases[index];
                }
                let capped = s * inverse;
                let slope = A::new(1.0) - capped * capped;
                pairs.slope[index] = select(weight > A::new(0.0), slope, A::new(0.0));
            }
        }
    }
    pairs
}

/// Computes `p = exp(s − lse)` of products. It is 0 for pairs that `bits` masks.
#[cube]
pub fn weights_of_products<A: Float>(
    s: &mut Array<A>,
    biases: &Array<A>,
    rows: &QueryStats<A>,
    cols: &QueryStats<A>,
    of_head: &HeadScores<A>,
    masked: bool,
    bits: u32,
    #[comptime] t: Tile,
) -> PairWeights<A> {
    let mut pairs = no_weights::<A>(t);
    score(s, of_head, t);
    if comptime!(t.score.softcap) {
        let inverse = A::new(1.0) / of_head.softcap;
        #[unroll]
        for i in 0..comptime!(t.unit_rows * 4) {
            let capped = s[i] * inverse;
            pairs.slope[i] = A::new(1.0) - capped * capped;
        }
    }
    add_biases(s, biases, t);
    #[unroll]
    for i in 0..comptime!(t.unit_rows) {
        #[unroll]
        for j in 0..4usize {
            let index = comptime!(4 * i + j);
            pairs.p[index] = (s[index] - query_value(&rows.lse, &cols.lse, i, j, t)).exp();
        }
    }
    if masked {
        #[unroll]
        for i in 0..comptime!(t.unit_rows * 4) {
            let allowed = (bits >> comptime!(i as u32)) & 1u32 == 1u32;
            pairs.p[i] = select(allowed, pairs.p[i], A::new(0.0));
        }
    }
    pairs
}

#[cube]
impl<A: Float> PairWeights<A> {
    /// Whether any weight of the unit's plane is at least `exp(−threshold)`. Without planes, all units must reach the barriers of a step, so the result is
    /// true, and the weights of a unit that has only low ones become 0.
    pub fn count(&mut self, threshold: &ComptimeOption<InputScalar>, #[comptime] t: Tile) -> bool {
        if comptime!(t.score.threshold) {
            let least = (-threshold.as_ref().unwrap().get::<A>()).exp();
            let mut near = false.runtime();
            #[unroll]
            for i in 0..comptime!(t.unit_rows * 4) {
                near = near || self.p[i] >= least;
            }
            if comptime!(t.planes) {
                plane_any(near)
            } else {
                #[unroll]
                for i in 0..comptime!(t.unit_rows * 4) {
                    self.p[i] = select(near, self.p[i], A::new(0.0));
                }
                true.runtime()
            }
        } else {
            true.runtime()
        }
    }

    /// Returns the weights with dropout, as they multiply values.
    pub fn given(&self, kept: &Array<A>, #[comptime] t: Tile) -> Array<Vector<A, Four>> {
        let mut fours = Array::<Vector<A, Four>>::new(t.unit_rows);
        #[unroll]
        for i in 0..comptime!(t.unit_rows) {
            let mut four = Vector::<A, Four>::zeroed();
            #[unroll]
            for j in 0..4usize {
                let index = comptime!(4 * i + j);
                let mut weight = self.p[index];
                if comptime!(t.score.dropout) {
                    weight *= kept[index];
                }
                four.insert(j, weight);
            }
            fours[i] = four;
        }
        fours
    }

    /// Returns the gradients of scores. For a bias, without the softcap's derivative.
    pub fn gradients(
        &self,
        dp: &Array<A>,
        kept: &Array<A>,
        rows: &QueryStats<A>,
        cols: &QueryStats<A>,
        #[comptime] t: Tile,
    ) -> Array<Vector<A, Four>> {
        let mut fours = Array::<Vector<A, Four>>::new(t.unit_rows);
        #[unroll]
        for i in 0..comptime!(t.unit_rows) {
            let mut four = Vector::<A, Four>::zeroed();
            #[unroll]
            for j in 0..4usize {
                let index = comptime!(4 * i + j);
                let delta = query_value(&rows.delta, &cols.delta, i, j, t);
                let mut by_weight = dp[index];
                if comptime!(t.score.dropout) {
                    by_weight *= kept[index];
                }
                let mut ds = self.p[index] * (by_weight - delta);
                if comptime!(t.score.softcap && !t.bias_gradient) {
                    ds *= self.slope[index];
                }
                four.insert(j, ds);
            }
            fours[i] = four;
        }
        fours
    }
}

/// Writes the unit's rows of a step to shared memory.
#[cube]
pub fn put_rows<A: Float>(
    target: &mut Shared<[Vector<A, Four>]>,
    rows: &Array<Vector<A, Four>>,
    unit: &Unit,
    #[comptime] t: Tile,
) {
    #[unroll]
    for i in 0..comptime!(t.unit_rows) {
        let row = unit.y * comptime!(t.unit_rows) + i;
        target[row * comptime!(t.weight_pitch()) + unit.x] = rows[i];
    }
}

/// Adds a step's gradients to the sums per key. The unit's rows are keys.
#[cube]
pub fn add_rows<A: Float>(sums: &mut Array<A>, ds: &Array<Vector<A, Four>>, #[comptime] t: Tile) {
    #[unroll]
    for i in 0..comptime!(t.unit_rows) {
        #[unroll]
        for j in 0..4usize {
            sums[i] += ds[i].extract(j);
        }
    }
}

/// Adds a step's gradients to those of a bias, pair by pair. Pairs that are not computed have weight 0; their positions may duplicate others.
#[cube]
pub fn add_pairs<A: Float>(
    gradient: &mut ComptimeOption<Box<[A]>>,
    pairs: &PairWeights<A>,
    ds: &Array<Vector<A, Four>>,
    positions: &Positions,
    of_head: &HeadScores<A>,
    strides: &BiasStrides,
    #[comptime] t: Tile,
) {
    #[unroll]
    for i in 0..comptime!(t.unit_rows) {
        #[unroll]
        for j in 0..4usize {
            if pairs.p[comptime!(4 * i + j)] > A::new(0.0) {
                let pair = pair_at(positions, i, j, t);
                let at = of_head.bias_start + pair.query * strides.row + pair.key;
                gradient.as_mut().unwrap()[at] += ds[i].extract(j);
            }
        }
    }
}

/// Adds the sums per key to the gradient of a bias whose row all queries share, from element `first` on.
#[cube]
pub fn add_keys<A: Float>(
    gradient: &mut ComptimeOption<Box<[A]>>,
    sums: &Array<A>,
    first: usize,
    positions: &Positions,
    keys: usize,
    unit: &Unit,
    #[comptime] t: Tile,
) {
    #[unroll]
    for i in 0..comptime!(t.unit_rows) {
        let key = positions.rows[i];
        if unit.x == 0 && key < keys {
            gradient.as_mut().unwrap()[first + key] += sums[i];
        }
    }
}
