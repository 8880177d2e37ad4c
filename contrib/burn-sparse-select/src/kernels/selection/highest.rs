//! Highest-scoring blocks of each row, one row per warp. Adjacent lanes read each score once.

use crate::kernels::selection::compressed::chosen::{insert_all, nothing_chosen};
use blocksparse_cubecl::ScoredRows;
use blocksparse_cubecl::call::check_ampere;
use blocksparse_cubecl::prelude::*;
use blocksparse_cubecl::shared::order_key::key;

/// Number of rows of a cube.
const WARPS: usize = 4;

/// Number of scores that a lane loads ahead.
const AHEAD: usize = 4;

/// Maximum number of blocks of a row: one per lane.
const MOST: usize = 32;

/// Returns whether a device has warps, and `most` does not exceed the number of lanes.
pub fn is_served(client: &Client, of: &ScoredRows) -> bool {
    (1..=MOST).contains(&of.most) && check_ampere(client.properties()).is_ok()
}

/// Computes the result of [`highest_blocks`](blocksparse_cubecl::highest_blocks), with the same order of equal scores.
///
/// # Errors
/// [`KernelError`] if the device cannot index the scores.
pub fn highest_of_rows(
    client: &Client,
    of: &ScoredRows,
    scores: &Handle,
    picks: &Handle,
) -> Result<(), KernelError> {
    let count = of.lists * of.rows;
    let (all, chosen) = (count * of.blocks, count * of.most);
    let address = address_of(client, all.max(chosen).max(32 * count))?;
    let cubes = spread(client, count.div_ceil(WARPS) as u64)?;
    // SAFETY: a warp below `count` reads the scores of its row and writes the selection of its row.
    unsafe {
        highest::launch_unchecked(
            client,
            cubes,
            CubeDim::new_1d(32 * WARPS as u32),
            address,
            buffer(scores, all),
            buffer(picks, chosen),
            count,
            of.rows,
            of.position as i32,
            of.blocks,
            of.block,
            of.most as u32,
        );
    }
    Ok(())
}

#[cube(launch_unchecked, address_type = "dynamic")]
fn highest(
    scores: &[u32],
    picks: &mut [i32],
    count: usize,
    rows: usize,
    first_position: i32,
    blocks: usize,
    block: usize,
    most: u32,
) {
    let lane = UNIT_POS_X % 32;
    let row = CUBE_POS * comptime!(WARPS) + (UNIT_POS_X / 32) as usize;
    if row < count {
        let position = max((row % rows) as i32 + first_position, 0i32) as usize;
        // Blocks before the row's own.
        let candidates = (position / block).min(blocks);
        let start = row * blocks;
        let mut chosen = nothing_chosen(1usize);
        let mut first = 0usize.runtime();
        while first < candidates {
            let mut keys = Array::<u32>::new(comptime!(AHEAD));
            #[unroll]
            for i in 0..comptime!(AHEAD) {
                let at = first + comptime!(32 * i) + lane as usize;
                // The lowest key.
                keys[i] = 0u32.runtime();
                if at < candidates {
                    keys[i] = key(scores[start + at]);
                }
            }
            #[unroll]
            for i in 0..comptime!(AHEAD) {
                let its = first as u32 + comptime!(32 * i as u32) + lane;
                insert_all(&mut chosen, keys[i], its, u32::MAX, most, 0usize);
            }
            first += comptime!(32 * AHEAD);
        }
        if lane < most {
            picks[row * most as usize + lane as usize] = chosen.blocks[0usize] as i32;
        }
    }
}
