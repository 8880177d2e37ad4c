//! `SparseMultiHeadAttention` against burn-nn's `MultiHeadAttention`, and against itself in pieces.

use burn::nn::attention::generate_autoregressive_mask;
use burn_sparse_transformer::{SparseTransformerBlock, SparseTransformerCache};

use crate::common::*;

fn sparse(d_model: usize, n_heads: usize, pattern: Pattern) -> SparseMultiHeadAttentionConfig {
    SparseMultiHeadAttentionConfig::new(d_model, n_heads, pattern).with_block_size(8)
}

#[rstest]
fn a_burn_nn_record_loads_and_gives_equal_outputs(
    #[values(8, 32)] block_size: usize,
    #[values(1, 37, 64)] seq: usize,
    #[values(false, true)] causal: bool,
) {
    let device = Device::flex();
    let dense = MultiHeadAttentionConfig::new(32, 4)
        .with_dropout(0.0)
        .init(&device);
    let pattern = match causal {
        true => Pattern::causal(),
        false => Pattern::dense(),
    };
    let sparse = sparse(32, 4, pattern)
        .with_block_size(block_size)
        .init(&device)
        .load_record(dense.clone().into_record());

    let x = random([2, seq, 32], &device);
    let mut input = MhaInput::self_attn(x.clone());
    if causal {
        input = input.mask_attn(generate_autoregressive_mask(2, seq, &device));
    }
    let expected = dense.forward(input).context;
    let got = attend(&sparse, x).unwrap();
    assert_close(got, expected, 1e-5);
}

#[test]
fn cross_attention_equals_burn_nn() {
    let device = Device::flex();
    let dense = MultiHeadAttentionConfig::new(16, 2)
        .with_dropout(0.0)
        .init(&device);
    let sparse = sparse(16, 2, Pattern::dense()).init(&device);
    let sparse = sparse.load_record(dense.clone().into_record());
    let query = random([2, 5, 16], &device);
    let [key, value] = [(); 2].map(|()| random([2, 19, 16], &device));
    let input = MhaInput::new(query.clone(), key.clone(), value.clone());
    let got = sparse.forward(SparseMhaInput::new(query, key, value));
    assert_close(got.context, dense.forward(input).context, 1e-5);
}

#[test]
fn half_size_queries_and_keys_leave_values_alone() {
    let device = Device::flex();
    let config = sparse(32, 4, Pattern::causal()).with_d_key(Some(16));
    let mha = config.init(&device);
    assert_eq!(mha.query.weight.dims(), [32, 16]);
    assert_eq!(mha.key.weight.dims(), [32, 16]);
    assert_eq!(mha.value.weight.dims(), [32, 32]);
    let output = mha.try_forward(SparseMhaInput::self_attn(random([1, 9, 32], &device)));
    assert_eq!(output.unwrap().context.dims(), [1, 9, 32]);
    let wide = (config.clone().with_d_value(Some(48))).try_init(&device);
    let wide = wide.unwrap();
    assert_eq!(wide.value.weight.dims(), [32, 48]);
    assert_eq!(wide.output.weight.dims(), [48, 32]);
    let output = attend(&wide, random([1, 9, 32], &device)).unwrap();
    assert_eq!(output.dims(), [1, 9, 32]);
    // 2 per weight; 2 · (d_k + d_v) per pair and head.
    let expected = 2 * (2 * 32 * 16 + 2 * 32 * 32);
    assert_eq!(mha.matmul_flops_per_token(), expected);
    assert_eq!(mha.attention_flops(3).unwrap(), 2 * (4 + 8) * 4 * 6);
}

#[test]
fn weights_of_the_kept_blocks_come_with_the_same_context() {
    let device = Device::flex();
    let mha = sparse(16, 2, Pattern::merged_strided(4)).init(&device);
    let input = SparseMhaInput::self_attn(random([2, 13, 16], &device));
    let expected = mha.forward(input.clone()).context;
    let (output, weights) = mha.forward_with_weights(input);
    assert_close(output.context, expected, 1e-5);
    let sums = weights.to_dense().sum_dim(3);
    assert_close(sums.clone(), sums.ones_like(), 1e-5);
}

