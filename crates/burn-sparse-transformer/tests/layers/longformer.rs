//! Longformer's attention against f64, token by token.

use burn_sparse_transformer::longformer::LongformerInput;

use crate::common::*;
use crate::golden::{attend, dot, numbers};

const D_MODEL: usize = 16;
const HEADS: usize = 2;
const SEQ: usize = 37;

fn config(pattern: Pattern) -> SparseMultiHeadAttentionConfig {
    SparseMultiHeadAttentionConfig::new(D_MODEL, HEADS, pattern).with_block_size(8)
}

fn longformer(pattern: Pattern, device: &Device) -> LongformerAttention {
    let config = LongformerAttentionConfig::new(config(pattern));
    randomise(config.init(device))
}

/// Computes `x · W + b` for rows of `D_MODEL`.
fn linear(layer: &Linear, x: &[f64]) -> Vec<f64> {
    let weight = numbers(layer.weight.val());
    let bias = numbers(layer.bias.as_ref().unwrap().val());
    let element = |at: usize| {
        let (row, c) = (&x[at / D_MODEL * D_MODEL..][..D_MODEL], at % D_MODEL);
        let products = row.iter().zip(weight.iter().skip(c).step_by(D_MODEL));
        products.map(|(x, weight)| x * weight).sum::<f64>() + bias[c]
    };
    (0..x.len()).map(element).collect()
}

/// Computes one batch entry, as in the paper.
fn expected(
    longformer: &LongformerAttention,
    x: &[f64],
    global: &[usize],
    length: usize,
) -> Vec<f64> {
    let pattern = longformer.mha.pattern();
    let mha = &longformer.mha;
    let own = [&mha.query, &mha.key, &mha.value].map(|layer| linear(layer, x));
    let [q, k, v] = [
        &longformer.query_global,
        &longformer.key_global,
        &longformer.value_global,
    ];
    let of_global = [q, k, v].map(|layer| linear(layer, x));
    let width = D_MODEL / HEADS;
    let mut context = vec![0.0; SEQ * D_MODEL];
    for head in 0..HEADS {
        for i in 0..length {
            let is_global = global.contains(&i);
            let [q, k, v] = if is_global { &of_global } else { &own };
            let keys = (0..length).filter(|&j| {
                is_global || global.contains(&j) || pattern.attends(head, i as i64, j as i64)
            });
            let part = |row: usize| (row * HEADS + head) * width..(row * HEADS + head + 1) * width;
            let seen = keys.map(|j| {
                let score = dot(&q[part(i)], &k[part(j)]) / (width as f64).sqrt();
                (score, &v[part(j)])
            });
            let (out, _) = attend(&seen.collect::<Vec<_>>());
            context[part(i)].copy_from_slice(&out);
        }
    }
    let mut output = linear(&mha.output, &context);
    output[length * D_MODEL..].fill(0.0);
    output
}

#[rstest]
#[case::none(vec![vec![], vec![]], [SEQ, SEQ])]
#[case::one_each(vec![vec![0], vec![0]], [SEQ, SEQ])]
#[case::different(vec![vec![36, 0, 5, 9, 10, 10], vec![]], [SEQ, SEQ])]
#[case::padded(vec![vec![0, 3], vec![0, 20, 30]], [SEQ, 25])]
#[case::nothing_but_padding(vec![vec![0], vec![1, 2]], [19, 0])]
#[case::all(vec![(0..SEQ).collect(), vec![4]], [SEQ, SEQ])]
fn equals_f64(#[case] global: Vec<Vec<usize>>, #[case] lengths: [usize; 2]) {
    let device = Device::flex();
    for pattern in [
        Pattern::window(4),
        Pattern::per_head([Pattern::window(3), Pattern::dilated_window(2, 3)]),
    ] {
        let longformer = longformer(pattern, &device);
        let x = random([2, SEQ, D_MODEL], &device);
        let input = LongformerInput::new(x.clone())
            .global_per_entry(global.clone())
            .lengths(lengths);
        let got = longformer.forward(input).context;
        let x = numbers(x);
        let expected: Vec<f64> = (x.chunks(SEQ * D_MODEL).zip(&global).zip(lengths))
            .flat_map(|((x, global), length)| expected(&longformer, x, global, length))
            .collect();
        let expected = TensorData::new(expected, [2, SEQ, D_MODEL]).convert::<f32>();
        assert_close(got, Tensor::from_data(expected, &device), 2e-5);
    }
}

