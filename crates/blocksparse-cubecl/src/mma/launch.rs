//! Launches of the `mma` tier.

use cubecl::prelude::*;
use cubecl::server::Handle;

use super::backward::MainloopLengthsLaunch;
use super::gather::StridesLaunch;
use super::score::{BiasArgsLaunch, BiasStridesLaunch};
use super::tile::{Outputs, Tile};
use super::{PIECE, backward, forward};
use crate::arch::sm80::Element;
use crate::args::{ScoreOptions, buffer, optional, schedule};
use crate::call::{BiasView, TensorView};
use crate::device::plan;
use crate::error::KernelError;
use crate::limits::multiprocessors;
use crate::pass::{BackwardPass, Operands, Part, Pass};
use crate::shared::addressing::{ForwardOutputsLaunch, MainloopOperandsLaunch, QkvLaunch};
use crate::slices::Slice;
use crate::stats::{self, Wanted};
use crate::tensor::{check_rows, check_score, factors, is_u32};
use blocksparse::plan::Mainloop;

/// Checks the properties of a launch's tensors that a plan does not know.
///
/// # Errors
/// [`KernelError`] if cp.async cannot read a tensor, or the scale is not positive.
fn check(
    named: &[(&'static str, &TensorView)],
    tile: Tile,
    options: &ScoreOptions,
) -> Result<(), KernelError> {
    let element = tile.element;
    for &(name, tensor) in named {
        check_rows(name, tensor, PIECE / element.bytes())?;
    }
    if let Some(bias) = &options.bias {
        KernelError::check("the bias's keys", u32::MAX / 4, bias.shape[3])?;
    }
    check_score(options)
}

/// Returns the tile for these tensors. If row strides in bytes fit 32 bits, as in most tensors, copies take one instruction less.
fn for_tensors(tile: Tile, named: &[(&'static str, &TensorView)]) -> Tile {
    let far = |tensor: &TensorView| !is_u32(tensor.strides[2] * tile.element.bytes());
    Tile {
        far_rows: (named.iter()).any(|&(_, tensor)| tensor.shape[2] > 1 && far(tensor)),
        ..tile
    }
}

fn biases(options: &ScoreOptions, element: Element) -> BiasArgsLaunch {
    let [batch, head, row] = options.bias_bytes(element.bytes());
    let handle = options.bias.as_ref().map(|bias| &bias.handle);
    BiasArgsLaunch::new(
        optional(handle, words(options.bias_len(), element)),
        BiasStridesLaunch::new(batch, head, row as u32),
        options.table_args(),
    )
}

fn strides(tensor: &TensorView, element: Element) -> StridesLaunch {
    let [batch, head, row] = [0, 1, 2].map(|dim| match tensor.shape[dim] {
        1 => 0,
        _ => (tensor.strides[dim] * element.bytes() / PIECE) as u64,
    });
    StridesLaunch::new(batch, head, row, tensor.shape[2] as u32)
}

fn input(tensor: &TensorView, element: Element) -> BufferArg {
    buffer(&tensor.handle, words(tensor.reach(), element))
}

/// Returns the number of words of `elements` elements.
fn words(elements: usize, element: Element) -> usize {
    (elements * element.bytes()).div_ceil(4)
}

/// Checks that words can be counted in 32 bits.
fn check_words(what: &'static str, elements: usize, element: Element) -> Result<(), KernelError> {
    let most = u64::from(u32::MAX) * 4 / element.bytes() as u64;
    KernelError::check(what, most, elements)
}

/// Runs the forward pass over a part into `out` and `lse`. With [`Tile::carry`], these hold the results of earlier parts.
///
/// # Errors
/// Those of `check`, and if the output is too large. In this case nothing has been launched.
pub fn launch_forward(pass: &Pass, part: Part, tile: Tile) -> Result<(), KernelError> {
    let (client, request, [q, k, v]) = (pass.client, pass.request, pass.inputs);
    let (outputs, options) = (pass.outputs, pass.options);
    let element = tile.element;
    check(&pass.named(), tile, options)?;
    let tile = for_tensors(tile, &pass.named());
    let heads = part.layout.heads();
    let rows = request.batch * heads * q.shape[2];
    check_words("the elements of the output", rows * tile.value_dim, element)?;
    let device_plan = plan(client, part.layout, tile.tiling())?;
    let scales = factors(options);
    for slice in Slice::whole(request.batch, heads).cut(client) {
        // SAFETY: a cube reads the entries that the plan lists for its tile, reads positions below the lengths in the strides, and writes rows below those
        // of the queries. The buffers have the stated lengths (see `buffer`).
        unsafe {
            forward::forward::launch_unchecked(
                client,
                slice.cubes(device_plan.tiles),
                CubeDim::new_1d(tile.units() as u32),
                QkvLaunch::new(input(q, element), input(k, element), input(v, element)),
                ForwardOutputsLaunch::new(
                    buffer(outputs.out, words(rows * tile.value_dim, element)),
                    buffer(outputs.lse, rows),
                    pass.max_scores(),
                ),
                optional(pass.slopes.as_ref(), heads),
                biases(options, element),
                QkvLaunch::new(
                    strides(q, element),
                    strides(k, element),
                    strides(v, element),
                ),
                schedule(&device_plan, part.layout, part.residue, slice),
                (heads / request.kv_heads) as u32,
                (std::f64::consts::LOG2_E / scales.0) as f32,
                options.scalars(scales),
                options.dropout_args(),
                tile,
            );
        }
    }
    Ok(())
}

/// Runs the backward pass over a part: a loop over rows, and one over columns.
///
/// # Errors
/// Those of `check`, and if a gradient is too large.
pub fn launch_backward(
    pass: &BackwardPass,
    part: Part,
    tiles: [Tile; 2],
) -> Result<(), KernelError> {
    let stats = stats::make(pass, Wanted::of_places(part, 1))?;
    for tile in tiles {
        let (operands, element) = (pass.operands(tile.mainloop), tile.element);
        check(&operands.named(), tile, pass.options)?;
        check_words("the elements of a gradient", operands.elements, element)?;
        let target = Target {
            out: operands.out,
            words: words(operands.elements, element),
            second: words(operands.second, element),
            chunks: 1,
            slice: Slice::whole(pass.request.batch, operands.heads),
        };
        let launches = match (tile.mainloop, tile.outputs) {
            (Mainloop::Columns, Outputs::First) => vec![Outputs::First, Outputs::Second],
            (_, outputs) => vec![outputs],
        };
        let tile = for_tensors(tile, &operands.named());
        for outputs in launches {
            let tile = Tile { outputs, ..tile };
            launch_mainloop(pass, part, tile, &operands, &stats, target)?;
        }
    }
    Ok(())
}

/// Adds a part's gradient of the bias, in the loop that gives each of its elements one writer: over rows, or over columns if queries share a row.
///
/// # Errors
/// Those of `check`.
pub fn launch_bias_gradient(
    pass: &BackwardPass,
    part: Part,
    tiles: [Tile; 2],
    bias: &BiasView,
    out: &Handle,
) -> Result<(), KernelError> {
    let tile = tiles[usize::from(bias.shape[2] == 1)];
    let operands = pass.operands(tile.mainloop);
    check(&operands.named(), tile, pass.options)?;
    let tile = for_tensors(tile, &operands.named());
    let stats = stats::make(pass, Wanted::of_places(part, 1))?;
    let multiprocessors = multiprocessors(pass.client.properties());
    for slice in Slice::sharing(bias.shape, pass.request.batch, pass.layout.heads()) {
        let tiles = part.layout.seq_q().div_ceil(tile.rows()) * slice.heads * slice.batches;
        let target = Target {
            out,
            words: bias.elements(),
            second: 0,
            // At least a few cubes per multiprocessor.
            chunks: match tile.mainloop {
                Mainloop::Rows => (6 * multiprocessors).div_ceil(tiles).min(MOST_CHUNKS),
                Mainloop::Columns => 1,
            },
            slice,
        };
        launch_mainloop(pass, part, tile, &operands, &stats, target)?;
    }
    Ok(())
}

/// Largest number of cubes that share a tile's steps.
const MOST_CHUNKS: usize = 32;

/// Output of a mainloop, with the batch entries and heads of the launch.
#[derive(Clone, Copy)]
struct Target<'a> {
    out: &'a Handle,
    /// Length in words.
    words: usize,
    /// Word at which dV begins.
    second: usize,
    /// Cubes that share a tile's steps.
    chunks: usize,
    slice: Slice,
}

/// Launches a mainloop over a part, with the stats of its queries.
fn launch_mainloop(
    pass: &BackwardPass,
    part: Part,
    tile: Tile,
    operands: &Operands,
    stats: &Handle,
    target: Target,
) -> Result<(), KernelError> {
    let (client, request) = (pass.pass.client, pass.pass.request);
    let options = pass.pass.options;
    let ([a1, a2], [b1, b2]) = (operands.a, operands.b);
    let element = tile.element;
    let heads = part.layout.heads();
    let pitch = Wanted::of_places(part, 1).pitch;
    let device_plan = plan(client, part.layout, tile.tiling())?;
    let slopes = if tile.score.alibi { heads } else { 0 };
    let stats_len = request.batch * heads * pitch * 2 + slopes;
    for slice in target.slice.cut(client) {
        // SAFETY: as for the forward pass. The stats have the slopes after their rows.
        unsafe {
            backward::backward::launch_unchecked(
                client,
                slice.cubes(device_plan.tiles * target.chunks),
                CubeDim::new_1d(tile.units() as u32),
                MainloopOperandsLaunch::new(
                    input(a1, element),
                    input(a2, element),
                    input(b1, element),
                    input(b2, element),
                ),
                buffer(stats, stats_len),
                biases(options, element),
                buffer(target.out, target.words),
                MainloopOperandsLaunch::new(
                    strides(a1, element),
                    strides(a2, element),
                    strides(b1, element),
                    strides(b2, element),
                ),
                schedule(&device_plan, part.layout, part.residue, slice),
                MainloopLengthsLaunch::new(
                    pitch as u32,
                    (heads / request.kv_heads) as u32,
                    target.second as u32,
                    target.chunks as u32,
                ),
                options.scalars(factors(options)),
                options.dropout_args(),
                tile,
            );
        }
    }
    Ok(())
}
