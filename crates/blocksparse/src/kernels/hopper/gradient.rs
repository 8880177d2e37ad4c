//! What the two backward kernels share: masks, and how gradients are stored.

use cubecl::prelude::*;

use super::asm::*;
use crate::kernels::simt::tile::Listing;

/// The shape of a step's masks.
#[derive(Clone, Copy)]
pub struct MaskShape {
    /// Rows of a tile.
    pub rows: usize,
    /// Columns of a step.
    pub cols: usize,
    /// Consecutive positions an entry names.
    pub group: usize,
    /// Words of an entry.
    pub entry_words: usize,
}

/// How rows are stored.
#[derive(Clone, Copy)]
pub struct StoreShape {
    /// Type of the tensor.
    pub half: Half,
    /// Its width.
    pub dim: usize,
    /// Whether positions are listed by residue class.
    pub residue: bool,
    /// Whether rows are added to what is there.
    pub carry: bool,
}

/// Sets scores of pairs that are not computed to −∞. The unit has rows `row` and `row + 8`, and columns `quad` and
/// `quad + 1` of every eight.
#[cube]
pub fn mask<S: Size>(
    s_in: Vector<f32, S>,
    plan: &[u32],
    masks: usize,
    first_entry: usize,
    j: u32,
    row: u32,
    quad: u32,
    #[comptime] t: MaskShape,
) -> Vector<f32, S> {
    let mut s = s_in;
    let infinity = f32::new(f32::NEG_INFINITY);
    let word_cols = comptime!(t.group.min(32));
    let row_words = comptime!(t.group.div_ceil(32));
    let entry = first_entry + (j * comptime!((t.cols / t.group * t.entry_words) as u32)) as usize;
    #[unroll]
    for piece in 0..comptime!(t.cols / word_cols) {
        let col = comptime!(piece * word_cols);
        let id = plan[entry + comptime!(col / t.group * t.entry_words + 1)];
        let at = masks
            + (id * comptime!((t.rows * row_words) as u32) + row * comptime!(row_words as u32))
                as usize
            + comptime!(col % t.group / 32);
        let upper = plan[at] >> quad;
        let lower = plan[at + comptime!(8 * row_words)] >> quad;
        #[unroll]
        for eight in 0..comptime!(word_cols / 8) {
            #[unroll]
            for i in 0..2usize {
                let bit = comptime!(1u32 << (8 * eight + i));
                let at = comptime!(4 * (col / 8 + eight) + i);
                s.insert(at, select(upper & bit != 0, s.extract(at), infinity));
                let at = comptime!(4 * (col / 8 + eight) + i + 2);
                s.insert(at, select(lower & bit != 0, s.extract(at), infinity));
            }
        }
    }
    s
}

/// Stores the unit's two rows.
#[cube]
pub fn store_rows<O: Size>(
    out: &mut [u32],
    acc: &Vector<f32, O>,
    start: u32,
    first: u32,
    place: u32,
    place8: u32,
    listing: &Listing,
    len: u32,
    lane: u32,
    factor: f32,
    #[comptime] t: StoreShape,
) {
    #[unroll]
    for half in 0..2usize {
        let mut own = place;
        if comptime!(half == 1) {
            own = place8;
        }
        let mut position = own;
        let mut exists = own < len;
        if comptime!(t.residue) {
            let class = own / listing.class_len as u32;
            position = own % listing.class_len as u32 * listing.stride as u32 + class;
            exists = class < listing.stride as u32 && position < len;
        }
        if exists {
            let target = start as usize
                + (first + position) as usize * comptime!(t.dim / 2)
                + (lane % 4) as usize;
            #[unroll]
            for j in 0..comptime!(t.dim / 8) {
                let i = comptime!(4 * j + 2 * half);
                let mut low = acc.extract(i) * factor;
                let mut high = acc.extract(comptime!(i + 1)) * factor;
                let at = target + comptime!(4 * j);
                if comptime!(t.carry) {
                    let before = out[at];
                    low += unpack(before, false, t.half);
                    high += unpack(before, true, t.half);
                }
                out[at] = pack(low, high, t.half);
            }
        }
    }
}
