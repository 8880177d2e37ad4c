//! Launches over lists of queries.

use cubecl::ir::ElemType;
use cubecl::prelude::*;
use cubecl::server::Handle;

use super::plan::ListedPlan;
use super::tile::WalkTile;
use super::{fold, forward as forward_kernel, keys, queries};
use crate::kernels::args::{
    address_of, buffer, listing, load_width, optional, spread, strides_of, vectors_of,
};
use crate::kernels::call::{OutputGrads, TensorView};
use crate::kernels::error::KernelError;
use crate::kernels::mma::gather::StridesLaunch;
use crate::kernels::mma::tile::Tile;
use crate::kernels::simt::delta;
use crate::kernels::slices::Slice;
use crate::kernels::tensor::{check_rows, check_scale, is_u32, scales};

/// Elements of 16 bytes.
const PIECE: usize = 8;

/// Units of a cube that makes stats.
const STATS_UNITS: u32 = 64;

/// The lists of a call, i32.
#[derive(Clone, Copy, Debug)]
pub struct ListedLists<'a> {
    /// The blocks that a query sees, `[batch, kv_heads, seq_q, most]`, negative for none.
    pub blocks: &'a Handle,
    /// The query at each place, `[batch, kv_heads, tiles · tile]`, negative for none: those of a block are neighbours, from the first place of a tile on.
    pub queries: &'a Handle,
    /// The block of each tile, `[batch, kv_heads, tiles]`, rising; negative for none, and those last.
    pub tile_blocks: &'a Handle,
}

/// What the forward pass left, contiguous.
#[derive(Clone, Copy, Debug)]
pub struct ListedSaved<'a> {
    /// `[batch, heads, seq_q, value_dim]`
    pub out: &'a Handle,
    /// `[batch, heads, seq_q]`, f32.
    pub lse: &'a Handle,
}

/// Where gradients are added, contiguous.
#[derive(Clone, Copy, Debug)]
pub struct ListedGradients<'a> {
    /// `[batch, heads, seq_q, head_dim]`
    pub q: &'a Handle,
    /// `[batch, kv_heads, seq_kv, head_dim]`
    pub k: &'a Handle,
    /// `[batch, kv_heads, seq_kv, value_dim]`
    pub v: &'a Handle,
}

/// Words of so many halves.
fn words(elements: usize) -> usize {
    elements.div_ceil(2)
}

fn strides(tensor: &TensorView) -> StridesLaunch {
    let [batch, head, row] = [0, 1, 2].map(|dim| match tensor.shape[dim] {
        1 => 0,
        _ => (tensor.strides[dim] / PIECE) as u64,
    });
    StridesLaunch::new(batch, head, row, tensor.shape[2] as u32)
}

fn input(tensor: &TensorView) -> BufferArg {
    buffer(&tensor.handle, words(tensor.reach()))
}

/// Whether rows of keys or values are more than 4 GB apart.
fn far_rows(tensors: [&TensorView; 2]) -> bool {
    (tensors.iter()).any(|tensor| tensor.shape[2] > 1 && !is_u32(tensor.strides[2] * 2))
}

fn walk(tile: WalkTile, [k, v]: [&TensorView; 2], carry: bool) -> WalkTile {
    let inner = Tile {
        carry,
        far_rows: far_rows([k, v]),
        ..tile.inner
    };
    WalkTile { inner, ..tile }
}

