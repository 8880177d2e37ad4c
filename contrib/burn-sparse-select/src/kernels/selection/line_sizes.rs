//! The last queries of a call of [`lines`](crate::kernels::selection::lines): how many there are, and what they see.

use cubecl::prelude::*;

use crate::kernels::selection::UNITS;
use crate::kernels::selection::products::pitch;

/// Numbers of a unit of a part.
pub const PART_NUMBERS: usize = 16;

/// Elements of a part of a row.
pub const PART: usize = UNITS * PART_NUMBERS;

/// Sizes of a call.
#[derive(Clone, Debug, PartialEq)]
pub struct LineSizes {
    /// Batch entries times heads, of queries and of keys; these divide those.
    pub lists: [usize; 2],
    /// So many last queries, which is all that `q` has, and keys.
    pub seq: [usize; 2],
    /// Elements of a query.
    pub width: usize,
    /// What products are multiplied by before the softmax.
    pub factor: f64,
}

impl LineSizes {
    /// Of so many lists from `first` on.
    pub(crate) fn launched(&self, first: usize, lists: usize) -> LinesLaunch {
        let [queries, keys] = self.seq;
        let (parts, factor) = (keys.div_ceil(PART), self.factor as f32);
        LinesLaunch::new(lists, first, queries, keys, pitch(keys), parts, factor)
    }
}

/// Products of the last queries of some lists.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub struct Lines {
    pub lists: usize,
    /// The first list, of all.
    pub first: usize,
    pub queries: usize,
    pub keys: usize,
    /// Elements of a row of products.
    pub pitch: usize,
    /// Parts of a row.
    pub parts: usize,
    pub factor: f32,
}

/// How many keys a query sees.
#[cube]
pub fn seen(query: usize, of: &Lines) -> usize {
    let behind = of.queries - 1 - query;
    of.keys.max(behind) - behind
}
