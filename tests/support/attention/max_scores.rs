//! Each row's largest score against f64; requesting it changes no other result.

use crate::attention::cases::{Case, cases, gaps_per_batch, table};
use crate::attention::options::{SHARED, everything, with_alibi, with_distances};
use crate::device_layout::case::cases as device_cases;
use crate::device_layout::chosen::layout_of;
use crate::prelude::*;

/// Makes a case's problem with one of six kinds of scores: plain, with a scale that reverses the order of products or makes them 0, a bias, ALiBi
/// with sinks, a relative bias, all options.
fn variant(index: usize, case: &Case, seed: u64) -> Problem {
    let problem = case.problem(seed).with_grad_lse(seed);
    match (index + 1) % 6 {
        0 => problem,
        1 => problem.options(Some([-0.7, 0.0, -1.3][index / 6 % 3]), case.softcap),
        2 => problem.with_bias(6, SHARED[index / 6 % 6]),
        // lse includes sinks; largest scores do not.
        3 => with_alibi(problem).with_sinks(7),
        4 => with_distances(index, problem),
        _ => everything(index, problem),
    }
}

/// Returns the problem's options; with dropout they store weights.
fn options(problem: &Problem) -> AttentionOptions {
    match problem.dropout {
        Some(_) => problem.asked().weights(WeightsMode::Store),
        None => problem.asked(),
    }
}

/// Compares out, lse and the largest scores on a device without autodiff.
fn check<'a>(
    what: &str,
    problem: &Problem,
    layout: impl Into<Layout<'a>>,
    device: &Device,
    dtype: DType,
) {
    let answer = problem.solve();
    let [q, k, v, _] = inputs(problem, device, dtype);
    let tensors = tensors(problem, device, dtype);
    let call = call_of([&q, &k, &v], layout, &options(problem)).tensors(tensors);
    let output = call.lse().max_scores().run().unwrap();
    let (out, lse, max_scores) = (output.out, output.lse.unwrap(), output.max_scores.unwrap());
    assert_eq!(max_scores.dtype(), lse.dtype(), "{what}");
    assert_eq!(max_scores.dims(), lse.dims(), "{what}");
    // Scores are sums in f32, or f64, whatever the dtype of the inputs.
    let tolerance = if dtype == DType::F64 { 1e-12 } else { 1e-5 };
    let what = format!("{what}, {device:?}, {dtype:?}");
    let max_scores = [("max_scores", max_scores.into_data())];
    let bounds = [Near::Tensor(tolerance), Near::Rows(dtype)];
    answer.assert(&what, max_scores, &bounds);
    let what = format!("{what}, beside max_scores");
    answer.assert(&what, outputs((out, lse)), &bounds[1..]);
}

pub fn max_scores_equal_f64(devices: &[Device]) {
    for (index, case) in &table() {
        let problem = variant(*index, case, 8000 + *index as u64);
        for (device, dtype, _) in exact(devices) {
            check(case.name, &problem, &case.layout(), device, dtype);
        }
    }
}

/// Half precision, on tensor cores if a device has them: the cases with wide heads, and a third of the others.
pub fn max_scores_in_half_precision(devices: &[Device]) {
    let mut ran = 0;
    let has = |index: usize, case: &Case| case.head_dim >= 64 || index % 3 == 1;
    for (index, case) in table().iter().filter(|(index, case)| has(*index, case)) {
        ran += 1;
        for (device, dtype) in halves(devices) {
            let mut problem = variant(*index, case, 8100 + *index as u64);
            problem.round_to(dtype);
            check(case.name, &problem, &case.layout(), device, dtype);
        }
    }
    assert_ran("max_scores in half precision", ran);
}

