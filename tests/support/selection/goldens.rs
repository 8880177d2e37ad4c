//! Selection on the golden input, against externally computed values.

use burn_sparse_select::{
    Always, BlockEstimator, Budget, EstimateKind, FlexPrefill, MeanPool, Quest, Rule, ScoreGrid,
    SpargeAttn, VerticalSlash, XAttention,
};

use crate::judge::estimate::Estimate;
use crate::judge::golden::vals;
use crate::judge::recall::{Attention, kept, places, square_grid};
use crate::prelude::*;

const ROWS: usize = 16;
const BLOCK: usize = 4;

/// Two query heads on one KV head.
fn golden(scale: f64) -> Estimate {
    Estimate::of([2, 1, ROWS, 4], scale, vals(0, 2, ROWS), vals(1, 1, ROWS))
}

/// Returns the scores of an estimator in loops, `[heads][rows][blocks]`.
fn scores(estimator: &impl BlockEstimator, dense: &Estimate) -> Vec<f64> {
    estimator.reference(&dense.entry(0))
}

/// Returns the blocks that a head's rows keep.
fn choice(
    scores: &[f64],
    head: usize,
    kind: EstimateKind,
    keep: Budget,
    forced: [usize; 2],
) -> Vec<Vec<bool>> {
    let grid = square_grid(BLOCK, ROWS);
    let numbers = grid.rows() * grid.blocks();
    let scores = &scores[head * numbers..][..numbers];
    kept(&grid, scores, kind, keep, forced)
}

/// Like [`choice`], for probabilities.
fn likeliest(scores: &[f64], head: usize, keep: Budget, forced: [usize; 2]) -> Vec<Vec<bool>> {
    choice(scores, head, EstimateKind::Probability, keep, forced)
}

/// Makes a grid with a row per query.
fn by_queries() -> ScoreGrid {
    ScoreGrid {
        query_rows: 1,
        ..square_grid(BLOCK, ROWS)
    }
}

fn lists(kept: &[Vec<bool>]) -> Vec<Vec<usize>> {
    kept.iter().map(|row| places(row)).collect()
}

/// Returns the attention of queries 8 to 15.
fn late(dense: &Estimate, head: usize) -> Attention {
    dense.attention(head, 8)
}

fn recall(dense: &Estimate, head: usize, kept: &[Vec<bool>]) -> f64 {
    late(dense, head).recall_of_blocks(kept, BLOCK)
}

pub fn selection_goldens(devices: &[Device]) {
    block_means();
    antidiagonals();
    sparge();
    vertical_slash();
    flex();
    quest(devices);
}

fn block_means() {
    let estimator = MeanPool { block: BLOCK };
    // Queries that are unit vectors return the means of keys.
    let unit = |head: usize, c: usize| f64::from(u8::from(head == c));
    let queries = (0..4 * ROWS * 4).map(|at| unit(at / 4 / ROWS, at % 4));
    let units = Estimate::of([4, 1, ROWS, 4], 1.0, queries.collect(), golden(1.0).k);
    let got = scores(&estimator, &units);
    let means = [
        [0.15625, 0.34375, -0.1875, 0.0],
        [-0.09375, 0.4375, 0.25, 0.78125],
        [0.34375, -0.21875, 0.65625, 0.09375],
        [0.03125, -0.90625, 0.3125, 0.09375],
    ];
    for (c, block) in (0..4).flat_map(|c| (0..4).map(move |block| (c, block))) {
        assert!((got[c * 16 + 12 + block] - means[block][c]).abs() < 1e-9);
    }

    let got = scores(&estimator, &golden(1.0));
    assert_printed("row 2 of head 0", &got[8..11], &[0.2861, 0.4590, 0.1133]);
    let row = [0.0654, 0.1016, -0.0693, -0.0205];
    assert_printed("row 3 of head 0", &got[12..16], &row);
    assert_printed("row 2 of head 1", &got[24..27], &[-0.1836, -0.0625, 0.4961]);
    let row = [-0.1572, -0.1055, 0.1562, 0.3359];
    assert_printed("row 3 of head 1", &got[28..32], &row);
    let dense = golden(0.5);
    for (head, expected, recalls) in [
        (
            0,
            [vec![0], vec![0, 1], vec![1, 2], vec![1, 3]],
            [0.5283, 0.5310],
        ),
        (
            1,
            [vec![0], vec![0, 1], vec![1, 2], vec![2, 3]],
            [0.5764, 0.5766],
        ),
    ] {
        let kind = EstimateKind::Logit;
        let chosen = choice(&got, head, kind, Budget::TopK(2), [0, 1]);
        assert_eq!(lists(&chosen), expected);
        let attention_sums = late(&dense, head).attention_sums(&square_grid(BLOCK, ROWS));
        let oracle = likeliest(&attention_sums, 0, Budget::TopK(2), [0, 1]);
        let got = [&chosen, &oracle].map(|kept| recall(&dense, head, kept));
        assert_printed("recall of block means", &got, &recalls);
    }
}

