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
    let mut position = place;
    if comptime!(residue) {
        let class = place / listing.class_len;
        position = place % listing.class_len * listing.stride + class;
        // The last tile may reach beyond the last class: such places are beyond every sequence.
        if class >= listing.stride {
            position = usize::cast_from(u32::MAX);
        }
    }
    position
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

/// The row of units that a unit is in; about every other cube counts them from its end. A plane has the same scheduler of its
/// multiprocessor in every cube, and where a tile crosses a diagonal, the planes at one end of it compute more steps than those at the
/// other: in like cubes all of that would be the work of the same schedulers.
#[cube]
pub fn unit_row(#[comptime] t: Tile) -> usize {
    // Cubes that run side by side have numbers at any distance: a bit of the number times 2¹⁶ over the golden ratio.
    let odd = (CUBE_POS as u32 * 0x9e37u32) >> 15u32 & 1u32;
    (UNIT_POS as usize / comptime!(t.units_x)) ^ (odd as usize * comptime!(t.units_y() - 1))
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

/// The place of column `col` of a step whose first entry is at word `entry`.
#[cube]
pub fn place(plan: &[u32], entry: usize, col: usize, #[comptime] t: Tile) -> usize {
    let group = comptime!(t.group);
    plan[entry + col / group * comptime!(t.entry_words())] as usize * group + col % group
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

/// Loads the rows of a cube's own tile; rows beyond the end are 0.
#[cube]
pub fn load_rows<E: Float, A: Float, N: Size>(
    source: &[Vector<E, N>],
    base: usize,
    strides: &Strides,
    listing: &Listing,
    plan: &[u32],
    rows: usize,
    target: &mut Shared<[Vector<A, Four>]>,
    #[comptime] dim: usize,
    #[comptime] t: Tile,
) {
    let fours = comptime!(fours(dim));
    let total = comptime!(t.rows * fours);
    let mut at = UNIT_POS as usize;
    while at < total {
        let row = at / fours;
        let four = at % fours;
        let mut value = Vector::<A, Four>::zeroed();
        let position = position_at(row_place(plan, rows, row, t), listing, t);
        if position < strides.len {
            value = load_four::<E, A, N>(source, base + position * strides.row, four, dim);
        }
        target[row * comptime!(pitch(dim)) + four] = value;
        at += comptime!(t.units());
    }
}

/// Gathers the rows of a step. Position `c` of the step goes to slot `(c % 4) · units_x + c / 4`, so that the four
/// columns of a unit are `units_x` slots apart and neighbouring units read neighbouring slots.
#[cube]
pub fn gather_rows<E: Float, A: Float, N: Size>(
    source: &[Vector<E, N>],
    base: usize,
    strides: &Strides,
    listing: &Listing,
    plan: &[u32],
    entry: usize,
    target: &mut Shared<[Vector<A, Four>]>,
    #[comptime] dim: usize,
    #[comptime] t: Tile,
) {
    let fours = comptime!(fours(dim));
    let total = comptime!(t.cols() * fours);
    let mut at = UNIT_POS as usize;
    while at < total {
        let col = at / fours;
        let four = at % fours;
        let row = position_at(place(plan, entry, col, t), listing, t);
        let mut value = Vector::<A, Four>::zeroed();
        if row < strides.len {
            value = load_four::<E, A, N>(source, base + row * strides.row, four, dim);
        }
        let slot = col % 4 * comptime!(t.units_x) + col / 4;
        target[slot * comptime!(pitch(dim)) + four] = value;
        at += comptime!(t.units());
    }
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
    for four in 0..comptime!(fours(dim)) {
        let mut lhs = Array::<Vector<A, Four>>::new(rows);
        #[unroll]
        for i in 0..rows {
            lhs[i] = a[(unit_y * rows + i) * pitch + four];
        }
        #[unroll]
        for j in 0..4usize {
            let rhs = b[(comptime!(j * t.units_x) + unit_x) * pitch + four];
            #[unroll]
            for i in 0..rows {
                #[unroll]
                for c in 0..4usize {
                    product[comptime!(i * 4 + j)] += lhs[i].extract(c) * rhs.extract(c);
                }
            }
        }
    }
    product
}

/// `acc += w · b`: weights `[rows, cols]` in shared memory with the gathered rows of `b`, into the unit's
/// rows and every `units_x`-th four of the output, `[unit_rows · unit_fours]`.
#[cube]
pub fn accumulate_product<A: Float>(
    weights: &Shared<[Vector<A, Four>]>,
    b: &Shared<[Vector<A, Four>]>,
    acc: &mut Array<Vector<A, Four>>,
    unit_y: usize,
    unit_x: usize,
    #[comptime] dim: usize,
    #[comptime] t: Tile,
) {
    let rows = comptime!(t.unit_rows);
    let pitch = comptime!(pitch(dim));
    let fours = comptime!(fours(dim));
    let unit_fours = comptime!(t.unit_fours(dim));
    for col in 0..comptime!(t.units_x) {
        let mut lhs = Array::<Vector<A, Four>>::new(rows);
        #[unroll]
        for i in 0..rows {
            lhs[i] = weights[(unit_y * rows + i) * comptime!(t.weight_pitch()) + col];
        }
        #[unroll]
        for j in 0..4usize {
            #[unroll]
            for f in 0..unit_fours {
                // A unit past the row's end repeats its last four, and stores nothing of it.
                let mut four = unit_x + comptime!(f * t.units_x);
                if comptime!(fours % t.units_x != 0) {
                    four = four.min(comptime!(fours - 1));
                }
                let rhs = b[(comptime!(j * t.units_x) + col) * pitch + four];
                #[unroll]
                for i in 0..rows {
                    let at = comptime!(i * unit_fours + f);
                    acc[at] += Vector::new(lhs[i].extract(j)) * rhs;
                }
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

/// The four mask bits of a unit's columns in one of its rows.
#[cube]
pub fn mask_bits(
    plan: &[u32],
    parts: &PlanParts,
    entry: usize,
    row: usize,
    unit_x: usize,
    #[comptime] t: Tile,
) -> u32 {
    let group = comptime!(t.group);
    let col = unit_x * 4;
    let mask = plan[entry + col / group * comptime!(t.entry_words()) + 1] as usize;
    let within = col % group;
    let word =
        parts.masks + (mask * comptime!(t.rows) + row) * comptime!(t.mask_words) + within / 32;
    (plan[word] >> (within % 32) as u32) & 15u32
}

/// Whether any pair of a step is allowed in the rows of the unit's plane: on a diagonal half the planes have none. Without
/// planes a step has barriers, at which all units have to meet.
#[cube]
#[allow(clippy::collapsible_if)] // What is known at compile time stays apart from what is not.
pub fn needed(
    plan: &[u32],
    parts: &PlanParts,
    entry: usize,
    masked: bool,
    unit_y: usize,
    unit_x: usize,
    #[comptime] t: Tile,
) -> bool {
    let mut result = true;
    if comptime!(t.planes) {
        if masked {
            let mut bits = 0u32;
            #[unroll]
            for i in 0..comptime!(t.unit_rows) {
                let row = unit_y * comptime!(t.unit_rows) + i;
                bits |= mask_bits(plan, parts, entry, row, unit_x, t);
            }
            result = plane_any(bits != 0u32);
        }
    }
    result
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
