//! What a call over lists of queries runs, or why it does not.

use std::fmt;

use cubecl::prelude::*;

use crate::kernels::listed::check::check;
use crate::kernels::listed::costs::ByKeys;
use crate::kernels::listed::neighbour_plan::NeighbourPlan;
use crate::kernels::listed::request::ListedRequest;
use crate::kernels::listed::spread::{KEYS, SpreadTile};
use crate::kernels::listed::tile::{RESERVED, WalkTile};
use crate::kernels::listed::warpgroups::Warpgroups;
use crate::kernels::listed::{costs, warpgroups};
use blocksparse_cubecl::arch::sm80::Element;
use blocksparse_cubecl::call::ScoreKind;
use blocksparse_cubecl::device_key::{DeviceKey, device_key};
use blocksparse_cubecl::known::Recent;
use blocksparse_cubecl::mma::tile::{Outputs, Tile};
use blocksparse_cubecl::tensor::{TOO_LARGE, is_u32};
use blocksparse_cubecl::tuning::{ListedWay, Tuning};

/// Rows of a matrix of mma.sync.
const ROWS: usize = 16;

/// What a call runs. It prints.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ListedPlan {
    pub(crate) request: ListedRequest,
    pub(crate) forward: WalkTile,
    pub(crate) queries: WalkTile,
    pub(crate) keys: Tile,
    /// What makes the gradients by keys and values query by query, in place of that.
    pub(crate) spread: Option<SpreadTile>,
    /// What is on wgmma in place of these.
    pub(crate) warpgroups: Warpgroups,
    /// Or neighbours together, of lists of blocks, forward and for dQ.
    pub(crate) neighbours: Option<NeighbourPlan>,
}

/// Plans of recent calls, of all devices.
static RECENT: Recent<(DeviceKey, ListedRequest), ListedPlan> = Recent::new(32);

impl ListedPlan {
    /// As [`new`](Self::new), remembered with those of a few recent calls: both passes of a call have one plan, and so have the layers that ask for the same.
    ///
    /// # Errors
    /// As [`new`](Self::new).
    pub fn of(client: &Client, request: ListedRequest) -> Result<Self, &'static str> {
        let key = (device_key(client), request);
        RECENT.get_or_try_make(key, || Self::new(client.properties(), request))
    }

    /// For a device.
    ///
    /// # Errors
    /// Why its kernels do not take the call.
    pub fn new(
        properties: &DeviceProperties,
        request: ListedRequest,
    ) -> Result<Self, &'static str> {
        let element = check(properties, &request)?;
        let hardware = &properties.hardware;
        let walk = |backward| walk_tile(&request, element, backward, hardware);
        let (forward, queries) = (walk(false)?, walk(true)?);
        let keys = keys_tile(&request, element, hardware.max_shared_memory_size);
        if !is_u32(request.partial(&keys)) {
            return Err(TOO_LARGE);
        }
        let shared = request.list_shape(&keys).shared_bytes(&keys);
        let spread = spread_tile(&request, element, hardware.max_shared_memory_size);
        match shared <= hardware.max_shared_memory_size {
            true => Ok(Self {
                request,
                forward,
                queries,
                keys,
                warpgroups: Warpgroups::new(properties, &request, element.half()),
                neighbours: of_blocks_together(properties, &request),
                spread: spread.filter(|_| ByKeys::of(&request) == ByKeys::Records),
            }),
            false => Err(NO_ROOM),
        }
    }

    /// The call.
    pub fn request(&self) -> &ListedRequest {
        &self.request
    }
}

/// Why a device has no tile.
const NO_ROOM: &str = "no tile fits the shared memory of the device";

/// What neighbours run together of a call over lists of blocks, if that should be faster; `BLOCKSPARSE_LISTED=neighbours` or `walk` says which.
fn of_blocks_together(
    properties: &DeviceProperties,
    request: &ListedRequest,
) -> Option<NeighbourPlan> {
    if request.is_of_keys() {
        return None;
    }
    let wanted = match costs::said() {
        Some(ListedWay::Neighbours) => true,
        Some(_) => false,
        None => costs::are_faster_together(request),
    };
    let plan = || NeighbourPlan::new(properties, *request);
    wanted.then(plan).flatten()
}

/// A tile of which only sizes matter.
fn plain(
    request: &ListedRequest,
    element: Element,
    [warps, warp_tiles]: [usize; 2],
    [cols, stages]: [usize; 2],
) -> Tile {
    Tile {
        element,
        head_dim: request.head_dim,
        value_dim: request.value_dim,
        warps,
        warp_tiles,
        cols,
        group: cols.min(request.block),
        stages,
        score: ScoreKind::default(),
        max_scores: false,
        residue: false,
        carry: false,
        clustered: false,
        far_rows: false,
        bias_gradient: false,
        outputs: Outputs::Both,
    }
}

/// `BLOCKSPARSE_LISTED_TILE=COLSxSTAGES`, two of them with a comma between, are the steps of forward and dQ: for measuring them.
fn forced(backward: bool) -> Option<[usize; 2]> {
    Tuning::or_default().listed_tile[usize::from(backward)]
}

