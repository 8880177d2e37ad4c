//! The choice of a tile.

use cubecl::ir::features::Tma;

use super::balance::{faster_mainloops, long_tiles, shares};
use super::base::{Base, GROUP_ROWS};
use super::bias_launch::BiasTiles;
use super::coarse::Coarse;
use super::fused::Sizes;
use super::long_tiles::MainloopPlan;
use super::pair_tile::PairTile;
use super::shapes::{CANDIDATES, Candidate, candidates};
use super::tiles::{BackwardTile, MainloopTile, Tile};
use crate::arch::sm90::FP8_COLUMNS;
use crate::call::{PartRequest, Request, ScoreKind, check_hopper};
use crate::limits::multiprocessors;
use crate::tensor::{TOO_LARGE, cheapest, check_limit, check_options, half_of, is_u32};
use crate::tuning::{TierLimit, Tuning};
use blocksparse::plan::{Grouping, Mainloop, NarrowCosts, has_long_tiles};
use blocksparse::{BlockLayout, BlockSource, DeviceChoice, Residue};

/// Mean number of steps per tile below which a mainloop of the fused backward pass is short: then the prologue and epilogue of a tile take much of its time.
const SHORT_MAINLOOP: f64 = 12.0;

/// Least width. Rows are padded with zeros to multiples of 64 columns, and narrower rows would have more padding than elements.
const LEAST: usize = 40;

/// Upper bounds of classes of widths. Tiles of a class have the same shapes.
const WIDTHS: [usize; 4] = [64, 96, 128, 256];

/// Returns the upper bound in [`WIDTHS`] of a supported width.
fn class_of(dim: usize) -> Option<usize> {
    let known = dim >= LEAST && dim.is_multiple_of(8);
    WIDTHS.into_iter().find(|&width| known && dim <= width)
}

/// Checks that the device supports the tier, and that the call's limit allows it.
fn check_tier(part: &PartRequest) -> Result<(), &'static str> {
    let properties = part.properties;
    check_hopper(properties)?;
    if !properties.features.tma.contains(Tma::Base) {
        return Err("the device has no TMA");
    }
    check_limit(part)?;
    match part.limit {
        TierLimit::Mma => Err("BLOCKSPARSE_TIER says mma"),
        _ => Ok(()),
    }
}

/// Returns the fastest tile by estimate.
///
/// # Errors
/// Why the tier refuses the part: the device, the type, the head_dim, or an option it does not support.
pub fn choose(part: &PartRequest) -> Result<Tile, &'static str> {
    let (layout, request) = (part.layout, part.request);
    check_tier(part)?;
    let half = half_of(request.dtype)?;
    check_options(request)?;
    if let Some(Residue { stride, .. }) = part.residue
        && !part.seq_kv.is_multiple_of(stride)
    {
        return Err("the sequence is no multiple of the pattern's stride");
    }
    let (dim, value_dim) = (request.head_dim, request.value_dim);
    let Some(class) = class_of(dim) else {
        return Err("head_dim is no multiple of 8 from 40 to 256");
    };
    if value_dim > dim {
        return Err("values are wider than keys");
    }
    if class_of(value_dim).is_none() {
        return Err("value_dim is no multiple of 8 from 40 to 256");
    }
    let rows = request.batch * layout.heads() * layout.seq_q();
    if !is_u32(rows * request.value_dim / 8) {
        return Err(TOO_LARGE);
    }
    let most = part.properties.hardware.max_shared_memory_size;
    let uneven = is_uneven(layout);
    let tiles = candidates(class, value_dim).filter_map(|shape| {
        let base = Base::new(part, (half, dim), Mainloop::Rows, shape.sizes);
        let rows = base.rows();
        let may_cluster = request.may_cluster(layout, Mainloop::Rows);
        let grouping = Grouping::best(layout, Mainloop::Rows, [rows, base.cols], may_cluster);
        let tile = Tile {
            base: base.clustered(grouping.clustered),
            fp8: false,
            value_dim,
            overlap: shape.overlap && !request.score.threshold,
            max_scores: request.max_scores,
            heads_in_turn: heads_in_turn(part),
        };
        let cost = grouping.overhead * of_rows(part, rows, uneven) / shape.speed(request);
        let fits = tile.fits(layout.block_size()) && tile.shared_bytes() <= most;
        fits.then_some((cost, tile))
    });
    let (_, tile) = cheapest(tiles).ok_or(NO_TILE)?;
    Ok(coarse_tile(part, tile, class, uneven).unwrap_or(tile))
}

