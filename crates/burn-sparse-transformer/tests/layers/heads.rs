//! Operations of `SparseMultiHeadAttention` on heads (normalization, rotation, scale), and padding: against dense Burn operations, and against
//! itself in pieces.

use burn::nn::{LayerNormConfig, RmsNormConfig};
use burn::store::ModuleRecord;
use burn::tensor::Bytes;

use crate::common::*;

const HEADS: usize = 4;
const D_MODEL: usize = 32;
const D_K: usize = D_MODEL / HEADS;

fn config(pattern: Pattern) -> SparseMultiHeadAttentionConfig {
    SparseMultiHeadAttentionConfig::new(D_MODEL, HEADS, pattern).with_block_size(8)
}

fn rope() -> Option<RotaryEncodingConfig> {
    Some(RotaryEncodingConfig::new(64, D_K))
}

fn init(config: SparseMultiHeadAttentionConfig) -> SparseMultiHeadAttention {
    randomise(config.init(&Device::flex()))
}

/// Computes causal attention in dense operations, as in the papers.
fn dense_causal(
    mha: &SparseMultiHeadAttention,
    config: &SparseMultiHeadAttentionConfig,
    x: Tensor<3>,
) -> Tensor<3> {
    let (device, [_, seq, _]) = (x.device(), x.dims());
    let normalized = |x: Tensor<4>, norm: &Option<HeadNorm>| match norm {
        None => x,
        Some(HeadNorm::Rms(rms)) => {
            let norm = RmsNormConfig::new(D_K).with_epsilon(config.qk_norm_eps);
            let norm = norm.init(&device);
            norm.load_record(rms.clone().into_record()).forward(x)
        }
        Some(HeadNorm::Layer(layer)) => {
            let norm = LayerNormConfig::new(D_K).with_epsilon(config.qk_norm_eps);
            let norm = norm.init(&device);
            norm.load_record(layer.clone().into_record()).forward(x)
        }
        Some(other) => panic!("{other:?}"),
    };
    let placed = |linear: &Linear, norm: &Option<HeadNorm>| {
        let x = normalized(split_heads(linear.forward(x.clone()), HEADS), norm);
        match &config.rope {
            Some(rope) => rope.init(&device).forward(x),
            None => x,
        }
    };
    let qkv = [
        placed(&mha.query, &mha.query_norm),
        placed(&mha.key, &mha.key_norm),
        split_heads(mha.value.forward(x.clone()), HEADS),
    ];
    let scale = config.scale.unwrap_or(1.0 / (D_K as f64).sqrt());
    let future = hidden([1, seq, seq], &device, |_, i, j| j <= i);
    let [context, _] = dense_attention(qkv, scale, config.softcap, future, None);
    mha.output.forward(merge_heads(context))
}

#[rstest]
fn options_equal_dense_operations(
    #[values(None, Some(QkNorm::Rms), Some(QkNorm::Layer))] qk_norm: Option<QkNorm>,
    #[values(false, true)] rotated: bool,
    #[values(None, Some(0.7))] scale: Option<f64>,
    #[values(None, Some(1.5))] softcap: Option<f64>,
) {
    let config = config(Pattern::causal())
        .with_qk_norm(qk_norm)
        .with_qk_norm_eps(1e-3)
        .with_rope(if rotated { rope() } else { None })
        .with_scale(scale)
        .with_softcap(softcap)
        .with_query_bias(false);
    let mha = init(config.clone());
    let x = random([2, 21, D_MODEL], &Device::flex());
    let expected = dense_causal(&mha, &config, x.clone());
    let got = attend(&mha, x).unwrap();
    assert_close(got, expected, 2e-5);
}

#[test]
fn mixed_precision_normalises_and_rotates() {
    let device = Device::flex();
    let options = |precision| {
        config(Pattern::fixed(8, 2))
            .with_rope(rope())
            .with_qk_norm(Some(QkNorm::Layer))
            .with_precision(precision)
    };
    let exact = init(options(Precision::F32));
    let rounded = options(Precision::Bf16).init(&device);
    let rounded = rounded.load_record(exact.clone().into_record());
    let input = SparseMhaInput::self_attn(random([1, 20, D_MODEL], &device));
    let expected = exact.forward(input.clone()).context;
    assert_close(rounded.forward(input).context, expected, 0.1);
}

fn mask(rows: &[[bool; 11]]) -> Tensor<2, Bool> {
    let data = TensorData::new(rows.concat(), [rows.len(), 11]);
    Tensor::from_data(data, &Device::flex())
}

/// `true` = padding: at the end of entry 0, at the beginning of entry 1, nowhere, everywhere.
fn ragged() -> Vec<[bool; 11]> {
    let places = [6..11, 0..4, 0..0, 0..11];
    places
        .map(|places| std::array::from_fn(|j| places.contains(&j)))
        .to_vec()
}

#[test]
fn padding_equals_burn_nns_where_there_is_none_and_is_0_elsewhere() {
    let device = Device::flex();
    let dense = MultiHeadAttentionConfig::new(D_MODEL, HEADS)
        .with_dropout(0.0)
        .init(&device);
    let sparse = config(Pattern::dense()).init(&device);
    let sparse = sparse.load_record(dense.clone().into_record());
    let x = random([4, 11, D_MODEL], &device);
    let expected = dense.forward(MhaInput::self_attn(x.clone()).mask_pad(mask(&ragged())));
    let input = SparseMhaInput::self_attn(x).mask_pad(mask(&ragged()));
    let got = sparse.forward(input).context;
    for (entry, padding) in ragged().iter().enumerate() {
        for (i, padded) in padding.iter().enumerate() {
            let row = |t: &Tensor<3>| t.clone().narrow(0, entry, 1).narrow(1, i, 1);
            match padded {
                true => assert_eq!(row(&got).abs().max().into_scalar::<f32>(), 0.0),
                false => assert_close(row(&got), row(&expected.context), 1e-5),
            }
        }
    }
}

