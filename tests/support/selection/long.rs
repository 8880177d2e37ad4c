//! Calls so long that kernels make their scores in several parts, on a device, against loops over some heads.

use burn_sparse_select::{EstimateInputs, EstimateKind, ReferenceInputs, Selection};

use crate::prelude::*;

/// A selection, and batch entries, heads of queries and of keys, tokens and width of a call.
const CALLS: [(&str, [usize; 5]); 8] = [
    ("topk:128,4", [1, 8, 2, 8_192, 32]),
    // 1,024 groups of 32 heads: more than 2²⁴ products.
    ("xattention:128,16,0.9", [1, 32, 8, 16_384, 16]),
    ("xattention:128,8,0.9", [1, 8, 4, 12_345, 16]),
    // The queries of a head of keys take 2²⁴ products or more.
    ("minference:64,300,100", [1, 4, 2, 65_536, 16]),
    ("minference:128,300,100,300", [1, 4, 2, 32_771, 16]),
    ("flexprefill:128,0.5", [1, 4, 2, 32_768, 16]),
    ("flexprefill:128,0.5,2", [2, 4, 2, 16_384, 16]),
    ("flexprefill:128,0.01,0.1,1024", [1, 4, 2, 20_000, 16]),
];

/// Numbers that both a device and loops have exactly.
struct Problem {
    dims: [usize; 5],
    q: Vec<f32>,
    k: Vec<f32>,
}

impl Problem {
    fn new(dims: [usize; 5], seed: u64) -> Self {
        let [batch, heads, kv_heads, seq, dim] = dims;
        let mut rng = seeded(seed);
        let mut numbers = |heads: usize| -> Vec<f32> {
            (0..batch * heads * seq * dim)
                .map(|_| rng.random_range(-24..25) as f32 / 16.0)
                .collect()
        };
        let q = numbers(heads);
        let k = numbers(kv_heads);
        Self { dims, q, k }
    }

    fn call(&self, device: &Device, dtype: DType) -> EstimateInputs {
        let [batch, heads, kv_heads, seq, dim] = self.dims;
        let tensor = |numbers: &[f32], heads: usize| {
            floats(numbers, [batch, heads, seq, dim], device).cast(dtype)
        };
        EstimateInputs::new(tensor(&self.q, heads), tensor(&self.k, kv_heads))
    }

    /// Queries and keys of one head.
    fn head(&self, entry: usize, head: usize) -> [Vec<f64>; 2] {
        let [_, heads, kv_heads, seq, dim] = self.dims;
        let kv_head = entry * kv_heads + head / (heads / kv_heads);
        let of = |numbers: &[f32], head: usize| -> Vec<f64> {
            let numbers = &numbers[head * seq * dim..][..seq * dim];
            numbers.iter().map(|&number| number.into()).collect()
        };
        [of(&self.q, entry * heads + head), of(&self.k, kv_head)]
    }
}

fn dense<'a>([q, k]: [&'a [f64]; 2], seq: usize, dim: usize) -> ReferenceInputs<'a> {
    ReferenceInputs {
        q,
        k,
        heads: 1,
        kv_heads: 1,
        seq_q: seq,
        seq_kv: seq,
        head_dim: dim,
        scale: 1.0 / (dim as f64).sqrt(),
        causal: true,
    }
}

/// Scores of long calls, in f32 and in half precision.
pub fn long_calls_choose_as_loops(devices: &[Device]) {
    let ran = choose_as_loops(devices, &CALLS);
    assert_ran("long_calls_choose_as_loops", ran);
}

/// Heads of more than 2¹⁷ pairs of blocks, of which kernels look for the least that is kept by several cubes each, a digit a launch.
pub fn heads_of_many_blocks_choose_as_loops(devices: &[Device]) {
    let ran = choose_as_loops(devices, &[("flexprefill:8,0.5,2", [1, 2, 1, 2_912, 16])]);
    assert_ran("heads_of_many_blocks_choose_as_loops", ran);
}

/// Scores of calls, in f32 and in half precision, are those of loops over some heads. How many were compared.
fn choose_as_loops(devices: &[Device], calls: &[(&str, [usize; 5])]) -> usize {
    let mut ran = 0;
    for (index, &(text, dims)) in calls.iter().enumerate() {
        let selection: Selection = text.parse().unwrap();
        let estimator = selection.estimator();
        let problem = Problem::new(dims, 9900 + index as u64);
        let [batch, heads, _, seq, dim] = dims;
        // The first, the last and one between.
        let wanted = [(0, 0), (0, heads / 2), (batch - 1, heads - 1)];
        let expected = wanted.map(|(entry, head)| {
            let [q, k] = problem.head(entry, head);
            estimator.reference(&dense([&q, &k], seq, dim))
        });
        for (device, dtype) in with_each(devices, &[DType::F32, DType::BF16, DType::F16]) {
            let call = problem.call(device, dtype);
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
                // A column that is as good as equal to the last one that is kept has a block in every row.
                assert!(other * 500 < of_head, "{what}: {other} of {of_head}");
            }
            ran += 1;
        }
    }
    ran
}

/// Every query's blocks of a long call, in f32 and in half precision: their scores are the highest.
pub fn long_gates_choose_as_loops(devices: &[Device]) {
    let mut ran = 0;
    for (index, (text, dims)) in [
        ("moba:128,4", [1, 8, 2, 16_384, 16]),
        ("moba:512,7", [2, 4, 4, 9_000, 32]),
    ]
    .into_iter()
    .enumerate()
    {
        let selection: Selection = text.parse().unwrap();
        let problem = Problem::new(dims, 9950 + index as u64);
        let [batch, heads, _, seq, dim] = dims;
        for (device, dtype) in with_each(devices, &[DType::F32, DType::BF16, DType::F16]) {
            let call = problem.call(device, dtype);
            let block = selection.estimator().grid().block;
            let lists = selection.query_lists(&call).unwrap().unwrap();
            let [.., most] = lists.blocks.dims();
            let picks = to_f64(lists.blocks.into_data());
            for (entry, head) in [(0, 0), (batch - 1, heads - 1)] {
                let [q, k] = problem.head(entry, head);
                let scores = selection.estimator().reference(&dense([&q, &k], seq, dim));
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
    assert_ran("long_gates_choose_as_loops", ran);
}
