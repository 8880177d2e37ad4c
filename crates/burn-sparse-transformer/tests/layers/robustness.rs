//! No input makes the layers panic: they run, or return an error that says what was expected.

use burn_sparse_transformer::SparseTransformerEncoderConfig;
use burn_sparse_transformer::longformer::LongformerInput;
use proptest::prelude::*;

use crate::common::*;

/// Sizes that users get wrong: 0, small ones, and those at which arithmetic overflows.
fn size() -> impl Strategy<Value = usize> {
    prop_oneof![12 => 0usize..20, 1 => Just(usize::MAX), 1 => Just(usize::MAX / 2 + 1), 1 => Just(1usize << 40)]
}

/// Few, or so many that allocating them by mistake would be noticed.
fn count() -> impl Strategy<Value = usize> {
    prop_oneof![12 => 0usize..5, 1 => Just(usize::MAX)]
}

fn real() -> impl Strategy<Value = f64> {
    prop_oneof![4 => 0.1f64..3.0, 1 => any::<f64>(), 1 => Just(0.0), 1 => Just(f64::NAN)]
}

fn pattern() -> impl Strategy<Value = Pattern> {
    prop_oneof![
        Just(Pattern::causal()),
        size().prop_map(Pattern::local),
        (size(), size(), size()).prop_map(|(a, b, c)| Pattern::fixed_heads(a, b, c)),
        prop::collection::vec(size().prop_map(Pattern::window), 0..3).prop_map(Pattern::per_head),
    ]
}

fn optional<T: std::fmt::Debug + Clone>(
    strategy: impl Strategy<Value = T>,
) -> impl Strategy<Value = Option<T>> {
    prop::option::weighted(0.3, strategy)
}

fn block_size() -> impl Strategy<Value = usize> {
    prop_oneof![4 => Just(8usize), 1 => size()]
}

fn attention() -> impl Strategy<Value = SparseMultiHeadAttentionConfig> {
    let rope = (size(), size(), real()).prop_map(|(seq, width, theta)| {
        RotaryEncodingConfig::new(seq, width).with_theta(theta as f32)
    });
    let sizes = (
        prop_oneof![3 => (1usize..5).prop_map(|n| 4 * n), 1 => size()],
        prop_oneof![3 => prop::sample::select(vec![1usize, 2, 4]), 1 => size()],
        pattern(),
        block_size(),
        optional(size()),
        optional(size()),
    );
    let options = (
        optional(rope),
        optional(prop::sample::select(vec![QkNorm::Rms, QkNorm::Layer])),
        prop_oneof![3 => Just(1e-6), 1 => real()],
        optional(real()),
        optional(real()),
    );
    let dropout = prop_oneof![3 => Just(0.0), 1 => real()];
    let extras = (dropout, any::<[bool; 3]>(), reach());
    (sizes, options, extras).prop_map(|(sizes, options, extras)| {
        let (d_model, n_heads, pattern, block_size, n_kv_heads, d_key) = sizes;
        let (rope, qk_norm, eps, softcap, scale) = options;
        let (dropout, [alibi, sinks, quiet], reach) = extras;
        SparseMultiHeadAttentionConfig::new(d_model, n_heads, pattern)
            .with_block_size(block_size)
            .with_n_kv_heads(n_kv_heads)
            .with_d_key(d_key)
            .with_rope(rope)
            .with_qk_norm(qk_norm)
            .with_qk_norm_eps(eps)
            .with_softcap(softcap)
            .with_scale(scale)
            .with_dropout(dropout)
            .with_alibi(alibi)
            .with_sinks(sinks)
            .with_quiet_softmax(quiet)
            .with_relative_reach(reach)
    })
}

fn reach() -> impl Strategy<Value = Option<usize>> {
    // Tables of millions of distances are valid, but too large for this test.
    optional(size()).prop_map(|reach| reach.filter(|reach| !(20..1 << 30).contains(reach)))
}

fn block_attention() -> impl Strategy<Value = BlockAttentionConfig> {
    (
        prop_oneof![3 => Just(0.0), 1 => real()],
        any::<[bool; 2]>(),
        reach(),
        optional(prop::sample::select(vec![QkNorm::Rms, QkNorm::Layer])),
        prop_oneof![3 => Just(1e-6), 1 => real()],
        optional(real()),
        optional(real()),
    )
        .prop_map(
            |(dropout, [alibi, sinks], reach, qk_norm, eps, scale, theta)| {
                BlockAttentionConfig::new()
                    .with_dropout(dropout)
                    .with_alibi(alibi)
                    .with_sinks(sinks)
                    .with_relative_reach(reach)
                    .with_qk_norm(qk_norm)
                    .with_qk_norm_eps(eps)
                    .with_scale(scale)
                    .with_rope_theta(theta)
            },
        )
}

fn shape() -> impl Strategy<Value = [usize; 3]> {
    let width = prop_oneof![3 => (0usize..5).prop_map(|n| 4 * n), 1 => 0usize..20];
    (0usize..3, 0usize..12, width).prop_map(|(batch, seq, width)| [batch, seq, width])
}

fn zeros(shape: [usize; 3]) -> Tensor<3> {
    Tensor::zeros(shape, &Device::flex())
}

