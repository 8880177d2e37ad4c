//! Sums over many heads on wgmma, for GPUs of compute capability 9.0: rows of 128 elements, over all keys that queries see.
//!
//! The launch is persistent: cubes split its steps evenly. A cube has 256 keys at a time, 64 per warpgroup. Columns are (query, head) pairs, 128 per step, and
//! all warpgroups read them. The result of a step is one number per key and query: a unit sums its columns of a query, and three adjacent units the others.
//!
//! ```text
//! order    steps of a launch, and their order
//! heads    sum over a query's heads for each key
//! halves   kernel for bf16 and f16
//! bytes    kernel for fp8
//! blocks   kernel for the keys of listed blocks, bf16 and f16
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

/// Number of warpgroups of a cube, of keys of each, and of keys of a cube.
const WARPGROUPS: usize = 4;
const GROUP_KEYS: usize = 64;
const TILE_KEYS: usize = WARPGROUPS * GROUP_KEYS;
const WARPS: usize = 4 * WARPGROUPS;
const UNITS: usize = 32 * WARPS;

/// Number of columns of a step: (query, head) pairs.
const COLUMNS: usize = 128;
/// Number of adjacent columns in a unit's registers.
const EIGHT: usize = 8;

/// Number of elements of a query or a key.
const WIDTH: usize = 128;

/// Layout of a warpgroup's 16-bit keys. Those of the first warpgroup are at the start of shared memory, the others follow.
const KEY_SPAN: Spans = Spans {
    rows: GROUP_KEYS,
    dim: WIDTH,
    far: false,
};
/// Layout of a step's 16-bit rows.
const COLUMN_SPAN: Spans = Spans {
    rows: COLUMNS,
    ..KEY_SPAN
};

/// Returns whether warpgroups serve the call: the device has this much shared memory, tuning does not disable them, and the heads and the width are supported.
fn takes(client: &Client, sizes: &PairSizes, shared_bytes: usize) -> bool {
    let of_device = client.properties();
    let is_left_out = Tuning::or_default().tier == TierLimit::Mma;
    let is_served = !is_left_out && check_hopper(of_device).is_ok();
    let [heads, kv_heads] = sizes.heads;
    let divides = heads.is_multiple_of(EIGHT) && COLUMNS.is_multiple_of(heads.max(1));
    // For narrower rows the epilogue takes longer than the matmul, and mma.sync is as fast.
    let is_taken = kv_heads == 1 && divides && sizes.width == WIDTH && sizes.listed.is_none();
    is_served && is_taken && shared_bytes <= of_device.hardware.max_shared_memory_size
}

/// Returns the number of steps of each cube, so that all multiprocessors have equally many. Shared memory or registers limit a multiprocessor to one persistent
/// cube.
fn share(client: &Client, steps: usize) -> usize {
    let known = client.properties().hardware.num_streaming_multiprocessors;
    let cubes = known.map_or(1, |known| known as usize);
    steps.div_ceil(cubes).max(1)
}