/// Lengths equal a padding mask. The suite's random layers compare results and gradients with f64.
#[test]
fn lengths_are_a_mask() {
    let lengths = [6, 0, 11, 1];
    let padding = lengths.map(|length| std::array::from_fn(|j| j >= length));
    let input = SparseMhaInput::self_attn(random([4, 11, D_MODEL], &Device::flex()));
    let [by_lengths, by_mask] = [
        input.clone().lengths(lengths),
        input.mask_pad(mask(&padding)),
    ];
    for pattern in [Pattern::window(3), Pattern::merged_strided(4)] {
        let mha = init(config(pattern).with_rope(rope()));
        let expected = mha.forward(by_lengths.clone()).context;
        assert_close(mha.forward(by_mask.clone()).context, expected, 1e-6);
    }
}

#[test]
fn decoding_with_padding_on_the_left() {
    let mha = init(config(Pattern::causal()).with_rope(rope()));
    let x = random([2, 11, D_MODEL], &Device::flex());
    let padding = [std::array::from_fn(|j| j < 4), [false; 11]];
    let whole = SparseMhaInput::self_attn(x.clone()).mask_pad(mask(&padding));
    let whole = mha.forward(whole).context;
    let mut cache = SparseMhaCache::new();
    for new in [6, 1, 1, 3] {
        let start = cache.len();
        let seen = mask(&padding).narrow(1, 0, start + new);
        let input = SparseMhaInput::self_attn(x.clone().narrow(1, start, new)).mask_pad(seen);
        let got = mha.forward_cache(input, &mut cache).context;
        assert_close(got, whole.clone().narrow(1, start, new), 1e-5);
    }
}

/// A record written by the first version of the model, and its logits.
#[test]
fn records_written_before_these_options_load() {
    let bytes = std::fs::read("tests/data/record-0.1.0.burnpack").unwrap();
    let record = ModuleRecord::from_bytes(Bytes::from_bytes_vec(bytes)).unwrap();
    let fixed = Factorization::from(Pattern::fixed(8, 2));
    let device = Device::flex();
    let model = small([8, 2], fixed, [7, 16, 2])
        .with_embedding_width(Some(8))
        .init(&device)
        .try_load_record(record)
        .unwrap();
    let logits = model.forward(tokens(1, 16, 7, &device));
    let expected = [
        -0.5414277,
        0.26597518,
        0.20640585,
        0.17882921,
        0.015028271,
        -0.3283173,
        -0.674534f32,
    ];
    let expected = Tensor::from_data([[expected]], &device);
    assert_close(logits.narrow(1, 15, 1), expected, 1e-5);
}

#[test]
fn configurations_that_do_not_fit_are_refused() {
    let init = |config: SparseMultiHeadAttentionConfig| config.try_init(&Device::flex());
    let config = || config(Pattern::causal());
    refused! {
        init(config().with_scale(Some(f64::NAN))) => "scale must be finite, as f32, got NaN";
        init(config().with_qk_norm_eps(0.0)) => "qk_norm_eps must be positive and finite, got 0";
    }
    let rope = |seq, width| Some(RotaryEncodingConfig::new(seq, width));
    refused! {
        init(config().with_rope(rope(16, 6))) => "rope.d_model must be 8, the width of a query head, got 6";
        init(config().with_rope(rope(0, D_K))) => "rope.max_sequence_length must be between 1 and 16777216, got 0";
        init(config().with_d_key(Some(12)).with_rope(rope(16, 3))) => "rope.d_model must be a positive multiple of the rotated pairs = 2, got 3";
    }
    let cold = RotaryEncodingConfig::new(16, D_K).with_theta(0.0);
    refused! { init(config().with_rope(Some(cold))) => "rope.theta must be positive and finite, got 0"; }
}

#[test]
fn inputs_that_do_not_fit_are_refused() {
    let device = Device::flex();
    let mha = init(config(Pattern::causal()).with_rope(rope()));
    let zeros = |seq| Tensor::<3>::zeros([2, seq, D_MODEL], &device);
    let input = || SparseMhaInput::self_attn(zeros(11));
    let forward = |input| mha.try_forward(input);
    refused! {
        forward(input().mask_pad(mask(&[[false; 11]; 3]))) => "mask_pad must be [batch = 2, seq_kv = 11], got [3, 11]";
        forward(input().lengths([3])) => "lengths must be of 2 batch entries, got 1";
        forward(input().lengths([3, 12])) => "lengths must be at most 11, the number of keys, got 12";
        forward(SparseMhaInput::self_attn(zeros(65))) => "positions must stay below 64, rope.max_sequence_length, got positions 0..65";
        forward(SparseMhaInput::new(zeros(5), zeros(4), zeros(4))) => "query must be at most 4 positions, as many as keys, with rope, got 5";
    }
    let mut cache = SparseMhaCache::new();
    mha.forward_cache(SparseMhaInput::self_attn(zeros(60)), &mut cache);
    refused! { mha.try_forward_cache(SparseMhaInput::self_attn(zeros(5)), &mut cache) => "positions must stay below 64, rope.max_sequence_length, got positions 60..65"; }
    assert_eq!(cache.len(), 60);
}
