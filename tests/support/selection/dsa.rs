//! DeepSeek sparse attention, its selections and the losses of its indexer, against plain f64 loops.

use std::slice::from_ref;

use burn_sparse_select::TokenIndices;
use burn_sparse_select::dsa::{Dsa, DsaIndex, DsaTarget};

use crate::judge::dsa::{Problem, dsa_of};
use crate::judge::golden::{val, vals};
use crate::prelude::*;
use crate::selection::prefix::Prefix;

/// Returns the keys of each query.
pub fn rows(lists: &TokenIndices) -> Vec<Vec<usize>> {
    let [_, _, _, most] = lists.keys().dims();
    let row = |row: &[i32]| {
        let keys = named(row);
        assert!(row[keys.len()..].iter().all(|&key| key == -1), "{row:?}");
        keys
    };
    let keys = read_ints(lists.keys().clone());
    keys.chunks(most).map(row).collect()
}

/// Returns the loss, and its gradients with respect to the index. Queries and keys must get none. The loss is doubled, as if it were a part of a
/// larger one.
fn differentiated_loss(loss: Tensor<1>, index: &DsaIndex, qk: [&Tensor<4>; 2]) -> [TensorData; 4] {
    let grads = (loss.clone() * 2.0).backward();
    assert!(qk.iter().all(|x| x.grad(&grads).is_none()));
    let half = |grad: Tensor<4>| (grad * 0.5).into_data();
    let [by_q, by_k] = [&index.q, &index.k].map(|x| half(x.grad(&grads).unwrap()));
    let by_weights = (index.weights.grad(&grads).unwrap() * 0.5).into_data();
    [loss.into_data(), by_q, by_k, by_weights]
}

fn require_grad(mut index: DsaIndex) -> DsaIndex {
    index.weights = index.weights.detach().require_grad();
    [index.q, index.k] = [index.q, index.k].map(|x| x.detach().require_grad());
    index
}

/// Panics if scores differ from f64, or selections from the scores.
pub fn assert_choices(
    what: &str,
    (problem, exact): (&Problem, &Problem),
    scores: &[f64],
    chosen: &[Vec<usize>],
    [keep, near]: [usize; 2],
    tolerance: f64,
) {
    let seq_kv = problem.seq[1];
    for (query, chosen) in chosen.iter().enumerate() {
        let what = format!("{what}, query {query}");
        let scores = &scores[query * seq_kv..][..seq_kv];
        assert_near(&what, scores, &exact.scores(query), tolerance);
        let (by_device, _) = problem.choice_by(scores, query, [keep, near]);
        assert_eq!(*chosen, by_device, "{what}");
    }
}

/// Externally computed values. One happens to be close to π / 4.
#[allow(clippy::approx_constant)]
pub fn dsa_golden(devices: &[Device]) {
    let problem = Problem::golden();
    assert_eq!([val(5, 0, 7, 0), val(5, 1, 7, 0)], [1.0, 0.0]);
    assert_eq!([val(5, 0, 15, 0), val(5, 1, 15, 0)], [-0.875, 1.0]);
    let row7 = [0.0497, 0.0, 0.0, 0.0, 0.0, 0.6740, 0.4475, 0.0];
    let row15 = [
        0.0442, 0.0552, 0.0110, -0.5414, 0.0110, -0.4399, -1.2858, -0.1353, 0.1105, -0.4060,
        -0.2707, -0.4737, -0.2369, -0.3384, 0.0, 0.0,
    ];
    assert_printed("row 7", &problem.scores(7)[..8], &row7);
    assert_printed("row 15", &problem.scores(15), &row15);
    let dsa = Dsa::new(5).unwrap();
    let last = problem.last_query();
    let (all, _) = last.loss(0.5, |_| (0..16).collect());
    let (over_chosen, _) = last.loss(0.5, |_| vec![0, 1, 2, 4, 8]);
    assert!((all - 0.087519).abs() < 6e-7, "{all}");
    assert!((over_chosen - 0.000943).abs() < 6e-7, "{over_chosen}");
    assert_eq!(problem.choice(7, 5, 0).0, [0, 1, 2, 5, 6]);
    assert_eq!(problem.choice(15, 5, 0).0, [0, 1, 2, 4, 8]);
    for (device, dtype, _) in exact(devices) {
        let lists = dsa.choose(&problem.index(device, dtype)).unwrap();
        let [q, k] = problem.queries_and_keys(device, dtype);
        let v = tensor(&vals(2, 1, 16), [1, 1, 16, 4], device, dtype);
        let options = AttentionOptions::default();
        let out = dsa.attention(q, k, v, lists, options).unwrap();
        let out = to_f64(out.into_data());
        let tolerance = product_tolerance(device, dtype, 5.1e-5);
        let head_0 = [0.0088, -0.7065, 0.7853, 0.0700];
        assert_near("head 0", &out[15 * 4..][..4], &head_0, tolerance);
        let head_1 = [-0.3975, -0.9019, 0.9981, 0.4937];
        assert_near("head 1", &out[31 * 4..], &head_1, tolerance);
    }
}

