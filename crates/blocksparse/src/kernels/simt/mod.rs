//! The `simt` tier: exact kernels on scalar multiply-adds, for any CubeCL runtime.
//!
//! A cube of `units_x × units_y` units computes a tile. Operands lie in shared memory in the accumulator's
//! precision, in fours; a unit holds `unit_rows × 4` scores and `unit_rows × unit_fours` fours of the output in registers.
//! What the units of a row exchange goes through shared memory, which on devices with plane
//! operations needs no barrier of the whole cube.

pub(super) mod backward;
mod delta;
pub(super) mod dropout;
pub(super) mod forward;
mod gather;
mod mask;
pub(super) mod mass;
mod product;
pub(super) mod score;
pub(super) mod tile;

use cubecl::ir::features::Plane;
use cubecl::prelude::*;

pub use tile::Tile;

use super::{KernelError, Sizes};
use crate::BlockLayout;
use crate::plan::{Grouping, Walk};
use tile::pitch;

/// A shape that a tile may have, and its speed relative to the others on a large problem, as measured on an H200.
struct Candidate {
    rows: usize,
    cols: usize,
    unit_rows: usize,
    /// Of the forward pass, at widths up to 64 and at larger ones.
    forward: [f64; 2],
    /// Of the backward pass.
    backward: [f64; 2],
}

const fn candidate(
    rows: usize,
    cols: usize,
    unit_rows: usize,
    forward: [f64; 2],
    backward: [f64; 2],
) -> Candidate {
    Candidate {
        rows,
        cols,
        unit_rows,
        forward,
        backward,
    }
}

/// Larger tiles read less shared memory per multiply-add; of smaller ones more cubes share a multiprocessor.
const CANDIDATES: [Candidate; 9] = [
    candidate(128, 64, 8, [0.96, 1.0], [1.0, 1.0]),
    candidate(64, 64, 4, [0.91, 0.8], [0.9, 0.95]),
    candidate(64, 32, 4, [1.0, 0.84], [0.98, 0.87]),
    candidate(32, 32, 4, [0.83, 0.67], [0.88, 0.7]),
    candidate(32, 16, 2, [0.35; 2], [0.35; 2]),
    candidate(16, 16, 2, [0.25; 2], [0.25; 2]),
    candidate(16, 8, 1, [0.15; 2], [0.15; 2]),
    candidate(8, 8, 1, [0.1; 2], [0.1; 2]),
    // Rows of 256 in 32 KB.
    candidate(8, 4, 1, [0.05; 2], [0.05; 2]),
];

/// Bytes of shared memory of a cube.
pub fn shared_bytes(tile: &Tile, kernel: super::Kernel, accumulator: usize) -> usize {
    let own = pitch(tile.head_dim)
        + match kernel {
            super::Kernel::Forward => 0,
            _ => pitch(tile.value_dim),
        };
    let gathered = pitch(tile.head_dim) + pitch(tile.value_dim);
    let weights = tile.weight_pitch()
        * match kernel {
            super::Kernel::BackwardColumns => 2,
            _ => 1,
        };
    let fours = tile.rows * (own + weights) + tile.cols() * gathered;
    let scratch = match kernel {
        super::Kernel::BackwardRows => 1,
        super::Kernel::BackwardColumns if !tile.bias => 1,
        _ => forward::scratch_len(*tile),
    };
    // The compiler may align each of the up to seven arrays.
    (fours * 4 + scratch) * accumulator + 7 * 16
}

/// `BLOCKSPARSE_SIMT_TILE=ROWSxCOLSxUNIT_ROWS` leaves one candidate: for measuring them.
fn forced() -> Option<(usize, usize, usize)> {
    let text = std::env::var("BLOCKSPARSE_SIMT_TILE").ok()?;
    let mut numbers = text.split('x').map(|part| part.parse().ok());
    Some((numbers.next()??, numbers.next()??, numbers.next()??))
}

/// The tile that should be fastest among those that fit the device.
pub fn choose(
    layout: &BlockLayout,
    sizes: &Sizes,
    kernel: super::Kernel,
    residue: bool,
    carry: bool,
    properties: &DeviceProperties,
) -> Result<Tile, KernelError> {
    let hardware = &properties.hardware;
    let accumulator = sizes.accumulator().size();
    let b = layout.block_size();
    let walk = kernel.walk();
    let may_cluster = sizes.may_cluster(layout, walk);
    let mut best: Option<(f64, Tile)> = None;
    let forced = forced();
    for candidate in &CANDIDATES {
        let shape = (candidate.rows, candidate.cols, candidate.unit_rows);
        if forced.is_some_and(|forced| forced != shape) {
            continue;
        }
        let units_x = candidate.cols / 4;
        let planes = &properties.features.plane;
        let group = candidate.cols.min(b);
        let tile = Tile {
            rows: candidate.rows,
            units_x,
            unit_rows: candidate.unit_rows,
            head_dim: sizes.head_dim,
            value_dim: sizes.value_dim,
            group,
            mask_words: group.div_ceil(32),
            store: sizes.store.then_some(b),
            softcap: sizes.softcap,
            alibi: sizes.alibi,
            dropout: sizes.dropout,
            bias: sizes.bias,
            relative: sizes.relative,
            bias_gradient: false,
            planes: planes.contains(Plane::Ops)
                && planes.contains(Plane::Sync)
                && hardware.plane_size_min as usize >= units_x,
            residue,
            carry,
            clustered: false,
        };
        let fits = shared_bytes(&tile, kernel, accumulator) <= hardware.max_shared_memory_size
            && tile.units() <= hardware.max_units_per_cube as usize
            && tile.units() <= hardware.max_cube_dim.0 as usize
            && (!sizes.store || tile.rows <= b);
        let length = match walk {
            Walk::Rows => layout.seq_q(),
            Walk::Columns => layout.seq_kv(),
        };
        let speeds = match kernel {
            super::Kernel::Forward => candidate.forward,
            _ => candidate.backward,
        };
        let speed = speeds[usize::from(sizes.head_dim.max(sizes.value_dim) > 64)];
        let waste = length.next_multiple_of(tile.rows) as f64 / length as f64;
        // No grouping computes less than the allowed pairs, and looking at one takes a pass over the layout's blocks.
        let hopeless = best.is_some_and(|(least, _)| waste / speed >= least);
        if !fits || hopeless {
            continue;
        }
        let grouping = Grouping::best(layout, walk, [tile.rows, tile.cols()], may_cluster);
        let tile = Tile {
            clustered: grouping.clustered,
            ..tile
        };
        let cost = grouping.overhead * waste / speed;
        if best.is_none_or(|(least, _)| cost < least) {
            best = Some((cost, tile));
        }
    }
    best.map(|(_, tile)| tile).ok_or(KernelError::SharedMemory {
        head_dim: sizes.head_dim,
        value_dim: sizes.value_dim,
        available: hardware.max_shared_memory_size,
    })
}