fn antidiagonals() {
    let (dense, block) = (golden(0.5), BLOCK);
    let estimator = XAttention { block, stride: 2 };
    let last = estimator.probabilities_reference(&dense.entry(0), 0, 7);
    let printed = [
        0.1177, 0.1554, 0.0946, 0.2296, 0.1253, 0.1110, 0.0778, 0.0885,
    ];
    assert_printed("the last group", &last, &printed);
    let got = scores(&estimator, &dense);
    assert_printed("row 2 of head 0", &got[8..11], &[0.7905, 0.7552, 0.4543]);
    let row = [0.5278, 0.7299, 0.4377, 0.3046];
    assert_printed("row 3 of head 0", &got[12..16], &row);
    assert_printed("row 2 of head 1", &got[24..27], &[0.7072, 0.5909, 0.7019]);
    let row = [0.4578, 0.5220, 0.6160, 0.4041];
    assert_printed("row 3 of head 1", &got[28..32], &row);
    let all = [vec![0], vec![0, 1], vec![0, 1, 2], vec![0, 1, 2, 3]];
    for (head, expected, printed) in [
        (
            0,
            [vec![0], vec![0, 1], vec![0, 1, 2], vec![0, 1, 3]],
            0.8850,
        ),
        (1, [vec![0], vec![0, 1], vec![0, 2], vec![0, 2, 3]], 0.6946),
    ] {
        let at = |p| likeliest(&got, head, Budget::top_p(p), [1, 1]);
        assert_eq!(lists(&at(0.7)), expected);
        assert_printed("recall", &[recall(&dense, head, &at(0.7))], &[printed]);
        assert_eq!(lists(&at(0.8)), all);
        assert_eq!(lists(&at(0.9)), all);
    }
}

fn sparge() {
    let dense = golden(0.5);
    let estimator = SpargeAttn {
        block: BLOCK,
        similarity: 0.15,
        smooth: false,
    };
    let [_, of_keys] = estimator.similarities_reference(&dense.entry(0), 0);
    assert_printed("keys", &of_keys, &[0.0813, 0.2636, 0.2420, 0.4443]);
    let [of_queries, _] = estimator.similarities_reference(&dense.entry(0), 1);
    assert_printed("queries", &of_queries, &[0.0934, 0.2004, 0.1721, 0.1222]);
    let smoothed = SpargeAttn {
        smooth: true,
        ..estimator
    };
    let [_, of_keys] = smoothed.similarities_reference(&dense.entry(0), 0);
    assert_printed("smoothed keys", &of_keys, &[0.1845, 0.2045, 0.0838, 0.3864]);

    let got = scores(&estimator, &dense);
    let inf = f64::INFINITY;
    assert_eq!(got[16..20], [inf; 4], "row 0 of head 1");
    assert_eq!(got[28..32], [inf; 4], "row 3 of head 1");
    assert_eq!(got[24], inf, "row 2 of head 1");
    assert_printed("row 2 of head 1", &got[25..27], &[0.4306, 0.5694]);
    let chosen = likeliest(&got, 1, Budget::top_p(0.5), [0, 1]);
    assert_eq!(places(&chosen[2]), [0, 2]);
    assert_eq!(places(&chosen[3]), [0, 1, 2, 3]);
}

