//! Attention by blocks: which calls it serves, and its launches.

use crate::kernels::listed::launch::by_blocks;
use crate::kernels::listed::lists::PlacedLists;
use crate::kernels::listed::mainloops::{keys_line, keys_tile};
use crate::kernels::listed::merge;
use crate::kernels::listed::merge::MergeShape;
use crate::kernels::listed::request::{ListedRequest, check, stats_of};
use crate::kernels::listed::views::{ListedGradients, PIECE, check_inputs, far_rows, input};
use crate::kernels::listed::warpgroups::block;
use crate::kernels::listed::warpgroups::block::BlockTile;
use blocksparse_cubecl::call::{OutputGrads, Outputs, TensorView, check_hopper};
use blocksparse_cubecl::mma::tile::Tile;
use blocksparse_cubecl::prelude::*;
use blocksparse_cubecl::tensor::scales;
use blocksparse_cubecl::tuning::{TierLimit, Tuning};

/// Upper bound of the bytes of output parts in memory at a time; a single list may exceed it, up to `MOST`.
const AT_A_TIME: usize = 1 << 32;
const MOST: usize = 1 << 34;

/// Maximum number of tiles of a cube, which reads a block once for its consecutive tiles, and least number of cubes per multiprocessor, which keeps the tail of
/// a launch small.
const MOST_TILES: usize = 8;
const CUBES: usize = 16;

/// Number of units of a cube of the merge.
const UNITS: usize = 256;

/// A pass of a call by blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ByBlock {
    request: ListedRequest,
    tile: BlockTile,
    /// Tile of dK and dV in the backward pass.
    keys: Option<Tile>,
    /// Number of lists whose parts are in memory at a time.
    lists: usize,
    /// Number of tiles of a cube.
    run: usize,
}

impl ByBlock {
    /// Plans the forward or the backward pass of a call that [`Mainloops`](super::Mainloops) serve.
    ///
    /// # Errors
    /// The reason why the device's kernels do not serve it this way.
    pub fn new(
        properties: &DeviceProperties,
        request: ListedRequest,
        backward: bool,
    ) -> Result<Self, &'static str> {
        let element = check(properties, &request)?;
        if check_hopper(properties).is_err() || Tuning::or_reason()?.tier == TierLimit::Mma {
            return Err("blocks are attended to by themselves on wgmma alone");
        }
        if ![64, 128].contains(&request.block) {
            return Err("blocks are not of 64 or 128 keys");
        }
        let rows = request.rows();
        if 64 % rows != 0 || !(request.tile * rows).is_multiple_of(64) {
            return Err("the heads that share a list do not divide 64");
        }
        let is_wide = |dim: usize| dim.is_multiple_of(64);
        if !is_wide(request.head_dim) || !is_wide(request.value_dim) {
            return Err("head_dim or value_dim is no multiple of 64");
        }
        let tile = BlockTile {
            half: element.half(),
            head_dim: request.head_dim,
            value_dim: request.value_dim,
            heads: rows,
            block: request.block,
            tile: request.tile,
            backward,
            far_rows: false,
        };
        let hardware = &properties.hardware;
        if tile.shared_bytes() > hardware.max_shared_memory_size {
            return Err("no tile fits the shared memory of the device");
        }
        let all = request.batch * request.kv_heads;
        let of_list = request.tiles * request.tile * rows * tile.out_dim() * 2;
        if of_list > MOST {
            return Err("the parts of outputs take too much memory");
        }
        let lists = (AT_A_TIME / of_list.max(1)).clamp(1, all);
        let known = hardware.num_streaming_multiprocessors.unwrap_or(1) as usize;
        Ok(Self {
            request,
            tile,
            keys: backward.then(|| keys_tile(&request, element, hardware.max_shared_memory_size)),
            lists,
            run: (lists * request.tiles / (CUBES * known)).clamp(1, MOST_TILES),
        })
    }

    /// Returns the number of places of a list.
    fn places(&self) -> usize {
        self.request.tiles * self.request.tile
    }

    /// Returns the lines of the plan's text.
    pub(crate) fn lines(&self) -> Vec<String> {
        let (rows, what) = (self.request.rows(), self.request.listed_things());
        let name = if self.tile.backward { "dQ" } else { "forward" };
        let mut lines = vec![
            format!(
                "listed  {what} meet the {rows} rows of each query that lists them, in parts that are merged"
            ),
            format!(
                "  {name:8} 64 rows a step on wgmma, {} units, {} tiles of {} queries in {} KiB shared, parts of {} lists at a time",
                self.tile.units(),
                self.run,
                self.request.tile,
                self.tile.shared_bytes().div_ceil(1024),
                self.lists,
            ),
        ];
        lines.extend(self.keys.map(|keys| keys_line(&self.request, &keys)));
        lines
    }
}

