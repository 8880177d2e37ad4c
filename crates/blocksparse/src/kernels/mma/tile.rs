//! What the kernels share: the shape of a tile, copies into shared memory, the two products, masks.

use std::fmt;

use cubecl::prelude::*;

use super::asm::*;
use crate::kernels::Kernel;
use crate::kernels::simt::tile::{Four, Listing, PlanParts};
use crate::plan::{Tiling, Walk};

/// Stands for a position outside of the sequence.
pub const NOWHERE: u32 = u32::MAX;
/// A unit holds parts of rows `r` and `r + 8`.
pub const ROW_PAIR: u32 = 8;

/// The comptime shape of a kernel: its key in the cache of compiled kernels.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Tile {
    /// What the products' operands are.
    pub element: Element,
    /// Width of queries and keys, a multiple of 16.
    pub head_dim: usize,
    /// Width of values, a multiple of 16.
    pub value_dim: usize,
    /// Warps of a cube.
    pub warps: usize,
    /// Times 16 rows of a warp. With 2 what a warp reads of the other operand is used twice.
    pub warp_tiles: usize,
    /// Columns of a step.
    pub cols: usize,
    /// Consecutive positions an entry names.
    pub group: usize,
    /// Steps in shared memory at a time: 2, or forward 1, and then keys arrive while values are used and values while keys are.
    pub stages: usize,
    /// Whether scores are softcapped.
    pub softcap: bool,
    /// Whether scores have ALiBi biases.
    pub alibi: bool,
    /// Whether scores have a given bias.
    pub bias: bool,
    /// Whether scores have a bias of each distance.
    pub relative: bool,
    /// Whether weights are dropped out.
    pub dropout: bool,
    /// Whether positions are listed by residue class.
    pub residue: bool,
    /// Whether the kernel carries on from what an earlier part of the pattern left in its outputs.
    pub carry: bool,
    /// Whether the tile's rows are gathered from like blocks.
    pub clustered: bool,
    /// In the backward pass, which of dK (or dQ) and dV a launch computes.
    pub outputs: Outputs,
}

/// What a launch of the backward kernel computes. dK and dV of wide heads together have no room in registers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Outputs {
    /// dQ, or only dK.
    First,
    /// Only dV.
    Second,
    /// dK and dV.
    Both,
}

impl Outputs {
    /// Whether dQ or dK is computed.
    pub fn first(self) -> bool {
        self != Self::Second
    }

    /// Whether dV is computed.
    pub fn second(self) -> bool {
        self != Self::First
    }
}

impl Tile {
    /// Rows of a tile.
    pub fn rows(&self) -> usize {
        16 * self.warp_tiles * self.warps
    }

    /// Units of a cube.
    pub fn units(&self) -> usize {
        32 * self.warps
    }

    /// How the layout is cut.
    pub fn tiling(&self, walk: Walk) -> Tiling {
        Tiling {
            walk,
            rows: self.rows(),
            cols: self.cols,
            places: false,
            clustered: self.clustered,
            visits: false,
        }
    }

    /// Whether layouts of this block size can be cut so.
    pub fn fits(&self, block: usize) -> bool {
        let rows = self.rows();
        (rows.is_multiple_of(block) || block.is_multiple_of(rows))
            && (self.cols.is_multiple_of(block) || block.is_multiple_of(self.cols))
    }

    /// Whether anything is added to scores.
    pub fn biased(&self) -> bool {
        self.alibi || self.bias || self.relative
    }

    /// Whether anything depends on the positions of a pair.
    pub fn positions(&self) -> bool {
        self.biased() || self.dropout
    }

    /// Entries of a step.
    pub fn entries(&self) -> usize {
        self.cols / self.group
    }

    // Byte offsets in shared memory. The positions of the tile's own rows come first.

    /// Positions of a step's columns, and its head; there are such slots for the next two steps, and where scores depend on
    /// positions for the one that is computed.
    pub fn slot_offset(&self) -> usize {
        self.rows() * 4
    }

    /// Bytes of a slot.
    pub fn slot_bytes(&self) -> usize {
        (self.cols + 4) * 4
    }

    /// Slots of positions.
    pub fn slots(&self) -> usize {
        2 + usize::from(self.positions())
    }

    fn stats_offset(&self) -> usize {
        self.slot_offset() + self.slots() * self.slot_bytes()
    }

    /// lse and delta of a step's columns, in a walk over columns of queries.
    pub fn stats_bytes(&self) -> usize {
        self.cols * 8
    }

