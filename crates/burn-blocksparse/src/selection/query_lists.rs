//! Single queries that choose blocks, as lists of the queries that chose each block.

use blocksparse::ScoreGrid;
use burn::tensor::{DType, Device, IndexingUpdateOp, Int, Tensor};

use super::estimator::{BlockEstimator, ScoreCall};
use super::sharing::Sharing;
use crate::error::OpError;

/// Scores in memory at a time, at most (64 queries of every head may have more).
const SLAB_SCORES: usize = 1 << 24;

/// Queries of a part that ranks are counted in: Burn's running sums on GPUs read all that comes before, for every number.
const PART: usize = 64;

/// Scores lie within ±`LARGEST`, and what is no candidate is below all of them. Both are finite, because not every shader knows infinities.
const LARGEST: f32 = 1e38;
const NO_CANDIDATE: f32 = -3e38;

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
        let [batch, heads, queries, _] = call.q.dims();
        let lists = match sharing {
            Sharing::PerHead => heads,
            _ => call.k.dims()[1],
        };
        let (device, blocks) = (call.q.device(), grid.blocks());
        let slab = SLAB_SCORES / (batch * heads * blocks);
        let slab = (slab / PART * PART).max(PART);
        let mut counts = Tensor::<4, Int>::zeros([batch, lists, 1, blocks], (&device, DType::I32));
        let (mut chosen, mut ranks) = (Vec::new(), Vec::new());
        for start in (0..queries).step_by(slab) {
            let rows = start..(start + slab).min(queries);
            let scores = estimator.scores(call, rows)?;
            let scores = sharing.reduce(scores, call.group());
            let (picks, members) = highest(scores, grid, start, *most);
            let rank = running(members.clone()) + counts.clone();
            ranks.push(rank.gather(3, picks.clone().clamp_min(0)) - 1);
            chosen.push(picks);
            counts = counts + members.sum_dim(2);
        }
        let (blocks, ranks) = (Tensor::cat(chosen, 2), Tensor::cat(ranks, 2));
        Ok(Self::of_choices(blocks, ranks, counts, sizes))
    }

    /// The lists of chosen blocks, of the rank of each among those of its block, and of how many chose a block.
    fn of_choices(
        blocks: Tensor<4, Int>,
        ranks: Tensor<4, Int>,
        counts: Tensor<4, Int>,
        sizes: &ListSizes,
    ) -> Self {
        let (tiles, tile) = (sizes.tiles, sizes.tile);
        let [batch, lists, queries, most] = blocks.dims();
        let [.., all_blocks] = counts.dims();
        let device = blocks.device();
        let flat = [batch, lists, queries * most];
        let none = blocks.clone().lower_elem(0);
        let of_blocks = (counts + (tile as i32 - 1)).div_scalar(tile as i32);
        let of_blocks = of_blocks.reshape([batch, lists, all_blocks]);
        let starts = (of_blocks.clone().cumsum(2) - of_blocks).mul_scalar(tile as i32);
        let flat_blocks = blocks.clone().reshape(flat);
        let starts = starts.gather(2, flat_blocks.clone().clamp_min(0));
        let places = starts.reshape([batch, lists, queries, most]) + ranks;
        let places = places.mask_fill(none.clone(), -1);
        // Every choice is written to its place; those of none to one behind the last.
        let end = tiles * tile;
        let numbers = counted(queries * most, 1, &device).reshape([1, 1, queries * most]);
        let none = none.reshape(flat);
        let numbers = numbers.expand(flat).mask_fill(none.clone(), 0);
        let at = places.clone().reshape(flat).mask_fill(none, end as i32);
        let choices = Tensor::<3, Int>::zeros([batch, lists, end + 1], (&device, DType::I32));
        let choices = choices.scatter(2, at, numbers, IndexingUpdateOp::Add);
        let choices = choices.slice_dim(2, 0..end) - 1;
        let unused = choices.clone().lower_elem(0);
        let queries = choices.clone().clamp_min(0).div_scalar(most as i32);
        let queries = queries.mask_fill(unused, -1);
        // The first place of a tile that is needed has a query.
        let firsts = choices.clone().reshape([batch, lists, tiles, tile]);
        let firsts = firsts.slice_dim(3, 0..1).reshape([batch, lists, tiles]);
        let unused = firsts.clone().lower_elem(0);
        let tile_blocks = flat_blocks.gather(2, firsts.clamp_min(0));
        Self {
            block: sizes.grid.block,
            tile,
            blocks,
            places,
            choices,
            queries,
            tile_blocks: tile_blocks.mask_fill(unused, -1),
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

/// The `most` highest scores before the own block of each row, from query `start` on: their blocks, −1 where there are fewer, and 1 at each in the place of
/// its score. Of equal scores the earlier block, and NaN is the lowest.
fn highest(
    scores: Tensor<4>,
    grid: &ScoreGrid,
    start: usize,
    most: usize,
) -> (Tensor<4, Int>, Tensor<4, Int>) {
    let dims = scores.dims();
    let [batch, lists, rows, blocks] = dims;
    let device = scores.device();
    let [position, _] = grid.positions(start);
    let positions = counted(rows, position, &device);
    let past = positions.clamp_min(0).div_scalar(grid.block as i32);
    let past = past.reshape([1, 1, rows, 1]);
    let columns = counted(blocks, 0, &device).reshape([1, 1, 1, blocks]);
    let columns = columns.expand(dims);
    let candidates = columns.clone().lower(past.clone().expand(dims));
    let nan = scores.clone().is_nan();
    let scores = scores.mask_fill(nan, -LARGEST).clamp(-LARGEST, LARGEST);
    let mut scores = scores.mask_fill(candidates.clone().bool_not(), NO_CANDIDATE);
    let mut picks = Vec::with_capacity(most);
    for round in 0..most {
        // The first of the largest.
        let best = scores.clone().argmax(3).cast(DType::I32);
        let taken = columns.clone().equal(best.clone().expand(dims));
        scores = scores.mask_fill(taken, NO_CANDIDATE);
        let none = past.clone().lower_equal_elem(round as i32);
        picks.push(best.mask_fill(none.expand([batch, lists, rows, 1]), -1));
    }
    let members = scores.equal_elem(NO_CANDIDATE).bool_and(candidates);
    (Tensor::cat(picks, 3), members.int().cast(DType::I32))
}

/// Sums over the rows up to each, itself included.
fn running(x: Tensor<4, Int>) -> Tensor<4, Int> {
    let [batch, lists, rows, blocks] = x.dims();
    if rows <= PART {
        return x.cumsum(2);
    }
    let device = x.device();
    let parts = rows.div_ceil(PART);
    let x = match parts * PART - rows {
        0 => x,
        missing => {
            let zeros = Tensor::zeros([batch, lists, missing, blocks], (&device, DType::I32));
            Tensor::cat(vec![x, zeros], 2)
        }
    };
    let x = x.reshape([batch * lists, parts, PART, blocks]);
    let sums = x.clone().sum_dim(2);
    let before = sums.clone().cumsum(1) - sums;
    let x = x.cumsum(2) + before;
    x.reshape([batch, lists, parts * PART, blocks])
        .slice_dim(2, 0..rows)
}

/// `count` numbers from `first` on. With fusion, Burn's `arange` is a running sum, which on GPUs reads all that comes before for every number: long ones
/// are made of short ones.
fn counted(count: usize, first: i64, device: &Device) -> Tensor<1, Int> {
    const SHORT: usize = 512;
    if count <= SHORT {
        return Tensor::arange(first..first + count as i64, (device, DType::I32));
    }
    let parts = count.div_ceil(SHORT);
    let high = counted(parts, 0, device).mul_scalar(SHORT as i32);
    let low = counted(SHORT, first, device);
    let all = high.reshape([parts, 1]).expand([parts, SHORT])
        + low.reshape([1, SHORT]).expand([parts, SHORT]);
    all.reshape([parts * SHORT]).slice_dim(0, 0..count)
}
