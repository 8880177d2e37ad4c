//! Launches of attention over lists.

use crate::kernels::listed::lists::{LaunchedLists, ListedLists, for_lists};
use crate::kernels::listed::mainloops::{ByKeys, Mainloop, Mainloops};
use crate::kernels::listed::request::{ListedRequest, stats_of};
use crate::kernels::listed::spread_launch::Spread;
use crate::kernels::listed::tile::MainloopTile;
use crate::kernels::listed::views::{
    ListedGradients, check_inputs, far_rows, input, words, words_of,
};
use crate::kernels::listed::warpgroups::WarpgroupTile;
use crate::kernels::listed::{keys, mainloop, warpgroups};
use blocksparse_cubecl::call::{OutputGrads, Outputs, TensorView};
use blocksparse_cubecl::mma::tile::Tile;
use blocksparse_cubecl::prelude::*;
use blocksparse_cubecl::slices::Slice;
use blocksparse_cubecl::tensor::scales;

/// Attends to the listed keys and writes `out` and `lse`. With `carry` these hold attention to other keys, and the result covers both.
///
/// # Errors
/// [`KernelError`] if cp.async cannot read a tensor, or the scale is not positive. Nothing was launched then.
pub fn forward(
    client: &Client,
    mainloops: &Mainloops,
    inputs: [&TensorView; 3],
    lists: &Handle,
    outputs: Outputs,
    scale: f64,
    carry: bool,
) -> Result<(), KernelError> {
    check_inputs(&inputs, scale)?;
    let [q, k, v] = inputs;
    let pass = Pass {
        client,
        request: &mainloops.request,
        // The forward pass reads no gradient; q is a placeholder.
        inputs: [q, k, v, q],
        out: outputs.out,
        rows: outputs.lse,
        scale,
    };
    for_lists(client, mainloops, lists, false, |lists| {
        pass.launch(mainloops.forward, lists, carry);
        Ok(())
    })
}

/// Accumulates the gradients of a loss through the lists, which are of the plan's kind. `grads` are the loss's gradients with respect to the outputs, and
/// `outputs` those over all keys. q and `grads.out` are contiguous.
#[allow(clippy::too_many_arguments)]
pub fn backward(
    client: &Client,
    mainloops: &Mainloops,
    [q, k, v]: [&TensorView; 3],
    lists: ListedLists,
    outputs: Outputs,
    grads: OutputGrads,
    gradients: ListedGradients,
    scale: f64,
) -> Result<(), KernelError> {
    let request = &mainloops.request;
    let inputs = [q, k, v, grads.out];
    check_inputs(&inputs, scale)?;
    let stats = &stats_of(client, request, outputs, grads, scale)?;
    let pass = Pass {
        client,
        request,
        inputs,
        out: gradients.q,
        rows: stats,
        scale,
    };
    let spread = Spread {
        client,
        mainloops,
        inputs,
        stats,
        gradients,
        scale,
    };
    let room = match request.is_of_keys() {
        true => Some(spread.room()?),
        false => None,
    };
    for_lists(
        client,
        mainloops,
        lists.of_queries(),
        room.is_some(),
        |lists| {
            pass.launch(mainloops.queries, lists, true);
            match &room {
                Some(room) => spread.launch(room, lists),
                None => Ok(()),
            }
        },
    )?;
    if let (ByKeys::Blocks(tile), ListedLists::Blocks(lists)) = (mainloops.by_keys, lists) {
        let of_keys = [stats, lists.queries, lists.tile_blocks];
        by_blocks(client, request, inputs, of_keys, gradients, scale, tile);
    }
    Ok(())
}

/// A pass over queries with lists.
struct Pass<'a> {
    client: &'a Client,
    request: &'a ListedRequest,
    /// q, k, v and, for dQ, the gradient with respect to the output.
    inputs: [&'a TensorView; 4],
    /// The output, or dQ.
    out: &'a Handle,
    /// lse of each row, or for dQ lse and delta.
    rows: &'a Handle,
    scale: f64,
}