/// Asserts that an error says what was expected.
fn assert_says<T>(result: Result<T, TransformerError>) -> Option<T> {
    match result {
        Ok(value) => Some(value),
        Err(error) => {
            let text = error.to_string();
            let boundary = [" the next position to stop at is ", "this pattern has none"];
            let says = [" must be ", " must stay ", boundary[0], boundary[1]];
            assert!(says.iter().any(|says| text.contains(says)), "{text}");
            None
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 600, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn attention_of_any_size(config in attention(), shapes in prop::collection::vec(shape(), 4), lengths in optional(prop::collection::vec(0usize..14, 0..3)), cu_seqlens in prop::collection::vec(0usize..14, 0..4)) {
        let Some(mha) = assert_says(config.try_init(&Device::flex())) else { return Ok(()) };
        // Wide layers are valid, but too large for this test.
        prop_assume!(config.d_model <= 64 && config.d_key.unwrap_or(0) <= 64);
        let [q, k, v, x] = shapes[..] else { unreachable!() };
        let with_lengths = |input: SparseMhaInput| match &lengths {
            Some(lengths) => input.lengths(lengths.iter().copied()),
            None => input,
        };
        assert_says(mha.try_forward(SparseMhaInput::new(zeros(q), zeros(k), zeros(v))));
        let [batch, heads, seq] = k;
        let bias = Tensor::zeros([batch, heads, q[1], seq], &Device::flex());
        assert_says(mha.try_forward(SparseMhaInput::new(zeros(q), zeros(q), zeros(q)).bias(bias)));
        let fitting = zeros([x[0], x[1], config.d_model]);
        let output = assert_says(mha.try_forward(with_lengths(SparseMhaInput::self_attn(fitting.clone()))));
        if let Some(output) = output {
            prop_assert_eq!(output.context.dims(), [x[0], x[1], config.d_model]);
            prop_assert!(!output.context.is_nan().any().into_scalar::<bool>());
        }
        let mut cache = SparseMhaCache::with_context(10);
        for x in [q, x, v] {
            let before = cache.len();
            let input = SparseMhaInput::self_attn(zeros([x[0], x[1], config.d_model]));
            if assert_says(mha.try_forward_cache(with_lengths(input), &mut cache)).is_none() {
                prop_assert_eq!(cache.len(), before);
            }
        }
        assert_says(mha.try_forward_packed(fitting.clone(), &cu_seqlens));
        if let Some(longformer) = assert_says(LongformerAttention::from_attention(mha)) {
            let input = LongformerInput::new(fitting).global_per_entry(vec![cu_seqlens; x[0]]);
            assert_says(longformer.try_forward(input));
        }
    }

    #[test]
    fn models_of_any_size(
        sizes in prop::collection::vec(size(), 5),
        (n_layers, n_heads) in (count(), prop_oneof![3 => 1usize..5, 1 => size()]),
        patterns in prop::collection::vec(pattern(), 0..3),
        (d_key, d_ff, kv, half) in (optional(size()), optional(size()), optional(size()), any::<bool>()),
        reals in prop::collection::vec(prop_oneof![3 => Just(0.1), 1 => real()], 3),
        tokens in (0usize..3, 0usize..20),
        (attention, positions, block_context) in (optional(block_attention()), any::<Option<bool>>(), optional(size())),
    ) {
        // Layers are really made.
        let n_layers = n_layers.min(4);
        let [vocab, context, d_model, width, block_size] = sizes[..] else { unreachable!() };
        let factorization = Factorization::Interleaved(patterns.clone());
        let mut config = SparseTransformerConfig::new(d_model, n_heads, factorization)
            .with_vocab_size(vocab).with_context(context).with_n_layers(n_layers)
            .with_embedding_width(Some(width))
            .with_d_key(d_key).with_d_ff(d_ff).with_n_kv_heads(kv)
            .with_dropout(reals[0]).with_layer_norm_eps(reals[1]).with_init_scale(reals[2])
            .with_block_size(if block_size < 10 { 8 } else { block_size })
            .with_attention(attention.clone()).with_position_embedding(positions);
        if half {
            config = config.half_size();
        }
        let small = [vocab, context, d_model, width, config.d_key.unwrap_or(0), config.d_ff.unwrap_or(0)].iter().all(|&n| n <= 64);
        if let Some(model) = assert_says(config.try_init(&Device::flex())) && small {
            let tokens = Tensor::<2, Int>::zeros([tokens.0, tokens.1], &Device::flex());
            assert_says(model.try_forward(tokens.clone()));
            assert_says(model.try_loss(tokens.clone(), tokens.clone()));
            assert_says(model.try_forward_cache(tokens, &mut model.new_cache()));
        }
        if let Some(pattern) = patterns.first() {
            let block = SparseTransformerBlockConfig::new(d_model, n_heads, pattern.clone())
                .with_d_ff(d_ff).with_d_key(d_key).with_dropout(reals[0]).with_n_layers(n_layers)
                .with_attention(attention).with_context(block_context);
            assert_says(block.try_init(&Device::flex()));
            let encoder = TransformerEncoderConfig::new(d_model, d_ff.unwrap_or(8), n_heads, n_layers)
                .with_dropout(reals[0]).with_layer_norm_eps(reals[1]);
            assert_says(SparseTransformerEncoderConfig::new(encoder, pattern.clone()).try_init(&Device::flex()));
        }
    }
}
