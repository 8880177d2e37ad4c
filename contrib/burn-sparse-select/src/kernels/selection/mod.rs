//! Block scores by which selections choose key blocks. On any CubeCL runtime; products in half precision run on tensor cores where available.
//!
//! ```text
//! products      matmuls a · bᵀ: on tensor cores, or in f32
//! groups        sums over antidiagonals: groups of rows, the softmax of their products, its sums by blocks
//! lines         attention of the last queries, summed over keys and over distances
//! line_weights  the same without stored products: tensor cores compute them twice
//! threshold     smallest selected number of each line, by count or by share of the total
//! touched       blocks that contain a selected key or distance
//! flex          touched blocks, or the highest by means, as the last queries of a list decide
//! gate          per-query selection of blocks by means, in the matmul's epilogue; highest product of each row with each run of rows
//! highest       blocks of the highest scores of each row, a row per warp
//! means         products of block means, their softmax, and self-similarity of blocks
//! compressed    attention of key blocks via compressed blocks, and per-query selection by it
//! ```
//!
//! Intermediate buffers have at most [`NUMBERS`] elements, unless a single row of blocks needs more. Every element has one writer and sums have a fixed order,
//! so the same input gives the same bits on a device.

mod compressed;
mod flex;
mod gate;
mod groups;
pub(crate) mod highest;
mod line_weights;
mod lines;
mod means;
mod products;
mod threshold;
mod touched;

use cubecl::ir::features::Plane;

use blocksparse_cubecl::limits::most_units;
use blocksparse_cubecl::prelude::*;
use blocksparse_cubecl::shared::row_tile::RowTile;

pub use compressed::{
    CompressedInputs, CompressedPlan, CompressedShape, Wanted, compressed_attention_sums,
};
pub use flex::{FlexLimits, FlexTensors, flex_blocks};
pub use gate::{GateSizes, MOST_RUN, RunMaxima, query_picks};
pub use groups::{Antidiagonals, antidiagonal_attention_sums};
pub use line_weights::LineSizes;
pub use lines::{LinesPlan, line_sums};
pub use means::{
    AlikeScores, MeanProducts, SeenRows, SelfSimilarity, alike_scores, mean_products,
    softmax_of_seen,
};
pub use products::{RowsView, products};
pub use threshold::{Kept, KeptLines, least_kept};
pub use touched::{Touched, touched_blocks};

/// Upper bound of the elements of an intermediate buffer: 64 MiB of f32.
pub const NUMBERS: usize = 1 << 24;

/// Number of units of a cube in most kernels here.
const UNITS: usize = 256;

/// Returns a tile with `lanes` lanes for each of a cube's rows.
fn lanes_of_rows(client: &Client, lanes: usize, rows: usize) -> RowTile {
    let plane = match client.properties().features.plane.contains(Plane::Ops) {
        true => client.properties().hardware.plane_size_min.max(1) as usize,
        false => 1,
    };
    RowTile {
        lanes,
        rows,
        vector: 1,
        row_vectors: 0,
        plane: plane.min(lanes),
    }
}

/// Returns a tile in which all units of a cube share a row.
pub(crate) fn across_cube(client: &Client) -> RowTile {
    lanes_of_rows(client, UNITS, 1)
}

/// Checks that a device can run these kernels.
///
/// # Errors
/// [`KernelError`] if its cubes are too small.
pub fn check(client: &Client) -> Result<(), KernelError> {
    let most = most_units(client.properties());
    match most >= UNITS {
        true => Ok(()),
        false => {
            let what = "units of a cube that scores blocks";
            Err(KernelError::limit(what, most as u32, UNITS))
        }
    }
}

/// Checks that the kernels can index this many elements.
///
/// # Errors
/// [`KernelError`] if there are more.
fn counted(what: &'static str, numbers: usize) -> Result<(), KernelError> {
    match i32::try_from(numbers) {
        Ok(_) => Ok(()),
        Err(_) => Err(KernelError::limit(what, i32::MAX as u32, numbers)),
    }
}
