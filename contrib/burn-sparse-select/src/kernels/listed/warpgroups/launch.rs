//! Launches of walks on wgmma.

use cubecl::prelude::*;
use cubecl::server::Handle;

use crate::kernels::listed::request::ListedRequest;
use crate::kernels::listed::rows::ListsLaunch;
use crate::kernels::listed::views::{far_rows, input, strides};
use crate::kernels::listed::warpgroups::forward as forward_kernel;
use crate::kernels::listed::warpgroups::queries as by_query;
use crate::kernels::listed::warpgroups::tile::WarpgroupTile;
use blocksparse_cubecl::args::buffer;
use blocksparse_cubecl::call::{Outputs, TensorView};
use blocksparse_cubecl::on_device::BitsOfKeys;
use blocksparse_cubecl::slices::Slice;
use blocksparse_cubecl::tensor::scales;

/// The lists that a launch walks.
#[derive(Clone, Copy)]
pub struct WalkedLists<'a> {
    /// What they name, i32 `[batch, kv_heads, count, most]`,
    pub keys: &'a Handle,
    /// and which of the neighbouring queries that walk a list named it, u32 of the same shape. Where a list is of one query nothing reads it.
    pub masks: &'a Handle,
    /// How many of its numbers each list has, u32 `[batch, kv_heads, count]`, where lists are of neighbours.
    pub counts: &'a Handle,
    /// Which lists of neighbours have a key.
    pub bits: Option<&'a BitsOfKeys>,
    /// The first list's number among those of a head of keys.
    pub first: usize,
    /// How many of them a head of keys has.
    pub count: usize,
    /// Numbers of each.
    pub most: usize,
}

impl<'a> WalkedLists<'a> {
    /// A list of each query.
    pub fn of_queries(request: &ListedRequest, keys: &'a Handle) -> Self {
        Self {
            keys,
            masks: keys,
            counts: keys,
            bits: None,
            first: 0,
            count: request.seq_q,
            most: request.most,
        }
    }

    /// Lists of all heads.
    pub fn all(&self, request: &ListedRequest) -> usize {
        request.batch * request.kv_heads * self.count
    }

    /// Numbers of all of them.
    pub fn numbers(&self, request: &ListedRequest) -> usize {
        self.all(request) * self.most
    }

    fn args(&self) -> ListsLaunch {
        ListsLaunch::new(self.first as u32, self.count as u32, self.most as u32)
    }
}

fn of_tensors(tile: WarpgroupTile, [k, v]: [&TensorView; 2]) -> WarpgroupTile {
    WarpgroupTile {
        far_rows: far_rows([k, v]),
        ..tile
    }
}

/// Attention to what lists name into `out` and `lse`, of the queries that walk them; these hold attention to other keys where the tile carries it on.
pub fn forward(
    client: &Client,
    request: &ListedRequest,
    [q, k, v]: [&TensorView; 3],
    lists: &WalkedLists,
    outputs: Outputs,
    scale: f64,
    tile: WarpgroupTile,
) {
    let tile = of_tensors(tile, [k, v]);
    let (log2_scale, _) = scales(scale, None);
    let lse_scale = std::f64::consts::LOG2_E / log2_scale;
    let rows = request.all_rows();
    for slice in Slice::whole(request.batch, request.kv_heads).cut(client) {
        // SAFETY: a cube reads its list, positions below the lengths in the strides, and writes the rows of its queries; the buffers have the lengths
        // they say (see `buffer`).
        unsafe {
            forward_kernel::forward::launch_unchecked(
                client,
                slice.cubes(lists.count),
                CubeDim::new_1d(tile.units() as u32),
                tile.cols / 2,
                tile.cols / 4,
                WarpgroupTile::sums(tile.value_dim),
                input(q),
                input(k),
                input(v),
                buffer(lists.keys, lists.numbers(request)),
                buffer(lists.masks, lists.numbers(request)),
                buffer(lists.counts, lists.all(request)),
                buffer(outputs.out, rows * request.value_dim / 8),
                buffer(outputs.lse, rows),
                strides(q),
                strides(k),
                strides(v),
                slice.args(),
                lists.args(),
                log2_scale as f32,
                lse_scale as f32,
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
    (stats, lists): (&Handle, &WalkedLists),
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
                slice.cubes(lists.count),
                CubeDim::new_1d(tile.units() as u32),
                tile.cols / 2,
                tile.cols / 4,
                WarpgroupTile::sums(tile.head_dim),
                input(q),
                input(k),
                input(v),
                input(grad_out),
                buffer(stats, rows * 2),
                buffer(lists.keys, lists.numbers(request)),
                buffer(lists.masks, lists.numbers(request)),
                buffer(lists.counts, lists.all(request)),
                buffer(gradient, rows * request.head_dim / 8),
                strides(q),
                strides(k),
                strides(v),
                strides(grad_out),
                slice.args(),
                lists.args(),
                scale as f32,
                log2_scale as f32,
                tile,
            );
        }
    }
}
