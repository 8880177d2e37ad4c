//! Modules and records of burn-nn with a pattern.

mod common;

use burn::module::Module;
use burn::nn::attention::{MhaInput, MultiHeadAttentionConfig, generate_autoregressive_mask};
use burn::nn::transformer::{
    TransformerEncoder, TransformerEncoderConfig, TransformerEncoderInput,
};
use burn::store::ModuleRecord;
use burn::tensor::{Bool, Device, Tensor, TensorData};
use burn_sparse_transformer::{
    Pattern, SparseMhaInput, SparseMultiHeadAttention, SparseTransformerEncoder,
    SparseTransformerEncoderConfig, SparseTransformerEncoderInput, TransformerError,
};
use common::{assert_close, random, randomise};
use rstest::rstest;

fn encoder(norm_first: bool) -> TransformerEncoder {
    let config = TransformerEncoderConfig::new(32, 48, 4, 3).with_norm_first(norm_first);
    randomise(config.init(&Device::flex()))
}

fn sparse(encoder: &TransformerEncoder, pattern: Pattern) -> SparseTransformerEncoder {
    SparseTransformerEncoder::from_dense(encoder, pattern, 8).unwrap()
}

#[test]
fn attention_keeps_its_weights_and_its_output() {
    let device = Device::flex();
    let dense = MultiHeadAttentionConfig::new(32, 4).with_key_bias(false);
    let dense = randomise(dense.init(&device));
    let x = random([2, 37, 32], &device);
    let same = SparseMultiHeadAttention::from_dense(&dense, Pattern::dense(), 8).unwrap();
    for (ours, theirs) in [
        (&same.query, &dense.query),
        (&same.key, &dense.key),
        (&same.value, &dense.value),
        (&same.output, &dense.output),
    ] {
        assert_eq!(ours.weight.id, theirs.weight.id);
        assert_close(ours.weight.val(), theirs.weight.val(), 0.0);
        assert_eq!(ours.bias.is_some(), theirs.bias.is_some());
    }
    let run = |mha: &SparseMultiHeadAttention| {
        let input = SparseMhaInput::self_attn(x.clone());
        mha.forward(input).unwrap().context
    };
    let input = MhaInput::self_attn(x.clone());
    assert_close(run(&same), dense.forward(input.clone()).context, 1e-5);
    let causal = same.with_pattern(Pattern::causal(), 16).unwrap();
    assert_eq!(causal.block_size(), 16);
    let mask = generate_autoregressive_mask(2, 37, &device);
    assert_close(
        run(&causal),
        dense.forward(input.mask_attn(mask)).context,
        1e-5,
    );
}

#[rstest]
fn encoders_keep_their_output(#[values(false, true)] norm_first: bool) {
    let device = Device::flex();
    let dense = encoder(norm_first);
    let x = random([2, 21, 32], &device);
    let mask = generate_autoregressive_mask(2, 21, &device);
    for (pattern, input) in [
        (Pattern::dense(), TransformerEncoderInput::new(x.clone())),
        (
            Pattern::causal(),
            TransformerEncoderInput::new(x.clone()).mask_attn(mask),
        ),
    ] {
        let expected = dense.forward(input);
        let input = SparseTransformerEncoderInput::new(x.clone());
        let got = sparse(&dense, pattern).forward(input).unwrap();
        assert_close(got, expected, 2e-5);
    }
}

#[rstest]
fn records_load_both_ways(#[values(false, true)] norm_first: bool) {
    let device = Device::flex();
    let dense = encoder(norm_first);
    let bytes = dense.clone().into_record().into_bytes().unwrap();
    let config = TransformerEncoderConfig::new(32, 48, 4, 3).with_norm_first(norm_first);
    let loaded = SparseTransformerEncoderConfig::new(config.clone(), Pattern::dense())
        .with_block_size(8)
        .init(&device)
        .unwrap()
        .try_load_record(ModuleRecord::from_bytes(bytes).unwrap())
        .unwrap();
    let x = random([1, 13, 32], &device);
    let run = |dense: &TransformerEncoder| dense.forward(TransformerEncoderInput::new(x.clone()));
    let got = loaded.forward(SparseTransformerEncoderInput::new(x.clone()));
    assert_close(got.unwrap(), run(&dense), 2e-5);
    let back = config.init(&device).try_load_record(loaded.into_record());
    assert_close(run(&back.unwrap()), run(&dense), 1e-6);
}

