//! Pools of layers that share a selection: rows equal those of whole calls, whatever happened to the pages in between.

use crate::pool_choice::generates_as_alone;
use crate::prelude::*;
use crate::texts::{
    CONTEXT, SEQ, Texts, VOCAB, as_if_nothing_had_happened, config, known_beginnings,
};

const TEXTS: [&str; 6] = [
    "quest:16,48",
    "moba:16,3,share=mean",
    "dsa:20,3,3,8",
    "dsa:20,3,3,8,fp8",
    "msa:16,3,8",
    "msa:32,2,8",
];

/// Makes a model of four layers; layers of `dsa` and `msa` are rotated.
fn model(text: &str, every: usize, kv_heads: usize, device: &Device) -> SparseTransformer {
    let config = config(Pattern::causal(), 4, kv_heads).with_share_every(Some(every));
    let config = match text.parse() {
        Ok(content) => {
            let attention = BlockAttentionConfig::new().with_rope_theta(Some(1000.0));
            let config = config.with_content(Some(content));
            config.with_attention(Some(attention))
        }
        Err(_) => config.with_selections(Some(vec![text.parse().unwrap()])),
    };
    randomise(config.try_init(device).unwrap())
}

#[rstest]
fn tokens_one_by_one_are_those_of_the_whole(
    #[values(0, 1, 2, 3, 4, 5)] text: usize,
    #[values([2, 1], [3, 4])] sizes: [usize; 2],
) {
    let [every, kv_heads] = sizes;
    for device in devices() {
        let _guard = seed(&device, 71);
        let model = model(TEXTS[text], every, kv_heads, &device);
        let texts = Texts::some(&model, 2, SEQ, &device);
        texts.one_by_one(&model, &KvPoolConfig::new(2, CONTEXT));
    }
}

#[rstest]
fn pages_are_as_if_nothing_had_happened(#[values(0, 1, 2, 4)] text: usize) {
    let (device, _guard) = seeded(Device::flex(), 72);
    let model = model(TEXTS[text], 2, 2, &device);
    let config = KvPoolConfig::new(3, CONTEXT)
        .with_residency(KvRetention::All)
        .with_rollback(40);
    as_if_nothing_had_happened(&model, &config, 66, &device);
    let config = KvPoolConfig::new(2, CONTEXT).with_residency(KvRetention::All);
    assert!(known_beginnings(&model, config, &device) > 0);
    generates_as_alone(&model);
}

/// Layers that reuse a selection have neither an indexer's keys nor summaries of pages.
#[test]
fn half_of_the_layers_have_an_index() {
    let (device, _guard) = seeded(Device::flex(), 73);
    let usage = |text, every| {
        let model = model(text, every, 2, &device);
        let texts = Texts::some(&model, 1, 100, &device);
        let (mut pool, id) = joined(&model, &KvPoolConfig::new(1, CONTEXT));
        texts.read(&model, &mut pool, id, 100, 99);
        pool.usage(id).unwrap()
    };
    for text in [TEXTS[0], TEXTS[2], TEXTS[4]] {
        let [own, shared] = [1, 2].map(|every| usage(text, every));
        assert!(shared.summary_bytes > 0);
        assert_eq!(own.summary_bytes, 2 * shared.summary_bytes, "{text}");
        assert_eq!(own.bytes, shared.bytes);
        assert!(own.read_bytes >= shared.read_bytes);
    }
}

#[test]
fn eviction_is_refused() {
    let (device, _guard) = seeded(Device::flex(), 74);
    for text in [TEXTS[0], TEXTS[2], TEXTS[4]] {
        let evicting = KvPoolConfig::new(1, 64).with_eviction(EvictionConfig::key_norm(16));
        refused! { model(text, 2, 2, &device).new_pool(&evicting) => "eviction must be none with layers that share a choice…"; }
    }
}

/// Also if only prompts select.
#[test]
fn prompts_choose_once_for_a_group() {
    let (device, _guard) = seeded(Device::flex(), 75);
    let model = model("topk:16,3", 2, 2, &device);
    let config = KvPoolConfig::new(1, CONTEXT).with_choosing_prompts();
    let (mut pool, id) = joined(&model, &config);
    let prompt = tokens(1, 70, VOCAB, &device);
    let got = model.try_forward_pool(prompt.clone(), &[KvStep::new(id, 70)], &mut pool);
    assert_close(got.unwrap(), model.forward(prompt), 1e-5);
}
