//! Options of the attention of blocks and models beyond the paper's: decoding, records and gradients with each.

use burn::store::ModuleRecord;

use crate::common::*;

const VOCAB: usize = 11;
const CONTEXT: usize = 40;
const HEADS: usize = 4;
const REACH: usize = 5;

/// Each option alone, and all of them.
#[derive(Clone, Copy, Debug, PartialEq)]
enum With {
    Scale,
    Alibi,
    RelativeBias,
    Sinks,
    QkNorm,
    Rope,
    All,
}

impl With {
    fn attention(self) -> BlockAttentionConfig {
        let has = |one| self == one || self == Self::All;
        BlockAttentionConfig::new()
            .with_scale(has(Self::Scale).then_some(0.9))
            .with_alibi(has(Self::Alibi))
            .with_relative_reach(has(Self::RelativeBias).then_some(REACH))
            .with_sinks(has(Self::Sinks))
            .with_qk_norm(has(Self::QkNorm).then_some(QkNorm::Rms))
            .with_rope_theta(has(Self::Rope).then_some(100.0))
    }

    /// Returns the number of parameters that it adds to a block.
    fn params(self) -> usize {
        let has = |one| self == one || self == Self::All;
        let bias = HEADS * (2 * REACH + 1);
        let all = [
            (Self::RelativeBias, bias),
            (Self::Sinks, HEADS),
            (Self::QkNorm, 2 * 4),
        ];
        let own = all.into_iter().filter(|(one, _)| has(*one));
        own.map(|(_, params)| params).sum()
    }
}

fn config(attention: Option<BlockAttentionConfig>) -> SparseTransformerConfig {
    let patterns = vec![Pattern::fixed(8, 2), Pattern::local(6)];
    let factorization = Factorization::Interleaved(patterns);
    small([16, HEADS], factorization, [VOCAB, CONTEXT, 3])
        .with_embedding_width(Some(8))
        .with_n_kv_heads(Some(2))
        .with_attention(attention)
}

fn logits(model: &SparseTransformer, x: &Tensor<2, Int>) -> Tensor<3> {
    model.forward(x.clone())
}

#[rstest]
fn each_is_there_and_decodes_and_is_recorded(
    #[values(
        With::Scale,
        With::Alibi,
        With::RelativeBias,
        With::Sinks,
        With::QkNorm,
        With::Rope,
        With::All
    )]
    with: With,
    #[values(None, Some(false))] position_embedding: Option<bool>,
) {
    let (device, _guard) = seeded(Device::flex(), 1);
    let configure = |attention| config(attention).with_position_embedding(position_embedding);
    let plain = configure(None).init(&device);
    let model = configure(Some(with.attention())).init(&device);
    assert_eq!(model.num_params() - plain.num_params(), 3 * with.params());
    let model = randomise(model);
    let x = tokens(2, 33, VOCAB, &device);
    let whole = logits(&model, &x);
    // The same weights without the option give another result.
    let bytes = model.clone().into_record().into_bytes().unwrap();
    let record = || ModuleRecord::from_bytes(bytes.clone()).unwrap();
    let without = plain.load_record(record().allow_unused(true));
    assert!(apart(logits(&without, &x), whole.clone()) > 1e-3);
    let loaded = configure(Some(with.attention())).init(&device);
    let loaded = loaded.try_load_record(record()).unwrap();
    assert_close(logits(&loaded, &x), whole.clone(), 0.0);

    let mut cache = model.new_cache();
    let pieces = in_pieces(&[7, 1, 1, 12, 12], |first, count| {
        model.forward_cache(x.clone().narrow(1, first, count), &mut cache)
    });
    assert_close(pieces, whole, 2e-5);
}

#[test]
fn every_block_has_what_was_asked_for() {
    let device = Device::flex();
    let attention = With::All.attention().with_dropout(0.2);
    let model = config(Some(attention.clone())).init(&device);
    assert!(model.position_embedding.is_some());
    for block in &model.blocks {
        let mha = &block.mha;
        assert_eq!(mha.dropout.prob, 0.2);
        let expected = [HEADS, 2 * REACH + 1];
        assert_eq!(mha.relative_bias.as_ref().unwrap().dims(), expected);
        assert_eq!(mha.sinks.as_ref().unwrap().dims(), [HEADS]);
        assert!(matches!(mha.query_norm, Some(HeadNorm::Rms(_))));
        // Burn's table has a row per position and a column per channel.
        let rope = mha.rope.as_ref().unwrap();
        assert_eq!(rope.freq_complex.dims(), [CONTEXT, 4, 2]);
    }
    let bare = config(None).with_position_embedding(Some(false));
    assert!(bare.init(&device).position_embedding.is_none());
}

