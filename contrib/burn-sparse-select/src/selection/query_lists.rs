//! Blocks selected per query, and the inverse lists: the queries that selected each block.

use std::ops::Range;

use blocksparse::{Always, ScoreGrid};

use crate::selection::estimator::EstimateGrid;
use crate::selection::ops::SelectionOps;
use crate::selection::parts::{checked_overlap, in_steps, joined, overlap_of};
use crate::selection::values::{QueryTiles, TopKBlocks};
use burn_blocksparse::internal::prelude::*;

/// Upper bound of the scores in memory at a time. [`FEWEST_ROWS`] queries of every head may exceed it.
const SLAB_SCORES: usize = 1 << 24;

/// Lower bound of the queries whose scores are in memory at a time.
const FEWEST_ROWS: usize = 64;

/// Blocks that each query selected in addition to the forced ones, listed by query and by block. By block, each head has a sequence of places (slots of packed
/// queries) in tiles of `tile`: the queries that selected a block have adjacent places, in order, and the block's last tile is padded. All tensors are i32 on
/// the device, without autodiff; −1 marks an empty entry. `lists` is the number of query heads, or of KV heads if heads share a selection.
///
/// The number of places follows from the sizes alone: if `n` queries select `c` blocks in all, from `m` blocks, there are at most `(c + (tile − 1) · m) / tile`
/// tiles. Unused tiles come last.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct SelectedBlocks {
    /// Number of keys of a block.
    pub block: usize,
    /// Number of places of a tile.
    pub tile: usize,
    /// Selected blocks of each query, in descending order of scores: `[batch, lists, queries, most]`.
    pub blocks: Tensor<4, Int>,
    /// Place of each selected block: `[batch, lists, queries, most]`.
    pub places: Tensor<4, Int>,
    /// Selection at each place, `query · most` plus its index in the query's list: `[batch, lists, places]`.
    pub choices: Tensor<3, Int>,
    /// Query at each place: `[batch, lists, places]`.
    pub queries: Tensor<3, Int>,
    /// Block of each tile: `[batch, lists, tiles]`.
    pub tile_blocks: Tensor<3, Int>,
    /// Expected overlap of the lists of adjacent queries.
    overlap: f64,
}

/// Sizes of the lists of a call.
pub(crate) struct ListSizes {
    grid: ScoreGrid,
    forced: Always,
    /// Upper bound of the blocks that a query selects.
    most: usize,
    /// Number of tiles of a head.
    tiles: usize,
    tile: usize,
}

impl ListSizes {
    /// Computes the sizes for queries that keep up to `keep` blocks, or all forced ones if those are more; the query's own block is forced. `None` if no query
    /// has a block to select.
    ///
    /// Candidates are the blocks between the first and the local forced ones, so scores never affect forced blocks. A query that sees only forced blocks
    /// selects none.
    pub fn new(grid: ScoreGrid, keep: usize, forced: Always) -> Option<Self> {
        let tile = tile(grid.block);
        // Queries at negative positions see nothing.
        let first = grid.seq_kv.saturating_sub(grid.seq_q);
        let last = (grid.seq_kv - 1) / grid.block;
        let taken = forced.first.saturating_add(forced.local);
        let free = |own: usize| (own + 1).saturating_sub(taken);
        let blocks = free(last);
        let most = blocks.min(keep.saturating_sub(taken));
        // All queries of a block have the same candidates.
        let queries = |block: usize| {
            let start = (block * grid.block).max(first);
            ((block + 1) * grid.block)
                .min(grid.seq_kv)
                .saturating_sub(start)
        };
        let choices: usize = (0..=last)
            .map(|own| queries(own) * free(own).min(most))
            .sum();
        (choices > 0).then(|| Self {
            grid,
            forced,
            most,
            tiles: (choices + (tile - 1) * blocks) / tile,
            tile,
        })
    }
}

/// Returns the number of queries of a tile, and of keys of a block in the layout of tiles. At most as wide as a block of keys, which limits padding; not too
/// narrow, which keeps a tile's list of key blocks short.
fn tile(block: usize) -> usize {
    match block {
        0..64 => block,
        64..=512 => 64,
        _ => 128,
    }
}

impl ListSizes {
    /// Returns how many queries have their scores in memory at a time, with `lists` lists over the batch.
    pub(crate) fn rows_at_a_time(&self, lists: usize) -> usize {
        (SLAB_SCORES / (lists * self.grid.blocks())).max(FEWEST_ROWS)
    }

    pub(crate) fn most(&self) -> usize {
        self.most
    }

