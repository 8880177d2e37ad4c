//! Indices of rows: lists of numbers, some of which name rows.

use cubecl::prelude::*;

/// Lists of rows, and of places that name them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct IndexedRows {
    /// Batch entries times heads.
    pub lists: usize,
    /// Rows of a list that are named.
    pub rows: usize,
    /// Rows of a list that are made of them.
    pub places: usize,
    /// Rows that a place names: numbers of the index, i32 `[lists, places, most]`, negative for none.
    pub most: usize,
    /// Elements of a row.
    pub width: usize,
}

impl IndexedRows {
    /// Of lists of so many rows, and places that name up to `most` of them.
    pub fn new(lists: usize, rows: usize, [places, most]: [usize; 2], width: usize) -> Self {
        Self {
            lists,
            rows,
            places,
            most,
            width,
        }
    }

    /// Numbers of the largest of the tensors.
    pub(super) fn len(&self) -> usize {
        let rows = self.rows.max(self.places) * self.width;
        self.lists * rows.max(self.places * (self.most + 1))
    }

    pub(super) fn sizes(&self) -> SizesLaunch {
        let count = self.lists * self.places;
        SizesLaunch::new(self.rows, self.places, self.most, count)
    }
}

/// What a launch reads.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub(super) struct Sizes {
    /// Of a list.
    pub rows: usize,
    pub places: usize,
    pub most: usize,
    /// Places of all lists.
    pub count: usize,
}

/// The row of its list that a number of a place names, −1 for none.
#[cube]
pub(super) fn row_at(index: &[i32], at: usize, number: usize, sizes: &Sizes) -> i32 {
    let row = index[at * sizes.most + number.min(sizes.most - 1)];
    let is_there = number < sizes.most && row >= 0i32 && (row as usize) < sizes.rows;
    select(is_there, row, -1i32)
}