/// Selections of any sizes equal those by the device's own scores, and those of f64 unless a rounding decides.
pub fn dsa_choices_equal_f64(devices: &[Device]) {
    // Queries and keys; numbers of kept keys and of near ones; scores in memory at a time.
    let sizes = [
        ([70, 70], 9, 0, 1 << 24),
        ([70, 70], 9, 4, 900),
        ([33, 90], 16, 16, 1),
        ([1, 77], 5, 1, 1 << 24),
        ([40, 40], 40, 3, 1 << 24),
        ([40, 40], 100, 0, 1 << 24),
        ([1, 1], 1, 0, 1 << 24),
        ([200, 2100], 300, 7, 100_000),
        // Rows so long that a cube has the maximum of units.
        ([3, 9001], 2048, 0, 1 << 24),
        // Few rows so long that each is cut.
        ([3, 50_001], 2048, 3, 1 << 24),
        ([2, 140_001], 2048, 7, 1 << 24),
        ([5, 65_536], 2048, 16, 2 * 65_536),
        // Nearly all keys are kept.
        ([1, 9001], 9000, 0, 1 << 24),
        ([60, 4100], 4000, 3, 1 << 24),
    ];
    for device in devices {
        // Scores are up to 10, and sums of terms as large.
        let tolerance = 10.0 * product_tolerance(device, DType::F32, 1e-6);
        for (seed, (seq, keep, near, numbers)) in (0..).zip(sizes) {
            let problem = Problem::random(10_800 + seed, seq);
            let dsa = dsa_of([keep, near], numbers);
            let index = problem.index(device, DType::F32);
            let scores = to_f64(dsa.scores(&index).into_data());
            let lists = dsa.choose(&index).unwrap();
            assert!(lists.is_causal() && lists.seq_kv() == seq[1]);
            let chosen = rows(&lists);
            assert_eq!(chosen.len(), seq[0]);
            let what = format!("{device:?}, {seq:?}, {keep}");
            let of = (&problem, &problem);
            assert_choices(&what, of, &scores, &chosen, [keep, near], tolerance);
            let mut compared = 0;
            for (query, chosen) in chosen.iter().enumerate() {
                let (exact, gap) = problem.choice(query, keep, near);
                if gap > 2.0 * tolerance {
                    assert_eq!(*chosen, exact, "{what}: {query}");
                    compared += 1;
                }
            }
            let is_rounded = tolerance > 1e-3;
            assert!(is_rounded || compared * 2 >= seq[0], "{what}: {compared}");
        }
    }
}