/// Like [`choose`], with products in E4M3.
///
/// # Errors
/// Why the tier, or FP8, is refused.
pub fn choose_fp8(part: &PartRequest) -> Result<Tile, &'static str> {
    let plain = choose(part)?;
    let (dim, value_dim) = (plain.dim, plain.value_dim);
    if plain.score != ScoreKind::default() {
        return Err("scores are more than products, or weights are dropped");
    }
    if plain.max_scores {
        return Err("each row's largest score is asked for");
    }
    if part.residue.is_some() {
        return Err("positions are listed by residue class");
    }
    if dim > 128 || !dim.is_multiple_of(16) || !value_dim.is_multiple_of(16) {
        return Err("a width is no multiple of 16 from 48 to 128");
    }
    // A multiprocessor runs three cubes of one warpgroup, whose products and exponentials overlap. For narrow heads there are registers for overlapping
    // steps too.
    let tile = Tile {
        base: Base::new(part, (plain.half, dim / 2), Mainloop::Rows, [1, 128, 2, 1]),
        fp8: true,
        overlap: value_dim <= 64,
        ..plain
    };
    match tile.group >= FP8_COLUMNS && tile.fits(part.layout.block_size()) {
        true => Ok(tile),
        false => Err("blocks are narrower than 64"),
    }
}

/// Bytes of keys and values of all heads that stay in the L2 cache.
const L2_BYTES: usize = 16 << 20;

/// Limit of the second dimension of a grid, which has the tiles of 64 rows if heads alternate.
const MOST_TILES: usize = 65_535;

/// Whether heads should alternate: the keys and values of a batch entry's heads fit the L2 cache, and the tiles of a head fit the grid.
fn heads_in_turn(part: &PartRequest) -> bool {
    let (request, layout) = (part.request, part.layout);
    let row_bytes = (request.head_dim + request.value_dim) * 2;
    request.kv_heads * layout.seq_kv() * row_bytes <= L2_BYTES
        && layout.seq_q().div_ceil(GROUP_ROWS) <= MOST_TILES
}

/// Returns the factor of wasted time of tiles with `rows` rows: rows beyond the queries, and idle multiprocessors if there are fewer cubes.
fn of_rows(part: &PartRequest, rows: usize, uneven: bool) -> f64 {
    let seq_q = part.layout.seq_q();
    let waste = seq_q.next_multiple_of(rows) as f64 / seq_q as f64;
    let cubes = seq_q.div_ceil(rows) * part.layout.heads() * part.request.batch;
    let few = multiprocessors(part.properties) as f64 / cubes as f64;
    let idle = if uneven { UNEVEN * few } else { 0.0 };
    waste * few.max(1.0) * (1.0 + idle)
}

/// Fraction of a multiprocessor's time that is lost if it has one cube and rows are uneven. For a causal pattern with 8 heads of width 64, tiles of 64 rows
/// take 0.057 ms at 4,096 positions and those of 128 rows 0.065 ms, and 0.170 and 0.163 ms at 8,192; at width 128, 0.085 and 0.072 ms at 4,096.
const UNEVEN: f64 = 0.7;

/// Whether a row of blocks is much longer than the mean, as in causal patterns.
fn is_uneven(layout: &BlockLayout) -> bool {
    let offsets = layout.row_offsets(0);
    let longest = offsets.windows(2).map(|row| row[1] - row[0]).max();
    let all = offsets.last().copied().unwrap_or(0);
    2 * longest.unwrap_or(0) * (offsets.len() - 1) > 3 * all
}

