//! The `mma` tier: mma.sync, ldmatrix and cp.async, on NVIDIA GPUs of compute capability 8.0 and up; bf16, f16, and f32 through tf32
//! where that is asked for.
//!
//! It takes what the `hopper` tier does not: other GPUs, other widths, narrow blocks, classes of unequal lengths. Rows are
//! gathered one by one, in pieces of 16 bytes, so nothing is required of blocks and listings; keys and values lie in
//! shared memory with their rows an odd number of pieces apart. Scores and weights stay in registers.

mod asm;
mod backward;
mod dropout;
mod forward;
mod gather;
mod product;
mod score;
mod tile;

use cubecl::ir::{ElemType, FloatKind};
use cubecl::prelude::*;
use cubecl::server::Handle;

use super::device::plan;
use super::launch::{ScoreOptions, batch_words, listing, optional, plan_parts};
use super::shared::asm::Half;
use super::tensor::{WalkOperands, check_options, check_rows, check_scale, scales, tier_limit};
use super::{Kernel, KernelError, Sizes, TensorView};
use crate::plan::{Grouping, Walk};
use crate::{BlockLayout, Residue};
use asm::Element;
use gather::StridesLaunch;
use score::BiasStridesLaunch;
use tile::Outputs;
pub use tile::Tile;

/// cp.async copies 16 bytes from and to multiples of 16 bytes.
const PIECE: usize = 16;
/// Widths are multiples of the depth of mma.sync.
const WIDTH: usize = 16;
const WIDEST: usize = 256;

/// A shape that a tile may have, and its speed relative to the others on dense attention.
struct Candidate {
    warps: usize,
    warp_tiles: usize,
    cols: usize,
    stages: usize,
    speed: f64,
}

const fn candidate([warps, warp_tiles, cols, stages]: [usize; 4], speed: f64) -> Candidate {
    Candidate {
        warps,
        warp_tiles,
        cols,
        stages,
        speed,
    }
}

/// The shapes for a width, as far as registers go, and their speeds as measured on an H200. Small ones are for little shared memory.
fn candidates(kernel: Kernel, width: usize) -> Vec<Candidate> {
    match (kernel, width) {
        (Kernel::Forward, ..=64) => vec![
            candidate([4, 2, 64, 2], 1.0),
            candidate([4, 2, 64, 1], 0.99),
            candidate([4, 1, 64, 2], 0.95),
            candidate([4, 1, 64, 1], 0.9),
        ],
        (Kernel::Forward, ..=128) => vec![
            candidate([4, 2, 64, 2], 1.0),
            candidate([4, 2, 64, 1], 0.99),
            candidate([4, 1, 64, 2], 0.8),
            candidate([4, 1, 64, 1], 0.78),
            candidate([4, 1, 32, 1], 0.6),
        ],
        (Kernel::Forward, _) => vec![
            candidate([4, 1, 64, 2], 1.0),
            candidate([4, 1, 64, 1], 0.95),
            candidate([4, 1, 32, 2], 0.8),
            candidate([4, 1, 32, 1], 0.75),
            candidate([2, 1, 32, 1], 0.5),
        ],
        (Kernel::BackwardRows, ..=64) => vec![
            candidate([4, 2, 64, 2], 1.0),
            candidate([4, 1, 64, 2], 0.95),
            candidate([4, 2, 32, 2], 0.85),
            candidate([4, 1, 32, 2], 0.75),
        ],
        (Kernel::BackwardRows, ..=128) => vec![
            candidate([4, 2, 32, 2], 1.0),
            candidate([4, 1, 64, 2], 0.85),
            candidate([4, 1, 32, 2], 0.75),
            candidate([2, 1, 32, 2], 0.5),
            candidate([2, 1, 16, 2], 0.4),
        ],
        (Kernel::BackwardColumns, ..=64) => vec![
            candidate([4, 2, 32, 2], 1.0),
            candidate([4, 1, 64, 2], 0.85),
            candidate([4, 1, 32, 2], 0.8),
        ],
        (Kernel::BackwardColumns, ..=128) => vec![
            candidate([4, 1, 64, 2], 1.0),
            candidate([4, 1, 32, 2], 0.8),
            candidate([2, 1, 32, 2], 0.5),
            candidate([2, 1, 16, 2], 0.4),
        ],
        _ => vec![
            candidate([4, 1, 32, 2], 1.0),
            candidate([2, 1, 32, 2], 0.6),
            candidate([2, 1, 16, 2], 0.4),
        ],
    }
}