/// Ties go to earlier keys, including scores of ±0, infinity and NaN.
pub fn dsa_choices_of_equal_scores(devices: &[Device]) {
    let [rows_of, seq] = [40, 600];
    // One head of width 1: a score is the query's weight times the ReLU of its product with the key.
    let mut problem = Problem::of([1, 1, 4], [1, 1], [rows_of, seq]).filled(10_900);
    let (inf, nan) = (f64::INFINITY, f64::NAN);
    let some = [-1.0, 0.0, 0.5, 1.0, 1.0 + 1e-6, 2.0, 1e-30, inf, nan];
    let weights = [1.0, -1.0, 0.0, 3e-20, f64::NEG_INFINITY];
    let [q, k, w] = &mut problem.index;
    q.fill(1.0);
    for (at, key) in k.iter_mut().enumerate() {
        *key = f64::from(some[(at * 7 + at / 9) % some.len()] as f32);
    }
    for (at, weight) in w.iter_mut().enumerate() {
        *weight = f64::from(weights[at % weights.len()] as f32);
    }
    for device in devices {
        for (keep, near) in [(64, 0), (300, 0), (64, 5), (1, 0), (599, 0)] {
            let dsa = Dsa::new(keep).unwrap().with_near(near).unwrap();
            let index = problem.index(device, DType::F32);
            let scores = to_f64(dsa.scores(&index).into_data());
            let chosen = rows(&dsa.choose(&index).unwrap());
            for (query, chosen) in chosen.iter().enumerate() {
                let position = problem.position(query);
                let scores = &scores[query * seq..][..=position];
                let number = |key: usize| match (key + near > position, scores[key].is_nan()) {
                    (true, _) => f64::INFINITY,
                    // NaN sorts like −∞.
                    (_, true) => f64::NEG_INFINITY,
                    // −0 equals 0.
                    _ => scores[key] + 0.0,
                };
                let order = by_falling_score(0..=position, number);
                let mut expected = order[..keep.min(order.len())].to_vec();
                expected.sort_unstable();
                assert_eq!(*chosen, expected, "{device:?}, {keep}, {near}: {query}");
            }
        }
    }
}

/// For keys, and for blocks first: later tokens change nothing, and queries alone select and see the same keys.
pub fn dsa_is_prefix_stable(devices: &[Device]) {
    const BLOCKS: [usize; 2] = [4, 7];
    let (rows, keep) = (70, [8, 2]);
    let problem = Problem::random(10_900, [rows; 2]);
    let dsa = dsa_of(keep, 1 << 24);
    let [blocks, block] = BLOCKS;
    for device in devices {
        // Scores are up to 10, and sums of terms as large.
        let tolerance = 10.0 * product_tolerance(device, DType::F32, 1e-6);
        let index = problem.index(device, DType::F32);
        let weights = index.weights.clone().unsqueeze_dim(3);
        let [q, k] = problem.queries_and_keys(device, DType::F32);
        for dsa in [dsa, dsa.with_blocks(blocks, block).unwrap()] {
            let choose = |queries: &[Tensor<4>], keys: &[Tensor<4>]| {
                let weights = queries[1].clone().squeeze_dim(3);
                let index = DsaIndex::new(queries[0].clone(), keys[0].clone(), weights);
                dsa.choose(&index.unwrap()).unwrap()
            };
            let prefix = Prefix {
                what: format!("{device:?}, {:?}", dsa.blocks()),
                queries: vec![index.q.clone(), weights.clone(), q.clone()],
                keys: vec![index.k.clone(), k.clone()],
                attend: &|queries, keys| {
                    let [q, k] = [&queries[2], &keys[1]].map(Clone::clone);
                    let (lists, options) = (choose(queries, keys), AttentionOptions::default());
                    dsa.attention(q, k.clone(), k, lists, options).unwrap()
                },
                choose: &|queries, keys| choose(queries, keys).keys().clone(),
                is_clear: &|row| {
                    let (_, gap) = match dsa.blocks() {
                        None => problem.choice(row % rows, keep[0], keep[1]),
                        Some(_) => problem.choice_in_blocks(row % rows, keep, BLOCKS, DType::F32),
                    };
                    gap > 2.0 * tolerance
                },
                within: tolerance,
            };
            prefix.assert_stable();
        }
    }
}

/// Target of a loss, and the keys of each query; None for all keys.
type Over<'a> = (DsaTarget<'a>, Option<&'a [Vec<usize>]>);

