//! Means of all rows of a list via means of blocks: a single cube would take too long to sum a list.

use crate::kernels::rows::blocks::{Beside, Blocked, RowBlocks, block_means};
use blocksparse_cubecl::prelude::*;

/// Number of adjacent channels of a cube, one per unit.
const CHANNELS: usize = 64;

/// Number of units that share a channel.
const PARTS: usize = 4;

/// Number of means that a unit loads before it adds the first of them.
const AT_A_TIME: usize = 8;

/// Sizes of the lists and their blocks.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
struct Sizes {
    lists: usize,
    rows: usize,
    block: usize,
    blocks: usize,
    width: usize,
}

/// Computes the weighted mean of block means, with some channels of a list per cube. Blocks are weighted by their number of rows.
#[cube(launch_unchecked, address_type = "dynamic")]
fn of_means(means: &[f32], whole: &mut [f32], of: Sizes) {
    let unit = UNIT_POS as usize;
    let columns = of.width.div_ceil(comptime!(CHANNELS));
    // Surplus cubes repeat the last one.
    let cube = CUBE_POS.min(of.lists * columns - 1);
    let list = cube / columns;
    let channel = cube % columns * comptime!(CHANNELS) + unit % comptime!(CHANNELS);
    let part = unit / comptime!(CHANNELS);
    let own = channel.min(of.width - 1);
    let mut sum = 0.0f32.runtime();
    let mut block = part;
    while block < of.blocks {
        #[unroll]
        for i in 0..comptime!(AT_A_TIME) {
            let at = block + comptime!(i * PARTS);
            let known = at.min(of.blocks - 1);
            let members = min(of.block, of.rows - known * of.block);
            let weight = select(at < of.blocks, f32::cast_from(members), 0.0f32);
            sum += means[(list * of.blocks + known) * of.width + own] * weight;
        }
        block += comptime!(AT_A_TIME * PARTS);
    }
    let mut sums = Shared::<[f32]>::new_slice(comptime!(CHANNELS * PARTS));
    sums[unit] = sum;
    sync_cube();
    if unit < comptime!(CHANNELS) && channel < of.width {
        for other in 1..comptime!(PARTS) {
            sum += sums[other * comptime!(CHANNELS) + unit];
        }
        whole[list * of.width + channel] = sum / f32::cast_from(of.rows);
    }
}

/// Computes the mean of all rows of each list of `x`, contiguous `[lists, rows, width]` with at least one row: f32 `[lists, width]`.
pub(crate) fn whole_means(
    client: &Client,
    element: ElemType,
    x: &Handle,
    [lists, rows, width]: [usize; 3],
) -> Result<Handle, KernelError> {
    let made = |numbers: usize| client.empty(numbers * size_of::<f32>());
    // This block size balances the sequential sums of both launches.
    let block = (2 * rows.isqrt()).max(1);
    let of = RowBlocks::new(lists, [rows, width], block);
    let blocks = of.blocks();
    let (means, whole) = (made(lists * blocks * width), made(lists * width));
    let blocked = Blocked {
        x,
        of: &of,
        means: &means,
    };
    block_means(client, element, blocked, Beside::default())?;
    let cubes = lists * width.div_ceil(CHANNELS);
    if cubes == 0 {
        return Ok(whole);
    }
    let numbers = lists * blocks * width;
    // SAFETY: units read means of existing blocks, and each channel of a list has one writer.
    unsafe {
        of_means::launch_unchecked(
            client,
            spread(client, cubes as u64)?,
            CubeDim::new_1d((CHANNELS * PARTS) as u32),
            address_of(client, numbers)?,
            buffer(&means, numbers),
            buffer(&whole, lists * width),
            SizesLaunch::new(lists, rows, block, blocks, width),
        );
    }
    Ok(whole)
}
