//! Conversion of modules and records of burn-nn, with a pattern.

use burn::nn::attention::generate_autoregressive_mask;
use burn::nn::transformer::{TransformerEncoder, TransformerEncoderInput};
use burn::store::ModuleRecord;
use burn_sparse_transformer::{SparseTransformerEncoderConfig, SparseTransformerEncoderInput};

use crate::common::*;

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
    let run = |mha: &SparseMultiHeadAttention| attend(mha, x.clone()).unwrap();
    let input = MhaInput::self_attn(x.clone());
    assert_close(run(&same), dense.forward(input.clone()).context, 1e-5);
    let causal = same.with_pattern(Pattern::causal(), 16).unwrap();
    assert_eq!(causal.block_size(), 16);
    let mask = generate_autoregressive_mask(2, 37, &device);
    let expected = dense.forward(input.mask_attn(mask)).context;
    assert_close(run(&causal), expected, 1e-5);
}

/// burn-nn's quiet softmax: its weights, one by one, and their use.
#[test]
fn a_quiet_softmax_stays_quiet() {
    const SEQ: usize = 8;
    let device = Device::flex();
    let quiet = MultiHeadAttentionConfig::new(32, 4).with_quiet_softmax(true);
    let mut dense = randomise(quiet.init(&device));
    // Small scores: eight of 0 leave a ninth of the weight.
    let x = random([2, SEQ, 32], &device).mul_scalar(0.3);
    let mask = generate_autoregressive_mask(2, SEQ, &device);
    let lengths = [SEQ, 3];
    let padding = lengths.map(|length| std::array::from_fn::<bool, SEQ, _>(|j| j >= length));
    let padding = Tensor::<2, Bool>::from_data(padding, &device);
    let convert =
        |dense: &_, pattern| SparseMultiHeadAttention::from_dense(dense, pattern, 8).unwrap();
    let theirs = || MhaInput::new(x.clone(), x.clone(), x.clone());
    let ours = || SparseMhaInput::self_attn(x.clone());
    let other = SparseMhaInput::new(x.clone(), x.clone(), x.clone());
    for (pattern, theirs, ours) in [
        (Pattern::dense(), theirs(), ours()),
        (Pattern::causal(), theirs().mask_attn(mask), ours()),
        (
            Pattern::dense(),
            theirs().mask_pad(padding),
            other.lengths(lengths),
        ),
    ] {
        let got = convert(&dense, pattern).forward(ours);
        assert_close(got.context, dense.forward(theirs).context, 1e-5);
    }

    // With unit vectors as values, one per key, the output is the weights.
    let unit = Tensor::<2>::eye(32, &device);
    for linear in [&mut dense.value, &mut dense.output] {
        linear.weight = Param::from_tensor(unit.clone());
        linear.bias = None;
    }
    let values = Tensor::<2>::eye(SEQ, &device).repeat(&[1, 4]);
    let values = values.unsqueeze::<3>().repeat(&[2, 1, 1]);
    let input = MhaInput::new(x.clone(), x.clone(), values.clone());
    let expected = dense.forward(input).weights;
    let least = expected.clone().sum_dim(3).min().into_scalar::<f32>();
    assert!(least < 0.9, "weights that all sum to {least} are not quiet");
    let sparse = convert(&dense, Pattern::dense());
    let input = SparseMhaInput::new(x.clone(), x.clone(), values);
    let got = sparse.forward(input.clone()).context;
    let got = got.reshape([2, SEQ, 4, SEQ]).swap_dims(1, 2);
    assert_close(got, expected.clone(), 1e-5);
    let (_, weights) = sparse.forward_with_weights(input);
    assert_close(weights.to_dense(), expected, 1e-5);

    // It has no parameter, so records load both ways; in a decoder pieces give the result of the whole.
    let config = SparseMultiHeadAttentionConfig::new(32, 4, Pattern::causal())
        .with_block_size(8)
        .with_quiet_softmax(true);
    let mha = config.init(&device);
    let record = dense.clone().into_record().allow_unused(true);
    let mha = mha.load_record(record.allow_partial(true));
    assert_eq!(mha.num_params(), quiet.init(&device).num_params());
    assert_pieces(&mha, (&x, &mut SparseMhaCache::new()), &[5, 1, 2], 1e-5);
    refused! { config.with_sinks(true).try_init(&device) => "sinks must be none with quiet_softmax, which is one, got some"; }
}

