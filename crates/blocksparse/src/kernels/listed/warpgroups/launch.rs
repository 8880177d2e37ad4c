//! Launches of walks on wgmma.

use cubecl::prelude::*;
use cubecl::server::Handle;

use super::tile::WarpgroupTile;
use super::{forward as forward_kernel, queries as by_query};
use crate::kernels::args::buffer;
use crate::kernels::call::{Outputs, TensorView};
use crate::kernels::listed::request::ListedRequest;
use crate::kernels::listed::views::{far_rows, input, strides};
use crate::kernels::slices::Slice;
use crate::kernels::tensor::scales;

fn of_tensors(tile: WarpgroupTile, [k, v]: [&TensorView; 2]) -> WarpgroupTile {
    WarpgroupTile {
        far_rows: far_rows([k, v]),
        ..tile
    }
}

/// Attention to what the lists name into `out` and `lse`.
pub fn forward(
    client: &Client,
    request: &ListedRequest,
    [q, k, v]: [&TensorView; 3],
    lists: &Handle,
    outputs: Outputs,
    scale: f64,
    tile: WarpgroupTile,
) {
    let tile = of_tensors(tile, [k, v]);
    let (log2_scale, _) = scales(scale, None);
    let rows = request.all_rows();
    for slice in Slice::whole(request.batch, request.kv_heads).cut(client) {
        // SAFETY: a cube reads its query's list, positions below the lengths in the strides, and writes the rows of its query; the buffers have the
        // lengths they say (see `buffer`).
        unsafe {
            forward_kernel::forward::launch_unchecked(
                client,
                slice.cubes(request.seq_q),
                CubeDim::new_1d(tile.units() as u32),
                tile.cols / 2,
                tile.cols / 4,
                WarpgroupTile::sums(tile.value_dim),
                input(q),
                input(k),
                input(v),
                buffer(lists, request.listed()),
                buffer(outputs.out, rows * request.value_dim / 8),
                buffer(outputs.lse, rows),
                strides(q),
                strides(k),
                strides(v),
                slice.args(),
                request.most as u32,
                log2_scale as f32,
                tile,
            );
        }
    }
}

/// Adds the gradient by queries of `[q, k, v, grad_out]`, of lists that the queries of `stats` walk.
pub fn queries(
    client: &Client,
    request: &ListedRequest,
    [q, k, v, grad_out]: [&TensorView; 4],
    (stats, lists): (&Handle, &Handle),
    gradient: &Handle,
    scale: f64,
    tile: WarpgroupTile,
) {
    let tile = of_tensors(tile, [k, v]);
    let (log2_scale, _) = scales(scale, None);
    let rows = request.all_rows();
    for slice in Slice::whole(request.batch, request.kv_heads).cut(client) {
        // SAFETY: as for the forward pass.
        unsafe {
            by_query::queries::launch_unchecked(
                client,
                slice.cubes(request.seq_q),
                CubeDim::new_1d(tile.units() as u32),
                tile.cols / 2,
                tile.cols / 4,
                WarpgroupTile::sums(tile.head_dim),
                input(q),
                input(k),
                input(v),
                input(grad_out),
                buffer(stats, rows * 2),
                buffer(lists, request.listed()),
                buffer(gradient, rows * request.head_dim / 8),
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
