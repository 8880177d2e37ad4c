//! Errors of operations besides attention, and their plans.

use burn::tensor::FloatDType;
use burn_blocksparse::{AccumulatedAttentionOptions, accumulated_attention};
use burn_fused_ops::sparse_linear::{BlockSparseLinearOptions, WeightLayout, block_sparse_linear};
use burn_fused_ops::{
    Activation, AddNormOptions, CrossEntropyOptions, ElementDropout, LinearOptions, MlpOptions,
    MlpParams, NormParams, Residual, RopePositions, add_norm, bias_activation, dropout,
    embedding_backward, explain, fused_linear, linear_cross_entropy, mlp, out_proj, qkv_proj,
    residual_add, rope, rope_pair, split_heads,
};
use burn_paged_attention::sampling::{SampleOptions, sample_tokens};
use burn_sparse_select::nsa::NsaBranches;

use burn_blocksparse_tests::prelude::*;

fn zeros<const D: usize>(shape: [usize; D], device: &Device) -> Tensor<D> {
    Tensor::zeros(shape, (device, DType::F32))
}

/// Checks that the plan of a call fails with the same error.
fn both<P, T>(plan: Result<P, OpError>, call: Result<T, OpError>) -> Result<T, OpError> {
    assert_eq!(plan.err().as_ref(), call.as_ref().err());
    call
}

#[test]
fn activations() {
    for device in &devices() {
        let call = |x: [usize; 2], bias: usize| {
            let (x, bias) = (zeros(x, device), zeros([bias], device));
            let plan = Activation::Silu.explain(&x, Some(&bias));
            both(plan, bias_activation(x, Some(bias), Activation::Silu))
        };
        refused! {
            call([3, 8], 7) => "bias's length must be 8, x's width, got 7";
            call([3, 8], 0) => "bias's length must be 8, x's width, got 0";
            call([3, 0], 1) => "bias's length must be 0, x's width, got 1";
        }
    }
    if let Some([device, other]) = two_devices() {
        let (x, bias) = (zeros([3, 8], &device), zeros([8], &other));
        refused! { bias_activation(x, Some(bias), Activation::Relu) => "bias's device must be…"; }
    }
}

#[test]
fn attention_sums() {
    let layout = Pattern::causal().layout(4, 32, 8).unwrap();
    for device in &devices() {
        let call = |lse: [usize; 3], dtype, queries| {
            let q = zeros([1, 4, 32, 8], device);
            let lse = Tensor::<3>::zeros(lse, (device, dtype));
            let options = AccumulatedAttentionOptions::default().queries(queries);
            accumulated_attention(q.clone(), q, lse, &layout, options)
        };
        let range = "options.queries must be a range within 0..32 that is not empty, got";
        refused! {
            call([1, 4, 31], DType::F32, 0..32) => "lse's shape must be [1, 4, 32], q's rows, got [1, 4, 31]";
            call([1, 4, 32], DType::F32, 8..33) => format!("{range} 8..33");
            call([1, 4, 32], DType::F32, 8..8) => format!("{range} 8..8");
        }
        if supports(device, DType::F64) {
            refused! { call([1, 4, 32], DType::F64, 0..32) => "lse's dtype must be F32, that of q's sums, got F64"; }
        }
    }
}

#[test]
fn block_sparse_products() {
    let layout = WeightLayout::random([32, 48], 16, 0.7, 1).unwrap();
    for device in &devices() {
        let call = |width, shape: [usize; 3], bias: Option<usize>, gates: Option<usize>| {
            let (x, weight) = (zeros([3, width], device), zeros(shape, device));
            let mut options = BlockSparseLinearOptions::default();
            options.bias = bias.map(|length| zeros([length], device));
            options.gates = gates.map(|length| zeros([length], device));
            let plan = options.explain(&x, &weight, &layout);
            both(plan, block_sparse_linear(x, weight, &layout, options))
        };
        let whole = [4, 16, 16];
        refused! {
            call(16, whole, None, None) => "x's last dimension must be 32, the layout's inputs, got 16";
            call(32, [3, 16, 16], None, None) => "weight's shape must be [4, 16, 16], the layout's, got [3, 16, 16]";
            call(32, whole, Some(32), None) => "bias's length must be 48, the layout's outputs, got 32";
            call(32, whole, None, Some(3)) => "gates's length must be 4, the layout's blocks, got 3";
        }
    }
}

