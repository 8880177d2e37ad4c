//! What the kernels share: the shape of a tile, loads into shared memory, and the two products.

use cubecl::prelude::*;

use crate::plan::Walk;

/// Four numbers: the width of shared memory accesses.
pub type Four = Const<4>;

/// The comptime shape of a kernel: its key in the cache of compiled kernels, so nothing of it depends
/// on sequence lengths or patterns.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Tile {
    /// Rows of a tile.
    pub rows: usize,
    /// Units side by side in a row; each has four columns of a step.
    pub units_x: usize,
    /// Rows of a unit.
    pub unit_rows: usize,
    /// Width of queries and keys.
    pub head_dim: usize,
    /// Width of values.
    pub value_dim: usize,
    /// Consecutive positions an entry names.
    pub group: usize,
    /// Words of a mask's row.
    pub mask_words: usize,
    /// Whether weights are stored, and the block size they are stored in.
    pub store: Option<usize>,
    /// Whether scores are softcapped.
    pub softcap: bool,
    /// Whether scores have ALiBi biases.
    pub alibi: bool,
    /// Whether weights are dropped out.
    pub dropout: bool,
    /// Whether scores have a given bias.
    pub bias: bool,
    /// Whether scores have a bias of each distance.
    pub relative: bool,
    /// Whether the backward kernel makes the bias's gradient, and not that of its inputs.
    pub bias_gradient: bool,
    /// Whether plane operations reduce rows; else shared memory does.
    pub planes: bool,
    /// Whether positions are listed by residue class.
    pub residue: bool,
    /// Whether the kernel carries on from what an earlier part of the pattern left in its outputs.
    pub carry: bool,
    /// Whether the tile's rows are gathered from like blocks.
    pub clustered: bool,
}

impl Tile {
    /// Whether anything depends on the positions of a pair.
    pub fn positions(&self) -> bool {
        self.biased() || self.dropout
    }

    /// Whether anything is added to scores.
    pub fn biased(&self) -> bool {
        self.alibi || self.bias || self.relative
    }

    /// Columns of a step.
    pub fn cols(&self) -> usize {
        4 * self.units_x
    }

    /// Rows of units, a power of two.
    pub fn units_y(&self) -> usize {
        self.rows / self.unit_rows
    }

    /// Units of a cube.
    pub fn units(&self) -> usize {
        self.units_x * self.units_y()
    }

    /// Words of an entry.
    pub fn entry_words(&self) -> usize {
        2 + usize::from(self.store.is_some())
    }

    /// Entries of a step.
    pub fn entries(&self) -> usize {
        self.cols() / self.group
    }

    /// Fours of an output row that one unit owns.
    pub fn unit_fours(&self, dim: usize) -> usize {
        fours(dim).div_ceil(self.units_x)
    }

    /// Whether the halves of a step can be left out.
    pub fn has_halves(&self) -> bool {
        self.planes && self.units_x > 1
    }

    /// Fours between two rows of the weights in shared memory.
    pub fn weight_pitch(&self) -> usize {
        self.units_x | 1
    }
}

/// Fours of a row.
pub fn fours(dim: usize) -> usize {
    dim.div_ceil(4)
}

/// Fours between two rows in shared memory: odd, so that eight consecutive rows lie in different banks.
pub fn pitch(dim: usize) -> usize {
    fours(dim) | 1
}

/// Strides of a `[batch, heads, seq, dim]` tensor in vectors, and its seq.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub struct Strides {
    /// Between batch entries.
    pub batch: usize,
    /// Between heads.
    pub head: usize,
    /// Between positions.
    pub row: usize,
    /// Positions.
    pub len: usize,
}

/// How a plan lists positions: place `v` is position `v mod class_len · stride + ⌊v / class_len⌋`.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub struct Listing {
    /// Distance between the positions of a class.
    pub stride: usize,
    /// Places of a class.
    pub class_len: usize,
}

/// The position at a place.
#[cube]
pub fn position_at(place: usize, listing: &Listing, #[comptime] t: Tile) -> usize {
    position_of(place, listing, comptime!(t.residue))
}

/// The position at a place, listed by residue class or as it is.
#[cube]
pub fn position_of(place: usize, listing: &Listing, #[comptime] residue: bool) -> usize {
    span_of(place, listing, residue).first
}

/// Places that follow each other in one class, as those of a block do: the i-th is position `first + i · step`.
#[derive(CubeType, Clone, Copy)]
pub struct Span {
    /// The first position.
    pub first: usize,
    /// From one to the next.
    pub step: usize,
}

