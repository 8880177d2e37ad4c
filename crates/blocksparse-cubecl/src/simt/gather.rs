//! Loads of rows into shared memory.

use cubecl::prelude::*;

use super::tile::*;
use crate::shared::addressing::*;

/// Loads four elements of a row, widened to `A`, with 0 beyond `dim`.
#[cube]
pub fn load_four<E: Float, A: Float, N: Size>(
    source: &[Vector<E, N>],
    row: usize,
    four: usize,
    #[comptime] dim: usize,
) -> Vector<A, Four> {
    let width = N::value();
    let mut value = Vector::<A, Four>::zeroed();
    #[unroll]
    for part in 0..comptime!(4 / width) {
        let piece = four * comptime!(4 / width) + part;
        if piece < comptime!(dim / width) {
            let loaded = source[row + piece];
            #[unroll]
            for i in 0..width {
                value.insert(comptime!(part * width + i), A::cast_from(loaded.extract(i)));
            }
        }
    }
    value
}

/// Stores four elements, narrowed to `E`. `row` is the start of the row in vectors. The reverse of `load_four`.
#[cube]
pub fn store_four<E: Float, A: Float, N: Size>(
    target: &mut [Vector<E, N>],
    row: usize,
    four: usize,
    value: Vector<A, Four>,
    #[comptime] dim: usize,
) {
    let width = N::value();
    #[unroll]
    for part in 0..comptime!(4 / width) {
        let piece = four * comptime!(4 / width) + part;
        if piece < comptime!(dim / width) {
            let mut narrow = Vector::<E, N>::zeroed();
            #[unroll]
            for i in 0..width {
                let element = value.extract(comptime!(part * width + i));
                narrow.insert(i, E::cast_from(element));
            }
            target[row + piece] = narrow;
        }
    }
}

/// Rows of a head in a tensor.
#[derive(CubeType, Clone, Copy)]
pub struct HeadRows {
    /// Start of the first row, in vectors.
    pub base: usize,
    /// Row stride in vectors.
    pub stride: usize,
    /// Number of rows. Rows beyond are read as 0.
    pub len: usize,
}

/// Returns the rows of a head.
#[cube]
pub fn rows_of(strides: &Strides, batch: usize, head: usize) -> HeadRows {
    HeadRows {
        base: batch * strides.batch + head * strides.head,
        stride: strides.row,
        len: strides.len,
    }
}

/// Which rows to load.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Side {
    /// The tile's own rows: see `row_place`.
    Own,
    /// The rows of a step, from its first entry on.
    Gathered,
}

impl Side {
    fn count(self, t: &Tile) -> usize {
        match self {
            Side::Own => t.rows,
            Side::Gathered => t.cols(),
        }
    }
}

/// Rounds whose loads are in flight at once.
const TOGETHER: usize = 4;

/// Distribution of the loaded rows over units, in rounds of vectors of four.
#[derive(Clone, Copy)]
struct Deal {
    /// Vectors per row.
    fours: usize,
    /// Vectors of all rows.
    total: usize,
    rounds: usize,
    together: usize,
    /// Whether every unit has a vector in every round.
    exact: bool,
}

impl Deal {
    fn new(dim: usize, side: Side, t: &Tile) -> Self {
        let fours = fours(dim);
        let total = side.count(t) * fours;
        let rounds = total.div_ceil(t.units());
        let together = rounds.min(TOGETHER);
        Self {
            fours,
            total,
            rounds,
            together,
            exact: total.is_multiple_of(together * t.units()),
        }
    }
}

/// Loads the rows that plan word `first` begins into shared memory. See `slot` for their order.
#[cube]
pub fn load<E: Float, A: Float, N: Size>(
    source: &[Vector<E, N>],
    of: &HeadRows,
    plan: &PlanWords,
    first: usize,
    target: &mut Shared<[Vector<A, Four>]>,
    #[comptime] dim: usize,
    #[comptime] side: Side,
    #[comptime] t: Tile,
) {
    let deal = comptime!(Deal::new(dim, side, &t));
    let (fours, total) = comptime!((deal.fours, deal.total));
    let (rounds, together) = comptime!((deal.rounds, deal.together));
    let exact = comptime!(deal.exact);
    let only = only_span(plan, first, side, t);
    for round in range_stepped(0usize, rounds, together) {
        let mut values = Array::<Vector<A, Four>>::new(together);
        #[unroll]
        for i in 0..together {
            let at = UNIT_POS_X as usize + (round + i) * comptime!(t.units());
            values[i] = Vector::<A, Four>::zeroed();
            if comptime!(exact) || at < total {
                let position = position_in(&only, plan, first, at / fours, side, t);
                values[i] = load_or_zero::<E, A, N>(source, of, position, at % fours, dim);
            }
        }
        #[unroll]
        for i in 0..together {
            let at = UNIT_POS_X as usize + (round + i) * comptime!(t.units());
            if comptime!(exact) || at < total {
                let slot = slot(at / fours, side, t) * comptime!(pitch(dim)) + at % fours;
                target[slot] = values[i];
            }
        }
    }
}