    /// Returns the range of keys that covers the candidates of all queries, and some keys after them. In a call with these keys alone, the first forced blocks
    /// are missing, and so are all local ones except the earliest, which follows a query's candidates. Blocks count from the first that is not forced.
    pub(crate) fn between_forced(&self) -> Range<usize> {
        let Always { first, local } = self.forced;
        let block = self.grid.block;
        first * block..self.grid.seq_kv - (local - 1) * block
    }

    /// Converts block indices that count from the first block that is not forced into indices of the call.
    pub(crate) fn of_call(&self, picks: Tensor<4, Int>) -> Tensor<4, Int> {
        match self.forced.first {
            0 => picks,
            first => {
                let none = picks.clone().lower_elem(0);
                picks.add_scalar(first as i32).mask_fill(none, -1)
            }
        }
    }
}

/// Sizes of existing lists.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ListsShape {
    /// Number of heads with lists of their own.
    pub lists: usize,
    /// Upper bound of the blocks that a query selects.
    pub most: usize,
    /// Number of keys of a block.
    pub block: usize,
    /// Number of tiles of packed queries.
    pub tiles: usize,
    /// Number of places of a tile.
    pub tile: usize,
    /// Expected overlap of the lists of adjacent queries.
    pub overlap: f64,
}

impl SelectedBlocks {
    /// Sets the expected overlap of the lists of adjacent queries, from 0 (disjoint) to 1 (equal): `(8 − u) / 7`, where `u` is the size of the union of eight
    /// lists relative to one, as [`measure_group_reuse`](Self::measure_group_reuse) finds it. The default is 0, and .85 for lists that [`Nsa`](crate::nsa::Nsa)
    /// chooses. It affects the choice of kernels, not results: with a large overlap, adjacent queries of few heads attend to the union of their lists, which
    /// contains each block once.
    ///
    /// # Errors
    /// [`OpError`] if it is not from 0 to 1.
    pub fn with_group_reuse(self, overlap: f64) -> Result<Self, OpError> {
        let overlap = checked_overlap(overlap)?;
        Ok(Self { overlap, ..self })
    }

    /// Returns the expected overlap of the lists of adjacent queries.
    pub fn group_reuse(&self) -> f64 {
        self.overlap
    }

    /// Measures the overlap of the lists of eight adjacent queries: `(8 − u) / 7`, where `u` is the size of their union relative to one list. It is 1 if the
    /// lists are equal, and 0 if no block is on two of them. Only groups whose queries all have full lists are counted; without such groups it is 1.
    ///
    /// Reads all lists back and counts on the host.
    ///
    /// ```
    /// use burn::tensor::{Device, Int, Tensor};
    /// use burn_sparse_select::SelectedBlocks;
    ///
    /// // Of blocks of eight keys queries list the first, and that of the query eight before: eight of them list two.
    /// let lists = (0..64).flat_map(|query| [0, if query < 16 { -1 } else { query / 8 - 1 }]);
    /// let blocks = Tensor::<1, Int>::from_data(lists.collect::<Vec<i32>>().as_slice(), &Device::flex());
    /// let lists = SelectedBlocks::of_blocks(blocks.reshape([1, 1, 64, 2]), 64, 8)?;
    /// assert_eq!(lists.measure_group_reuse(), 1.0);
    /// # Ok::<(), burn_blocksparse::OpError>(())
    /// ```
    pub fn measure_group_reuse(&self) -> f64 {
        let [.., most] = self.blocks.dims();
        overlap_of(&self.blocks, |_, listed| listed == most)
    }

    pub(crate) fn shape(&self) -> ListsShape {
        let [_, lists, _, most] = self.blocks.dims();
        ListsShape {
            lists,
            most,
            block: self.block,
            tiles: self.tile_blocks.dims()[2],
            tile: self.tile,
            overlap: self.overlap,
        }
    }

    /// Creates lists from block indices: i32 `[batch, lists, queries, most]` on the device, without autodiff, negative for empty entries. Blocks have `block`
    /// keys, of `seq_kv` in all. Places are allocated for full lists.
    ///
    /// # Errors
    /// [`OpError`] if a size is 0.
    pub fn of_blocks(blocks: Tensor<4, Int>, seq_kv: usize, block: usize) -> Result<Self, OpError> {
        let [.., seq_q, most] = blocks.dims();
        for (argument, size) in [
            ("blocks' queries", seq_q),
            ("blocks' width", most),
            ("seq_kv", seq_kv),
            ("block", block),
        ] {
            OpError::ensure_positive(argument, size)?;
        }
        let grid = EstimateGrid::by_query(block).of([seq_q, seq_kv], true);
        let tile = tile(block);
        let sizes = ListSizes {
            grid,
            forced: Always { first: 0, local: 1 },
            most,
            tiles: (seq_q * most + (tile - 1) * seq_kv.div_ceil(block)) / tile,
            tile,
        };
        Ok(Self::of_choices(blocks, &sizes))
    }

