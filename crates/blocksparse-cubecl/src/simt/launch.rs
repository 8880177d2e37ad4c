//! Launches of the `simt` tier.

use cubecl::prelude::*;
use cubecl::server::Handle;

use super::backward::{MainloopLengthsLaunch, MainloopOutputsLaunch};
use super::fused::Fused;
use super::{Tile, backward, dq, forward, tiling};
use crate::args::{buffer, optional, row_tensor, schedule, spread};
use crate::call::BiasView;
use crate::device::plan;
use crate::error::KernelError;
use crate::pass::{BackwardPass, Operands, Part, Pass};
use crate::shared::addressing::{ForwardOutputsLaunch, MainloopOperandsLaunch, QkvLaunch};
use crate::slices::Slice;
use blocksparse::plan::Mainloop;

/// Runs the forward pass over a part. With [`Tile::carry`], the outputs must hold the result of earlier parts.
///
/// # Errors
/// [`KernelError`] if the launch plan is too large; then nothing was launched.
pub fn launch_forward(pass: &Pass, part: Part, tile: Tile) -> Result<(), KernelError> {
    let (client, layout, request) = (pass.client, pass.layout, pass.request);
    let ([q, k, v], outputs, options) = (pass.inputs, pass.outputs, pass.options);
    let indexing = pass.indexing;
    let device_plan = plan(client, part.layout, tiling(&tile))?;
    let (heads, rows) = (layout.heads(), pass.rows());
    let (width, accumulator) = (indexing.width, request.accumulator());
    let weights = request.batch * indexing.weight_blocks * layout.block_size().pow(2);
    for slice in Slice::whole(request.batch, heads).cut(client) {
        // SAFETY: a cube reads the entries that the plan lists for its tile, and reads and writes positions below the lengths in the strides. The buffers
        // have the stated lengths (see `buffer`).
        unsafe {
            forward::forward::launch_unchecked(
                client,
                slice.cubes(device_plan.tiles),
                CubeDim::new_1d(tile.units() as u32),
                indexing.address,
                width,
                QkvLaunch::new(
                    row_tensor(q, width),
                    row_tensor(k, width),
                    row_tensor(v, width),
                ),
                ForwardOutputsLaunch::new(
                    buffer(outputs.out, rows * request.value_dim / width),
                    buffer(outputs.lse, rows),
                    pass.max_scores(),
                ),
                optional(outputs.weights, weights),
                options.biases(pass.slopes.as_ref(), heads, None),
                schedule(&device_plan, layout, part.residue, slice),
                heads / request.kv_heads,
                indexing.weight_blocks,
                options.score_inputs(accumulator),
                InputScalar::new(f64::NEG_INFINITY, accumulator),
                options.dropout_inputs(accumulator),
                tile,
                [request.dtype, accumulator],
            );
        }
    }
    Ok(())
}

/// Runs both mainloops of the backward pass over a part, with the stats of all positions.
///
/// # Errors
/// Those of [`launch_forward`].
pub fn launch_backward(
    pass: &BackwardPass,
    part: Part,
    tiles: [Tile; 2],
    stats: &Handle,
) -> Result<(), KernelError> {
    for tile in tiles {
        let operands = pass.operands(tile.mainloop);
        let all = Slice::whole(pass.request.batch, operands.heads);
        launch_mainloop(pass, part, tile, stats, &operands, all, None)?;
    }
    Ok(())
}

/// Units per cube of the kernel that finishes dQ.
const UNITS: u32 = 256;

/// Runs the fused backward pass over a part, with the stats of all positions.
///
/// # Errors
/// Those of [`launch_forward`].
pub fn launch_fused(
    pass: &BackwardPass,
    part: Part,
    fused: Fused,
    stats: &Handle,
) -> Result<(), KernelError> {
    let (client, request) = (pass.pass.client, pass.pass.request);
    let (options, indexing) = (pass.pass.options, pass.pass.indexing);
    let Fused { tile, groups, .. } = fused;
    let operands = pass.operands(Mainloop::Columns);
    let (rows, accumulator) = (pass.rows(), request.accumulator());
    let fours = rows * request.head_dim.div_ceil(4);
    let cubes = spread(client, (fours as u64).div_ceil(u64::from(UNITS)))?;
    let sums = client.empty(groups * fours * 4 * accumulator.size());
    let all = Slice::whole(request.batch, operands.heads);
    let owned = GroupSums {
        handle: &sums,
        groups,
        fours: groups * fours,
    };
    launch_mainloop(pass, part, tile, stats, &operands, all, Some(owned))?;
    // SAFETY: a unit reads its vector of each group's sums and writes its vector of dQ. The buffers have the stated lengths (see `buffer`).
    unsafe {
        dq::finish::launch_unchecked(
            client,
            cubes,
            CubeDim::new_1d(UNITS),
            indexing.address,
            indexing.width,
            buffer(&sums, groups * fours),
            buffer(&pass.gradients.q, rows * request.head_dim / indexing.width),
            rows,
            groups,
            InputScalar::new(options.scale, accumulator),
            request.head_dim,
            tile.carry,
            [request.dtype, accumulator],
        );
    }
    Ok(())
}

