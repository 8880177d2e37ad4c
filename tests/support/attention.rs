//! The op against f64 over the whole table: output, lse, weights and gradients.

use crate::cases::{Case, cases, per_batch, table};
use crate::compare::{assert_close, assert_rows, relative_error, to_f64};
use crate::devices::{assert_ran, exact_dtypes, half_dtypes, supports};
use crate::reference::{Problem, Sizes};
use burn::tensor::module::attention_fallback;
use burn::tensor::ops::AttentionModuleOptions;
use burn::tensor::{Bool, DType, Device, Tensor, TensorData};
use burn_blocksparse::{
    AttentionOptions, BlockLayout, Layout, Pattern, ProductPrecision, SparseAttentionCall,
    WeightsMode, merge_attention,
};

fn tensor(values: &[f64], shape: [usize; 4], device: &Device, dtype: DType) -> Tensor<4> {
    Tensor::from_data(TensorData::new(values.to_vec(), shape), (device, dtype))
}

pub(crate) fn inputs(problem: &Problem, device: &Device, dtype: DType) -> [Tensor<4>; 4] {
    let sizes = problem.sizes;
    [
        tensor(&problem.q, sizes.q(), device, dtype),
        tensor(&problem.k, sizes.k(), device, dtype),
        tensor(&problem.v, sizes.v(), device, dtype),
        tensor(&problem.grad_out, sizes.out(), device, dtype),
    ]
}

/// Output and gradients by q, k, v.
pub(crate) fn run<'a>(
    problem: &Problem,
    layout: impl Into<Layout<'a>>,
    options: AttentionOptions,
    device: &Device,
    dtype: DType,
) -> [TensorData; 4] {
    let [q, k, v, grad_out] = inputs(problem, device, dtype);
    let [q, k, v] = [q, k, v].map(Tensor::require_grad);
    let out = SparseAttentionCall::new(q.clone(), k.clone(), v.clone(), layout)
        .options(options)
        .run()
        .unwrap()
        .out;
    let grads = (out.clone() * grad_out).sum().backward();
    [
        out.inner().into_data(),
        q.grad(&grads).unwrap().into_data(),
        k.grad(&grads).unwrap().into_data(),
        v.grad(&grads).unwrap().into_data(),
    ]
}

pub fn forward_and_gradients_equal_f64(devices: &[Device]) {
    for (index, case) in &table() {
        let index = *index;
        let problem = case.problem(index as u64);
        let answer = problem.solve();
        for device in devices {
            for (dtype, tolerance) in exact_dtypes(device) {
                for mode in [WeightsMode::Recompute, WeightsMode::Store] {
                    let what = format!("{}, {device:?}, {dtype:?}, {mode:?}", case.name);
                    let options = case.options().weights(mode);
                    let device = device.clone().autodiff();
                    let [out, dq, dk, dv] = run(&problem, &case.layout(), options, &device, dtype);
                    for (name, got) in [("out", out), ("dq", dq), ("dk", dk), ("dv", dv)] {
                        let (what, expected) = (format!("{what}: {name}"), answer.result(name));
                        assert_close(&what, got.clone(), expected.values, tolerance);
                        assert_rows(&what, got, &expected, dtype);
                    }
                }
            }
        }
    }
}

pub fn lse_and_weights_equal_f64(devices: &[Device]) {
    for (index, case) in &table() {
        let index = *index;
        let problem = case.problem(1000 + index as u64);
        let answer = problem.solve();
        for device in devices {
            for (dtype, tolerance) in exact_dtypes(device) {
                let what = format!("{}, {device:?}, {dtype:?}", case.name);
                let [q, k, v, _] = inputs(&problem, device, dtype);
                let (layout, options) = (case.layout(), case.options());
                let args = (q.clone(), k.clone(), v.clone());
                let (_, lse) = SparseAttentionCall::new(args.0, args.1, args.2, &layout)
                    .options(options.clone())
                    .run_with_lse()
                    .unwrap();
                assert_eq!(lse.dtype(), dtype);
                assert_close(
                    &format!("{what}: lse"),
                    lse.into_data(),
                    &answer.lse,
                    tolerance,
                );
                let call = SparseAttentionCall::new(q, k, v, &layout).options(options);
                let output = call.weights().run().unwrap();
                assert!(output.lse.is_none() && output.max_scores.is_none());
                assert_close(
                    &format!("{what}: out"),
                    output.out.into_data(),
                    &answer.out,
                    tolerance,
                );
                let dense = output.weights.unwrap().to_dense().into_data();
                assert_close(
                    &format!("{what}: weights"),
                    dense,
                    &answer.weights,
                    tolerance,
                );
            }
        }
    }
}

