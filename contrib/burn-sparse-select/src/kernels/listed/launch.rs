//! Launches over lists of queries.

use cubecl::prelude::*;
use cubecl::server::Handle;

use crate::kernels::listed::forward as forward_kernel;
use crate::kernels::listed::plan::ListedPlan;
use crate::kernels::listed::queries as queries_kernel;
use crate::kernels::listed::request::ListedRequest;
use crate::kernels::listed::row_stats::stats_of;
use crate::kernels::listed::spread_launch::{Spread, SpreadKernel};
use crate::kernels::listed::tile::WalkTile;
use crate::kernels::listed::views::{
    ListedGradients, check_inputs, far_rows, input, strides, words,
};
use crate::kernels::listed::warpgroups::{WalkedLists, WarpgroupTile};
use crate::kernels::listed::{fold, keys, neighbours, warpgroups};
use blocksparse_cubecl::args::buffer;
use blocksparse_cubecl::call::{OutputGrads, Outputs, TensorView};
use blocksparse_cubecl::error::KernelError;
use blocksparse_cubecl::mma::tile::Tile;
use blocksparse_cubecl::on_device::lists_by_keys;
use blocksparse_cubecl::slices::Slice;
use blocksparse_cubecl::tensor::scales;

/// The lists of a call, i32.
#[derive(Clone, Copy, Debug)]
pub enum ListedLists<'a> {
    /// Of blocks of keys.
    Blocks {
        /// The blocks that a query sees, `[batch, kv_heads, seq_q, most]`, negative for none.
        blocks: &'a Handle,
        /// The query at each place, `[batch, kv_heads, tiles · tile]`, negative for none: those of a block are neighbours, from the first place of a tile on.
        queries: &'a Handle,
        /// The block of each tile, `[batch, kv_heads, tiles]`, rising; negative for none, and those last.
        tile_blocks: &'a Handle,
    },
    /// Of single keys, `[batch, kv_heads, seq_q, most]`, as [`unique_keys`](blocksparse_cubecl::unique_keys) writes them: ascending, each once, −1 behind the last.
    Keys(&'a Handle),
}

fn walk(tile: WalkTile, [k, v]: [&TensorView; 2], carry: bool) -> WalkTile {
    let inner = Tile {
        carry,
        far_rows: far_rows([k, v]),
        ..tile.inner
    };
    WalkTile { inner, ..tile }
}

/// Attention to what the lists name into `out` and `lse`, which hold attention to other keys with `carry`, and are carried on.
///
/// # Errors
/// [`KernelError`] if cp.async cannot read a tensor, or the scale is not positive. Then nothing was launched.
pub fn forward(
    client: &Client,
    plan: &ListedPlan,
    [q, k, v]: [&TensorView; 3],
    blocks: &Handle,
    outputs: Outputs,
    scale: f64,
    carry: bool,
) -> Result<(), KernelError> {
    if let Some(plan) = &plan.neighbours {
        let inputs = [q, k, v];
        return neighbours::forward(client, plan, inputs, blocks, outputs, scale, carry);
    }
    let request = plan.request();
    check_inputs(&[q, k, v], scale)?;
    if let Some(tile) = plan.warpgroups.forward {
        let inputs = [q, k, v];
        let tile = WarpgroupTile { carry, ..tile };
        let lists = WalkedLists::of_queries(request, blocks);
        warpgroups::forward(client, request, inputs, &lists, outputs, scale, tile);
        return Ok(());
    }
    let tile = walk(plan.forward, [k, v], carry);
    let (log2_scale, _) = scales(scale, None);
    let rows = request.all_rows();
    for slice in Slice::whole(request.batch, request.kv_heads).cut(client) {
        // SAFETY: a cube reads its query's list, positions below the lengths in the strides, and writes the rows of its query; the buffers have the
        // lengths they say (see `buffer`).
        unsafe {
            forward_kernel::forward::launch_unchecked(
                client,
                slice.cubes(request.seq_q),
                CubeDim::new_1d(tile.inner.units() as u32),
                input(q),
                input(k),
                input(v),
                buffer(blocks, request.listed()),
                buffer(outputs.out, words(rows * request.value_dim)),
                buffer(outputs.lse, rows),
                strides(q),
                strides(k),
                strides(v),
                slice.args(),
                request.most as u32,
                log2_scale as f32,
                (std::f64::consts::LOG2_E / log2_scale) as f32,
                tile,
            );
        }
    }
    Ok(())
}