    /// Where the stats of a stage are.
    pub fn stats_at(&self, stage: usize) -> usize {
        self.stats_offset() + stage * self.stats_bytes()
    }

    fn operands(&self) -> usize {
        self.stats_offset() + self.stages * self.stats_bytes()
    }

    /// The tile's own rows of width head_dim.
    pub fn a1_offset(&self) -> usize {
        self.operands()
    }

    /// Those of width value_dim, which only the backward pass has.
    pub fn a2_offset(&self) -> usize {
        self.a1_offset() + self.rows() * self.pitch(self.head_dim)
    }

    /// Gathered rows of width head_dim, `stages` times.
    pub fn b1_offset(&self, backward: bool) -> usize {
        match backward {
            true => self.a2_offset() + self.rows() * self.pitch(self.value_dim),
            false => self.a2_offset(),
        }
    }

    /// Bytes of a step's rows of width head_dim.
    pub fn b1_bytes(&self) -> usize {
        self.cols * self.pitch(self.head_dim)
    }

    /// Gathered rows of width value_dim, `stages` times.
    pub fn b2_offset(&self, backward: bool) -> usize {
        self.b1_offset(backward) + self.stages * self.b1_bytes()
    }

    /// Bytes of a step's rows of width value_dim.
    pub fn b2_bytes(&self) -> usize {
        self.cols * self.pitch(self.value_dim)
    }

    /// Bytes of shared memory of a cube.
    pub fn shared_bytes(&self, backward: bool) -> usize {
        self.b2_offset(backward) + self.stages * self.b2_bytes()
    }

    /// Bytes between two rows in shared memory: an odd number of 16-byte pieces, so that eight neighbouring rows lie
    /// in different banks.
    pub fn pitch(&self, dim: usize) -> usize {
        dim * self.element.bytes() + 16
    }

    /// Products deep a width is.
    pub fn depth(&self, dim: usize) -> usize {
        dim / self.element.depth()
    }

    /// Words of a row in memory.
    pub fn words(&self, dim: usize) -> usize {
        dim * self.element.bytes() / 4
    }

    /// Eights of a step's columns.
    pub fn eights(&self) -> usize {
        self.cols / 8
    }
}

/// A tile as plans print it.
pub struct Described(pub Tile, pub Kernel);

impl fmt::Display for Described {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let &Described(tile, kernel) = self;
        let like = match tile.clustered {
            true => ", like rows together",
            false => "",
        };
        let tf32 = match tile.element {
            Element::Tf32 => "in tf32, ",
            Element::Half(_) => "",
        };
        let split = match (kernel, tile.outputs) {
            (Kernel::BackwardColumns, Outputs::First) => ", one output a launch",
            _ => "",
        };
        write!(
            f,
            "mma     {tf32}{} × {} tiles gathered from {}-wide blocks{like}, {} units, {} stages in {} KiB shared{split}",
            tile.rows(),
            tile.cols,
            tile.group,
            tile.units(),
            tile.stages,
            tile.shared_bytes(kernel != Kernel::Forward).div_ceil(1024),
        )
    }
}

/// Strides of a `[batch, heads, seq, dim]` tensor in pieces of 16 bytes, and its seq.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub struct Strides {
    /// Between batch entries.
    pub batch: u32,
    /// Between heads.
    pub head: u32,
    /// Between positions.
    pub row: u32,
    /// Positions.
    pub len: u32,
}

/// The address of a head's first row.
#[cube]
pub fn head_address(buffer: u64, strides: &Strides, batch: u32, head: u32) -> u64 {
    let pieces = u64::cast_from(batch) * u64::cast_from(strides.batch)
        + u64::cast_from(head) * u64::cast_from(strides.head);
    buffer + pieces * 16
}

/// Where a tile's own rows are: its first place, or the word of its first block.
#[cube]
pub fn own_rows(parts: &PlanParts, first_record: usize, tile: u32, #[comptime] t: Tile) -> u32 {
    let mut first = tile * comptime!(t.rows() as u32);
    if comptime!(t.clustered) {
        first =
            (parts.rows + (first_record + tile as usize) * comptime!(t.rows() / t.group)) as u32;
    }
    first
}

/// The place of row `row` of a tile. Rows of a clustered tile lie in blocks of `group`.
#[cube]
pub fn own_place(plan: &[u32], rows: u32, row: u32, #[comptime] t: Tile) -> u32 {
    let mut place = rows + row;
    if comptime!(t.clustered) {
        let block = comptime!(t.group as u32);
        place = plan[(rows + row / block) as usize] * block + row % block;
    }
    place
}