/// Half precision may err twice as much as the same math done densely in that dtype.
pub fn half_precision_is_as_good_as_dense(devices: &[Device]) {
    for (index, case) in &table() {
        let index = *index;
        for device in devices {
            for dtype in half_dtypes(device) {
                let what = format!("{}, {device:?}, {dtype:?}", case.name);
                let mut problem = case.problem(2000 + index as u64);
                problem.round_to(dtype);
                let answer = problem.solve();
                let layout = case.layout();
                let device = device.clone().autodiff();
                let ours = run(&problem, &layout, case.options(), &device, dtype);
                // Grouped heads have no counterpart in the fallback.
                let dense = (case.heads == case.kv_heads)
                    .then(|| run_dense(case, &problem, &layout, &device, dtype));
                for (k, name) in ["out", "dq", "dk", "dv"].iter().enumerate() {
                    let expected = answer.result(name);
                    let rows = format!("{what}: {name}");
                    assert_rows(&rows, ours[k].clone(), &expected, dtype);
                    let (error, _) = relative_error(&to_f64(ours[k].clone()), expected.values);
                    let allowed = dense.as_ref().map_or(0.0, |dense| {
                        relative_error(&to_f64(dense[k].clone()), expected.values).0
                    });
                    // One rounding of the result is unavoidable.
                    let rounding = if dtype == DType::F16 { 1e-3 } else { 8e-3 };
                    assert!(
                        error <= (2.0 * allowed).max(rounding),
                        "{what}: {name} errs by {error:.2e}, dense math by {allowed:.2e}"
                    );
                }
            }
        }
    }
}

/// What is masked, `[batch | 1, heads, seq_q, seq_kv]`.
fn mask(layout: &BlockLayout, device: &Device) -> Tensor<4, Bool> {
    let (heads, seq_q, seq_kv) = (layout.heads(), layout.seq_q(), layout.seq_kv());
    let batch = layout.batch().unwrap_or(1);
    let heads_of = |batch| (0..heads).map(move |head| (batch, head));
    let masked: Vec<bool> = (0..batch)
        .flat_map(heads_of)
        .flat_map(|(batch, head)| layout.to_dense_batch(batch, head))
        .flatten()
        .map(|on| !on)
        .collect();
    let shape = [batch, heads, seq_q, seq_kv];
    Tensor::from_data(TensorData::new(masked, shape), device)
}

/// Output and gradients of Burn's own attention, in dense operations.
pub(crate) fn run_dense(
    case: &Case,
    problem: &Problem,
    layout: &BlockLayout,
    device: &Device,
    dtype: DType,
) -> [TensorData; 4] {
    let [q, k, v, grad_out] = inputs(problem, device, dtype);
    let [q, k, v] = [q, k, v].map(Tensor::require_grad);
    let [batch, heads, seq_q, _] = problem.sizes.q();
    let mask = mask(layout, device).expand([batch, heads, seq_q, problem.sizes.seq_kv]);
    let options = AttentionModuleOptions {
        scale: case.scale,
        softcap: case.softcap,
        is_causal: false,
    };
    // It knows no grouped heads.
    let repeated = |x: &Tensor<4>| {
        let [batch, kv_heads, seq, dim] = x.dims();
        let group = heads / kv_heads;
        let groups = x.clone().unsqueeze_dim::<5>(2);
        groups
            .expand([batch, kv_heads, group, seq, dim])
            .reshape([batch, heads, seq, dim])
    };
    let (k_all, v_all) = (repeated(&k), repeated(&v));
    let out = attention_fallback(q.clone(), k_all, v_all, Some(mask), None, options);
    let grads = (out.clone() * grad_out).sum().backward();
    [
        out.inner().into_data(),
        q.grad(&grads).unwrap().into_data(),
        k.grad(&grads).unwrap().into_data(),
        v.grad(&grads).unwrap().into_data(),
    ]
}

