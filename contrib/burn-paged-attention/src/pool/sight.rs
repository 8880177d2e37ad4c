//! Which queries see which slots, on the device.

use burn::tensor::{Device, IndexingUpdateOp, Int, Tensor};

use super::store::ints;
use crate::PagedVisibility;
use crate::pages::{PagePool, Writes};

/// The position of each slot of a pool and the last query that sees it. Made of all sequences once; then a step writes its own slots, however large the
/// pool is. Slots that were let go keep what they had: no page list comes by them before they are written again.
#[derive(Clone, Debug)]
pub(super) struct Sight {
    /// `[pages · P]`
    positions: Tensor<1, Int>,
    /// `[pages · P]`
    last: Tensor<1, Int>,
    shape: [usize; 2],
}

impl Sight {
    /// Of what the books hold, the step that goes on included.
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

    /// What a step changes: copies of pages, then new keys.
    pub(super) fn apply(self, writes: &[Writes], device: &Device) -> Self {
        let Self {
            mut positions,
            mut last,
            shape,
        } = self;
        let copies = writes.iter().flat_map(|writes| &writes.copies);
        let (mut from, mut to) = (Vec::new(), Vec::new());
        for copy in copies {
            for slot in copy.slots.clone() {
                from.push((copy.from * shape[1] + slot) as i32);
                to.push((copy.to * shape[1] + slot) as i32);
            }
        }
        if !from.is_empty() {
            let count = [from.len()];
            let (from, to) = (ints(from, count, device), ints(to, count, device));
            let (p, l) = (
                positions.clone().select(0, from.clone()),
                last.clone().select(0, from),
            );
            positions = positions.select_assign(0, to.clone(), p, IndexingUpdateOp::Assign);
            last = last.select_assign(0, to, l, IndexingUpdateOp::Assign);
        }
        let (mut slots, mut p, mut l) = (Vec::new(), Vec::new(), Vec::new());
        for writes in writes {
            for row in 0..writes.rows {
                for token in 0..writes.tokens {
                    let at = row * writes.tokens + token;
                    if writes.slots[at] >= 0 {
                        slots.push(writes.slots[at]);
                        p.push((writes.first + token) as i32);
                        l.push(writes.last[at]);
                    }
                }
            }
        }
        if !slots.is_empty() {
            let count = [slots.len()];
            let slots = ints(slots, count, device);
            let (p, l) = (ints(p, count, device), ints(l, count, device));
            positions = positions.select_assign(0, slots.clone(), p, IndexingUpdateOp::Assign);
            last = last.select_assign(0, slots, l, IndexingUpdateOp::Assign);
        }
        Self {
            positions,
            last,
            shape,
        }
    }

    /// For queries of which the first of each sequence is at these positions.
    pub(super) fn of_queries(&self, first: Tensor<1, Int>) -> PagedVisibility {
        PagedVisibility {
            positions: self.positions.clone().reshape(self.shape),
            last: self.last.clone().reshape(self.shape),
            query_positions: first,
        }
    }
}
