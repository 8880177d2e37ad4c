//! PTX of this kernel: votes, shuffles of words, bits.

use cubecl::prelude::*;

use crate::kernels::shared::asm::val;

/// A bit for each unit of the warp whose `x` is above its `y`.
#[cube]
pub fn votes_above(x: u32, y: u32) -> u32 {
    let o: u32;
    gpu_asm!("{{ .reg .pred p; setp.gt.u32 p, {x}, {y}; vote.sync.ballot.b32 {o}, p, 0xffffffff; }}",
        o = out(_) o, x = in(_) val::<u32>(x), y = in(_) val::<u32>(y), options(nomem));
    o
}

/// A lane's word.
#[cube]
pub fn word_of(x: u32, lane: u32) -> u32 {
    let o: u32;
    gpu_asm!("shfl.sync.idx.b32 {o}, {i}, {l}, 31, 0xffffffff;", o = out(_) o, i = in(_) val::<u32>(x), l = in(_) val::<u32>(lane), options(nomem));
    o
}

/// The word of the lane before; the first lane's own.
#[cube]
pub fn word_before(x: u32) -> u32 {
    let o: u32;
    gpu_asm!("shfl.sync.up.b32 {o}, {i}, 1, 0, 0xffffffff;", o = out(_) o, i = in(_) val::<u32>(x), options(nomem));
    o
}

/// How many bits are set.
#[cube]
pub fn count_bits(x: u32) -> u32 {
    let o: u32;
    gpu_asm!("popc.b32 {o}, {i};", o = out(_) o, i = in(_) val::<u32>(x), options(pure, nomem));
    o
}

/// The lowest bit that is set; some bit is.
#[cube]
pub fn lowest_bit(x: u32) -> u32 {
    let o: u32;
    gpu_asm!("{{ .reg .b32 r; brev.b32 r, {i}; bfind.shiftamt.u32 {o}, r; }}", o = out(_) o, i = in(_) val::<u32>(x), options(pure, nomem));
    o
}
