//! The `simt` tier: exact kernels on scalar multiply-adds, for any CubeCL runtime.
//!
//! A cube of `units_x × units_y` units computes a tile. Operands are in shared memory in the accumulator's precision, in vectors of four. A unit keeps
//! `unit_rows × 4` scores and `unit_rows × unit_fours` vectors of the output in registers. The units of a row exchange values through shared memory, which
//! needs no barrier of the whole cube on devices with plane operations.

pub(super) mod attention_sums;
pub(super) mod backward;
pub(super) mod dq;
pub(super) mod dropout;
pub(super) mod forward;
pub(super) mod fused;
#[doc(hidden)]
pub mod gather;
pub(super) mod launch;
mod mask;
mod product;
pub(super) mod score;
mod score_gradient;
mod softmax;
pub(super) mod tile;

use cubecl::ir::features::Plane;
pub use tile::Tile;

use super::call::{Kernel, PartRequest};
use super::error::KernelError;
use super::limits::most_units;
use super::shared::score::described_threshold;
use super::tuning::Tuning;
use blocksparse::plan::{Grouping, Tiling};
use tile::pitch;

/// A candidate tile, as rows, columns and rows per unit, and its relative speeds on a large problem: of the forward pass, of the mainloops of the backward
/// pass, and of the fused backward pass on the scale of the mainloops. Each speed is given for widths up to 64 and for larger ones, and 0 if the tile is
/// not used. The fused speeds are from instruction counts in the machine code, not from timings.
struct Candidate([usize; 3], [[f64; 2]; 3]);

/// Larger tiles read less shared memory per multiply-add. More cubes of smaller tiles fit a multiprocessor.
const CANDIDATES: [Candidate; 10] = [
    Candidate([128, 64, 8], [[0.96, 1.0], [1.0, 1.0], [1.0, 1.0]]),
    Candidate([64, 64, 8], [[0.0; 2], [0.0; 2], [0.99, 0.8]]),
    Candidate([64, 64, 4], [[0.91, 0.8], [0.9, 0.95], [0.9, 0.95]]),
    Candidate([64, 32, 4], [[1.0, 0.84], [0.98, 0.87], [0.98, 0.87]]),
    Candidate([32, 32, 4], [[0.83, 0.67], [0.88, 0.7], [0.88, 0.7]]),
    Candidate([32, 16, 2], [[0.35; 2], [0.35; 2], [0.35; 2]]),
    Candidate([16, 16, 2], [[0.25; 2], [0.25; 2], [0.25; 2]]),
    Candidate([16, 8, 1], [[0.15; 2], [0.15; 2], [0.15; 2]]),
    Candidate([8, 8, 1], [[0.1; 2], [0.1; 2], [0.1; 2]]),
    // Fits rows of 256 elements in 32 KB.
    Candidate([8, 4, 1], [[0.05; 2], [0.05; 2], [0.05; 2]]),
];

/// Returns the bytes of shared memory of a cube.
pub fn shared_bytes(tile: &Tile, kernel: Kernel, accumulator: usize) -> usize {
    let own = pitch(tile.head_dim)
        + match kernel {
            Kernel::Forward => 0,
            _ => pitch(tile.value_dim),
        };
    let gathered = pitch(tile.head_dim) + pitch(tile.value_dim);
    let weights = tile.weight_pitch()
        * match kernel {
            Kernel::BackwardColumns if !tile.fused => 2,
            _ => 1,
        };
    let fours = tile.rows * (own + weights) + tile.cols() * gathered;
    let scratch = match kernel {
        Kernel::BackwardRows => 1,
        Kernel::BackwardColumns if !tile.score.bias => 1,
        _ => product::scratch_len(*tile),
    };
    // The compiler may align each of up to seven arrays to 16 bytes.
    (fours * 4 + scratch) * accumulator + 7 * 16
}

/// Returns the only candidate to use, if `BLOCKSPARSE_SIMT_TILE=ROWSxCOLSxUNIT_ROWS` sets one for measuring.
fn forced() -> Option<[usize; 3]> {
    Tuning::or_default().simt_tile
}

/// Returns the tiling of a tile's plan.
pub fn tiling(tile: &Tile) -> Tiling {
    Tiling {
        places: tile.store.is_some(),
        clustered: tile.clustered,
        ..Tiling::new(tile.mainloop, tile.rows, tile.cols())
    }
}

