//! Burn's own `attention` on our kernels. Each test runs in its own process, because the choice must be made before the first tensor of a program.

use std::process::Command;

use burn::tensor::module::attention;
use burn_blocksparse::module::{
    accelerate_attention, accelerate_attention_with, accelerated_attention,
};

use super::burn_attention::{BIASES, MASKS, Mask, OPTIONS, SIZES, problem};
use burn_blocksparse_tests::prelude::*;

/// Returns whether this is the test's own process. Otherwise starts it on devices with kernels, and requires it to pass.
fn alone(name: &str) -> bool {
    const ALONE: &str = "BURN_SPARSE_TEST_ALONE";
    if std::env::var_os(ALONE).is_some() {
        return true;
    }
    if uses_reference() || !devices().iter().any(is_cube) {
        return false;
    }
    let run = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", &format!("accelerated::{name}"), "--nocapture"])
        .env(ALONE, "")
        .output()
        .unwrap();
    let [printed, errors] = [&run.stdout, &run.stderr].map(|text| String::from_utf8_lossy(text));
    assert!(run.status.success(), "{printed}\n{errors}");
    assert!(printed.contains("1 passed"), "{printed}\n{errors}");
    false
}

/// Returns the number of calls on kernels, and of calls that fell back.
fn counts() -> (u64, u64) {
    let counts = accelerated_attention();
    (counts.taken, counts.fallen_back)
}

#[test]
fn burns_attention_runs_on_kernels() {
    if !alone("burns_attention_runs_on_kernels") {
        return;
    }
    accelerate_attention().unwrap();
    let refused = accelerate_attention().unwrap_err().to_string();
    assert!(refused.contains("must each be called once"), "{refused}");
    let devices: Vec<_> = devices().into_iter().filter(is_cube).collect();
    let mut calls = 0;
    let rows = [0, 1, 3].into_iter().flat_map(|size| {
        let masked = MASKS.into_iter().map(move |mask| (size, mask));
        masked.flat_map(|(size, mask)| BIASES.map(|bias| (size, mask, bias)))
    });
    let rows = (8000..).zip(rows.flat_map(|row| OPTIONS.map(|options| (row, options))));
    for (seed, ((size, shared, bias), options)) in some_of(rows, 23) {
        let sizes = SIZES[size];
        let mask = shared.map(|shared| Mask::random(seed, sizes, shared));
        let problem = problem(seed, sizes, mask.as_ref(), bias, options);
        let answer = problem.solve();
        for (device, dtype, tolerance) in exact(&devices) {
            let [q, k, v, _] = inputs(&problem, device, dtype);
            let given = tensors(&problem, device, dtype).bias;
            let mask = mask.as_ref().map(|mask| mask.tensor(device));
            let out = attention(q, k, v, mask, given, options);
            let what = format!("sizes {size}, mask {shared:?}, bias {bias:?}, {options:?}");
            let bounds = [Near::Tensor(tolerance), Near::Rows(dtype)];
            answer.assert(&what, [("out", out.into_data())], &bounds);
            calls += 1;
            assert_eq!(counts(), (calls, 0), "{what}");
        }
    }

    // Burn broadcasts keys that batch entries share if a scale is set.
    let options = OPTIONS[3];
    let problem = problem(8900, SIZES[0], None, None, options);
    for device in &devices {
        let [q, k, v, _] = inputs(&problem, device, DType::F32);
        let [k, v] = [k, v].map(|x| x.narrow(0, 0, 1));
        let [own_k, own_v] = [&k, &v].map(|x| x.clone().repeat_dim(0, SIZES[0].batch));
        let burns = attention(q.clone(), k, v, None, None, options).into_data();
        let ours = attention(q, own_k, own_v, None, None, options).into_data();
        assert_close("shared keys", burns, &to_f64(ours), 5e-3);
    }
    let shared = devices.len() as u64;
    assert_eq!(counts(), (calls + shared, shared));
    let printed = accelerated_attention().to_string();
    let expected = format!(
        "attention: {} calls on block-sparse kernels, {shared} as before",
        calls + shared
    );
    assert_eq!(printed, expected);

    // On autodiff devices Burn computes attention by its own operations.
    for device in &devices {
        let [q, k, v, _] = inputs(&problem, &device.clone().autodiff(), DType::F32);
        let q = q.require_grad();
        let out = attention(q.clone(), k, v, None, None, options);
        let grads = out.sum().backward();
        q.grad(&grads).unwrap().into_data();
        // Software Vulkan crashes if a process ends with pending work.
        device.sync().unwrap();
    }
    assert_eq!(counts(), (calls + shared, shared));
}

#[test]
fn long_calls_have_a_pattern() {
    if !alone("long_calls_have_a_pattern") {
        return;
    }
    accelerate_attention_with(|call| (call.seq_kv > 64).then(|| Pattern::window(9))).unwrap();
    let sizes = |n| Sizes::new([2, 2, 2], [n, n], [16, 16]);
    let near = |i: usize, j: usize| i.abs_diff(j) <= 9;
    for (seed, (n, causal)) in (8950..).zip([(50, false), (50, true), (100, false), (100, true)]) {
        let allowed = move |_, _, i: usize, j: usize| (n < 64 || near(i, j)) && (!causal || j <= i);
        let problem = Problem::random(sizes(n), seed, allowed);
        for device in devices().into_iter().filter(is_cube) {
            let [q, k, v, _] = inputs(&problem, &device, DType::F32);
            let out = attention(q, k, v, None, None, OPTIONS[usize::from(causal)]);
            let bounds = [Near::Tensor(1e-5), Near::Rows(DType::F32)];
            let what = format!("{n} positions, causal {causal}");
            let got = [("out", out.into_data())];
            problem.solve().assert(&what, got, &bounds);
        }
    }
    assert_eq!(counts().1, 0);
}