/// Returns the tile with coarse entries of the same width, if it should be faster than `gathered`.
fn coarse_tile(part: &PartRequest, gathered: Tile, class: usize, uneven: bool) -> Option<Tile> {
    let coarse = Coarse::of(part, class)?;
    let speed_of = |tile: &Tile| {
        let same = |shape: &&Candidate| {
            shape.dim == class && shape.sizes[..2] == [tile.warpgroups, tile.cols]
        };
        let same = CANDIDATES.iter().find(same);
        same.map_or(1.0, |shape| shape.speed(part.request))
    };
    let tiles = CANDIDATES.iter().filter(|shape| shape.dim == class);
    let tiles = tiles.filter_map(|shape| {
        let base = Base::new(
            part,
            (gathered.half, gathered.dim),
            Mainloop::Rows,
            shape.sizes,
        );
        let tile = Tile {
            base: base.coarse(part.layout.block_size()),
            overlap: shape.overlap && !part.request.score.threshold,
            ..gathered
        };
        let cost = FORWARD.of_coarse(part.layout, tile.tiling)?;
        let most = part.properties.hardware.max_shared_memory_size;
        let fits = tile.fits(part.layout.block_size()) && tile.shared_bytes() <= most;
        let speed = shape.speed(part.request);
        fits.then(|| (cost * of_rows(part, tile.rows(), uneven) / speed, tile))
    });
    let (cost, tile) = cheapest(tiles)?;
    let before = FORWARD.of_gathered(part.layout, gathered.tiling);
    let before = before * of_rows(part, gathered.rows(), uneven) / speed_of(&gathered);
    coarse.takes(cost, before).then_some(tile)
}

/// Costs of the forward pass, measured with 8 heads of width 128 and 16,384 positions: dense attention in blocks of 16 and 32 against blocks of 128, and
/// random blocks such that each tile attends to nearly all. The cost of the bits is a guess.
const FORWARD: NarrowCosts = NarrowCosts {
    gathered: 1.17,
    masked: [0.35, 0.22],
    coarse: 1.05,
};

/// Costs of the fused backward pass, measured likewise.
const BACKWARD: NarrowCosts = NarrowCosts {
    gathered: 1.1,
    masked: [0.19, 0.15],
    coarse: 1.02,
};

const NO_TILE: &str = "no tile fits the shared memory of the device";

/// Kernels of the backward pass.
#[derive(Clone, Copy, Debug)]
pub enum Backward {
    /// One loop over columns, with five products per pair.
    Fused(BackwardTile),
    /// A loop over rows for dQ and one over columns for dK and dV, with seven products per pair. Used if tiles would wait for each other.
    Unfused([MainloopPlan; 2]),
}