/// `BLOCKSPARSE_MMA_TILE=WARPSxWARP_TILESxCOLSxSTAGES`, three of them with commas between, are the shapes of forward, dQ and
/// dK, dV: for measuring them.
fn forced(kernel: Kernel) -> Option<Candidate> {
    let text = std::env::var("BLOCKSPARSE_MMA_TILE").ok()?;
    let shape = text.split(',').nth(kernel as usize)?;
    let mut numbers = shape.split('x').map(|part| part.parse().ok());
    let mut next = || numbers.next()?;
    Some(candidate([next()?, next()?, next()?, next()?], 1.0))
}

/// The tile that should be fastest, or why the tier does not take the call.
///
/// # Errors
/// What the tier lacks: the device, the type, the widths, or something it does not compute.
pub fn choose(
    layout: &BlockLayout,
    sizes: &Sizes,
    kernel: Kernel,
    residue: Option<Residue>,
    carry: bool,
    properties: &DeviceProperties,
) -> Result<Tile, &'static str> {
    let capability = properties.identity.fingerprint.strip_prefix("ptx_sm");
    let capability: u32 = capability.and_then(|text| text.parse().ok()).unwrap_or(0);
    if capability < 80 {
        return Err("the device is not of compute capability 8.0 or up");
    }
    if tier_limit().is_some_and(|limit| limit == "simt") {
        return Err("BLOCKSPARSE_TIER says simt");
    }
    let element = match sizes.dtype {
        ElemType::Float(FloatKind::BF16) => Element::Half(Half::Bf16),
        ElemType::Float(FloatKind::F16) => Element::Half(Half::F16),
        ElemType::Float(FloatKind::F32) if sizes.tf32 => Element::Tf32,
        ElemType::Float(FloatKind::F32) => {
            return Err("the dtype is f32, and tf32 was not asked for");
        }
        _ => return Err("the dtype is neither bf16 nor f16"),
    };
    check_options(sizes)?;
    let widths = [sizes.head_dim, sizes.value_dim];
    if !(widths.iter()).all(|dim| dim.is_multiple_of(WIDTH) && (1..=WIDEST).contains(dim)) {
        return Err("head_dim or value_dim is no multiple of 16 up to 256");
    }
    let backward = kernel != Kernel::Forward;
    let walk = kernel.walk();
    let block = layout.block_size();
    let (length, heads) = match walk {
        Walk::Rows => (layout.seq_q(), layout.heads()),
        Walk::Columns => (layout.seq_kv(), sizes.kv_heads),
    };
    let outputs = match walk {
        Walk::Rows => Outputs::First,
        Walk::Columns if sizes.head_dim + sizes.value_dim > 320 => Outputs::First,
        Walk::Columns => Outputs::Both,
    };
    let hardware = &properties.hardware;
    let multiprocessors = hardware.num_streaming_multiprocessors.unwrap_or(1) as f64;
    let shapes = match forced(kernel) {
        Some(shape) => vec![shape],
        None => candidates(kernel, sizes.head_dim.max(sizes.value_dim)),
    };
    let may_cluster = sizes.may_cluster(layout, walk);
    let mut best: Option<(f64, Tile)> = None;
    for shape in shapes {
        let tile = Tile {
            element,
            head_dim: sizes.head_dim,
            value_dim: sizes.value_dim,
            warps: shape.warps,
            warp_tiles: shape.warp_tiles,
            cols: shape.cols,
            group: shape.cols.min(block),
            stages: shape.stages,
            softcap: sizes.softcap,
            alibi: sizes.alibi,
            bias: sizes.bias,
            relative: sizes.relative,
            dropout: sizes.dropout,
            residue: residue.is_some(),
            carry,
            clustered: false,
            outputs,
        };
        let bytes = tile.shared_bytes(backward);
        // The backward kernels alternate between two stages.
        let stages_fit = !backward || tile.stages == 2;
        if !tile.fits(block) || !stages_fit || bytes > hardware.max_shared_memory_size {
            continue;
        }
        let rows = tile.rows();
        let grouping = Grouping::best(layout, walk, [rows, tile.cols], may_cluster);
        let tile = Tile {
            clustered: grouping.clustered,
            ..tile
        };
        // A multiprocessor reserves 1 KB a cube; registers are enough for eight warps.
        let cubes = (hardware.max_shared_memory_size + 1024) / (bytes + 1024);
        let alone = cubes.min(8 / tile.warps).max(1) * tile.warps < 8;
        let waste = length.next_multiple_of(rows) as f64 / length as f64;
        let launched = length.div_ceil(rows) * heads * sizes.batch;
        // Fewer cubes than multiprocessors leave some idle.
        let idle = (multiprocessors / launched as f64).max(1.0);
        let speed = shape.speed * if alone { 0.7 } else { 1.0 };
        let cost = grouping.overhead * waste * idle / speed;
        if best.is_none_or(|(least, _)| cost < least) {
            best = Some((cost, tile));
        }
    }
    best.map(|(_, tile)| tile)
        .ok_or("no tile fits the shared memory of the device")
}

