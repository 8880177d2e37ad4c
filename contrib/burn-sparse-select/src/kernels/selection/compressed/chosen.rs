//! The highest few of each query, in the units of a warp.

use cubecl::prelude::*;

use crate::kernels::selection::compressed::asm::{
    count_bits, lowest_bit, votes_above, word_before, word_of,
};

/// The highest few of each query: lane `i` has the `i`-th.
#[derive(CubeType)]
pub struct Chosen {
    keys: Array<u32>,
    pub blocks: Array<u32>,
    /// Keys that others have to be above.
    last: Array<u32>,
}

#[cube]
pub fn nothing_chosen(#[comptime] queries: usize) -> Chosen {
    let mut keys = Array::<u32>::new(queries);
    let mut blocks = Array::<u32>::new(queries);
    let mut last = Array::<u32>::new(queries);
    #[unroll]
    for i in 0..queries {
        keys[i] = 0u32.runtime();
        blocks[i] = 0xffff_ffffu32.runtime();
        last[i] = 0u32.runtime();
    }
    Chosen { keys, blocks, last }
}

/// Inserts the keys of some lanes, whose blocks rise, where they are among the highest of a query. Of equal ones those before stay before.
#[cube]
pub fn insert_all(
    chosen: &mut Chosen,
    key: u32,
    block: u32,
    #[comptime] lanes: u32,
    most: u32,
    #[comptime] query: usize,
) {
    let lane = UNIT_POS_X % 32;
    let mut above = votes_above(key, chosen.last[query]) & lanes;
    if above != 0u32 {
        // What those before push out of the highest `most` is inserted behind them, which does no harm and takes less time than to ask.
        while above != 0u32 {
            let source = lowest_bit(above);
            let its_key = word_of(key, source);
            let its_block = word_of(block, source);
            let (own_key, own_block) = (chosen.keys[query], chosen.blocks[query]);
            // As many are no lower.
            let place = count_bits(!votes_above(its_key, own_key));
            let (key_before, block_before) = (word_before(own_key), word_before(own_block));
            let moved_key = select(lane == place, its_key, key_before);
            let moved_block = select(lane == place, its_block, block_before);
            chosen.keys[query] = select(lane < place, own_key, moved_key);
            chosen.blocks[query] = select(lane < place, own_block, moved_block);
            above &= above - 1u32;
        }
        chosen.last[query] = word_of(chosen.keys[query], most - 1);
    }
}