/// The position at a place, or [`NOWHERE`].
#[cube]
pub fn position_at(place: u32, listing: &Listing, len: u32, #[comptime] t: Tile) -> u32 {
    let mut position = place;
    let mut exists = true;
    if comptime!(t.residue) {
        let class = place / listing.class_len as u32;
        position = place % listing.class_len as u32 * listing.stride as u32 + class;
        exists = class < listing.stride as u32;
    }
    select(exists && position < len, position, comptime!(NOWHERE))
}

/// Where the slot of step `j` is, from the first one on.
#[cube]
pub fn slot_of(j: u32, #[comptime] t: Tile) -> u32 {
    let slot = if comptime!(t.slots() == 2) {
        j & 1
    } else {
        j % comptime!(t.slots() as u32)
    };
    slot * comptime!(t.slot_bytes() as u32)
}

/// Writes the positions of the tile's own rows to shared memory.
#[cube]
pub fn own_positions(
    base: u32,
    plan: &[u32],
    rows: u32,
    listing: &Listing,
    len: u32,
    #[comptime] t: Tile,
) {
    let mut row = UNIT_POS_X;
    while row < comptime!(t.rows() as u32) {
        let place = own_place(plan, rows, row, t);
        shared_store(base + row * 4, position_at(place, listing, len, t));
        row += comptime!(t.units() as u32);
    }
}

/// Starts to copy `rows` rows to shared memory, whose positions are there.
#[cube]
pub fn copy_rows(
    head: u64,
    stride: u32,
    positions: u32,
    target: u32,
    #[comptime] rows: usize,
    #[comptime] dim: usize,
    #[comptime] t: Tile,
) {
    let units = comptime!(t.units());
    let pieces = comptime!(t.words(dim) / 4);
    let total = comptime!(rows * pieces);
    if comptime!(units % pieces == 0 && total % units == 0) {
        let row = UNIT_POS_X / comptime!(pieces as u32);
        let piece = UNIT_POS_X % comptime!(pieces as u32) * 16;
        let source = head + u64::cast_from(piece);
        let first = target + row * comptime!(t.pitch(dim) as u32) + piece;
        let position = positions + row * 4;
        #[unroll]
        for i in 0..comptime!(total / units) {
            let below = comptime!((i * units / pieces) as u32);
            copy_piece(
                first + comptime!(below * t.pitch(dim) as u32),
                source,
                shared_load(position + comptime!(below * 4)),
                stride,
            );
        }
    } else {
        let mut index = UNIT_POS_X;
        while index < comptime!(total as u32) {
            let row = index / comptime!(pieces as u32);
            let piece = index % comptime!(pieces as u32) * 16;
            copy_piece(
                target + row * comptime!(t.pitch(dim) as u32) + piece,
                head + u64::cast_from(piece),
                shared_load(positions + row * 4),
                stride,
            );
            index += comptime!(units as u32);
        }
    }
}

/// Where a lane's row of the four matrices of a left operand is.
#[cube]
pub fn lane_rows(lane: u32, #[comptime] dim: usize, #[comptime] t: Tile) -> u32 {
    lane % 16 * comptime!(t.pitch(dim) as u32) + lane / 16 * 16
}

/// Where a lane's row of the four matrices of a right operand is.
#[cube]
pub fn lane_cols(lane: u32, #[comptime] dim: usize, #[comptime] t: Tile) -> u32 {
    (lane % 8 + lane / 16 * 8) * comptime!(t.pitch(dim) as u32) + lane / 8 % 2 * 16
}

/// Where a lane begins to read the right operand of [`accumulate`]: rows of matrices to be transposed, or numbers.
#[cube]
pub fn lane_depth(lane: u32, #[comptime] dim: usize, #[comptime] t: Tile) -> u32 {
    let mut start = lane_rows(lane, dim, t);
    if comptime!(t.element == Element::Tf32) {
        start = lane % 4 * comptime!(2 * t.pitch(dim) as u32) + lane / 4 * 4;
    }
    start
}

/// Left operands of a warp's rows, from shared memory.
#[cube]
pub fn load_left(
    a: u32,
    left: &mut Array<Vector<u32, Four>>,
    #[comptime] dim: usize,
    #[comptime] t: Tile,
) {
    let depth = comptime!(t.depth(dim));
    #[unroll]
    for k in 0..depth {
        #[unroll]
        for m in 0..comptime!(t.warp_tiles) {
            let rows = load_matrices(a, comptime!(m * 16 * t.pitch(dim) + k * 32));
            left[comptime!(m * depth + k)] = operand(rows, t.element);
        }
    }
}