/// Returns a tile's description in printed plans. `accumulator` is the size of an accumulator element in bytes.
pub fn describe(tile: &Tile, kernel: Kernel, accumulator: usize) -> String {
    format!(
        "simt  {} × {} tiles gathered from {}-wide blocks{}, {} units, {} KiB shared{}{}",
        tile.rows,
        tile.cols(),
        tile.group,
        if tile.clustered {
            ", like rows together"
        } else {
            ""
        },
        tile.units(),
        shared_bytes(tile, kernel, accumulator).div_ceil(1024),
        if tile.planes { ", planes" } else { "" },
        described_threshold(tile.score, true),
    )
}

/// Returns the tile of a candidate.
fn shaped(candidate: &Candidate, part: &PartRequest, kernel: Kernel) -> Tile {
    let request = part.request;
    let block = part.layout.block_size();
    let Candidate([rows, cols, unit_rows], _) = *candidate;
    let (units_x, group) = (cols / 4, cols.min(block));
    let planes = &part.properties.features.plane;
    let plane = part.properties.hardware.plane_size_min as usize;
    Tile {
        mainloop: kernel.mainloop(),
        rows,
        units_x,
        unit_rows,
        head_dim: request.head_dim,
        value_dim: request.value_dim,
        group,
        mask_words: group.div_ceil(32),
        store: request.store.then_some(block),
        score: request.score,
        max_scores: request.max_scores && kernel == Kernel::Forward,
        bias_gradient: false,
        fused: false,
        planes: planes.contains(Plane::Ops) && planes.contains(Plane::Sync) && plane >= units_x,
        residue: part.residue.is_some(),
        carry: part.carry,
        clustered: false,
    }
}

/// Returns the fastest tile by estimate among those that fit the device.
///
/// # Errors
/// [`KernelError::SharedMemory`] if none fits.
pub fn choose(part: &PartRequest, kernel: Kernel) -> Result<Tile, KernelError> {
    let request = part.request;
    let best = cheapest(part, kernel, false);
    best.map(|(_, tile)| tile).ok_or(KernelError::SharedMemory {
        head_dim: request.head_dim,
        value_dim: request.value_dim,
        available: part.properties.hardware.max_shared_memory_size,
    })
}

/// Returns the fastest tile by estimate of a kernel, or of the fused backward pass, and its cost: computed pairs per allowed pair, divided by the speed.
fn cheapest(part: &PartRequest, kernel: Kernel, fused: bool) -> Option<(f64, Tile)> {
    let (layout, request) = (part.layout, part.request);
    let hardware = &part.properties.hardware;
    let accumulator = request.accumulator().size();
    let mainloop = kernel.mainloop();
    let may_cluster = request.may_cluster(layout, mainloop);
    let [length, _] = mainloop.lengths(layout);
    let wide = usize::from(request.head_dim.max(request.value_dim) > 64);
    let mut best: Option<(f64, Tile)> = None;
    let forced = forced();
    for candidate in &CANDIDATES {
        let Candidate(shape, speeds) = candidate;
        if forced.is_some_and(|forced| forced != *shape) {
            continue;
        }
        let tile = Tile {
            fused,
            ..shaped(candidate, part, kernel)
        };
        let fits = shared_bytes(&tile, kernel, accumulator) <= hardware.max_shared_memory_size
            && tile.units() <= most_units(part.properties)
            && (!request.store || tile.rows <= layout.block_size());
        let [forward, backward, of_fused] = speeds.map(|speed| speed[wide]);
        let speed = match kernel {
            Kernel::Forward => forward,
            _ if fused => of_fused,
            _ => backward,
        };
        if speed == 0.0 && forced.is_none() {
            continue;
        }
        let waste = length.next_multiple_of(tile.rows) as f64 / length as f64;
        // A grouping computes at least the allowed pairs, and evaluating one takes a pass over the layout's blocks.
        let hopeless = best.is_some_and(|(least, _)| waste / speed >= least);
        if !fits || hopeless {
            continue;
        }
        let grouping = Grouping::best(layout, mainloop, [tile.rows, tile.cols()], may_cluster);
        let tile = Tile {
            clustered: grouping.clustered,
            ..tile
        };
        let cost = grouping.overhead * waste / speed;
        if best.is_none_or(|(least, _)| cost < least) {
            best = Some((cost, tile));
        }
    }
    best
}
