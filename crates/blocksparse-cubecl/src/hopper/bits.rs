//! The bits of coarse entries: which blocks of a step a warp's rows keep.
//!
//! A warp has 16 rows of a tile, and so rows of one block where blocks are 16 or wider: what it keeps of a step is the same for all its
//! units, and one read of a word says it, before any score is there.

use cubecl::prelude::*;

use super::base::Base;
use crate::arch::sm90::{uniform, unit};

/// The bits of the warp's row of blocks, the first block's lowest, of the entry at word `entry`; all where entries have none.
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

/// Whether the `block`-th of [`kept_blocks`] is kept.
#[cube]
pub fn keeps(kept: u32, #[comptime] block: usize) -> bool {
    kept & comptime!(1u32 << block) != 0
}
