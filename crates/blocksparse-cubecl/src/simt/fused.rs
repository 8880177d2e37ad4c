//! The choice of the fused backward pass, and its shape.
//!
//! One loop over columns computes s and dp once for all three gradients: five products per pair, where two mainloops have seven. Its tiles add to shared
//! rows of dQ. There are a few groups of tiles. Each group has a cube, which computes its tiles one after the other, and its own sums of dQ. So each
//! element has one writer, the order is fixed, and no cube waits. The cost is memory: a dQ in the accumulator type per group.

use cubecl::ir::features::Plane;

use super::tile::fours;
use super::{Tile, cheapest, describe, shared_bytes};
use crate::args::address_in;
use crate::call::{Kernel, PartRequest};
use crate::tuning::{TierLimit, Tuning};
use blocksparse::BlockLayout;

/// The fused backward pass of a part.
#[derive(Clone, Copy, Debug)]
pub struct Fused {
    /// Tile of the loop over columns.
    pub tile: Tile,
    /// Groups of a head's tiles.
    pub groups: usize,
    /// Bytes of the sums of dQ.
    pub bytes: usize,
}

/// Largest width of the fused pass. Up to it, the fused pass was compared with the two mainloops on GPUs.
const MOST_WIDTH: usize = 128;
/// Keys per query, for each group, below which two mainloops are used. Clearing and adding up a group's sums moves them through memory twice. That takes as
/// long as the products that the fused pass saves with this many keys, on a card with 15 f32 multiply-adds per byte of memory.
const LEAST_KEYS: f64 = 48.0;
/// Units of a multiprocessor for which kernels of this size have registers.
const RESIDENT_UNITS: usize = 384;
/// Iterations after which Mesa's software devices end all loops of a unit. They have no plane operations, and nothing else distinguishes them from GPUs.
const MOST_ITERATIONS: usize = u16::MAX as usize;
/// Assumed number of multiprocessors if the device does not report it.
const MULTIPROCESSORS: u32 = 16;

impl Fused {
    /// Returns its description in printed plans.
    pub fn describe(&self, accumulator: usize) -> String {
        format!(
            "{}, {} groups with {} MiB of sums of dQ",
            describe(&self.tile, Kernel::BackwardColumns, accumulator),
            self.groups,
            self.bytes.div_ceil(1 << 20),
        )
    }
}

/// Bytes that sums of dQ may take (`BLOCKSPARSE_SIMT_SUMS`).
fn most_bytes() -> usize {
    Tuning::or_default().simt_sums.saturating_mul(1 << 20)
}

/// Returns the average number of keys per query of a head.
fn keys_of_query(layout: &BlockLayout) -> f64 {
    let blocks: usize = (0..layout.num_patterns())
        .map(|pattern| layout.pattern_blocks(pattern))
        .sum();
    let pairs = blocks as f64 * (layout.block_size() as f64).powi(2);
    pairs / (layout.num_patterns() * layout.seq_q().max(1)) as f64
}

/// Upper bound of the iterations of a step's loops: loads, products over the width, those over columns, and dQ over the tile's rows.
fn iterations_of_step(tile: &Tile) -> usize {
    let fours = fours(tile.head_dim) + fours(tile.value_dim);
    let loads = (tile.cols() * fours).div_ceil(tile.units());
    1 + loads + fours + 2 * tile.units_x + tile.rows
}

/// Returns the factor by which `cubes` in rounds of `slots` take longer than with perfect division.
fn idle(cubes: usize, slots: usize) -> f64 {
    (cubes.div_ceil(slots) * slots) as f64 / cubes.max(1) as f64
}

