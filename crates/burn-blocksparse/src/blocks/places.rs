//! Where the kept blocks of a layout are, for one batch: host lists that the products gather by.

use std::ops::Range;
use std::sync::Arc;

use blocksparse::internal::Slots;
use blocksparse::{BlockLayout, FULL};

use crate::weights;

/// The kept blocks, batch entry by batch entry, head by head, row by row, key blocks ascending.
///
/// A *tile* is `block_size` rows of a `[batch, heads, seq, dim]` tensor; tiles count through heads and batch entries.
pub(super) struct Places {
    /// The queries' tile of each block.
    pub q_tiles: Vec<i32>,
    /// The keys' tile of each block. Heads that share key heads share these.
    pub kv_tiles: Vec<i32>,
    /// The mask of each block: an index into the layout's table.
    pub masks: Vec<i32>,
    /// Number of tiles of the queries, and of the keys.
    pub tiles: [usize; 2],
    /// Kept blocks before each batch entry: `[batch + 1]`.
    entries: Vec<usize>,
    /// Blocks that are stored for each batch entry; the fullest keeps as many.
    stored: usize,
    /// Chunks that were asked for before.
    chunks: Slots<(Side, usize), Option<Arc<[Chunk]>>>,
}

/// What a layout keeps of its calls, by batch entries and key heads.
type Known = Slots<[usize; 2], Option<Arc<Places>>>;

/// Which sides' tiles a product has a row of blocks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Side {
    Query,
    Key,
}

/// Tiles with about equally many blocks, which are computed together.
pub(super) struct Chunk {
    /// The tiles.
    pub tiles: Vec<i32>,
    /// Blocks of each tile: `L`.
    pub length: usize,
    /// `L` blocks for each tile. A tile with fewer repeats its last.
    pub blocks: Vec<i32>,
    /// True for blocks that are such repetitions. Empty: none.
    pub repeated: Vec<bool>,
}

impl Places {
    /// The places of a layout, which keeps them.
    pub fn of(layout: &BlockLayout, batch: usize, kv_heads: usize) -> Arc<Self> {
        let known = layout.attachment(Known::default);
        let new = || Arc::new(Self::new(layout, batch, kv_heads));
        known.get_or_make([batch, kv_heads], new)
    }

    fn new(layout: &BlockLayout, batch: usize, kv_heads: usize) -> Self {
        let heads = layout.heads();
        let (q_blocks, kv_blocks) = (layout.q_blocks(), layout.kv_blocks());
        let [_, stored, ..] = weights::shape(layout, batch);
        let mut places = Self {
            q_tiles: Vec::new(),
            kv_tiles: Vec::new(),
            masks: Vec::new(),
            tiles: [batch * heads * q_blocks, batch * kv_heads * kv_blocks],
            entries: vec![0],
            stored,
            chunks: Slots::default(),
        };
        for entry in 0..batch {
            for head in 0..heads {
                let kv_head = entry * kv_heads + head / (heads / kv_heads);
                let pattern = layout.pattern_of(entry, head);
                for q_block in 0..q_blocks {
                    let q_tile = (entry * heads + head) * q_blocks + q_block;
                    for kept in layout.row(pattern, q_block) {
                        let kv_tile = kv_head * kv_blocks + kept.block as usize;
                        places.q_tiles.push(q_tile as i32);
                        places.kv_tiles.push(kv_tile as i32);
                        places.masks.push(kept.mask as i32);
                    }
                }
            }
            places.entries.push(places.masks.len());
        }
        places
    }

    /// Number of kept blocks.
    pub fn len(&self) -> usize {
        self.masks.len()
    }

    /// Returns whether some of these blocks have masked pairs.
    pub fn is_partial(&self, blocks: Range<usize>) -> bool {
        self.masks[blocks].iter().any(|&mask| mask != FULL as i32)
    }

    /// Where the kept blocks are stored. None: they are all that is stored, in this order.
    pub fn stored_places(&self) -> Option<Vec<i32>> {
        let entries = self.entries.windows(2).enumerate();
        self.has_filler().then(|| {
            let place = |(entry, kept): (usize, &[usize])| {
                let first = entry * self.stored;
                first..first + kept[1] - kept[0]
            };
            entries.flat_map(place).map(|p| p as i32).collect()
        })
    }

    /// The kept block of each stored place, or `len()` where nothing is retained. None: as above.
    pub fn kept_places(&self) -> Option<Vec<i32>> {
        let entries = self.entries.windows(2);
        self.has_filler().then(|| {
            let blocks = |kept: &[usize]| {
                let filler = self.stored - (kept[1] - kept[0]);
                (kept[0]..kept[1]).chain(std::iter::repeat_n(self.len(), filler))
            };
            entries.flat_map(blocks).map(|p| p as i32).collect()
        })
    }

    /// The queries' tile of each stored place, the first one where nothing is retained.
    pub fn stored_q_tiles(&self) -> Vec<i32> {
        match self.kept_places() {
            None => self.q_tiles.clone(),
            Some(kept) => (kept.iter())
                .map(|&block| self.q_tiles.get(block as usize).copied().unwrap_or(0))
                .collect(),
        }
    }

    fn has_filler(&self) -> bool {
        self.len() != self.stored * (self.entries.len() - 1)
    }

    /// The blocks of each tile of a side, longest lists first, in chunks of at most `blocks` blocks
    /// (one tile may have more). Lists of a chunk differ by a factor of two at most. Tiles without blocks are in none.
    pub fn chunks(&self, side: Side, blocks: usize) -> Arc<[Chunk]> {
        let new = || self.new_chunks(side, blocks).into();
        self.chunks.get_or_make((side, blocks), new)
    }

