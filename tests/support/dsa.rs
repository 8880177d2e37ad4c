//! DeepSeek sparse attention, its choices and what its indexer learns by, against plain f64 loops.

use burn::tensor::{DType, Device, Int, Tensor, TensorData};
use burn_blocksparse::AttentionOptions;
use burn_sparse_select::TokenIndices;
use burn_sparse_select::dsa::Dsa;
use burn_sparse_select::dsa::DsaIndex;
use burn_sparse_select::dsa::DsaTarget;

use crate::cases::shard;
use crate::compare::{read, to_f64};
use crate::devices::{exact_dtypes, half_dtypes, supports};
use crate::dsa_problem::Problem;
use crate::golden::{val, vals};
use crate::linear::{product_tolerance, tensor};

/// The keys of each query.
pub(crate) fn rows(lists: &TokenIndices) -> Vec<Vec<usize>> {
    let [_, _, _, most] = lists.keys().dims();
    let keys: Vec<i32> = read(lists.keys().clone()).iter().collect();
    let row = |row: &[i32]| {
        let there = row.iter().take_while(|&&key| key >= 0).count();
        assert!(row[there..].iter().all(|&key| key == -1), "{row:?}");
        row[..there].iter().map(|&key| key as usize).collect()
    };
    keys.chunks(most).map(row).collect()
}

fn assert_printed(what: &str, got: &[f64], printed: &[f64]) {
    assert_near(what, got, printed, 5.1e-5);
}

pub(crate) fn assert_near(what: &str, got: &[f64], expected: &[f64], tolerance: f64) {
    assert_eq!(got.len(), expected.len(), "{what}");
    for (got, expected) in got.iter().zip(expected) {
        let is_near = (got - expected).abs() <= tolerance;
        assert!(is_near, "{what}: {got}, {expected}");
    }
}

/// Numbers that were computed elsewhere, of which one happens to be like a quarter of π.
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
    let all = problem.last_query().loss(0.5, |_| (0..16).collect());
    let over_chosen = last.loss(0.5, |_| vec![0, 1, 2, 4, 8]);
    assert!((all - 0.087519).abs() < 6e-7, "{all}");
    assert!((over_chosen - 0.000943).abs() < 6e-7, "{over_chosen}");
    for device in devices {
        for (dtype, _) in exact_dtypes(device) {
            let index = problem.index(device, dtype);
            let scores = to_f64(dsa.scores(&index).into_data());
            assert_printed("row 7", &scores[7 * 16..][..8], &row7);
            assert_printed("row 15", &scores[15 * 16..], &row15);
            let lists = dsa.choose(&index).unwrap();
            let chosen = rows(&lists);
            assert_eq!(chosen[7], [0, 1, 2, 5, 6], "{device:?}");
            assert_eq!(chosen[15], [0, 1, 2, 4, 8], "{device:?}");
            for (query, chosen) in chosen.iter().enumerate() {
                assert_eq!(
                    *chosen,
                    problem.choice(query, 5, 0).0,
                    "{device:?}, {query}"
                );
            }
            let [q, k] = problem.queries_and_keys(device, dtype);
            let v = tensor(&vals(2, 1, 16), [1, 1, 16, 4], device, dtype);
            let options = AttentionOptions::default();
            let out = dsa.attention(q, k, v, lists, options).unwrap();
            let out = to_f64(out.into_data());
            let tolerance = product_tolerance(device, dtype, 5.1e-5);
            assert_near(
                "head 0",
                &out[15 * 4..][..4],
                &[0.0088, -0.7065, 0.7853, 0.0700],
                tolerance,
            );
            assert_near(
                "head 1",
                &out[31 * 4..],
                &[-0.3975, -0.9019, 0.9981, 0.4937],
                tolerance,
            );

            let index = last.index(device, dtype);
            let lists = dsa.choose(&index).unwrap();
            let [q, k] = last.queries_and_keys(device, dtype);
            for (over, printed) in [
                (DsaTarget::All, 0.087519),
                (DsaTarget::Chosen(&lists), 0.000943),
            ] {
                let loss = dsa.loss(&index, [&q, &k], None, over).unwrap();
                let loss = to_f64(loss.into_data())[0];
                assert!(
                    (loss - printed).abs() < 1e-6,
                    "{device:?}: {loss}, {printed}"
                );
            }
        }
    }
}