/// A grid with a cube for each query of a list.
fn cubes(slice: &Slice, count: usize) -> CubeCount {
    slice.cubes(count)
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
    saved: ListedSaved,
    scale: f64,
    carry: bool,
) -> Result<(), KernelError> {
    let request = plan.request();
    for (name, tensor) in [("q", q), ("k", k), ("v", v)] {
        check_rows(name, tensor, PIECE)?;
    }
    check_scale(scale, None)?;
    let tile = walk(plan.forward, [k, v], carry);
    let (log2_scale, _) = scales(scale, None);
    let rows = request.all_rows();
    for slice in Slice::whole(request.batch, request.kv_heads).cut(client) {
        // SAFETY: a cube reads its query's list, positions below the lengths in the strides, and writes the rows of its query; the buffers have the
        // lengths they say (see `buffer`).
        unsafe {
            forward_kernel::forward::launch_unchecked(
                client,
                cubes(&slice, request.seq_q),
                CubeDim::new_1d(tile.inner.units() as u32),
                input(q),
                input(k),
                input(v),
                buffer(blocks, request.listed()),
                buffer(saved.out, words(rows * request.value_dim)),
                buffer(saved.lse, rows),
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

/// Adds the gradients by what the lists name: of a loss whose gradients by the outputs are `grads`, where `saved` are the outputs over all keys. q and
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
    saved: ListedSaved,
    grads: OutputGrads,
    gradients: ListedGradients,
    scale: f64,
) -> Result<(), KernelError> {
    let request = plan.request();
    for (name, tensor) in [("q", q), ("k", k), ("v", v), ("grad_out", grads.out)] {
        check_rows(name, tensor, PIECE)?;
    }
    check_scale(scale, None)?;
    let stats = stats(client, plan, saved, grads)?;
    let (log2_scale, _) = scales(scale, None);
    let rows = request.all_rows();
    let tile = walk(plan.queries, [k, v], true);
    let of_keys = Tile {
        carry: true,
        far_rows: far_rows([k, v]),
        ..plan.keys
    };
    let places = request.batch * request.kv_heads * request.tiles;
    let shape = request.list_shape(&of_keys);
    let numbers = request.partial(&of_keys);
    let partial = client.empty(numbers * size_of::<f32>());
    let key_tiles = request.seq_kv.div_ceil(of_keys.rows());
    let [k_words, v_words] =
        [request.head_dim, request.value_dim].map(|width| words(request.all_keys() * width));
    for slice in Slice::whole(request.batch, request.kv_heads).cut(client) {
        // SAFETY: as for the forward pass; a cube of keys reads rows of the queries that places name, which are below their number, and adds to its own keys.
        unsafe {
            queries::queries::launch_unchecked(
                client,
                cubes(&slice, request.seq_q),
                CubeDim::new_1d(tile.inner.units() as u32),
                input(q),
                input(k),
                input(v),
                input(grads.out),
                buffer(&stats, rows * 2),
                buffer(lists.blocks, request.listed()),
                buffer(gradients.q, words(rows * request.head_dim)),
                strides(q),
                strides(k),
                strides(v),
                strides(grads.out),
                slice.args(),
                request.most as u32,
                scale as f32,
                log2_scale as f32,
                tile,
            );
            keys::keys::launch_unchecked(
                client,
                cubes(&slice, key_tiles * shape.parts),
                CubeDim::new_1d(of_keys.units() as u32),
                input(q),
                input(k),
                input(v),
                input(grads.out),
                buffer(&stats, rows * 2),
                buffer(lists.queries, places * request.tile),
                buffer(lists.tile_blocks, places),
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
                    cubes(&slice, key_tiles),
                    CubeDim::new_1d(of_keys.units() as u32),
                    buffer(&partial, numbers),
                    buffer(lists.tile_blocks, places),
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

/// `lse · log2 e` and delta of each query: `[batch · heads, seq_q, 2]`, f32.
fn stats(
    client: &Client,
    plan: &ListedPlan,
    saved: ListedSaved,
    grads: OutputGrads,
) -> Result<Handle, KernelError> {
    let request = plan.request();
    let width = load_width(request.dtype, &[("grad_out", grads.out)])?;
    let rows = request.all_rows();
    let value_dim = request.value_dim;
    let made = client.empty(rows * 2 * size_of::<f32>());
    let lanes = delta::delta_lanes(client.properties(), value_dim / width);
    let units = rows as u64 * lanes as u64;
    let cubes = spread(client, units.div_ceil(u64::from(STATS_UNITS)))?;
    let largest = (rows * value_dim).max(grads.out.reach());
    let accumulator = ElemType::Float(cubecl::ir::FloatKind::F32);
    // SAFETY: a unit reads the row of a query and writes its two numbers; the buffers have the lengths they say (see `buffer`).
    unsafe {
        delta::delta::launch_unchecked(
            client,
            cubes,
            CubeDim::new_1d(STATS_UNITS),
            address_of(client, largest)?,
            width,
            buffer(saved.out, rows * value_dim / width),
            vectors_of(grads.out, width),
            buffer(saved.lse, rows),
            optional(grads.lse, rows),
            ComptimeOptionArgs::None,
            ComptimeOptionArgs::None,
            buffer(&made, rows * 2),
            strides_of(grads.out, width),
            listing(None),
            request.heads,
            rows,
            request.seq_q,
            rows * 2,
            0,
            InputScalar::new(std::f64::consts::LOG2_E, accumulator),
            value_dim,
            lanes,
            false,
            request.dtype,
            accumulator,
        );
    }
    Ok(made)
}