/// A third opinion: Burn's own dense attention under the layout's mask.
pub fn equals_burns_own_attention(devices: &[Device]) {
    let mut ran = 0;
    for (index, case) in &table() {
        let index = *index;
        if case.heads != case.kv_heads {
            continue;
        }
        ran += 1;
        for device in devices {
            let problem = case.problem(3000 + index as u64);
            let layout = case.layout();
            let dtype = DType::F32;
            let device = device.clone().autodiff();
            let ours = run(&problem, &layout, case.options(), &device, dtype);
            let burns = run_dense(case, &problem, &layout, &device, dtype);
            // Burn multiplies f32 matrices in tf32 where a GPU has it.
            let tf32 = format!("{device:?}").contains("Cuda");
            let tolerance = if tf32 { 5e-3 } else { 2e-5 };
            for (k, name) in ["out", "dq", "dk", "dv"].iter().enumerate() {
                let what = format!("{}, {device:?}: {name}", case.name);
                assert_close(&what, ours[k].clone(), &to_f64(burns[k].clone()), tolerance);
            }
        }
    }
    assert_ran("equals_burns_own_attention", ran);
}

pub fn gradients_equal_finite_differences(devices: &[Device]) {
    let pattern = Pattern::merged_strided(5);
    let case = Case {
        seq_q: 11,
        seq_kv: 13,
        softcap: Some(2.0),
        ..cases().remove(0)
    };
    let case = Case { pattern, ..case };
    for device in devices {
        if !supports(device, DType::F64) {
            continue;
        }
        let (problem, layout) = (case.problem(7), case.layout());
        let loss = |which: usize, index: usize, step: f64| {
            let mut moved = case.problem(7);
            let values = [&mut moved.q, &mut moved.k, &mut moved.v];
            values.into_iter().nth(which).unwrap()[index] += step;
            let [q, k, v, grad_out] = inputs(&moved, device, DType::F64);
            let out = SparseAttentionCall::new(q, k, v, &layout)
                .options(case.options())
                .run()
                .unwrap()
                .out;
            (out * grad_out).sum().into_scalar::<f64>()
        };
        let autodiff = device.clone().autodiff();
        let grads = run(&problem, &layout, case.options(), &autodiff, DType::F64);
        for which in 0..3 {
            let grad = to_f64(grads[which + 1].clone());
            for index in (0..grad.len()).step_by(17) {
                let step = 1e-5;
                let slope = (loss(which, index, step) - loss(which, index, -step)) / (2.0 * step);
                assert!(
                    (slope - grad[index]).abs() < 1e-8,
                    "{device:?}, input {which} at {index}: {} but differences say {slope}",
                    grad[index]
                );
            }
        }
    }
}

