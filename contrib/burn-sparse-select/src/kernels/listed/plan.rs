//! Choice of the strategy of each pass of a call over lists.

use std::fmt;
use std::sync::Arc;

use crate::kernels::listed::by_block::ByBlock;
use crate::kernels::listed::costs::Costs;
use crate::kernels::listed::mainloops::Mainloops;
use crate::kernels::listed::request::ListedRequest;
use crate::kernels::listed::tiles::ListedTiles;
use blocksparse::internal::Recent;
use blocksparse_cubecl::call::check_hopper;
use blocksparse_cubecl::device_key::{DeviceKey, device_key};
use blocksparse_cubecl::prelude::*;
use blocksparse_cubecl::tuning::{ListedWay, TierLimit, Tuning};

/// Strategy of a pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Way {
    /// Each query attends to its own list.
    Alone,
    /// Adjacent queries attend to the union of their lists.
    Together,
    /// A block is multiplied with the queries that list it.
    ByBlock,
    /// Tiles of queries compute all visible pairs; pairs that are not listed have weight 0.
    Tiles,
}

/// Kernels of a pass.
#[derive(Clone, Debug)]
pub enum ListedPass {
    /// Queries attend to their lists, or groups of adjacent queries to the union of theirs.
    Mainloops(Mainloops),
    /// A block is multiplied with the queries that list it.
    ByBlock(ByBlock),
    /// Lists become pairs of a layout, to which the layout kernels attend.
    Tiles(ListedTiles),
}

/// Plan of a call over lists. It can be printed.
#[derive(Clone, Debug)]
pub struct ListedPlan {
    /// Forward and backward.
    passes: [ListedPass; 2],
}

/// Plans of recent calls on all devices, with their layouts.
static RECENT: Recent<(DeviceKey, ListedRequest, u64), Arc<ListedPlan>> = Recent::new(32);

impl ListedPlan {
    /// Returns the plan as in [`new`](Self::new), from a cache of recent calls. Both passes of a call share one plan, and so do layers with equal calls.
    pub fn of(
        client: &Client,
        request: ListedRequest,
        scale: f64,
    ) -> Result<Arc<Self>, &'static str> {
        let key = (device_key(client), request, scale.to_bits());
        RECENT.get_or_try_make(key, || Self::new(client, request, scale).map(Arc::new))
    }

    /// Plans a call for a device by estimated time. `BLOCKSPARSE_LISTED=queries`, `neighbours`, `tiles` or `blocks` forces one strategy for both passes, where
    /// it applies; for measurements.
    ///
    /// # Errors
    /// The reason why the device's kernels do not serve the call.
    pub fn new(client: &Client, request: ListedRequest, scale: f64) -> Result<Self, &'static str> {
        let properties = client.properties();
        let alone = Mainloops::alone(properties, request);
        let together = Mainloops::together(properties, request);
        let by_block = [false, true].map(|backward| ByBlock::new(properties, request, backward));
        let ways = match (&alone, Tuning::or_default().listed) {
            (Err(_), _) | (_, Some(ListedWay::Tiles)) => [Way::Tiles; 2],
            (_, Some(ListedWay::Queries)) => [Way::Alone; 2],
            (_, Some(ListedWay::Neighbours)) if together.is_ok() => [Way::Together; 2],
            (_, Some(ListedWay::Blocks)) => by_block.each_ref().map(|way| match way {
                Ok(_) => Way::ByBlock,
                Err(_) => Way::Alone,
            }),
            (_, Some(_)) => [Way::Alone; 2],
            (_, None) => {
                let by_block = by_block.each_ref().map(Result::is_ok);
                fastest(properties, &request, together.is_ok(), by_block)
            }
        };
        // The layout of tiles is built only if it is used.
        let tiles = match ways.contains(&Way::Tiles) {
            true => ListedTiles::new(client, &request, scale).ok(),
            false => None,
        };
        let [forward, backward] = [0, 1].map(|pass| match (ways[pass], &tiles) {
            (Way::Tiles, Some(tiles)) => Ok(ListedPass::Tiles(tiles.clone())),
            (Way::Together, _) => together.map(ListedPass::Mainloops),
            (Way::ByBlock, _) => by_block[pass].map(ListedPass::ByBlock),
            (Way::Alone | Way::Tiles, _) => alone.map(ListedPass::Mainloops),
        });
        Ok(Self {
            passes: [forward?, backward?],
        })
    }

    /// Returns the kernels of the forward pass.
    pub fn forward(&self) -> &ListedPass {
        &self.passes[0]
    }

    /// Returns the kernels of the backward pass.
    pub fn backward(&self) -> &ListedPass {
        &self.passes[1]
    }
}

/// Returns the strategies with the least estimated time. For lists of blocks, both passes of mainloops use one strategy, and never tiles: attention to them
/// continues that to a layout.
fn fastest(
    properties: &DeviceProperties,
    request: &ListedRequest,
    together: bool,
    by_block: [bool; 2],
) -> [Way; 2] {
    let wgmma = check_hopper(properties).is_ok() && Tuning::or_default().tier != TierLimit::Mma;
    let costs = Costs::new(request, wgmma);
    let ways = [0, 1].map(|pass| {
        let ways = [
            (Way::Tiles, costs.tiles[pass], request.is_of_keys()),
            (Way::Together, costs.together[pass], together),
        ];
        let least = |a: (Way, f64), (way, cost, can)| match can && cost < a.1 {
            true => (way, cost),
            false => a,
        };
        ways.into_iter()
            .fold((Way::Alone, costs.alone[pass]), least)
    });
    match (request.is_of_keys(), ways[0]) {
        (true, _) => ways.map(|(way, _)| way),
        (false, (mainloop, cost)) => by_block.map(|can| match can && costs.by_block < cost {
            true => Way::ByBlock,
            false => mainloop,
        }),
    }
}

impl fmt::Display for ListedPlan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let size = size_of::<f32>();
        let of_tiles = |lines: Vec<(&'static str, String)>| -> Vec<String> {
            let line = |(name, tile)| format!("  {name:8} {tile}");
            lines.into_iter().map(line).collect()
        };
        let title = |pass: &ListedPass| match pass {
            ListedPass::Mainloops(mainloops) => mainloops.title(),
            ListedPass::ByBlock(blocks) => blocks.lines().swap_remove(0),
            ListedPass::Tiles(_) => IN_TILES.to_string(),
        };
        let lines_of = |pass: &ListedPass, backward: bool| match pass {
            ListedPass::Mainloops(mainloops) if backward => mainloops.backward_lines().to_vec(),
            ListedPass::Mainloops(mainloops) => vec![mainloops.forward_line()],
            ListedPass::ByBlock(blocks) => blocks.lines().split_off(1),
            ListedPass::Tiles(tiles) => {
                let part = &tiles.plan().parts()[0];
                of_tiles(match backward {
                    true => part.backward.tile.lines(size),
                    false => part.forward.tile.lines(size),
                })
            }
        };
        let titles = self.passes.each_ref().map(title);
        let is_alike = titles[0] == titles[1];
        let [title, other] = titles;
        let mut lines = vec![title];
        lines.extend(lines_of(self.forward(), false));
        if !is_alike {
            lines.push(other);
        }
        lines.extend(lines_of(self.backward(), true));
        f.write_str(&lines.join("\n"))
    }
}

/// First line of a pass in tiles.
const IN_TILES: &str =
    "listed  tiles of all pairs that are seen, a bit of each says whether it is listed";