/// Choices of any sizes: those of the scores that the device has, and those of f64, but for what a rounding decides.
pub fn dsa_choices_equal_f64(devices: &[Device]) {
    // Queries and keys, how many are kept, near ones among them, and scores in memory at a time.
    let sizes = [
        ([70, 70], 9, 0, 1 << 24),
        ([70, 70], 9, 4, 900),
        ([33, 90], 16, 16, 1),
        ([1, 77], 5, 1, 1 << 24),
        ([40, 40], 40, 3, 1 << 24),
        ([40, 40], 100, 0, 1 << 24),
        ([1, 1], 1, 0, 1 << 24),
        ([200, 2100], 300, 7, 100_000),
        // Of rows so long a cube has as many units as it may.
        ([3, 9001], 2048, 0, 1 << 24),
        // Few rows so long are cut.
        ([3, 50_001], 2048, 3, 1 << 24),
    ];
    for device in devices {
        // Scores are up to 10, and sums of terms as large.
        let tolerance = 10.0 * product_tolerance(device, DType::F32, 1e-6);
        for (seed, (seq, keep, near, numbers)) in (0..).zip(sizes) {
            let problem = Problem::random(10_800 + seed, seq);
            let dsa = Dsa::new(keep).unwrap().with_near(near).unwrap();
            let dsa = dsa.with_chunk_elements(numbers).unwrap();
            let index = problem.index(device, DType::F32);
            let scores = to_f64(dsa.scores(&index).into_data());
            let lists = dsa.choose(&index).unwrap();
            assert!(lists.is_causal() && lists.seq_kv() == seq[1]);
            let chosen = rows(&lists);
            assert_eq!(chosen.len(), seq[0]);
            let mut compared = 0;
            for (query, chosen) in chosen.iter().enumerate() {
                let what = format!("{device:?}, {seq:?}, {keep}: {query}");
                let scores = &scores[query * seq[1]..][..seq[1]];
                assert_near(&what, scores, &problem.scores(query), tolerance);
                let (by_device, _) = problem.choice_by(scores, query, keep, near);
                assert_eq!(*chosen, by_device, "{what}");
                let (exact, gap) = problem.choice(query, keep, near);
                if gap > 2.0 * tolerance {
                    assert_eq!(*chosen, exact, "{what}");
                    compared += 1;
                }
            }
            let is_rounded = tolerance > 1e-3;
            assert!(
                is_rounded || compared * 2 >= seq[0],
                "{device:?}, {seq:?}: {compared}"
            );
        }
    }
}

/// Of equal scores the earlier keys, also of those that are 0 of either sign, infinite or no number.
pub fn dsa_choices_of_equal_scores(devices: &[Device]) {
    let [rows_of, seq] = [40, 600];
    // One head of width 1: a score is the query's weight times what is above 0 of its product with the key.
    let mut problem = Problem::of([1, 1, 4], [1, 1], [rows_of, seq]).filled(10_900);
    let some = [
        -1.0,
        0.0,
        0.5,
        1.0,
        1.0 + 1e-6,
        2.0,
        1e-30,
        f64::INFINITY,
        f64::NAN,
    ];
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
                    // As low as the lowest.
                    (_, true) => f64::NEG_INFINITY,
                    // −0 is 0.
                    _ => scores[key] + 0.0,
                };
                let mut order: Vec<usize> = (0..=position).collect();
                order.sort_by(|&a, &b| number(b).partial_cmp(&number(a)).unwrap().then(a.cmp(&b)));
                let mut expected = order[..keep.min(order.len())].to_vec();
                expected.sort_unstable();
                assert_eq!(*chosen, expected, "{device:?}, {keep}, {near}: {query}");
            }
        }
    }
}

/// Later tokens change no choice, and the queries of new tokens choose as they do among all.
pub fn dsa_is_prefix_stable(devices: &[Device]) {
    let problem = Problem::random(10_900, [60, 60]);
    let dsa = Dsa::new(8).unwrap().with_near(2).unwrap();
    for device in devices {
        let run =
            |problem: &Problem| rows(&dsa.choose(&problem.index(device, DType::F32)).unwrap());
        let before = run(&problem);
        let mut changed = problem.clone();
        for (part, width) in [(0, 6), (1, 6), (2, 1)] {
            for head in changed.index[part].chunks_mut(60 * width) {
                head[40 * width..].iter_mut().for_each(|x| *x = 1.25 - *x);
            }
        }
        let after = run(&changed);
        assert_eq!(before[..40], after[..40], "{device:?}");
        assert!(before[40..] != after[40..], "{device:?}");
        assert_eq!(before[59..], run(&problem.last_query()), "{device:?}");
    }
}