    /// Selects the highest-scoring blocks in addition to the forced ones, and builds their lists. `scores` returns those of a range of query rows, f32
    /// `[batch, lists, rows, blocks]` without autodiff, for `rows_at_a_time` rows. Blocks after a row's last candidate may be missing.
    pub(crate) fn new(
        scores: impl Fn(Range<usize>) -> Result<Tensor<4>, OpError>,
        rows_at_a_time: usize,
        sizes: &ListSizes,
    ) -> Result<Self, OpError> {
        let ListSizes {
            grid, forced, most, ..
        } = sizes;
        let (queries, blocks) = (grid.seq_q, grid.blocks());
        let mut chosen = Vec::new();
        for rows in in_steps(0..queries, rows_at_a_time) {
            let start = rows.start;
            let scores = scores(rows)?.cast(DType::F32);
            // The operation selects blocks before that of a query's position. To exclude forced blocks, drop the first ones and shift positions back
            // accordingly.
            let scores = match forced.first {
                0 => scores,
                first => scores.slice_dim(3, first..blocks),
            };
            let [position, _] = grid.positions(start);
            let aside = (forced.first + forced.local - 1) * grid.block;
            let wanted = TopKBlocks {
                position: position - aside as i64,
                block: grid.block,
                most: *most,
            };
            let picks = <Dispatch as SelectionOps>::highest_blocks(scores.into_dispatch(), wanted);
            chosen.push(Tensor::<4, Int>::from_dispatch(picks));
        }
        let picks = joined(chosen, 2);
        Ok(Self::of_choices(sizes.of_call(picks), sizes))
    }

    /// Builds the lists of selected blocks.
    pub(crate) fn of_choices(blocks: Tensor<4, Int>, sizes: &ListSizes) -> Self {
        let [.., most] = blocks.dims();
        let wanted = QueryTiles {
            blocks: sizes.grid.blocks(),
            tiles: sizes.tiles,
            tile: sizes.tile,
        };
        let listed =
            <Dispatch as SelectionOps>::list_queries(blocks.clone().into_dispatch(), wanted);
        let places = Tensor::<4, Int>::from_dispatch(listed.places);
        let choices = Tensor::<3, Int>::from_dispatch(listed.choices);
        let unused = choices.clone().lower_elem(0);
        let at = choices.clone().clamp_min(0).div_scalar(most as i32);
        Self {
            block: sizes.grid.block,
            tile: sizes.tile,
            blocks,
            places,
            choices,
            queries: at.mask_fill(unused, -1),
            tile_blocks: Tensor::from_dispatch(listed.tile_blocks),
            overlap: 0.0,
        }
    }

    /// Returns the lists of a range of queries, as those of a call with these queries alone.
    pub(crate) fn of_queries(&self, rows: Range<usize>, sizes: &ListSizes) -> Self {
        let blocks = self.blocks.clone().slice_dim(2, rows);
        Self {
            overlap: self.overlap,
            ..Self::of_choices(blocks, sizes)
        }
    }

    /// Returns the lists of a range of heads. The `heads` heads form groups that share a list.
    pub(crate) fn of_heads(&self, heads: usize, part: Range<usize>) -> Self {
        let [_, lists, ..] = self.blocks.dims();
        let part = part.start as i64..part.end as i64;
        let part = Tensor::<1, Int>::arange(part, (&self.blocks.device(), DType::I32));
        let part = part.div_scalar((heads / lists) as i32);
        Self {
            block: self.block,
            tile: self.tile,
            blocks: self.blocks.clone().select(1, part.clone()),
            places: self.places.clone().select(1, part.clone()),
            choices: self.choices.clone().select(1, part.clone()),
            queries: self.queries.clone().select(1, part.clone()),
            tile_blocks: self.tile_blocks.clone().select(1, part),
            overlap: self.overlap,
        }
    }

    /// Returns the lists with one per head, for heads in groups that share a list.
    pub(crate) fn for_heads(self, heads: usize) -> Self {
        let [_, lists, ..] = self.blocks.dims();
        match lists == heads {
            true => self,
            false => self.of_heads(heads, 0..heads),
        }
    }
}
