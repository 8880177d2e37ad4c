//! Layouts that are built on the host once for each size, and kept.

use std::sync::{Arc, Mutex, PoisonError};

use blocksparse::{Always, BlockLayout, LayoutShape, Pattern, ScoreGrid};

use burn_blocksparse::OpError;

/// An LRU cache of layouts by what queries see; clones share it.
///
/// What a layout has on devices, and the launch plans of calls, live with it: take a layout from here for all calls of the same sizes.
#[derive(Clone, Debug, Default)]
pub struct LayoutCache(Arc<Mutex<Vec<(String, BlockLayout)>>>);

/// Layouts that are kept.
const KEPT: usize = 24;

impl LayoutCache {
    /// The layout of a shape in which queries see what a text says, made if it is not known.
    ///
    /// # Errors
    /// What `make` says.
    pub fn get<E>(
        &self,
        seen: String,
        shape: LayoutShape,
        make: impl FnOnce() -> Result<BlockLayout, E>,
    ) -> Result<BlockLayout, E> {
        let mut known = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let is_it = |(of, layout): &(String, BlockLayout)| *of == seen && *layout.shape() == shape;
        let kept = match known.iter().position(is_it) {
            Some(at) => known.remove(at),
            None => {
                if known.len() == KEPT {
                    known.remove(0);
                }
                (seen, make()?)
            }
        };
        let layout = kept.1.clone();
        known.push(kept);
        Ok(layout)
    }

    /// The layout of a pattern.
    pub fn of_pattern(
        &self,
        pattern: &Pattern,
        shape: LayoutShape,
    ) -> Result<BlockLayout, OpError> {
        let make = || -> Result<BlockLayout, OpError> { Ok(BlockLayout::new(pattern, shape)?) };
        self.get(pattern.to_string(), shape, make)
    }

    /// The layout in which a query sees what comes before it of the blocks of a grid that are forced, its own among them.
    pub fn of_forced(
        &self,
        grid: &ScoreGrid,
        forced: Always,
        shape: LayoutShape,
    ) -> Result<BlockLayout, OpError> {
        let all = grid.blocks();
        let (first, local) = (forced.first.min(all), forced.local.clamp(1, all));
        let near = Pattern::chunked_window(grid.block, local - 1, 0);
        let seen = match first {
            0 => near,
            first => Pattern::union([near, Pattern::global_keys(0..first * grid.block)]),
        };
        self.of_pattern(&seen.and_causal(), shape)
    }
}