/// Permuted, sliced and expanded tensors are read as what they mean.
pub fn strides_do_not_matter(devices: &[Device]) {
    let case = &cases()[14];
    let (problem, layout) = (case.problem(5), case.layout());
    for device in devices {
        let [q, k, v, _] = inputs(&problem, device, DType::F32);
        let expected = SparseAttentionCall::new(q.clone(), k.clone(), v.clone(), &layout)
            .options(case.options())
            .run()
            .unwrap()
            .out;
        let expected = to_f64(expected.into_data());
        // [batch, seq, heads, dim] seen as [batch, heads, seq, dim], as projections give it.
        let permuted = |x: &Tensor<4>| {
            let stored = x.clone().swap_dims(1, 2).into_data();
            Tensor::<4>::from_data(stored, (device, DType::F32)).swap_dims(1, 2)
        };
        // A part of a larger tensor.
        let sliced = |x: &Tensor<4>| {
            let [batch, heads, seq, dim] = x.dims();
            Tensor::cat(vec![x.clone(), x.clone() * 7.0], 3).slice([
                0..batch,
                0..heads,
                0..seq,
                0..dim,
            ])
        };
        for change in [&permuted as &dyn Fn(&Tensor<4>) -> Tensor<4>, &sliced] {
            let (q, k, v) = (change(&q), change(&k), change(&v));
            let out = SparseAttentionCall::new(q, k, v, &layout)
                .options(case.options())
                .run()
                .unwrap()
                .out;
            assert_close("strided inputs", out.into_data(), &expected, 1e-6);
        }
        // One head's keys for all heads, without a copy.
        let [batch, heads, seq, dim] = k.dims();
        let first = |x: &Tensor<4>| {
            let head = x.clone().slice([0..batch, 0..1, 0..seq, 0..dim]);
            (head.clone().expand([batch, heads, seq, dim]), head)
        };
        let ((k_all, k_one), (v_all, v_one)) = (first(&k), first(&v));
        let expanded = SparseAttentionCall::new(q.clone(), k_all, v_all, &layout)
            .options(case.options())
            .run()
            .unwrap()
            .out;
        let multi_query = SparseAttentionCall::new(q, k_one, v_one, &layout)
            .options(case.options())
            .run()
            .unwrap()
            .out;
        let multi_query = to_f64(multi_query.into_data());
        assert_close("expanded keys", expanded.into_data(), &multi_query, 1e-6);
    }
}

pub fn same_input_same_bits(devices: &[Device]) {
    // One of width 8, others as wide as tensor cores take them.
    let names = [
        "fixed, column groups per head",
        "merged strided, head dim 64",
        "grouped heads, head dim 64",
        "random blocks of 16",
        "softcap, head dim 128",
    ];
    let cases = cases();
    for case in cases.iter().filter(|case| names.contains(&case.name)) {
        let (problem, layout) = (case.problem(9), case.layout());
        for device in devices {
            let mut dtypes = half_dtypes(device);
            dtypes.push(DType::F32);
            for dtype in dtypes {
                let device = device.clone().autodiff();
                let first = run(&problem, &layout, case.options(), &device, dtype);
                let again = run(&problem, &layout, case.options(), &device, dtype);
                for (a, b) in first.iter().zip(&again) {
                    assert_eq!(a.as_bytes(), b.as_bytes(), "{}, {dtype:?}", case.name);
                }
            }
        }
    }
}

/// Every batch entry with a layout of its own.
pub fn per_batch_layouts(devices: &[Device]) {
    let patterns = [Pattern::local(9), Pattern::fixed(16, 4), Pattern::dense()];
    let problem = |seq: usize, block_size: usize, dim: usize| {
        let sizes = Sizes {
            batch: 3,
            heads: 2,
            kv_heads: 2,
            seq_q: seq,
            seq_kv: seq,
            head_dim: dim,
            value_dim: dim,
        };
        per_batch(&patterns, sizes, block_size, 3)
    };
    for device in devices {
        for dtype in half_dtypes(device) {
            let (layout, mut wide) = problem(150, 16, 64);
            wide.round_to(dtype);
            let answer = wide.solve();
            let device = device.clone().autodiff();
            let got = run(&wide, &layout, AttentionOptions::default(), &device, dtype);
            for (got, name) in got.into_iter().zip(["out", "dq", "dk", "dv"]) {
                let what = format!("per batch, {dtype:?}: {name}");
                assert_rows(&what, got, &answer.result(name), dtype);
            }
        }
    }
    let (layout, problem) = problem(44, 8, 8);
    let answer = problem.solve();
    for device in devices {
        for mode in [WeightsMode::Recompute, WeightsMode::Store] {
            let options = AttentionOptions::default().weights(mode);
            let device = device.clone().autodiff();
            let got = run(&problem, &layout, options, &device, DType::F32);
            for (got, name) in got.into_iter().zip(["out", "dq", "dk", "dv"]) {
                let expected = answer.result(name);
                assert_close("per batch", got.clone(), expected.values, 1e-5);
                assert_rows(&format!("per batch: {name}"), got, &expected, DType::F32);
            }
        }
        let [q, k, v, _] = inputs(&problem, device, DType::F32);
        let options = AttentionOptions::default();
        let call = SparseAttentionCall::new(q, k, v, &layout).options(options);
        let dense = call
            .weights()
            .run()
            .unwrap()
            .weights
            .unwrap()
            .to_dense()
            .into_data();
        assert_close("per batch: weights", dense, &answer.weights, 1e-5);
    }
}