/// A tile as plans print it.
pub fn describe(tile: Tile, kernel: Kernel) -> impl std::fmt::Display {
    tile::Described(tile, kernel)
}

/// Whether a launch can take these tensors, which a plan cannot know.
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
        // Kernels multiply the bytes of a row by a position.
        if let Some(&got) =
            (tensor.strides.iter()).find(|&&stride| u32::try_from(stride * 4).is_err())
        {
            let most = u64::from(u32::MAX) / 4;
            return Err(KernelError::limit("a stride", most, got));
        }
    }
    if let Some(bias) = &options.bias {
        let most = u64::from(u32::MAX) / 4;
        let keys = bias.shape[3];
        if keys as u64 > most {
            return Err(KernelError::limit("the bias's keys", most, keys));
        }
    }
    match tile.biased() {
        true => Ok(()),
        false => check_scale(options.scale, options.softcap),
    }
}

/// Factors of scores: to powers of two, and of products before that, where scores are softcapped or biased.
fn factors(tile: Tile, options: &ScoreOptions) -> (f64, f64) {
    match tile.biased() && !tile.softcap {
        true => (std::f64::consts::LOG2_E, options.scale),
        false => scales(options.scale, options.softcap),
    }
}

fn bias_strides(options: &ScoreOptions, element: Element) -> BiasStridesLaunch {
    let [batch, heads, rows, keys] = options.bias.as_ref().map_or([1; 4], |bias| bias.shape);
    let stride = |length: usize, elements: usize| match length {
        1 => 0,
        _ => elements * element.bytes(),
    };
    BiasStridesLaunch::new(
        stride(batch, heads * rows * keys) as u64,
        stride(heads, rows * keys) as u64,
        stride(rows, keys) as u32,
    )
}

fn bias<T: LaunchArg<RuntimeArg = BufferArg>>(
    options: &ScoreOptions,
    element: Element,
) -> ComptimeOptionArgs<T> {
    let elements = (options.bias.as_ref()).map_or(0, |bias| bias.elements());
    let handle = options.bias.as_ref().map(|bias| &bias.handle);
    optional(handle, words(elements, element))
}

fn strides(tensor: &TensorView, element: Element) -> StridesLaunch {
    let [batch, head, row] = [0, 1, 2].map(|dim| match tensor.shape[dim] {
        1 => 0,
        _ => (tensor.strides[dim] * element.bytes() / PIECE) as u32,
    });
    StridesLaunch::new(batch, head, row, tensor.shape[2] as u32)
}

fn input(tensor: &TensorView, element: Element) -> BufferArg {
    unsafe { BufferArg::from_raw_parts(tensor.handle.clone(), words(tensor.reach(), element)) }
}

/// Words of so many elements.
fn words(elements: usize, element: Element) -> usize {
    (elements * element.bytes()).div_ceil(4)
}

/// Checks that words can be counted in 32 bits.
fn check_words(what: &'static str, elements: usize, element: Element) -> Result<(), KernelError> {
    let most = u64::from(u32::MAX) * 4 / element.bytes() as u64;
    match elements as u64 <= most {
        true => Ok(()),
        false => Err(KernelError::limit(what, most, elements)),
    }
}

