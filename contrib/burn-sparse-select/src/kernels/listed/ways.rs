//! Which way the passes of a call over lists go.

use std::fmt;
use std::sync::Arc;

use cubecl::prelude::*;

use crate::kernels::listed::costs::{Costs, said};
use crate::kernels::listed::neighbour_plan::NeighbourPlan;
use crate::kernels::listed::plan::ListedPlan;
use crate::kernels::listed::request::ListedRequest;
use crate::kernels::listed::tiles::ListedTiles;
use blocksparse_cubecl::device_key::{DeviceKey, device_key};
use blocksparse_cubecl::known::Recent;
use blocksparse_cubecl::tuning::ListedWay;

/// How a pass goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Way {
    /// Queries walk their lists.
    Walk,
    /// Neighbouring queries walk the union of theirs.
    Neighbours,
    /// Tiles of queries compute all pairs that are seen, of which those that are not listed have no weight.
    Tiles,
}

/// What a call over lists runs: those of blocks are walked. It prints.
#[derive(Clone, Debug)]
pub struct KeyListPlan {
    walk: Result<ListedPlan, &'static str>,
    neighbours: Option<NeighbourPlan>,
    /// Where a pass goes so: their layout is made for nothing else.
    tiles: Option<ListedTiles>,
    forward: Way,
    backward: Way,
}

/// Plans of recent calls, of all devices: their layouts stay with them.
static RECENT: Recent<(DeviceKey, ListedRequest, u64), Arc<KeyListPlan>> = Recent::new(16);

impl KeyListPlan {
    /// As [`new`](Self::new), remembered with those of a few recent calls: both passes of a call have one plan, and so have the layers that ask for the same.
    ///
    /// # Errors
    /// As [`new`](Self::new).
    pub fn of(
        client: &Client,
        request: ListedRequest,
        scale: f64,
    ) -> Result<Arc<Self>, &'static str> {
        let key = (device_key(client), request, scale.to_bits());
        RECENT.get_or_try_make(key, || Self::new(client, request, scale).map(Arc::new))
    }

    /// For a device, by what should be faster. `BLOCKSPARSE_LISTED=walk`, `neighbours` or `tiles` takes one way for both passes, wherever it can be taken;
    /// `words` and `records` take walks, and one way of the gradients by keys: for measuring.
    ///
    /// # Errors
    /// Why its kernels do not take the call.
    pub fn new(client: &Client, request: ListedRequest, scale: f64) -> Result<Self, &'static str> {
        let walk = ListedPlan::new(client.properties(), request);
        if !request.is_of_keys() {
            return walk.map(|walk| Self {
                walk: Ok(walk),
                neighbours: None,
                tiles: None,
                forward: Way::Walk,
                backward: Way::Walk,
            });
        }
        let forced = match said() {
            Some(ListedWay::Tiles) => Some(Way::Tiles),
            Some(ListedWay::Neighbours) => Some(Way::Neighbours),
            Some(_) => Some(Way::Walk),
            None => None,
        };
        let neighbours = NeighbourPlan::new(client.properties(), request);
        let costs = Costs::new(&request);
        let walks = [costs.forward, costs.backward()];
        let wanted = [0, 1].map(|pass| match (&walk, forced, &neighbours) {
            (Err(_), ..) => Way::Tiles,
            (_, Some(Way::Neighbours), None) => Way::Walk,
            (_, Some(way), _) => way,
            (_, None, neighbours) => {
                let in_tiles = (Way::Tiles, costs.tiles[pass]);
                let together = neighbours.map(|_| (Way::Neighbours, costs.neighbours[pass]));
                let ways = [Some(in_tiles), together].into_iter().flatten();
                let least = |a: (Way, f64), b: (Way, f64)| if b.1 < a.1 { b } else { a };
                ways.fold((Way::Walk, walks[pass]), least).0
            }
        });
        let tiles = match wanted.contains(&Way::Tiles) {
            true => ListedTiles::new(client, &request, scale).ok(),
            false => None,
        };
        let [forward, backward] = match (&walk, &tiles) {
            (Err(reason), None) => return Err(reason),
            (_, None) => wanted.map(|way| if way == Way::Tiles { Way::Walk } else { way }),
            (_, Some(_)) => wanted,
        };
        Ok(Self {
            walk,
            neighbours,
            tiles,
            forward,
            backward,
        })
    }

    /// How the forward pass goes.
    pub fn forward(&self) -> Way {
        self.forward
    }

    /// How the backward pass goes.
    pub fn backward(&self) -> Way {
        self.backward
    }

    /// What runs where queries walk their lists.
    ///
    /// # Panics
    /// If none of the passes goes so.
    pub fn walk(&self) -> &ListedPlan {
        self.walk.as_ref().expect("a pass that walks lists")
    }

    /// What runs where neighbouring queries walk lists together.
    ///
    /// # Panics
    /// If none of the passes goes so.
    pub fn neighbours(&self) -> &NeighbourPlan {
        let plan = self.neighbours.as_ref();
        plan.expect("a pass of neighbours")
    }

    /// What runs in tiles.
    ///
    /// # Panics
    /// If none of the passes goes so.
    pub fn tiles(&self) -> &ListedTiles {
        self.tiles.as_ref().expect("a pass in tiles")
    }
}

impl fmt::Display for KeyListPlan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut lines = Vec::new();
        let size = size_of::<f32>();
        let tile_lines = |lines: Vec<(&'static str, String)>| -> Vec<String> {
            let line = |(name, tile)| format!("  {name:8} {tile}");
            lines.into_iter().map(line).collect()
        };
        match self.forward {
            Way::Walk => {
                let walk = self.walk();
                lines.extend([walk.title(), walk.forward_line()]);
            }
            Way::Neighbours => {
                let plan = self.neighbours();
                lines.extend([plan.title(), plan.forward_line()]);
            }
            Way::Tiles => {
                let part = &self.tiles().plan().parts()[0];
                lines.push(IN_TILES.to_string());
                lines.extend(tile_lines(part.forward.tile.lines(size)));
            }
        }
        match self.backward {
            Way::Walk => {
                let walk = self.walk();
                if self.forward != Way::Walk {
                    lines.push(walk.title());
                }
                lines.extend(walk.backward_lines());
            }
            Way::Neighbours => {
                let plan = self.neighbours();
                if self.forward != Way::Neighbours {
                    lines.push(plan.title());
                }
                lines.extend(plan.backward_lines());
            }
            Way::Tiles => {
                let part = &self.tiles().plan().parts()[0];
                if self.forward != Way::Tiles {
                    lines.push(IN_TILES.to_string());
                }
                lines.extend(tile_lines(part.backward.tile.lines(size)));
            }
        }
        f.write_str(&lines.join("\n"))
    }
}

/// What a pass in tiles is.
const IN_TILES: &str =
    "listed  tiles of all pairs that are seen, a bit of each says whether it is listed";