/// Products are of tf32 only where that is asked for, and then not coarser than that.
pub fn tf32_only_where_asked_for(devices: &[Device]) {
    let sizes = Sizes {
        batch: 2,
        heads: 4,
        kv_heads: 2,
        seq_q: 150,
        seq_kv: 150,
        head_dim: 64,
        value_dim: 64,
    };
    let pattern = Pattern::fixed(16, 4);
    let layout = pattern.layout(4, 150, 16).unwrap();
    let problem = Problem::random(sizes, 5, move |_, head, i, j| {
        pattern.attends(head, i as i64, j as i64)
    });
    let answer = problem.solve();
    for device in devices {
        for (precision, tolerance) in [
            (ProductPrecision::Full, 1e-5),
            (ProductPrecision::Tf32, 3e-3),
        ] {
            let options = AttentionOptions::default().precision(precision);
            let [q, k, v, _] = inputs(&problem, device, DType::F32);
            let plan = SparseAttentionCall::new(q.clone(), k.clone(), v.clone(), &layout)
                .options(options.clone())
                .explain()
                .unwrap();
            let tf32 = plan.to_string().contains("in tf32");
            assert!(precision == ProductPrecision::Tf32 || !tf32, "{plan}");
            let device = device.clone().autodiff();
            let got = run(&problem, &layout, options, &device, DType::F32);
            let expected = [&answer.out, &answer.dq, &answer.dk, &answer.dv];
            for (got, expected) in got.into_iter().zip(expected) {
                let what = format!("{precision:?}, {plan}");
                assert_close(&what, got, expected, if tf32 { tolerance } else { 1e-5 });
            }
        }
    }
}

/// Two disjoint parts merged by lse are the attention over their union, in its gradients, too; rows may have keys in one part
/// or in none.
pub fn lse_merges_disjoint_parts(devices: &[Device]) {
    let near = Pattern::local(16);
    let far = Pattern::intersection([
        Pattern::strided(16),
        Pattern::from_fn("not near", |_, i, j| i - j >= 16),
    ]);
    let gaps = |near: &Pattern| {
        let rows = Pattern::from_fn("gaps", |_, i, _| !(11..33).contains(&i));
        Pattern::intersection([rows, near.clone()])
    };
    for (near, dim) in [(near.clone(), 8), (gaps(&near), 64)] {
        let case = Case {
            pattern: Pattern::union([near.clone(), far.clone()]),
            head_dim: dim,
            value_dim: dim,
            ..cases()[13].clone()
        };
        let problem = case.problem(21).with_grad_lse(21);
        let answer = problem.solve();
        for device in devices {
            let mut dtypes = exact_dtypes(device);
            dtypes.extend(half_dtypes(device).into_iter().map(|dtype| (dtype, 3e-2)));
            for (dtype, tolerance) in dtypes {
                let device = &device.clone().autodiff();
                let [q, k, v, grad_out] = inputs(&problem, device, dtype);
                let [q, k, v] = [q, k, v].map(Tensor::require_grad);
                let part = |pattern: &Pattern| {
                    let layout = pattern
                        .layout(case.heads, case.seq_q, case.block_size)
                        .unwrap();
                    let (q, k, v) = (q.clone(), k.clone(), v.clone());
                    SparseAttentionCall::new(q, k, v, &layout)
                        .run_with_lse()
                        .unwrap()
                };
                let ((out_a, lse_a), (out_b, lse_b)) = (part(&near), part(&far));
                let (out, lse) = merge_attention(out_a, lse_a, out_b, lse_b).unwrap();
                assert_eq!(out.dtype(), dtype);
                let grad_lse = TensorData::new(problem.grad_lse.clone(), lse.dims());
                let grad_lse = Tensor::<3>::from_data(grad_lse, (device, lse.dtype()));
                let loss = (out.clone() * grad_out).sum().cast(lse.dtype());
                let grads = (loss + (lse.clone() * grad_lse).sum()).backward();
                let what = |name: &str| format!("merged, {device:?}, {dtype:?}: {name}");
                assert_close(&what("out"), out.into_data(), &answer.out, tolerance);
                assert_close(&what("lse"), lse.into_data(), &answer.lse, tolerance);
                for (x, expected, name) in [
                    (q, &answer.dq, "dq"),
                    (k, &answer.dk, "dk"),
                    (v, &answer.dv, "dv"),
                ] {
                    let grad = x.grad(&grads).unwrap().into_data();
                    assert_close(&what(name), grad, expected, tolerance);
                }
            }
        }
    }
}

