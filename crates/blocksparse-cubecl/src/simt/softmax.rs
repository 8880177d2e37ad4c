//! The online softmax of a unit's rows: the forward kernel's state in registers, and the outputs from it.

use cubecl::prelude::*;

use super::gather::load_four;
use super::product::*;
use super::tile::*;
use crate::shared::addressing::*;
use crate::shared::row_tile::Combine;
use crate::shared::score::{LOW, LOWEST_MAX};

/// Softmax state of the unit's rows.
#[derive(CubeType)]
pub struct Softmax<A: Float> {
    /// Largest score of the steps so far. After the rows are stored, the lse, or 0 in a row without keys.
    pub m: Array<A>,
    /// Sum of weights over the unit's columns.
    l: Array<A>,
    /// The unit's vectors of the weighted sum of values.
    pub o: Array<Vector<A, Four>>,
    /// Largest score, if it is written.
    top: Array<A>,
    /// Difference to the running maximum above which scores are skipped.
    threshold: A,
}

#[cube]
impl<A: Float> Softmax<A> {
    /// Returns the state before the first step.
    pub fn begin(threshold: &ComptimeOption<InputScalar>, #[comptime] t: Tile) -> Softmax<A> {
        let rows = comptime!(t.unit_rows);
        let fours = comptime!(rows * t.unit_fours(t.value_dim));
        let mut m = Array::<A>::new(rows);
        let mut l = Array::<A>::new(rows);
        let mut o = Array::<Vector<A, Four>>::new(fours);
        #[unroll]
        for i in 0..rows {
            m[i] = A::new(LOWEST_MAX);
            l[i] = A::new(0.0);
        }
        #[unroll]
        for i in 0..fours {
            o[i] = Vector::<A, Four>::zeroed();
        }
        let tops = comptime!(if t.max_scores { rows } else { 0 });
        let mut top = Array::<A>::new(comptime!(tops.max(1)));
        #[unroll]
        for i in 0..tops {
            top[i] = A::new(LOWEST_MAX);
        }
        let threshold = if comptime!(t.score.threshold) {
            threshold.as_ref().unwrap().get::<A>()
        } else {
            A::new(0.0)
        };
        Softmax::<A> {
            m,
            l,
            o,
            top,
            threshold,
        }
    }

    /// Continues from an earlier part of the pattern, whose result is in the outputs. It equals a softmax state with maximum lse and sum 1. All rows are
    /// read at once; past the end of the sequence, its last row is read.
    pub fn carry_on<E: Float, N: Size>(
        &mut self,
        outputs: &ForwardOutputs<Vector<E, N>, A>,
        own: &UnitRows,
        unit: &Unit,
        #[comptime] t: Tile,
    ) {
        let rows = comptime!(t.unit_rows);
        let unit_fours = comptime!(t.unit_fours(t.value_dim));
        let width = N::value();
        let mut logs = Array::<A>::new(rows);
        #[unroll]
        for i in 0..rows {
            let row = own.span.first + i * own.span.step;
            let at = own.first + row.min(own.len - 1);
            logs[i] = select(row < own.len, outputs.lse[at], A::new(LOW));
            #[unroll]
            for f in 0..unit_fours {
                self.o[comptime!(i * unit_fours + f)] = load_four::<E, A, N>(
                    &outputs.out[..],
                    at * comptime!(t.value_dim / width),
                    unit.x + comptime!(f * t.units_x),
                    t.value_dim,
                );
            }
        }
        #[unroll]
        for i in 0..rows {
            let kept = logs[i] > A::new(LOWEST_MAX);
            self.m[i] = select(kept, logs[i], self.m[i]);
            // Only one unit of a row adds it, since l is summed over the units of a row.
            self.l[i] = select(kept && unit.x == 0, A::new(1.0), A::new(0.0));
            #[unroll]
            for f in 0..unit_fours {
                if !kept {
                    self.o[comptime!(i * unit_fours + f)] = Vector::<A, Four>::zeroed();
                }
            }
        }
    }

