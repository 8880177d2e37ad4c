//! The entries of a tile: the merged blocks of its rows.

use super::cluster::clusters;
use super::masks::{ABSENT, TileMasks};
use super::tiling::{BIT_WORDS, EMPTY, MASKED_STEP, Mainloop, NO_VISIT, Tiling};
use crate::layout::entries;
use crate::{BlockLayout, Entry, FULL};

#[derive(Clone, Copy)]
struct TileEntry {
    at: u32,
    mask: u32,
    place: u32,
    /// Bits of a coarse entry.
    bits: [u32; BIT_WORDS],
}

/// The entries of a tile.
#[derive(Default)]
pub(super) struct TileEntries {
    masked: Vec<TileEntry>,
    full: Vec<TileEntry>,
}

impl TileEntries {
    /// Appends the slices of a block of width `b`, each `group` wide, with the masks at their columns.
    fn push(
        &mut self,
        block: u32,
        b: usize,
        group: usize,
        place: u32,
        mut mask_at: impl FnMut(usize) -> u32,
    ) {
        for slice in 0..b / group {
            let entry = TileEntry {
                at: block * (b / group) as u32 + slice as u32,
                mask: mask_at(slice * group),
                place,
                bits: [0; BIT_WORDS],
            };
            self.push_entry(entry);
        }
    }

    fn push_entry(&mut self, entry: TileEntry) {
        match entry.mask {
            FULL => self.full.push(entry),
            EMPTY => {}
            _ => self.masked.push(entry),
        }
    }

    /// Returns the words of a tile's entries, with padding entries and masked entries first, and the number of steps whose masks matter.
    pub fn masked_first(self, per_step: usize, tiling: Tiling) -> (Vec<u32>, usize) {
        let (masked, all) = (self.masked.len(), self.masked.len() + self.full.len());
        let filler = all.next_multiple_of(per_step) - all;
        let fill = TileEntry {
            at: 0,
            mask: EMPTY,
            place: 0,
            bits: [0; BIT_WORDS],
        };
        let mut words = Vec::with_capacity((filler + all) * tiling.entry_words());
        let entries = std::iter::repeat_n(fill, filler).chain(self.masked);
        for entry in entries.chain(self.full) {
            words.extend([entry.at, entry.mask]);
            if tiling.places {
                words.push(entry.place);
            }
            if tiling.coarse {
                words.extend(entry.bits);
            }
        }
        (words, (filler + masked).div_ceil(per_step))
    }

    /// Returns the words of a tile's entries without their visits, from the last entry to the first, padded at the end.
    pub fn in_visiting_order(self, per_step: usize, tiling: Tiling) -> Vec<u32> {
        let mut all: Vec<TileEntry> = self.masked.into_iter().chain(self.full).collect();
        all.sort_by_key(|entry| std::cmp::Reverse(entry.at));
        let length = all.len().next_multiple_of(per_step) * tiling.entry_words();
        let mut words = Vec::with_capacity(length);
        for step in all.chunks(per_step) {
            let masked = step.len() < per_step || step.iter().any(|entry| entry.mask != FULL);
            let flag = if masked { MASKED_STEP } else { 0 };
            for (k, entry) in step.iter().enumerate() {
                words.extend([entry.at, entry.mask, if k == 0 { flag } else { 0 }]);
                if tiling.coarse {
                    words.extend(entry.bits);
                }
            }
            for _ in step.len()..per_step {
                words.extend([0, EMPTY, NO_VISIT]);
            }
        }
        words
    }
}

/// The rows (or columns) of one head pattern.
pub(super) struct Source<'a> {
    layout: &'a BlockLayout,
    tiling: Tiling,
    pattern: usize,
    /// The block rows of each tile if similar rows are clustered.
    pub clusters: Vec<Vec<u32>>,
    /// The places of each column's blocks, in a pass over columns with places.
    column_places: Vec<Vec<u32>>,
}

impl<'a> Source<'a> {
    pub fn new(layout: &'a BlockLayout, tiling: Tiling, pattern: usize) -> Self {
        let mut column_places = Vec::new();
        if tiling.places && tiling.mainloop == Mainloop::Columns {
            column_places = vec![Vec::new(); layout.kv_blocks()];
            let mut place = 0;
            for q_block in 0..layout.q_blocks() {
                for entry in layout.row(pattern, q_block) {
                    column_places[entry.block as usize].push(place);
                    place += 1;
                }
            }
        }
        let clusters = match tiling.clustered {
            true => clusters(layout, tiling.mainloop, pattern, tiling.height(layout)),
            false => Vec::new(),
        };
        Self {
            layout,
            tiling,
            pattern,
            clusters,
            column_places,
        }
    }