/// Runs [`forward`](crate::kernels::listed::forward) by blocks.
pub fn forward_by_block(
    client: &Client,
    plan: &ByBlock,
    inputs: [&TensorView; 3],
    lists: PlacedLists,
    outputs: Outputs,
    scale: f64,
    carry: bool,
) -> Result<(), KernelError> {
    check_inputs(&inputs, scale)?;
    let [q, k, v] = inputs;
    // The forward pass reads no gradient; q is a placeholder.
    let to = [outputs.out, outputs.lse];
    launch(client, plan, [q, k, v, q], lists, to, scale, carry);
    Ok(())
}

/// Runs [`backward`](crate::kernels::listed::backward) by blocks.
#[allow(clippy::too_many_arguments)]
pub fn backward_by_block(
    client: &Client,
    plan: &ByBlock,
    [q, k, v]: [&TensorView; 3],
    lists: PlacedLists,
    outputs: Outputs,
    grads: OutputGrads,
    gradients: ListedGradients,
    scale: f64,
) -> Result<(), KernelError> {
    let inputs = [q, k, v, grads.out];
    check_inputs(&inputs, scale)?;
    let stats = stats_of(client, &plan.request, outputs, grads, scale)?;
    let to = [gradients.q, &stats];
    launch(client, plan, inputs, lists, to, scale, true);
    let of_keys = [&stats, lists.queries, lists.tile_blocks];
    let request = &plan.request;
    let keys = plan.keys.expect("the plan is of a backward pass");
    by_blocks(client, request, inputs, of_keys, gradients, scale, keys);
    Ok(())
}

/// Computes the parts of some lists at a time, and merges them into the output and its lse, or dQ. With `carry` they are added to the existing contents. For
/// dQ, `of_rows` holds lse and delta of each row.
fn launch(
    client: &Client,
    plan: &ByBlock,
    [q, k, v, grad_out]: [&TensorView; 4],
    lists: PlacedLists,
    [out, of_rows]: [&Handle; 2],
    scale: f64,
    carry: bool,
) {
    let request = &plan.request;
    let (log2_scale, _) = scales(scale, None);
    let tile = BlockTile {
        far_rows: far_rows([k, v]),
        ..plan.tile
    };
    let shape = MergeShape {
        half: tile.half,
        dim: tile.out_dim(),
        heads: tile.heads,
        carry,
        backward: tile.backward,
    };
    let all = request.batch * request.kv_heads;
    let (places, pieces) = (plan.places(), tile.out_dim() / PIECE);
    let rows = plan.lists * places * tile.heads;
    let parts = client.empty(rows * tile.out_dim() * 2);
    let out_rows = request.all_rows();
    // Per part, or per row.
    let (logs, log_count, row_count) = match tile.backward {
        true => (of_rows.clone(), 2 * out_rows, 2 * out_rows),
        false => (client.empty(rows * size_of::<f32>()), rows, out_rows),
    };
    for first in (0..all).step_by(plan.lists) {
        let count = plan.lists.min(all - first);
        let units = count * request.seq_q * tile.heads * pieces;
        // SAFETY: a cube reads the places of its tiles, rows of the queries there, which are below their number, and keys below the length in the strides; it
        // writes rows of its own places. A unit of an existing row reads parts at places of its query, and writes that row. The buffers have the lengths that
        // `buffer` gets.
        unsafe {
            block::by_block::launch_unchecked(
                client,
                CubeCount::Static(request.tiles.div_ceil(plan.run) as u32, count as u32, 1),
                CubeDim::new_1d(tile.units() as u32),
                tile.block / 2,
                tile.block / 4,
                tile.sums(),
                input(q),
                input(k),
                input(v),
                input(grad_out),
                buffer(lists.queries, all * places),
                buffer(lists.tile_blocks, all * request.tiles),
                buffer(&parts, rows * pieces),
                buffer(&logs, log_count),
                block::PlacesLaunch::new(
                    first as u32,
                    request.kv_heads as u32,
                    request.tiles as u32,
                    plan.run as u32,
                ),
                scale as f32,
                log2_scale as f32,
                tile,
            );
            merge::merge::launch_unchecked(
                client,
                CubeCount::Static(units.div_ceil(UNITS) as u32, 1, 1),
                CubeDim::new_1d(UNITS as u32),
                buffer(&parts, rows * pieces),
                buffer(&logs, log_count),
                buffer(lists.places, request.listed()),
                buffer(out, out_rows * pieces),
                buffer(of_rows, row_count),
                merge::RowsLaunch::new(
                    first as u32,
                    count as u32,
                    request.seq_q as u32,
                    request.most as u32,
                    places as u32,
                ),
                shape,
            );
        }
    }
}
