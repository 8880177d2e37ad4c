//! Launches of the gradient of a bias tensor.

use cubecl::prelude::*;
use cubecl::server::Handle;

use super::bias_gradient::{NONE, SharingLaunch, bias_gradient};
use super::launch::{TMA_PLACES, check, has_wide_bias, launch_mainloop, pair_args};
use super::long_tiles::{LongTiles, MainloopPlan};
use super::maps::tensor_map;
use super::pair_tile::PairTile;
use super::tiles::MainloopTile;
use crate::args::{buffer, schedule, spread};
use crate::call::BiasView;
use crate::device::plan;
use crate::error::KernelError;
use crate::pass::{BackwardPass, Operands, Part};
use crate::slices::Slice;
use crate::stats::{self, Wanted};
use crate::tensor::factors;
use blocksparse::BlockLayout;
use blocksparse::plan::Mainloop;

/// Tiles of the gradient of a bias tensor.
#[derive(Clone, Copy, Debug)]
pub struct BiasTiles {
    /// Tile of gradients pair by pair.
    pub pairs: PairTile,
    /// Tile of gradients key by key, used if all queries share a row of the bias, or why it is refused.
    pub keys: Result<MainloopTile, &'static str>,
}

/// Adds a part's gradient of a bias with an element per pair. It is one launch, or one per pattern if heads with different patterns share elements.
///
/// # Errors
/// Those of `check`.
pub fn launch_bias_pairs(
    pass: &BackwardPass,
    part: Part,
    mut tile: PairTile,
    bias: &BiasView,
    out: &Handle,
) -> Result<(), KernelError> {
    let (client, request, layout) = (pass.client, pass.request, part.layout);
    let [q, k, v] = pass.inputs;
    let residue = part.residue;
    check(&pass.named(), residue, pass.options)?;
    let heads = layout.heads();
    let [own_batches, own_heads, _, keys] = bias.shape;
    let first = out.offset_start.unwrap_or(0);
    tile.base.wide_bias = has_wide_bias(pass, residue);
    tile.wide = keys.is_multiple_of(2) && first.is_multiple_of(8) && residue.is_none();
    let wanted = Wanted::of_places(part, 1);
    let stats = stats::make(pass, wanted)?;
    let device_plan = plan(client, layout, tile.tiling)?;
    let scales = factors(pass.options);
    let patterns = patterns(bias.shape, layout, request.batch);
    for (index, pattern) in patterns.into_iter().enumerate() {
        let steps = match pattern {
            Some(pattern) => device_plan.steps[pattern],
            None => device_plan.steps.iter().copied().max().unwrap_or(0),
        };
        if steps == 0 {
            continue;
        }
        tile.base.carry |= index > 0;
        tile.several = pattern.is_some();
        for slice in Slice::whole(own_batches, own_heads).cut(client) {
            // SAFETY: a cube computes a step of the plan. TMA reads nothing beyond its maps. Elements are written at positions below the lengths of queries
            // and keys. The buffers have the stated lengths (see `buffer`).
            unsafe {
                bias_gradient::launch_unchecked(
                    client,
                    slice.cubes(steps),
                    CubeDim::new_1d(tile.units() as u32),
                    tile.cols / 2,
                    tile.cols / 4,
                    tensor_map(q, tile.a_group(), residue, request.dtype),
                    tensor_map(k, tile.group, residue, request.dtype),
                    tensor_map(v, tile.group, residue, request.dtype),
                    tensor_map(pass.grads.out, tile.a_group(), residue, request.dtype),
                    buffer(&stats, request.batch * heads * wanted.pitch * 2),
                    buffer(out, bias.elements()),
                    schedule(&device_plan, layout, residue, slice),
                    pair_args(pass),
                    SharingLaunch::new(
                        (request.batch / own_batches) as u32,
                        (heads / own_heads) as u32,
                        heads as u32,
                        (heads / request.kv_heads) as u32,
                        wanted.pitch as u32,
                        device_plan.tiles as u32,
                        pattern.map_or(NONE, |pattern| (pattern * device_plan.tiles) as u32),
                    ),
                    pass.options.scalars(scales),
                    tile,
                );
            }
        }
    }
    Ok(())
}

