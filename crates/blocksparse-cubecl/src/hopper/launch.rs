//! Launches of the `hopper` tier.

use cubecl::prelude::*;
use cubecl::server::Handle;

use super::fp8::{self, Packed};
use super::long_tiles::{self, FoldLengthsLaunch, MainloopPlan, TileSharesLaunch};
use super::mainloop_loads::MainloopLengthsLaunch;
use super::maps::{stats_map, tensor_map};
use super::options::{PairArgs, PairArgsLaunch, PairScalarsLaunch};
use super::tiles::Tile;
use super::{forward, mainloops, wide};
use crate::args::{ScoreOptions, batch_words, buffer, optional, plan_parts, plan_words, schedule};
use crate::call::TensorView;
use crate::device::plan;
use crate::error::KernelError;
use crate::pass::{BackwardPass, Operands, Part, Pass};
use crate::shared::addressing::{ForwardOutputsLaunch, MainloopOperandsLaunch, QkvLaunch};
use crate::slices::Slice;
use crate::stats::{self, Wanted};
use crate::tensor::{check_rows, check_score, factors};
use crate::uploaded::DevicePlan;
use blocksparse::Residue;

/// Strides and addresses for TMA are multiples of 16 bytes, or this many elements.
const ALIGNMENT: usize = 8;

/// The places of a head's stats must be a multiple of this for TMA: a place has two f32 numbers, and TMA strides are multiples of 16 bytes.
pub(super) const TMA_PLACES: usize = 2;

/// Units per cube of kernels before and after a mainloop.
pub(super) const UNITS: usize = 256;

/// Returns the grid with at least `units` units.
pub(super) fn over(units: usize) -> CubeCount {
    CubeCount::Static(units.div_ceil(UNITS) as u32, 1, 1)
}

/// Whether groups of eight keys of a call's bias are contiguous and 16-byte aligned.
pub(super) fn has_wide_bias(pass: &Pass, residue: Option<Residue>) -> bool {
    let wide = pass.options.bias.as_ref().is_some_and(|bias| {
        let first = bias.handle.offset_start.unwrap_or(0);
        bias.shape[3].is_multiple_of(8) && first.is_multiple_of(16)
    });
    wide && residue.is_none()
}

/// Returns a call's options as kernel arguments.
pub(super) fn pair_args(pass: &Pass) -> ComptimeOptionArgs<PairArgs> {
    if !pass.request.score.positions() {
        return ComptimeOptionArgs::None;
    }
    let ([q, k, _], options) = (pass.inputs, pass.options);
    let [batch, head, row] = options.bias_bytes(2);
    let pairs = PairScalarsLaunch::new(
        q.shape[2] as u32,
        k.shape[2] as u32,
        batch,
        head,
        row as u32,
        options.mask(),
        options.kept_factor() as f32,
    );
    ComptimeOptionArgs::Some(PairArgsLaunch::new(
        optional(pass.slopes.as_ref(), pass.layout.heads()),
        options.bias(),
        options.table_args(),
        pairs,
    ))
}

