//! Top-k per query, in the lanes of a warp.

use cubecl::prelude::*;

use crate::kernels::selection::compressed::asm::{
    count_bits, lowest_bit, votes_above, word_before, word_of,
};

/// Top-k per query: lane `i` has the `i`-th highest.
#[derive(CubeType)]
pub struct Chosen {
    keys: Array<u32>,
    pub blocks: Array<u32>,
    /// Lowest key of the top-k, which a new key must exceed.
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

/// Inserts the keys of some lanes, whose blocks ascend, if they are in a query's top-k. Ties stay in order.
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
        // A key may have dropped out of the top `most` by earlier insertions. It is then inserted after them, which is harmless and cheaper than a check.
        while above != 0u32 {
            let source = lowest_bit(above);
            let its_key = word_of(key, source);
            let its_block = word_of(block, source);
            let (own_key, own_block) = (chosen.keys[query], chosen.blocks[query]);
            // Number of keys that are not lower.
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
