//! Biases of scores and dropout of weights in `SparseMultiHeadAttention`: against dense Burn operations, and against itself.

use burn_blocksparse::alibi_slopes;
use burn_blocksparse::layout::TopKOptions;
use burn_sparse_select::{top_k_blocks, top_k_blocks_on_device};

use crate::common::*;

const HEADS: usize = 4;
const D_MODEL: usize = 32;
const D_K: usize = D_MODEL / HEADS;
const REACH: usize = 5;

fn config(pattern: Pattern) -> SparseMultiHeadAttentionConfig {
    SparseMultiHeadAttentionConfig::new(D_MODEL, HEADS, pattern).with_block_size(8)
}

/// All options of scores, without dropout.
fn biased() -> SparseMultiHeadAttentionConfig {
    config(Pattern::causal())
        .with_alibi(true)
        .with_relative_reach(Some(REACH))
        .with_sinks(true)
}

fn init(config: SparseMultiHeadAttentionConfig) -> SparseMultiHeadAttention {
    randomise(config.init(&Device::flex()))
}

fn forward(mha: &SparseMultiHeadAttention, x: &Tensor<3>) -> Tensor<3> {
    attend(mha, x.clone()).unwrap()
}

/// Computes causal attention of `biased` in dense operations; also returns its weights.
fn dense(mha: &SparseMultiHeadAttention, x: Tensor<3>, bias: Tensor<4>) -> (Tensor<3>, Tensor<4>) {
    let (device, [_, seq, _]) = (x.device(), x.dims());
    let qkv = [&mha.query, &mha.key, &mha.value]
        .map(|linear| split_heads(linear.forward(x.clone()), HEADS));
    let slopes = alibi_slopes(HEADS);
    let learned = mha.relative_bias.as_ref().unwrap().val().into_data();
    let learned: Vec<f32> = learned.try_to_vec().unwrap();
    let of_pair = |at: usize| {
        let (head, i, j) = (at / seq / seq, at / seq % seq, at % seq);
        let distance = (j as i64 - i as i64).clamp(-(REACH as i64), REACH as i64);
        let of_distance = (distance + REACH as i64) as usize;
        learned[head * (2 * REACH + 1) + of_distance] - slopes[head] as f32 * i.abs_diff(j) as f32
    };
    let biases: Vec<f32> = (0..HEADS * seq * seq).map(of_pair).collect();
    let biases = TensorData::new(biases, [1, HEADS, seq, seq]);
    let biases = Tensor::<4>::from_data(biases, &device) + bias;
    let added = biases + hidden([1, seq, seq], &device, |_, i, j| j <= i);
    let sinks = mha.sinks.as_ref().unwrap().val();
    let [context, weights] =
        dense_attention(qkv, 1.0 / (D_K as f64).sqrt(), None, added, Some(sinks));
    (mha.output.forward(merge_heads(context)), weights)
}

#[rstest]
fn biases_and_sinks_equal_dense_attention(#[values(1, 13, 40)] seq: usize) {
    let device = Device::flex();
    let mha = init(biased());
    let x = random([2, seq, D_MODEL], &device);
    for shape in [[2, HEADS, seq, seq], [1, HEADS, 1, seq], [2, 1, seq, seq]] {
        let bias = random(shape, &device);
        let input = SparseMhaInput::self_attn(x.clone()).bias(bias.clone());
        let got = mha.forward(input.clone()).context;
        let (context, expected) = dense(&mha, x.clone(), bias);
        assert_close(got, context.clone(), 2e-5);
        let (got, weights) = mha.forward_with_weights(input);
        assert_close(got.context, context, 2e-5);
        assert_close(weights.to_dense(), expected, 2e-5);
    }
}

