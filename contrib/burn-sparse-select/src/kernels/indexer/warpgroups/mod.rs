//! Sums over many heads on wgmma, for GPUs of compute capability 9.0: of rows of 128 numbers, over all keys that queries see.
//!
//! Cubes stay to the end of a launch and share its steps evenly. A cube has 256 keys at a time, 64 to a warpgroup. Columns are queries by heads, 128 a step, read
//! by all warpgroups. What each wants of a step is a number of a key and a query: a unit adds what its columns of a query give, and three neighbours the others.
//!
//! ```text
//! order    the steps of a launch
//! heads    what the heads of a query give a key, added up
//! halves   of bf16 and f16
//! bytes    of numbers of 8 bits
//! blocks   of bf16 and f16, of the keys of blocks that queries list
//! ```

mod blocks;
mod bytes;
mod halves;
mod heads;
mod order;

pub(crate) use blocks::{BlockSums, PLACES, launch_blocks};
pub(crate) use bytes::{ByteSums, launch_bytes};
pub(crate) use halves::{GroupSums, launch};

use cubecl::prelude::Client;

use crate::kernels::indexer::pairs::PairSizes;
use blocksparse_cubecl::arch::swizzled::Spans;
use blocksparse_cubecl::call::check_hopper;
use blocksparse_cubecl::tuning::{TierLimit, Tuning};

/// Warpgroups of a cube, keys of each, and of all.
const WARPGROUPS: usize = 4;
const GROUP_KEYS: usize = 64;
const TILE_KEYS: usize = WARPGROUPS * GROUP_KEYS;
const WARPS: usize = 4 * WARPGROUPS;
const UNITS: usize = 32 * WARPS;

/// Columns of a step: queries by heads.
const COLUMNS: usize = 128;
/// Of which so many lie side by side in a unit's registers.
const EIGHT: usize = 8;

/// Elements of a query or a key.
const WIDTH: usize = 128;

/// The keys of a warpgroup in 16 bits. Those of the first are at the beginning of shared memory, and so on.
const KEY_SPAN: Spans = Spans {
    rows: GROUP_KEYS,
    dim: WIDTH,
    far: false,
};
/// The rows of a step in 16 bits.
const COLUMN_SPAN: Spans = Spans {
    rows: COLUMNS,
    ..KEY_SPAN
};

/// Whether the device runs a kernel with so much shared memory, tuning does not leave these out, and the call's heads and width are some that they take.
fn takes(client: &Client, sizes: &PairSizes, shared_bytes: usize) -> bool {
    let of_device = client.properties();
    let is_left_out = Tuning::or_default().tier == TierLimit::Mma;
    let is_served = !is_left_out && check_hopper(of_device).is_ok();
    let [heads, kv_heads] = sizes.heads;
    let divides = heads.is_multiple_of(EIGHT) && COLUMNS.is_multiple_of(heads.max(1));
    // Of narrower rows what is made of products takes longer than these, and mma.sync is as fast.
    let is_taken = kv_heads == 1 && divides && sizes.width == WIDTH && sizes.listed.is_none();
    is_served && is_taken && shared_bytes <= of_device.hardware.max_shared_memory_size
}

/// Steps of each cube, so that all multiprocessors have as many: shared memory, or registers, have room for one cube, which stays to the end.
fn share(client: &Client, steps: usize) -> usize {
    let known = client.properties().hardware.num_streaming_multiprocessors;
    let cubes = known.map_or(1, |known| known as usize);
    steps.div_ceil(cubes).max(1)
}
