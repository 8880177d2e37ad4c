//! dQ of the fused backward pass: what a loop over columns adds to the sums of a group of tiles, and dQ from the sums of all groups.

use std::cmp::Reverse;

use cubecl::prelude::*;

use super::gather::{load_four, store_four};
use super::product::bounded;
use super::tile::*;
use crate::shared::addressing::*;
use blocksparse::plan::EMPTY;

/// How the fours of a step's dQ, `[columns, head_dim]`, are dealt to units: neighbours have neighbouring fours of a row.
#[derive(Clone, Copy)]
struct Deal {
    /// Units side by side.
    lanes: usize,
    /// Fours of a row that a unit has, `lanes` apart.
    fours: usize,
    /// Rows of units: a power of two, as `lanes`.
    groups: usize,
    /// Fours of columns that a unit has, `groups` apart.
    columns: usize,
}

impl Deal {
    /// The one that leaves the fewest units without work, and of those the one that reads least.
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

    /// Fours of a unit.
    fn len(&self) -> usize {
        4 * self.columns * self.fours
    }
}

/// Tiles of a group that is one of as many as the grid is wide. The tiles of a head, those with most steps first, are dealt to the groups
/// to and fro, so that groups have the same work.
#[cube]
pub fn rounds_of(group: usize, tiles: usize) -> usize {
    let groups = CUBE_COUNT_X as usize;
    let mut rounds = tiles / groups;
    if rank_of(group, rounds) < tiles {
        rounds += 1;
    }
    rounds
}

/// The rank of a group's tile of a round.
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

/// Waits for all units of the cube. In a fused pass a step may add to rows to which other units have added before.
#[cube]
pub fn sync_step(#[comptime] t: Tile) {
    sync_cube();
    // A single entry has the same rows for the same units in every step.
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

/// The first of a unit's fours of columns.
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

/// Whether a unit has columns, and the four `f` of its own is one of a row.
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

/// Whether the entry of a four of columns is one of the tile's: what fills up a step may name the queries of another entry.
#[cube]
fn is_kept(plan: &PlanWords, entry: usize, column: usize, #[comptime] t: Tile) -> bool {
    let mut kept = true.runtime();
    if comptime!(t.entries() > 1) {
        let index = column * 4 / comptime!(t.group);
        kept = plan.words[entry + index * comptime!(t.entry_words()) + 1] != comptime!(EMPTY);
    }
    kept
}

/// The `i`-th four of columns of a unit.
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

/// A four of the sums.
#[derive(CubeType, Clone, Copy)]
struct Place {
    at: usize,
    exists: bool,
}

/// The unit's `f`-th four of the row of column `j` of four, those of a head beginning at row `first` and being `len`.
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

/// The sums of the unit's part of a step's dQ, `[columns, fours]`, those of a head beginning at row `first`; 0 beyond its `len` rows.
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

/// `dq += dsᵀ · keys`, the unit's part of it, from ds `[keys, columns]` and the tile's own rows.
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

/// Writes what [`read`] has read and [`add_product`] added to.
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

/// dQ, `[rows, dim]`: the sums of all groups, in order, scaled; with `carry` added to what is there. A unit has a four of a row.
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