    pub fn line(&self, block: usize) -> Vec<Entry> {
        let mainloop = self.tiling.mainloop;
        entries(mainloop.runs(self.layout, self.pattern, block))
    }

    pub fn lines(&self) -> usize {
        self.tiling.mainloop.blocks(self.layout)[0]
    }

    /// Returns the blocks of a tile's block rows, row by row.
    pub fn blocks(&self, tile: usize) -> impl Iterator<Item = Entry> {
        let first = tile * self.tiling.rows / self.layout.block_size();
        let lines = match self.clusters.get(tile) {
            Some(lines) => lines.clone(),
            None => (first as u32..)
                .take(self.tiling.height(self.layout))
                .collect(),
        };
        (lines.into_iter())
            .filter(|&line| (line as usize) < self.lines())
            .flat_map(|line| self.line(line as usize))
    }

    /// Returns the entries of a tile.
    pub fn tile(&self, tile: usize, group: usize, masks: &mut TileMasks) -> TileEntries {
        let b = self.layout.block_size();
        let rows = self.tiling.rows;
        let first = tile * rows / b;
        if let Some(lines) = self.clusters.get(tile) {
            return self.union(lines, group, masks);
        }
        if self.tiling.coarse {
            return self.coarse(first, masks);
        }
        if rows > b {
            let lines: Vec<u32> = (first..first + rows / b).map(|line| line as u32).collect();
            return self.union(&lines, group, masks);
        }
        let mut found = TileEntries::default();
        let start = match self.tiling.mainloop {
            Mainloop::Rows => self.layout.row_offsets(self.pattern)[first] as u32,
            Mainloop::Columns => 0,
        };
        for (k, entry) in self.line(first).into_iter().enumerate() {
            let place = match self.column_places.get(first) {
                Some(places) => places[k],
                None => start + k as u32,
            };
            found.push(entry.block, b, group, place, |col| {
                masks.intern(&[entry.mask], tile * rows % b, col)
            });
        }
        found
    }

    /// Returns the coarse entries of the tile whose first block row is `first`: the steps of adjacent positions in which some row keeps a block.
    fn coarse(&self, first: usize, masks: &mut TileMasks) -> TileEntries {
        let b = self.layout.block_size();
        let (height, per_entry) = (self.tiling.rows / b, self.tiling.cols / b);
        let lines = (first..self.lines().min(first + height)).map(|line| self.line(line));
        let lines: Vec<Vec<Entry>> = lines.collect();
        let mut found = TileEntries::default();
        let mut next = vec![0; lines.len()];
        loop {
            let heads = lines.iter().zip(&next).filter_map(|(line, &k)| line.get(k));
            let Some(block) = heads.map(|entry| entry.block).min() else {
                return found;
            };
            let at = block / per_entry as u32;
            let (mut bits, mut parts) = ([0; BIT_WORDS], Vec::new());
            for (row, (line, k)) in lines.iter().zip(&mut next).enumerate() {
                while let Some(entry) = line.get(*k)
                    && entry.block / per_entry as u32 == at
                {
                    let col = entry.block as usize % per_entry;
                    let bit = row * per_entry + col;
                    bits[bit / 32] |= 1 << (bit % 32);
                    if entry.mask != FULL {
                        parts.push([row as u32, col as u32, entry.mask]);
                    }
                    *k += 1;
                }
            }
            found.push_entry(TileEntry {
                at,
                mask: masks.intern_coarse(parts),
                place: 0,
                bits,
            });
        }
    }

    /// Returns the merged entries of a tile with these block rows.
    fn union(&self, lines: &[u32], group: usize, masks: &mut TileMasks) -> TileEntries {
        let b = self.layout.block_size();
        let mut found = TileEntries::default();
        let height = lines.len();
        let lines: Vec<Vec<Entry>> = lines
            .iter()
            .map(|&line| match (line as usize) < self.lines() {
                true => self.line(line as usize),
                false => Vec::new(),
            })
            .collect();
        let mut next = vec![0; height];
        let mut ids = vec![ABSENT; height];
        loop {
            let heads = lines.iter().zip(&next).filter_map(|(line, &k)| line.get(k));
            let Some(block) = heads.map(|entry| entry.block).min() else {
                return found;
            };
            for ((line, k), id) in lines.iter().zip(&mut next).zip(&mut ids) {
                *id = match line.get(*k) {
                    Some(entry) if entry.block == block => {
                        *k += 1;
                        entry.mask
                    }
                    _ => ABSENT,
                };
            }
            found.push(block, b, group, 0, |col| masks.intern(&ids, 0, col));
        }
    }
}
