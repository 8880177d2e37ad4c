//! Positions of the kept blocks of a layout for a batch: index lists by which the products gather.

use std::ops::Range;
use std::sync::Arc;

use blocksparse::internal::Slots;
use blocksparse::{BlockLayout, FULL};

use crate::weights;

/// The kept blocks, ordered by batch entry, head, block row and key block.
///
/// A *tile* is `block_size` rows of a `[batch, heads, seq, dim]` tensor. Tiles are numbered across heads and batch entries.
pub(super) struct Places {
    /// Query tile of each block.
    pub q_tiles: Vec<i32>,
    /// Key tile of each block. Heads that share a key head share key tiles.
    pub kv_tiles: Vec<i32>,
    /// Mask of each block: an index into the layout's table.
    pub masks: Vec<i32>,
    /// Number of query tiles and of key tiles.
    pub tiles: [usize; 2],
    /// Number of kept blocks before each batch entry: `[batch + 1]`.
    entries: Vec<usize>,
    /// Number of blocks stored per batch entry: the number of kept blocks of the fullest.
    stored: usize,
    /// Cached chunks.
    chunks: Slots<(Side, usize), Option<Arc<[Chunk]>>>,
}

/// Cache attached to a layout, by batch size and number of key heads.
type Known = Slots<[usize; 2], Option<Arc<Places>>>;

/// The side whose tiles each have a list of blocks in a product.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Side {
    Query,
    Key,
}

/// Tiles with similar numbers of blocks, which are computed together.
pub(super) struct Chunk {
    /// The tiles.
    pub tiles: Vec<i32>,
    /// Number of blocks per tile: `L`.
    pub length: usize,
    /// `L` blocks per tile. A tile with fewer repeats its last block.
    pub blocks: Vec<i32>,
    /// True for repeated blocks. Empty if there are none.
    pub repeated: Vec<bool>,
}

impl Places {
    /// Returns the places of a layout, cached in the layout.
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

    /// Returns the number of kept blocks.
    pub fn len(&self) -> usize {
        self.masks.len()
    }

    /// Returns whether some of these blocks have masked pairs.
    pub fn is_partial(&self, blocks: Range<usize>) -> bool {
        self.masks[blocks].iter().any(|&mask| mask != FULL as i32)
    }

    /// Returns the stored index of each kept block, or `None` if exactly the kept blocks are stored in this order.
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

    /// Returns the kept block of each stored index, or `len()` for padding. `None` if exactly the kept blocks are stored in this order.
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

    /// Returns the query tile of each stored index, or tile 0 for padding.
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

    /// Returns the blocks of each tile of a side, longest lists first, in chunks of at most `blocks` blocks (one tile may have more). The lists of a chunk
    /// differ by at most a factor of two. Tiles without blocks are omitted.
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

    /// Returns the blocks of each tile of a side, in order.
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
    /// Creates a chunk. `length` is the length of its first and longest list.
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

    /// Every block is listed once and in order for its tile; all other entries are repetitions.
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

    /// Conversion between kept and stored indices.
    #[test]
    fn filler_of_per_batch_layouts() {
        let layouts =
            [Pattern::local(1), Pattern::causal()].map(|pattern| pattern.layout(1, 24, 8).unwrap());
        let stacked = BlockLayout::stack_batch(&layouts).unwrap();
        let places = Places::new(&stacked, 2, 1);
        // The entries keep three and six blocks, so six are stored for each.
        let stored = places.stored_places().unwrap();
        assert_eq!(stored, [0, 1, 2, 6, 7, 8, 9, 10, 11]);
        let kept = places.kept_places().unwrap();
        assert_eq!(kept, [0, 1, 2, 9, 9, 9, 3, 4, 5, 6, 7, 8]);
        let even = Places::new(&layouts[1], 2, 1);
        assert!(even.stored_places().is_none() && even.kept_places().is_none());
    }
}
