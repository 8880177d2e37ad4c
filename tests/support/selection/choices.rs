//! Selection of blocks on devices, against plain f64 loops.

use burn_sparse_select::{
    Budget, EstimateInputs, EstimateKind, GqaReduction, ReferenceInputs, ScoreGrid, Selection,
};

use crate::judge::estimate::Estimate;
use crate::prelude::*;

/// Width unless stated otherwise.
const DIM: usize = 16;

const fn sizes(heads: [usize; 3], seq: [usize; 2]) -> Sizes {
    Sizes::new(heads, seq, [DIM; 2])
}

const SIZES: [Sizes; 6] = [
    sizes([2, 4, 2], [96, 96]),
    sizes([1, 4, 1], [77, 77]),
    sizes([2, 2, 2], [30, 101]),
    sizes([1, 3, 1], [101, 30]),
    sizes([1, 2, 1], [1, 45]),
    sizes([2, 6, 2], [5, 5]),
];

/// Every method and rule, and whether it supports calls that are not causal. The first rows of a causal call sum to integers, so no share is one
/// that few blocks reach exactly.
const SELECTIONS: [(&str, bool); 23] = [
    ("topk:8,3", true),
    ("topk:16,ratio=0.3,1,0,share=mean", true),
    ("topk:8,p=0.8,share=max", true),
    ("topk:8,above=0.4,0,0,share=sum", true),
    ("xattention:8,4,0.7", true),
    ("xattention:16,2,0.5,share=sum", true),
    ("xattention:16,16,k=2,share=mean", true),
    ("xattention:8,1,above=0.5,share=max,first=0", true),
    ("xattention:8,8,0.6,min=2,max=4,local=2", true),
    ("sparge:8,0.6,0.13", true),
    ("sparge:16,0.4,0.07,share=sum", true),
    ("sparge:8,k=3,0.12,smooth=0", true),
    ("sparge:8,above=0.6,-1,share=max", true),
    ("sparge:8,0.5,1", true),
    ("flexprefill:8,0.73", false),
    ("flexprefill:16,0.47,0.3,share=max", false),
    ("flexprefill:8,0.83,0", false),
    ("flexprefill:8,0.21,0.1,20", false),
    ("flexprefill:16,0.1,2,33", false),
    ("flexprefill:8,0.1,0,1000", false),
    ("minference:8,6,5,12,sinks=2,window=3", false),
    ("minference:16,0,1,64,sinks=3,window=1,share=sum", false),
    ("minference:8,20,9,1,sinks=0,window=4,share=max", false),
];

/// Returns the blocks of a row of a head, as flags.
fn row(layout: &BlockLayout, entry: usize, head: usize, row: usize) -> Vec<bool> {
    let mut kept = vec![false; layout.kv_blocks()];
    let row = layout.row(layout.pattern_of(entry, head), row);
    let blocks = row.into_iter().map(|block| block.block as usize);
    blocks.for_each(|block| kept[block] = true);
    kept
}

/// Returns a head's scores in loops, after sharing among heads.
fn shared(scores: &[f64], sharing: GqaReduction, call: &ReferenceInputs, head: usize) -> Vec<f64> {
    let (group, len) = (call.heads / call.kv_heads, scores.len() / call.heads);
    let of = |head: usize, at: usize| scores[head * len + at];
    if sharing == GqaReduction::PerHead {
        return (0..len).map(|at| of(head, at)).collect();
    }
    let first = head / group * group;
    let numbers = (0..len).map(|at| {
        let members = (first..first + group).map(|head| of(head, at));
        match sharing {
            GqaReduction::Max => members.fold(f64::NEG_INFINITY, f64::max),
            GqaReduction::Mean => members.sum::<f64>() / group as f64,
            _ => members.sum(),
        }
    });
    numbers.collect()
}