/// Compares the batch's losses and gradients with f64, twice with equal bits. Each element has a tolerance relative to the largest of its kind, plus
/// an absolute one.
fn check_losses(
    what: &str,
    (dsa, scale): (&Dsa, f64),
    problems: &[Problem],
    (index, [q, k]): (&DsaIndex, &[Tensor<4>; 2]),
    targets: &[Over],
    within: impl Fn(usize) -> [f64; 2],
) {
    let count = problems.len() as f64;
    for &(over, listed) in targets {
        let run = || {
            let loss = dsa.loss(index, [q, k], Some(scale), over);
            differentiated_loss(loss.unwrap(), index, [q, k])
        };
        let what = format!("{what}, {over:?}");
        let got = run();
        for (got, again) in got.iter().zip(run()) {
            assert_eq!(got.as_bytes(), again.as_bytes(), "{what}");
        }
        let mut expected = [const { Vec::new() }; 4];
        expected[0].push(0.0);
        for (entry, problem) in problems.iter().enumerate() {
            let (loss, grads) = problem.loss(scale, |query| match listed {
                Some(lists) => lists[entry * problem.seq[0] + query].clone(),
                None => (0..=problem.position(query)).collect(),
            });
            // The loss is the mean over all entries.
            expected[0][0] += loss / count;
            for (all, own) in expected[1..].iter_mut().zip(grads) {
                all.extend(own.into_iter().map(|x| x / count));
            }
        }
        for (part, (got, expected)) in got.into_iter().zip(&expected).enumerate() {
            let ([share, size], largest) = (within(part), largest(expected));
            assert!(part == 0 || largest > 1e-5, "{what}: {largest}");
            let what = format!("{what}, {part}");
            assert_near(&what, &to_f64(got), expected, share * largest + size);
        }
    }
}

/// Losses and all gradients equal f64: in several slabs, with batches, odd sizes and half precision, twice with equal bits.
pub fn dsa_gradients_equal_f64(devices: &[Device]) {
    // Query heads, KV heads and width; of the indexer; queries and keys; scores in memory at a time.
    let sizes = [
        ([4, 2, 5], [3, 6], [21, 29], 2 * 29 * 8),
        ([10, 1, 16], [9, 68], [70, 90], 2 * 90 * 50),
    ];
    for device in devices {
        let mut dtypes: Vec<(DType, f64)> = exact_dtypes(device);
        dtypes.extend(half_dtypes(device).into_iter().map(|dtype| (dtype, 1e-4)));
        for (seed, (heads, index, seq, numbers)) in (11_200..).zip(sizes) {
            let shape = Problem::of(heads, index, seq);
            let problems = [seed, seed + 50].map(|seed| shape.clone().filled(seed));
            // Kernels of each size and dtype take long to compile, so half precision has one size.
            let of_size = dtypes
                .iter()
                .filter(|(dtype, _)| dtype.size() > 2 || seed == 11_200);
            for &(dtype, tolerance) in of_size {
                let what = format!("{device:?}, {dtype:?}, {seq:?}, {heads:?}");
                // Rounded like the device's tensors.
                let problems = problems.each_ref().map(|problem| problem.rounded(dtype));
                let autodiff = device.clone().autodiff();
                let index = require_grad(Problem::index_of(&problems, &autodiff, dtype));
                let pairs = Problem::queries_and_keys_of(&problems, &autodiff, dtype);
                let dsa = dsa_of([7, 0], numbers);
                let lists = dsa.choose(&index).unwrap();
                // Lists of arbitrary keys, including later ones.
                let wild = (0..2 * seq[0] * 6).map(|at| ((at * at + at / 7) % seq[1]) as i32);
                let wild: Vec<i32> = wild.collect();
                let wild = ints(&wild, [2, 1, seq[0], 6], device);
                let wild = TokenIndices::new(wild, seq[1], false).unwrap();
                let (chosen, any) = (rows(&lists), rows(&wild));
                let targets = [
                    (DsaTarget::All, None),
                    (DsaTarget::Chosen(&lists), Some(&chosen[..])),
                    (DsaTarget::Chosen(&wild), Some(&any[..])),
                ];
                // Gradients are rounded to half precision, losses are not.
                let share = if dtype.size() == 2 { 8e-3 } else { 0.0 };
                let size = 10.0 * tolerance.max(1e-12);
                let within = |part| [if part > 0 { share } else { 0.0 }, size];
                let of = (&index, &pairs);
                check_losses(&what, (&dsa, 0.4), &problems, of, &targets, within);
            }
        }
    }
}