/// Checks what a plan does not know about the tensors of a launch.
///
/// # Errors
/// [`KernelError`] if TMA cannot read a tensor, or the scale is not positive but must be.
pub fn check(
    named: &[(&'static str, &TensorView)],
    residue: Option<Residue>,
    options: &ScoreOptions,
) -> Result<(), KernelError> {
    for &(name, tensor) in named {
        check_rows(name, tensor, ALIGNMENT)?;
        // If classes had different lengths, the last element of a shorter one would be beyond the sequence, in the next head.
        if let Some(Residue { stride, .. }) = residue
            && !tensor.shape[2].is_multiple_of(stride)
        {
            return Err(KernelError::Classes {
                tensor: name,
                stride,
                seq: tensor.shape[2],
            });
        }
    }
    check_score(options)
}

/// Checks that vectors of eight elements of an output can be indexed in 32 bits.
fn check_eights(what: &'static str, elements: usize) -> Result<(), KernelError> {
    KernelError::check(what, u64::from(u32::MAX) * 8, elements)
}

/// Runs the forward pass over a part into `out` and `lse`. With `carry`, these hold the results of earlier parts.
///
/// # Errors
/// Those of `check`, and if the output is too large. In this case nothing has been launched.
pub fn launch_forward(pass: &Pass, part: Part, mut tile: Tile) -> Result<(), KernelError> {
    let (client, request, [q, k, v]) = (pass.client, pass.request, pass.inputs);
    let outputs = pass.outputs;
    let residue = part.residue;
    check(&pass.named(), residue, pass.options)?;
    tile.base.wide_bias = has_wide_bias(pass, residue);
    let (heads, seq_q) = (part.layout.heads(), q.shape[2]);
    let rows = request.batch * heads * seq_q;
    check_eights("the elements of the output", rows * tile.value_dim)?;
    let device_plan = plan(client, part.layout, tile.tiling)?;
    let mut scales = factors(pass.options);
    let log2_e = std::f64::consts::LOG2_E;
    // The scales of queries include the factor of scores.
    let mut lse_scale = log2_e / scales.0;
    let mut packed = None;
    if tile.fp8 {
        packed = Some(fp8::pack(pass, scales.0)?);
        (lse_scale, scales.0) = (log2_e, 1.0);
    }
    for slice in Slice::whole(request.batch, heads).cut(client) {
        // SAFETY: a cube reads the entries that the plan lists for its tile. TMA reads nothing beyond its maps. Rows beyond the queries are not written.
        // The buffers have the stated lengths (see `buffer`).
        unsafe {
            forward::forward::launch_unchecked(
                client,
                match tile.heads_in_turn {
                    true => slice.cubes_in_turn(device_plan.tiles),
                    false => slice.cubes(device_plan.tiles),
                },
                CubeDim::new_1d(tile.units() as u32),
                tile.cols / 2,
                tile.weights(),
                tile.sums(),
                match &packed {
                    Some(packed) => packed.maps(&tile),
                    None => QkvLaunch::new(
                        tensor_map(q, tile.a_group(), residue, request.dtype),
                        tensor_map(k, tile.group, residue, request.dtype),
                        tensor_map(v, tile.group, residue, request.dtype),
                    ),
                },
                ForwardOutputsLaunch::new(
                    buffer(outputs.out, rows * tile.value_dim / 8),
                    buffer(outputs.lse, rows),
                    pass.max_scores(),
                ),
                schedule(&device_plan, part.layout, residue, slice),
                pair_args(pass),
                packed.as_ref().map(Packed::scales).into(),
                seq_q as u32,
                (heads / request.kv_heads) as u32,
                lse_scale as f32,
                pass.options.scalars(scales),
                tile,
            );
        }
    }
    Ok(())
}

/// Runs the backward pass over a part in two mainloops.
///
/// # Errors
/// Those of `check`, and if a gradient is too large.
pub fn launch_mainloops(
    pass: &BackwardPass,
    part: Part,
    mainloops: [MainloopPlan; 2],
) -> Result<(), KernelError> {
    let wanted = Wanted::of_places(part, TMA_PLACES);
    let stats = stats::make(pass, wanted)?;
    for plan in mainloops {
        let operands = pass.operands(plan.tile.mainloop);
        launch_mainloop(pass, part, plan, &operands, &stats, wanted.pitch)?;
    }
    Ok(())
}

/// Launches one mainloop of the backward pass for the heads of `operands`. `stats` are those of the queries, with `pitch` places per head.
pub(super) fn launch_mainloop(
    pass: &BackwardPass,
    part: Part,
    MainloopPlan { mut tile, long }: MainloopPlan,
    operands: &Operands,
    stats: &Handle,
    pitch: usize,
) -> Result<(), KernelError> {
    let (client, request) = (pass.client, pass.request);
    let ([a1, a2], [b1, b2]) = (operands.a, operands.b);
    let residue = part.residue;
    check(&operands.named(), residue, pass.options)?;
    tile.base.wide_bias = has_wide_bias(pass, residue);
    tile.long_tiles = long.any();
    let device_plan = plan(client, part.layout, tile.tiling)?;
    let heads = part.layout.heads();
    let (outer_heads, len) = (operands.heads, a1.shape[2]);
    check_eights("the elements of a gradient", operands.elements)?;
    let scales = factors(pass.options);
    let stat_rows = request.batch * heads;
    let numbers = long.elements(&tile, request.batch * outer_heads);
    KernelError::check_u32("the sums of long tiles, in fours", numbers / 4)?;
    let sums = long.any().then(|| client.empty(numbers * 4));
    let shares = || match &sums {
        Some(sums) => ComptimeOptionArgs::Some(TileSharesLaunch::new(
            buffer(sums, numbers),
            long.tiles as u32,
            long.cubes as u32,
        )),
        None => ComptimeOptionArgs::None,
    };
    let lengths = || {
        MainloopLengthsLaunch::new(
            len as u32,
            pitch as u32,
            (heads / request.kv_heads) as u32,
            (operands.second / 8) as u32,
        )
    };
    let maps = || {
        let map = |tensor, rows| tensor_map(tensor, rows, residue, request.dtype);
        let (own, gathered) = (tile.a_group(), tile.group);
        MainloopOperandsLaunch::new(
            map(a1, own),
            map(a2, own),
            map(b1, gathered),
            map(b2, gathered),
        )
    };
    let cubes = long.cubes_of(device_plan.tiles);
    for slice in Slice::whole(request.batch, outer_heads).cut(client) {
        // SAFETY: as for the forward pass.
        unsafe {
            if tile.shared {
                wide::wide_columns::launch_unchecked(
                    client,
                    slice.cubes(cubes),
                    CubeDim::new_1d(tile.units() as u32),
                    tile.cols / 2,
                    tile.cols / 4,
                    tile.sums(),
                    maps(),
                    stats_map(stats, tile.group, stat_rows, pitch),
                    buffer(operands.out, operands.elements / 8),
                    schedule(&device_plan, part.layout, residue, slice),
                    pair_args(pass),
                    shares(),
                    lengths(),
                    pass.options.scalars(scales),
                    tile,
                );
            } else {
                mainloops::one_mainloop::launch_unchecked(
                    client,
                    slice.cubes(cubes),
                    CubeDim::new_1d(tile.units() as u32),
                    tile.cols / 2,
                    tile.cols / 4,
                    tile.sums(),
                    maps(),
                    stats_map(stats, tile.group, stat_rows, pitch),
                    buffer(stats, stat_rows * pitch * 2),
                    buffer(operands.out, operands.elements / 8),
                    schedule(&device_plan, part.layout, residue, slice),
                    pair_args(pass),
                    shares(),
                    lengths(),
                    pass.options.scalars(scales),
                    tile,
                );
            }
        }
    }
    if let Some(sums) = &sums {
        let plan = MainloopPlan { tile, long };
        fold_long(pass, part, plan, operands, &device_plan, sums);
    }
    Ok(())
}

/// Computes the rows of long tiles from the sums of the cubes that shared them.
fn fold_long(
    pass: &BackwardPass,
    part: Part,
    MainloopPlan { tile, long }: MainloopPlan,
    operands: &Operands,
    device_plan: &DevicePlan,
    sums: &Handle,
) {
    let (batch, heads, len) = (pass.request.batch, operands.heads, operands.a[0].shape[2]);
    let lengths = FoldLengthsLaunch::new(
        long.tiles as u32,
        long.cubes as u32,
        heads as u32,
        (part.layout.heads() / heads) as u32,
        batch as u32,
        len as u32,
        (operands.second / 8) as u32,
    );
    let numbers = long.elements(&tile, batch * heads);
    // SAFETY: a unit reads the sums of eight columns of a row of one of the plan's tiles, and writes those of a position below `len`.
    unsafe {
        long_tiles::fold_tiles::launch_unchecked(
            pass.client,
            over(numbers / 8 / long.cubes),
            CubeDim::new_1d(UNITS as u32),
            buffer(sums, numbers / 4),
            buffer(operands.out, operands.elements / 8),
            plan_parts(&device_plan.sections, batch_words(part.layout)),
            plan_words(device_plan, part.residue),
            lengths,
            tile,
        );
    }
}