/// What the indexer learns by, over all keys and over chosen ones.
pub fn dsa_losses_equal_f64(devices: &[Device]) {
    for (seed, seq) in [(11_000, [30, 30]), (11_001, [11, 50])] {
        let problem = Problem::random(seed, seq);
        let dsa = Dsa::new(7).unwrap();
        for device in devices {
            for (dtype, tolerance) in exact_dtypes(device) {
                let index = problem.index(device, dtype);
                let [q, k] = problem.queries_and_keys(device, dtype);
                let lists = dsa.choose(&index).unwrap();
                let chosen = rows(&lists);
                for (over, expected) in [
                    (
                        DsaTarget::All,
                        problem.loss(0.7, |query| (0..=problem.position(query)).collect()),
                    ),
                    (
                        DsaTarget::Chosen(&lists),
                        problem.loss(0.7, |query| chosen[query].clone()),
                    ),
                ] {
                    let loss = dsa.loss(&index, [&q, &k], Some(0.7), over).unwrap();
                    let loss = to_f64(loss.into_data())[0];
                    assert!(
                        (loss - expected).abs() < 10.0 * tolerance,
                        "{device:?}, {dtype:?}, {over:?}: {loss}, {expected}"
                    );
                }
            }
        }
    }
}

/// The gradients of the loss; q and k have none.
pub fn dsa_gradients_equal_finite_differences(devices: &[Device]) {
    let problem = Problem::random(11_100, [13, 17]);
    let dsa = Dsa::new(6).unwrap();
    for device in devices.iter().filter(|device| supports(device, DType::F64)) {
        let lists = dsa.choose(&problem.index(device, DType::F64)).unwrap();
        for over in [DsaTarget::All, DsaTarget::Chosen(&lists)] {
            let autodiff = device.clone().autodiff();
            let mut index = problem.index(&autodiff, DType::F64);
            index.q = index.q.require_grad();
            index.k = index.k.require_grad();
            index.weights = index.weights.require_grad();
            let [q, k] = problem.queries_and_keys(&autodiff, DType::F64);
            let [q, k] = [q, k].map(Tensor::require_grad);
            let loss = dsa.loss(&index, [&q, &k], None, over).unwrap();
            // A loss may be a part of another.
            let grads = loss.mul_scalar(3.0).backward();
            assert!(q.grad(&grads).is_none() && k.grad(&grads).is_none());
            let found = [
                to_f64(index.q.grad(&grads).unwrap().into_data()),
                to_f64(index.k.grad(&grads).unwrap().into_data()),
                to_f64(index.weights.grad(&grads).unwrap().into_data()),
            ];
            let [q, k] = problem.queries_and_keys(device, DType::F64);
            for (part, grad) in found.iter().enumerate() {
                assert!(grad.iter().any(|&x| x.abs() > 1e-4));
                for at in (0..grad.len()).step_by(7) {
                    let loss = |step: f64| {
                        let mut moved = problem.clone();
                        moved.index[part][at] += step;
                        let index = moved.index(device, DType::F64);
                        let loss = dsa.loss(&index, [&q, &k], None, over).unwrap();
                        3.0 * to_f64(loss.into_data())[0]
                    };
                    let slope = (loss(1e-6) - loss(-1e-6)) / 2e-6;
                    assert!(
                        (slope - grad[at]).abs() < 1e-7,
                        "{device:?}, {over:?}, {part} at {at}: {}, differences say {slope}",
                        grad[at]
                    );
                }
            }
        }
    }
}

/// Two entries as one batch.
fn batch_of(
    indices: [DsaIndex; 2],
    [first, second]: [[Tensor<4>; 2]; 2],
) -> (DsaIndex, [Tensor<4>; 2]) {
    let [a, b] = indices;
    let join = |a: Tensor<4>, b: Tensor<4>| Tensor::cat(vec![a, b], 0);
    let weights = Tensor::cat(vec![a.weights, b.weights], 0);
    let index = DsaIndex::new(join(a.q, b.q), join(a.k, b.k), weights).unwrap();
    let ([q, k], [other_q, other_k]) = (first, second);
    (index, [join(q, other_q), join(k, other_k)])
}

