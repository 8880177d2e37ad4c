//! `SparseAttentionCall` returns the requested outputs, and none changes another.

use burn_blocksparse::layout::DeviceLayoutOptions;
use burn_blocksparse::{ProductPrecision, alibi_slopes, sparse_attention};

use burn_blocksparse_tests::prelude::*;

const HEADS: usize = 4;

fn layout() -> BlockLayout {
    Pattern::causal().layout(HEADS, 40, 8).unwrap()
}

/// Returns q with four heads; k and v with two.
fn inputs(device: &Device) -> [Tensor<4>; 3] {
    [HEADS, 2, 2].map(|heads| {
        let shape = [2, heads, 40, 16];
        Tensor::random(shape, Distribution::Normal(0.0, 1.0), (device, DType::F32))
    })
}

fn call<'a>([q, k, v]: [Tensor<4>; 3], layout: &'a BlockLayout) -> SparseAttentionCall<'a> {
    SparseAttentionCall::new(q, k, v, layout)
}

fn numbers<const D: usize>(x: Tensor<D>) -> Vec<f64> {
    to_f64(x.into_data())
}

fn assert_same(what: &str, got: &[f64], expected: &[f64]) {
    assert_near(what, got, expected, 2e-5);
}

#[test]
fn returns_what_is_asked_for() {
    let layout = layout();
    for device in devices() {
        let x = inputs(&device);
        let sinks = Tensor::<1>::from_data([0.3, -1.0, 2.0, 0.0], &device);
        let call = || call(x.clone(), &layout).sinks(sinks.clone()).softcap(3.0);
        let plain = numbers(call().run().unwrap().out);
        let (out, lse) = call().run_with_lse().unwrap();
        assert_same("run_with_lse", &numbers(out), &plain);
        for asked in 0..8 {
            let [with_lse, with_max, with_weights] = [1, 2, 4].map(|bit| asked & bit != 0);
            let mut call = call();
            if with_lse {
                call = call.lse();
            }
            if with_max {
                call = call.max_scores();
            }
            if with_weights {
                call = call.weights();
            }
            call.explain().unwrap();
            let output = call.run().unwrap();
            assert_same("out", &numbers(output.out.clone()), &plain);
            assert_eq!(output.lse.is_some(), with_lse);
            assert_eq!(output.max_scores.is_some(), with_max);
            assert_eq!(output.weights.is_some(), with_weights);
            if let Some(got) = output.lse {
                assert_same("lse", &numbers(got), &numbers(lse.clone()));
            }
            let Some(weights) = output.weights else {
                continue;
            };
            let weights = weights.to_dense();
            // The weight that the sink leaves in each row, and the output from the weights.
            let sink = sinks.clone().reshape([1, HEADS, 1]) - lse.clone();
            let sums = weights.clone().sum_dim(3).squeeze_dim::<3>(3);
            assert_same("sums", &numbers(sums), &numbers(1.0 - sink.exp()));
            let v = (x[2].clone().unsqueeze_dim::<5>(2))
                .expand([2, 2, 2, 40, 16])
                .reshape([2, HEADS, 40, 16]);
            // By rows, because Burn multiplies f32 matrices in tf32 on GPUs that have it.
            let product = weights.unsqueeze_dim::<5>(4) * v.unsqueeze_dim::<5>(2);
            let made = product.sum_dim(3).squeeze_dim::<4>(3);
            assert_same("weights", &numbers(made), &plain);
        }
    }
}

/// Each setter sets a field of the options or of the tensors.
#[test]
fn setters_are_those_of_options_and_tensors() {
    let layout = layout();
    for device in devices() {
        let x = inputs(&device);
        let random = |shape: [usize; 4]| {
            Tensor::<4>::random(shape, Distribution::Default, (&device, DType::F32))
        };
        let (bias, sinks) = (
            random([1, HEADS, 1, 40]),
            Tensor::<1>::ones([HEADS], &device),
        );
        let table = Tensor::<2>::ones([1, 5], &device);
        let dropout = Dropout::new(0.3, 7);
        let by_setters = call(x.clone(), &layout)
            .scale(0.4)
            .softcap(3.0)
            .alibi(alibi_slopes(HEADS))
            .dropout(dropout)
            .precision(ProductPrecision::Tf32)
            .weights_mode(WeightsMode::Store)
            .bias(bias.clone())
            .relative_bias(table.clone())
            .sinks(sinks.clone());
        let options = AttentionOptions::default()
            .scale(0.4)
            .softcap(3.0)
            .alibi(alibi_slopes(HEADS))
            .dropout(dropout)
            .precision(ProductPrecision::Tf32)
            .weights(WeightsMode::Store);
        let tensors = AttentionTensors::default()
            .bias(bias)
            .relative_bias(table)
            .sinks(sinks);
        let at_once = call(x.clone(), &layout).options(options).tensors(tensors);
        let plans = [&by_setters, &at_once].map(|call| call.explain().unwrap().to_string());
        assert_eq!(plans[0], plans[1]);
        let outs = [by_setters, at_once].map(|call| call.run().unwrap().out.into_data());
        assert_eq!(outs[0], outs[1]);
        let plain = sparse_attention(x[0].clone(), x[1].clone(), x[2].clone(), &layout);
        assert_ne!(outs[0], plain.unwrap().into_data());
    }
}

/// `explain` fails if the call does, with the same error.
#[test]
fn explains_what_runs_and_what_does_not() {
    let layout = layout();
    for device in devices() {
        let x = inputs(&device);
        let sinks = Tensor::<1>::zeros([3], &device);
        let call_of = call(x.clone(), &layout).sinks(sinks);
        let error = call_of.explain().unwrap_err();
        let expected = "sinks' heads must be 4, the layout's, got 3";
        assert_eq!(error.to_string(), expected);
        assert_eq!(call_of.run().unwrap_err(), error);

        // Weights of a layout that the host does not know.
        let data = TensorData::new(vec![0i32; HEADS * 5], [1, HEADS, 5, 1]);
        let blocks = Tensor::<4, Int>::from_data(data, &device);
        let counts = Tensor::<3, Int>::ones([1, HEADS, 5], &device);
        let options = DeviceLayoutOptions::new(LayoutShape::square(HEADS, 40, 8));
        let made = DeviceLayout::from_block_indices(blocks, counts, options).unwrap();
        let [q, k, v] = x;
        let call_of = SparseAttentionCall::new(q, k, v, &made);
        call_of.explain().unwrap();
        let call_of = call_of.weights();
        let error = call_of.explain().unwrap_err();
        assert_eq!(
            error.to_string(),
            "options.weights must be Recompute for a layout that is made on the device, got Store"
        );
        assert_eq!(call_of.run().unwrap_err(), error);
    }
}