#[test]
fn pieces_and_packed_sequences_give_what_the_whole_gives() {
    let device = Device::flex();
    let mha = init(biased());
    let x = random([1, 30, D_MODEL], &device);
    assert_pieces(&mha, (&x, &mut SparseMhaCache::new()), &[7, 1, 1, 21], 2e-5);
    let whole = forward(&mha, &x);
    let y = random([1, 11, D_MODEL], &device);
    let packed = Tensor::cat(vec![x, y.clone()], 1);
    let got = mha.forward_packed(packed, &[0, 30, 41]).context;
    assert_close(got, Tensor::cat(vec![whole, forward(&mha, &y)], 1), 2e-5);
}

#[test]
fn what_is_learned_begins_at_0() {
    let fresh = biased().init(&Device::flex());
    let zeros = |x: Tensor<1>| assert_eq!(x.abs().max().into_scalar::<f32>(), 0.0);
    zeros(fresh.sinks.unwrap().val());
    zeros(fresh.relative_bias.unwrap().val().flatten(0, 1));
}

/// Makes a layer with queries of 0, so that all keys have equal weight.
fn uniform(dropout: f64, device: &Device) -> SparseMultiHeadAttention {
    let mut mha = config(Pattern::dense()).with_dropout(dropout).init(device);
    mha.query.weight = Param::from_tensor(Tensor::zeros([D_MODEL, D_MODEL], device));
    mha
}

#[test]
fn weights_are_dropped_while_training_only() {
    let plain = Device::flex();
    let device = plain.clone().autodiff();
    let mha = uniform(0.4, &device);
    let x = random([1, 24, D_MODEL], &plain);
    let context = |mha: &SparseMultiHeadAttention, input: SparseMhaInput| {
        mha.forward(input).context.without_autodiff()
    };
    let input = || SparseMhaInput::self_attn(x.clone().autodiff());
    let differ = |a: &Tensor<3>, b: &Tensor<3>| apart(a.clone(), b.clone()) > 1e-4;
    let whole = forward(&mha.valid(), &x);
    assert_close(forward(&mha.valid(), &x), whole.clone(), 0.0);
    assert_close(context(&mha.clone().freeze(), input()), whole.clone(), 1e-6);

    let [a, b] = [(); 2].map(|_| context(&mha, input()));
    assert!(differ(&a, &whole) && differ(&a, &b));
    let seeded = |seed| context(&mha, input().dropout_seed(seed));
    assert_close(seeded(7), seeded(7), 0.0);
    assert!(differ(&seeded(7), &seeded(8)));
    // The masks are unbiased on average.
    let mean = (0..400).fold(Tensor::zeros_like(&whole), |sum, seed| sum + seeded(seed)) / 400.0;
    let (error, once) = (apart(mean, whole.clone()), apart(seeded(1), whole));
    assert!(error < 0.25 * once, "{error} of {once}");
}

#[test]
fn every_learned_bias_gets_a_gradient() {
    let device = Device::flex().autodiff();
    let mha = randomise(biased().with_dropout(0.2).init(&device));
    let x = random([2, 20, D_MODEL], &device);
    let bias = random([1, HEADS, 20, 20], &device).require_grad();
    let input = SparseMhaInput::self_attn(x).bias(bias.clone());
    let y = mha.forward(input).context;
    let grads = y.powi_scalar(2).sum().backward();
    let largest = |grad: Tensor<1>| grad.abs().max().into_scalar::<f32>();
    let table = mha.relative_bias.unwrap().val().grad(&grads).unwrap();
    assert_eq!(table.dims(), [HEADS, 2 * REACH + 1]);
    assert!(largest(table.clone().flatten(0, 1)) > 1e-5);
    // No query sees later keys.
    let ahead = table.narrow(1, REACH + 1, REACH).flatten(0, 1);
    assert_eq!(largest(ahead), 0.0);
    assert!(largest(mha.sinks.unwrap().val().grad(&grads).unwrap()) > 1e-5);
    assert!(largest(bias.grad(&grads).unwrap().flatten(0, 3)) > 1e-5);
}

