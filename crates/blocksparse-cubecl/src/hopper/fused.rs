//! Launches of the fused backward pass: stats of each query, the loop over columns, and dQ from its sums.

use cubecl::prelude::*;
use cubecl::server::Handle;

use super::backward_loads::LengthsLaunch;
use super::launch::{UNITS, check, has_wide_bias, over, pair_args};
use super::maps::{stats_map, tensor_map};
use super::tiles::BackwardTile;
use super::{backward, backward_stats, shares};
use crate::args::{batch_words, buffer, listing, optional, plan_parts, plan_words};
use crate::call::Request;
use crate::device::plan;
use crate::error::KernelError;
use crate::limits::multiprocessors;
use crate::pass::{BackwardPass, Part};
use crate::shared::addressing::{MainloopOperandsLaunch, StridesLaunch};
use crate::tensor::factors;
use crate::uploaded::DevicePlan;
use blocksparse::BlockLayout;

/// Number of heads of keys that alternate in the grid if tiles may wait for each other for long.
pub(super) const SPREAD: u32 = 64;
/// Number of shares of heads that alternate in the grid if cubes share a tile. Then some eight tiles of each run at once, and find in the cache what
/// earlier ones read and added to.
pub(super) const SPREAD_SHARES: u32 = 16;

/// Returns the number of heads of keys that alternate in the grid if no cubes share a tile. Tiles of a head that run at once find the queries that they
/// read and the sums of dQ that they add to in the cache. But they wait for each other, mostly at their beginnings. If no tile is much shorter than those
/// before it, as many tiles that share queries run at once as were fastest on an H100: for 64 such tiles under a causal mask some 4 at width 64 and 16 at
/// width 128, for 32 in a document 4 at width 128. If there are few such tiles, none should wait.
fn spread(plan: &DevicePlan, dim: usize, multiprocessors: usize) -> u32 {
    if plan.between == 0 {
        return SPREAD;
    }
    let sharing = plan.tiles / plan.between;
    let side_by_side = match dim {
        128.. => (sharing / 6).clamp(2, 16),
        _ => (sharing / 16).clamp(2, 4),
    };
    multiprocessors.div_ceil(plan.between * side_by_side) as u32
}

/// Stats of each query, with `pitch` places per head.
#[derive(Clone)]
pub struct Stats {
    values: Handle,
    pitch: usize,
    /// Whether places are positions in order.
    in_order: bool,
}

/// Sizes of a pass over a part.
#[derive(Clone, Copy)]
pub struct Sizes {
    /// Places per head, a multiple of the group and of 16 queries, which must be within one head.
    pitch: usize,
    /// Places of all heads.
    rows: usize,
    /// Units that compute the stats of a query.
    lanes: usize,
    /// Elements of dK and dV.
    kv_elements: usize,
    /// Rows of keys over all heads and batch entries.
    kv_rows: usize,
    /// Elements of the sums of dK and dV, if cubes share a tile.
    kv_sums: usize,
}

/// Largest number of elements that the output's gradient may span: vectors of eight are counted in 32 bits.
pub const MOST_REACH: usize = u32::MAX as usize * 8;

impl Sizes {
    /// Returns the sizes over a layout, for a call with `seq_kv` keys and dV at element `v_offset`.
    pub fn new(
        tile: &BackwardTile,
        layout: &BlockLayout,
        request: &Request,
        seq_kv: usize,
        v_offset: usize,
    ) -> Self {
        let pitch = layout.seq_q().next_multiple_of(tile.group.max(16));
        let kv_rows = request.batch * request.kv_heads * seq_kv;
        Self {
            pitch,
            rows: request.batch * layout.heads() * pitch,
            lanes: tile.padded() / 8,
            kv_elements: kv_rows * tile.dim + v_offset,
            kv_rows,
            kv_sums: match tile.shares {
                1 => 0,
                shares => shares * 2 * kv_rows * tile.dim,
            },
        }
    }