/// Runs the forward pass over a layout, or a part of one, into `out` `[batch, heads, seq_q, value_dim]` and `lse`
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
    slopes: Option<&Handle>,
    options: &ScoreOptions,
) -> Result<(), KernelError> {
    let element = tile.element;
    check(&[("q", q), ("k", k), ("v", v)], tile, options)?;
    let device_plan = plan(client, layout, tile.tiling(Walk::Rows));
    let heads = layout.heads();
    let rows = sizes.batch * heads * q.shape[2];
    check_words("the elements of the output", rows * tile.value_dim, element)?;
    let (log2_scale, product_scale) = factors(tile, options);
    unsafe {
        forward::forward::launch_unchecked(
            client,
            CubeCount::Static(device_plan.tiles as u32, heads as u32, sizes.batch as u32),
            CubeDim::new_1d(tile.units() as u32),
            input(q, element),
            input(k, element),
            input(v, element),
            BufferArg::from_raw_parts(out.clone(), words(rows * tile.value_dim, element)),
            BufferArg::from_raw_parts(lse.clone(), rows),
            optional(slopes, heads),
            bias(options, element),
            options.table_args(),
            BufferArg::from_raw_parts(device_plan.words.clone(), device_plan.len),
            strides(q, element),
            strides(k, element),
            strides(v, element),
            bias_strides(options, element),
            plan_parts(&device_plan.sections, batch_words(layout)),
            listing(residue),
            (heads / sizes.kv_heads) as u32,
            log2_scale as f32,
            (std::f64::consts::LOG2_E / log2_scale) as f32,
            options.softcap.unwrap_or(1.0) as f32,
            product_scale as f32,
            options.mask(),
            options.dropout.map_or(1.0, |dropout| dropout.factor()) as f32,
            tile,
        );
    }
    Ok(())
}

/// One walk of the backward pass over a layout, or a part of one.
///
/// # Errors
/// As [`check`], and if a gradient is too large. Then nothing was launched.
#[allow(clippy::too_many_arguments)]
pub fn backward(
    client: &Client,
    tile: Tile,
    walk: Walk,
    layout: &BlockLayout,
    sizes: &Sizes,
    residue: Option<Residue>,
    operands: &WalkOperands,
    options: &ScoreOptions,
) -> Result<(), KernelError> {
    let &WalkOperands {
        a: [a1, a2],
        b: [b1, b2],
        stats,
        pitch,
        out,
        second,
    } = operands;
    let element = tile.element;
    check(&operands.named(), tile, options)?;
    let device_plan = plan(client, layout, tile.tiling(walk));
    let heads = layout.heads();
    let outer_heads = a1.shape[1];
    let rows = sizes.batch * outer_heads * a1.shape[2];
    let elements = match walk {
        Walk::Rows => rows * tile.head_dim,
        Walk::Columns => second + rows * tile.value_dim,
    };
    check_words("the elements of a gradient", elements, element)?;
    let (log2_scale, product_scale) = factors(tile, options);
    let launches = match (walk, tile.outputs) {
        (Walk::Columns, Outputs::First) => vec![Outputs::First, Outputs::Second],
        (_, outputs) => vec![outputs],
    };
    let stats_len = sizes.batch * heads * pitch * 2 + if tile.alibi { heads } else { 0 };
    for outputs in launches {
        unsafe {
            backward::backward::launch_unchecked(
                client,
                CubeCount::Static(
                    device_plan.tiles as u32,
                    outer_heads as u32,
                    sizes.batch as u32,
                ),
                CubeDim::new_1d(tile.units() as u32),
                input(a1, element),
                input(a2, element),
                input(b1, element),
                input(b2, element),
                BufferArg::from_raw_parts(stats.clone(), stats_len),
                bias(options, element),
                options.table_args(),
                BufferArg::from_raw_parts(out.clone(), words(elements, element)),
                BufferArg::from_raw_parts(device_plan.words.clone(), device_plan.len),
                strides(a1, element),
                strides(a2, element),
                strides(b1, element),
                strides(b2, element),
                bias_strides(options, element),
                plan_parts(&device_plan.sections, batch_words(layout)),
                listing(residue),
                pitch as u32,
                (heads / sizes.kv_heads) as u32,
                words(second, element) as u32,
                options.scale as f32,
                log2_scale as f32,
                options.softcap.unwrap_or(1.0) as f32,
                product_scale as f32,
                options.mask(),
                options.dropout.map_or(1.0, |dropout| dropout.factor()) as f32,
                walk,
                Tile { outputs, ..tile },
            );
        }
    }
    Ok(())
}
