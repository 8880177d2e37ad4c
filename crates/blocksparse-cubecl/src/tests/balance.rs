//! Sharing of a tile's queries or steps by several cubes.

use super::*;
use blocksparse::{BlockMask, LayoutShape};

/// A layout with one key per 16 tokens, for the 32 tokens that end there: query `t` attends to key `i` if `16 · i + 31 ≤ t`.
fn staircase(heads: usize, seq_q: usize) -> BlockLayout {
    let shape = LayoutShape::new(1, [seq_q, seq_q / 16 - 1], 128);
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

/// Returns the shares of a plan's fused backward pass. Panics if it is not fused.
fn shares(layout: &BlockLayout, [batch, kv_heads]: [usize; 2], dim: usize) -> Option<usize> {
    let request = Request::new([batch, kv_heads], [dim, dim], BF16);
    let plan = Fake::sm90().plan(layout, request, TierLimit::None).unwrap();
    let line = line(&plan, "  backward hopper");
    let (_, rest) = line.split_once("the queries of a tile shared by ")?;
    Some(rest.strip_suffix(" cubes").unwrap().parse().unwrap())
}

/// Four heads of keys have 32 tiles each. The first tile has twice the mean number of queries: alone it would take as long as all the others on 132
/// multiprocessors.
#[test]
fn few_keys_are_shared() {
    let layout = staircase(64, 65_536);
    for dim in [64, 128] {
        let found = shares(&layout, [1, 4], dim);
        assert!(matches!(found, Some(4 | 8 | 16)), "{found:?}");
    }
    // Without grouped heads, there is nothing to share.
    assert_eq!(shares(&staircase(8, 16_384), [1, 8], 128), None);
}

/// Short sequences with few heads of keys leave multiprocessors idle; long ones do not.
#[test]
fn grouped_heads_are_shared_where_cubes_are_few() {
    let causal = |heads, n| Pattern::causal().layout(heads, n, 128).unwrap();
    assert_eq!(shares(&causal(32, 1024), [1, 8], 128), Some(4));
    assert_eq!(shares(&causal(32, 16_384), [1, 32], 128), None);
    assert_eq!(shares(&causal(32, 16_384), [8, 8], 128), None);
    // The 64 tiles of each of two heads are 128 cubes of equal work.
    let dense = Pattern::dense().layout(8, 8_192, 128).unwrap();
    assert_eq!(shares(&dense, [1, 2], 128), None);
}

/// A layout in blocks of 64 in which a query attends to the first block, its own and the previous one, as native sparse attention forces.
fn forced(heads: usize, n: usize) -> BlockLayout {
    let near = Pattern::chunked_window(64, 1, 0);
    let seen = Pattern::union([near, Pattern::global_keys(0..64)]).and_causal();
    seen.layout(1, n, 64).unwrap().of_first_head(heads).unwrap()
}

/// Returns the shared tiles of a plan's loops over rows and over columns: number of tiles, and cubes per tile.
fn long(layout: &BlockLayout, request: Request, limit: TierLimit) -> [Option<[usize; 2]>; 2] {
    let plan = Fake::sm90().plan(layout, request, limit).unwrap();
    ["  dQ       hopper", "  dK, dV   hopper"].map(|mainloop| {
        let line = line(&plan, mainloop);
        let (_, rest) = line.split_once(", the steps of ")?;
        let (tiles, cubes) = rest.split_once(" of a head shared by ").unwrap();
        let tiles = match tiles.strip_prefix("each of the ") {
            Some(tiles) => tiles.strip_suffix(" longest tiles").unwrap(),
            None => (tiles == "the longest tile").then_some("1").unwrap(),
        };
        let cubes = cubes.strip_suffix(" cubes").unwrap();
        Some([tiles, cubes].map(|number| number.parse().unwrap()))
    })
}

/// One tile has all queries of 16 heads, which are 16,384 steps. Divided evenly over 264 cubes, all steps are 750 per cube.
#[test]
fn long_tiles_are_shared() {
    let bf16 = |kv_heads, dim| Request::new([1, kv_heads], [dim, dim], BF16);
    let nsa = forced(64, 65_536);
    let [rows, columns] = long(&nsa, bf16(4, 128), TierLimit::None);
    assert_eq!(rows, None);
    assert!(matches!(columns, Some([1, 32..=128])), "{columns:?}");
    let alone = long(&nsa, bf16(4, 128), TierLimit::HopperAlone);
    assert_eq!(alone, [None; 2]);
    // Wide heads, whose values may be narrower than keys.
    let wide = Request::new([1, 4], [192, 128], BF16);
    let [rows, columns] = long(&nsa, wide, TierLimit::None);
    assert_eq!(rows, None);
    assert!(matches!(columns, Some([1, 8..=256])), "{columns:?}");
    // Without grouped heads, a tile can only be shared by ranges of steps.
    let own = long(&forced(4, 65_536), bf16(4, 64), TierLimit::HopperUnfused);
    assert!(matches!(own, [None, Some([1, 8..=256])]), "{own:?}");
}

/// Tokens that attend to everything make long tiles of queries. Tokens that everything attends to make long tiles of keys.
#[test]
fn long_tiles_of_both_sides() {
    let tokens: Vec<usize> = (0..32).chain(2_000..2_016).collect();
    let both = Pattern::union([Pattern::local(64), Pattern::global(tokens)]);
    let layout = both.layout(4, 16_384, 64).unwrap();
    let request = Request::new([1, 4], [128, 128], BF16);
    let [rows, columns] = long(&layout, request, TierLimit::HopperUnfused);
    // One tile of clustered rows, or two.
    assert!(matches!(rows, Some([1 | 2, 4..=256])), "{rows:?}");
    assert!(matches!(columns, Some([1 | 2, 4..=256])), "{columns:?}");
}

/// Nothing is shared if tiles are many or alike, or if there are so many heads that a long tile is a small part of the mainloop.
#[test]
fn tiles_that_are_no_longer_than_others_are_not_shared() {
    let request = |batch, kv_heads| Request::new([batch, kv_heads], [128, 128], BF16);
    let none = [None; 2];
    let causal = Pattern::causal().layout(32, 8_192, 128).unwrap();
    assert_eq!(
        long(&causal, request(1, 32), TierLimit::HopperUnfused),
        none
    );
    let local = Pattern::local(256).layout(32, 8_192, 64).unwrap();
    assert_eq!(long(&local, request(1, 32), TierLimit::HopperUnfused), none);
    let sinks = forced(64, 4_096);
    assert_eq!(
        long(&sinks, request(32, 64), TierLimit::HopperUnfused),
        none
    );
}

/// With global tokens and a narrow window, the fused pass would wait for one tile. It is still used if that tile is a small part of it.
#[test]
fn long_tiles_take_two_mainloops_where_they_are_most_of_the_pass() {
    let is_fused = |pattern: Pattern, heads, n, limit| {
        let layout = pattern.layout(heads, n, 64).unwrap();
        let request = Request::new([1, heads], [128, 128], BF16);
        let plan = Fake::sm90().plan(&layout, request, limit).unwrap();
        plan.to_string().contains("  backward hopper")
    };
    let global = || Pattern::union([Pattern::local(256), Pattern::global([0])]);
    assert!(!is_fused(global(), 8, 16_384, TierLimit::None));
    assert!(is_fused(global(), 8, 16_384, TierLimit::HopperAlone));
    assert!(is_fused(global(), 8, 1_024, TierLimit::None));
    let wide = Pattern::streaming(4_096, 64);
    assert!(is_fused(wide, 8, 65_536, TierLimit::None));
}

/// The last visitor of queries writes their dQ where that is faster. Dropout needs many registers, so its cubes are not persistent.
#[rstest::rstest]
#[case(Pattern::local(256), 64, ScoreKind::default(), [true, true])]
#[case(Pattern::local(256), 64, ScoreKind { dropout: true, ..ScoreKind::default() }, [true, false])]
#[case(Pattern::local(256), 64, ScoreKind { softcap: true, ..ScoreKind::default() }, [true, true])]
#[case(Pattern::local(256), 64, ScoreKind { alibi: true, ..ScoreKind::default() }, [true, true])]
#[case(Pattern::causal(), 128, ScoreKind::default(), [true, false])]
#[case(Pattern::causal(), 64, ScoreKind::default(), [false, false])]
#[case(Pattern::union([Pattern::local(256), Pattern::global([0])]), 128, ScoreKind::default(), [false, false])]
fn who_writes_dq(
    #[case] pattern: Pattern,
    #[case] dim: usize,
    #[case] score: ScoreKind,
    #[case] expected: [bool; 2],
) {
    let layout = pattern.layout(32, 16_384, 64).unwrap();
    let request = Request::new([1, 32], [dim, dim], BF16).with_score(score);
    let plan = Fake::sm90().plan(&layout, request, TierLimit::None);
    let line = line(&plan.unwrap(), "  backward hopper");
    let found = ["written by the last visit", "tile after tile"].map(|said| line.contains(said));
    assert_eq!(found, expected, "{line}");
}

/// In the fused pass, a long tile among short ones has a second scratch, and cubes are not persistent, because drawn tiles would wait for it. Windows alone
/// have short mainloops with persistent cubes. With long windows, nothing is gained.
#[test]
fn long_tiles_have_sums_of_their_own() {
    let backward = |pattern: Pattern, heads, n, dim, limit| {
        let layout = pattern.layout(heads, n, 64).unwrap();
        let request = Request::new([1, heads], [dim, dim], BF16);
        let plan = Fake::sm90().plan(&layout, request, limit).unwrap();
        let line = line(&plan, "  backward hopper");
        ["sums of dQ of their own", "tile after tile"].map(|said| line.contains(said))
    };
    let global = || Pattern::union([Pattern::local(256), Pattern::global([0])]);
    for dim in [64, 128] {
        let found = backward(global(), 32, 16_384, dim, TierLimit::None);
        assert_eq!(found, [true, false], "{dim}");
    }
    let alone = backward(global(), 32, 16_384, 64, TierLimit::HopperAlone);
    assert_eq!(alone, [false, true]);
    let local = backward(Pattern::local(256), 32, 16_384, 64, TierLimit::None);
    assert_eq!(local, [false, true]);
    let wide = backward(
        Pattern::streaming(4_096, 64),
        8,
        65_536,
        128,
        TierLimit::None,
    );
    assert_eq!(wide, [false, false]);
}
