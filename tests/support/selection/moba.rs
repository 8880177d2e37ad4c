//! Attention over the selections of single queries (MoBA), against plain f64 loops.

use burn_sparse_select::{
    EstimateInputs, SelectedOptions, Selection, attention_selected, attention_selected_with_lse,
};

use crate::judge::moba::{CASE, cases, selected};
use crate::prelude::*;
use crate::selection::moba_lists::check_lists;
use crate::selection::prefix::Prefix;

/// Every output and gradient, and the selected blocks, equal those of f64.
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

/// Blocks of queries that select together: equal bits as selection followed by attention.
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

/// Later tokens change no earlier output. Packed queries may have other places, and so another order of sums.
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

/// A permuted batch gives permuted outputs, and equal calls give equal bits.
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
