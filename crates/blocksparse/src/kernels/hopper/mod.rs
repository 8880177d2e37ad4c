//! The `hopper` tier: wgmma and TMA, bf16 and f16, on GPUs of compute capability 9.0.
//!
//! Keys and values of a step are gathered by TMA, one box of `group` rows per entry, side by side in shared memory.
//! The 128-byte swizzle repeats after 8 rows, so boxes of 8, 16, … rows make up the layout wgmma reads.
//! A head_dim between multiples of 64 is filled up with zeros by TMA, in shared memory only. With positions listed by
//! residue class the maps have the class as a dimension of its own, so that a box is strided in memory.

mod asm;
mod backward;
mod backward_loads;
mod backward_stats;
mod choose;
mod forward;
mod gradient;
mod options;
mod output;
mod rows;
mod softmax;
mod tiles;
mod walks;

use cubecl::ir::{ElemType, FloatKind};
use cubecl::prelude::*;
use cubecl::server::Handle;

use super::device::plan;
use super::launch::{ScoreOptions, batch_words, listing, optional, plan_parts};
use super::shared::walk::StridesLaunch;
use super::tensor::{WalkOperands, check_rows, check_scale, scales};
use super::{Gradients, KernelError, Outputs, Sizes, TensorView};
use crate::plan::Walk;
use crate::{BlockLayout, Residue};
use asm::ROW_ELEMENTS;
use backward_loads::LengthsLaunch;
pub use choose::{Backward, choose, choose_backward};
use options::{Options, PairArgs, PairArgsLaunch, PairNumbersLaunch};
pub use tiles::{BackwardTile, Tile, WalkTile};

/// Heads of keys that take turns in the grid of the fused backward pass.
const SPREAD: u32 = 64;
/// TMA's strides and addresses are multiples of 16 bytes.
const ALIGNMENT: usize = 8;

/// What a call asks for besides attention itself.
#[derive(Clone, Copy)]
pub struct Asked<'a> {
    /// As the call says.
    pub options: &'a ScoreOptions,
    /// Its slopes on the device.
    pub slopes: Option<&'a Handle>,
}

impl Asked<'_> {
    /// Whether scores are not just products but for their scale.
    fn transformed(&self) -> bool {
        let ScoreOptions {
            softcap,
            slopes,
            bias,
            relative,
            ..
        } = self.options;
        softcap.is_some() || slopes.is_some() || bias.is_some() || relative.is_some()
    }

    /// Factors of scores to powers of two, and of products before that.
    fn scales(&self) -> (f64, f64) {
        let &ScoreOptions { scale, softcap, .. } = self.options;
        match (softcap, self.transformed()) {
            (None, true) => (std::f64::consts::LOG2_E, scale),
            _ => scales(scale, softcap),
        }
    }

    /// A kernel's options, when the tensors are known.
    fn options(&self, options: Options, residue: Option<Residue>) -> Options {
        let wide = self.options.bias.as_ref().is_some_and(|bias| {
            let first = bias.handle.offset_start.unwrap_or(0);
            bias.shape[3].is_multiple_of(8) && first.is_multiple_of(16)
        });
        Options {
            wide_bias: wide && residue.is_none(),
            ..options
        }
    }

    /// What kernels get.
    fn args(
        &self,
        options: Options,
        heads: usize,
        [queries, keys]: [usize; 2],
    ) -> ComptimeOptionArgs<PairArgs> {
        if !options.any() {
            return ComptimeOptionArgs::None;
        }
        let [batch, head, row] = self.options.bias_bytes();
        let pairs = PairNumbersLaunch::new(
            queries as u32,
            keys as u32,
            batch,
            head,
            row as u32,
            self.options.mask(),
            self.options.dropout.map_or(1.0, |dropout| dropout.factor()) as f32,
        );
        ComptimeOptionArgs::Some(PairArgsLaunch::new(
            optional(self.slopes, heads),
            self.options.bias(),
            self.options.table_args(),
            pairs,
        ))
    }
}

