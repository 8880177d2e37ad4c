//! Single queries that choose blocks, as lists of the queries that chose each block.

use std::ops::Range;

use blocksparse::{Always, ScoreGrid};

use crate::selection::estimator::EstimateGrid;
use crate::selection::ops::SelectionOps;
use crate::selection::parts::{checked_overlap, in_steps, joined, overlap_of};
use crate::selection::values::{QueryTiles, TopKBlocks};
use burn_blocksparse::internal::prelude::*;

/// Scores in memory at a time, at most ([`FEWEST_ROWS`] queries of every head may have more).
const SLAB_SCORES: usize = 1 << 24;

/// Queries whose scores are in memory at a time, at least.
const FEWEST_ROWS: usize = 64;

/// Blocks that each query selected in addition to the forced ones, by query and by block. By block, each head has a sequence of places in tiles of
/// `tile`: the queries that chose a block have adjacent places, in order, and its last tile is padded. All are i32 tensors on the device, without
/// autodiff; −1 stands for none. `lists` are the query heads, or the KV heads if heads share a choice.
///
/// The number of places follows from the sizes alone: if `n` queries choose `c` blocks in all, from `m` blocks, there are at most `(c + (tile − 1) ·
/// m) / tile` tiles. Unused ones come last.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct SelectedBlocks {
    /// Keys of a block.
    pub block: usize,
    /// Places of a tile.
    pub tile: usize,
    /// The blocks that a query chose, by falling score: `[batch, lists, queries, most]`.
    pub blocks: Tensor<4, Int>,
    /// The place of each choice: `[batch, lists, queries, most]`.
    pub places: Tensor<4, Int>,
    /// The choice at each place, `query · most +` its number among the query's: `[batch, lists, places]`.
    pub choices: Tensor<3, Int>,
    /// The query at each place: `[batch, lists, places]`.
    pub queries: Tensor<3, Int>,
    /// The block of each tile: `[batch, lists, tiles]`.
    pub tile_blocks: Tensor<3, Int>,
    /// What adjacent queries' lists are expected to have in common.
    overlap: f64,
}

/// Sizes of the lists of a call.
pub(crate) struct ListSizes {
    grid: ScoreGrid,
    forced: Always,
    /// Blocks that a query chooses, at most.
    most: usize,
    /// Tiles of a head.
    tiles: usize,
    tile: usize,
}

impl ListSizes {
    /// Of queries that keep up to `keep` blocks, or all forced ones if those are more, their own among them. `None` if none of them has a choice.
    ///
    /// Blocks between the first ones and the nearest ones are what there is to choose from, so that forced blocks take no part in it: with less than all of
    /// them in sight a query sees nothing else.
    pub fn new(grid: ScoreGrid, keep: usize, forced: Always) -> Option<Self> {
        let tile = tile(grid.block);
        // Queries at positions below 0 see nothing.
        let first = grid.seq_kv.saturating_sub(grid.seq_q);
        let last = (grid.seq_kv - 1) / grid.block;
        let taken = forced.first.saturating_add(forced.local);
        let free = |own: usize| (own + 1).saturating_sub(taken);
        let blocks = free(last);
        let most = blocks.min(keep.saturating_sub(taken));
        // Queries of a block have the same blocks to choose from.
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

/// Queries that share a tile, and keys of a block of the layout of tiles: narrower than blocks of keys, so that little is filled up; not too narrow, so that
/// the lists of a tile's blocks of keys stay short.
fn tile(block: usize) -> usize {
    match block {
        0..64 => block,
        64..=512 => 64,
        _ => 128,
    }
}

impl ListSizes {
    /// Queries whose scores are in memory at a time, of so many lists.
    pub(crate) fn rows_at_a_time(&self, lists: usize) -> usize {
        (SLAB_SCORES / (lists * self.grid.blocks())).max(FEWEST_ROWS)
    }

    /// Blocks that a query chooses, at most.
    pub(crate) fn most(&self) -> usize {
        self.most
    }

    /// The keys of blocks that some query chooses from, with some after them: to a query of the call with these keys alone, its forced blocks are not there,
    /// but for one after all that it chooses from. Blocks are numbered from the first that is not forced.
    pub(crate) fn between_forced(&self) -> Range<usize> {
        let Always { first, local } = self.forced;
        let block = self.grid.block;
        first * block..self.grid.seq_kv - (local - 1) * block
    }

    /// Blocks that were numbered from the first that is not forced, as those of the call.
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

/// Sizes of lists.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ListsShape {
    /// Heads that have lists of their own.
    pub lists: usize,
    /// Blocks that a query chooses, at most.
    pub most: usize,
    /// Keys of a block.
    pub block: usize,
    /// Tiles of queries by blocks.
    pub tiles: usize,
    /// Places of a tile.
    pub tile: usize,
    /// The share that the lists of adjacent queries are expected to have in common.
    pub overlap: f64,
}

impl SelectedBlocks {
    /// The same with the share that the lists of adjacent queries are expected to have in common, from 0 for nothing to 1 for all: `(8 − u) / 7`, where `u` is how many
    /// blocks eight of them list for one of a query, as [`measure_group_reuse`](Self::measure_group_reuse) finds it. It is 0 unless it is set, and .85 of what
    /// [`Nsa`](crate::nsa::Nsa) chooses. Kernels are chosen by it, results do not depend on it: with a large overlap, adjacent queries of few heads attend to the union of their
    /// lists, which name each block once.
    ///
    /// # Errors
    /// [`OpError`] if it is no share.
    pub fn with_group_reuse(self, overlap: f64) -> Result<Self, OpError> {
        let overlap = checked_overlap(overlap)?;
        Ok(Self { overlap, ..self })
    }

    /// The share that the lists of adjacent queries are expected to have in common.
    pub fn group_reuse(&self) -> f64 {
        self.overlap
    }

    /// The share that the lists of eight adjacent queries have in common: `(8 − u) / 7`, where `u` is how many blocks their union has for one of a list. It is 1
    /// where they are the same, and 0 where no block is on two of them. Groups of eight count whose queries all list as many blocks as a list has room
    /// for; without any it is 1.
    ///
    /// Reads all lists back, and counts on the host.
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

    /// Lists of blocks: i32 `[batch, lists, queries, most]` on the device, without autodiff, negative for none, of blocks of `block` keys
    /// of `seq_kv`. There are as many places as every query could choose.
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

    /// The blocks of highest scores in addition to the forced ones, and their lists. `scores` gives those of rows of queries, f32 `[batch, lists, rows, blocks]`
    /// without autodiff, of so many at a time; blocks after the last that a row chooses from may be missing.
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
            // A query takes from the blocks before that of its position: as if the first blocks were not there, and it lay so much earlier.
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

    /// The lists of chosen blocks.
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

    /// Those of some queries, of a call with these alone.
    pub(crate) fn of_queries(&self, rows: Range<usize>, sizes: &ListSizes) -> Self {
        let blocks = self.blocks.clone().slice_dim(2, rows);
        Self {
            overlap: self.overlap,
            ..Self::of_choices(blocks, sizes)
        }
    }

    /// Those of a range of `heads` heads, in groups that share a list.
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

    /// The same for heads in groups that share a list.
    pub(crate) fn for_heads(self, heads: usize) -> Self {
        let [_, lists, ..] = self.blocks.dims();
        match lists == heads {
            true => self,
            false => self.of_heads(heads, 0..heads),
        }
    }
}