/// Returns scores on a device. Scores of some rows alone must be the same.
fn scores_of(
    selection: &Selection,
    problem: &Estimate,
    call: &EstimateInputs,
    what: &str,
) -> Vec<f64> {
    let estimator = selection.estimator();
    let grid = call.grid(estimator.grid());
    let scores = estimator.scores(call, 0..grid.rows()).unwrap();
    let Sizes { batch, heads, .. } = problem.sizes;
    let dims = [batch, heads, grid.rows(), grid.blocks()];
    let got = (scores.dims(), scores.dtype());
    assert_eq!(got, (dims, DType::F32), "{what}");
    if grid.rows() > 1 {
        let some = estimator.scores(call, 1..grid.rows()).unwrap();
        let same = scores.clone().slice_dim(2, 1..grid.rows());
        // Clamps infinities.
        let finite = |x: Tensor<4>| [("rows", x.clamp(-1e6, 1e6).into_data())];
        assert_alike(what, finite(some), finite(same), 1e-5);
    }
    to_f64(scores.into_data())
}

/// Panics if scores of visible blocks differ from those of loops.
fn assert_scores(what: &str, grid: &ScoreGrid, got: &[f64], expected: &[f64], tolerance: f64) {
    for (at, (got, expected)) in got.iter().zip(expected).enumerate() {
        let (block, row) = (at % grid.blocks(), at / grid.blocks() % grid.rows());
        let close = got == expected || (got - expected).abs() < tolerance;
        let is_right = close || !grid.is_visible(row, block);
        assert!(is_right, "{what}, {at}: {got}, {expected}");
    }
}

/// Selections; query and KV heads; queries and keys; width.
const ANTIDIAGONALS: &str = "
    xattention:64,8,0.9   | 3 1 | 300 300   | 16
    xattention:128,8,0.9  | 2 2 | 130 333   | 16
    xattention:128,4,0.9  | 2 1 | 333 100   | 16
    xattention:128,2,0.9  | 2 1 | 301 290   | 16
    xattention:64,8,0.9   | 4 1 | 1000 1000 | 64
    xattention:128,4,0.9  | 2 1 | 901 400   | 32
    xattention:128,1,0.9  | 2 1 | 500 500   | 16
    xattention:128,16,0.9 | 6 2 | 1500 1500 | 128
";

/// Like [`ANTIDIAGONALS`], with fewer queries than a warpgroup's rows, with those of a tile, and with more; with heads whose pattern the means
/// decide, others, both, and a minimum budget; with several widths.
const LINES: &str = "
    flexprefill:64,0.73,0                   | 4 2 | 900 900   | 16
    flexprefill:64,0.73,2                   | 2 1 | 300 300   | 16
    flexprefill:64,0.6,0.03                 | 6 2 | 200 520   | 16
    flexprefill:128,0.31,0.1,200            | 3 1 | 515 515   | 16
    flexprefill:32,0.47,0                   | 2 2 | 130 333   | 16
    flexprefill:128,0.5,0                   | 2 1 | 333 100   | 16
    minference:64,9,12,sinks=3,window=5     | 4 2 | 900 900   | 16
    minference:32,9,12,100,sinks=3,window=5 | 2 1 | 301 290   | 16
    minference:16,9,12,150,sinks=3,window=5 | 2 1 | 200 300   | 16
    flexprefill:128,0.5,0                   | 4 1 | 1000 1000 | 128
    flexprefill:64,0.5,0                    | 8 2 | 500 4099  | 64
    flexprefill:64,0.47,0                   | 6 2 | 65 2048   | 192
    minference:16,9,12,16,sinks=3,window=5  | 2 1 | 333 333   | 128
    minference:8,9,12,1,sinks=3,window=5    | 1 1 | 40 257    | 256
    minference:16,9,12,150,sinks=3,window=5 | 2 1 | 600 600   | 32
";

/// Sums over antidiagonals of half-precision elements, of blocks of 8 to 128 groups, which tensor cores may sum before they write. Devices without
/// kernels round products to half precision.
pub fn antidiagonals_in_half_precision_equal_those_of_loops(devices: &[Device]) {
    let ran = in_half_precision(devices, ANTIDIAGONALS, &[true, false]);
    assert_ran("antidiagonals_in_half_precision_equal_those_of_loops", ran);
}