/// Whether a launch can take these tensors, which a plan cannot know.
///
/// # Errors
/// [`KernelError`] if TMA cannot read a tensor, or the scale is not positive where it has to be.
pub fn check(
    named: &[(&'static str, &TensorView)],
    residue: Option<Residue>,
    asked: Asked,
) -> Result<(), KernelError> {
    for &(name, tensor) in named {
        check_rows(name, tensor, ALIGNMENT)?;
        // The last of a class of another length would be beyond the sequence, in the next head.
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
    match asked.transformed() {
        true => Ok(()),
        false => check_scale(asked.options.scale, None),
    }
}

/// Runs the forward pass over a layout, or a part of one, into `out` `[batch, heads, seq_q, dim]` and `lse`
/// `[batch, heads, seq_q]`, both contiguous. With [`Tile::carry`] they hold the parts before.
///
/// # Errors
/// As [`check`], and if the output is too large. Then nothing was launched.
#[allow(clippy::too_many_arguments)]
pub fn forward(
    client: &Client,
    tile: Tile,
    layout: &BlockLayout,
    sizes: &Sizes,
    residue: Option<Residue>,
    [q, k, v]: [&TensorView; 3],
    out: &Handle,
    lse: &Handle,
    asked: Asked,
) -> Result<(), KernelError> {
    check(&[("q", q), ("k", k), ("v", v)], residue, asked)?;
    let tile = Tile {
        options: asked.options(tile.options, residue),
        ..tile
    };
    let device_plan = plan(client, layout, tile.tiling());
    let (heads, seq_q) = (layout.heads(), q.shape[2]);
    let rows = sizes.batch * heads * seq_q;
    if u32::try_from(rows * tile.dim / 8).is_err() {
        let most = u64::from(u32::MAX) * 8;
        return Err(KernelError::limit(
            "the elements of the output",
            most,
            rows * tile.dim,
        ));
    }
    let (log2_scale, cap_scale) = asked.scales();
    let softcap = asked.options.softcap.unwrap_or(1.0);
    unsafe {
        forward::forward::launch_unchecked(
            client,
            CubeCount::Static(device_plan.tiles as u32, heads as u32, sizes.batch as u32),
            CubeDim::new_1d(tile.units() as u32),
            tile.cols / 2,
            tile.cols / 4,
            (tile.dim / 2).next_power_of_two(),
            tensor_map(q, tile.q_group(), residue, sizes.dtype),
            tensor_map(k, tile.group, residue, sizes.dtype),
            tensor_map(v, tile.group, residue, sizes.dtype),
            BufferArg::from_raw_parts(out.clone(), rows * tile.dim / 8),
            BufferArg::from_raw_parts(lse.clone(), rows),
            BufferArg::from_raw_parts(device_plan.words.clone(), device_plan.len),
            asked.args(tile.options, heads, [seq_q, k.shape[2]]),
            plan_parts(&device_plan.sections, batch_words(layout)),
            listing(residue),
            seq_q as u32,
            (heads / sizes.kv_heads) as u32,
            log2_scale as f32,
            (std::f64::consts::LOG2_E / log2_scale) as f32,
            softcap as f32,
            cap_scale as f32,
            tile,
        );
    }
    Ok(())
}

/// What the fused backward pass needs of each query, with `pitch` places of each head.
#[derive(Clone)]
pub struct Stats {
    values: Handle,
    pitch: usize,
    /// Whether places are positions.
    in_order: bool,
}

/// The backward pass over a layout, or a part of one: `outputs` as the forward pass left them, and the stats if a part before
/// has made them. Three launches: what is needed of each query, the walk over columns, and dQ from its sums.
///
/// # Errors
/// As [`check`], and if a tensor is too large. Then nothing was launched.
#[allow(clippy::too_many_arguments)]
pub fn backward(
    client: &Client,
    tile: BackwardTile,
    layout: &BlockLayout,
    sizes: &Sizes,
    residue: Option<Residue>,
    [q, k, v, grad_out]: [&TensorView; 4],
    outputs: Outputs,
    grad_lse: Option<&Handle>,
    known: Option<Stats>,
    gradients: &Gradients,
    asked: Asked,
) -> Result<Stats, KernelError> {
    let named = [("q", q), ("k", k), ("v", v), ("grad_out", grad_out)];
    check(&named, residue, asked)?;
    let tile = BackwardTile {
        options: asked.options(tile.options, residue),
        ..tile
    };
    let scale = asked.options.scale;
    let device_plan = plan(client, layout, tile.tiling());
    let heads = layout.heads();
    let (seq_q, seq_kv) = (q.shape[2], k.shape[2]);
    // A group, and 16 queries, are of one head.
    let pitch = layout.seq_q().next_multiple_of(tile.group.max(16));
    let rows = sizes.batch * heads * pitch;
    let lanes = tile.padded() / 8;
    let kv_elements = sizes.batch * sizes.kv_heads * seq_kv * tile.dim + gradients.v_offset;
    let cubes = device_plan.tiles * sizes.kv_heads * sizes.batch;
    for (what, count) in [
        ("the elements of a gradient", kv_elements / 8),
        ("the queries of a backward pass", rows * lanes),
        ("the tiles of a backward pass", cubes * 2),
    ] {
        if u32::try_from(count).is_err() {
            return Err(KernelError::limit(what, u32::MAX, count));
        }
    }
    let hardware = &client.properties().hardware;
    let multiprocessors = hardware.num_streaming_multiprocessors.unwrap_or(1) as usize;
    let grid = match tile.persistent {
        // All of them run at once: a tile may wait for one that another cube has.
        true => cubes.min(multiprocessors),
        false => cubes,
    };
    let (log2_scale, cap_scale) = asked.scales();
    let softcap = asked.options.softcap.unwrap_or(1.0);
    let counters = rows / tile.counted() * tile.parts();
    let counters = (client.empty((counters + 1) * 4), counters);
    let stats = client.empty(rows * 8);
    let scratch = client.empty(rows * tile.padded() * 4);
    let [batch_stride, head_stride, row_stride, _] = grad_out.strides;
    const UNITS: usize = 256;
    let over = |units: usize| CubeCount::Static(units.div_ceil(UNITS) as u32, 1, 1);
    match known.filter(|known| known.in_order) {
        Some(known) => unsafe {
            backward::relist::launch_unchecked(
                client,
                over(rows),
                CubeDim::new_1d(UNITS as u32),
                BufferArg::from_raw_parts(known.values, sizes.batch * heads * known.pitch),
                BufferArg::from_raw_parts(stats.clone(), rows),
                BufferArg::from_raw_parts(counters.0.clone(), counters.1 + 1),
                listing(residue),
                rows as u32,
                pitch as u32,
                known.pitch as u32,
                seq_q as u32,
                tile,
            );
        },
        None => unsafe {
            backward::stats::launch_unchecked(
                client,
                over(rows * lanes),
                CubeDim::new_1d(UNITS as u32),
                BufferArg::from_raw_parts(
                    outputs.out.clone(),
                    sizes.batch * heads * seq_q * tile.dim / 8,
                ),
                BufferArg::from_raw_parts(grad_out.handle.clone(), grad_out.reach().div_ceil(8)),
                BufferArg::from_raw_parts(outputs.lse.clone(), sizes.batch * heads * seq_q),
                optional(grad_lse, sizes.batch * heads * seq_q),
                BufferArg::from_raw_parts(stats.clone(), rows * 2),
                BufferArg::from_raw_parts(counters.0.clone(), counters.1 + 1),
                StridesLaunch::new(batch_stride / 8, head_stride / 8, row_stride / 8, seq_q),
                listing(residue),
                heads as u32,
                rows as u32,
                pitch as u32,
                lanes as u32,
                tile,
            );
        },
    }
    let stats_map = stats_map(&stats, tile.group, sizes.batch * heads, pitch);
    unsafe {
        backward::backward::launch_unchecked(
            client,
            CubeCount::Static(grid as u32, 1, 1),
            CubeDim::new_1d(tile.units() as u32),
            tile.cols / 2,
            tile.cols / 4,
            (tile.dim / 2).next_power_of_two(),
            tile.dq_cols() / 2,
            tensor_map(k, tile.a_group(), residue, sizes.dtype),
            tensor_map(v, tile.a_group(), residue, sizes.dtype),
            tensor_map(q, tile.group, residue, sizes.dtype),
            tensor_map(grad_out, tile.group, residue, sizes.dtype),
            stats_map,
            BufferArg::from_raw_parts(scratch.clone(), rows * tile.padded()),
            BufferArg::from_raw_parts(counters.0.clone(), counters.1 + 1),
            BufferArg::from_raw_parts(gradients.kv.clone(), kv_elements / 8),
            BufferArg::from_raw_parts(device_plan.words.clone(), device_plan.len),
            asked.args(tile.options, heads, [seq_q, seq_kv]),
            plan_parts(&device_plan.sections, batch_words(layout)),
            listing(residue),
            LengthsLaunch::new(
                device_plan.tiles as u32,
                SPREAD,
                sizes.kv_heads as u32,
                (heads / sizes.kv_heads) as u32,
                sizes.batch as u32,
                seq_kv as u32,
                pitch as u32,
                (gradients.v_offset / 8) as u32,
                counters.1 as u32,
            ),
            scale as f32,
            log2_scale as f32,
            softcap as f32,
            cap_scale as f32,
            tile,
        );
        backward::finish::launch_unchecked(
            client,
            over(rows * tile.dim / 8),
            CubeDim::new_1d(UNITS as u32),
            BufferArg::from_raw_parts(scratch, rows * tile.padded() / 2),
            BufferArg::from_raw_parts(counters.0, counters.1 + 1),
            BufferArg::from_raw_parts(
                gradients.q.clone(),
                sizes.batch * heads * seq_q * tile.dim / 8,
            ),
            listing(residue),
            rows as u32,
            pitch as u32,
            seq_q as u32,
            scale as f32,
            tile,
        );
    }
    Ok(Stats {
        values: stats,
        pitch,
        in_order: residue.is_none(),
    })
}

/// One walk of the backward pass over a layout, or a part of one.
///
/// # Errors
/// As [`check`]. Then nothing was launched.
#[allow(clippy::too_many_arguments)]
pub fn walk(
    client: &Client,
    tile: WalkTile,
    walk: Walk,
    layout: &BlockLayout,
    sizes: &Sizes,
    residue: Option<Residue>,
    operands: &WalkOperands,
    asked: Asked,
) -> Result<(), KernelError> {
    let &WalkOperands {
        a: [a1, a2],
        b: [b1, b2],
        stats,
        pitch,
        out,
        second,
    } = operands;
    check(&operands.named(), residue, asked)?;
    let tile = WalkTile {
        options: asked.options(tile.options, residue),
        ..tile
    };
    let scale = asked.options.scale;
    let device_plan = plan(client, layout, tile.tiling(walk));
    let heads = layout.heads();
    let outer_heads = a1.shape[1];
    let len = a1.shape[2];
    let lengths = match walk {
        Walk::Rows => [len, b1.shape[2]],
        Walk::Columns => [b1.shape[2], len],
    };
    let elements = sizes.batch * outer_heads * len * tile.dim + second;
    if u32::try_from(elements / 8).is_err() {
        let most = u64::from(u32::MAX) * 8;
        return Err(KernelError::limit(
            "the elements of a gradient",
            most,
            elements,
        ));
    }
    let (log2_scale, cap_scale) = asked.scales();
    let softcap = asked.options.softcap.unwrap_or(1.0);
    let stat_rows = sizes.batch * heads;
    let stats_map = stats_map(stats, tile.group, stat_rows, pitch);
    unsafe {
        walks::one_walk::launch_unchecked(
            client,
            CubeCount::Static(
                device_plan.tiles as u32,
                outer_heads as u32,
                sizes.batch as u32,
            ),
            CubeDim::new_1d(tile.units() as u32),
            tile.cols / 2,
            tile.cols / 4,
            tile.dim / 2,
            tensor_map(a1, tile.a_group(), residue, sizes.dtype),
            tensor_map(a2, tile.a_group(), residue, sizes.dtype),
            tensor_map(b1, tile.group, residue, sizes.dtype),
            tensor_map(b2, tile.group, residue, sizes.dtype),
            stats_map,
            BufferArg::from_raw_parts(stats.clone(), stat_rows * pitch * 2),
            BufferArg::from_raw_parts(out.clone(), elements / 8),
            BufferArg::from_raw_parts(device_plan.words.clone(), device_plan.len),
            asked.args(tile.options, heads, lengths),
            plan_parts(&device_plan.sections, batch_words(layout)),
            listing(residue),
            len as u32,
            pitch as u32,
            (heads / sizes.kv_heads) as u32,
            (second / 8) as u32,
            scale as f32,
            log2_scale as f32,
            softcap as f32,
            cap_scale as f32,
            walk,
            tile,
        );
    }
    Ok(())
}

/// A map of `[rows, pitch, 2]` numbers whose boxes have those of `group` places.
fn stats_map(stats: &Handle, group: usize, rows: usize, pitch: usize) -> TensorMapArg<Tiled> {
    let boxes = TiledArgs {
        tile_size: [1, group * 2].into(),
    };
    let (strides, shape) = ([pitch * 2, 1].into(), [rows, pitch * 2].into());
    let stats = unsafe { TensorArg::from_raw_parts(stats.clone(), strides, shape) };
    TensorMapArg::new(boxes, stats, ElemType::Float(FloatKind::F32))
}

/// A map whose boxes have `rows` rows of 64 columns.
fn tensor_map(
    tensor: &TensorView,
    rows: usize,
    residue: Option<Residue>,
    dtype: ElemType,
) -> TensorMapArg<Tiled> {
    let [batch, heads, seq, dim] = tensor.shape;
    let [batch_stride, head_stride, row_stride, _] = tensor.strides;
    let (shape, mut strides, boxes) = match residue {
        None => (
            vec![batch, heads, seq, dim],
            vec![batch_stride, head_stride, row_stride, 1],
            vec![1, 1, rows, ROW_ELEMENTS],
        ),
        Some(Residue { stride, .. }) => (
            vec![batch, heads, stride, seq / stride, dim],
            vec![
                batch_stride,
                head_stride,
                row_stride,
                row_stride * stride,
                1,
            ],
            vec![1, 1, 1, rows, ROW_ELEMENTS],
        ),
    };
    // Strides of dimensions of length 1 are arbitrary, but a map's have to be multiples of 16 bytes.
    for (stride, length) in strides.iter_mut().zip(&shape) {
        if *length == 1 {
            *stride = dim;
        }
    }
    let last = strides.len() - 1;
    strides[last] = 1;
    let tensor = unsafe {
        TensorArg::from_raw_parts(
            tensor.handle.clone(),
            strides.as_slice().into(),
            shape.as_slice().into(),
        )
    };
    let boxes = TiledArgs {
        tile_size: boxes.as_slice().into(),
    };
    TensorMapArg::new(boxes, tensor, dtype).with_swizzle(TensorMapSwizzle::B128)
}