#[test]
fn dropped_tensors_and_ids() {
    for device in &devices() {
        for probability in [1.0, -0.5, f64::NAN] {
            let mask = ElementDropout::new(probability, 0, 0);
            let result = dropout(zeros([2, 3], device), &mask);
            refused! { result => format!("dropout's probability must be at least 0 and less than 1, got {probability}"); }
        }
        let (ids, grad) = (Tensor::zeros([3], device), zeros([4, 2], device));
        refused! { embedding_backward(ids, grad, 5) => "ids' length must be 4, grad's rows, got 3"; }
    }
}

#[test]
fn gated_sums() {
    for device in &devices() {
        let call = |window: [usize; 4], gates: [usize; 4]| {
            let selected = zeros([1, 2, 5, 8], device);
            let branches = NsaBranches::new(None, selected, Some(zeros(window, device)));
            let gates = zeros(gates, device);
            both(branches.explain_gated(&gates), branches.gated(gates))
        };
        let of_gates = "gates' shape must be [1, 2, 5, 3], q's rows and 3, got";
        refused! {
            call([1, 2, 5, 8], [1, 2, 5, 2]) => format!("{of_gates} [1, 2, 5, 2]");
            call([1, 2, 5, 8], [1, 1, 5, 3]) => format!("{of_gates} [1, 1, 5, 3]");
            call([1, 2, 5, 4], [1, 2, 5, 3]) => "a branch's shape must be [1, 2, 5, 8], the selected one's, got [1, 2, 5, 4]";
        }
        if supports(device, DType::F64) {
            let wide = zeros([1, 1, 2, 4], device).cast(DType::F64);
            let branches = NsaBranches::new(Some(wide), zeros([1, 1, 2, 4], device), None);
            refused! { branches.gated(zeros([1, 1, 2, 3], device)) => "a branch's dtype must be F32, the selected one's, got F64"; }
        }
    }
}

#[test]
fn heads() {
    for device in &devices() {
        let call = |parts: &[(usize, usize)], bias: usize| {
            let (x, bias) = (zeros([2, 5, 8], device), zeros([bias], device));
            let plan = explain::split_heads(&x, Some(&bias), parts);
            both(plan, split_heads(x, Some(bias), parts))
        };
        refused! {
            call(&[], 8) => "parts must be of 1 to 3 tensors, got 0";
            call(&[(1, 2); 4], 8) => "parts must be of 1 to 3 tensors, got 4";
            call(&[(2, 3)], 8) => "x's width must be 6, the heads of all parts, got 8";
            call(&[(2, 3), (1, 4)], 8) => "x's width must be 10, the heads of all parts, got 8";
            call(&[(usize::MAX, 2)], 8) => "x's width must be the heads of [(18446744073709551615, 2)], got 8";
            call(&[(2, 4)], 7) => "bias's length must be 8, x's width, got 7";
        }
    }
}

#[test]
fn products() {
    for device in &devices() {
        let options = LinearOptions::default();
        let call = |inputs: &[usize]| {
            let x = zeros([3, 4], device);
            let weights: Vec<_> = inputs.iter().map(|&of| zeros([of, 2], device)).collect();
            let plan = options.explain(&x, &weights);
            both(plan, fused_linear(x, weights, &options))
        };
        refused! {
            call(&[5]) => "weight's in must be 4, x's last dimension, got 5";
            call(&[4, 5]) => "weight's in must be 4, x's last dimension, got 5";
            call(&[]) => "weights must be 1 to 3 matrices, got 0";
            call(&[4; 4]) => "weights must be 1 to 3 matrices, got 4";
        }
    }
}

#[test]
fn losses() {
    for device in &devices() {
        let call = |weight: [usize; 2], targets: [usize; 2], smoothing| {
            let (x, weight) = (zeros([2, 3, 4], device), zeros(weight, device));
            let targets = Tensor::<2, Int>::zeros(targets, device);
            let options = CrossEntropyOptions::default().label_smoothing(smoothing);
            let plan = options.explain(&x, &weight, &targets);
            both(plan, linear_cross_entropy(x, weight, targets, &options))
        };
        let smoothing = "options.label_smoothing must be at least 0 and less than 1, got";
        refused! {
            call([5, 9], [2, 3], 0.0) => "weight's width must be 4, x's last dimension, got 5";
            call([4, 9], [3, 2], 0.0) => "targets' shape must be [2, 3] or [6], x's positions, got [3, 2]";
            call([4, 0], [2, 3], 0.0) => "weight's vocab must be at least 1, got 0";
            call([4, 9], [2, 3], 1.0) => format!("{smoothing} 1");
            call([4, 9], [2, 3], f64::NAN) => format!("{smoothing} NaN");
        }
        let of = |targets: [i32; 3], ignored: Option<i64>| {
            let mut options = CrossEntropyOptions::default();
            options.ignore_index = ignored;
            let targets = Tensor::<1, Int>::from_data(targets, device);
            let (x, weight) = (zeros([3, 4], device), zeros([4, 9], device));
            linear_cross_entropy(x, weight, targets, &options)
        };
        let range = "targets must be at least 0 and less than 9, weight's vocab, got";
        refused! {
            of([0, 9, 1], None) => format!("{range} 9");
            of([-1, 0, 1], None) => format!("{range} -1");
            of([-1, -2, 1], Some(-1)) => format!("{range} -2");
        }
    }
}