/// Like `load`, for two tensors, whose positions are looked up once if they are equally wide.
#[cube]
pub fn load_both<E: Float, A: Float, N: Size>(
    source1: &[Vector<E, N>],
    source2: &[Vector<E, N>],
    of1: &HeadRows,
    of2: &HeadRows,
    plan: &PlanWords,
    first: usize,
    target1: &mut Shared<[Vector<A, Four>]>,
    target2: &mut Shared<[Vector<A, Four>]>,
    #[comptime] dims: [usize; 2],
    #[comptime] side: Side,
    #[comptime] t: Tile,
) {
    let dim1 = comptime!(dims[0]);
    let dim2 = comptime!(dims[1]);
    let deal = comptime!(Deal::new(dim1, side, &t));
    let (fours, total) = comptime!((deal.fours, deal.total));
    let (rounds, together) = comptime!((deal.rounds, deal.together));
    let exact = comptime!(deal.exact);
    if comptime!(dim1 == dim2) {
        let only = only_span(plan, first, side, t);
        for round in range_stepped(0usize, rounds, together) {
            let mut values1 = Array::<Vector<A, Four>>::new(together);
            let mut values2 = Array::<Vector<A, Four>>::new(together);
            #[unroll]
            for i in 0..together {
                let at = UNIT_POS_X as usize + (round + i) * comptime!(t.units());
                values1[i] = Vector::<A, Four>::zeroed();
                values2[i] = Vector::<A, Four>::zeroed();
                if comptime!(exact) || at < total {
                    let position = position_in(&only, plan, first, at / fours, side, t);
                    let four = at % fours;
                    values1[i] = load_or_zero::<E, A, N>(source1, of1, position, four, dim1);
                    values2[i] = load_or_zero::<E, A, N>(source2, of2, position, four, dim2);
                }
            }
            #[unroll]
            for i in 0..together {
                let at = UNIT_POS_X as usize + (round + i) * comptime!(t.units());
                if comptime!(exact) || at < total {
                    let slot = slot(at / fours, side, t) * comptime!(pitch(dim1)) + at % fours;
                    target1[slot] = values1[i];
                    target2[slot] = values2[i];
                }
            }
        }
    } else {
        load::<E, A, N>(source1, of1, plan, first, target1, dim1, side, t);
        load::<E, A, N>(source2, of2, plan, first, target2, dim2, side, t);
    }
}

/// Returns the positions of entry `index` of a step.
#[cube]
fn entry_span(plan: &PlanWords, first: usize, index: usize, #[comptime] t: Tile) -> Span {
    let word = first + index * comptime!(t.entry_words());
    let place = plan.words[word] as usize * comptime!(t.group);
    span_of(place, &plan.listing, t.residue)
}

/// Returns the positions of a step with a single entry, which are looked up once.
#[cube]
fn only_span(plan: &PlanWords, first: usize, #[comptime] side: Side, #[comptime] t: Tile) -> Span {
    if comptime!(side == Side::Gathered && t.entries() == 1) {
        entry_span(plan, first, 0usize, t)
    } else {
        Span {
            first: 0usize,
            step: 0usize,
        }
    }
}

/// Returns the position of row `row` among those that plan word `first` begins.
#[cube]
fn position_in(
    only: &Span,
    plan: &PlanWords,
    first: usize,
    row: usize,
    #[comptime] side: Side,
    #[comptime] t: Tile,
) -> usize {
    let group = comptime!(t.group);
    if comptime!(side == Side::Own) {
        position_at(row_place(plan, first, row, t), &plan.listing, t)
    } else if comptime!(t.entries() == 1) {
        only.first + row * only.step
    } else {
        let span = entry_span(plan, first, row / group, t);
        span.first + row % group * span.step
    }
}

/// Returns the slot of a row in shared memory. Column `c` of a step is in slot `(c % 4) · units_x + c / 4`, so the four columns of a unit are `units_x`
/// slots apart, and neighbouring units read neighbouring slots.
#[cube]
fn slot(row: usize, #[comptime] side: Side, #[comptime] t: Tile) -> usize {
    if comptime!(side == Side::Own) {
        row
    } else {
        row % 4 * comptime!(t.units_x) + row / 4
    }
}

/// Like [`load_four`], with 0 beyond the last row.
#[cube]
fn load_or_zero<E: Float, A: Float, N: Size>(
    source: &[Vector<E, N>],
    of: &HeadRows,
    position: usize,
    four: usize,
    #[comptime] dim: usize,
) -> Vector<A, Four> {
    let mut value = Vector::<A, Four>::zeroed();
    if position < of.len {
        value = load_four::<E, A, N>(source, of.base + position * of.stride, four, dim);
    }
    value
}
