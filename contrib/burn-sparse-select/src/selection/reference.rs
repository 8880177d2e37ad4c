//! Reference of the selection steps: block statistics in Burn's operations; per-query selection and inverse lists in loops on the host, where CPU backends have
//! their scores anyway.

use std::cmp::Ordering;
use std::ops::Range;

use burn::tensor::IntDType;
use burn_blocksparse::internal::host;
use burn_blocksparse::internal::prelude::*;

use crate::selection::values::{QueriesOfBlocks, QueryTiles, TopKBlocks, TopKLists, UniqueKeys};

/// Lower bound of a row's norm, which avoids division by zero.
const SHORTEST: f64 = 1e-18;

pub(crate) fn block_means<B: Backend>(x: FloatTensor<B>, block: usize) -> FloatTensor<B> {
    let x = Array::<B>(x).cast(FloatDType::F32);
    let [batch, heads, rows, width] = x.dims();
    let part = |range: Range<usize>, blocks: usize| {
        let dims = [batch * heads, blocks, range.len() / blocks, width];
        let x = x.clone().narrow(2, range).reshape(dims);
        Array::<B>(B::float_mean_dim(x.0, 2)).reshape([batch, heads, blocks, width])
    };
    let whole = rows / block;
    let mut parts = Vec::new();
    if whole > 0 {
        parts.push(part(0..whole * block, whole));
    }
    if !rows.is_multiple_of(block) {
        parts.push(part(whole * block..rows, 1));
    }
    Array::cat(parts, 2).0
}

/// Computes the squared length of the mean direction, which equals the mean cosine of all pairs.
pub(crate) fn block_self_similarity<B: Backend>(
    x: FloatTensor<B>,
    less: Option<FloatTensor<B>>,
    block: usize,
) -> FloatTensor<B> {
    let x = Array::<B>(x).cast(FloatDType::F32);
    let x = match less {
        Some(less) => x - Array(less),
        None => x,
    };
    let square = |x: Array<B>| (x.clone() * x).sum_dim(3);
    let lengths = square(x.clone()).sqrt().at_least(SHORTEST);
    square(Array(block_means::<B>((x / lengths).0, block))).0
}

pub(crate) fn highest_blocks<B: Backend>(
    scores: FloatTensor<B>,
    call: &TopKBlocks,
) -> IntTensor<B> {
    let device = scores.device();
    let [batch, lists, rows, blocks] = scores.shape().dims();
    let scores: Vec<f64> = host::floats::<B, _>(scores);
    let mut picks = Vec::with_capacity(batch * lists * rows * call.most);
    for (row, scores) in scores.chunks(blocks).enumerate() {
        let position = (row % rows) as i64 + call.position;
        let own = usize::try_from(position).unwrap_or(0) / call.block;
        let highest = highest(scores, 0..own.min(blocks), call.most);
        let none = std::iter::repeat_n(-1, call.most - highest.len());
        picks.extend(highest.iter().map(|&block| block as i32).chain(none));
    }
    tensor::<B>(picks, [batch, lists, rows, call.most], &device)
}

pub(crate) fn topk_rows<B: Backend>(x: FloatTensor<B>, most: usize) -> TopKLists<B> {
    let device = x.device();
    let dims @ [groups, rows, columns] = x.shape().dims();
    let numbers: Vec<f64> = host::floats::<B, _>(x);
    let mut lists = Vec::with_capacity(groups * rows * most);
    let mut places = vec![-1; numbers.len()];
    for (row, numbers) in numbers.chunks(columns).enumerate() {
        let mut order = highest(numbers, 0..columns, most);
        order.sort_unstable();
        for (place, &column) in order.iter().enumerate() {
            places[row * columns + column] = (row % rows * most + place) as i32;
            lists.push(column as i32);
        }
    }
    TopKLists {
        columns: tensor::<B>(lists, [groups, rows, most], &device),
        places: tensor::<B>(places, dims, &device),
    }
}