/// Like [`choose`], for the backward pass of a part whose forward pass is on this tier.
///
/// # Errors
/// Why the tier refuses it.
pub fn choose_backward(part: &PartRequest, forward: Tile) -> Result<Backward, &'static str> {
    let layout = part.layout;
    if part.limit == TierLimit::HopperForward {
        return Err("BLOCKSPARSE_TIER says hopper-forward");
    }
    // Visits are counted on the host. If a device chooses only pairs, the host still knows the blocks. Tiles of gathered rows attend to few others, and
    // would wait for those.
    let lists = |choice: &&DeviceChoice| matches!(choice.by, BlockSource::Keys { .. });
    let places = (layout.device_choice().filter(lists))
        .and_then(|_| layout.places())
        .filter(|places| places.block_size() > 32);
    let chosen = layout.device_choice().is_some() && places.is_none();
    if chosen || part.limit == TierLimit::HopperUnfused {
        return mainloops(part, &forward);
    }
    let known = PartRequest {
        layout: places.unwrap_or(layout),
        ..*part
    };
    // The fused pass needs values as wide as keys.
    if forward.dim > 128 || forward.dim != forward.value_dim {
        return mainloops(part, &forward);
    }
    // A tile of blocks with different patterns computes pairs that some of them mask, where two mainloops may have tiles of half the height. Also,
    // neighbouring tiles that attend to different queries get out of step and wait for each other at the sums of dQ. Residue classes share no queries.
    let may_cluster = part.request.may_cluster(layout, Mainloop::Columns);
    let [small, grouping, large] = [1, 2, 4].map(|groups| {
        let shape = [GROUP_ROWS * groups, 64];
        Grouping::best(layout, Mainloop::Columns, shape, may_cluster)
    });
    // Speed of the fused pass relative to two mainloops that compute the same pairs.
    let gain = if forward.dim <= 64 { 1.5 } else { 1.3 };
    let unlike =
        grouping.overhead > gain * small.overhead || large.overhead > 1.7 * grouping.overhead;
    let may_part = !forward.residue && check_mainloops(part, &forward).is_ok();
    if unlike && may_part {
        return mainloops(part, &forward);
    }
    let tile = fused(&known, &forward, grouping)?;
    if may_part {
        let mainloops = || mainloop_plans(part, &forward);
        if let Some(mainloops) = faster_mainloops(&known, &tile, gain, mainloops) {
            return Ok(Backward::Unfused(mainloops));
        }
    }
    // Without the gap that a buffer may have between dK and dV.
    let keys = part.request.batch * part.request.kv_heads * part.seq_kv;
    let sizes = Sizes::new(&tile, layout, part.request, part.seq_kv, keys * tile.dim);
    match sizes.counts(&tile).iter().all(|&(_, count)| is_u32(count)) {
        true => Ok(Backward::Fused(tile)),
        // Two mainloops write gradients directly, without such sums.
        false => mainloops(part, &forward).map_err(|_| TOO_LARGE),
    }
}

/// Returns the tile of the fused pass.
fn fused(
    part: &PartRequest,
    forward: &Tile,
    grouping: Grouping,
) -> Result<BackwardTile, &'static str> {
    let (cols, stages) = match forward.dim {
        ..=64 => (128, 2),
        _ => (64, 3),
    };
    let sizes = [2, cols, stages, stages - 1];
    let mut base = Base::new(part, (forward.half, forward.dim), Mainloop::Columns, sizes);
    base.tiling.visits = true;
    let steps = steps_of_tile(part.layout, part.request, cols);
    let short = steps * grouping.overhead < SHORT_MAINLOOP;
    // A persistent cube has a few registers less, and dropout needs many: 300 bytes are spilled instead of 24, and preloading the next tile's keys does not
    // pay for that (local pattern: 0.43 ms instead of 0.38).
    let spills = forward.score.dropout;
    let tile = BackwardTile {
        base: base.clustered(grouping.clustered),
        persistent: short && !spills,
        finishes: false,
        shares: 1,
        unfenced: Tuning::or_reason()?.unfenced,
    };
    // The keys and values of two tiles fit at the least width only.
    let single = BackwardTile {
        persistent: false,
        ..tile
    };
    let most = part.properties.hardware.max_shared_memory_size;
    let fits = |tile: &BackwardTile| tile.shared_bytes() <= most;
    let tile = [tile, single].into_iter().find(fits).ok_or(NO_TILE)?;
    let mut tile = coarse_backward(part, tile).unwrap_or(tile);
    let of_head = steps / (part.layout.heads() / part.request.kv_heads) as f64;
    let apart =
        part.limit != TierLimit::HopperAlone && has_long_tiles(part.layout, tile.tiling, of_head);
    tile.base.tiling.apart = apart;
    // A cube that starts a long tile would have drawn the next ones already, and their neighbours would wait for these.
    tile.persistent &= !apart;
    Ok(BackwardTile {
        finishes: tile.may_finish() && (short || tile.dim > 64),
        shares: shares(part, &tile),
        ..tile
    })
}

