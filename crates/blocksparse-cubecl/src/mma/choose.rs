//! The choice of a tile.

use cubecl::ir::{ElemType, FloatKind};

use super::tile::{Outputs, Tile};
use crate::arch::sm80::Element;
use crate::call::{Kernel, PartRequest, check_ampere};
use crate::limits::multiprocessors;
use crate::tensor::{TOO_LARGE, cheapest, check_limit, check_options, half_of, is_u32};
use crate::tuning::Tuning;
use blocksparse::ProductPrecision;
use blocksparse::plan::{Grouping, Mainloop};

/// Rows are copied in pieces of 16 bytes, and the sums of mma.sync have eight columns.
const WIDTH: usize = 8;
const WIDEST: usize = 256;

/// A candidate tile: warps, 16-row tiles per warp, columns and stages, and its relative speed on dense attention.
struct Candidate([usize; 4], f64);

/// Returns the candidates for a width that fit the registers, with speeds measured on an H200. Small ones are for devices with little shared memory.
fn candidates(kernel: Kernel, width: usize) -> Vec<Candidate> {
    match (kernel, width) {
        (Kernel::Forward, ..=64) => vec![
            Candidate([4, 2, 64, 2], 1.0),
            Candidate([4, 2, 64, 1], 0.99),
            Candidate([4, 1, 64, 2], 0.95),
            Candidate([4, 1, 64, 1], 0.9),
        ],
        (Kernel::Forward, ..=128) => vec![
            Candidate([4, 2, 64, 2], 1.0),
            Candidate([4, 2, 64, 1], 0.99),
            Candidate([4, 1, 64, 2], 0.8),
            Candidate([4, 1, 64, 1], 0.78),
            Candidate([4, 1, 32, 1], 0.6),
        ],
        (Kernel::Forward, _) => vec![
            Candidate([4, 1, 64, 2], 1.0),
            Candidate([4, 1, 64, 1], 0.95),
            Candidate([4, 1, 32, 2], 0.8),
            Candidate([4, 1, 32, 1], 0.75),
            Candidate([2, 1, 32, 1], 0.5),
        ],
        (Kernel::BackwardRows, ..=64) => vec![
            Candidate([4, 2, 64, 2], 1.0),
            Candidate([4, 1, 64, 2], 0.95),
            Candidate([4, 2, 32, 2], 0.85),
            Candidate([4, 1, 32, 2], 0.75),
        ],
        (Kernel::BackwardRows, ..=128) => vec![
            Candidate([4, 2, 32, 2], 1.0),
            Candidate([4, 1, 64, 2], 0.85),
            Candidate([4, 1, 32, 2], 0.75),
            Candidate([2, 1, 32, 2], 0.5),
            Candidate([2, 1, 16, 2], 0.4),
        ],
        (Kernel::BackwardColumns, ..=64) => vec![
            Candidate([4, 2, 32, 2], 1.0),
            Candidate([4, 1, 64, 2], 0.85),
            Candidate([4, 1, 32, 2], 0.8),
        ],
        (Kernel::BackwardColumns, ..=128) => vec![
            Candidate([4, 1, 64, 2], 1.0),
            Candidate([4, 1, 32, 2], 0.8),
            Candidate([2, 1, 32, 2], 0.5),
            Candidate([2, 1, 16, 2], 0.4),
        ],
        _ => vec![
            Candidate([4, 1, 32, 2], 1.0),
            Candidate([2, 1, 32, 2], 0.6),
            Candidate([2, 1, 16, 2], 0.4),
        ],
    }
}

/// Returns the tile that `BLOCKSPARSE_MMA_TILE=WARPSxWARP_TILESxCOLSxSTAGES` sets for measuring. It takes three, joined by commas, for forward, dQ and dK
/// with dV.
fn forced(kernel: Kernel) -> Option<Candidate> {
    let shape = Tuning::or_default().mma_tile[kernel as usize]?;
    Some(Candidate(shape, 1.0))
}

/// Returns the operand type, or why the tier refuses the part.
fn check_tier(part: &PartRequest) -> Result<Element, &'static str> {
    check_ampere(part.properties)?;
    check_limit(part)?;
    let request = part.request;
    let element = match request.dtype {
        ElemType::Float(FloatKind::F32) if request.precision == ProductPrecision::Tf32 => {
            Element::Tf32
        }
        ElemType::Float(FloatKind::F32) => {
            return Err("the dtype is f32, and tf32 was not asked for");
        }
        dtype => Element::Half(half_of(dtype)?),
    };
    check_options(request)?;
    let widths = [request.head_dim, request.value_dim];
    if !(widths.iter()).all(|dim| dim.is_multiple_of(WIDTH) && (1..=WIDEST).contains(dim)) {
        return Err("head_dim or value_dim is no multiple of 8 up to 256");
    }
    Ok(element)
}