/// Returns the patterns with a launch each. `None` means one launch, in which a cube has the pattern of its own head, because all heads that share its
/// elements have that pattern.
fn patterns(
    [own_batches, own_heads, ..]: [usize; 4],
    layout: &BlockLayout,
    batch: usize,
) -> Vec<Option<usize>> {
    let heads_agree = own_heads == layout.heads();
    let batches_agree = own_batches == batch || layout.batch().is_none();
    match layout.num_patterns() == 1 || heads_agree && batches_agree {
        true => vec![None],
        false => (0..layout.num_patterns()).map(Some).collect(),
    }
}

/// Adds a part's gradient of a bias whose row all queries share. A loop over columns sums over the queries of each key and head, and a second launch sums
/// over batch entries and heads that share the bias.
///
/// # Errors
/// Those of `check`.
pub fn launch_bias_keys(
    pass: &BackwardPass,
    part: Part,
    tile: MainloopTile,
    bias: &BiasView,
    out: &Handle,
) -> Result<(), KernelError> {
    let (client, request, layout) = (pass.client, pass.request, part.layout);
    let (heads, keys) = (layout.heads(), pass.inputs[1].shape[2]);
    let wanted = Wanted::of_places(part, TMA_PLACES);
    let stats = stats::make(pass, wanted)?;
    let sums = request.batch * heads * keys;
    let numbers = KernelError::check_u32("the keys of all heads", sums)?;
    // Gradients are written 16 bytes at a time.
    let partial = client.empty(sums.next_multiple_of(4) * 4);
    let operands = Operands {
        out: &partial,
        heads,
        // Counted in 16-bit elements: a vector has 8 of them, or 4 in f32.
        elements: sums.div_ceil(4) * 8,
        ..pass.operands(Mainloop::Columns)
    };
    let long = LongTiles::NONE;
    let plan = MainloopPlan { tile, long };
    launch_mainloop(pass, part, plan, &operands, &stats, wanted.pitch)?;
    let [own_batches, own_heads, ..] = bias.shape;
    let cubes = spread(
        client,
        (bias.elements() as u64).div_ceil(u64::from(SUM_UNITS)),
    )?;
    // SAFETY: a unit reads the sums of its key in all heads that share it. The buffers have the stated lengths (see `buffer`).
    unsafe {
        add_members::launch_unchecked(
            client,
            cubes,
            CubeDim::new_1d(SUM_UNITS),
            buffer(&partial, numbers as usize),
            buffer(out, bias.elements()),
            keys as u32,
            own_heads as u32,
            (request.batch / own_batches) as u32,
            (heads / own_heads) as u32,
        );
    }
    Ok(())
}

/// Units per cube of [`add_members`].
const SUM_UNITS: u32 = 128;

/// Adds the sums of each key, `[batch, heads, keys]`, over the `batches` and `heads` that share a bias, to `out` `[own batches, own heads, keys]`.
#[cube(launch_unchecked)]
fn add_members(
    partial: &[f32],
    out: &mut [f32],
    keys: u32,
    own_heads: u32,
    batches: u32,
    heads: u32,
) {
    let at = ABSOLUTE_POS as u32;
    if at < out.len() as u32 {
        let key = at % keys;
        let outer = at / keys;
        // One of the two factors is 1.
        let all_heads = own_heads * heads;
        let first_batch = outer / own_heads * batches;
        let first_head = outer % own_heads * heads;
        let mut sum = f32::new(0.0);
        for batch in 0..batches {
            for head in 0..heads {
                let row = (first_batch + batch) * all_heads + first_head + head;
                sum += partial[(row * keys + key) as usize];
            }
        }
        out[at as usize] += sum;
    }
}
