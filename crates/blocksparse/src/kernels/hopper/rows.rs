//! A tile's own rows, and how a unit's numbers of a row become operands and 16 bytes of memory.

use cubecl::prelude::*;

use super::asm::*;
use crate::kernels::shared::walk::{Four, PlanParts};

/// Where a tile's own rows are: its first place, or the word of its first block.
#[cube]
pub fn own_rows(
    parts: &PlanParts,
    first_record: usize,
    tile: u32,
    #[comptime] rows: usize,
    #[comptime] group: usize,
    #[comptime] clustered: bool,
) -> u32 {
    let mut first = tile * comptime!(rows as u32);
    if comptime!(clustered) {
        first = (parts.rows + (first_record + tile as usize) * comptime!(rows / group)) as u32;
    }
    first
}

/// The place of a tile's own row. Rows of a clustered tile lie in blocks of `group`.
#[cube]
pub fn own_place(
    plan: &[u32],
    rows: u32,
    row: u32,
    #[comptime] group: usize,
    #[comptime] clustered: bool,
) -> u32 {
    let mut place = rows + row;
    if comptime!(clustered) {
        let block = comptime!(group as u32);
        place = plan[(rows + row / block) as usize] * block + row % block;
    }
    place
}

/// `p` as the left operand of a product. Its registers 4k … 4k + 3 are those of depth step k.
#[cube]
pub fn pack_all<S: Size, P: Size>(s: Vector<f32, S>, #[comptime] half: Half) -> Vector<u32, P> {
    let mut p = Vector::<u32, P>::zeroed();
    #[unroll]
    for i in 0..P::value() {
        p.insert(
            i,
            pack(
                s.extract(comptime!(2 * i)),
                s.extract(comptime!(2 * i + 1)),
                half,
            ),
        );
    }
    p
}

/// A unit has 4 of every 16 bytes of its row. Four neighbours trade theirs, so that each has 16 at a time: a transposition,
/// so it also undoes itself.
#[cube]
pub fn trade_four(own: Vector<u32, Four>, lane: u32) -> Vector<u32, Four> {
    let odd = lane & 1 != 0;
    let high = lane & 2 != 0;
    let w0 = own.extract(0usize);
    let w1 = own.extract(1usize);
    let w2 = own.extract(2usize);
    let w3 = own.extract(3usize);
    let from0 = trade(select(odd, w0, w1), 1u32);
    let from1 = trade(select(odd, w2, w3), 1u32);
    let a0 = select(odd, from0, w0);
    let a1 = select(odd, w1, from0);
    let b0 = select(odd, from1, w2);
    let b1 = select(odd, w3, from1);
    let from0 = trade(select(high, a0, b0), 2u32);
    let from1 = trade(select(high, a1, b1), 2u32);
    let mut four = Vector::<u32, Four>::zeroed();
    four.insert(0usize, select(high, from0, a0));
    four.insert(1usize, select(high, from1, a1));
    four.insert(2usize, select(high, b0, from0));
    four.insert(3usize, select(high, b1, from1));
    four
}