/// `a · bᵀ`: a warp's rows, in registers if `kept`, with the columns of a step.
#[cube]
pub fn product(
    a: u32,
    left: &Array<Vector<u32, Four>>,
    b: u32,
    #[comptime] kept: bool,
    #[comptime] dim: usize,
    #[comptime] t: Tile,
) -> Array<Vector<f32, Four>> {
    let eights = comptime!(t.eights());
    let depth = comptime!(t.depth(dim));
    let mut s = Array::<Vector<f32, Four>>::new(comptime!(t.warp_tiles * eights));
    #[unroll]
    for i in 0..comptime!(t.warp_tiles * eights) {
        s[i] = Vector::<f32, Four>::zeroed();
    }
    #[unroll]
    for k in 0..depth {
        let mut rows = Array::<Vector<u32, Four>>::new(comptime!(t.warp_tiles));
        #[unroll]
        for m in 0..comptime!(t.warp_tiles) {
            if comptime!(kept) {
                rows[m] = left[comptime!(m * depth + k)];
            } else {
                let loaded = load_matrices(a, comptime!(m * 16 * t.pitch(dim) + k * 32));
                rows[m] = operand(loaded, t.element);
            }
        }
        #[unroll]
        for n in 0..comptime!(eights / 2) {
            let right = load_matrices(b, comptime!(n * 16 * t.pitch(dim) + k * 32));
            let right = operand(right, t.element);
            #[unroll]
            for m in 0..comptime!(t.warp_tiles) {
                let at = comptime!(m * eights + 2 * n);
                s[at] = multiply(
                    rows[m],
                    right.extract(0usize),
                    right.extract(1usize),
                    s[at],
                    t.element,
                );
                let at = comptime!(at + 1);
                s[at] = multiply(
                    rows[m],
                    right.extract(2usize),
                    right.extract(3usize),
                    s[at],
                    t.element,
                );
            }
        }
    }
    s
}

/// `o += p · b`: left operands in registers, the rows of a step in shared memory.
///
/// In tf32 a lane's columns of p are two neighbours where mma.sync wants the first and the second half of eight; so it gets
/// the rows of b in that order, too.
#[cube]
pub fn accumulate(
    p: &Array<Vector<u32, Four>>,
    b: u32,
    o: &mut Array<Vector<f32, Four>>,
    #[comptime] dim: usize,
    #[comptime] t: Tile,
) {
    let depth = comptime!(t.depth(t.cols));
    let eights = comptime!(dim / 8);
    #[unroll]
    for k in 0..depth {
        #[unroll]
        for n in 0..comptime!(eights / 2) {
            let mut right = Vector::<u32, Four>::zeroed();
            if comptime!(t.element == Element::Tf32) {
                #[unroll]
                for i in 0..4usize {
                    let offset =
                        comptime!(((8 * k + i % 2) * t.pitch(dim) + (2 * n + i / 2) * 32) as u32);
                    right.insert(i, round(shared_load(b + offset)));
                }
            } else {
                right = load_transposes(b, comptime!(k * 16 * t.pitch(dim) + n * 32));
            }
            #[unroll]
            for m in 0..comptime!(t.warp_tiles) {
                let at = comptime!(m * eights + 2 * n);
                let left = p[comptime!(m * depth + k)];
                o[at] = multiply(
                    left,
                    right.extract(0usize),
                    right.extract(1usize),
                    o[at],
                    t.element,
                );
                let at = comptime!(at + 1);
                o[at] = multiply(
                    left,
                    right.extract(2usize),
                    right.extract(3usize),
                    o[at],
                    t.element,
                );
            }
        }
    }
}

/// Weights as left operands: the sums of one product lie as another's operand does.
#[cube]
pub fn pack_left(s: &Array<Vector<f32, Four>>, #[comptime] t: Tile) -> Array<Vector<u32, Four>> {
    let depth = comptime!(t.depth(t.cols));
    let mut p = Array::<Vector<u32, Four>>::new(comptime!(t.warp_tiles * depth));
    #[unroll]
    for m in 0..comptime!(t.warp_tiles) {
        #[unroll]
        for k in 0..depth {
            let mut four = Vector::<u32, Four>::zeroed();
            if comptime!(t.element == Element::Tf32) {
                let own = s[comptime!(m * depth + k)];
                #[unroll]
                for i in 0..4usize {
                    four.insert(i, round(bits_of(own.extract(comptime!(i % 2 * 2 + i / 2)))));
                }
            } else {
                #[unroll]
                for i in 0..2usize {
                    let pair = s[comptime!(m * t.eights() + 2 * k + i)];
                    let half = comptime!(t.element.half());
                    four.insert(
                        comptime!(2 * i),
                        pack(pair.extract(0usize), pair.extract(1usize), half),
                    );
                    four.insert(
                        comptime!(2 * i + 1),
                        pack(pair.extract(2usize), pair.extract(3usize), half),
                    );
                }
            }
            p[comptime!(m * depth + k)] = four;
        }
    }
    p
}

