//! Which way the passes of a call over lists of single keys go.

use std::fmt;

use cubecl::prelude::*;

use super::costs::{Costs, said};
use super::plan::ListedPlan;
use super::request::ListedRequest;
use super::tiles::ListedTiles;

/// How a pass goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Way {
    /// Queries walk their lists.
    Walk,
    /// Tiles of queries compute all pairs that are seen, of which those that are not listed have no weight.
    Tiles,
}

/// What a call over lists of single keys runs. It prints.
#[derive(Clone, Debug)]
pub struct KeyListPlan {
    walk: Result<ListedPlan, &'static str>,
    /// Where a pass goes so: their layout is made for nothing else.
    tiles: Option<ListedTiles>,
    forward: Way,
    backward: Way,
}

impl KeyListPlan {
    /// For a device, by what should be faster. `BLOCKSPARSE_LISTED=walk` or `tiles` takes one way for both passes, wherever it can be taken; `words` and `records` take
    /// walks, and one way of the gradients by keys: for measuring.
    ///
    /// # Errors
    /// Why its kernels do not take the call.
    pub fn new(client: &Client, request: ListedRequest, scale: f64) -> Result<Self, &'static str> {
        let walk = ListedPlan::new(client.properties(), request);
        let forced = match said().as_deref() {
            Some("tiles") => Some(Way::Tiles),
            Some(_) => Some(Way::Walk),
            None => None,
        };
        let costs = Costs::new(&request);
        let wanted = |[walks, in_tiles]: [f64; 2]| match (&walk, forced) {
            (Err(_), _) => Way::Tiles,
            (_, Some(way)) => way,
            _ if in_tiles < walks => Way::Tiles,
            _ => Way::Walk,
        };
        let walks = [costs.forward, costs.backward()];
        let wanted = [0, 1].map(|pass| wanted([walks[pass], costs.tiles[pass]]));
        let tiles = match wanted.contains(&Way::Tiles) {
            true => ListedTiles::new(client, &request, scale).ok(),
            false => None,
        };
        let [forward, backward] = match (&walk, &tiles) {
            (Err(reason), None) => return Err(reason),
            (_, None) => [Way::Walk; 2],
            (_, Some(_)) => wanted,
        };
        Ok(Self {
            walk,
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