/// Returns the tile with coarse entries, if it should be faster than `gathered`.
fn coarse_backward(part: &PartRequest, gathered: BackwardTile) -> Option<BackwardTile> {
    let coarse = Coarse::of(part, gathered.dim)?;
    let tile = BackwardTile {
        base: gathered.base.coarse(part.layout.block_size()),
        persistent: false,
        ..gathered
    };
    let cost = BACKWARD.of_coarse(part.layout, tile.tiling)?;
    let before = BACKWARD.of_gathered(part.layout, gathered.tiling);
    let most = part.properties.hardware.max_shared_memory_size;
    (tile.shared_bytes() <= most && coarse.takes(cost, before)).then_some(tile)
}

/// Returns the mean number of steps of `cols` queries per tile of 128 keys if no pair were computed needlessly.
fn steps_of_tile(layout: &BlockLayout, request: &Request, cols: usize) -> f64 {
    let heads_per_kv = layout.heads() / request.kv_heads;
    let blocks: usize = (0..layout.num_patterns())
        .map(|pattern| layout.pattern_blocks(pattern))
        .sum();
    let pairs = (blocks * heads_per_kv) as f64 * (layout.block_size() as f64).powi(2);
    pairs / (layout.num_patterns() * layout.seq_kv().max(1) * cols) as f64
}

/// Checks that two mainloops can compute the gradients.
fn check_mainloops(part: &PartRequest, forward: &Tile) -> Result<(), &'static str> {
    if part.layout.block_size() < 16 {
        // TMA writes to multiples of 128 bytes of shared memory, and the lse and delta of 8 queries are 64 bytes.
        return Err("blocks are narrower than 16");
    }
    let request = part.request;
    let queries = part.layout.heads() * part.layout.seq_q();
    let keys = request.kv_heads * part.seq_kv * 2;
    match is_u32(request.batch * queries.max(keys) * forward.dim / 8) {
        true => Ok(()),
        false => Err(TOO_LARGE),
    }
}

/// Returns two mainloops, if they are possible.
fn mainloops(part: &PartRequest, forward: &Tile) -> Result<Backward, &'static str> {
    check_mainloops(part, forward)?;
    Ok(Backward::Unfused(mainloop_plans(part, forward)))
}

/// Returns the tiles of both mainloops, and which of them are shared by several cubes.
fn mainloop_plans(part: &PartRequest, forward: &Tile) -> [MainloopPlan; 2] {
    let plan = |mainloop| {
        let tile = match forward.dim {
            ..=128 => choose_mainloop(part, forward, mainloop),
            _ => choose_wide_mainloop(part, forward, mainloop),
        };
        let long = long_tiles(part, &tile);
        MainloopPlan { tile, long }
    };
    [Mainloop::Rows, Mainloop::Columns].map(plan)
}

/// Returns the tile of a mainloop.
fn choose_mainloop(part: &PartRequest, forward: &Tile, mainloop: Mainloop) -> MainloopTile {
    let layout = part.layout;
    let may_cluster = part.request.may_cluster(layout, mainloop);
    let tiles = [2, 1].map(|warpgroups| {
        let grouping = Grouping::best(layout, mainloop, [GROUP_ROWS * warpgroups, 64], may_cluster);
        // Two warpgroups share the gathered rows. With one, a tile joins fewer rows of blocks.
        let speed = if warpgroups == 2 { 1.0 } else { 0.8 };
        // With one warpgroup, a second cube fits if its buffers do.
        let stages = match (forward.dim, warpgroups) {
            (..=64, _) => 4,
            (_, 1) => 2,
            _ => 3,
        };
        let sizes = [warpgroups, 64, stages, stages.min(3) - 1];
        let base = Base::new(part, (forward.half, forward.dim), mainloop, sizes);
        let tile = MainloopTile {
            base: base.clustered(grouping.clustered),
            value_dim: forward.value_dim,
            shared: false,
            bias_sums: false,
            long_tiles: false,
        };
        (grouping.overhead / speed, tile)
    });
    let [(cost, tile), (other, small)] = tiles;
    if cost <= other { tile } else { small }
}