/// Returns the fused pass of a part.
///
/// # Errors
/// The reason why two mainloops with these tiles are used instead.
pub fn choose(part: &PartRequest, mainloops: [Tile; 2]) -> Result<Fused, &'static str> {
    let (layout, request) = (part.layout, part.request);
    let forced = part.limit == TierLimit::SimtFused;
    if part.limit == TierLimit::SimtUnfused {
        return Err("BLOCKSPARSE_TIER says simt-unfused");
    }
    if layout.device_choice().is_some() {
        return Err("how much is kept is known on the device only");
    }
    if request.head_dim.max(request.value_dim) > MOST_WIDTH {
        return Err("the widths are above 128");
    }
    let hardware = &part.properties.hardware;
    // Inputs, stats, dK with dV, the plan, scalars, and the sums of dQ.
    let buffers = 9
        + usize::from(request.score.bias)
        + usize::from(request.score.seeds)
        + usize::from(request.store);
    if buffers > hardware.max_bindings as usize {
        return Err("a kernel of the fused pass has more buffers than the device binds");
    }
    let accumulator = request.accumulator().size();
    let Some((cost, tile)) = cheapest(part, Kernel::BackwardColumns, true) else {
        return Err("no tile fits the shared memory of the device");
    };
    // Elements of a group's sums.
    let numbers =
        request.batch * layout.heads() * layout.seq_q() * tile.head_dim.next_multiple_of(4);
    let page = usize::try_from(part.properties.memory.max_page_size).unwrap_or(usize::MAX);
    let most = most_bytes().min(page) / (numbers * accumulator).max(1);
    if most == 0 {
        return Err("the sums of dQ are more than BLOCKSPARSE_SIMT_SUMS or the device allows");
    }
    let tiles = layout.seq_kv().div_ceil(tile.rows);
    let keys = keys_of_query(layout);
    let most = match forced {
        true => most.min(tiles),
        false => most.min(tiles).min((keys / LEAST_KEYS) as usize),
    };
    if most == 0 {
        return Err("too few keys of a query are kept to pay for sums of dQ");
    }
    let shared = shared_bytes(&tile, Kernel::BackwardColumns, accumulator) + 1024;
    let resident = (hardware.max_shared_memory_size / shared)
        .min(RESIDENT_UNITS / tile.units())
        .max(1);
    let multiprocessors = hardware
        .num_streaming_multiprocessors
        .unwrap_or(MULTIPROCESSORS) as usize;
    let slots = resident * multiprocessors;
    let heads = request.batch * request.kv_heads;
    // Take the fewest groups that leave almost nothing idle.
    let least = (1..=most)
        .map(|groups| idle(heads * groups, slots))
        .fold(f64::INFINITY, f64::min);
    let groups = (1..=most)
        .find(|&groups| idle(heads * groups, slots) <= 1.02 * least)
        .unwrap_or(most);
    let has_planes = part.properties.features.plane.contains(Plane::Ops);
    let heads_per_kv = layout.heads() / request.kv_heads;
    let steps = tiles.div_ceil(groups) * heads_per_kv * layout.seq_q().div_ceil(tile.cols());
    if !has_planes && steps * iterations_of_step(&tile) > MOST_ITERATIONS {
        return Err("a device without plane operations may end so long a mainloop early");
    }
    let address = |numbers| address_in(part.properties, numbers);
    if address(groups * numbers).is_err() {
        return Err("the sums of dQ are more than the device can index");
    }
    // Two mainloops have three products over rows and four over columns.
    let of_mainloops = [(Kernel::BackwardRows, 3.0), (Kernel::BackwardColumns, 4.0)]
        .into_iter()
        .map(|(kernel, products)| {
            cheapest(part, kernel, false).map_or(f64::INFINITY, |(cost, _)| cost * products)
        })
        .sum::<f64>();
    let [rows, columns] = mainloops.map(|tile| tile.rows);
    let cubes = request.batch * layout.heads() * layout.seq_q().div_ceil(rows);
    let other = heads * layout.seq_kv().div_ceil(columns);
    // Many small cubes fill the gaps of others, except in the last round.
    let mainloop_idle = (multiprocessors as f64 / cubes.min(other).max(1) as f64).max(1.0);
    if !forced && 5.0 * cost * idle(heads * groups, slots) >= of_mainloops * mainloop_idle {
        return Err("two mainloops should take less");
    }
    Ok(Fused {
        tile,
        groups,
        bytes: groups * numbers * accumulator,
    })
}
