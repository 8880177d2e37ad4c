//! Cache of layouts that are built on the host once for each size.

use std::sync::{Arc, Mutex, PoisonError};

use blocksparse::{Always, BlockLayout, LayoutShape, Pattern, ScoreGrid};

use burn_blocksparse::OpError;

/// LRU cache of layouts by visibility and shape; clones share it.
///
/// A layout's device data and launch plans live with it, so calls of the same sizes should use the layout from here.
#[derive(Clone, Debug, Default)]
pub struct LayoutCache(Arc<Mutex<Vec<(String, BlockLayout)>>>);

/// Capacity of the cache.
const KEPT: usize = 24;

impl LayoutCache {
    /// Returns the layout of `shape` for the visibility described by `seen`, and builds it if it is not cached.
    ///
    /// # Errors
    /// Those of `make`.
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

    /// Returns the layout of a pattern.
    pub fn of_pattern(
        &self,
        pattern: &Pattern,
        shape: LayoutShape,
    ) -> Result<BlockLayout, OpError> {
        let make = || -> Result<BlockLayout, OpError> { Ok(BlockLayout::new(pattern, shape)?) };
        self.get(pattern.to_string(), shape, make)
    }

    /// Returns the layout in which each query sees the keys up to its position in its forced blocks, its own block included.
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
