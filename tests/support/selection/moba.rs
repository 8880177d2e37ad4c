//! Attention over what single queries choose (MoBA), against the same in plain f64 loops.

use burn_sparse_select::{
    Always, EstimateInputs, GqaReduction, ReferenceInputs, SelectedOptions, Selection,
    attention_selected, attention_selected_with_lse,
};

use crate::judge::estimate::entry_of;
use crate::judge::moba::{CASE, Case, cases, selected};
use crate::prelude::*;
use crate::selection::moba_lists::check_lists;
use crate::selection::prefix::Prefix;

/// Every output and gradient equals that of the choice in f64, and so do the blocks that are chosen.
pub fn selected_attention_equals_f64(devices: &[Device]) {
    for (index, case) in cases().iter().enumerate() {
        let (problem, chosen) = case.problem(7000 + 100 * index as u64, DType::F32);
        let answer = problem.solve();
        let selection = case.selection();
        for device in devices {
            check_lists(case, &problem, &chosen, &selection, device);
            for (dtype, tolerance) in exact_dtypes(device) {
                let device = device.clone().autodiff();
                let got = selected(&problem, &selection, &device, dtype);
                let what = format!("{}, {device:?}, {dtype:?}", case.name);
                answer.assert(&what, got, &[Near::Tensor(tolerance)]);
            }
        }
    }
}

pub fn selected_attention_in_half_precision(devices: &[Device]) {
    for (index, keep) in [(1, 4), (12, 3), (13, 2), (16, 5)] {
        let mut case = cases()[index].with("dims 64 64");
        case.keep = keep;
        for (device, dtype) in halves(devices) {
            let (problem, _) = case.problem(7900 + index as u64, dtype);
            let answer = problem.solve();
            let device = device.clone().autodiff();
            let got = selected(&problem, &case.selection(), &device, dtype);
            let what = format!("{}, {device:?}, {dtype:?}", case.name);
            answer.assert(&what, got, &[Near::Tensor(half_tolerance(dtype))]);
        }
    }
}

/// Out, lse and all gradients over the choice of the host, with every option that queries take along; heads that share a choice too.
pub fn selected_attention_equals_its_layout(devices: &[Device]) {
    let own = CASE.with("heads 4 2, seq 83 107");
    let forced = own.with("keep 5, forced 1 2");
    let options = AttentionOptions::default().scale(0.3).softcap(2.0);
    let shared = [GqaReduction::PerHead, GqaReduction::Mean, GqaReduction::Max];
    let all = [own, forced].map(|case| shared.map(|sharing| (case, sharing)));
    for (case, sharing) in all.into_iter().flatten() {
        let selection = case.selection().with_gqa_reduction(sharing);
        // Products of f32 numbers are tf32 on tensor cores, which decides between scores that are nearer than that.
        let problems = (8100..8200).map(|seed| case.problem(seed, DType::F32).0);
        let is_clear = |problem: &Problem| {
            let gap = |batch| smallest_gap(problem, &case, batch, sharing);
            (0..problem.sizes.batch).all(|batch| gap(batch) > 2e-3)
        };
        let problem = problems.into_iter().find(is_clear);
        let problem = problem.expect("one of a hundred has no near ties");
        let problem = problem.options(Some(0.3), Some(2.0));
        let layouts = (0..problem.sizes.batch)
            .map(|batch| selection.choose_reference(&entry(&problem, batch)).unwrap());
        let layouts: Vec<_> = layouts.collect();
        let layout = BlockLayout::stack_batch(&layouts).unwrap();
        for device in devices {
            let device = device.clone().autodiff();
            let got = differentiated(&problem, &device, DType::F32, |q, k, v| {
                attention_selected_with_lse(q, k, v, &selection, options.clone()).unwrap()
            });
            let expected = differentiated(&problem, &device, DType::F32, |q, k, v| {
                attend_with_lse([&q, &k, &v], &layout, &options)
            });
            let what = format!("{sharing:?}, {:?}, {device:?}", case.forced);
            assert_alike(&what, got, expected, 1e-5);
        }
    }
}

fn entry(problem: &Problem, batch: usize) -> ReferenceInputs<'_> {
    entry_of(problem.sizes, batch, [&problem.q, &problem.k], 0.3, true)
}