    /// Returns the numbers that kernels count in 32 bits, with names. The mainloop adds to the sums of dQ by address, but
    /// [`finish`](super::backward_stats::finish) reads them as pairs by index.
    pub fn counts(&self, tile: &BackwardTile) -> [(&'static str, usize); 3] {
        [
            (
                "the elements of a gradient, in eights",
                self.kv_elements / 8,
            ),
            (
                "the pairs of sums of dQ",
                tile.sets() * self.rows * tile.padded() / 2,
            ),
            ("the sums of dK and dV, in fours", self.kv_sums / 4),
        ]
    }
}

/// Runs the backward pass over a part. `known` are the stats of an earlier part, if any.
///
/// # Errors
/// Those of `check`, and if a tensor is too large. In this case nothing has been launched.
pub fn launch_fused(
    pass: &BackwardPass,
    part: Part,
    mut tile: BackwardTile,
    known: Option<Stats>,
) -> Result<Stats, KernelError> {
    let client = pass.client;
    check(&pass.named(), part.residue, pass.options)?;
    tile.base.wide_bias = has_wide_bias(pass, part.residue);
    let seq_kv = pass.inputs[1].shape[2];
    let sizes = Sizes::new(
        &tile,
        part.layout,
        pass.request,
        seq_kv,
        pass.gradients.v_offset,
    );
    let device_plan = plan(client, part.layout, tile.tiling)?;
    tile.finishes &= device_plan.complete || tile.carry;
    let cubes = device_plan.tiles * pass.request.kv_heads * pass.request.batch * tile.shares;
    let eights = pass.grads.out.reach().div_ceil(8);
    for (what, count) in sizes.counts(&tile).into_iter().chain([
        ("the elements of grad_out, in eights", eights),
        ("the tiles of a backward pass, twice", cubes * 2),
    ]) {
        KernelError::check_u32(what, count)?;
    }
    let launch = Launch {
        pass,
        part,
        tile,
        sizes,
        counters: sizes.rows / tile.counted() * tile.parts() * tile.sets(),
    };
    let buffers = Buffers {
        counters: client.empty((launch.counters + 1) * 4),
        stats: client.empty(sizes.rows * 8),
        sums: client.empty(tile.sets() * sizes.rows * tile.padded() * 4),
        shares: (tile.shares > 1).then(|| client.empty(sizes.kv_sums * 4)),
    };
    match known.filter(|known| known.in_order) {
        Some(known) => launch.relist(&buffers, &known),
        None => launch.stats(&buffers),
    }
    launch.mainloop(&buffers, &device_plan, cubes);
    if !tile.finishes {
        launch.finish(&buffers);
    }
    if let Some(shares) = &buffers.shares {
        launch.fold(shares);
    }
    Ok(Stats {
        values: buffers.stats,
        pitch: sizes.pitch,
        in_order: part.residue.is_none(),
    })
}

/// Temporary buffers of a pass.
struct Buffers {
    /// Visits of each group of queries, followed by the counter of tickets.
    counters: Handle,
    /// lse and delta of the query at each place.
    stats: Handle,
    /// Sums of dQ.
    sums: Handle,
    /// Sums of dK and dV, if cubes share a tile.
    shares: Option<Handle>,
}

/// The launches of a pass.
struct Launch<'a> {
    pass: &'a BackwardPass<'a>,
    part: Part<'a>,
    tile: BackwardTile,
    sizes: Sizes,
    counters: usize,
}