/// Blocks that selected keys and distances touch, from the attention of the last queries in half precision, which tensor cores may sum before they
/// write.
pub fn lines_in_half_precision_equal_those_of_loops(devices: &[Device]) {
    let ran = in_half_precision(devices, LINES, &[true]);
    assert_ran("lines_in_half_precision_equal_those_of_loops", ran);
}

/// Scores of half-precision elements equal those of loops, for a part of the calls with `BURN_SPARSE_SHARD`. Returns the number of comparisons.
fn in_half_precision(devices: &[Device], table: &'static str, causals: &[bool]) -> usize {
    let mut ran = 0;
    let calls = rows(table);
    let count = calls.len();
    for (index, [text, heads, seq, width]) in some_of(calls.into_iter().enumerate(), count) {
        let selection: Selection = text.parse().unwrap();
        let [heads, kv_heads] = all(heads);
        let sizes = Sizes::new([2, heads, kv_heads], all(seq), [one(width); 2]);
        for &causal in causals {
            let problem = Estimate::drawn(sizes, causal, 9870 + index as u64);
            for (device, dtype) in halves(devices) {
                let call = problem.inputs(device, dtype);
                let grid = call.grid(selection.estimator().grid());
                let what = format!("{text}, {sizes:?}, causal {causal}, {dtype:?}, {device:?}");
                let scores = scores_of(&selection, &problem, &call, &what);
                for entry in 0..sizes.batch {
                    let expected = selection.estimator().reference(&problem.entry(entry));
                    let scores = &scores[entry * expected.len()..][..expected.len()];
                    assert_scores(&format!("{what}, {entry}"), &grid, scores, &expected, 1e-4);
                }
                ran += 1;
            }
        }
    }
    ran
}

/// Scores on a device equal those of loops, and so does the selection, except for scores that nearly equal one on the other side. Returns true if
/// the selections are equal.
fn check(selection: &Selection, problem: &Estimate, device: &Device) -> bool {
    let (sizes, causal) = (problem.sizes, problem.causal);
    let what = format!("{selection}, {sizes:?}, causal {causal}, {device:?}");
    let call = problem.inputs(device, DType::F32);
    let estimator = selection.estimator();
    let grid = call.grid(estimator.grid());
    let scores = scores_of(selection, problem, &call, &what);
    let chosen = selection.choose(&call).unwrap().layout.to_host().unwrap();
    let mut is_same = true;
    for entry in 0..problem.sizes.batch {
        let dense = problem.entry(entry);
        let expected = estimator.reference(&dense);
        let scores = &scores[entry * expected.len()..][..expected.len()];
        let reference = selection.choose_reference(&dense).unwrap();
        let what = format!("{what}, {entry}");
        assert_scores(&what, &grid, scores, &expected, 1e-5);
        for head in 0..dense.heads {
            let x = shared(&expected, selection.gqa_reduction(), &dense, head);
            for at in 0..grid.rows() {
                let own = entry.min(chosen.batch().unwrap_or(1) - 1);
                let got = row(&chosen, own, head, at);
                let expected = row(&reference, 0, head, at);
                let x = &x[at * grid.blocks()..][..grid.blocks()];
                for block in (0..got.len()).filter(|&block| got[block] != expected[block]) {
                    is_same = false;
                    let mut others = (0..got.len()).filter(|&other| expected[other] == got[block]);
                    let is_near = others.any(|other| (x[other] - x[block]).abs() < 1e-4);
                    let rule = selection.rule().keep;
                    let by_share = matches!(rule, Budget::TopP { .. } | Budget::MinP(_));
                    let is_ones = estimator.traits().causal_only;
                    let is_near = is_near || (by_share && !is_ones);
                    assert!(is_near, "{what}, {entry}, {head}, {at}, {block}: {x:?}");
                }
            }
        }
    }
    is_same
}

