//! Choice of the mainloops of a call that run on wgmma.

use cubecl::prelude::*;

use crate::kernels::listed::request::ListedRequest;
use crate::kernels::listed::tile::RESERVED;
use crate::kernels::listed::warpgroups::spread::{KEYS, SpreadGroups};
use crate::kernels::listed::warpgroups::tile::{GROUP_ROWS, STAGES, WarpgroupTile};
use blocksparse_cubecl::arch::ptx::Half;
use blocksparse_cubecl::arch::tma::ROW_ELEMENTS;
use blocksparse_cubecl::call::check_hopper;
use blocksparse_cubecl::tuning::{TierLimit, Tuning};

/// Mainloops of a call on wgmma.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Warpgroups {
    /// Forward pass.
    pub forward: Option<WarpgroupTile>,
    /// dQ.
    pub queries: Option<WarpgroupTile>,
    /// Records of dK and dV.
    pub spread: Option<SpreadGroups>,
}

/// Returns the number of warpgroups that the heads of a list fill to at least three quarters, if wgmma supports the row widths.
pub fn filled(request: &ListedRequest) -> Option<usize> {
    let rows = request.rows();
    let count = rows.div_ceil(GROUP_ROWS);
    let is_filled = rows * 4 >= count * GROUP_ROWS * 3 && (1..=2).contains(&count);
    let is_wide = |dim: usize| dim > 0 && dim.is_multiple_of(ROW_ELEMENTS);
    (is_filled && is_wide(request.head_dim) && is_wide(request.value_dim)).then_some(count)
}

/// Returns the number of adjacent queries that share a list, so that their heads fill two warpgroups to at least three quarters. `None` if the heads of one
/// query fill one already.
pub fn neighbours(request: &ListedRequest) -> Option<usize> {
    let rows = request.rows();
    let is_filled_alone = filled(request).is_some();
    // Aligned groups of eight rows must belong to one query, and a word has a bit for each query.
    if is_filled_alone || rows == 0 || !rows.is_multiple_of(8) {
        return None;
    }
    let together = 2 * GROUP_ROWS / rows;
    let is_some = (2..=request.seq_q).contains(&together);
    (is_some && filled(&of_together(request, together)).is_some()).then_some(together)
}

/// Returns the request with the rows of `queries` queries per list.
fn of_together(request: &ListedRequest, queries: usize) -> ListedRequest {
    ListedRequest {
        heads: request.heads * queries,
        ..*request
    }
}

impl Warpgroups {
    /// Chooses the mainloops for `queries` adjacent queries that share a list. `BLOCKSPARSE_TIER=mma` disables them.
    pub fn new(
        properties: &DeviceProperties,
        request: &ListedRequest,
        half: Half,
        queries: usize,
    ) -> Self {
        let is_left_out = Tuning::or_default().tier == TierLimit::Mma;
        let count = filled(&of_together(request, queries));
        let Some(warpgroups) = count.filter(|_| !is_left_out && check_hopper(properties).is_ok())
        else {
            return Self::default();
        };
        let room = properties.hardware.max_shared_memory_size;
        let mainloop = |backward: bool, cols: usize| WarpgroupTile {
            half,
            head_dim: request.head_dim,
            value_dim: request.value_dim,
            warpgroups,
            cols,
            heads: request.rows(),
            queries,
            block: request.block,
            carry: false,
            backward,
            far_rows: false,
        };
        // As many keys per step as fit; two cubes of 64 rows share a multiprocessor.
        let cubes = 2 / warpgroups;
        let share = (room + RESERVED) / cubes - RESERVED;
        let widest = |backward: bool, cols: [usize; 2]| {
            let all = cols.map(|cols| mainloop(backward, cols));
            let fits = |room: usize| all.into_iter().find(|tile| tile.shared_bytes() <= room);
            fits(share).or_else(|| fits(room))
        };
        // Each warpgroup has its own stages; sums of more columns leave registers for only two.
        let spread = (1..=4 - warpgroups).rev().map(|count| SpreadGroups {
            inner: mainloop(true, KEYS),
            warpgroups: count,
        });
        let mut spread = spread.filter(|tile| request.is_of_keys() && tile.shared_bytes() <= room);
        Self {
            forward: widest(false, [128, 64]),
            queries: widest(true, [64, 32]),
            spread: spread.next(),
        }
    }
}

/// Describes a mainloop in a plan's text.
pub fn mainloop_line(tile: &WarpgroupTile) -> String {
    format!(
        "{} keys a step on wgmma, {} units, {STAGES} stages in {} KiB shared",
        tile.cols,
        tile.units(),
        tile.shared_bytes().div_ceil(1024),
    )
}

/// Describes the kernel of records in a plan's text.
pub fn spread_line(tile: &SpreadGroups) -> String {
    format!(
        "{GROUP_ROWS} keys a step of a warpgroup on wgmma, a record of each pair, {} units in {} KiB shared",
        tile.units(),
        tile.shared_bytes().div_ceil(1024),
    )
}