#[test]
fn feed_forward_networks() {
    for device in &devices() {
        let call = |inner: [usize; 2], outer: [usize; 2], bias: usize| {
            let params = MlpParams::new(zeros(inner, device), zeros(outer, device));
            let params = params.bias(zeros([bias], device));
            let (x, options) = (zeros([3, 4], device), MlpOptions::default());
            let plan = options.explain(&x, &params, Activation::Silu);
            both(plan, mlp(x, params, Activation::Silu, &options))
        };
        refused! {
            call([5, 6], [6, 2], 6) => "the inner weight's in must be 4, x's last dimension, got 5";
            call([4, 6], [5, 2], 6) => "the outer weight's in must be 6, the inner weight's out, got 5";
            call([4, 6], [6, 2], 5) => "bias's length must be 6, the inner weight's out, got 5";
        }
    }
}

#[test]
fn norms() {
    let dropped = "options.dropout's probability must be at least 0 and less than 1, got";
    for device in &devices() {
        let plain = AddNormOptions::default;
        let call = |[stream, branch]: [[usize; 2]; 2], widths: [usize; 3], options| {
            let [bias, gamma, beta] = widths.map(|width| zeros([width], device));
            let branch = Residual::new(zeros(branch, device)).bias(bias);
            let params = NormParams::new(gamma).beta(beta);
            add_norm(zeros(stream, device), Some(branch), params, &options)
        };
        let mut dropping = plain();
        dropping.dropout = Some(ElementDropout::new(1.0, 0, 0));
        let both = [[3, 8]; 2];
        let epsilon = "options.epsilon must be finite and at least 0, got";
        refused! {
            call([[3, 8], [3, 7]], [8; 3], plain()) => "branch's shape must be [3, 8], the stream's, got [3, 7]";
            call(both, [1, 8, 8], plain()) => "bias's shape must be [8], the stream's width, got [1]";
            call(both, [8, 7, 8], plain()) => "gamma's shape must be [8], the stream's width, got [7]";
            call(both, [8, 8, 9], plain()) => "beta's shape must be [8], the stream's width, got [9]";
            call([[3, 0]; 2], [0; 3], plain()) => "stream's width must be at least 1, got 0";
            call(both, [8; 3], plain().epsilon(-1.0)) => format!("{epsilon} -1");
            call(both, [8; 3], plain().epsilon(f64::INFINITY)) => format!("{epsilon} inf");
            call(both, [8; 3], dropping) => format!("{dropped} 1");
        }
        let x = zeros([3, 8], device);
        let dropout = Some(ElementDropout::new(-0.5, 0, 0));
        refused! { residual_add(x.clone(), Residual::new(x), dropout) => format!("{dropped} -0.5"); }
        if !device.supports_dtype(FloatDType::BF16) {
            let half = plain().dtype(FloatDType::BF16);
            refused! { call(both, [8; 3], half) => "options.dtype must be a dtype of the device, got BF16"; }
        }
    }
}

#[test]
fn projections() {
    for device in &devices() {
        let options = LinearOptions::default();
        let call = |widths: &[usize], parts: &[(usize, usize)], inputs, bias: usize| {
            let (x, bias) = (zeros([2, 5, 4], device), zeros([bias], device));
            let weights = widths.iter().map(|&width| zeros([inputs, width], device));
            let weights: Vec<_> = weights.collect();
            let plan = options.explain_to_heads(&x, &weights, Some(&bias), parts);
            both(plan, qkv_proj(x, weights, Some(bias), parts, &options))
        };
        refused! {
            call(&[6], &[(2, 3)], 5, 6) => "weight's in must be 4, x's last dimension, got 5";
            call(&[], &[(2, 3)], 4, 6) => "weights must be 1 to 3 matrices, got 0";
            call(&[6], &[], 4, 6) => "parts must be of 1 to 3 tensors, got 0";
            call(&[6], &[(1, 1); 4], 4, 6) => "parts must be of 1 to 3 tensors, got 4";
            call(&[6, 2], &[(2, 3)], 4, 8) => "parts must be heads of 8 columns in all, those of the weights, got [(2, 3)]";
            call(&[6], &[(usize::MAX, 2)], 4, 6) => "parts must be heads of 6 columns in all, those of the weights, got [(18446744073709551615, 2)]";
            call(&[6], &[(2, 3)], 4, 7) => "bias's length must be 6, the weights' columns, got 7";
        }
        let (x, weight) = (zeros([2, 3, 5, 4], device), zeros([11, 4], device));
        let plan = options.explain_from_heads(&x, &weight);
        refused! { both(plan, out_proj(x, weight, &options)) => "weight's in must be 12, x's heads · width, got 11"; }
    }
}