#[test]
fn encoders_pad_as_burn_nns() {
    let device = Device::flex();
    let dense = encoder(false);
    let x = random([2, 11, 32], &device);
    let padding: Vec<bool> = (0..22).map(|at| at == 0 || at > 17).collect();
    let data = TensorData::new(padding, [2, 11]);
    let mask = Tensor::<2, Bool>::from_data(data, &device);
    let expected = dense.forward(TransformerEncoderInput::new(x.clone()).mask_pad(mask.clone()));
    let sparse = sparse(&dense, Pattern::dense());
    let input = SparseTransformerEncoderInput::new(x);
    let got = sparse.forward(input.clone().mask_pad(mask)).unwrap();
    let real = |t: Tensor<3>, entry, from, len| t.narrow(0, entry, 1).narrow(1, from, len);
    assert_close(
        real(got.clone(), 0, 1, 10),
        real(expected.clone(), 0, 1, 10),
        2e-5,
    );
    assert_close(real(got, 1, 0, 7), real(expected, 1, 0, 7), 2e-5);
    let error = sparse.forward(input.lengths([3])).unwrap_err();
    assert_eq!(
        error.to_string(),
        "lengths must be of 2 batch entries, got 1"
    );
}

#[test]
fn encoders_decode_and_take_packed_sequences() {
    let sparse = sparse(&encoder(true), Pattern::fixed(8, 2));
    let x = random([1, 30, 32], &Device::flex());
    let forward = |x: Tensor<3>| {
        sparse
            .forward(SparseTransformerEncoderInput::new(x))
            .unwrap()
    };
    let mut caches = sparse.new_caches();
    let piece = |from, len| x.clone().narrow(1, from, len);
    let pieces = [(0, 19), (19, 1), (20, 10)];
    let decoded = pieces.map(|(from, len)| {
        let piece = piece(from, len);
        sparse.forward_cache(piece, &mut caches).unwrap()
    });
    assert_close(Tensor::cat(decoded.to_vec(), 1), forward(x.clone()), 2e-5);
    let packed = sparse.forward_packed(x.clone(), &[0, 19, 30]).unwrap();
    let alone = [forward(piece(0, 19)), forward(piece(19, 11))];
    assert_close(packed, Tensor::cat(alone.to_vec(), 1), 2e-5);
    let error = sparse
        .forward_cache(x.clone(), &mut caches[..2])
        .unwrap_err();
    assert_eq!(
        error.to_string(),
        "caches must be 3, one for each layer, got 2"
    );
    let wrong = sparse.forward_cache(x.narrow(2, 0, 8), &mut caches);
    assert!(wrong.is_err() && caches.iter().all(|cache| cache.len() == 30));
}

#[test]
fn what_does_not_fit_is_refused() {
    let device = Device::flex();
    let message = |error: TransformerError| error.to_string();
    let quiet = MultiHeadAttentionConfig::new(16, 2).with_quiet_softmax(true);
    let error = SparseMultiHeadAttention::from_dense(&quiet.init(&device), Pattern::dense(), 8);
    assert_eq!(
        message(error.unwrap_err()),
        "quiet_softmax must be false: weights sum to 1 here, got true"
    );
    let mut odd = MultiHeadAttentionConfig::new(16, 2).init(&device);
    odd.value = burn::nn::LinearConfig::new(16, 8).init(&device);
    let error = SparseMultiHeadAttention::from_dense(&odd, Pattern::dense(), 8);
    assert_eq!(
        message(error.unwrap_err()),
        "value must be [d_model = 16, d_model = 16], got [16, 8]"
    );
    let init = |config: TransformerEncoderConfig| {
        let config = SparseTransformerEncoderConfig::new(config, Pattern::fixed_heads(8, 2, 3));
        message(config.init(&device).unwrap_err())
    };
    let config = || TransformerEncoderConfig::new(16, 32, 2, 1);
    assert!(init(config()).contains("heads must be a multiple of num_verts = 3"));
    assert_eq!(
        init(TransformerEncoderConfig::new(16, 32, 3, 1)),
        "d_model must be a positive multiple of n_heads = 3, got 16"
    );
    assert_eq!(
        init(config().with_dropout(1.0)),
        "dropout must be at least 0 and below 1, got 1"
    );
    assert_eq!(
        init(config().with_layer_norm_eps(0.0)),
        "layer_norm_eps must be positive and finite, got 0"
    );
    assert_eq!(
        init(TransformerEncoderConfig::new(16, 32, 2, 0)),
        "n_layers must be at least 1, got 0"
    );
    assert_eq!(
        init(TransformerEncoderConfig::new(16, 0, 2, 1)),
        "d_ff must be at least 1, got 0"
    );
}