/// Checks that a kernel's output words can be counted in 32 bits.
fn check_output(part: &PartRequest, kernel: Kernel, element: Element) -> Result<(), &'static str> {
    let (batch, kv_heads) = (part.request.batch, part.request.kv_heads);
    let (head_dim, value_dim) = (part.request.head_dim, part.request.value_dim);
    let queries = batch * part.layout.heads() * part.layout.seq_q();
    let keys = batch * kv_heads * part.seq_kv;
    let elements = match kernel {
        Kernel::Forward => queries * value_dim,
        Kernel::BackwardRows => queries * head_dim,
        Kernel::BackwardColumns => keys * (head_dim + value_dim),
    };
    match is_u32((elements * element.bytes()).div_ceil(4)) {
        true => Ok(()),
        false => Err(TOO_LARGE),
    }
}

/// Returns a candidate's tile.
fn shaped(
    &Candidate([warps, warp_tiles, cols, stages], _): &Candidate,
    part: &PartRequest,
    kernel: Kernel,
    element: Element,
    outputs: Outputs,
) -> Tile {
    let request = part.request;
    Tile {
        mainloop: kernel.mainloop(),
        element,
        head_dim: request.head_dim,
        value_dim: request.value_dim,
        warps,
        warp_tiles,
        cols,
        group: cols.min(part.layout.block_size()),
        stages,
        score: request.score,
        max_scores: request.max_scores && kernel == Kernel::Forward,
        residue: part.residue.is_some(),
        carry: part.carry,
        clustered: false,
        far_rows: false,
        bias_gradient: false,
        outputs,
    }
}

/// Returns the fastest tile by estimate.
///
/// # Errors
/// Why the tier refuses the part: the device, the type, the widths, or an option it does not support.
pub fn choose(part: &PartRequest, kernel: Kernel) -> Result<Tile, &'static str> {
    let element = check_tier(part)?;
    check_output(part, kernel, element)?;
    fastest(part, kernel, element)
}

/// Returns the fastest tile by estimate among those that fit.
fn fastest(part: &PartRequest, kernel: Kernel, element: Element) -> Result<Tile, &'static str> {
    let (layout, request) = (part.layout, part.request);
    let backward = kernel != Kernel::Forward;
    let mainloop = kernel.mainloop();
    let block = layout.block_size();
    let [length, _] = mainloop.lengths(layout);
    let [heads, _] = mainloop.sides(layout.heads(), request.kv_heads);
    let outputs = match mainloop {
        Mainloop::Rows => Outputs::First,
        Mainloop::Columns if request.head_dim + request.value_dim > 320 => Outputs::First,
        Mainloop::Columns => Outputs::Both,
    };
    let most = part.properties.hardware.max_shared_memory_size;
    let shapes = match forced(kernel) {
        Some(shape) => vec![shape],
        None => candidates(kernel, request.head_dim.max(request.value_dim)),
    };
    let may_cluster = request.may_cluster(layout, mainloop);
    let tiles = shapes.into_iter().filter_map(|shape| {
        let tile = shaped(&shape, part, kernel, element, outputs);
        let bytes = tile.shared_bytes(backward);
        // The backward kernels alternate between two stages.
        let stages_fit = !backward || tile.stages == 2;
        if !tile.fits(block) || !stages_fit || bytes > most {
            return None;
        }
        let rows = tile.rows();
        let grouping = Grouping::best(layout, mainloop, [rows, tile.cols], may_cluster);
        let tile = Tile {
            clustered: grouping.clustered,
            ..tile
        };
        // A multiprocessor reserves 1 KB per cube, and has registers for eight warps.
        let cubes = (most + 1024) / (bytes + 1024);
        let alone = cubes.min(8 / tile.warps).max(1) * tile.warps < 8;
        let waste = length.next_multiple_of(rows) as f64 / length as f64;
        let launched = length.div_ceil(rows) * heads * request.batch;
        // Fewer cubes than multiprocessors leave some idle.
        let idle = (multiprocessors(part.properties) as f64 / launched as f64).max(1.0);
        let speed = shape.1 * if alone { 0.7 } else { 1.0 };
        Some((grouping.overhead * waste * idle / speed, tile))
    });
    let fastest = cheapest(tiles).map(|(_, tile)| tile);
    fastest.ok_or("no tile fits the shared memory of the device")
}

/// Like [`choose`], for both mainloops of the backward pass.
///
/// # Errors
/// Those of [`choose`].
pub fn choose_backward(part: &PartRequest) -> Result<[Tile; 2], &'static str> {
    let rows = choose(part, Kernel::BackwardRows)?;
    Ok([rows, choose(part, Kernel::BackwardColumns)?])
}

/// Like [`choose`], for the gradient of a bias in either mainloop. The bias may be of any size, since 64-bit addresses are used.
///
/// # Errors
/// Those of [`choose`].
pub fn choose_bias_gradient(part: &PartRequest) -> Result<[Tile; 2], &'static str> {
    let element = check_tier(part)?;
    let of_mainloop = |kernel| -> Result<Tile, &'static str> {
        let tile = fastest(part, kernel, element)?;
        Ok(Tile {
            bias_gradient: true,
            outputs: Outputs::First,
            ..tile
        })
    };
    Ok([
        of_mainloop(Kernel::BackwardRows)?,
        of_mainloop(Kernel::BackwardColumns)?,
    ])
}