/// Output, lse and gradients have equal bits with and without largest scores, even if these are in the loss; and in two runs.
pub fn max_scores_change_nothing_else(devices: &[Device]) {
    let mut ran = 0;
    for (index, case) in table().iter().filter(|(index, _)| index % 3 == 1) {
        let mut problem = variant(*index, case, 8200 + *index as u64);
        // Burn sums the gradient of sinks.
        problem.sinks = None;
        for device in devices {
            let [without, with, again] =
                [false, true, true].map(|asked| run(&problem, case, device, asked));
            let what = format!("{}, {device:?}", case.name);
            assert_same_bits(&format!("{what}, twice"), &with, &again);
            let shared = with[..without.len()].to_vec();
            assert_same_bits(&format!("{what}, without max_scores"), &shared, &without);
            assert_eq!(with.len(), without.len() + 1);
            ran += 1;
        }
    }
    assert_ran("calls with and without max_scores", ran);
}

/// Returns outputs and gradients by name; largest scores are last if `asked`.
fn run(problem: &Problem, case: &Case, device: &Device, asked: bool) -> Results {
    let device = &device.clone().autodiff();
    let [q, k, v, grad_out] = inputs(problem, device, DType::F32);
    let [q, k, v] = [q, k, v].map(Tensor::require_grad);
    let tensors = require_grad(tensors(problem, device, DType::F32));
    let layout = case.layout();
    let call = call_of([&q, &k, &v], &layout, &options(problem)).tensors(tensors.clone());
    let call = call.lse();
    let output = if asked { call.max_scores() } else { call }.run().unwrap();
    let (out, lse) = (output.out, output.lse.unwrap());
    let mut loss = loss_of(problem, (&out, Some(grad_out)), &lse);
    if let Some(max_scores) = &output.max_scores {
        assert!(!max_scores.is_require_grad());
        loss = loss + max_scores.clone().exp().sum();
    }
    let mut results = by_name((out, lse), [q, k, v], &tensors, &loss.backward());
    let max_scores = output.max_scores.into_iter();
    results.extend(max_scores.map(|scores| ("max_scores", scores.into_data())));
    results
}

/// Layouts made on the device, and layouts per batch entry.
pub fn max_scores_of_other_layouts(devices: &[Device]) {
    for index in [0, 1, 4, 5, 8] {
        let case = &device_cases()[index];
        let (mask, problem) = case.drawn(8300 + index as u64);
        let scale = if index == 1 { -0.6 } else { 0.3 };
        let problem = problem.options(Some(scale), (index == 4).then_some(2.0));
        for device in devices {
            let layout = layout_of(case, &mask, device);
            for (dtype, _) in exact_dtypes(device) {
                check(case.name, &problem, &layout, device, dtype);
            }
        }
    }
    let (layout, problem) = gaps_per_batch(83);
    for device in devices {
        check("per batch entry", &problem, &layout, device, DType::F32);
    }
}

/// The largest score over two disjoint parts of the keys is the maximum of both.
pub fn max_scores_of_disjoint_parts(devices: &[Device]) {
    let near = Pattern::from_fn("near, not of some rows", |_, i, j| {
        !(11..33).contains(&i) && (0..16).contains(&(i - j))
    });
    let far = Pattern::from_fn("far", |_, i, j| i - j >= 16 && (i - j) % 16 == 0);
    let case = Case {
        pattern: Pattern::union([near.clone(), far.clone()]),
        ..cases()[13].clone()
    };
    let answer = case.problem(21).solve();
    assert!(answer.max_scores.contains(&f64::NEG_INFINITY));
    for device in devices {
        let [q, k, v, _] = inputs(&case.problem(21), device, DType::F32);
        let [near, far] = [&near, &far].map(|pattern| {
            let layout = pattern.layout(case.heads, case.seq_q, case.block_size);
            let layout = layout.unwrap();
            let call = SparseAttentionCall::new(q.clone(), k.clone(), v.clone(), &layout);
            call.max_scores().run().unwrap().max_scores.unwrap()
        });
        let what = format!("disjoint parts, {device:?}");
        let got = near.max_pair(far).into_data();
        assert_rows(&what, got, &answer.result("max_scores"), DType::F32);
    }
}