/// Scores, selections, losses and gradients in half precision, on tensor cores if a device has them: aligned and odd widths, few and many heads, one
/// and several KV heads, several slabs.
pub fn dsa_in_half_precision(devices: &[Device]) {
    // Query heads, KV heads and width; of the indexer; queries and keys; scores in memory at a time; numbers of kept keys and of near ones.
    let sizes = [
        ([4, 2, 24], [3, 24], [30, 70], 70 * 16, [9, 4]),
        ([1, 1, 8], [1, 72], [40, 40], 1 << 20, [12, 0]),
        ([3, 3, 72], [4, 16], [33, 300], 300 * 7, [40, 1]),
        ([16, 1, 128], [64, 128], [65, 530], 530 * 40, [290, 9]),
        ([20, 2, 40], [8, 200], [20, 90], 1 << 20, [33, 3]),
        ([144, 2, 16], [72, 8], [9, 270], 1 << 20, [20, 2]),
        ([40, 1, 256], [24, 256], [21, 260], 1 << 20, [30, 0]),
        // Heads of the indexer that fill the columns of a step.
        ([2, 1, 64], [16, 128], [130, 300], 1 << 20, [64, 16]),
        ([2, 2, 48], [128, 128], [33, 300], 1 << 20, [40, 0]),
        ([1, 1, 64], [8, 128], [130, 600], 600 * 50, [64, 2]),
        ([4, 2, 64], [32, 128], [150, 400], 1 << 20, [64, 0]),
        ([4, 2, 48], [40, 64], [60, 300], 1 << 20, [30, 16]),
    ];
    for device in devices {
        // Other devices have one kernel for all sizes. On CUDA each size takes long to compile, so processes may share them.
        let (part, parts) = match is_cuda(device) {
            true => shard(),
            false => (0, sizes.len()),
        };
        let own = (0..).zip(sizes).skip(part).step_by(parts);
        for (number, (heads, of_index, seq, numbers, [keep, near])) in own {
            // Each size but the first has one dtype.
            let dtypes = half_dtypes(device).into_iter().enumerate();
            let own = dtypes.filter(|(at, _)| number == 0 || number % 2 == *at);
            for (_, dtype) in own {
                let what = format!("{device:?}, {dtype:?}, {heads:?}, {of_index:?}, {seq:?}");
                let problem = Problem::of(heads, of_index, seq).filled(11_300 + number as u64);
                let problem = problem.rounded(dtype);
                let autodiff = device.clone().autodiff();
                let index = require_grad(problem.index(&autodiff, dtype));
                let pairs = problem.queries_and_keys(&autodiff, dtype);
                let dsa = dsa_of([keep, near], numbers);
                let scores = to_f64(dsa.scores(&index).into_data());
                let lists = dsa.choose(&index).unwrap();
                let chosen = rows(&lists);
                let of = (&problem, &problem);
                assert_choices(&what, of, &scores, &chosen, [keep, near], 2e-5);
                let scale = 1.0 / (heads[2] as f64).sqrt();
                let targets = [
                    (DsaTarget::All, None),
                    (DsaTarget::Chosen(&lists), Some(&chosen[..])),
                ];
                // Gradients are rounded to half precision, losses are not.
                let within = |part| if part > 0 { [8e-3, 0.0] } else { [0.0, 1e-3] };
                let (of, problems) = ((&index, &pairs), from_ref(&problem));
                check_losses(&what, (&dsa, scale), problems, of, &targets, within);
            }
        }
    }
}

/// Errors for wrong sizes and numbers.
pub fn dsa_errors(devices: &[Device]) {
    let dsa = Dsa::new(4).unwrap();
    refused! {
        Dsa::new(0) => "…keep must be at least 1…";
        dsa.with_near(5) => "…near must be at most keep…";
    }
    for device in devices {
        let zeros = |shape: [usize; 4]| Tensor::<4>::zeros(shape, (device, DType::F32));
        let weights = |heads, rows| Tensor::<3>::zeros([1, heads, rows], (device, DType::F32));
        let q = || zeros([1, 2, 8, 4]);
        refused! {
            DsaIndex::new(q(), zeros([1, 2, 8, 4]), weights(2, 8)) => "…index k's heads…";
            DsaIndex::new(q(), zeros([1, 1, 8, 5]), weights(2, 8)) => "…index_dim…";
            DsaIndex::new(q(), zeros([1, 1, 8, 4]), weights(3, 8)) => "…weights' shape…";
            DsaIndex::new(q(), zeros([1, 1, 7, 4]), weights(2, 8)) => "…seq_q…";
        }
        let index = DsaIndex::new(q(), zeros([1, 1, 8, 4]), weights(2, 8)).unwrap();
        let (queries, keys) = (zeros([1, 2, 7, 4]), zeros([1, 1, 8, 4]));
        refused! { dsa.loss(&index, [&queries, &keys], None, DsaTarget::All) => "…q's seq_q…"; }
    }
}