/// Inputs, outputs and gradients of more than 2³¹ elements: the last rows of the last head are what a short sequence
/// gives. Needs 80 GB of device memory.
pub fn more_than_2_31_elements(devices: &[Device]) {
    let (heads, seq, dim) = (8, (1 << 22) + (1 << 15), 64);
    assert!(heads * seq * dim > 1 << 31);
    let (window, short) = (64, 512);
    let long_layout = Pattern::local(window).layout(heads, seq, 64).unwrap();
    let short_layout = Pattern::local(window).layout(1, short, 64).unwrap();
    let options = AttentionOptions::default();
    let tail = |x: Tensor<4>, rows: usize| {
        let [_, heads, seq, dim] = x.dims();
        x.slice([0..1, heads - 1..heads, seq - rows..seq, 0..dim])
    };
    for device in devices {
        let device = device.clone().autodiff();
        for (dtype, tolerance) in [(DType::F32, 1e-5), (DType::BF16, 2e-2)] {
            let one = |seed: u64| {
                device.seed(seed);
                Tensor::<4>::random(
                    [1, 1, seq, dim],
                    burn::tensor::Distribution::Normal(0.0, 1.0),
                    (&device, dtype),
                )
            };
            let [q, k, v] = [1, 2, 3].map(one);
            let wide = |x: Tensor<4>| x.expand([1, heads, seq, dim]);
            let out = SparseAttentionCall::new(wide(q), wide(k.clone()), wide(v), &long_layout)
                .options(options.clone())
                .run()
                .unwrap()
                .out;
            let x = Tensor::<4>::from_inner(out.inner()).require_grad();
            println!("{dtype:?}: {} elements of output", x.shape().num_elements());
            let y = SparseAttentionCall::new(x.clone(), x.clone(), x.clone(), &long_layout)
                .options(options.clone())
                .run()
                .unwrap()
                .out;
            let seen = to_f64(tail(y.clone(), short / 2).inner().into_data());
            let grads = y.backward();
            let grad = Tensor::<4>::from_inner(x.grad(&grads).unwrap());
            drop(grads);

            let x = Tensor::<4>::from_inner(tail(x, short).inner()).require_grad();
            let y = SparseAttentionCall::new(x.clone(), x.clone(), x.clone(), &short_layout)
                .options(options.clone())
                .run()
                .unwrap()
                .out;
            let expected = tail(y.clone(), short / 2).inner().into_data();
            assert!(to_f64(expected.clone()).iter().any(|x| x.abs() > 1e-3));
            assert_close("the last rows", expected, &seen, tolerance);
            let grads = y.backward();
            let short_grad = Tensor::<4>::from_inner(x.grad(&grads).unwrap());
            let seen = to_f64(tail(grad, short / 2).into_data());
            let expected = tail(short_grad, short / 2).into_data();
            assert_close("their gradient", expected, &seen, tolerance);
        }
    }
}