/// The positions from a place on, as far as its class goes.
#[cube]
pub fn span_of(place: usize, listing: &Listing, #[comptime] residue: bool) -> Span {
    let mut first = place;
    let mut step = 1usize;
    if comptime!(residue) {
        let class = place / listing.class_len;
        first = place % listing.class_len * listing.stride + class;
        step = listing.stride;
        // The last tile may reach beyond the last class: such places are beyond every sequence.
        if class >= listing.stride {
            first = usize::cast_from(u32::MAX);
            step = 0usize;
        }
    }
    Span { first, step }
}

/// Where the parts of a plan's words begin: `plan::Sections` on the device.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub struct PlanParts {
    /// First tile record of each head.
    pub heads: usize,
    /// First place of each head.
    pub places: usize,
    /// Tiles by falling work, with their records.
    pub order: usize,
    /// Blocks of clustered tiles.
    pub rows: usize,
    /// Tile records.
    pub tiles: usize,
    /// Entries.
    pub entries: usize,
    /// Masks.
    pub masks: usize,
    /// Words between the heads of two batch entries: 0 if all share one layout.
    pub batch: usize,
}

/// The tile a cube works on.
#[derive(CubeType, Clone, Copy)]
pub struct Walker {
    /// Its index among the tiles of a head.
    pub tile: usize,
    /// Where its own rows are: see [`row_place`].
    pub rows: usize,
    /// Word of its first entry.
    pub entry: usize,
    /// Its steps.
    pub steps: usize,
    /// Of them, those whose masks matter.
    pub masked: usize,
}

/// The tile ranked `rank` of a head.
#[cube]
pub fn walker(
    plan: &[u32],
    parts: &PlanParts,
    batch: usize,
    head: usize,
    rank: usize,
    #[comptime] t: Tile,
) -> Walker {
    let first = plan[parts.heads + batch * parts.batch + head] as usize;
    let ranked = parts.order + (first + rank) * 4;
    walker_at(plan, parts, first, plan[ranked] as usize, ranked + 1, t)
}

/// The tile `tile` of the head whose records start at `first`.
#[cube]
pub fn walker_of(
    plan: &[u32],
    parts: &PlanParts,
    first: usize,
    tile: usize,
    #[comptime] t: Tile,
) -> Walker {
    let record = parts.tiles + (first + tile) * 3;
    walker_at(plan, parts, first, tile, record, t)
}

#[cube]
fn walker_at(
    plan: &[u32],
    parts: &PlanParts,
    first: usize,
    tile: usize,
    record: usize,
    #[comptime] t: Tile,
) -> Walker {
    let mut rows = tile * comptime!(t.rows);
    if comptime!(t.clustered) {
        rows = parts.rows + (first + tile) * comptime!(t.rows / t.group);
    }
    Walker {
        tile,
        rows,
        entry: parts.entries + plan[record] as usize * comptime!(t.entry_words()),
        steps: plan[record + 1] as usize,
        masked: plan[record + 2] as usize,
    }
}

/// The place of row `row` of a tile whose rows are at `rows`: its first place, or the word of its first block.
#[cube]
pub fn row_place(plan: &[u32], rows: usize, row: usize, #[comptime] t: Tile) -> usize {
    let mut place = rows + row;
    if comptime!(t.clustered) {
        // A step is at least a block wide, so that an entry is a block.
        let block = comptime!(t.group);
        place = plan[rows + row / block] as usize * block + row % block;
    }
    place
}

/// The positions of a unit's rows, the first of which is row `row` of a tile: not more than a block has.
#[cube]
pub fn row_span(
    plan: &[u32],
    rows: usize,
    row: usize,
    listing: &Listing,
    #[comptime] t: Tile,
) -> Span {
    span_of(row_place(plan, rows, row, t), listing, comptime!(t.residue))
}

/// The place of column `col` of a step whose first entry is at word `entry`.
#[cube]
pub fn place(plan: &[u32], entry: usize, col: usize, #[comptime] t: Tile) -> usize {
    let group = comptime!(t.group);
    plan[entry + col / group * comptime!(t.entry_words())] as usize * group + col % group
}