impl Launch<'_> {
    fn heads(&self) -> usize {
        self.part.layout.heads()
    }

    fn counters(&self, buffers: &Buffers) -> BufferArg {
        buffer(&buffers.counters, self.counters + 1)
    }

    /// Copies the stats of an earlier part.
    fn relist(&self, buffers: &Buffers, known: &Stats) {
        let Sizes { rows, pitch, .. } = self.sizes;
        let of_all = self.pass.request.batch * self.heads() * known.pitch;
        // SAFETY: a unit reads the place of a position below `known.pitch`, and writes its own row and counters.
        unsafe {
            backward_stats::relist::launch_unchecked(
                self.pass.client,
                over(rows),
                CubeDim::new_1d(UNITS as u32),
                buffer(&known.values, of_all),
                buffer(&buffers.stats, rows),
                self.counters(buffers),
                listing(self.part.residue),
                rows as u32,
                pitch as u32,
                known.pitch as u32,
                self.pass.inputs[0].shape[2] as u32,
                self.tile,
            );
        }
    }

    /// Computes stats from out, its gradient and lse.
    fn stats(&self, buffers: &Buffers) {
        let Sizes {
            rows, pitch, lanes, ..
        } = self.sizes;
        let pass = self.pass;
        let grad_out = pass.grads.out;
        let [batch_stride, head_stride, row_stride, _] = grad_out.strides;
        let seq_q = pass.inputs[0].shape[2];
        let queries = pass.request.batch * self.heads() * seq_q;
        // SAFETY: a unit reads eight columns of an existing position, and writes its own row and counters.
        unsafe {
            backward_stats::stats::launch_unchecked(
                pass.client,
                over(rows * lanes),
                CubeDim::new_1d(UNITS as u32),
                buffer(pass.outputs.out, queries * self.tile.dim / 8),
                buffer(&grad_out.handle, grad_out.reach().div_ceil(8)),
                buffer(pass.outputs.lse, queries),
                optional(pass.grads.lse, queries),
                buffer(&buffers.stats, rows * 2),
                self.counters(buffers),
                StridesLaunch::new(batch_stride / 8, head_stride / 8, row_stride / 8, seq_q),
                listing(self.part.residue),
                self.heads() as u32,
                rows as u32,
                pitch as u32,
                lanes as u32,
                self.tile,
            );
        }
    }

    /// Computes dK, dV and the sums of dQ.
    fn mainloop(&self, buffers: &Buffers, device_plan: &DevicePlan, cubes: usize) {
        let (pass, part, tile, sizes) = (self.pass, self.part, self.tile, self.sizes);
        let request = pass.request;
        let [q, k, v] = pass.inputs;
        let (seq_q, seq_kv) = (q.shape[2], k.shape[2]);
        let (heads, residue) = (self.heads(), part.residue);
        let multiprocessors = multiprocessors(pass.client.properties());
        let grid = match tile.persistent {
            // All cubes must run at once, because a tile may wait for one of another cube.
            true => cubes.min(multiprocessors),
            false => cubes,
        };
        let map = |tensor, rows| tensor_map(tensor, rows, residue, request.dtype);
        let stats_rows = request.batch * heads;
        let heads_per_kv = heads / request.kv_heads;
        let (spread, out) = match &buffers.shares {
            Some(sums) => (SPREAD_SHARES, buffer(sums, sizes.kv_sums / 4)),
            None => {
                let spread = spread(device_plan, tile.dim, multiprocessors);
                (spread, buffer(&pass.gradients.kv, sizes.kv_elements / 8))
            }
        };
        let lengths = LengthsLaunch::new(
            device_plan.tiles as u32,
            spread,
            request.kv_heads as u32,
            heads_per_kv as u32,
            (heads_per_kv / tile.shares) as u32,
            request.batch as u32,
            seq_kv as u32,
            seq_q as u32,
            sizes.pitch as u32,
            (pass.gradients.v_offset / 8) as u32,
            self.counters as u32,
            device_plan.apart as u32,
            sizes.rows as u32,
        );
        // SAFETY: a cube reads the entries that the plan lists for its tile. TMA reads nothing beyond its maps, and adds to sums of places below `pitch` of
        // a head. Rows beyond the keys are not written. The buffers have the stated lengths (see `buffer`).
        unsafe {
            backward::backward::launch_unchecked(
                pass.client,
                CubeCount::Static(grid as u32, 1, 1),
                CubeDim::new_1d(tile.units() as u32),
                tile.cols / 2,
                tile.cols / 4,
                tile.sums(),
                tile.dq_cols() / 2,
                MainloopOperandsLaunch::new(
                    map(k, tile.a_group()),
                    map(v, tile.a_group()),
                    map(q, tile.group),
                    map(pass.grads.out, tile.group),
                ),
                stats_map(&buffers.stats, tile.group, stats_rows, sizes.pitch),
                buffer(&buffers.sums, tile.sets() * sizes.rows * tile.padded()),
                self.counters(buffers),
                out,
                buffer(&pass.gradients.q, stats_rows * seq_q * tile.dim / 8),
                plan_parts(&device_plan.sections, batch_words(part.layout)),
                plan_words(device_plan, residue),
                pair_args(pass),
                lengths,
                pass.options.scalars(factors(pass.options)),
                tile,
            );
        }
    }

    /// Computes dQ from its sums.
    fn finish(&self, buffers: &Buffers) {
        let Sizes { rows, pitch, .. } = self.sizes;
        let (pass, tile) = (self.pass, self.tile);
        let seq_q = pass.inputs[0].shape[2];
        let queries = pass.request.batch * self.heads() * seq_q;
        // SAFETY: a unit reads the sums of its place, below `rows`, and writes eight columns of an existing position.
        unsafe {
            backward_stats::finish::launch_unchecked(
                pass.client,
                over(rows * tile.dim / 8),
                CubeDim::new_1d(UNITS as u32),
                buffer(&buffers.sums, tile.sets() * rows * tile.padded() / 2),
                self.counters(buffers),
                buffer(&pass.gradients.q, queries * tile.dim / 8),
                listing(self.part.residue),
                rows as u32,
                pitch as u32,
                seq_q as u32,
                pass.options.scale as f32,
                tile,
            );
        }
    }

    /// Computes dK and dV from the sums of the cubes that share a tile.
    fn fold(&self, sums: &Handle) {
        let (pass, tile, sizes) = (self.pass, self.tile, self.sizes);
        // SAFETY: a unit reads the sums of eight columns of a row of dK or dV, which have `kv_rows` rows each, and writes them.
        unsafe {
            shares::fold::launch_unchecked(
                pass.client,
                over(2 * sizes.kv_rows * tile.dim / 8),
                CubeDim::new_1d(UNITS as u32),
                buffer(sums, sizes.kv_sums / 4),
                buffer(&pass.gradients.kv, sizes.kv_elements / 8),
                sizes.kv_rows as u32,
                (pass.gradients.v_offset / 8) as u32,
                tile,
            );
        }
    }
}
