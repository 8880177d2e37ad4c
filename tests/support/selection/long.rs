//! Calls so long that kernels compute their scores in several parts, on devices, against loops over some heads.

use burn_sparse_select::{EstimateKind, Selection};

use crate::judge::estimate::Estimate;
use crate::prelude::*;

/// A selection; batch entries, query heads, KV heads, tokens and width of a call.
const CALLS: [(&str, [usize; 5]); 9] = [
    ("topk:128,4", [1, 8, 2, 8_192, 32]),
    // 1,024 groups of 32 heads: more than 2²⁴ products.
    ("xattention:128,16,0.9", [1, 32, 8, 16_384, 16]),
    ("xattention:128,8,0.9", [1, 8, 4, 12_345, 16]),
    // The queries of a KV head take at least 2²⁴ products.
    ("minference:64,300,100", [1, 4, 2, 65_536, 16]),
    ("minference:128,300,100,300", [1, 4, 2, 32_771, 16]),
    ("flexprefill:128,0.5", [1, 4, 2, 32_768, 16]),
    ("flexprefill:128,0.5,2", [2, 4, 2, 16_384, 16]),
    ("flexprefill:128,0.01,0.1,1024", [1, 4, 2, 20_000, 16]),
    // Lines that span several cubes each.
    ("flexprefill:128,0.5,0", [1, 2, 1, 131_072, 16]),
];

fn drawn([batch, heads, kv_heads, seq, width]: [usize; 5], seed: u64) -> Estimate {
    let sizes = Sizes::new([batch, heads, kv_heads], [seq; 2], [width; 2]);
    Estimate::drawn(sizes, true, seed)
}

/// Scores of long calls, in f32 and in half precision.
pub fn long_calls_choose_as_loops(devices: &[Device]) {
    let ran = choose_as_loops(devices, &CALLS);
    assert_ran("long_calls_choose_as_loops", ran);
}

/// Heads with more than 2¹⁷ pairs of blocks, for which several cubes search the threshold of each, one digit per launch.
pub fn heads_of_many_blocks_choose_as_loops(devices: &[Device]) {
    let ran = choose_as_loops(devices, &[("flexprefill:8,0.5,2", [1, 2, 1, 2_912, 16])]);
    assert_ran("heads_of_many_blocks_choose_as_loops", ran);
}

/// Scores of calls, in f32 and in half precision, equal those of loops over some heads. Returns the number of comparisons.
fn choose_as_loops(devices: &[Device], calls: &[(&str, [usize; 5])]) -> usize {
    let mut ran = 0;
    for (index, &(text, dims)) in calls.iter().enumerate() {
        let selection: Selection = text.parse().unwrap();
        let estimator = selection.estimator();
        let problem = drawn(dims, 9900 + index as u64);
        let [batch, heads, ..] = dims;
        // The first, the last and one between.
        let wanted = [(0, 0), (0, heads / 2), (batch - 1, heads - 1)];
        let expected = wanted.map(|(entry, head)| estimator.reference(&problem.head(entry, head)));
        for (device, dtype) in with_each(devices, &[DType::F32, DType::BF16, DType::F16]) {
            let call = problem.inputs(device, dtype);
            let grid = call.grid(estimator.grid());
            let scores = estimator.scores(&call, 0..grid.rows()).unwrap();
            let scores = to_f64(scores.into_data());
            let of_head = grid.rows() * grid.blocks();
            for ((entry, head), expected) in wanted.into_iter().zip(&expected) {
                let got = &scores[(entry * heads + head) * of_head..][..of_head];
                let what = format!("{text}, {dtype:?}, {entry}, {head}, {device:?}");
                let ones = estimator.traits().kind == EstimateKind::Probability
                    && estimator.traits().causal_only;
                let mut other = 0;
                for (at, (&got, &expected)) in got.iter().zip(expected).enumerate() {
                    if !grid.is_visible(at / grid.blocks(), at % grid.blocks()) {
                        continue;
                    }
                    let tolerance = if ones { 0.0 } else { 1e-4 };
                    if (got - expected).abs() > tolerance || got.is_nan() {
                        assert!(ones && !got.is_nan(), "{what}, {at}: {got}, {expected}");
                        other += 1;
                    }
                }
                // A column that nearly ties with the last kept one has a block in every row.
                assert!(other * 500 < of_head, "{what}: {other} of {of_head}");
            }
            ran += 1;
        }
    }
    ran
}

/// The blocks of every query, in long calls of each width, in f32 and in half precision, have the highest scores.
pub fn gates_choose_as_loops(devices: &[Device]) {
    let calls = [
        ("moba:128,4", [1, 8, 2, 16_384, 16]),
        ("moba:512,7", [2, 4, 4, 9_000, 32]),
        ("moba:16,3", [1, 4, 1, 1000, 64]),
        ("moba:32,4", [1, 2, 2, 901, 128]),
        ("moba:8,9", [1, 2, 1, 510, 32]),
        ("moba:128,2", [1, 1, 1, 700, 96]),
    ];
    let mut ran = 0;
    for (index, (text, dims)) in some_of(calls.into_iter().enumerate(), calls.len()) {
        let selection: Selection = text.parse().unwrap();
        let problem = drawn(dims, 9950 + index as u64);
        let [batch, heads, _, seq, _] = dims;
        for (device, dtype) in with_each(devices, &[DType::F32, DType::BF16, DType::F16]) {
            let call = problem.inputs(device, dtype);
            let block = selection.estimator().grid().block;
            let lists = selection.query_lists(&call).unwrap().unwrap();
            let [.., most] = lists.blocks.dims();
            let picks = to_f64(lists.blocks.into_data());
            for (entry, head) in [(0, 0), (batch - 1, heads - 1)] {
                let scores = (selection.estimator()).reference(&problem.head(entry, head));
                let blocks = seq.div_ceil(block);
                let first = (entry * heads + head) * seq * most;
                for row in 0..seq {
                    let candidates = &scores[row * blocks..][..row / block];
                    let mut best = candidates.to_vec();
                    best.sort_by(|a, b| b.total_cmp(a));
                    let picks = &picks[first + row * most..][..most];
                    for (number, &pick) in picks.iter().enumerate() {
                        let what = format!("{text}, {dtype:?}, {entry}, {head}, {row}");
                        match best.get(number) {
                            None => assert_eq!(pick, -1.0, "{what}"),
                            Some(best) => {
                                let got = candidates[pick as usize];
                                assert!((got - best).abs() < 1e-4, "{what}: {got}, {best}");
                            }
                        }
                    }
                }
            }
            ran += 1;
        }
    }
    assert_ran("gates_choose_as_loops", ran);
}
