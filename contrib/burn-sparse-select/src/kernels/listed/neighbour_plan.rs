//! What a call runs whose neighbouring queries walk the union of their lists, or whether it can.

use cubecl::prelude::*;

use crate::kernels::listed::check::check;
use crate::kernels::listed::request::ListedRequest;
use crate::kernels::listed::warpgroups;
use crate::kernels::listed::warpgroups::{SpreadGroups, WarpgroupTile, Warpgroups};
use blocksparse_cubecl::on_device::most_of_neighbours;
use blocksparse_cubecl::tensor::is_u32;

/// MiB of lists that are there at a time.
const MIB: usize = 512;

/// What a call runs whose neighbouring queries walk lists together. It prints.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NeighbourPlan {
    pub(crate) request: ListedRequest,
    /// Queries of a list.
    pub(crate) together: usize,
    pub(crate) forward: WarpgroupTile,
    pub(crate) queries: WarpgroupTile,
    /// For dK and dV of single keys.
    pub(crate) spread: Option<SpreadGroups>,
}

impl NeighbourPlan {
    /// For a device; `None` if its kernels do not take the call so.
    pub fn new(properties: &DeviceProperties, request: ListedRequest) -> Option<Self> {
        let element = check(properties, &request).ok()?;
        let together = warpgroups::neighbours(&request)?;
        let tiles = Warpgroups::of_queries(properties, &request, element.half(), together);
        let plan = Self {
            request,
            together,
            forward: tiles.forward?,
            queries: tiles.queries?,
            spread: tiles.spread,
        };
        let heads = request.batch * request.kv_heads;
        let is_counted = is_u32(heads * plan.at_a_time() * plan.most());
        let has_room = || {
            let records = request.lists_of_records(plan.groups(), plan.most());
            plan.spread.is_some() && records.is_some()
        };
        (is_counted && (!request.is_of_keys() || has_room())).then_some(plan)
    }

    /// Groups of neighbours.
    pub(crate) fn groups(&self) -> usize {
        self.request.seq_q.div_ceil(self.together)
    }

    /// Numbers of a group's list, at most.
    pub(crate) fn most(&self) -> usize {
        most_of_neighbours(&self.request.list_sizes(), self.together)
    }

    /// Groups whose lists are there at a time.
    pub(crate) fn at_a_time(&self) -> usize {
        let &ListedRequest {
            batch, kv_heads, ..
        } = &self.request;
        let bytes = batch * kv_heads * self.most() * size_of::<[u32; 2]>();
        let fit = (MIB << 20) / bytes.max(1);
        // Bits of groups are words.
        (fit.max(32) / 32 * 32).min(self.groups())
    }

    /// What it is.
    pub(crate) fn title(&self) -> String {
        let (rows, together) = (self.request.rows(), self.together);
        let what = self.request.listed_things();
        format!(
            "listed  {together} neighbouring queries of {rows} rows walk the union of their lists of {what}"
        )
    }

    /// The kernel of the forward pass.
    pub(crate) fn forward_line(&self) -> String {
        warpgroups::walk_line("forward", &self.forward)
    }

    /// That for dQ.
    pub(crate) fn queries_line(&self) -> String {
        warpgroups::walk_line("dQ", &self.queries)
    }

    /// Those of the backward pass, of single keys.
    pub(crate) fn backward_lines(&self) -> [String; 2] {
        let spread = self.spread.as_ref().map(warpgroups::spread_line);
        [self.queries_line(), spread.expect("of single keys")]
    }
}
