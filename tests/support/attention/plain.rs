//! The op against f64 on the whole table: output, lse, weights and gradients.

use burn::tensor::module::attention_fallback;
use burn::tensor::ops::AttentionModuleOptions;
use burn_blocksparse::{ProductPrecision, merge_attention};
use burn_paged_attention::Quantization;

use crate::attention::cases::{Case, cases, per_batch, table};
use crate::prelude::*;

pub fn forward_and_gradients_equal_f64(devices: &[Device]) {
    for (index, case) in table() {
        let problem = case.problem(index as u64);
        let answer = problem.solve();
        for (device, dtype, tolerance) in exact(devices) {
            for mode in [WeightsMode::Recompute, WeightsMode::Store] {
                let what = format!("{}, {device:?}, {dtype:?}, {mode:?}", case.name);
                let options = problem.asked().weights(mode);
                let device = device.clone().autodiff();
                let got = run_with(&problem, &case.layout(), options, &device, dtype);
                answer.assert(&what, got, &[Near::Tensor(tolerance), Near::Rows(dtype)]);
            }
        }
    }
}

pub fn lse_and_weights_equal_f64(devices: &[Device]) {
    for (index, case) in table() {
        let problem = case.problem(1000 + index as u64);
        let answer = problem.solve();
        for (device, dtype, tolerance) in exact(devices) {
            let what = format!("{}, {device:?}, {dtype:?}", case.name);
            let [q, k, v, _] = inputs(&problem, device, dtype);
            let (layout, options) = (case.layout(), case.options());
            let (_, lse) = attend_with_lse([&q, &k, &v], &layout, &options);
            assert_eq!(lse.dtype(), dtype);
            let call = SparseAttentionCall::new(q, k, v, &layout).options(options);
            let output = call.weights().run().unwrap();
            assert!(output.lse.is_none() && output.max_scores.is_none());
            let weights = output.weights.unwrap().to_dense();
            let results = [
                ("lse", lse.into_data()),
                ("out", output.out.into_data()),
                ("weights", weights.into_data()),
            ];
            answer.assert(&what, results, &[Near::Tensor(tolerance)]);
        }
    }
}

/// Half-precision errors are at most twice those of dense attention in that dtype.
pub fn half_precision_is_as_good_as_dense(devices: &[Device]) {
    for (index, case) in table() {
        for (device, dtype) in halves(devices) {
            let what = format!("{}, {device:?}, {dtype:?}", case.name);
            let mut problem = case.problem(2000 + index as u64);
            problem.round_to(dtype);
            let layout = case.layout();
            let device = device.clone().autodiff();
            let ours = run(&problem, &layout, &device, dtype);
            // Burn's fallback does not support grouped heads.
            let dense = (case.heads == case.kv_heads)
                .then(|| run_dense(&case, &problem, &layout, &device, dtype));
            assert_as_good_as_dense(&what, &problem, ours, dense, dtype, false);
        }
    }
}

/// Panics if half-precision errors exceed twice those of dense attention plus one rounding of the result. With `of_terms`, errors are also relative
/// to the terms whose differences the results are.
pub fn assert_as_good_as_dense(
    what: &str,
    problem: &Problem,
    ours: Results,
    dense: Option<Results>,
    dtype: DType,
    of_terms: bool,
) {
    let answer = problem.solve();
    answer.assert(what, ours.clone(), &[Near::Rows(dtype)]);
    for (at, (name, ours)) in ours.into_iter().enumerate() {
        let Expected { values, terms, .. } = answer.result(name);
        let terms = if of_terms { terms } else { 0.0 };
        let error = |got: TensorData| error_relative_to(terms, &to_f64(got), values).0;
        let allowed = dense.as_ref().map(|dense| error(dense[at].1.clone()));
        let (error, allowed) = (error(ours), allowed.unwrap_or(0.0));
        let rounding = if dtype == DType::F16 { 1e-3 } else { 8e-3 };
        let is_right = error <= (2.0 * allowed).max(rounding);
        assert!(
            is_right,
            "{what}: {name} errs by {error:.2e}, dense math by {allowed:.2e}"
        );
    }
}

/// Returns the masked pairs, `[batch | 1, heads, seq_q, seq_kv]`.
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
    bools(&masked, [batch, heads, seq_q, seq_kv], device)
}

/// Returns output and gradients of Burn's own attention, in dense operations.
pub fn run_dense(
    case: &Case,
    problem: &Problem,
    layout: &BlockLayout,
    device: &Device,
    dtype: DType,
) -> Results {
    let [q, k, v, grad_out] = inputs(problem, device, dtype);
    let [q, k, v] = [q, k, v].map(Tensor::require_grad);
    let [batch, heads, seq_q, _] = problem.sizes.q();
    let mask = mask(layout, device).expand([batch, heads, seq_q, problem.sizes.seq_kv]);
    let options = AttentionModuleOptions {
        scale: case.scale,
        softcap: case.softcap,
        is_causal: false,
    };
    // Burn's attention does not support grouped heads.
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
    with_gradients(out, grad_out, [q, k, v])
}