/// Returns the tile of a mainloop of heads wider than 128. Own rows take half of the shared memory. Dropout bits are computed for 64 columns at a time.
fn choose_wide_mainloop(part: &PartRequest, forward: &Tile, mainloop: Mainloop) -> MainloopTile {
    let layout = part.layout;
    let (warpgroups, cols, stages) = match mainloop {
        Mainloop::Columns => (2, 64, 2),
        Mainloop::Rows if forward.score.dropout => (1, 64, 2),
        Mainloop::Rows => (2, 32, 3),
    };
    let shared = mainloop == Mainloop::Columns;
    let sizes = [warpgroups, cols, stages, stages - 1];
    let mut base = Base::new(part, (forward.half, forward.dim), mainloop, sizes);
    if shared {
        base.tiling.rows = GROUP_ROWS;
    }
    let may_cluster = part.request.may_cluster(layout, mainloop);
    let grouping = Grouping::best(layout, mainloop, [base.rows(), cols], may_cluster);
    MainloopTile {
        base: base.clustered(grouping.clustered),
        value_dim: forward.value_dim,
        shared,
        bias_sums: false,
        long_tiles: false,
    }
}

/// Shapes of a tile of pairs: warpgroups, columns and relative speed. The speed follows the bytes that a tile reads from the L2 cache per pair.
const PAIRS: [(usize, usize, f64); 3] = [(2, 128, 1.0), (2, 64, 0.7), (1, 64, 0.55)];

/// Like [`choose`], for the gradient of a bias tensor of a part whose forward pass is on this tier.
///
/// # Errors
/// Why the tier refuses it.
pub fn choose_bias(part: &PartRequest, forward: Tile) -> Result<BiasTiles, &'static str> {
    match part.limit {
        TierLimit::HopperForward => return Err("BLOCKSPARSE_TIER says hopper-forward"),
        TierLimit::MmaBias => return Err("BLOCKSPARSE_TIER says mma-bias"),
        _ => {}
    }
    // A launch has a cube per step, so the host must know their number.
    if part.layout.device_choice().is_some() {
        return Err("the blocks are chosen on the device");
    }
    if forward.dim != forward.value_dim {
        return Err("head_dim and value_dim differ");
    }
    if forward.dim > 128 {
        return Err("head_dim is above 128");
    }
    let keys = check_mainloops(part, &forward).map(|()| {
        let mut tile = choose_mainloop(part, &forward, Mainloop::Columns);
        tile.bias_sums = true;
        tile.base.carry = false;
        tile
    });
    Ok(BiasTiles {
        pairs: choose_pairs(part, &forward)?,
        keys,
    })
}

/// Returns the fastest tile of pairs by estimate.
fn choose_pairs(part: &PartRequest, forward: &Tile) -> Result<PairTile, &'static str> {
    let (layout, request) = (part.layout, part.request);
    let most = part.properties.hardware.max_shared_memory_size;
    let may_cluster = request.may_cluster(layout, Mainloop::Rows);
    let tiles = PAIRS.into_iter().filter_map(|(warpgroups, cols, speed)| {
        let sizes = [warpgroups, cols, 0, 1];
        let mut tile = PairTile {
            base: Base::new(part, (forward.half, forward.dim), Mainloop::Rows, sizes),
            several: false,
            wide: false,
        };
        if !tile.fits(layout.block_size()) {
            return None;
        }
        let shape = [tile.rows(), cols];
        let grouping = Grouping::best(layout, Mainloop::Rows, shape, may_cluster);
        // With tiles of 64 columns, registers suffice for two cubes on a multiprocessor.
        let half = (most + 1024) / 2 - 1024;
        let rooms = if cols == 64 {
            vec![half, most]
        } else {
            vec![most]
        };
        let stages_in = |room: usize| {
            let free = room.saturating_sub(tile.shared_bytes());
            (free / tile.stage_bytes()).min(6)
        };
        let stages = (rooms.into_iter().map(stages_in)).find(|&stages| stages >= 3)?;
        tile.base = tile.base.clustered(grouping.clustered);
        tile.base.stages = stages;
        tile.base.lag = if stages > 4 { 2 } else { 1 };
        Some((grouping.overhead / speed, tile))
    });
    cheapest(tiles).map(|(_, tile)| tile).ok_or(NO_TILE)
}
