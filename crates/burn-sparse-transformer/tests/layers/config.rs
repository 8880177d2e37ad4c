//! Configurations survive serialization, patterns included.

use burn::config::Config;
use burn::module::Initializer;

use crate::common::*;

/// Checks the round trip through Burn's JSON, and that a configuration prints as that JSON.
fn assert_round_trip<C: Config + std::fmt::Display>(config: &C) {
    let json = config.to_string();
    let loaded = C::load_binary(json.as_bytes()).unwrap();
    assert_eq!(loaded.to_string(), json);
    assert_eq!(format!("{loaded:?}"), format!("{config:?}"));
}

fn patterns() -> Vec<Pattern> {
    vec![
        Pattern::fixed_heads(128, 8, 4),
        Pattern::union([Pattern::local(32), Pattern::strided(32)]),
        Pattern::intersection([Pattern::prefix_lm(5), Pattern::streaming(16, 4)]),
        Pattern::per_head([Pattern::dense(), Pattern::causal()]),
    ]
}

fn attention() -> BlockAttentionConfig {
    BlockAttentionConfig::new()
        .with_dropout(0.1)
        .with_scale(Some(0.25))
        .with_alibi(true)
        .with_relative_reach(Some(64))
        .with_sinks(true)
        .with_qk_norm(Some(QkNorm::Layer))
        .with_rope_theta(Some(5e5))
}

#[rstest]
#[case(Factorization::Interleaved(patterns()))]
#[case(Factorization::Merged(patterns()))]
#[case(Factorization::MultiHead(patterns()))]
#[case(Factorization::from(Pattern::merged_strided(128)))]
fn transformers_round_trip(#[case] factorization: Factorization) {
    let config = SparseTransformerConfig::new(512, 8, factorization)
        .with_vocab_size(256)
        .with_context(12_288)
        .with_n_layers(30)
        .with_embedding_width(Some(128))
        .with_block_size(16)
        .with_n_kv_heads(Some(4))
        .with_dropout(0.4)
        .with_softcap(Some(30.0))
        .with_attention(Some(attention()))
        .with_position_embedding(Some(false))
        .with_store_weights(true)
        .half_size();
    assert_round_trip(&config);
    assert_eq!((config.d_key, config.d_ff), (Some(256), Some(1024)));
    assert_round_trip(&config.block(3).unwrap());
}

#[test]
fn attention_and_block_round_trip() {
    for pattern in patterns() {
        let initializer = Initializer::XavierNormal { gain: 0.5 };
        let config = SparseMultiHeadAttentionConfig::new(64, 8, pattern.clone())
            .with_initializer(initializer)
            .with_key_bias(false)
            .with_scale(Some(0.25))
            .with_rope(Some(RotaryEncodingConfig::new(128, 8).with_theta(5e5)))
            .with_qk_norm(Some(QkNorm::Rms))
            .with_quiet_softmax(true);
        assert_round_trip(&config);
        let chooses = "topk:8,4,1,0,share=max".parse().unwrap();
        assert_round_trip(&config.clone().with_selection(Some(chooses)));
        let content = Some("routing:8,2".parse().unwrap());
        assert_round_trip(&config.with_content(content).with_local_heads(Some(2)));
        assert_round_trip(&SparseTransformerBlockConfig::new(64, 8, pattern).with_dropout(0.1));
    }
}

/// Configurations saved before fields existed get their defaults.
#[test]
fn optional_fields_may_be_missing() {
    fn assert_may_miss<C: Config + std::fmt::Display>(config: &C, fields: &[&str]) {
        let mut json: serde_json::Map<String, serde_json::Value> =
            serde_json::from_str(&config.to_string()).unwrap();
        for field in fields {
            assert!(json.remove(*field).unwrap().is_null(), "{field}");
        }
        let json = serde_json::to_string(&json).unwrap();
        let loaded = C::load_binary(json.as_bytes()).unwrap();
        assert_eq!(loaded.to_string(), config.to_string());
    }
    let causal = Pattern::causal;
    let model = SparseTransformerConfig::new(16, 2, causal().into())
        .with_vocab_size(9)
        .with_context(32)
        .with_n_layers(1)
        .with_embedding_width(Some(8));
    assert_may_miss(&model, &["attention", "position_embedding", "n_kv_heads"]);
    let block = SparseTransformerBlockConfig::new(16, 2, causal());
    assert_may_miss(&block, &["attention", "context", "n_kv_heads"]);
    let attention = SparseMultiHeadAttentionConfig::new(16, 2, causal());
    assert_may_miss(&attention, &["selection", "content", "local_heads"]);
}

/// Output of `enwik8 export` from the time when sizes were arguments of `new`.
const EARLIER: &str = r#"{
    "vocab_size": 256, "context": 32, "d_model": 16, "n_layers": 1, "n_heads": 2,
    "factorization": {"merged": [{"fixed": {"stride": 8, "columns": 2, "num_verts": 1}}]},
    "embedding_width": 8, "d_key": null, "d_ff": null, "n_kv_heads": null, "softcap": null,
    "attention": null, "position_embedding": null, "block_size": 8, "dropout": 0.1,
    "store_weights": false, "precision": "f32", "layer_norm_eps": 0.00001, "init_scale": 1.0
}"#;

#[test]
fn configurations_of_before_the_setters_load() {
    let loaded = SparseTransformerConfig::load_binary(EARLIER.as_bytes()).unwrap();
    let fixed = Factorization::Merged(vec![Pattern::fixed(8, 2)]);
    let config = SparseTransformerConfig::new(16, 2, fixed)
        .with_vocab_size(256)
        .with_context(32)
        .with_n_layers(1)
        .with_embedding_width(Some(8))
        .with_block_size(8)
        .with_dropout(0.1)
        .with_init_scale(1.0);
    assert_eq!(loaded.to_string(), config.to_string());
}

#[test]
fn sizes_that_were_not_set_are_refused_by_name() {
    let config = || SparseTransformerConfig::new(16, 2, Pattern::causal().into());
    let device = burn::tensor::Device::flex();
    let refused =
        |config: SparseTransformerConfig| config.try_init(&device).err().unwrap().to_string();
    assert_eq!(refused(config()), "vocab_size must be at least 1, got 0");
    let config = || config().with_vocab_size(9);
    assert_eq!(refused(config()), "context must be at least 1, got 0");
    let config = || config().with_context(40);
    assert_eq!(refused(config()), "n_layers must be at least 1, got 0");
    let model = config().with_n_layers(1).init(&device);
    let positions = model.position_embedding.unwrap();
    let expected = [[5, 16], [8, 16]];
    assert_eq!([positions.row.dims(), positions.column.dims()], expected);
}