/// The walk of a query: bytes on their way to a multiprocessor are what counts. With four warps a multiprocessor, forward up to 16, or cubes of more warps,
/// its shared memory is full of steps, of 32 keys where three of them fit a cube and otherwise of 16.
fn walk_tile(
    request: &ListedRequest,
    element: Element,
    backward: bool,
    hardware: &cubecl::ir::HardwareProperties,
) -> Result<WalkTile, &'static str> {
    let rows = request.rows().next_multiple_of(ROWS);
    // Two matrices of rows to a warp read what is shared once for both, where their sums have room in registers.
    let wide = rows >= 128 && rows.is_multiple_of(32) && !backward && request.head_dim <= 128;
    let warp_tiles = if wide { 2 } else { 1 };
    let warps = rows / (ROWS * warp_tiles);
    let shape = |[cols, stages]: [usize; 2]| WalkTile {
        inner: plain(request, element, [warps, warp_tiles], [cols, stages]),
        heads: request.rows(),
        block: request.block,
        backward,
    };
    let most = hardware.max_shared_memory_size;
    if let Some(forced) = forced(backward) {
        let tile = shape(forced);
        return (tile.shared_bytes() <= most).then_some(tile).ok_or(NO_ROOM);
    }
    // Forward 16 warps, as far as cubes of them fit: some multiply while others wait. Wide ones take the registers of two.
    let cubes = match backward || wide {
        true => (4 / warps).max(2),
        false => (16 / warps).clamp(2, 4),
    };
    let share = (most + RESERVED) / cubes - RESERVED;
    let fits = |of: [usize; 2]| shape(of).shared_bytes() <= share;
    let deepest = |cols: usize, most: usize| {
        let stages = (2..=most).rev().map(|stages| [cols, stages]);
        stages.into_iter().find(|&of| fits(of))
    };
    let found = match deepest(32, 6) {
        Some(of) if of[1] >= 3 => Some(of),
        few => deepest(16, 8).or(few),
    };
    match found {
        Some(of) => Ok(shape(of)),
        None => {
            let smallest = shape([16, 2]);
            (smallest.shared_bytes() <= most)
                .then_some(smallest)
                .ok_or(NO_ROOM)
        }
    }
}

/// The walk of the queries that chose a block.
fn keys_tile(request: &ListedRequest, element: Element, room: usize) -> Tile {
    let warps = request.keys_of_list().min(64) / ROWS;
    let of_cols = |cols: usize| plain(request, element, [warps, 1], [cols.min(32 * warps), 2]);
    let wide = of_cols(64);
    match request.head_dim <= 128 && wide.shared_bytes(true) <= room {
        true => wide,
        // Sums of wider heads leave no registers for more.
        false => of_cols(32),
    }
}

/// The walk of queries that writes records of pairs: as many warps to a multiprocessor as its shared memory has room for.
fn spread_tile(request: &ListedRequest, element: Element, room: usize) -> Option<SpreadTile> {
    let cols = request.rows().next_multiple_of(ROWS);
    if !request.is_of_keys() || request.queries_of_records().is_none() {
        return None;
    }
    let shapes = [1, 2, 4, 8].map(|warps| SpreadTile {
        inner: Tile {
            // Columns are heads.
            cols,
            ..plain(request, element, [warps, 1], [cols, 2])
        },
        heads: request.rows(),
    });
    let warps = |tile: &SpreadTile| {
        let cubes = (room + RESERVED) / (tile.shared_bytes() + RESERVED);
        cubes * tile.inner.warps
    };
    let most = shapes.iter().map(warps).max().filter(|&most| most > 0)?;
    shapes.into_iter().find(|tile| warps(tile) == most)
}

impl ListedPlan {
    /// What it is.
    pub(crate) fn title(&self) -> String {
        if let Some(plan) = &self.neighbours {
            return plan.title();
        }
        let (rows, what) = (self.request.rows(), self.request.listed_things());
        format!("listed  {rows} rows of a query walk its list of {what}")
    }

    /// The kernel of the forward pass.
    pub(crate) fn forward_line(&self) -> String {
        match (&self.neighbours, &self.warpgroups.forward) {
            (Some(plan), _) => plan.forward_line(),
            (None, Some(tile)) => warpgroups::walk_line("forward", tile),
            (None, None) => walk_line("forward", &self.forward),
        }
    }

    /// Those of the backward pass.
    pub(crate) fn backward_lines(&self) -> [String; 2] {
        let queries = match (&self.neighbours, &self.warpgroups.queries) {
            (Some(plan), _) => plan.queries_line(),
            (None, Some(tile)) => warpgroups::walk_line("dQ", tile),
            (None, None) => walk_line("dQ", &self.queries),
        };
        if let (Some(_), Some(tile)) = (&self.spread, &self.warpgroups.spread) {
            return [queries, warpgroups::spread_line(tile)];
        }
        if let Some(tile) = &self.spread {
            let keys = format!(
                "  {:8} {KEYS} keys a step of a warp, a record of each pair, {} units, {} stages in {} KiB shared",
                "dK, dV",
                tile.inner.units(),
                tile.inner.stages,
                tile.shared_bytes().div_ceil(1024),
            );
            return [queries, keys];
        }
        let shape = self.request.list_shape(&self.keys);
        let masks = match shape.masked {
            true => ", a bit for each pair",
            false => "",
        };
        let keys = format!(
            "  {:8} {} keys × {} rows a step{masks}, {} units, {} parts, {} KiB shared",
            "dK, dV",
            self.keys.rows(),
            self.keys.cols,
            self.keys.units(),
            shape.parts,
            shape.shared_bytes(&self.keys).div_ceil(1024),
        );
        [queries, keys]
    }
}

fn walk_line(name: &str, tile: &WalkTile) -> String {
    format!(
        "  {name:8} {} keys a step, {} units, {} stages in {} KiB shared",
        tile.inner.cols,
        tile.inner.units(),
        tile.inner.stages,
        tile.shared_bytes().div_ceil(1024),
    )
}

impl fmt::Display for ListedPlan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [queries, keys] = self.backward_lines();
        let (title, forward) = (self.title(), self.forward_line());
        write!(f, "{title}\n{forward}\n{queries}\n{keys}")
    }
}
