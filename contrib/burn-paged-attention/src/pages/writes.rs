//! What a step asks of the tensors.

use std::ops::Range;

/// A slot of a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Slot {
    /// The page.
    pub page: usize,
    /// The slot in it.
    pub slot: usize,
}

/// A key that is stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SlotKey {
    /// Its slot.
    pub slot: Slot,
    /// Its position in the sequence.
    pub position: usize,
    /// The last query that attends to it, [`ALWAYS`](super::ALWAYS) if there is always a later one.
    pub last: i32,
}

/// Slots of a page that are copied to the same slots of another one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PageCopy {
    /// The page that other sequences keep.
    pub from: usize,
    /// The page that is written from now on.
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
    /// The page it names now.
    pub page: usize,
}

/// Slots of the keys of new tokens. First do all `copies`, then the writes; apply the `changes` before a kernel reads the table. Entries that are no
/// longer in use are not listed: the spans say which ones are.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Writes {
    /// The position of the first new token.
    pub first: usize,
    /// New tokens.
    pub tokens: usize,
    /// Table rows of the sequence.
    pub rows: usize,
    /// Slots of a page.
    pub page_size: usize,
    /// `[rows, tokens]`: `page · page_size + slot` of each token's key, −1 where it is not stored.
    pub slots: Vec<i32>,
    /// `[rows, tokens]`: the last query that attends to each key, [`ALWAYS`](super::ALWAYS) or [`NEVER`](super::NEVER).
    pub last: Vec<i32>,
    /// Pages that nobody names any more since the step let their keys go. It may take them again. Nothing has to be done with them; a test fills them with
    /// NaN before the copies.
    pub freed: Vec<usize>,
    /// Pages that are copied before anything is written.
    pub copies: Vec<PageCopy>,
    /// Entries of the page table that changed.
    pub changes: Vec<TableChange>,
    /// Entries that each row of a table must have for this sequence: a table that is narrower has to be made anew.
    pub entries: usize,
}

impl Writes {
    /// Where the key of a new token goes, counted from the first one; none if it is not stored.
    ///
    /// # Panics
    /// If there is no such row or token.
    pub fn slot(&self, row: usize, token: usize) -> Option<Slot> {
        assert!(row < self.rows && token < self.tokens);
        let slot = usize::try_from(self.slots[row * self.tokens + token]).ok()?;
        Some(Slot {
            page: slot / self.page_size,
            slot: slot % self.page_size,
        })
    }
}