/// By how much at least the last block that a query chooses between its forced ones scores higher than the next.
fn smallest_gap(problem: &Problem, case: &Case, batch: usize, sharing: GqaReduction) -> f64 {
    let s = problem.sizes;
    let selection = case.selection();
    let Always { first, local } = case.forced;
    let count = case.keep - first - local;
    let scores = (selection.estimator()).reference(&entry(problem, batch));
    let block = selection.estimator().grid().block;
    let blocks = s.seq_kv.div_ceil(block);
    let group = match sharing {
        GqaReduction::PerHead => 1,
        _ => s.heads / s.kv_heads,
    };
    let shared = |list: usize, row: usize, block: usize| {
        let of = (0..group).map(|member| {
            let head = list * group + member;
            scores[(head * s.seq_q + row) * blocks + block]
        });
        match sharing {
            GqaReduction::Max => of.fold(f64::NEG_INFINITY, f64::max),
            _ => of.sum::<f64>() / group as f64,
        }
    };
    let mut smallest = f64::INFINITY;
    for list in 0..s.heads / group {
        for row in 0..s.seq_q {
            let past = (row + s.seq_kv - s.seq_q) / block;
            let between = first..(past + 1).saturating_sub(local);
            let mut row: Vec<f64> = between.map(|block| shared(list, row, block)).collect();
            row.sort_by(|a, b| b.total_cmp(a));
            if let (Some(last), Some(next)) = (row.get(count - 1), row.get(count)) {
                smallest = smallest.min(last - next);
            }
        }
    }
    smallest
}

/// Blocks of queries that choose together: the same bits as the choice and attention over it.
pub fn selected_attention_of_query_blocks(devices: &[Device]) {
    let selection: Selection = "topk:16,3".parse().unwrap();
    let (problem, _) = CASE.problem(8200, DType::F32);
    for device in devices {
        let [q, k, v, _] = inputs(&problem, device, DType::F32);
        for causal in [true, false] {
            let call = EstimateInputs::new(q.clone(), k.clone()).causal(causal);
            let layout = selection.choose(&call).unwrap().layout;
            let options = AttentionOptions::default();
            let expected = attend_with_lse([&q, &k, &v], &layout, &options);
            let options = SelectedOptions::from(options).causal(causal);
            let (q, k, v) = (q.clone(), k.clone(), v.clone());
            let got = attention_selected_with_lse(q, k, v, &selection, options).unwrap();
            let what = format!("{device:?}, {causal}");
            assert_same_bits(&what, outputs(got), outputs(expected));
        }
    }
}

/// Later tokens change nothing of what comes before them. Packed queries may lie at other places, and so be summed in another order.
pub fn selected_attention_is_prefix_stable(devices: &[Device]) {
    let case = CASE.with("heads 4 2, seq 90 90");
    for case in [case, case.with("keep 4, forced 1 2")] {
        let selection = case.selection();
        assert!(selection.estimator().traits().prefix_stable);
        let (problem, _) = case.problem(8400, DType::F32);
        for device in devices {
            let [q, k, v, _] = inputs(&problem, device, DType::F32);
            let prefix = Prefix {
                what: format!("{device:?}, {:?}", case.forced),
                queries: vec![q],
                keys: vec![k, v],
                attend: &|queries, keys| {
                    let [q, k, v] = [&queries[0], &keys[0], &keys[1]].map(Clone::clone);
                    let options = AttentionOptions::default();
                    attention_selected(q, k, v, &selection, options).unwrap()
                },
                choose: &|queries, keys| {
                    let call = EstimateInputs::new(queries[0].clone(), keys[0].clone());
                    selection.query_lists(&call).unwrap().unwrap().blocks
                },
                is_clear: &|_| true,
                within: 2e-6,
            };
            prefix.assert_stable();
        }
    }
}

/// Batch entries in another order give their outputs in that order, and the same call the same bits.
pub fn selected_attention_of_a_permuted_batch(devices: &[Device]) {
    let case = CASE.with("batch 3, heads 4 2");
    let (problem, _) = case.problem(8500, DType::F32);
    for device in devices {
        let [q, k, v, _] = inputs(&problem, device, DType::F32);
        let order = [2, 0, 1];
        let run = |q: Tensor<4>, k: Tensor<4>, v: Tensor<4>| {
            let options = AttentionOptions::default();
            attention_selected(q, k, v, &case.selection(), options).unwrap()
        };
        let permuted = |x: &Tensor<4>| {
            let entries = order.map(|entry| x.clone().narrow(0, entry, 1));
            Tensor::cat(entries.to_vec(), 0)
        };
        let expected = permuted(&run(q.clone(), k.clone(), v.clone()));
        let got = run(permuted(&q), permuted(&k), permuted(&v));
        let (got, expected) = (got.into_data(), expected.into_data());
        assert_eq!(got.as_bytes(), expected.as_bytes(), "{device:?}");
        let device = device.clone().autodiff();
        let run = || selected(&problem, &case.selection(), &device, DType::F32);
        let first = run();
        for _ in 0..2 {
            assert_same_bits(&format!("{device:?}"), &first, &run());
        }
    }
}