/// Sums of dQ of a fused pass.
#[derive(Clone, Copy)]
struct GroupSums<'a> {
    handle: &'a Handle,
    /// Groups of tiles.
    groups: usize,
    /// Vectors of four of all groups.
    fours: usize,
}

/// Adds a part's gradient of the bias, in the loop that gives each of its elements one writer: over rows, or over columns if queries share a row.
///
/// # Errors
/// Those of [`launch_forward`].
pub fn launch_bias_gradient(
    pass: &BackwardPass,
    part: Part,
    tiles: [Tile; 2],
    stats: &Handle,
    bias: &BiasView,
) -> Result<(), KernelError> {
    let tile = Tile {
        bias_gradient: true,
        ..tiles[usize::from(bias.shape[2] == 1)]
    };
    let operands = pass.operands(tile.mainloop);
    for slice in Slice::sharing(bias.shape, pass.request.batch, pass.layout.heads()) {
        launch_mainloop(pass, part, tile, stats, &operands, slice, None)?;
    }
    Ok(())
}

/// Launches the backward kernel, with a cube per tile, or per group of tiles if there are sums of dQ.
fn launch_mainloop(
    pass: &BackwardPass,
    part: Part,
    tile: Tile,
    stats: &Handle,
    operands: &Operands,
    slice: Slice,
    sums: Option<GroupSums>,
) -> Result<(), KernelError> {
    let (client, layout) = (pass.pass.client, pass.pass.layout);
    let (request, options) = (pass.pass.request, pass.pass.options);
    let indexing = pass.pass.indexing;
    let ([a1, a2], [b1, b2], out) = (operands.a, operands.b, operands.out);
    let elements = operands.elements;
    let device_plan = plan(client, part.layout, tiling(&tile))?;
    let (heads, rows) = (layout.heads(), pass.rows());
    let (width, accumulator) = (indexing.width, request.accumulator());
    let weights = request.batch * indexing.weight_blocks * layout.block_size().pow(2);
    let [table_start, numbers] = options.stats_len(rows);
    let bias_grad = pass.gradients.bias.as_ref().filter(|_| tile.bias_gradient);
    for slice in slice.cut(client) {
        // SAFETY: as for the forward pass. The sums have rows of all queries for each group. The stats have the slopes and the table after their rows.
        unsafe {
            backward::backward::launch_unchecked(
                client,
                slice.cubes(sums.map_or(device_plan.tiles, |sums| sums.groups)),
                CubeDim::new_1d(tile.units() as u32),
                indexing.address,
                width,
                MainloopOperandsLaunch::new(
                    row_tensor(a1, width),
                    row_tensor(a2, width),
                    row_tensor(b1, width),
                    row_tensor(b2, width),
                ),
                buffer(stats, numbers),
                optional(pass.outputs.weights, weights),
                options.biases(None, 0, Some(table_start)),
                MainloopOutputsLaunch::new(
                    optional(bias_grad, options.bias_len()),
                    optional(
                        sums.map(|sums| sums.handle),
                        sums.map_or(0, |sums| sums.fours),
                    ),
                    buffer(out, elements / width),
                ),
                schedule(&device_plan, layout, part.residue, slice),
                MainloopLengthsLaunch::new(
                    heads,
                    heads / request.kv_heads,
                    indexing.weight_blocks,
                    pass.gradients.v_offset / width,
                    rows * 2,
                    device_plan.tiles,
                ),
                options.score_inputs(accumulator),
                options.dropout_inputs(accumulator),
                tile,
                [request.dtype, accumulator],
            );
        }
    }
    Ok(())
}
