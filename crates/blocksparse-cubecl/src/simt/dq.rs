//! dQ of the fused backward pass: a loop over columns adds to the sums of a group of tiles, and a second kernel adds the sums of all groups.

use std::cmp::Reverse;

use cubecl::prelude::*;

use super::gather::{load_four, store_four};
use super::product::bounded;
use super::tile::*;
use crate::shared::addressing::*;
use blocksparse::plan::EMPTY;

/// Distribution of a step's dQ, `[columns, head_dim]`, over units, in vectors of four. Neighbouring units have neighbouring vectors of a row.
#[derive(Clone, Copy)]
struct Deal {
    /// Units along a row, a power of two.
    lanes: usize,
    /// Vectors per unit in a row, `lanes` apart.
    fours: usize,
    /// Rows of units, a power of two.
    groups: usize,
    /// Groups of four columns per unit, `groups` apart.
    columns: usize,
}

impl Deal {
    /// Returns the distribution with the fewest idle units, and among those the fewest reads.
    fn new(t: &Tile) -> Self {
        let row = fours(t.head_dim);
        let most = t.units().min(row.next_power_of_two());
        let deals = (0..=most.ilog2()).map(|log| {
            let lanes = 1 << log;
            let groups = t.units() / lanes;
            Self {
                lanes,
                fours: row.div_ceil(lanes),
                groups,
                columns: t.units_x.div_ceil(groups),
            }
        });
        let cost = |deal: &Self| {
            let products = deal.fours * deal.columns;
            (products, deal.fours + deal.columns, Reverse(deal.lanes))
        };
        deals.min_by_key(cost).expect("there is a unit")
    }

    /// Vectors of four per unit.
    fn len(&self) -> usize {
        4 * self.columns * self.fours
    }
}

/// Returns the number of tiles of a group. There are as many groups as the grid is wide. The tiles of a head, those with most steps first, are distributed
/// over the groups in alternating order, which balances their work.
#[cube]
pub fn rounds_of(group: usize, tiles: usize) -> usize {
    let groups = CUBE_COUNT_X as usize;
    let mut rounds = tiles / groups;
    if rank_of(group, rounds) < tiles {
        rounds += 1;
    }
    rounds
}

/// Returns the rank of a group's tile in a round.
#[cube]
pub fn rank_of(group: usize, round: usize) -> usize {
    let groups = CUBE_COUNT_X as usize;
    let mut place = group;
    if round % 2 == 1 {
        place = groups - 1 - group;
    }
    round * groups + place
}

/// Sets the sums of `rows` rows from row `first` on to 0.
#[cube]
pub fn clear<A: Float>(
    sums: &mut ComptimeOption<Box<[Vector<A, Four>]>>,
    first: usize,
    rows: usize,
    #[comptime] t: Tile,
) {
    let row = comptime!(fours(t.head_dim));
    let mut at = first * row + UNIT_POS_X as usize;
    let end = (first + rows) * row;
    while at < end {
        sums.as_mut().unwrap()[at] = Vector::<A, Four>::zeroed();
        at += comptime!(t.units());
    }
    sync_storage();
}

/// Waits for all units of the cube. In a fused pass, a step may add to rows to which other units have added before.
#[cube]
pub fn sync_step(#[comptime] t: Tile) {
    sync_cube();
    // With a single entry, a row belongs to the same unit in every step.
    if comptime!(t.fused && t.entries() > 1) {
        sync_storage();
    }
}

/// Sets the unit's ds of a step to 0.
#[cube]
pub fn clear_rows<A: Float>(ds: &mut Shared<[Vector<A, Four>]>, unit: &Unit, #[comptime] t: Tile) {
    #[unroll]
    for i in 0..comptime!(t.unit_rows) {
        let row = unit.y * comptime!(t.unit_rows) + i;
        ds[row * comptime!(t.weight_pitch()) + unit.x] = Vector::<A, Four>::zeroed();
    }
}

