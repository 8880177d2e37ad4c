//! Bits of coarse entries: which blocks of a step a warp's rows attend to.
//!
//! A warp has 16 rows of a tile, and so rows of one block if blocks are 16 or wider. Its bits are the same for all its units, and one load gets them before
//! any score is computed.

use cubecl::prelude::*;

use super::base::Base;
use crate::arch::sm90::{uniform, unit};

/// Returns the bits of the warp's row of blocks in the entry at word `entry`, the first block in the lowest bit. Returns 0 if entries are not coarse.
#[cube]
pub fn kept_blocks(plan: &[u32], entry: usize, #[comptime] t: Base) -> u32 {
    let mut kept = 0u32;
    if comptime!(t.coarse.is_some()) {
        let line = uniform(unit() / 32) * 16 / comptime!(t.coarse.unwrap() as u32);
        let first = line * comptime!(t.coarse_blocks().unwrap() as u32);
        kept = plan[entry + comptime!(t.bits_at()) + (first / 32) as usize] >> (first % 32);
    }
    kept
}

/// Whether bit `block` of [`kept_blocks`] is set.
#[cube]
pub fn keeps(kept: u32, #[comptime] block: usize) -> bool {
    kept & comptime!(1u32 << block) != 0
}