/// The positions of a unit's columns in a step. A block has at least four, so that they follow each other.
#[cube]
pub fn column_span(
    plan: &[u32],
    entry: usize,
    unit_x: usize,
    listing: &Listing,
    #[comptime] t: Tile,
) -> Span {
    span_of(
        place(plan, entry, unit_x * 4, t),
        listing,
        comptime!(t.residue),
    )
}

/// Copies one four-wide piece of a row, widened to `A`; beyond `dim` it is 0.
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

/// A tensor of which rows are loaded.
#[derive(CubeType, Clone, Copy)]
pub struct Rows {
    /// Where its first row is, in vectors.
    pub base: usize,
    /// Vectors between rows.
    pub stride: usize,
    /// Its rows; those beyond are 0.
    pub len: usize,
}

/// The rows of a head.
#[cube]
pub fn rows_of(strides: &Strides, batch: usize, head: usize) -> Rows {
    Rows {
        base: batch * strides.batch + head * strides.head,
        stride: strides.row,
        len: strides.len,
    }
}

/// Which rows are loaded.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Side {
    /// Those of the cube's tile: see [`row_place`].
    Own,
    /// Those of a step, from its first entry on.
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

/// Rounds whose loads are under way together.
const TOGETHER: usize = 4;

/// Loads rows from word `first` on into shared memory, see [`slot`].
#[cube]
pub fn load<E: Float, A: Float, N: Size>(
    source: &[Vector<E, N>],
    of: &Rows,
    listing: &Listing,
    plan: &[u32],
    first: usize,
    target: &mut Shared<[Vector<A, Four>]>,
    #[comptime] dim: usize,
    #[comptime] side: Side,
    #[comptime] t: Tile,
) {
    let fours = comptime!(fours(dim));
    let total = comptime!(side.count(&t) * fours);
    let rounds = comptime!(total.div_ceil(t.units()));
    let together = comptime!(rounds.min(TOGETHER));
    let exact = comptime!(total % (together * t.units()) == 0);
    let only = only_span(plan, first, listing, side, t);
    for round in range_stepped(0usize, rounds, together) {
        let mut values = Array::<Vector<A, Four>>::new(together);
        #[unroll]
        for i in 0..together {
            let at = UNIT_POS_X as usize + (round + i) * comptime!(t.units());
            values[i] = Vector::<A, Four>::zeroed();
            if comptime!(exact) || at < total {
                let position = position_in(&only, plan, first, at / fours, listing, side, t);
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

/// [`load`] of two tensors, whose positions are looked up once if they are equally wide.
#[cube]
pub fn load_both<E: Float, A: Float, N: Size>(
    source1: &[Vector<E, N>],
    source2: &[Vector<E, N>],
    of1: &Rows,
    of2: &Rows,
    listing: &Listing,
    plan: &[u32],
    first: usize,
    target1: &mut Shared<[Vector<A, Four>]>,
    target2: &mut Shared<[Vector<A, Four>]>,
    #[comptime] dims: [usize; 2],
    #[comptime] side: Side,
    #[comptime] t: Tile,
) {
    let dim1 = comptime!(dims[0]);
    let dim2 = comptime!(dims[1]);
    let fours = comptime!(fours(dim1));
    let total = comptime!(side.count(&t) * fours);
    let rounds = comptime!(total.div_ceil(t.units()));
    let together = comptime!(rounds.min(TOGETHER));
    let exact = comptime!(total % (together * t.units()) == 0);
    if comptime!(dim1 == dim2) {
        let only = only_span(plan, first, listing, side, t);
        for round in range_stepped(0usize, rounds, together) {
            let mut values1 = Array::<Vector<A, Four>>::new(together);
            let mut values2 = Array::<Vector<A, Four>>::new(together);
            #[unroll]
            for i in 0..together {
                let at = UNIT_POS_X as usize + (round + i) * comptime!(t.units());
                values1[i] = Vector::<A, Four>::zeroed();
                values2[i] = Vector::<A, Four>::zeroed();
                if comptime!(exact) || at < total {
                    let position = position_in(&only, plan, first, at / fours, listing, side, t);
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
        load::<E, A, N>(source1, of1, listing, plan, first, target1, dim1, side, t);
        load::<E, A, N>(source2, of2, listing, plan, first, target2, dim2, side, t);
    }
}

/// The positions that entry `index` of a step names.
#[cube]
fn entry_span(
    plan: &[u32],
    first: usize,
    index: usize,
    listing: &Listing,
    #[comptime] t: Tile,
) -> Span {
    let word = first + index * comptime!(t.entry_words());
    let place = plan[word] as usize * comptime!(t.group);
    span_of(place, listing, comptime!(t.residue))
}

/// The positions of a step with a single entry: they are looked up once.
#[cube]
fn only_span(
    plan: &[u32],
    first: usize,
    listing: &Listing,
    #[comptime] side: Side,
    #[comptime] t: Tile,
) -> Span {
    if comptime!(side == Side::Gathered && t.entries() == 1) {
        entry_span(plan, first, 0usize, listing, t)
    } else {
        Span {
            first: 0usize,
            step: 0usize,
        }
    }
}

/// The position of row `row` of those from word `first` on.
#[cube]
fn position_in(
    only: &Span,
    plan: &[u32],
    first: usize,
    row: usize,
    listing: &Listing,
    #[comptime] side: Side,
    #[comptime] t: Tile,
) -> usize {
    let group = comptime!(t.group);
    if comptime!(side == Side::Own) {
        position_at(row_place(plan, first, row, t), listing, t)
    } else if comptime!(t.entries() == 1) {
        only.first + row * only.step
    } else {
        let span = entry_span(plan, first, row / group, listing, t);
        span.first + row % group * span.step
    }
}

/// Where a row lies in shared memory. Column `c` of a step is in slot `(c % 4) · units_x + c / 4`, so that the four
/// columns of a unit are `units_x` slots apart and neighbouring units read neighbouring slots.
#[cube]
fn slot(row: usize, #[comptime] side: Side, #[comptime] t: Tile) -> usize {
    if comptime!(side == Side::Own) {
        row
    } else {
        row % 4 * comptime!(t.units_x) + row / 4
    }
}

/// [`load_four`] of a row, or 0 beyond the last one.
#[cube]
fn load_or_zero<E: Float, A: Float, N: Size>(
    source: &[Vector<E, N>],
    of: &Rows,
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

/// `at`, which is less than `end`, said in a way that a compiler sees: then it adds constants to it in the address of a read, where
/// otherwise a sum of 32 bits might wrap and is made apart.
#[cube]
fn bounded(at: usize, #[comptime] end: usize) -> usize {
    at % comptime!(end.next_power_of_two())
}

/// `a · bᵀ`: the unit's rows of `a` with its four gathered rows of `b`, into `[unit_rows · 4]`.
#[cube]
pub fn product_rows<A: Float>(
    a: &Shared<[Vector<A, Four>]>,
    b: &Shared<[Vector<A, Four>]>,
    unit_y: usize,
    unit_x: usize,
    #[comptime] dim: usize,
    #[comptime] t: Tile,
) -> Array<A> {
    let rows = comptime!(t.unit_rows);
    let pitch = comptime!(pitch(dim));
    let mut product = Array::<A>::new(comptime!(rows * 4));
    #[unroll]
    for i in 0..comptime!(rows * 4) {
        product[i] = A::new(0.0);
    }
    let together = comptime!(1 << fours(dim).trailing_zeros().min(2));
    for first in range_stepped(0usize, comptime!(fours(dim)), together) {
        let a_at = bounded(unit_y * rows * pitch + first, comptime!(t.rows * pitch));
        let b_at = bounded(unit_x * pitch + first, comptime!(t.units_x * pitch));
        #[unroll]
        for next in 0..together {
            let mut lhs = Array::<Vector<A, Four>>::new(rows);
            #[unroll]
            for i in 0..rows {
                lhs[i] = a[a_at + comptime!(i * pitch + next)];
            }
            #[unroll]
            for j in 0..4usize {
                let rhs = b[b_at + comptime!(j * t.units_x * pitch + next)];
                #[unroll]
                for i in 0..rows {
                    #[unroll]
                    for c in 0..4usize {
                        product[comptime!(i * 4 + j)] += lhs[i].extract(c) * rhs.extract(c);
                    }
                }
            }
        }
    }
    product
}

/// `acc += w · b`: weights `[rows, cols]` in shared memory with the gathered rows of `b`, into the unit's
/// rows and every `units_x`-th four of the output, `[unit_rows · unit_fours]`. Only of those `halves` of the columns that
/// [`needed`] names.
#[cube]
pub fn accumulate_product<A: Float>(
    weights: &Shared<[Vector<A, Four>]>,
    b: &Shared<[Vector<A, Four>]>,
    acc: &mut Array<Vector<A, Four>>,
    unit_y: usize,
    unit_x: usize,
    halves: u32,
    #[comptime] dim: usize,
    #[comptime] t: Tile,
) {
    if comptime!(t.has_halves()) {
        // The number of rounds is known: where it is not, they cost a tenth more.
        for half in 0..2usize {
            if (halves >> half as u32) & 1u32 == 1u32 {
                #[unroll(t.units_x <= 8)]
                for col in 0..comptime!(t.units_x / 2) {
                    let col = half * comptime!(t.units_x / 2) + col;
                    accumulate_fours(weights, b, acc, unit_y, unit_x, col, dim, t);
                }
            }
        }
    } else {
        for col in 0..comptime!(t.units_x) {
            accumulate_fours(weights, b, acc, unit_y, unit_x, col, dim, t);
        }
    }
}

/// [`accumulate_product`] of four columns.
#[cube]
fn accumulate_fours<A: Float>(
    weights: &Shared<[Vector<A, Four>]>,
    b: &Shared<[Vector<A, Four>]>,
    acc: &mut Array<Vector<A, Four>>,
    unit_y: usize,
    unit_x: usize,
    col: usize,
    #[comptime] dim: usize,
    #[comptime] t: Tile,
) {
    let rows = comptime!(t.unit_rows);
    let pitch = comptime!(pitch(dim));
    let fours = comptime!(fours(dim));
    let unit_fours = comptime!(t.unit_fours(dim));
    let weight_pitch = comptime!(t.weight_pitch());
    let weights_at = bounded(
        unit_y * rows * weight_pitch + col,
        comptime!(t.rows * weight_pitch),
    );
    let b_at = bounded(col * pitch + unit_x, comptime!(t.units_x * pitch));
    let mut lhs = Array::<Vector<A, Four>>::new(rows);
    #[unroll]
    for i in 0..rows {
        lhs[i] = weights[weights_at + comptime!(i * weight_pitch)];
    }
    #[unroll]
    for j in 0..4usize {
        #[unroll]
        for f in 0..unit_fours {
            let mut at = b_at + comptime!(j * t.units_x * pitch + f * t.units_x);
            // A unit past the row's end repeats its last four, and stores nothing of it.
            if comptime!(fours % t.units_x != 0) {
                let four = unit_x + comptime!(f * t.units_x);
                at = (comptime!(j * t.units_x) + col) * pitch + four.min(comptime!(fours - 1));
            }
            let rhs = b[at];
            #[unroll]
            for i in 0..rows {
                let at = comptime!(i * unit_fours + f);
                acc[at] += Vector::new(lhs[i].extract(j)) * rhs;
            }
        }
    }
}

/// Scales the unit's part of an output row and adds what is there. A tile reads all rows before it stores one: a read behind a store to
/// the same tensor would wait for it. `row` is in vectors.
#[cube]
pub fn add_row<E: Float, A: Float, N: Size>(
    source: &[Vector<E, N>],
    row: usize,
    acc: &mut Array<Vector<A, Four>>,
    factor: A,
    unit_x: usize,
    #[comptime] unit_row: usize,
    #[comptime] dim: usize,
    #[comptime] t: Tile,
) {
    let unit_fours = comptime!(t.unit_fours(dim));
    #[unroll]
    for f in 0..unit_fours {
        let at = comptime!(unit_row * unit_fours + f);
        let four = unit_x + comptime!(f * t.units_x);
        acc[at] = acc[at] * Vector::new(factor) + load_four::<E, A, N>(source, row, four, dim);
    }
}

/// Writes the unit's part of an output row, scaled and narrowed to `E`. `row` is in vectors.
#[cube]
pub fn store_row<E: Float, A: Float, N: Size>(
    target: &mut [Vector<E, N>],
    row: usize,
    acc: &Array<Vector<A, Four>>,
    factor: A,
    unit_x: usize,
    #[comptime] unit_row: usize,
    #[comptime] dim: usize,
    #[comptime] t: Tile,
) {
    let width = N::value();
    let unit_fours = comptime!(t.unit_fours(dim));
    #[unroll]
    for f in 0..unit_fours {
        let four = unit_x + comptime!(f * t.units_x);
        let value = acc[comptime!(unit_row * unit_fours + f)] * Vector::new(factor);
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
}

/// The mask bits of a unit's pairs, those of row `i` and column `j` at `4i + j`; all set where a step has no mask.
#[cube]
pub fn mask_bits(
    plan: &[u32],
    parts: &PlanParts,
    entry: usize,
    masked: bool,
    unit_y: usize,
    unit_x: usize,
    #[comptime] t: Tile,
) -> u32 {
    let group = comptime!(t.group);
    let rows = comptime!(t.unit_rows);
    let mut bits = 0xffff_ffffu32;
    if masked {
        let col = unit_x * 4;
        let mask = plan[entry + col / group * comptime!(t.entry_words()) + 1] as usize;
        let within = col % group;
        let word = parts.masks
            + (mask * comptime!(t.rows) + unit_y * rows) * comptime!(t.mask_words)
            + within / 32;
        bits = 0u32;
        #[unroll]
        for i in 0..rows {
            let row = plan[word + comptime!(i * t.mask_words)] >> (within % 32) as u32;
            bits |= (row & 15u32) << comptime!(4 * i as u32);
        }
    }
    bits
}

/// Which halves of a step's columns have any allowed pair in the rows of the unit's plane, as two bits: on a diagonal half the
/// planes have none. Without planes a step has barriers, at which all units have to meet.
#[cube]
#[allow(clippy::collapsible_if)] // What is known at compile time stays apart from what is not.
pub fn needed(bits: u32, masked: bool, unit_x: usize, #[comptime] t: Tile) -> u32 {
    let mut halves = 3u32;
    if comptime!(t.has_halves()) {
        if masked {
            let any = bits != 0u32;
            let right = unit_x >= comptime!(t.units_x / 2);
            let left = u32::cast_from(plane_any(any && !right));
            let right = u32::cast_from(plane_any(any && right));
            halves = left + right * 2u32;
        }
    }
    halves
}

/// For each of the unit's rows, the largest (`max`) or the sum over the units of the row.
#[cube]
pub fn reduce_rows<A: Float>(
    values: &mut Array<A>,
    scratch: &mut Shared<[A]>,
    unit_y: usize,
    unit_x: usize,
    #[comptime] max: bool,
    #[comptime] t: Tile,
) {
    let rows = comptime!(t.unit_rows);
    if comptime!(t.planes) {
        #[unroll]
        for i in 0..rows {
            #[unroll]
            for step in 0..comptime!(t.units_x.ilog2()) {
                let other = plane_shuffle_xor(values[i], comptime!(1u32 << step));
                values[i] = combine::<A>(values[i], other, max);
            }
        }
    } else {
        #[unroll]
        for i in 0..rows {
            scratch[(unit_y * rows + i) * comptime!(t.units_x) + unit_x] = values[i];
        }
        sync_cube();
        #[unroll]
        for i in 0..rows {
            let base = (unit_y * rows + i) * comptime!(t.units_x);
            let mut result = scratch[base];
            for other in 1..comptime!(t.units_x) {
                result = combine::<A>(result, scratch[base + other], max);
            }
            values[i] = result;
        }
        sync_cube();
    }
}

#[cube]
fn combine<A: Float>(a: A, b: A, #[comptime] max: bool) -> A {
    if comptime!(max) { a.max(b) } else { a + b }
}

/// Makes what the units of a row wrote to shared memory visible to them.
#[cube]
pub fn sync_row(#[comptime] t: Tile) {
    if comptime!(t.planes) {
        sync_plane();
    } else {
        sync_cube();
    }
}

/// Where four stored weights are.
#[derive(CubeType, Clone, Copy)]
pub struct WeightPlace {
    /// Whether the entry names a block (and does not fill up a step).
    pub kept: bool,
    /// The first of the four elements.
    pub element: usize,
}

/// The stored weights of row `row` and the unit's four columns. In a walk over rows the columns are keys, one
/// element apart; in a walk over columns they are queries, `b` elements apart.
#[cube]
pub fn weight_place(
    plan: &[u32],
    place0: usize,
    entry: usize,
    row: usize,
    unit_x: usize,
    #[comptime] walk: Walk,
    #[comptime] t: Tile,
) -> WeightPlace {
    let b = comptime!(t.store.unwrap());
    let group = comptime!(t.group);
    let col = unit_x * 4;
    let word = entry + col / group * 3;
    let block = place0 + plan[word + 2] as usize;
    let row = row % b;
    let col = plan[word] as usize * group % b + col % group;
    let mut element = (block * b + row) * b + col;
    if comptime!(matches!(walk, Walk::Columns)) {
        element = (block * b + col) * b + row;
    }
    WeightPlace {
        kept: plan[word + 1] != 1u32,
        element,
    }
}
