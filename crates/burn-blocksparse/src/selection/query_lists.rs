//! Single queries that choose blocks, as lists of the queries that chose each block.

use blocksparse::ScoreGrid;
use burn::backend::Dispatch;
use burn::tensor::{DType, Int, Tensor};

use super::estimator::{BlockEstimator, ScoreCall};
use super::sharing::Sharing;
use crate::error::OpError;
use crate::ops::{HighestBlocks, QueryTiles, SelectionOps};

/// Scores in memory at a time, at most ([`FEWEST_ROWS`] queries of every head may have more).
const SLAB_SCORES: usize = 1 << 24;

/// Queries whose scores are in memory at a time, at least.
const FEWEST_ROWS: usize = 64;

/// Which blocks before its own each query chose, and the same by blocks: for each head a sequence of places, `tile` to a tile, where the queries that
/// chose a block have neighbouring places, in order, and the last tile of a block is filled up with places of no query. All are i32 tensors on the
/// device, without autodiff; −1 stands for none. `lists` are the heads of the queries, or those of the keys if heads share a choice.
///
/// How many places there are follows from the sizes alone: of `n` queries that chose `c` blocks in all, from among `m` blocks, at most
/// `(c + (tile − 1) · m) / tile` tiles. Those that are not needed come last.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct QueryLists {
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
}

/// Sizes of the lists of a call.
pub(crate) struct ListSizes {
    grid: ScoreGrid,
    /// Blocks that a query chooses, at most.
    most: usize,
    /// Tiles of a head.
    tiles: usize,
    tile: usize,
}

impl ListSizes {
    /// Of queries that choose up to `keep` blocks, their own among them. `None` if none of them has a choice.
    pub fn new(grid: ScoreGrid, keep: usize) -> Option<Self> {
        let tile = tile(grid.block);
        // Queries at positions below 0 see nothing.
        let first = grid.seq_kv.saturating_sub(grid.seq_q);
        let blocks = (grid.seq_kv - 1) / grid.block;
        let most = blocks.min(keep - 1);
        // Queries of a block have the blocks before it to choose from.
        let queries = |block: usize| {
            let start = (block * grid.block).max(first);
            ((block + 1) * grid.block)
                .min(grid.seq_kv)
                .saturating_sub(start)
        };
        let choices: usize = (0..=blocks).map(|own| queries(own) * own.min(most)).sum();
        (choices > 0).then(|| Self {
            grid,
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

impl QueryLists {
    /// The blocks of highest scores before each query's own, and their lists. The call is without autodiff.
    pub(crate) fn new(
        estimator: &dyn BlockEstimator,
        sharing: Sharing,
        call: &ScoreCall,
        sizes: &ListSizes,
    ) -> Result<Self, OpError> {
        let ListSizes { grid, most, .. } = sizes;
        if (call.group() == 1 || sharing == Sharing::PerHead)
            && let Some(blocks) = estimator.picks(call, *most)
        {
            return Ok(Self::of_choices(blocks, sizes));
        }
        let [batch, heads, queries, _] = call.q.dims();
        let slab = (SLAB_SCORES / (batch * heads * grid.blocks())).max(FEWEST_ROWS);
        let mut chosen = Vec::new();
        for start in (0..queries).step_by(slab) {
            let rows = start..(start + slab).min(queries);
            let scores = estimator.scores(call, rows)?;
            let scores = sharing.reduce(scores, call.group()).cast(DType::F32);
            let [position, _] = grid.positions(start);
            let wanted = HighestBlocks::new(position, grid.block, *most);
            let picks = <Dispatch as SelectionOps>::highest_blocks(scores.into_dispatch(), wanted);
            chosen.push(Tensor::<4, Int>::from_dispatch(picks));
        }
        let blocks = match chosen.len() {
            1 => chosen.remove(0),
            _ => Tensor::cat(chosen, 2),
        };
        Ok(Self::of_choices(blocks, sizes))
    }

    /// The lists of chosen blocks.
    fn of_choices(blocks: Tensor<4, Int>, sizes: &ListSizes) -> Self {
        let [batch, lists, queries, most] = blocks.dims();
        let wanted = QueryTiles::new(sizes.grid.blocks(), sizes.tiles, sizes.tile);
        let listed =
            <Dispatch as SelectionOps>::list_queries(blocks.clone().into_dispatch(), wanted);
        let places = Tensor::<4, Int>::from_dispatch(listed.places);
        let choices = Tensor::<3, Int>::from_dispatch(listed.choices);
        let unused = choices.clone().lower_elem(0);
        let at = choices.clone().clamp_min(0).div_scalar(most as i32);
        debug_assert_eq!(places.dims(), [batch, lists, queries, most]);
        Self {
            block: sizes.grid.block,
            tile: sizes.tile,
            blocks,
            places,
            choices,
            queries: at.mask_fill(unused, -1),
            tile_blocks: Tensor::from_dispatch(listed.tile_blocks),
        }
    }

    /// The same for heads in groups that share a list.
    pub(crate) fn for_heads(self, heads: usize) -> Self {
        let [_, lists, ..] = self.blocks.dims();
        if lists == heads {
            return self;
        }
        let group = heads / lists;
        Self {
            block: self.block,
            tile: self.tile,
            blocks: repeated(self.blocks, group),
            places: repeated(self.places, group),
            choices: repeated(self.choices, group),
            queries: repeated(self.queries, group),
            tile_blocks: repeated(self.tile_blocks, group),
        }
    }
}

/// Each head's numbers `group` times.
fn repeated<const D: usize>(x: Tensor<D, Int>, group: usize) -> Tensor<D, Int> {
    let mut dims = x.dims();
    let [batch, lists] = [dims[0], dims[1]];
    let rest = dims[2..].iter().product();
    let x = x.reshape([batch, lists, 1, rest]);
    let x = x.expand([batch, lists, group, rest]);
    dims[1] = lists * group;
    x.reshape(dims)
}