/// Returns the first of a unit's groups of four columns.
#[cube]
fn first_column(#[comptime] t: Tile) -> usize {
    let deal = comptime!(Deal::new(&t));
    let mut first = UNIT_POS_X as usize / comptime!(deal.lanes);
    // Units beyond the last column repeat it, and write nothing.
    if comptime!(deal.groups > t.units_x) {
        first = first.min(comptime!(t.units_x - 1));
    }
    first
}

/// Whether a unit has columns, and its vector `f` is within the row.
#[cube]
fn has_four(#[comptime] f: usize, #[comptime] t: Tile) -> bool {
    let deal = comptime!(Deal::new(&t));
    let mut has = true.runtime();
    if comptime!(deal.groups > t.units_x) {
        has = UNIT_POS_X as usize / comptime!(deal.lanes) < comptime!(t.units_x);
    }
    if comptime!(deal.lanes * (f + 1) > fours(t.head_dim)) {
        let four = UNIT_POS_X as usize % comptime!(deal.lanes) + comptime!(f * deal.lanes);
        has = has && four < comptime!(fours(t.head_dim));
    }
    has
}

/// Whether the entry of a group of four columns belongs to the tile. Padding entries of a step may repeat the queries of another entry.
#[cube]
fn is_kept(plan: &PlanWords, entry: usize, column: usize, #[comptime] t: Tile) -> bool {
    let mut kept = true.runtime();
    if comptime!(t.entries() > 1) {
        let index = column * 4 / comptime!(t.group);
        kept = plan.words[entry + index * comptime!(t.entry_words()) + 1] != comptime!(EMPTY);
    }
    kept
}

/// The `i`-th group of four columns of a unit.
#[derive(CubeType, Clone, Copy)]
struct Columns {
    span: Span,
    kept: bool,
}

#[cube]
fn columns(plan: &PlanWords, entry: usize, #[comptime] i: usize, #[comptime] t: Tile) -> Columns {
    let deal = comptime!(Deal::new(&t));
    let column = first_column(t) + comptime!(i * deal.groups);
    Columns {
        span: column_span(plan, entry, column, t),
        kept: is_kept(plan, entry, column, t),
    }
}

/// Location of a vector of the sums.
#[derive(CubeType, Clone, Copy)]
struct Place {
    at: usize,
    exists: bool,
}

/// Returns the location of the unit's vector `f` in the row of column `j` of four. The rows of the head begin at row `first` and are `len`.
#[cube]
fn four_of(
    columns: &Columns,
    first: usize,
    len: usize,
    #[comptime] j: usize,
    #[comptime] f: usize,
    #[comptime] t: Tile,
) -> Place {
    let deal = comptime!(Deal::new(&t));
    let query = columns.span.first + j * columns.span.step;
    let four = UNIT_POS_X as usize % comptime!(deal.lanes) + comptime!(f * deal.lanes);
    Place {
        at: (first + query) * comptime!(fours(t.head_dim)) + four,
        exists: columns.kept && query < len && has_four(f, t),
    }
}

/// Reads the sums of the unit's part of a step's dQ, `[columns, fours]`, with 0 beyond the head's `len` rows. The rows of the head begin at row `first`.
#[cube]
pub fn read<A: Float>(
    sums: &ComptimeOption<Box<[Vector<A, Four>]>>,
    first: usize,
    len: usize,
    plan: &PlanWords,
    entry: usize,
    #[comptime] t: Tile,
) -> Array<Vector<A, Four>> {
    let deal = comptime!(Deal::new(&t));
    let mut dq = Array::<Vector<A, Four>>::new(comptime!(deal.len()));
    #[unroll]
    for i in 0..comptime!(deal.columns) {
        let columns = columns(plan, entry, i, t);
        #[unroll]
        for j in 0..4usize {
            #[unroll]
            for f in 0..comptime!(deal.fours) {
                let at = comptime!((4 * i + j) * deal.fours + f);
                dq[at] = Vector::<A, Four>::zeroed();
                let its = four_of(&columns, first, len, j, f, t);
                if its.exists {
                    dq[at] = sums.as_ref().unwrap()[its.at];
                }
            }
        }
    }
    dq
}