/// Returns the `most` indices of a range with the highest values, in descending order. Ties go to the earlier index; NaN counts as −∞.
pub(crate) fn highest(numbers: &[f64], places: Range<usize>, most: usize) -> Vec<usize> {
    let number = |at: usize| match numbers[at].is_nan() {
        true => f64::NEG_INFINITY,
        false => numbers[at],
    };
    let falling = |a: &usize, b: &usize| -> Ordering {
        let by_number = number(*b).partial_cmp(&number(*a));
        by_number.expect("no NaN is left").then_with(|| a.cmp(b))
    };
    let mut order: Vec<usize> = places.collect();
    if 0 < most && most < order.len() {
        order.select_nth_unstable_by(most - 1, falling);
    }
    order.truncate(most);
    order.sort_unstable_by(falling);
    order
}

pub(crate) fn list_queries<B: Backend>(
    picks: IntTensor<B>,
    call: &QueryTiles,
) -> QueriesOfBlocks<B> {
    let device = picks.device();
    let dims @ [batch, lists, queries, most] = picks.shape().dims();
    let picks: Vec<i32> = host::ints::<B, _>(picks);
    let QueryTiles {
        blocks,
        tiles,
        tile,
    } = *call;
    let mut places = vec![-1; picks.len()];
    let mut choices = vec![-1; batch * lists * tiles * tile];
    let mut tile_blocks = vec![-1; batch * lists * tiles];
    let of_list = queries * most;
    for list in 0..batch * lists {
        let picks = &picks[list * of_list..][..of_list];
        let chosen = |pick: i32| usize::try_from(pick).ok().filter(|&block| block < blocks);
        let mut counts = vec![0; blocks];
        for block in picks.iter().filter_map(|&pick| chosen(pick)) {
            counts[block] += 1;
        }
        let mut next = Vec::with_capacity(blocks);
        let mut first_tile = 0;
        for (block, count) in counts.iter().enumerate() {
            next.push(first_tile * tile);
            let end = first_tile + usize::div_ceil(*count, tile);
            let (from, to) = (first_tile.min(tiles), end.min(tiles));
            tile_blocks[list * tiles..][from..to].fill(block as i32);
            first_tile = end;
        }
        for (choice, &pick) in picks.iter().enumerate() {
            let Some(block) = chosen(pick) else { continue };
            let place = next[block];
            next[block] += 1;
            if place < tiles * tile {
                places[list * of_list + choice] = place as i32;
                choices[list * tiles * tile + place] = choice as i32;
            }
        }
    }
    QueriesOfBlocks {
        places: tensor::<B>(places, dims, &device),
        choices: tensor::<B>(choices, [batch, lists, tiles * tile], &device),
        tile_blocks: tensor::<B>(tile_blocks, [batch, lists, tiles], &device),
    }
}

fn tensor<B: Backend>(
    numbers: Vec<i32>,
    shape: impl Into<Shape>,
    device: &B::Device,
) -> IntTensor<B> {
    B::int_from_data(TensorData::new(numbers, shape.into()), device)
}

/// Returns the visible keys, ascending and unique. Runs on the host, where CPU backends have the lists anyway.
pub(crate) fn unique_keys<B: Backend>(keys: IntTensor<B>, call: &UniqueKeys) -> IntTensor<B> {
    let device = keys.device();
    let dims @ [_, _, seq_q, most] = keys.shape().dims();
    let mut keys: Vec<i32> = host::ints::<B, _>(keys);
    for (row, list) in keys.chunks_mut(most).enumerate() {
        let seen = call.seen(row % seq_q, seq_q);
        let mut found: Vec<i32> = (list.iter().copied())
            .filter(|&key| key >= 0 && (key as usize) < seen)
            .collect();
        found.sort_unstable();
        found.dedup();
        found.resize(most, -1);
        list.copy_from_slice(&found);
    }
    let keys = B::int_from_data(TensorData::new(keys, Shape::new(dims)), &device);
    B::int_cast(keys, IntDType::I32)
}