impl Pass<'_> {
    /// Attends to some lists. With `carry` it continues attention to other keys, or accumulates onto a gradient.
    fn launch(&self, mainloop: Mainloop, lists: &LaunchedLists, carry: bool) {
        let &Self {
            client,
            request,
            inputs: [q, k, v, grad_out],
            out,
            rows,
            scale,
        } = self;
        let far_rows = far_rows([k, v]);
        let (log2_scale, _) = scales(scale, None);
        let all_rows = request.all_rows();
        for slice in Slice::whole(request.batch, request.kv_heads).cut(client) {
            // Both kernels have the same arguments, except for those of lists.
            macro_rules! launch {
                ($kernel:path, $cubes:expr, $units:expr, [$($sizes:expr),*], $keys:expr, $out:expr, $lists:expr, $tile:expr) => {
                    // SAFETY: a cube reads its lists, positions below the lengths in the strides, and writes the rows of its queries; the buffers have the
                    // lengths that `buffer` gets.
                    unsafe {
                        $kernel(
                            client,
                            slice.cubes($cubes),
                            CubeDim::new_1d($units as u32),
                            $($sizes,)*
                            input(q),
                            input(k),
                            input(v),
                            input(grad_out),
                            $keys,
                            buffer(out, $out),
                            // One number per row, or two for dQ.
                            buffer(rows, all_rows * if $tile.backward { 2 } else { 1 }),
                            slice.args(),
                            $lists,
                            scale as f32,
                            log2_scale as f32,
                            (std::f64::consts::LOG2_E / log2_scale) as f32,
                            $tile,
                        )
                    }
                };
            }
            match mainloop {
                Mainloop::Warps(tile) => {
                    let inner = Tile {
                        carry,
                        far_rows,
                        ..tile.inner
                    };
                    let tile = MainloopTile { inner, ..tile };
                    launch!(
                        mainloop::mainloop::launch_unchecked,
                        request.seq_q,
                        inner.units(),
                        [],
                        buffer(lists.keys, lists.elements(request)),
                        words(all_rows * tile.out_dim()),
                        lists.most as u32,
                        tile
                    );
                }
                Mainloop::Warpgroups(tile) => {
                    let tile = WarpgroupTile {
                        // Gradients are always accumulated.
                        carry: carry && !tile.backward,
                        far_rows,
                        ..tile
                    };
                    launch!(
                        warpgroups::mainloop::mainloop::launch_unchecked,
                        lists.count,
                        tile.units(),
                        [
                            tile.cols / 2,
                            tile.cols / 4,
                            WarpgroupTile::sums(tile.out_dim())
                        ],
                        lists.tensors(request),
                        all_rows * tile.out_dim() / 8,
                        lists.args(),
                        tile
                    );
                }
            }
        }
    }
}

/// Computes the gradients with respect to keys and values of blocks, from queries at places in tiles of one block each, with their stats.
pub fn by_blocks(
    client: &Client,
    request: &ListedRequest,
    [q, k, v, grad_out]: [&TensorView; 4],
    [stats, queries, tile_blocks]: [&Handle; 3],
    gradients: ListedGradients,
    scale: f64,
    tile: Tile,
) {
    let tile = Tile {
        carry: true,
        far_rows: far_rows([k, v]),
        ..tile
    };
    let (log2_scale, _) = scales(scale, None);
    let places = request.batch * request.kv_heads * request.tiles;
    let shape = request.list_shape(&tile);
    let numbers = request.partial(&tile);
    let partial = client.empty(numbers * size_of::<f32>());
    let key_tiles = request.seq_kv.div_ceil(tile.rows());
    let [k_words, v_words] =
        [request.head_dim, request.value_dim].map(|width| words(request.all_keys() * width));
    for slice in Slice::whole(request.batch, request.kv_heads).cut(client) {
        // SAFETY: a cube of keys reads rows of the queries at its places, which are below their number, and accumulates onto its own keys.
        unsafe {
            keys::keys::launch_unchecked(
                client,
                slice.cubes(key_tiles * shape.parts),
                CubeDim::new_1d(tile.units() as u32),
                words_of(q),
                input(k),
                input(v),
                words_of(grad_out),
                buffer(stats, request.all_rows() * 2),
                slice.args(),
                request.seq_q as u32,
                keys::BlockListsLaunch::new(
                    buffer(queries, places * request.tile),
                    buffer(tile_blocks, places),
                    request.tiles as u32,
                ),
                keys::KeyGradsLaunch::new(
                    buffer(gradients.k, k_words),
                    buffer(gradients.v, v_words),
                    buffer(&partial, numbers),
                ),
                scale as f32,
                log2_scale as f32,
                shape,
                tile,
            );
            if shape.parts > 1 {
                keys::fold::launch_unchecked(
                    client,
                    slice.cubes(key_tiles),
                    CubeDim::new_1d(tile.units() as u32),
                    buffer(&partial, numbers),
                    buffer(tile_blocks, places),
                    buffer(gradients.k, k_words),
                    buffer(gradients.v, v_words),
                    slice.args(),
                    request.seq_kv as u32,
                    request.tiles as u32,
                    scale as f32,
                    shape,
                    tile,
                );
            }
        }
    }
}