/// Adds the unit's part of `dsᵀ · keys` to `dq`, with ds `[keys, columns]` and the tile's own rows.
#[cube]
pub fn add_product<A: Float>(
    ds: &Shared<[Vector<A, Four>]>,
    keys: &Shared<[Vector<A, Four>]>,
    dq: &mut Array<Vector<A, Four>>,
    #[comptime] t: Tile,
) {
    let deal = comptime!(Deal::new(&t));
    let row = comptime!(fours(t.head_dim));
    let pitch = comptime!(pitch(t.head_dim));
    let weight_pitch = comptime!(t.weight_pitch());
    let together = comptime!(if t.rows < 4 { t.rows } else { 4 });
    let lane = UNIT_POS_X as usize % comptime!(deal.lanes);
    let column = first_column(t);
    for first in range_stepped(0usize, t.rows, together) {
        let keys_at = bounded(first * pitch + lane, comptime!(t.rows * pitch));
        let ds_at = bounded(
            first * weight_pitch + column,
            comptime!(t.rows * weight_pitch),
        );
        #[unroll]
        for next in 0..together {
            let mut rhs = Array::<Vector<A, Four>>::new(deal.fours);
            #[unroll]
            for f in 0..comptime!(deal.fours) {
                let mut at = keys_at + comptime!(next * pitch + f * deal.lanes);
                if comptime!(deal.lanes * (f + 1) > row) {
                    let four = lane + comptime!(f * deal.lanes);
                    at = (first + next) * pitch + four.min(comptime!(row - 1));
                }
                rhs[f] = keys[at];
            }
            #[unroll]
            for i in 0..comptime!(deal.columns) {
                let lhs = ds[ds_at + comptime!(next * weight_pitch + i * deal.groups)];
                #[unroll]
                for j in 0..4usize {
                    #[unroll]
                    for f in 0..comptime!(deal.fours) {
                        dq[comptime!((4 * i + j) * deal.fours + f)] +=
                            Vector::new(lhs.extract(j)) * rhs[f];
                    }
                }
            }
        }
    }
}

/// Writes back what [`read`] returned, after [`add_product`].
#[cube]
pub fn write<A: Float>(
    sums: &mut ComptimeOption<Box<[Vector<A, Four>]>>,
    dq: &Array<Vector<A, Four>>,
    first: usize,
    len: usize,
    plan: &PlanWords,
    entry: usize,
    #[comptime] t: Tile,
) {
    let deal = comptime!(Deal::new(&t));
    #[unroll]
    for i in 0..comptime!(deal.columns) {
        let columns = columns(plan, entry, i, t);
        #[unroll]
        for j in 0..4usize {
            #[unroll]
            for f in 0..comptime!(deal.fours) {
                let its = four_of(&columns, first, len, j, f, t);
                if its.exists {
                    sums.as_mut().unwrap()[its.at] = dq[comptime!((4 * i + j) * deal.fours + f)];
                }
            }
        }
    }
}

/// Computes dQ, `[rows, dim]`, as the scaled sum over all groups in order. With `carry` it is added to the present values. A unit has a vector of four of a
/// row.
#[cube(launch_unchecked, address_type = "dynamic")]
pub fn finish<E: Float, A: Float, N: Size>(
    sums: &[Vector<A, Four>],
    out: &mut [Vector<E, N>],
    rows: usize,
    groups: usize,
    scale: InputScalar,
    #[comptime] dim: usize,
    #[comptime] carry: bool,
    #[define(E, A)] _types: [ElemType; 2],
) {
    let fours = comptime!(fours(dim));
    let width = N::value();
    let elements = rows * fours;
    let at = ABSOLUTE_POS;
    if at < elements {
        let mut sum = sums[at];
        for group in 1..groups {
            sum += sums[group * elements + at];
        }
        sum *= Vector::new(scale.get::<A>());
        let (row, four) = (at / fours * comptime!(dim / width), at % fours);
        if comptime!(carry) {
            sum += load_four::<E, A, N>(&out[..], row, four, dim);
        }
        store_four::<E, A, N>(out, row, four, sum, dim);
    }
}