/// Losses and all gradients of calls in several slabs, of batches, odd sizes and in half precision, twice with the same bits.
pub fn dsa_gradients_equal_f64(devices: &[Device]) {
    // Heads, of keys, and width; of the indexer; queries and keys; scores in memory at a time.
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
            // Kernels of each size and dtype take long to compile: those in half precision are of one size.
            let of_size = dtypes
                .iter()
                .filter(|(dtype, _)| dtype.size() > 2 || seed == 11_200);
            for &(dtype, tolerance) in of_size {
                let what = format!("{device:?}, {dtype:?}, {seq:?}, {heads:?}");
                // As the device has them.
                let problems = problems.each_ref().map(|problem| problem.rounded(dtype));
                let autodiff = device.clone().autodiff();
                let (mut index, [q, k]) = batch_of(
                    problems
                        .each_ref()
                        .map(|problem| problem.index(&autodiff, dtype)),
                    problems
                        .each_ref()
                        .map(|x| x.queries_and_keys(&autodiff, dtype)),
                );
                index.q = index.q.detach().require_grad();
                index.k = index.k.detach().require_grad();
                index.weights = index.weights.detach().require_grad();
                let dsa = Dsa::new(7).unwrap().with_chunk_elements(numbers).unwrap();
                let lists = dsa.choose(&index).unwrap();
                // Lists of any keys, also of later ones.
                let wild = (0..2 * seq[0] * 6).map(|at| ((at * at + at / 7) % seq[1]) as i32);
                let wild = TensorData::new(wild.collect::<Vec<_>>(), [2, 1, seq[0], 6]);
                let wild = Tensor::<4, Int>::from_data(wild, (device, DType::I32));
                let wild = TokenIndices::new(wild, seq[1], false).unwrap();
                let (chosen, any) = (rows(&lists), rows(&wild));
                for (over, listed) in [
                    (DsaTarget::All, None),
                    (DsaTarget::Chosen(&lists), Some(&chosen)),
                    (DsaTarget::Chosen(&wild), Some(&any)),
                ] {
                    let run = || {
                        let loss = dsa.loss(&index, [&q, &k], Some(0.4), over).unwrap();
                        let grads = loss.clone().backward();
                        [
                            loss.into_data(),
                            index.q.grad(&grads).unwrap().into_data(),
                            index.k.grad(&grads).unwrap().into_data(),
                            index.weights.grad(&grads).unwrap().into_data(),
                        ]
                    };
                    let got = run();
                    for (got, again) in got.iter().zip(run()) {
                        assert_eq!(got.as_bytes(), again.as_bytes(), "{what}, {over:?}");
                    }
                    let mut expected = [const { Vec::new() }; 4];
                    let mut loss = 0.0;
                    for (entry, problem) in problems.iter().enumerate() {
                        let keys = |query: usize| match listed {
                            Some(lists) => lists[entry * seq[0] + query].clone(),
                            None => (0..=problem.position(query)).collect(),
                        };
                        loss += problem.loss(0.4, keys) / 2.0;
                        let grads = problem.gradients(0.4, keys);
                        for (all, own) in expected[1..].iter_mut().zip(grads) {
                            // Of the mean over both entries.
                            all.extend(own.into_iter().map(|x| x / 2.0));
                        }
                    }
                    expected[0].push(loss);
                    let half = dtype.size() == 2;
                    for (part, (got, expected)) in got.into_iter().zip(&expected).enumerate() {
                        let got = to_f64(got);
                        let most = expected.iter().fold(0.0f64, |most, x| most.max(x.abs()));
                        // Gradients are rounded to half precision, losses are not.
                        let rounding = if half && part > 0 { 8e-3 } else { 0.0 };
                        let tolerance = tolerance.max(1e-12) * 10.0 + rounding * most;
                        assert_near(
                            &format!("{what}, {over:?}, {part}"),
                            &got,
                            expected,
                            tolerance,
                        );
                        assert!(part == 0 || most > 100.0 * 1e-6, "{what}, {part}: {most}");
                    }
                }
            }
        }
    }
}

