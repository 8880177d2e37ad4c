//! How many cubes share the queries of a tile of keys.

use super::*;
use crate::{BlockMask, LayoutShape};

/// Queries over one key of every 16 tokens, each of the 32 that end there: query `t` sees key `i` if `16 · i + 31 ≤ t`.
fn staircase(heads: usize, seq_q: usize) -> BlockLayout {
    let shape = LayoutShape {
        heads: 1,
        seq_q,
        seq_kv: seq_q / 16 - 1,
        block_size: 128,
    };
    let sees = |query: usize, key: usize| key * 16 + 31 <= query;
    let layout = BlockLayout::from_block_fn("staircase", shape, |_, row, column| {
        let (first, key) = (row * 128, column * 128);
        if !sees(first + 127, key) {
            return None;
        }
        Some(BlockMask::from_fn(128, |i, j| sees(first + i, key + j)))
    });
    layout.unwrap().of_first_head(heads).unwrap()
}

/// What the backward pass of a plan says of shares, and whether it is fused.
fn shares(layout: &BlockLayout, [batch, kv_heads]: [usize; 2], dim: usize) -> Option<usize> {
    let request = Request::new([batch, kv_heads], [dim, dim], BF16);
    let plan = Fake::sm90().plan(layout, request, TierLimit::None).unwrap();
    let text = plan.to_string();
    let line = text.lines().find(|line| line.contains("  backward hopper"));
    let line = line.unwrap_or_else(|| panic!("{text}"));
    let (_, rest) = line.split_once("the queries of a tile shared by ")?;
    Some(rest.strip_suffix(" cubes").unwrap().parse().unwrap())
}

/// 32 tiles for each of four heads of keys, of which the first has twice the queries of the mean: alone it would take as long as all
/// the others on 132 multiprocessors.
#[test]
fn few_keys_are_shared() {
    let layout = staircase(64, 65_536);
    for dim in [64, 128] {
        let found = shares(&layout, [1, 4], dim);
        assert!(matches!(found, Some(4 | 8 | 16)), "{found:?}");
    }
    // Without grouped heads nobody is there to share with.
    assert_eq!(shares(&staircase(8, 16_384), [1, 8], 128), None);
}

/// Short sequences of few heads of keys leave multiprocessors idle; long ones do not.
#[test]
fn grouped_heads_are_shared_where_cubes_are_few() {
    let causal = |heads, n| Pattern::causal().layout(heads, n, 128).unwrap();
    assert_eq!(shares(&causal(32, 1024), [1, 8], 128), Some(4));
    assert_eq!(shares(&causal(32, 16_384), [1, 32], 128), None);
    assert_eq!(shares(&causal(32, 16_384), [8, 8], 128), None);
    // 64 tiles of each of two heads are 128 cubes of equal work.
    let dense = Pattern::dense().layout(8, 8_192, 128).unwrap();
    assert_eq!(shares(&dense, [1, 2], 128), None);
}
