//! Visibility of slots to queries, on the device.

use burn::tensor::{Device, Int, Tensor};

use super::store::ints;
use crate::PagedVisibility;
use crate::paged::write_integers;
use crate::pages::{PagePool, Writes};

/// Position of each slot of a pool and the last query that sees it. Built from all sequences once; then each step writes its own slots in place,
/// whatever the size of the pool. Evicted slots keep their values: no page list has them before they are written again.
#[derive(Debug)]
pub(super) struct Sight {
    /// `[pages · P]`
    positions: Tensor<1, Int>,
    /// `[pages · P]`
    last: Tensor<1, Int>,
    shape: [usize; 2],
}

impl Sight {
    /// Builds the state from the block tables, which include the present step.
    pub(super) fn new(books: &PagePool, device: &Device) -> Self {
        let shape = [books.config().pages(), books.config().page_size()];
        let [positions, last] = books
            .visibility()
            .map(|slots| ints(slots, [shape[0] * shape[1]], device));
        Self {
            positions,
            last,
            shape,
        }
    }

    /// Applies a step: copies of pages, then new keys.
    pub(super) fn apply(mut self, writes: &[Writes], device: &Device) -> Self {
        let copies = writes.iter().flat_map(|writes| &writes.copies);
        let (mut from, mut to) = (Vec::new(), Vec::new());
        for copy in copies {
            for slot in copy.slots.clone() {
                from.push((copy.from * self.shape[1] + slot) as i32);
                to.push((copy.to * self.shape[1] + slot) as i32);
            }
        }
        if !from.is_empty() {
            let count = [from.len()];
            let (from, to) = (ints(from, count, device), ints(to, count, device));
            let positions = self.positions.clone().select(0, from.clone());
            let last = self.last.clone().select(0, from);
            self = self.written(to, positions, last);
        }
        self.write(new_keys(writes), device)
    }

    /// Writes slots with their positions and last queries.
    pub(super) fn write(self, slots: Vec<(i32, i32, i32)>, device: &Device) -> Self {
        if slots.is_empty() {
            return self;
        }
        let count = [slots.len()];
        let [slots, positions, last] = columns(slots).map(|x| ints(x, count, device));
        self.written(slots, positions, last)
    }

    /// Like [`Self::write`], from tensors. Negative slots are skipped.
    pub(super) fn written(
        mut self,
        slots: Tensor<1, Int>,
        positions: Tensor<1, Int>,
        last: Tensor<1, Int>,
    ) -> Self {
        self.positions = write_integers(self.positions, slots.clone(), positions);
        self.last = write_integers(self.last, slots, last);
        self
    }

    /// Makes the input for queries that begin at these positions.
    pub(super) fn of_queries(&self, first: Tensor<1, Int>) -> PagedVisibility {
        PagedVisibility {
            positions: self.positions.clone().reshape(self.shape),
            last: self.last.clone().reshape(self.shape),
            query_positions: first,
        }
    }
}

/// Returns the slots of new keys, their positions, and the last queries that see them.
pub(super) fn new_keys(writes: &[Writes]) -> Vec<(i32, i32, i32)> {
    let of = |writes: &Writes| {
        let pairs = writes.slots.iter().zip(&writes.last).enumerate();
        let (first, tokens) = (writes.first, writes.tokens);
        let keys =
            pairs.map(move |(at, (&slot, &last))| (slot, (first + at % tokens) as i32, last));
        keys.collect::<Vec<_>>()
    };
    writes.iter().flat_map(of).collect()
}

pub(super) fn columns(slots: Vec<(i32, i32, i32)>) -> [Vec<i32>; 3] {
    let (slots, (positions, last)) = slots.into_iter().map(|(a, b, c)| (a, (b, c))).unzip();
    [slots, positions, last]
}
