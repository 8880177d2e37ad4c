//! Groups query tiles so that each group is one batch of equally shaped matrices.

use std::collections::BTreeMap;

use blocksparse::{BlockLayout, BlockMask, FULL};

/// Query tiles (one per distinct pattern and block row) with the same number of key blocks.
#[derive(Debug)]
pub(crate) struct Group {
    pub shape: GroupShape,
    pub tiles: Vec<Tile>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct GroupShape {
    /// Number of key blocks of each tile.
    pub entries: usize,
    /// Number of leading key blocks that need their element mask.
    pub partial: usize,
    /// True if some query of a tile has no key.
    pub empty_rows: bool,
}

#[derive(Debug)]
pub(crate) struct Tile {
    pub pattern: usize,
    pub q_block: usize,
    /// Partial blocks, then full ones, each ascending.
    pub entries: Vec<TileEntry>,
    /// Whether each query of the tile has no key. Empty unless the group has such rows.
    pub empty_rows: Vec<bool>,
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct TileEntry {
    pub kv_block: u32,
    pub mask: u32,
    /// Index within the row, with key blocks ascending. Stored weights use it.
    pub rank: u32,
}

/// The groups of a layout in a fixed order. Block rows without key blocks are in no group.
#[derive(Debug)]
pub(crate) struct Plan {
    pub groups: Vec<Group>,
}

impl Plan {
    pub fn new(layout: &BlockLayout) -> Self {
        let mut groups: BTreeMap<GroupShape, Vec<Tile>> = BTreeMap::new();
        for pattern in 0..layout.num_patterns() {
            for q_block in 0..layout.q_blocks() {
                let row = layout.row(pattern, q_block);
                if row.is_empty() {
                    continue;
                }
                let mut entries: Vec<TileEntry> = (row.iter().enumerate())
                    .map(|(rank, entry)| TileEntry {
                        kv_block: entry.block,
                        mask: entry.mask,
                        rank: rank as u32,
                    })
                    .collect();
                entries.sort_by_key(|entry| entry.mask == FULL);
                let partial = entries.iter().filter(|entry| entry.mask != FULL).count();
                let mut empty_rows = Vec::new();
                if partial == entries.len() {
                    empty_rows = empty_rows_of(layout.masks(), &entries, layout.block_size());
                    if !empty_rows.contains(&true) {
                        empty_rows.clear();
                    }
                }
                let shape = GroupShape {
                    entries: entries.len(),
                    partial,
                    empty_rows: !empty_rows.is_empty(),
                };
                groups.entry(shape).or_default().push(Tile {
                    pattern,
                    q_block,
                    entries,
                    empty_rows,
                });
            }
        }
        let groups = groups.into_iter();
        Self {
            groups: groups
                .map(|(shape, tiles)| Group { shape, tiles })
                .collect(),
        }
    }
}

fn empty_rows_of(masks: &[BlockMask], entries: &[TileEntry], b: usize) -> Vec<bool> {
    (0..b)
        .map(|row| {
            !entries.iter().any(|entry| {
                let mask = &masks[entry.mask as usize];
                (0..b).any(|column| mask.get(row, column))
            })
        })
        .collect()
}