#[test]
fn configurations_that_do_not_fit_are_refused() {
    let device = Device::flex();
    let init = |config: SparseMultiHeadAttentionConfig| config.try_init(&device);
    let config = |d_model, n_heads| sparse(d_model, n_heads, Pattern::causal());
    refused! {
        init(config(30, 4)) => "d_model must be a positive multiple of n_heads = 4, got 30";
        init(config(32, 0)) => "n_heads must be at least 1, got 0";
        init(config(32, 4).with_d_key(Some(10))) => "d_key must be a positive multiple of n_heads = 4, got 10";
        init(config(32, 4).with_d_value(Some(10))) => "d_value must be a positive multiple of n_heads = 4, got 10";
        init(config(32, 4).with_n_kv_heads(Some(3))) => "n_heads must be a positive multiple of n_kv_heads = 3, got 4";
        init(config(32, 4).with_softcap(Some(-1.0))) => "softcap must be positive and finite, got -1";
        init(config(32, 4).with_softmax_threshold(Some(0.0))) => "softmax_threshold must be positive and finite, got 0";
    }
    for block_size in [0, 7, 256] {
        let error = config(32, 4).with_block_size(block_size).try_init(&device);
        assert!(matches!(error, Err(TransformerError::Layout(_))));
    }
    let error = sparse(32, 4, Pattern::fixed_heads(8, 2, 3)).try_init(&device);
    assert!(matches!(error, Err(TransformerError::Layout(_))));
}

#[test]
fn inputs_that_do_not_fit_are_refused() {
    let device = Device::flex();
    let mha = sparse(16, 2, Pattern::causal()).init(&device);
    let zeros = |shape: [usize; 3]| Tensor::<3>::zeros(shape, &device);
    let forward = |q, k, v| {
        let input = SparseMhaInput::new(zeros(q), zeros(k), zeros(v));
        mha.try_forward(input)
    };
    refused! {
        forward([2, 3, 8], [2, 3, 16], [2, 3, 16]) => "query must be [batch ≥ 1, seq ≥ 1, d_model = 16], got [2, 3, 8]";
        forward([2, 0, 16], [2, 3, 16], [2, 3, 16]) => "query must be [batch ≥ 1, seq ≥ 1, d_model = 16], got [2, 0, 16]";
        forward([2, 3, 16], [1, 3, 16], [2, 3, 16]) => "key must be [batch = 2, seq ≥ 1, d_model = 16], got [1, 3, 16]";
        forward([2, 3, 16], [2, 3, 16], [2, 4, 16]) => "value must be [batch = 2, seq = 3, d_model = 16], got [2, 4, 16]";
    }
}

#[test]
fn a_full_cache_or_another_batch_is_refused_and_the_cache_kept() {
    let device = Device::flex();
    let mha = sparse(16, 2, Pattern::causal()).init(&device);
    let mut cache = SparseMhaCache::with_context(4);
    let mut feed = |shape: [usize; 3]| {
        let input = SparseMhaInput::self_attn(Tensor::zeros(shape, &device));
        let result = mha.try_forward_cache(input, &mut cache);
        (result, cache.len())
    };
    assert!(feed([1, 3, 16]).0.is_ok());
    let (result, len) = feed([1, 2, 16]);
    refused! { result => "positions must stay below 4, the cache's context, got positions 3..5"; }
    assert_eq!(len, 3);
    let (result, len) = feed([2, 1, 16]);
    refused! { result => "batch must be 1, the cache's, got 2"; }
    assert_eq!(len, 3);
    assert!(feed([1, 1, 16]).0.is_ok());
}

#[test]
fn modules_are_send_sync_and_say_what_they_are() {
    fn is_send_sync<T: Send + Sync>(_: &T) {}
    fn are_send_sync<T: Send + Sync, U: Send + Sync, V: Send + Sync>() {}
    are_send_sync::<SparseMhaCache, SparseTransformerCache, SparseMhaInput>();
    are_send_sync::<SparseTransformer, SparseTransformerBlock, SparseTransformerEncoder>();
    are_send_sync::<LongformerAttention, SparseTransformerConfig, TransformerError>();
    let mha = sparse(16, 2, Pattern::fixed(8, 2)).init(&Device::flex());
    is_send_sync(&mha);
    let expected = "SparseMultiHeadAttention {d_model: 16, n_heads: 2, n_kv_heads: 2, pattern: fixed(8, 2), \
         block_size: 8, params: 1088}";
    assert_eq!(mha.to_string(), expected);
}