/// Permuted, sliced and expanded tensors give the same results.
pub fn strides_do_not_matter(devices: &[Device]) {
    let case = &cases()[14];
    let (problem, layout) = (case.problem(5), case.layout());
    for device in devices {
        let [q, k, v, _] = inputs(&problem, device, DType::F32);
        let expected = attend([&q, &k, &v], &layout, &case.options());
        let expected = to_f64(expected.into_data());
        // [batch, seq, heads, dim] viewed as [batch, heads, seq, dim], the layout of projections.
        let permuted = |x: &Tensor<4>| stored_swapped(x, 1, 2);
        // A slice of a larger tensor.
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
            let out = attend([&q, &k, &v], &layout, &case.options());
            assert_close("strided inputs", out.into_data(), &expected, 1e-6);
        }
        // One head's keys expanded to all heads, without a copy.
        let [batch, heads, seq, dim] = k.dims();
        let first = |x: &Tensor<4>| {
            let head = x.clone().slice([0..batch, 0..1, 0..seq, 0..dim]);
            (head.clone().expand([batch, heads, seq, dim]), head)
        };
        let ((k_all, k_one), (v_all, v_one)) = (first(&k), first(&v));
        let expanded = attend([&q, &k_all, &v_all], &layout, &case.options());
        let multi_query = attend([&q, &k_one, &v_one], &layout, &case.options());
        let multi_query = to_f64(multi_query.into_data());
        assert_close("expanded keys", expanded.into_data(), &multi_query, 1e-6);
    }
}

pub fn same_input_same_bits(devices: &[Device]) {
    // One of width 8, others of widths that tensor cores support.
    let names = [
        "fixed, column groups per head",
        "merged strided, head dim 64",
        "grouped heads, head dim 64",
        "random blocks of 16",
        "softcap, head dim 128",
    ];
    let cases = cases();
    for device in devices {
        let names = if is_cuda(device) {
            &names[..]
        } else {
            &names[..2]
        };
        let mut dtypes = half_dtypes(device);
        dtypes.push(DType::F32);
        for case in cases.iter().filter(|case| names.contains(&case.name)) {
            let (problem, layout) = (case.problem(9), case.layout());
            for &dtype in &dtypes {
                let device = device.clone().autodiff();
                let run = || run(&problem, &layout, &device, dtype);
                assert_same_bits(&format!("{}, {dtype:?}", case.name), run(), run());
            }
        }
    }
}

/// A layout per batch entry.
pub fn per_batch_layouts(devices: &[Device]) {
    let patterns = [Pattern::local(9), Pattern::fixed(16, 4), Pattern::dense()];
    let problem = |seq: usize, block_size: usize, dim: usize| {
        let sizes = Sizes::new([3, 2, 2], [seq; 2], [dim; 2]);
        per_batch(&patterns, sizes, block_size, 3)
    };
    for (device, dtype) in halves(devices) {
        let (layout, mut wide) = problem(150, 16, 64);
        check_rows("per batch", &mut wide, &layout, device, dtype);
    }
    let (layout, problem) = problem(44, 8, 8);
    let answer = problem.solve();
    for device in devices {
        for mode in [WeightsMode::Recompute, WeightsMode::Store] {
            let device = device.clone().autodiff();
            let options = problem.asked().weights(mode);
            let got = run_with(&problem, &layout, options, &device, DType::F32);
            let bounds = [Near::Tensor(1e-5), Near::Rows(DType::F32)];
            answer.assert("per batch", got, &bounds);
        }
        let [q, k, v, _] = inputs(&problem, device, DType::F32);
        let call = SparseAttentionCall::new(q, k, v, &layout);
        let weights = call.weights().run().unwrap().weights.unwrap();
        let weights = ("weights", weights.to_dense().into_data());
        answer.assert("per batch", [weights], &[Near::Tensor(1e-5)]);
    }
}

/// Products are tf32 only on request, and then no coarser than tf32.
pub fn tf32_only_where_asked_for(devices: &[Device]) {
    let sizes = Sizes::new([2, 4, 2], [150, 150], [64, 64]);
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
            let plan = plan_of([&q, &k, &v], &layout, &options);
            let tf32 = plan.contains("in tf32");
            assert!(precision == ProductPrecision::Tf32 || !tf32, "{plan}");
            let device = device.clone().autodiff();
            let got = run_with(&problem, &layout, options, &device, DType::F32);
            let within = if tf32 { tolerance } else { 1e-5 };
            let what = format!("{precision:?}, {plan}");
            answer.assert(&what, got, &[Near::Tensor(within)]);
        }
    }
}

