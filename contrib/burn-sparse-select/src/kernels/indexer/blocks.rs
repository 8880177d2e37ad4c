//! Scores of the keys of blocks that queries list: each block is multiplied with the queries that list it. Only on wgmma; other devices use lists of keys.

use crate::kernels::indexer::pairs::{Epilogue, PairInputs, PairSizes, PairSum, check};
use crate::kernels::indexer::warpgroups::{BlockSums, PLACES, launch_blocks};
use blocksparse_cubecl::on_device::{ListBuffers, ListSizes, list_queries};
use blocksparse_cubecl::prelude::*;

/// Number of units of a cube of the kernel that names keys.
const UNITS: usize = 256;

/// Returns whether a device has the kernel that scores blocks of `block` keys, for this element type.
pub fn has_block_sums(client: &Client, element: ElemType, sizes: &PairSizes, block: usize) -> bool {
    check(client, element, sizes).is_ok() && BlockSums::new(client, element, sizes, block).is_some()
}

/// The queries that list each block, for slabs of equally many rows.
pub struct QueriesOfBlocks {
    /// Selection at each place, `[slabs, tiles · PLACES]`.
    choices: Handle,
    /// Block of each tile, `[slabs, tiles]`.
    tile_blocks: Handle,
    /// Number of tiles of a slab.
    tiles: usize,
    block: usize,
}

impl QueriesOfBlocks {
    /// Builds the lists of `slabs` slabs with the sizes' rows, which follow each other in `lists`, i32 `[slabs · rows, listed / block]`, negative after the
    /// last block of a row.
    ///
    /// # Errors
    /// [`KernelError`] if the device cannot index the elements.
    pub fn new(
        client: &Client,
        sizes: &PairSizes,
        slabs: usize,
        (lists, block): (&Handle, usize),
    ) -> Result<Self, KernelError> {
        let choices = sizes.rows[1] * (sizes.columns() / block);
        let blocks = sizes.seq[1].div_ceil(block);
        let tiles = (choices + (PLACES - 1) * blocks) / PLACES;
        let made = |len: usize| client.empty(slabs * len * size_of::<i32>());
        let places = made(choices);
        let of = Self {
            choices: made(tiles * PLACES),
            tile_blocks: made(tiles),
            tiles,
            block,
        };
        let buffers = ListBuffers {
            places: &places,
            choices: &of.choices,
            tile_blocks: &of.tile_blocks,
        };
        let list_sizes = ListSizes::new([slabs, choices, blocks], [tiles, PLACES]);
        list_queries(client, &list_sizes, lists, &buffers)?;
        Ok(of)
    }
}

/// Computes [`pair_sums`](crate::kernels::indexer::pair_sums) of one slab of queries of one batch entry with the keys of the blocks that each of them lists:
/// f32 `[rows, listed]`. Entries without a listed key are not written. Rows of inputs must be aligned to 16 bytes.
///
/// # Errors
/// [`KernelError`] if there is no such kernel ([`has_block_sums`]), or the device cannot index the elements.
pub fn block_sums(
    client: &Client,
    sizes: &PairSizes,
    inputs: &PairInputs,
    (of, slab): (&QueriesOfBlocks, usize),
    factor: f64,
    out: &Handle,
) -> Result<(), KernelError> {
    let Some(t) = BlockSums::new(client, inputs.element, sizes, of.block) else {
        let dtype = "what tensor cores take for an indexer's blocks".into();
        return Err(KernelError::Dtype { dtype });
    };
    let sum = PairSum::Scores {
        factor,
        near: 0,
        all: true,
    };
    let epilogue = Epilogue::new(sizes, &sum);
    let behind = |of: &Handle, len: usize| {
        let bytes = slab * len * size_of::<i32>();
        of.clone().offset_start(bytes as u64)
    };
    let choices = behind(&of.choices, of.tiles * PLACES);
    let tile_blocks = behind(&of.tile_blocks, of.tiles);
    let lists = ([&choices, &tile_blocks], of.tiles);
    launch_blocks(client, sizes, inputs, lists, epilogue, out, t)
}

/// Converts indices within the keys of each row's blocks to keys: `lists` i32 `[rows, most]`, `blocks` i32 `[rows, count]`.
///
/// # Errors
/// [`KernelError`] if the device cannot index the elements.
pub fn keys_of_places(
    client: &Client,
    lists: &Handle,
    blocks: &Handle,
    [rows, most, count]: [usize; 3],
    block: usize,
) -> Result<(), KernelError> {
    let len = rows * most;
    let address = address_of(client, len.max(rows * count))?;
    // SAFETY: a unit below `len` reads and writes its own entry, and reads a block of its row's list. The buffers have the lengths that `buffer` gets.
    unsafe {
        name_keys::launch_unchecked(
            client,
            spread(client, len.div_ceil(UNITS) as u64)?,
            CubeDim::new_1d(UNITS as u32),
            address,
            buffer(lists, len),
            buffer(blocks, rows * count),
            len,
            most,
            count,
            block,
        );
    }
    Ok(())
}

#[cube(launch_unchecked, address_type = "dynamic")]
fn name_keys(
    lists: &mut [i32],
    blocks: &[i32],
    len: usize,
    most: usize,
    count: usize,
    block: usize,
) {
    let at = CUBE_POS * comptime!(UNITS) + UNIT_POS as usize;
    if at < len {
        let place = lists[at];
        if place >= 0i32 {
            let place = place as usize;
            let its = blocks[at / most * count + place / block] as usize;
            lists[at] = (its * block + place % block) as i32;
        }
    }
}