#[test]
fn dropout_comes_with_what_is_converted() {
    let device = Device::flex();
    let dense = MultiHeadAttentionConfig::new(16, 2)
        .with_dropout(0.3)
        .init(&device);
    let sparse = SparseMultiHeadAttention::from_dense(&dense, Pattern::dense(), 8).unwrap();
    assert_eq!(sparse.dropout.prob, 0.3);
    let encoder = TransformerEncoderConfig::new(16, 32, 2, 2).with_dropout(0.25);
    let encoder = encoder.init(&device);
    let sparse = SparseTransformerEncoder::from_dense(&encoder, Pattern::dense(), 8).unwrap();
    for layer in &sparse.layers {
        assert_eq!([layer.mha.dropout.prob, layer.dropout.prob], [0.25; 2]);
    }
}

#[test]
fn a_layout_of_the_moment_takes_the_patterns_place() {
    let device = Device::flex();
    let mha = init(config(Pattern::local(3)).with_n_kv_heads(Some(2)));
    let x = random([2, 50, D_MODEL], &device);
    let input = || SparseMhaInput::self_attn(x.clone());
    let all = mha.clone().with_pattern(Pattern::causal(), 8).unwrap();
    let causal = mha.forward_choosing(input(), |query, key| {
        assert_eq!(query.dims(), [2, HEADS, 50, D_K]);
        assert_eq!(key.dims(), [2, 2, 50, D_K]);
        Ok(all.layout(50, 50).unwrap())
    });
    assert_close(causal.context, forward(&all, &x), 0.0);
    let four = TopKOptions::new(8, 4);
    let there =
        mha.try_forward_choosing(input(), |q, k| top_k_blocks_on_device(q, k, four.clone()));
    let here = mha.try_forward_choosing(input(), |q, k| top_k_blocks(q, k, four.clone()));
    let (there, here) = (there.unwrap().context, here.unwrap().context);
    assert_close(there.clone(), here, 1e-5);
    let difference = apart(there, forward(&all, &x));
    assert!(difference > 1e-3, "four blocks are not all");
}

#[test]
fn what_does_not_fit_is_refused() {
    let device = Device::flex();
    let try_init = |config: SparseMultiHeadAttentionConfig| config.try_init(&device);
    let causal = || config(Pattern::causal());
    for (dropout, got) in [(1.0, "1"), (-0.1, "-0.1"), (f64::NAN, "NaN")] {
        refused! { try_init(causal().with_dropout(dropout)) => format!("dropout must be at least 0 and below 1, got {got}"); }
    }
    refused! { try_init(causal().with_relative_reach(Some(1 << 28))) => "relative_reach must be at most 134217727 with 4 heads, got 268435456"; }
    for (config, name) in [
        (causal().with_dropout(0.1), "dropout"),
        (causal().with_alibi(true), "alibi"),
        (causal().with_relative_reach(Some(3)), "relative_bias"),
        (causal().with_sinks(true), "sinks"),
        (causal().with_quiet_softmax(true), "quiet_softmax"),
    ] {
        refused! { LongformerAttentionConfig::new(config).try_init(&device) => format!("{name} must be none in LongformerAttention, got some"); }
    }

    let mha = init(causal());
    let x = random([2, 9, D_MODEL], &device);
    let input = || SparseMhaInput::self_attn(x.clone());
    let zeros = |shape| Tensor::<4>::zeros(shape, &device);
    for shape in [[3, 1, 9, 9], [1, 2, 9, 9], [1, 1, 8, 9], [1, 1, 9, 8]] {
        refused! { mha.try_forward(input().bias(zeros(shape))) => "bias…"; }
    }
    let padded = input().lengths([9, 4]);
    refused! { mha.try_forward_choosing(padded, |_, _| Ok(mha.layout(9, 9).unwrap())) => "padding must be none: a chosen layout says what takes part, got some"; }
    let other = mha.try_forward_choosing(input(), |_, _| Ok(mha.layout(8, 8).unwrap()));
    assert!(other.is_err(), "a layout of another length");
}