    fn new_chunks(&self, side: Side, blocks: usize) -> Vec<Chunk> {
        let lists = self.lists(side);
        let mut order: Vec<usize> = (0..lists.len())
            .filter(|&tile| !lists[tile].is_empty())
            .collect();
        order.sort_by_key(|&tile| std::cmp::Reverse(lists[tile].len()));
        let mut chunks = Vec::new();
        let mut rest = &order[..];
        while let Some(&first) = rest.first() {
            let length = lists[first].len();
            let fit = (blocks / length).max(1);
            let alike = rest.partition_point(|&tile| lists[tile].len() * 2 >= length);
            let (tiles, later) = rest.split_at(fit.min(alike));
            chunks.push(Chunk::new(&lists, tiles, length));
            rest = later;
        }
        chunks
    }

    /// The blocks of each tile of a side, in order.
    fn lists(&self, side: Side) -> Vec<Vec<i32>> {
        let (tile_of, tiles) = match side {
            Side::Query => (&self.q_tiles, self.tiles[0]),
            Side::Key => (&self.kv_tiles, self.tiles[1]),
        };
        let mut lists = vec![Vec::new(); tiles];
        for (block, &tile) in (0..).zip(tile_of) {
            lists[tile as usize].push(block);
        }
        lists
    }
}

impl Chunk {
    /// `length` is that of the longest list, the first.
    fn new(lists: &[Vec<i32>], tiles: &[usize], length: usize) -> Self {
        let mut chunk = Self {
            tiles: tiles.iter().map(|&tile| tile as i32).collect(),
            length,
            blocks: Vec::with_capacity(tiles.len() * length),
            repeated: Vec::new(),
        };
        for &tile in tiles {
            let list = &lists[tile];
            let last = list[list.len() - 1];
            chunk.blocks.extend(list);
            (chunk.blocks).extend(std::iter::repeat_n(last, length - list.len()));
        }
        let shortest = tiles[tiles.len() - 1];
        if lists[shortest].len() < length {
            let repeated = |&tile: &usize| {
                let listed = lists[tile].len();
                (0..length).map(move |place| place >= listed)
            };
            chunk.repeated = tiles.iter().flat_map(repeated).collect();
        }
        chunk
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use blocksparse::Pattern;

    /// Every block is in its tile's list once, in order; what is listed besides is a repetition.
    #[test]
    fn chunks_list_every_block_once() {
        let nothing = Pattern::from_fn("nothing", |_, _, _| false);
        let layouts = [Pattern::causal(), nothing, Pattern::strided(24)]
            .map(|pattern| pattern.layout(4, 100, 8).unwrap());
        let stacked = BlockLayout::stack_batch(&layouts).unwrap();
        let places = Places::new(&stacked, 3, 2);
        assert_eq!(places.len(), stacked.blocks());
        for (side, limit) in [Side::Query, Side::Key]
            .into_iter()
            .flat_map(|side| [1, 5, 40, 10_000].map(|limit| (side, limit)))
        {
            let tile_of = match side {
                Side::Query => &places.q_tiles,
                Side::Key => &places.kv_tiles,
            };
            let mut listed = vec![0; places.len()];
            for chunk in places.chunks(side, limit).iter() {
                let tiles = chunk.tiles.len();
                assert!(
                    tiles == 1 || tiles * chunk.length <= limit,
                    "{side:?}, {limit}"
                );
                assert_eq!(chunk.blocks.len(), tiles * chunk.length);
                let lists = chunk.blocks.chunks(chunk.length).enumerate();
                for (tile, list) in lists {
                    let repeated = |place: usize| {
                        let at = tile * chunk.length + place;
                        chunk.repeated.get(at).copied().unwrap_or(false)
                    };
                    for (place, &block) in list.iter().enumerate() {
                        assert_eq!(tile_of[block as usize], chunk.tiles[tile]);
                        match repeated(place) {
                            true => assert_eq!(block, list[place - 1]),
                            false => listed[block as usize] += 1,
                        }
                        let before = place.checked_sub(1).map(|before| list[before]);
                        let ascends = before.is_none_or(|before| before < block);
                        assert_eq!(ascends, !repeated(place));
                    }
                    let own = (0..list.len()).filter(|&place| !repeated(place)).count();
                    assert!(own * 2 >= chunk.length);
                }
            }
            assert!(listed.iter().all(|&times| times == 1), "{side:?}, {limit}");
        }
    }

    /// Kept to stored and back.
    #[test]
    fn filler_of_per_batch_layouts() {
        let layouts =
            [Pattern::local(1), Pattern::causal()].map(|pattern| pattern.layout(1, 24, 8).unwrap());
        let stacked = BlockLayout::stack_batch(&layouts).unwrap();
        let places = Places::new(&stacked, 2, 1);
        // Three blocks and six, so six are stored for each entry.
        let stored = places.stored_places().unwrap();
        assert_eq!(stored, [0, 1, 2, 6, 7, 8, 9, 10, 11]);
        let kept = places.kept_places().unwrap();
        assert_eq!(kept, [0, 1, 2, 9, 9, 9, 3, 4, 5, 6, 7, 8]);
        let even = Places::new(&layouts[1], 2, 1);
        assert!(even.stored_places().is_none() && even.kept_places().is_none());
    }
}