/// With equal projections it is one softmax over Longformer's pattern.
#[test]
fn begins_as_one_attention() {
    let device = Device::flex();
    let local = config(Pattern::window(4)).init(&device);
    let merged = local.clone();
    let merged = merged
        .with_pattern(Pattern::longformer(4, 1, [0, 7]), 8)
        .unwrap();
    let longformer = LongformerAttention::from_attention(local).unwrap();
    let x = random([2, SEQ, D_MODEL], &device);
    let expected = merged.forward(SparseMhaInput::self_attn(x.clone()));
    let got = longformer.forward(LongformerInput::new(x).global([7, 0]));
    assert_close(got.context, expected.context, 1e-5);
}

#[test]
fn every_projection_gets_a_gradient_of_its_own() {
    let device = Device::flex().autodiff();
    let longformer = longformer(Pattern::window(2), &device);
    let x = random([2, SEQ, D_MODEL], &device).require_grad();
    let input = LongformerInput::new(x.clone()).global_per_entry([vec![0, 9], vec![3]]);
    let y = longformer.forward(input).context;
    let grads = y.powi_scalar(2).sum().backward();
    let mha = &longformer.mha;
    let of = |linear: &Linear| linear.weight.val().grad(&grads).unwrap();
    for (own, of_global) in [
        (&mha.query, &longformer.query_global),
        (&mha.key, &longformer.key_global),
        (&mha.value, &longformer.value_global),
    ] {
        assert_ne!(own.weight.id, of_global.weight.id);
        assert!(apart(of(own), of(of_global)) > 1e-4);
        assert!(of(of_global).abs().max().into_scalar::<f32>() > 1e-4);
    }
    // Every token is seen by some query.
    let of_tokens = x.grad(&grads).unwrap().abs().sum_dim(2);
    assert!(of_tokens.min().into_scalar::<f32>() > 1e-5);
}

#[test]
fn mixed_precision_and_records() {
    let device = Device::flex();
    let exact = longformer(Pattern::window(4), &device);
    let config = config(Pattern::window(4)).with_precision(Precision::Bf16);
    let rounded = LongformerAttentionConfig::new(config).init(&device);
    let rounded = rounded.load_record(exact.clone().into_record());
    let input = LongformerInput::new(random([1, SEQ, D_MODEL], &device)).global([0, 30]);
    let expected = exact.forward(input.clone()).context;
    assert_close(rounded.forward(input).context, expected, 0.1);
}

#[test]
fn what_does_not_fit_is_refused() {
    let device = Device::flex();
    let init = |attention| {
        let config = LongformerAttentionConfig::new(attention);
        config.try_init(&device)
    };
    let rope = Some(RotaryEncodingConfig::new(64, 8));
    refused! {
        init(config(Pattern::window(4)).with_rope(rope)) => "rope must be none in LongformerAttention, got some";
        init(config(Pattern::window(4)).with_qk_norm(Some(QkNorm::Rms))) => "qk_norm must be none in LongformerAttention, got some";
    }
    let longformer = longformer(Pattern::window(4), &device);
    let input = || LongformerInput::new(Tensor::zeros([2, SEQ, D_MODEL], &device));
    let forward = |input| longformer.try_forward(input);
    refused! {
        forward(input().global([3, 37])) => "global must be below 37, the number of positions, got 37";
        forward(input().global_per_entry([vec![0]])) => "global must be of 2 batch entries, got 1";
        forward(input().lengths([38, 2])) => "lengths must be at most 37, the number of keys, got 38";
        forward(LongformerInput::new(Tensor::zeros([2, SEQ, 3], &device))) => "tensor must be [batch ≥ 1, seq ≥ 1, d_model = 16], got [2, 37, 3]";
    }
}