fn vertical_slash() {
    let dense = golden(0.5);
    let estimator = VerticalSlash::new(BLOCK, 4, 3)
        .queries(4)
        .sinks(1)
        .window(1);
    for (head, columns, slashes, pairs, printed) in [
        (0, [0, 4, 6, 12], [0, 9, 10], 62, 0.5143),
        (1, [0, 5, 9, 12], [0, 9, 12], 58, 0.4558),
    ] {
        let lines = estimator.lines_reference(&dense.entry(0), head);
        let expected = [columns.to_vec(), slashes.to_vec()];
        assert_eq!(lines.each_ref().map(|kept| places(kept)), expected);
        let is_kept = |i: usize, j: usize| lines[0][j] || lines[1][i - j];
        let all = (0..ROWS).flat_map(|i| (0..=i).map(move |j| (i, j)));
        assert_eq!(all.filter(|(i, j)| is_kept(*i, *j)).count(), pairs);
        let recall = late(&dense, head).recall(is_kept);
        assert_printed("recall", &[recall], &[printed]);
    }
    // A block is kept if one of its pairs is.
    let got = scores(&estimator, &dense);
    for head in 0..2 {
        let lines = estimator.lines_reference(&dense.entry(0), head);
        let chosen = likeliest(&got, head, VerticalSlash::DEFAULT_BUDGET, [0, 0]);
        for (row, block) in (0..4).flat_map(|row| (0..=row).map(move |block| (row, block))) {
            let pairs = (4 * row..4 * row + 4)
                .flat_map(|i| (4 * block..4 * block + 4).map(move |j| (i, j)));
            let mut pairs = pairs.filter(|(i, j)| j <= i);
            let is_kept = pairs.any(|(i, j)| lines[0][j] || lines[1][i - j]);
            assert_eq!(chosen[row][block], is_kept, "head {head}, {row}, {block}");
        }
    }
}

fn flex() {
    let dense = golden(0.5);
    let flex = |gamma: f64| FlexPrefill {
        block: BLOCK,
        gamma,
        threshold: 0.1,
        min_budget: 0,
    };
    let head = flex(0.5).head_reference(&dense.entry(0), 0);
    let (estimate, attention) = (
        [0.2557, 0.2603, 0.2390, 0.2449],
        [0.3039, 0.3291, 0.2300, 0.1371],
    );
    assert_printed("estimate", &head.estimate, &estimate);
    assert_printed("attention", &head.attention, &attention);
    assert!((head.divergence - 0.103963).abs() < 5e-7);
    assert_eq!(places(&head.lines[0]), [0, 1, 4, 5, 6, 12]);
    assert_eq!(places(&head.lines[1]), [2, 7, 9, 10, 11, 13]);
    let head = flex(0.9).head_reference(&dense.entry(0), 1);
    let (estimate, attention) = (
        [0.2234, 0.2293, 0.2614, 0.2859],
        [0.2526, 0.2714, 0.2709, 0.2051],
    );
    assert_printed("estimate", &head.estimate, &estimate);
    assert_printed("attention", &head.attention, &attention);
    assert!((head.divergence - 0.068676).abs() < 5e-7);
    let visible = [0, 4, 5, 8, 9, 10, 12, 13, 14, 15];
    let all_but_one: Vec<usize> = visible.into_iter().filter(|pair| *pair != 12).collect();
    assert_eq!(places(&head.pairs), all_but_one);
    for gamma in [0.5, 0.9] {
        let got = scores(&flex(gamma), &dense);
        let chosen = likeliest(&got, 1, VerticalSlash::DEFAULT_BUDGET, [1, 1]);
        if gamma == 0.9 {
            assert_eq!(chosen[3], [true; 4]);
        }
    }
    least_of_flex(&dense);
}

