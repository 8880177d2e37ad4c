//! The bits of coarse entries: which blocks of a step a warp's rows keep.
//!
//! A warp has 16 rows of a tile, and so rows of one block where blocks are 16 or wider: what it keeps of a step is the same for all its
//! units, and one read of a word says it, before any score is there.

use cubecl::prelude::*;

use crate::arch::sm90::{uniform, unit};
use blocksparse::plan::Tiling;

/// The shape of a step's bits.
#[derive(Clone, Copy)]
pub struct BitShape {
    /// The size of blocks, 16 or more.
    block: usize,
    /// Columns of a step.
    cols: usize,
    /// Words of an entry before its bits.
    before: usize,
}

impl BitShape {
    /// Of a tile with coarse entries.
    pub fn of(block: Option<usize>, tiling: Tiling) -> Option<Self> {
        let bits = |block| Self {
            block,
            cols: tiling.cols,
            before: tiling.bits_at(),
        };
        block.map(bits)
    }

    /// Blocks of a row of a step.
    pub fn blocks(&self) -> usize {
        self.cols / self.block
    }

    /// Columns of a block, in eights.
    pub fn eights(&self) -> usize {
        self.block / 8
    }
}

/// The bits of the warp's row of blocks, the first block's lowest, of the entry at word `entry`; all where entries have none.
#[cube]
pub fn kept_blocks(plan: &[u32], entry: usize, #[comptime] bits: Option<BitShape>) -> u32 {
    let mut kept = 0u32;
    if comptime!(bits.is_some()) {
        let t = comptime!(bits.unwrap());
        let line = uniform(unit() / 32) * 16 / comptime!(t.block as u32);
        let first = line * comptime!(t.blocks() as u32);
        kept = plan[entry + comptime!(t.before) + (first / 32) as usize] >> (first % 32);
    }
    kept
}

/// Whether the `block`-th of [`kept_blocks`] is kept.
#[cube]
pub fn keeps(kept: u32, #[comptime] block: usize) -> bool {
    kept & comptime!(1u32 << block) != 0
}
