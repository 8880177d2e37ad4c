//! Changes to the tensors that a step requires.

use std::ops::Range;

/// A slot of a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Slot {
    /// The page.
    pub page: usize,
    /// The slot in it.
    pub slot: usize,
}

/// A stored key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SlotKey {
    /// Its slot.
    pub slot: Slot,
    /// Its position in the sequence.
    pub position: usize,
    /// The last query that attends to it; [`ALWAYS`](super::ALWAYS) if every later query may.
    pub last: i32,
}

/// Slots of a page that are copied to the same slots of another one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PageCopy {
    /// Source page, which other sequences keep.
    pub from: usize,
    /// Destination page, which this sequence writes from now on.
    pub to: usize,
    /// The slots in use.
    pub slots: Range<usize>,
}

/// A changed entry of a sequence's page table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TableChange {
    /// The table row of the sequence.
    pub row: usize,
    /// The entry of that row.
    pub entry: usize,
    /// The page that it now references.
    pub page: usize,
}

/// Slots of the keys of new tokens. First do all `copies`, then the writes; apply the `changes` before a kernel reads the table. Entries that are no
/// longer in use are not listed: the spans tell which ones are.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Writes {
    /// Position of the first new token.
    pub first: usize,
    /// Number of new tokens.
    pub tokens: usize,
    /// Number of table rows of the sequence.
    pub rows: usize,
    /// Slots of a page.
    pub page_size: usize,
    /// `[rows, tokens]`: `page · page_size + slot` of each token's key; −1 if it is not stored.
    pub slots: Vec<i32>,
    /// `[rows, tokens]`: the last query that attends to each key, [`ALWAYS`](super::ALWAYS) or [`NEVER`](super::NEVER).
    pub last: Vec<i32>,
    /// Pages that became free because the step evicted their keys; the step may take them again. They need no treatment. Tests fill them with NaN
    /// before the copies.
    pub freed: Vec<usize>,
    /// Pages to copy before anything is written.
    pub copies: Vec<PageCopy>,
    /// Changed entries of the page table.
    pub changes: Vec<TableChange>,
    /// Width that a table must have for this sequence: a narrower table has to be rebuilt.
    pub entries: usize,
}

impl Writes {
    /// Returns the slot of new token `token`'s key, counted from the first new one; None if it is not stored.
    ///
    /// # Panics
    /// If the row or token does not exist.
    pub fn slot(&self, row: usize, token: usize) -> Option<Slot> {
        assert!(row < self.rows && token < self.tokens);
        let slot = usize::try_from(self.slots[row * self.tokens + token]).ok()?;
        Some(Slot {
            page: slot / self.page_size,
            slot: slot % self.page_size,
        })
    }
}