/// Gradients with a quiet softmax.
#[test]
fn a_quiet_softmax_is_trained() {
    let device = Device::flex().autodiff();
    let quiet = MultiHeadAttentionConfig::new(32, 4)
        .with_quiet_softmax(true)
        .with_dropout(0.0);
    let dense = randomise(quiet.init(&device));
    let sparse = SparseMultiHeadAttention::from_dense(&dense, Pattern::dense(), 8).unwrap();
    let x = random([2, 13, 32], &device);
    let theirs = dense.forward(MhaInput::self_attn(x.clone())).context;
    let ours = sparse.forward(SparseMhaInput::self_attn(x));
    let gradient = |y: Tensor<3>| {
        let grads = y.powi_scalar(2).sum().backward();
        dense.query.weight.val().grad(&grads).unwrap()
    };
    assert_close(gradient(ours.context), gradient(theirs), 1e-3);
}

#[rstest]
fn records_load_both_ways(
    #[values(false, true)] norm_first: bool,
    #[values(false, true)] quiet_softmax: bool,
) {
    let device = Device::flex();
    let config = TransformerEncoderConfig::new(32, 48, 4, 3)
        .with_norm_first(norm_first)
        .with_quiet_softmax(quiet_softmax);
    let dense = randomise(config.init(&device));
    let bytes = dense.clone().into_record().into_bytes().unwrap();
    let loaded = SparseTransformerEncoderConfig::new(config.clone(), Pattern::dense())
        .with_block_size(8)
        .init(&device)
        .try_load_record(ModuleRecord::from_bytes(bytes).unwrap())
        .unwrap();
    let x = random([1, 13, 32], &device);
    let run = |dense: &TransformerEncoder| dense.forward(TransformerEncoderInput::new(x.clone()));
    let got = loaded.try_forward(SparseTransformerEncoderInput::new(x.clone()));
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
    let got = sparse.forward(input.clone().mask_pad(mask));
    let real = |t: Tensor<3>, entry, from, len| t.narrow(0, entry, 1).narrow(1, from, len);
    for (entry, from, len) in [(0, 1, 10), (1, 0, 7)] {
        let [got, expected] = [&got, &expected].map(|x| real(x.clone(), entry, from, len));
        assert_close(got, expected, 2e-5);
    }
    refused! { sparse.try_forward(input.lengths([3])) => "lengths must be of 2 batch entries, got 1"; }
}

#[test]
fn encoders_decode_and_take_packed_sequences() {
    let sparse = sparse(&encoder(true), Pattern::fixed(8, 2));
    let x = random([1, 30, 32], &Device::flex());
    let forward = |x: Tensor<3>| sparse.forward(SparseTransformerEncoderInput::new(x));
    let mut caches = sparse.new_caches();
    let piece = |from, len| x.clone().narrow(1, from, len);
    let decoded = in_pieces(&[19, 1, 10], |from, len| {
        sparse.forward_cache(piece(from, len), &mut caches)
    });
    assert_close(decoded, forward(x.clone()), 2e-5);
    let packed = sparse.forward_packed(x.clone(), &[0, 19, 30]);
    let alone = [forward(piece(0, 19)), forward(piece(19, 11))];
    assert_close(packed, Tensor::cat(alone.to_vec(), 1), 2e-5);
    refused! { sparse.try_forward_cache(x.clone(), &mut caches[..2]) => "caches must be 3, one for each layer, got 2"; }
    let wrong = sparse.try_forward_cache(x.narrow(2, 0, 8), &mut caches);
    assert!(wrong.is_err() && caches.iter().all(|cache| cache.len() == 30));
}

#[test]
fn what_does_not_fit_is_refused() {
    let device = Device::flex();
    let mut odd = MultiHeadAttentionConfig::new(16, 2).init(&device);
    odd.value = burn::nn::LinearConfig::new(16, 8).init(&device);
    refused! { SparseMultiHeadAttention::from_dense(&odd, Pattern::dense(), 8) => "value must be [d_model = 16, d_model = 16], got [16, 8]"; }
    let init = |config: TransformerEncoderConfig| {
        let config = SparseTransformerEncoderConfig::new(config, Pattern::fixed_heads(8, 2, 3));
        config.try_init(&device)
    };
    let config = || TransformerEncoderConfig::new(16, 32, 2, 1);
    refused! {
        init(config()) => "…heads must be a multiple of num_verts = 3…";
        init(TransformerEncoderConfig::new(16, 32, 3, 1)) => "d_model must be a positive multiple of n_heads = 3, got 16";
        init(config().with_dropout(1.0)) => "dropout must be at least 0 and below 1, got 1";
        init(config().with_layer_norm_eps(0.0)) => "layer_norm_eps must be positive and finite, got 0";
        init(TransformerEncoderConfig::new(16, 32, 2, 0)) => "n_layers must be at least 1, got 0";
        init(TransformerEncoderConfig::new(16, 0, 2, 1)) => "d_ff must be at least 1, got 0";
    }
}