    /// Adds the scores of a step. Its weights, times the dropout factors, go to shared memory. Returns whether there are any weights to multiply. The
    /// result is the same for all units of a row, and false if a threshold skips all of their scores.
    pub fn step(
        &mut self,
        s: &Array<A>,
        kept: &Array<A>,
        p_tile: &mut Shared<[Vector<A, Four>]>,
        scratch: &mut Shared<[A]>,
        unit: &Unit,
        #[comptime] t: Tile,
    ) -> bool {
        let rows = comptime!(t.unit_rows);
        let mut largest = Array::<A>::new(rows);
        #[unroll]
        for i in 0..rows {
            let a = s[comptime!(4 * i)].max(s[comptime!(4 * i + 1)]);
            let b = s[comptime!(4 * i + 2)].max(s[comptime!(4 * i + 3)]);
            largest[i] = a.max(b);
        }
        reduce_rows(&mut largest, scratch, unit, Combine::Max, t);
        if comptime!(t.max_scores) {
            #[unroll]
            for i in 0..rows {
                self.top[i] = self.top[i].max(largest[i]);
            }
        }
        let counts = self.counts(&largest, t);
        if counts {
            self.weigh(s, &largest, kept, p_tile, unit, t);
        }
        counts
    }

    /// Whether the largest score of any row is within the threshold of its running maximum.
    fn counts(&self, largest: &Array<A>, #[comptime] t: Tile) -> bool {
        if comptime!(t.score.threshold) {
            let mut near = false.runtime();
            #[unroll]
            for i in 0..comptime!(t.unit_rows) {
                near = near || self.m[i] - largest[i] <= self.threshold;
            }
            near
        } else {
            true.runtime()
        }
    }

    /// Computes weights from scores, given the rows' largest ones, and rescales the state.
    fn weigh(
        &mut self,
        s: &Array<A>,
        largest: &Array<A>,
        kept: &Array<A>,
        p_tile: &mut Shared<[Vector<A, Four>]>,
        unit: &Unit,
        #[comptime] t: Tile,
    ) {
        let rows = comptime!(t.unit_rows);
        let unit_fours = comptime!(t.unit_fours(t.value_dim));
        #[unroll]
        for i in 0..rows {
            let next = self.m[i].max(largest[i]);
            let shrink = (self.m[i] - next).exp();
            self.m[i] = next;
            let mut p = Vector::<A, Four>::zeroed();
            #[unroll]
            for j in 0..4usize {
                p.insert(j, (s[comptime!(4 * i + j)] - next).exp());
            }
            self.l[i] = self.l[i] * shrink
                + (p.extract(0usize) + p.extract(1usize) + (p.extract(2usize) + p.extract(3usize)));
            #[unroll]
            for f in 0..unit_fours {
                self.o[comptime!(i * unit_fours + f)] *= Vector::new(shrink);
            }
            if comptime!(t.score.dropout) {
                #[unroll]
                for j in 0..4usize {
                    p.insert(j, p.extract(j) * kept[comptime!(4 * i + j)]);
                }
            }
            p_tile[(unit.y * rows + i) * comptime!(t.weight_pitch()) + unit.x] = p;
        }
    }

    /// Writes the rows of the outputs.
    pub fn store<E: Float, N: Size>(
        &mut self,
        outputs: &mut ForwardOutputs<Vector<E, N>, A>,
        own: &UnitRows,
        neg_infinity: &InputScalar,
        scratch: &mut Shared<[A]>,
        unit: &Unit,
        #[comptime] t: Tile,
    ) {
        let rows = comptime!(t.unit_rows);
        let dim = comptime!(t.value_dim);
        let width = N::value();
        reduce_rows(&mut self.l, scratch, unit, Combine::Sum, t);
        #[unroll]
        for i in 0..rows {
            let row = own.span.first + i * own.span.step;
            let at = own.first + row;
            let mut inverse = A::new(0.0);
            let mut log = neg_infinity.get::<A>();
            if self.l[i] > A::new(0.0) {
                inverse = A::new(1.0) / self.l[i];
                log = self.m[i] + self.l[i].ln();
            }
            if row < own.len {
                let target = at * comptime!(dim / width);
                store_row::<E, A, N>(
                    &mut outputs.out[..],
                    target,
                    &self.o,
                    inverse,
                    unit,
                    i,
                    dim,
                    t,
                );
                if unit.x == 0 {
                    outputs.lse[at] = log;
                    if comptime!(t.max_scores) {
                        let max_scores = outputs.max_scores.as_mut().unwrap();
                        let mut most = self.top[i];
                        if comptime!(t.carry) {
                            most = most.max(max_scores[at]);
                        }
                        // True if this part and earlier ones have no keys.
                        let none = most <= A::new(LOWEST_MAX);
                        max_scores[at] = select(none, neg_infinity.get::<A>(), most);
                    }
                }
            }
            // Used for weights `exp(s − log)`. In rows without keys those are 0, since all their pairs are masked.
            self.m[i] = select(self.l[i] > A::new(0.0), log, A::new(0.0));
        }
    }
}