/// Without position embeddings, only rotations make the result depend on the order of tokens.
#[test]
fn rotations_alone_tell_positions() {
    let (device, _guard) = seeded(Device::flex(), 2);
    let model = |attention: Option<BlockAttentionConfig>| {
        let causal = Pattern::causal();
        let config = small([16, HEADS], causal, [VOCAB, CONTEXT, 1])
            .with_embedding_width(Some(8))
            .with_position_embedding(Some(false))
            .with_attention(attention);
        randomise(config.init(&device))
    };
    let x = tokens(1, 20, VOCAB, &device);
    let part = |first, count| x.clone().narrow(1, first, count);
    let swapped = Tensor::cat(vec![part(0, 19).flip([1]), part(19, 1)], 1);
    let last = |model: &SparseTransformer, x| logits(model, x).narrow(1, 19, 1);
    let change = |model| apart(last(&model, &x), last(&model, &swapped));
    assert!(change(model(None)) < 1e-5);
    assert!(change(model(Some(With::Rope.attention()))) > 1e-3);
}

#[test]
fn a_block_by_itself_rotates_as_far_as_its_context() {
    let device = Device::flex();
    let config = SparseTransformerBlockConfig::new(16, HEADS, Pattern::causal())
        .with_block_size(8)
        .with_attention(Some(With::All.attention()));
    refused! { config.try_init(&device) => "context must be given with rope_theta, got none"; }
    let config = config.with_context(Some(CONTEXT));
    let block = randomise(config.init(&device));
    let x = random([2, CONTEXT + 1, 16], &device);
    assert!(block.try_forward(x.clone()).is_err());
    let x = x.narrow(1, 0, CONTEXT);
    let whole = block.forward(x.clone());
    let mut cache = SparseMhaCache::new();
    let pieces = in_pieces(&[CONTEXT - 9, 1, 8], |first, count| {
        block.forward_cache(x.clone().narrow(1, first, count), &mut cache)
    });
    assert_close(pieces, whole, 2e-5);
}

#[rstest]
#[case(BlockAttentionConfig::new().with_dropout(1.0), "dropout must be at least 0 and below 1, got 1")]
#[case(BlockAttentionConfig::new().with_scale(Some(f64::NAN)), "scale must be finite, as f32, got NaN")]
#[case(BlockAttentionConfig::new().with_qk_norm_eps(0.0), "qk_norm_eps must be positive and finite, got 0")]
#[case(BlockAttentionConfig::new().with_rope_theta(Some(-1.0)), "rope.theta must be positive and finite, got -1")]
#[case(BlockAttentionConfig::new().with_relative_reach(Some(1 << 28)), "relative_reach must be at most 134217727 with 4 heads, got 268435456")]
fn what_does_not_fit_is_refused(#[case] attention: BlockAttentionConfig, #[case] message: &str) {
    refused! { config(Some(attention)).try_init(&Device::flex()) => message; }
}

#[test]
fn heads_that_do_not_fit_are_refused_with_rotations() {
    let init = |heads, d_key| {
        SparseTransformerBlockConfig::new(12, heads, Pattern::causal())
            .with_d_key(d_key)
            .with_attention(Some(With::Rope.attention()))
            .with_context(Some(CONTEXT))
            .try_init(&Device::flex())
    };
    refused! {
        init(0, None) => "n_heads must be at least 1, got 0";
        init(4, None) => "rope.d_model must be a positive multiple of the rotated pairs = 2, got 3";
        init(4, Some(7)) => "d_key must be a positive multiple of n_heads = 4, got 7";
    }
}

#[cfg(feature = "autodiff")]
mod gradients {
    use burn::optim::GradientsParams;

    use super::*;
    use crate::common::{all_gradients_of, largest};

    /// Returns the largest difference of two gradients and the largest gradient, over all parameters, all of which must have one.
    fn compare(model: &SparseTransformer, a: &GradientsParams, b: &GradientsParams) -> [f32; 2] {
        let [a, b] = [a, b].map(|of| all_gradients_of(model, of));
        let pairs = a.values().flatten().zip(b.values().flatten());
        let apart: Vec<f32> = pairs.map(|(a, b)| a - b).collect();
        [largest(&apart), largest(a.values().flatten())]
    }

    /// Here products with one-hot rows compute the gradient with respect to embeddings.
    #[test]
    fn many_tokens_without_position_embeddings() {
        let (device, _guard) = seeded(Device::flex().autodiff(), 4);
        let config = config(Some(With::Rope.attention())).with_position_embedding(Some(false));
        let model = randomise(config.init(&device));
        let x = tokens(16, 33, VOCAB, &Device::flex());
        let y = x.clone().flip([1]);
        let expected = model.loss(x.clone(), y.clone()).backward();
        let expected = GradientsParams::from_grads(expected, &model);
        for recompute in [false, true] {
            let run = model.loss_and_gradients(x.clone(), y.clone(), 0, recompute);
            let [apart, size] = compare(&model, &run.unwrap().1, &expected);
            assert!(apart < 1e-5 * size, "{apart} of {size}");
        }
    }
}
