//! The masks of a plan's entries, each computed once.

use std::collections::HashMap;

use super::tiling::{EMPTY, Tiling};
use crate::{BlockLayout, BlockMask, FULL};

/// Mask id of a block that one of a tile's block rows does not keep.
pub(super) const ABSENT: u32 = u32::MAX;

/// The distinct masks of a plan's entries.
pub(super) struct TileMasks<'a> {
    table: &'a [BlockMask],
    tiling: Tiling,
    group: usize,
    pub mask_words: usize,
    pub words: Vec<u32>,
    /// By the layout's mask ids and the offsets into them.
    known: HashMap<(Vec<u32>, usize, usize), u32>,
    /// For coarse entries: by block row, block and the layout's mask id.
    known_coarse: HashMap<Vec<[u32; 3]>, u32>,
    /// By content.
    distinct: HashMap<Vec<u32>, u32>,
}

impl<'a> TileMasks<'a> {
    pub fn new(layout: &'a BlockLayout, tiling: Tiling, group: usize) -> Self {
        let mask_words = group.div_ceil(32);
        let mut masks = Self {
            table: layout.masks(),
            tiling,
            group,
            mask_words,
            words: Vec::new(),
            known: HashMap::new(),
            known_coarse: HashMap::new(),
            distinct: HashMap::new(),
        };
        let ones = u32::MAX >> (32 - group.min(32));
        for (id, word) in [(FULL, ones), (EMPTY, 0)] {
            let row = vec![word; tiling.rows * mask_words];
            masks.words.extend_from_slice(&row);
            masks.distinct.insert(row, id);
        }
        masks
    }

    /// Returns the mask id of an entry. `ids` has one mask id per block row of the tile; `row_offset` and `col_offset` are the first row and column within the
    /// block.
    pub fn intern(&mut self, ids: &[u32], row_offset: usize, col_offset: usize) -> u32 {
        if ids.iter().all(|&id| id == FULL) {
            return FULL;
        }
        let key = (ids.to_vec(), row_offset, col_offset);
        if let Some(&id) = self.known.get(&key) {
            return id;
        }
        let Tiling { mainloop, rows, .. } = self.tiling;
        let height = rows / ids.len();
        let mut bits = vec![0u32; rows * self.mask_words];
        for row in 0..rows {
            let id = ids[row / height];
            if id == ABSENT {
                continue;
            }
            let mask = &self.table[id as usize];
            for col in 0..self.group {
                let (r, c) = (row % height + row_offset, col + col_offset);
                let allowed = mainloop.allows(mask, r, c);
                if allowed {
                    bits[row * self.mask_words + col / 32] |= 1 << (col % 32);
                }
            }
        }
        let id = self.add(bits);
        self.known.insert(key, id);
        id
    }

    /// Returns the mask id of a coarse entry from its masked blocks: block row in the tile, block in the entry, and mask id. All pairs of all
    /// other blocks are set, kept or not, since the entry's bits say which blocks are kept.
    pub fn intern_coarse(&mut self, blocks: Vec<[u32; 3]>) -> u32 {
        if blocks.is_empty() {
            return FULL;
        }
        if let Some(&id) = self.known_coarse.get(&blocks) {
            return id;
        }
        let mut bits = vec![u32::MAX; self.tiling.rows * self.mask_words];
        for &[line, block, id] in &blocks {
            let mask = &self.table[id as usize];
            let b = mask.block_size();
            for row in 0..b {
                let at = (line as usize * b + row) * self.mask_words;
                for col in 0..b {
                    let allowed = self.tiling.mainloop.allows(mask, row, col);
                    if !allowed {
                        let col = block as usize * b + col;
                        bits[at + col / 32] &= !(1 << (col % 32));
                    }
                }
            }
        }
        let id = self.add(bits);
        self.known_coarse.insert(blocks, id);
        id
    }

    /// Returns the id of a mask, added if it is new.
    fn add(&mut self, bits: Vec<u32>) -> u32 {
        let fresh = self.distinct.len() as u32;
        match self.distinct.get(&bits) {
            Some(&id) => id,
            None => {
                self.words.extend_from_slice(&bits);
                self.distinct.insert(bits, fresh);
                fresh
            }
        }
    }
}
