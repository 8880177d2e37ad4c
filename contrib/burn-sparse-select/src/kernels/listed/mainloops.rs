//! Mainloops over lists, for single queries or groups of adjacent queries, and their tiles.

use std::fmt;

use cubecl::prelude::*;

use crate::kernels::listed::request::{ListedRequest, check};
use crate::kernels::listed::spread::{KEYS, SpreadTile};
use crate::kernels::listed::tile::{MainloopTile, RESERVED};
use crate::kernels::listed::warpgroups;
use crate::kernels::listed::warpgroups::{SpreadGroups, WarpgroupTile, Warpgroups};
use blocksparse_cubecl::arch::sm80::Element;
use blocksparse_cubecl::call::ScoreKind;
use blocksparse_cubecl::mma::tile::{Outputs, Tile};
use blocksparse_cubecl::on_device::most_of_neighbours;
use blocksparse_cubecl::tensor::{TOO_LARGE, is_u32};

/// Number of rows of an mma.sync.
const ROWS: usize = 16;

/// Upper bound in MiB of the lists of groups in memory at a time.
const MIB: usize = 512;

/// Kernel of a pass over queries.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mainloop {
    /// mma.sync: one query with a few heads.
    Warps(MainloopTile),
    /// wgmma: many heads, or those of adjacent queries.
    Warpgroups(WarpgroupTile),
}

/// Kernel of dK and dV.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ByKeys {
    /// Keys of a block loop over the queries that selected it.
    Blocks(Tile),
    /// One record per query (or group) and listed key, on mma.sync.
    Records(SpreadTile),
    /// One record per query (or group) and listed key, on wgmma.
    WarpgroupRecords(SpreadGroups),
}

/// Kernels of a call over lists. They can be printed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mainloops {
    pub(crate) request: ListedRequest,
    /// Number of adjacent queries that share a list, or 1.
    pub(crate) together: usize,
    pub(crate) forward: Mainloop,
    pub(crate) queries: Mainloop,
    pub(crate) by_keys: ByKeys,
}

/// Reason why a device has no tile.
const NO_ROOM: &str = "no tile fits the shared memory of the device";

impl Mainloops {
    /// Plans queries that attend to their own lists.
    ///
    /// # Errors
    /// The reason why the device's kernels do not serve the call.
    pub fn alone(
        properties: &DeviceProperties,
        request: ListedRequest,
    ) -> Result<Self, &'static str> {
        Self::new(properties, request, 1)
    }

    /// Plans groups of adjacent queries that attend to the union of their lists.
    ///
    /// # Errors
    /// The reason why the device's kernels do not serve the call this way.
    pub fn together(
        properties: &DeviceProperties,
        request: ListedRequest,
    ) -> Result<Self, &'static str> {
        let together = warpgroups::neighbours(&request);
        let together = together.ok_or("the heads of no neighbours fill two warpgroups")?;
        Self::new(properties, request, together)
    }

    fn new(
        properties: &DeviceProperties,
        request: ListedRequest,
        together: usize,
    ) -> Result<Self, &'static str> {
        let element = check(properties, &request)?;
        let hardware = &properties.hardware;
        let room = hardware.max_shared_memory_size;
        let on_wgmma = Warpgroups::new(properties, &request, element.half(), together);
        let mainloop = |tile: Option<WarpgroupTile>, backward: bool| match tile {
            Some(tile) => Ok(Mainloop::Warpgroups(tile)),
            None if together > 1 => Err("neighbours share a list on wgmma alone"),
            None => mainloop_tile(&request, element, backward, hardware).map(Mainloop::Warps),
        };
        let (forward, queries) = (
            mainloop(on_wgmma.forward, false)?,
            mainloop(on_wgmma.queries, true)?,
        );
        let by_keys = match (request.is_of_keys(), on_wgmma.spread) {
            (false, _) => ByKeys::Blocks(keys_tile(&request, element, room)),
            (true, Some(tile)) => ByKeys::WarpgroupRecords(tile),
            (true, None) => {
                let tile = spread_tile(&request, element, room);
                ByKeys::Records(tile.filter(|_| together == 1).ok_or(NO_ROOM)?)
            }
        };
        let mainloops = Self {
            request,
            together,
            forward,
            queries,
            by_keys,
        };
        if let ByKeys::Blocks(keys) = &by_keys {
            if request.list_shape(keys).shared_bytes(keys) > room {
                return Err(NO_ROOM);
            }
            if !is_u32(request.partial(keys)) {
                return Err(TOO_LARGE);
            }
        } else if (request.lists_of_records(mainloops.lists(), mainloops.most())).is_none() {
            return Err("records of 32 queries and the keys that they list are too many");
        }
        let numbers = request.batch * request.kv_heads * mainloops.at_a_time() * mainloops.most();
        is_u32(numbers).then_some(mainloops).ok_or(TOO_LARGE)
    }

    /// Returns the number of lists per KV head.
    pub(crate) fn lists(&self) -> usize {
        self.request.seq_q.div_ceil(self.together)
    }

    /// Returns the maximum number of entries of a list.
    pub(crate) fn most(&self) -> usize {
        match self.together {
            1 => self.request.most,
            together => most_of_neighbours(&self.request.list_sizes(), together),
        }
    }

    /// Returns the number of lists per KV head that are in memory at a time.
    pub(crate) fn at_a_time(&self) -> usize {
        if self.together == 1 {
            return self.lists();
        }
        let &ListedRequest {
            batch, kv_heads, ..
        } = &self.request;
        let bytes = batch * kv_heads * self.most() * size_of::<[u32; 2]>();
        let fit = (MIB << 20) / bytes.max(1);
        // Bits of groups are stored in words.
        (fit.max(32) / 32 * 32).min(self.lists())
    }
}