/// Two neighbouring numbers in memory.
#[derive(CubeType, Clone, Copy)]
pub struct Pair {
    /// The first.
    pub low: f32,
    /// The second.
    pub high: f32,
}

/// Reads the unit's pair of the `n`-th eight of the row at word `row`.
#[cube]
pub fn load_pair(
    words: &[u32],
    row: usize,
    quad: u32,
    #[comptime] n: usize,
    #[comptime] t: Tile,
) -> Pair {
    let mut pair = Pair {
        low: f32::new(0.0),
        high: f32::new(0.0),
    };
    if comptime!(t.element == Element::Tf32) {
        let at = row + quad as usize + comptime!(8 * n);
        pair.low = of_bits(words[at]);
        pair.high = of_bits(words[at + 1]);
    } else {
        let word = words[row + (quad / 2) as usize + comptime!(4 * n)];
        pair.low = unpack(word, false, comptime!(t.element.half()));
        pair.high = unpack(word, true, comptime!(t.element.half()));
    }
    pair
}

/// Writes what [`load_pair`] reads.
#[cube]
pub fn store_pair(
    words: &mut [u32],
    row: usize,
    quad: u32,
    pair: &Pair,
    #[comptime] n: usize,
    #[comptime] t: Tile,
) {
    if comptime!(t.element == Element::Tf32) {
        let at = row + quad as usize + comptime!(8 * n);
        words[at] = bits_of(pair.low);
        words[at + 1] = bits_of(pair.high);
    } else {
        let half = comptime!(t.element.half());
        words[row + (quad / 2) as usize + comptime!(4 * n)] = pack(pair.low, pair.high, half);
    }
}

/// Softcaps scores. tanh x = 1 − 2 / (1 + exp 2x); PTX's tanh has but eleven bits.
#[cube]
pub fn cap(s: &mut Array<Vector<f32, Four>>, softcap: f32, cap_scale: f32, #[comptime] t: Tile) {
    #[unroll]
    for n in 0..comptime!(t.warp_tiles * t.eights()) {
        let mut four = s[n];
        #[unroll]
        for i in 0..4usize {
            let e = exp2(four.extract(i) * cap_scale);
            four.insert(
                i,
                multiply_add(-2.0f32 * softcap, reciprocal(1.0f32 + e), softcap),
            );
        }
        s[n] = four;
    }
}

/// Sets scores of pairs that are not computed to −∞. `row` is the unit's first row, `entry` the word of the step's first
/// entry.
#[cube]
pub fn mask(
    s: &mut Array<Vector<f32, Four>>,
    plan: &[u32],
    masks: usize,
    entry: usize,
    row: u32,
    quad: u32,
    #[comptime] t: Tile,
) {
    let infinity = f32::new(f32::NEG_INFINITY);
    let word_cols = comptime!(t.group.min(32));
    let row_words = comptime!(t.group.div_ceil(32));
    #[unroll]
    for piece in 0..comptime!(t.cols / word_cols) {
        let col = comptime!(piece * word_cols);
        let id = plan[entry + comptime!(col / t.group * 2 + 1)];
        let at = masks
            + (id * comptime!((t.rows() * row_words) as u32) + row * comptime!(row_words as u32))
                as usize
            + comptime!(col % t.group / 32);
        #[unroll]
        for m in 0..comptime!(t.warp_tiles) {
            let upper = plan[at + comptime!(16 * m * row_words)] >> quad;
            let lower = plan[at + comptime!((16 * m + ROW_PAIR as usize) * row_words)] >> quad;
            #[unroll]
            for eight in 0..comptime!(word_cols / 8) {
                let n = comptime!(m * t.eights() + col / 8 + eight);
                let mut four = s[n];
                #[unroll]
                for i in 0..2usize {
                    let bit = comptime!(1u32 << (8 * eight + i));
                    four.insert(i, select(upper & bit != 0, four.extract(i), infinity));
                    let i = comptime!(i + 2);
                    four.insert(i, select(lower & bit != 0, four.extract(i), infinity));
                }
                s[n] = four;
            }
        }
    }
}
