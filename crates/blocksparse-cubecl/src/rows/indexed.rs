//! Indices of rows, in which entries may be empty.

use cubecl::prelude::*;

/// Sizes of lists of rows, and of the places that select from them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct IndexedRows {
    /// Number of lists: batch entries times heads.
    pub lists: usize,
    /// Number of source rows per list.
    pub rows: usize,
    /// Number of output rows per list.
    pub places: usize,
    /// Index entries per place. The index is i32 `[lists, places, most]`, with negative entries for none.
    pub most: usize,
    /// Elements of a row.
    pub width: usize,
}

impl IndexedRows {
    /// Sizes of `lists` lists with `rows` rows and `places` places, each with up to `most` index entries.
    pub fn new(lists: usize, rows: usize, [places, most]: [usize; 2], width: usize) -> Self {
        Self {
            lists,
            rows,
            places,
            most,
            width,
        }
    }

    /// Number of elements of the largest tensor.
    pub(super) fn len(&self) -> usize {
        let rows = self.rows.max(self.places) * self.width;
        self.lists * rows.max(self.places * (self.most + 1))
    }

    pub(super) fn sizes(&self) -> SizesLaunch {
        let count = self.lists * self.places;
        SizesLaunch::new(self.rows, self.places, self.most, count)
    }
}

/// Sizes as kernel arguments.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub(super) struct Sizes {
    /// Rows per list.
    pub rows: usize,
    pub places: usize,
    pub most: usize,
    /// Places of all lists.
    pub count: usize,
}

/// Returns the row of its list that entry `number` of place `at` selects, or −1 if there is none.
#[cube]
pub(super) fn row_at(index: &[i32], at: usize, number: usize, sizes: &Sizes) -> i32 {
    let row = index[at * sizes.most + number.min(sizes.most - 1)];
    let is_there = number < sizes.most && row >= 0i32 && (row as usize) < sizes.rows;
    select(is_there, row, -1i32)
}