/// Adds the gradients by what the lists, which are of the plan's blocks, name: of a loss whose gradients by the outputs are `grads`, where `outputs` are those over all keys. q and
/// `grads.out` are contiguous.
///
/// # Errors
/// As [`forward`].
#[allow(clippy::too_many_arguments)]
pub fn backward(
    client: &Client,
    plan: &ListedPlan,
    [q, k, v]: [&TensorView; 3],
    lists: ListedLists,
    outputs: Outputs,
    grads: OutputGrads,
    gradients: ListedGradients,
    scale: f64,
) -> Result<(), KernelError> {
    let request = plan.request();
    let inputs = [q, k, v, grads.out];
    check_inputs(&inputs, scale)?;
    let stats = stats_of(client, request, outputs, grads, scale)?;
    let (log2_scale, _) = scales(scale, None);
    let rows = request.all_rows();
    let tile = walk(plan.queries, [k, v], true);
    let of_keys = Tile {
        carry: true,
        far_rows: far_rows([k, v]),
        ..plan.keys
    };
    let (ListedLists::Blocks { blocks: walked, .. } | ListedLists::Keys(walked)) = lists;
    let by_query = WalkedLists::of_queries(request, walked);
    match (&plan.neighbours, plan.warpgroups.queries) {
        (Some(plan), _) => {
            let lists = (&stats, walked);
            neighbours::queries(client, plan, inputs, lists, gradients.q, scale)?;
        }
        (None, Some(tile)) => {
            let (gradient, lists) = (gradients.q, (&stats, &by_query));
            warpgroups::queries(client, request, inputs, lists, gradient, scale, tile);
        }
        (None, None) => by_queries(
            client,
            request,
            inputs,
            (&stats, walked),
            gradients.q,
            scale,
            tile,
        ),
    }
    if let (ListedLists::Keys(_), Some(tile)) = (lists, plan.spread) {
        let kernel = match plan.warpgroups.spread {
            Some(tile) => SpreadKernel::Warpgroups(tile),
            None => SpreadKernel::Warps(tile),
        };
        let spread = Spread {
            client,
            request,
            inputs,
            stats: &stats,
            gradients,
            scale,
            kernel,
        };
        let room = spread.room([request.seq_q; 2], request.most)?;
        return spread.launch(&room, &by_query);
    }
    let places = request.batch * request.kv_heads * request.tiles;
    let shape = request.list_shape(&of_keys);
    let numbers = request.partial(&of_keys);
    let by_keys;
    let (queries, masks, tile_blocks) = match lists {
        ListedLists::Blocks {
            queries,
            tile_blocks,
            ..
        } => (queries, queries, tile_blocks),
        ListedLists::Keys(keys) => {
            let tiles = [request.tiles, request.tile];
            by_keys = lists_by_keys(client, &request.list_sizes(), keys, tiles)?;
            let made = &by_keys;
            (&made.queries, &made.masks, &made.tile_blocks)
        }
    };
    let partial = client.empty(numbers * size_of::<f32>());
    let key_tiles = request.seq_kv.div_ceil(of_keys.rows());
    let [k_words, v_words] =
        [request.head_dim, request.value_dim].map(|width| words(request.all_keys() * width));
    for slice in Slice::whole(request.batch, request.kv_heads).cut(client) {
        // SAFETY: a cube of keys reads rows of the queries that places name, which are below their number, and adds to its own keys.
        unsafe {
            keys::keys::launch_unchecked(
                client,
                slice.cubes(key_tiles * shape.parts),
                CubeDim::new_1d(of_keys.units() as u32),
                input(q),
                input(k),
                input(v),
                input(grads.out),
                buffer(&stats, rows * 2),
                buffer(queries, places * request.tile),
                buffer(masks, places * request.tile),
                buffer(tile_blocks, places),
                buffer(gradients.k, k_words),
                buffer(gradients.v, v_words),
                buffer(&partial, numbers),
                strides(k),
                strides(v),
                slice.args(),
                request.seq_q as u32,
                request.tiles as u32,
                scale as f32,
                log2_scale as f32,
                shape,
                of_keys,
            );
            if shape.parts > 1 {
                fold::fold::launch_unchecked(
                    client,
                    slice.cubes(key_tiles),
                    CubeDim::new_1d(of_keys.units() as u32),
                    buffer(&partial, numbers),
                    buffer(tile_blocks, places),
                    buffer(gradients.k, k_words),
                    buffer(gradients.v, v_words),
                    slice.args(),
                    request.seq_kv as u32,
                    request.tiles as u32,
                    scale as f32,
                    shape,
                    of_keys,
                );
            }
        }
    }
    Ok(())
}

/// The gradient by queries, of lists that the queries of `stats` walk.
fn by_queries(
    client: &Client,
    request: &ListedRequest,
    [q, k, v, grad_out]: [&TensorView; 4],
    (stats, lists): (&Handle, &Handle),
    gradient: &Handle,
    scale: f64,
    tile: WalkTile,
) {
    let (log2_scale, _) = scales(scale, None);
    let rows = request.all_rows();
    for slice in Slice::whole(request.batch, request.kv_heads).cut(client) {
        // SAFETY: as for the forward pass.
        unsafe {
            queries_kernel::queries::launch_unchecked(
                client,
                slice.cubes(request.seq_q),
                CubeDim::new_1d(tile.inner.units() as u32),
                input(q),
                input(k),
                input(v),
                input(grad_out),
                buffer(stats, rows * 2),
                buffer(lists, request.listed()),
                buffer(gradient, words(rows * request.head_dim)),
                strides(q),
                strides(k),
                strides(v),
                strides(grad_out),
                slice.args(),
                request.most as u32,
                scale as f32,
                log2_scale as f32,
                tile,
            );
        }
    }
}