/// Attention over the device's selection equals that over the layout from loops.
fn check_attention(selection: &Selection, problem: &Estimate, device: &Device) {
    let call = problem.inputs(device, DType::F32);
    let chosen = selection.choose(&call).unwrap().layout;
    let entries = (0..problem.sizes.batch).map(|entry| {
        let layout = selection.choose_reference(&problem.entry(entry));
        layout.unwrap()
    });
    let reference = BlockLayout::stack_batch(&entries.collect::<Vec<_>>()).unwrap();
    let (q, k) = (&call.q, &call.k);
    let v = k.clone() * 0.5 + 0.25;
    let options = AttentionOptions::default();
    let got = outputs(attend_with_lse([q, k, &v], &chosen, &options));
    let expected = outputs(attend_with_lse([q, k, &v], &reference, &options));
    let what = format!("{selection}, {:?}, {device:?}", problem.sizes);
    assert_alike(&what, got, expected, 1e-5);
}

/// Grouped heads, many sizes, every rule and every way to share.
pub fn choices_equal_those_of_loops(devices: &[Device]) {
    let (mut ran, mut same) = (0, 0);
    let (part, parts) = shard();
    for (index, (text, every_key)) in SELECTIONS.into_iter().enumerate() {
        let selection: Selection = text.parse().unwrap();
        for (number, sizes) in SIZES.into_iter().enumerate() {
            if (index + number) % parts != part {
                continue;
            }
            for causal in [true, false] {
                if !causal && !every_key {
                    continue;
                }
                let problem = Estimate::drawn(sizes, causal, 9800 + (index * 10 + number) as u64);
                for device in devices {
                    ran += 1;
                    if check(&selection, &problem, device) {
                        same += 1;
                        check_attention(&selection, &problem, device);
                    }
                }
            }
        }
    }
    assert_ran("choices_equal_those_of_loops", ran);
    // Near ties are few.
    assert!(same * 20 >= ran * 19, "{same} of {ran} are the same");
}

/// Methods that count distances back from a query refuse calls that are not causal.
pub fn methods_of_earlier_keys_say_so(devices: &[Device]) {
    for device in devices {
        let problem = Estimate::drawn(SIZES[0], false, 1);
        let call = problem.inputs(device, DType::F32);
        for (text, every_key) in SELECTIONS {
            let selection: Selection = text.parse().unwrap();
            let traits = selection.estimator().traits();
            assert_eq!(traits.causal_only, !every_key, "{text}");
            assert!(!traits.prefix_stable, "{text}");
            if every_key {
                continue;
            }
            let expected = format!("call.causal must be true for {selection}, got false");
            refused! { selection.choose(&call) => expected; }
            assert_eq!(traits.kind, EstimateKind::Probability);
        }
    }
}

/// Queries and keys with NaN and infinities give a selection, and the same each time.
pub fn choices_of_what_is_no_number(devices: &[Device]) {
    let mut problem = Estimate::drawn(SIZES[0], true, 9899);
    let odd = [f64::NAN, f64::INFINITY, f64::NEG_INFINITY, 1e30];
    let mut rng = seeded(9899);
    for number in odd {
        for numbers in [&mut problem.q, &mut problem.k] {
            let at = rng.random_range(0..numbers.len());
            numbers[at] = number;
        }
    }
    for device in devices {
        let call = problem.inputs(device, DType::F32);
        for (text, _) in SELECTIONS {
            let selection: Selection = text.parse().unwrap();
            let v = call.q.zeros_like().slice_dim(1, 0..problem.sizes.kv_heads) + 1.0;
            // Queries of zeros weight all selected keys equally.
            let run = || {
                let layout = selection.choose(&call).unwrap().layout;
                let (q, k) = (call.q.zeros_like(), call.k.zeros_like());
                let options = AttentionOptions::default();
                let got = attend_with_lse([&q, &k, &v], &layout, &options);
                (to_f64(got.0.into_data()), to_f64(got.1.into_data()))
            };
            let (out, lse) = run();
            let is_whole = |x: &f64| (x.exp() - x.exp().round()).abs() < 1e-3;
            assert!(lse.iter().all(is_whole), "{text}, {device:?}: {lse:?}");
            let is_mean = |x: &f64| x.abs() < 1e-5 || (x - 1.0).abs() < 1e-5;
            assert!(out.iter().all(is_mean), "{text}, {device:?}");
            assert_eq!((out, lse), run(), "{text}, {device:?}");
        }
    }
}