/// Products are E4M3 only on request and if the plan says so. Inputs are exact in E4M3, so only the weights are rounded.
pub fn fp8_only_where_asked_for(devices: &[Device]) {
    for (widths, block_size, seed) in [([64, 64], 128, 1), ([128, 128], 64, 2), ([80, 48], 64, 3)] {
        let sizes = Sizes::new([1, 4, 2], [300, 300], widths);
        let pattern = Pattern::local(150);
        let layout = pattern.layout(4, 300, block_size).unwrap();
        let mut problem = Problem::random(sizes, seed, move |_, head, i, j| {
            pattern.attends(head, i as i64, j as i64)
        });
        round_to_e4m3(&mut problem.q, sizes.q(), |_| 1.0);
        round_to_e4m3(&mut problem.k, sizes.k(), |block| {
            f64::from(1 + block as u8 % 2)
        });
        round_to_e4m3(&mut problem.v, sizes.v(), |block| {
            4f64.powi(block as i32 % 3 - 1)
        });
        let answer = problem.solve();
        for device in devices {
            for dtype in half_dtypes(device) {
                let [q, k, v, _] = inputs(&problem, device, dtype);
                let of = |precision| {
                    let options = AttentionOptions::default().precision(precision);
                    let plan = plan_of([&q, &k, &v], &layout, &options);
                    let call = call_of([&q, &k, &v], &layout, &options);
                    let result = call.lse().run().unwrap();
                    let lse = result.lse.unwrap().into_data();
                    (plan, [("out", result.out.into_data()), ("lse", lse)])
                };
                let (plain_plan, plain) = of(ProductPrecision::Full);
                assert!(!plain_plan.contains("E4M3"), "{plain_plan}");
                let (plan, got) = of(ProductPrecision::Fp8);
                let has_kernels = plain_plan.contains("forward  hopper");
                assert_eq!(plan.contains("products in E4M3"), has_kernels, "{plan}");
                match has_kernels {
                    true => {
                        let [out, lse] = got;
                        answer.assert(&plan, [out], &[Near::Tensor(3e-2)]);
                        answer.assert(&plan, [lse], &[Near::Tensor(1e-3)]);
                    }
                    false => assert_eq!(got, plain, "{plan}"),
                }
            }
        }
    }
}

/// Rounds a `[batch, heads, seq, dim]` tensor to E4M3 with a power-of-two scale for each 64 rows of a head, multiplied by `factor` of these rows.
/// Each such block contains the largest element.
fn round_to_e4m3(values: &mut [f64], [.., seq, dim]: [usize; 4], factor: impl Fn(usize) -> f64) {
    let e4m3 = Quantization::Fp8E4m3;
    for head in values.chunks_mut(seq * dim) {
        for (block, values) in head.chunks_mut(64 * dim).enumerate() {
            let largest = values.iter().fold(0f64, |most, x| most.max(x.abs()));
            let scale = (largest / f64::from(e4m3.largest())).log2().ceil().exp2();
            values[0] = scale * f64::from(e4m3.largest());
            for x in values {
                let rounded = e4m3.decode(e4m3.encode((*x / scale) as f32));
                *x = f64::from(rounded) * scale * factor(block);
            }
        }
    }
}

/// Two disjoint parts merged by lse equal attention over their union, including gradients; rows may have keys in one part or in none.
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
                let got = differentiated(&problem, &device.clone().autodiff(), dtype, |q, k, v| {
                    let part = |pattern: &Pattern| {
                        let layout = pattern.layout(case.heads, case.seq_q, case.block_size);
                        attend_with_lse([&q, &k, &v], &layout.unwrap(), &case.options())
                    };
                    let ((out_a, lse_a), (out_b, lse_b)) = (part(&near), part(&far));
                    let (out, lse) = merge_attention(out_a, lse_a, out_b, lse_b).unwrap();
                    assert_eq!(out.dtype(), dtype);
                    (out, lse)
                });
                let what = format!("merged, {device:?}, {dtype:?}");
                answer.assert(&what, got, &[Near::Tensor(tolerance)]);
            }
        }
    }
}

/// Inputs, outputs and gradients of more than 2³¹ elements: the last rows of the last head equal those of a short sequence. Needs 80 GB of device
/// memory.
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
                let normal = Distribution::Normal(0.0, 1.0);
                Tensor::<4>::random([1, 1, seq, dim], normal, (&device, dtype))
            };
            let [q, k, v] = [1, 2, 3].map(one);
            let wide = |x: Tensor<4>| x.expand([1, heads, seq, dim]);
            let out = attend([&wide(q), &wide(k), &wide(v)], &long_layout, &options);
            let x = Tensor::<4>::from_inner(out.inner()).require_grad();
            println!("{dtype:?}: {} elements of output", x.shape().num_elements());
            let y = attend([&x, &x, &x], &long_layout, &options);
            let seen = to_f64(tail(y.clone(), short / 2).inner().into_data());
            let grads = y.backward();
            let grad = Tensor::<4>::from_inner(x.grad(&grads).unwrap());
            drop(grads);

            let x = Tensor::<4>::from_inner(tail(x, short).inner()).require_grad();
            let y = attend([&x, &x, &x], &short_layout, &options);
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