/// Returns a tile of which only sizes matter.
fn plain(
    request: &ListedRequest,
    element: Element,
    [warps, warp_tiles]: [usize; 2],
    [cols, stages]: [usize; 2],
) -> Tile {
    Tile {
        mainloop: blocksparse::plan::Mainloop::Rows,
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

/// Returns the tile of a query's mainloop. Throughput depends on the bytes in flight, so the stages fill a multiprocessor's shared memory. A multiprocessor has
/// four warps, forward up to 16, or cubes with more warps. A step has 32 keys if three steps of 32 fit a cube, otherwise 16.
fn mainloop_tile(
    request: &ListedRequest,
    element: Element,
    backward: bool,
    hardware: &cubecl::ir::HardwareProperties,
) -> Result<MainloopTile, &'static str> {
    let rows = request.rows().next_multiple_of(ROWS);
    // Two row matrices per warp share each operand that is read, if registers have space for their sums.
    let wide = rows >= 128 && rows.is_multiple_of(32) && !backward && request.head_dim <= 128;
    let warp_tiles = if wide { 2 } else { 1 };
    let warps = rows / (ROWS * warp_tiles);
    let shape = |[cols, stages]: [usize; 2]| MainloopTile {
        inner: plain(request, element, [warps, warp_tiles], [cols, stages]),
        heads: request.rows(),
        block: request.block,
        backward,
    };
    let most = hardware.max_shared_memory_size;
    // Forward aims at 16 warps, if their cubes fit, so some multiply while others wait. A wide warp uses the registers of two.
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

/// Returns the tile of the mainloop over the queries that selected a block.
pub(crate) fn keys_tile(request: &ListedRequest, element: Element, room: usize) -> Tile {
    let warps = request.block.min(64) / ROWS;
    let of_cols = |cols: usize| plain(request, element, [warps, 1], [cols.min(32 * warps), 2]);
    let wide = of_cols(64);
    match request.head_dim <= 128 && wide.shared_bytes(true) <= room {
        true => wide,
        // Sums of wider heads leave no registers for more columns.
        false => of_cols(32),
    }
}

/// Returns the tile of the mainloop that writes records of pairs, with as many warps per multiprocessor as shared memory allows.
fn spread_tile(request: &ListedRequest, element: Element, room: usize) -> Option<SpreadTile> {
    let cols = request.rows().next_multiple_of(ROWS);
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

impl Mainloops {
    /// Returns the first line of the plan's text.
    pub(crate) fn title(&self) -> String {
        let (rows, what) = (self.request.rows(), self.request.listed_things());
        match self.together {
            1 => format!("listed  {rows} rows of a query attend to its list of {what}"),
            together => format!(
                "listed  {together} neighbouring queries of {rows} rows attend to the union of their lists of {what}"
            ),
        }
    }

    /// Returns the line of the forward pass.
    pub(crate) fn forward_line(&self) -> String {
        mainloop_line("forward", &self.forward)
    }

    /// Returns the lines of the backward pass.
    pub(crate) fn backward_lines(&self) -> [String; 2] {
        let keys = match &self.by_keys {
            ByKeys::WarpgroupRecords(tile) => by_keys_line(&warpgroups::spread_line(tile)),
            ByKeys::Records(tile) => by_keys_line(&format!(
                "{KEYS} keys a step of a warp, a record of each pair, {} units, {} stages in {} KiB shared",
                tile.inner.units(),
                tile.inner.stages,
                tile.shared_bytes().div_ceil(1024),
            )),
            ByKeys::Blocks(tile) => keys_line(&self.request, tile),
        };
        [mainloop_line("dQ", &self.queries), keys]
    }
}

fn by_keys_line(keys: &str) -> String {
    format!("  {:8} {keys}", "dK, dV")
}

/// Returns the line of the kernel over keys of blocks.
pub(crate) fn keys_line(request: &ListedRequest, tile: &Tile) -> String {
    let shape = request.list_shape(tile);
    by_keys_line(&format!(
        "{} keys × {} rows a step, {} units, {} parts, {} KiB shared",
        tile.rows(),
        tile.cols,
        tile.units(),
        shape.parts,
        shape.shared_bytes(tile).div_ceil(1024),
    ))
}

fn mainloop_line(name: &str, mainloop: &Mainloop) -> String {
    let tile = match mainloop {
        Mainloop::Warpgroups(tile) => warpgroups::mainloop_line(tile),
        Mainloop::Warps(tile) => format!(
            "{} keys a step, {} units, {} stages in {} KiB shared",
            tile.inner.cols,
            tile.inner.units(),
            tile.inner.stages,
            tile.shared_bytes().div_ceil(1024),
        ),
    };
    format!("  {name:8} {tile}")
}

impl fmt::Display for Mainloops {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [queries, keys] = self.backward_lines();
        let (title, forward) = (self.title(), self.forward_line());
        write!(f, "{title}\n{forward}\n{queries}\n{keys}")
    }
}