/// Scores, choices, losses and gradients in half precision, of whole and of odd widths, few heads and many, on one head of keys and on several, in several slabs:
/// as tensor cores make them, where a device has some.
pub fn dsa_in_half_precision(devices: &[Device]) {
    // Heads, of keys, and width; of the indexer; queries and keys; scores in memory at a time; keys that are kept, of them near ones.
    let sizes = [
        ([4, 2, 24], [3, 24], [30, 70], 70 * 16, [9, 4]),
        ([1, 1, 8], [1, 72], [40, 40], 1 << 20, [12, 0]),
        ([3, 3, 72], [4, 16], [33, 300], 300 * 7, [40, 1]),
        ([16, 1, 128], [64, 128], [65, 530], 530 * 40, [290, 9]),
        ([20, 2, 40], [8, 200], [20, 90], 1 << 20, [33, 3]),
        ([144, 2, 16], [72, 8], [9, 270], 1 << 20, [20, 2]),
        ([40, 1, 256], [24, 256], [21, 260], 1 << 20, [30, 0]),
    ];
    for device in devices {
        // Others have one kernel for all sizes. Kernels of each size take long to compile, so processes may share these.
        let tensor_cores = format!("{device:?}").contains("Cuda");
        let (part, parts) = if tensor_cores {
            shard()
        } else {
            (0, sizes.len())
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
                let mut index = problem.index(&autodiff, dtype);
                index.q = index.q.require_grad();
                index.k = index.k.require_grad();
                index.weights = index.weights.require_grad();
                let [q, k] = problem.queries_and_keys(&autodiff, dtype);
                let dsa = Dsa::new(keep).unwrap().with_near(near).unwrap();
                let dsa = dsa.with_chunk_elements(numbers).unwrap();
                let scores = to_f64(dsa.scores(&index).into_data());
                let lists = dsa.choose(&index).unwrap();
                let chosen = rows(&lists);
                for (query, chosen) in chosen.iter().enumerate() {
                    let what = format!("{what}: {query}");
                    let scores = &scores[query * seq[1]..][..seq[1]];
                    assert_near(&what, scores, &problem.scores(query), 2e-5);
                    let (by_device, _) = problem.choice_by(scores, query, keep, near);
                    assert_eq!(*chosen, by_device, "{what}");
                }
                let scale = 1.0 / (heads[2] as f64).sqrt();
                for (over, listed) in [
                    (DsaTarget::All, None),
                    (DsaTarget::Chosen(&lists), Some(&chosen)),
                ] {
                    let keys = |query: usize| match listed {
                        Some(lists) => lists[query].clone(),
                        None => (0..=problem.position(query)).collect(),
                    };
                    let run = || {
                        let loss = dsa.loss(&index, [&q, &k], Some(scale), over).unwrap();
                        let grads = loss.clone().backward();
                        [
                            loss.into_data(),
                            index.q.grad(&grads).unwrap().into_data(),
                            index.k.grad(&grads).unwrap().into_data(),
                            index.weights.grad(&grads).unwrap().into_data(),
                        ]
                    };
                    let got = run();
                    for (got, again) in got.iter().zip(run()) {
                        assert_eq!(got.as_bytes(), again.as_bytes(), "{what}, {over:?}");
                    }
                    let [by_q, by_k, by_weights] = problem.gradients(scale, keys);
                    let expected = [vec![problem.loss(scale, keys)], by_q, by_k, by_weights];
                    for (part, (got, expected)) in got.into_iter().zip(&expected).enumerate() {
                        let most = expected.iter().fold(0.0f64, |most, x| most.max(x.abs()));
                        // Gradients are rounded to half precision, losses are not.
                        let tolerance = if part > 0 { 8e-3 * most } else { 1e-3 };
                        let what = format!("{what}, {over:?}, {part}");
                        assert_near(&what, &to_f64(got), expected, tolerance);
                    }
                }
            }
        }
    }
}

/// Wrong sizes and numbers.
pub fn dsa_errors(devices: &[Device]) {
    let text = |error: burn_blocksparse::OpError| error.to_string();
    assert!(text(Dsa::new(0).unwrap_err()).contains("keep must be at least 1"));
    let dsa = Dsa::new(4).unwrap();
    assert!(text(dsa.with_near(5).unwrap_err()).contains("near must be at most keep"));
    for device in devices {
        let zeros = |shape: [usize; 4]| Tensor::<4>::zeros(shape, (device, DType::F32));
        let weights = |heads, rows| Tensor::<3>::zeros([1, heads, rows], (device, DType::F32));
        let index = |q, k, w| text(DsaIndex::new(q, k, w).unwrap_err());
        let q = || zeros([1, 2, 8, 4]);
        assert!(index(q(), zeros([1, 2, 8, 4]), weights(2, 8)).contains("index k's heads"));
        assert!(index(q(), zeros([1, 1, 8, 5]), weights(2, 8)).contains("index_dim"));
        assert!(index(q(), zeros([1, 1, 8, 4]), weights(3, 8)).contains("weights' shape"));
        assert!(index(q(), zeros([1, 1, 7, 4]), weights(2, 8)).contains("seq_q"));
        let index = DsaIndex::new(q(), zeros([1, 1, 8, 4]), weights(2, 8)).unwrap();
        let (queries, keys) = (zeros([1, 2, 7, 4]), zeros([1, 1, 8, 4]));
        let error = dsa.loss(&index, [&queries, &keys], None, DsaTarget::All);
        assert!(text(error.unwrap_err()).contains("q's seq_q"));
    }
}