/// At least two blocks of keys and two block distances per head: the first block, the query's own, and the heaviest of the others, in both kinds of
/// heads.
fn least_of_flex(dense: &Estimate) {
    for (threshold, min_budget) in [(0.1, 5), (0.1, 8), (0.0, 8), (1.0, 8)] {
        // Otherwise next to nothing is kept.
        let estimator = FlexPrefill {
            block: BLOCK,
            gamma: 1e-3,
            threshold,
            min_budget,
        };
        let without = FlexPrefill {
            min_budget: 0,
            ..estimator
        };
        let got = scores(&estimator, dense);
        for head in 0..2 {
            let attention = dense.attention(head, 12);
            let sum = |is_of: &dyn Fn(usize, usize) -> bool| -> f64 {
                let pairs = (12..16).flat_map(|i| (0..=i).map(move |j| (i, j)));
                let of = pairs.filter(|&(i, j)| is_of(i, j));
                of.map(|(i, j)| attention.rows[i - 12][j]).sum()
            };
            let most = |sums: Vec<f64>| {
                let by = |a: &usize, b: &usize| sums[*a].total_cmp(&sums[*b]);
                1 + (0..sums.len()).max_by(by).unwrap()
            };
            let column = most((1..4).map(|c| sum(&|_, j| j / BLOCK == c)).collect());
            let distance = most((1..4).map(|d| sum(&|i, j| (i - j) / BLOCK == d)).collect());
            let chosen = likeliest(&got, head, VerticalSlash::DEFAULT_BUDGET, [0, 0]);
            let alone = without.head_reference(&dense.entry(0), head).pairs;
            for (row, block) in (0..4).flat_map(|row| (0..=row).map(move |block| (row, block))) {
                let is_heavy =
                    [0, column].contains(&block) || [0, distance].contains(&(row - block));
                let expected = is_heavy || alone[row * 4 + block];
                let what = format!("threshold {threshold}, head {head}: {row}, {block}");
                assert_eq!(chosen[row][block], expected, "{what}");
            }
        }
    }
}

/// Bounds of the pages of query 15, and the two pages that each head selects, alone and shared.
fn quest(devices: &[Device]) {
    let dense = golden(0.5);
    let estimator = Quest {
        page: BLOCK,
        full_first_layers: 0,
    };
    let bounds = [
        [2.7344, 2.8906, 2.1875, 1.2500],
        [1.0312, 0.9375, 0.6562, 1.0312],
    ];
    let largest = [
        [1.0156, 2.3438, 1.4062, 0.1562],
        [0.8438, 0.1875, 0.0, 0.3750],
    ];
    // The query's own page, and one more.
    let chosen = |scores: &[f64]| {
        let forced = Always { first: 0, local: 1 };
        let (kind, keep) = (EstimateKind::Logit, Budget::TopK(2));
        let rule = Rule { kind, keep, forced };
        places(&rule.selects(&by_queries(), 15, scores))
    };
    let reference = estimator.reference(&dense.entry(0));
    let of_head = |scores: &[f64], head: usize| scores[(head * ROWS + 15) * 4..][..4].to_vec();
    for (head, (bounds, largest)) in bounds.iter().zip(&largest).enumerate() {
        let scores = of_head(&reference, head);
        assert_printed("bounds of pages", &scores, bounds);
        let call = dense.entry(0);
        let products = (0..ROWS).map(|key| dot(call.query(head, 15), call.key(head, key)));
        let products: Vec<f64> = products.collect();
        let pages = products.chunks(BLOCK);
        let most: Vec<f64> = pages
            .map(|page| page.iter().copied().fold(f64::MIN, f64::max))
            .collect();
        assert_printed("largest products", &most, largest);
        let mut pairs = most.iter().zip(&scores);
        assert!(pairs.all(|(product, bound)| product <= bound));
        assert_eq!(chosen(&scores), [[1, 3], [0, 3]][head]);
    }
    let sums: Vec<f64> = (0..4)
        .map(|page| of_head(&reference, 0)[page] + of_head(&reference, 1)[page])
        .collect();
    assert_printed("sums of bounds", &sums, &[3.7656, 3.8281, 2.8438, 2.2812]);
    assert_eq!(chosen(&sums), [1, 3]);
    for device in devices {
        let call = dense.inputs(device, DType::F32);
        let got = estimator.scores(&call, 0..ROWS).unwrap();
        let got = to_f64(got.into_data());
        for (head, bounds) in bounds.iter().enumerate() {
            assert_printed("bounds on a device", &of_head(&got, head), bounds);
        }
    }
}