#[test]
fn rotations() {
    for device in &devices() {
        let places = |count| RopePositions::Of(Box::new(Tensor::zeros([count], device)));
        let call = |table: [usize; 3], positions| {
            let (x, table) = (zeros([2, 3, 5, 4], device), zeros(table, device));
            rope(x, table, positions, FloatDType::F32, false)
        };
        let below = "positions must be below 9, the table's rows, got";
        refused! {
            call([9, 6, 2], RopePositions::From(0)) => "table's shape must be [context, 4, 2], of x's even width, got [9, 6, 2]";
            call([9, 4, 2], RopePositions::From(5)) => format!("{below} 9");
            call([9, 4, 2], RopePositions::From(usize::MAX)) => format!("{below} 18446744073709551614");
            call([9, 4, 2], places(9)) => "positions must be one for each of 2 · 5 rows, got 9";
        }
        let pair = |key| {
            let (query, table) = (zeros([2, 3, 5, 4], device), zeros([9, 4, 2], device));
            let first = RopePositions::From(0);
            rope_pair(query, key, table, first, FloatDType::F32, false)
        };
        refused! { pair(zeros([2, 1, 4, 4], device)) => "key's shape must be [2, 1, 5, 4], as the queries', got [2, 1, 4, 4]"; }
        if supports(device, DType::F64) {
            let key = zeros([2, 1, 5, 4], device).cast(DType::F64);
            refused! { pair(key) => "key's dtype must be F32, the queries', got F64"; }
        }
    }
}

#[test]
fn sampling() {
    for device in &devices() {
        let plain = SampleOptions::default;
        let call = |logits: [usize; 2], draws: usize, seen: [usize; 2], options| {
            let (logits, draws) = (zeros(logits, device), zeros([draws], device));
            sample_tokens(logits, draws, Some(Tensor::zeros(seen, device)), &options)
        };
        let fits = |options| call([2, 5], 2, [2, 5], options);
        refused! {
            call([2, 0], 2, [2, 0], plain()) => "logits must be at least 1 and less than 2^24 columns, got 0";
            call([2, 5], 3, [2, 5], plain()) => "draws' length must be 2, logits' rows, got 3";
            call([2, 5], 2, [5, 2], plain()) => "seen's shape must be [2, 5], logits', got [5, 2]";
            fits(plain().top_p(0.0)) => "top_p must be above 0 and at most 1, got 0";
            fits(plain().temperature(-1.0)) => "temperature must be a number, at least 0, got -1";
        }
    }
}

/// Products are Burn's; the other operations use kernels if there are any.
#[test]
fn plans_say_what_runs() {
    let layout = WeightLayout::random([32, 48], 16, 0.7, 1).unwrap();
    for device in &devices() {
        let (x, weight) = (zeros([300, 4], device), zeros([4, 9], device));
        let mlp = MlpParams::new(weight.clone(), zeros([9, 2], device));
        let block_sparse = BlockSparseLinearOptions::default();
        let (rows, blocks) = (zeros([300, 32], device), zeros(layout.shape(), device));
        for plan in [
            LinearOptions::default().explain(&x, std::slice::from_ref(&weight)),
            MlpOptions::default().explain(&x, &mlp, Activation::Silu),
            block_sparse.explain(&rows, &blocks, &layout),
        ] {
            let plan = plan.unwrap().to_string();
            assert!(plan.starts_with("Burn's primitives on"), "{plan}");
        }
        let targets = Tensor::<1, Int>::zeros([300], device);
        let plan = CrossEntropyOptions::default().explain(&x, &weight, &targets);
        let plan = plan.unwrap();
        let text = plan.to_string();
        match plan.is_kernels() {
            true => assert!(text.contains("1 chunks of 300 positions"), "{text}"),
            false => assert!(text.starts_with("Burn's primitives on"), "{text}"),
        }
        for width in [1, 7, 128, 3000] {
            let branches = NsaBranches::new(None, zeros([1, 2, 5, width], device), None);
            let plan = branches
                .explain_gated(&zeros([1, 2, 5, 3], device))
                .unwrap();
            assert_eq!(plan.is_kernels(), is_cube(device), "{plan}");
        }
    }
}
