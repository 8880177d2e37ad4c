//! Pools of layers with three branches or an indexer: rows equal those of whole calls, whatever happened to the pages in between.

use burn_paged_attention::pool::GraphDecoder;

use crate::pool_choice::generates_as_alone;
use crate::prelude::*;
use crate::texts::{
    CONTEXT, SEQ, Texts, VOCAB, as_if_nothing_had_happened, config, known_beginnings, part,
    single_tokens,
};

/// One block of seven besides the forced ones, with all kinds of compression and sharing; a window that is no multiple of pages; compressed blocks
/// without overlap, and with fourfold overlap; no selected block and no window. The last ones have an indexer, of single keys or of blocks.
const TEXTS: [&str; 9] = [
    "nsa:8,4,16,4,10",
    "nsa:16,4,16,5,40,mlp,shared",
    "nsa:8,8,16,4,24,shared",
    "nsa:32,16,32,3,0,mlp",
    "dsa:20,3,3,8",
    "dsa:20,3,3,8,fp8",
    "msa:16,3,8",
    "msa:32,2,8",
    "dsa:20,3,3,8,blocks=3x8",
];

fn model(text: &str, kv_heads: usize, device: &Device) -> SparseTransformer {
    model_of(text, kv_heads, Precision::F32, device)
}

fn model_of(
    text: &str,
    kv_heads: usize,
    precision: Precision,
    device: &Device,
) -> SparseTransformer {
    let attention = BlockAttentionConfig::new()
        .with_rope_theta(Some(1000.0))
        .with_qk_norm(Some(QkNorm::Rms));
    let config = config(Pattern::causal(), 2, kv_heads)
        .with_attention(Some(attention))
        .with_content(Some(text.parse().unwrap()))
        .with_precision(precision);
    randomise(config.try_init(device).unwrap())
}

#[rstest]
fn tokens_one_by_one_are_those_of_the_whole(
    #[values(0, 1, 2, 3, 4, 5, 6, 7, 8)] text: usize,
    #[values(1, 4)] kv_heads: usize,
) {
    for device in devices() {
        let _guard = seed(&device, 21);
        let model = model(TEXTS[text], kv_heads, &device);
        let texts = Texts::some(&model, 2, SEQ, &device);
        texts.one_by_one(&model, &KvPoolConfig::new(2, CONTEXT));
    }
}

/// Products in bf16: rows equal those of the whole if nothing is selected, and are finite if roundings may change the selection.
#[rstest]
fn layers_in_bf16_read_token_by_token(#[values(0, 1, 2, 3)] text: usize) {
    let (device, _guard) = seeded(Device::flex(), 26);
    let model = model_of(TEXTS[text], 2, Precision::Bf16, &device);
    let tokens = tokens(1, 70, VOCAB, &device);
    let whole = model.try_forward(tokens.clone()).unwrap();
    let (mut pool, id) = joined(&model, &KvPoolConfig::new(1, CONTEXT));
    let single = (36..70).map(|at| (at, at + 1));
    for (from, to) in [(0, 33), (33, 36)].into_iter().chain(single) {
        let step = [KvStep::new(id, to - from)];
        let logits = model.try_forward_pool(part(&tokens, 0, from..to), &step, &mut pool);
        let (got, expected) = (logits.unwrap(), whole.clone().narrow(1, from, to - from));
        match text {
            3 => assert_close(got, expected, 0.05),
            _ => assert!(got.is_finite().all().into_scalar::<bool>()),
        }
    }
}

/// Prompts that end near strides, blocks and pages, in one call; some sequences begin without one.
#[rstest]
fn prompts_end_anywhere(#[values(0, 1, 2, 3, 4, 5, 6, 7, 8)] text: usize) {
    let (device, _guard) = seeded(Device::flex(), 22);
    let model = model(TEXTS[text], 2, &device);
    let lengths = [1, 3, 4, 7, 8, 9, 15, 16, 17, 31, 32, 33, 48, 63];
    let texts = Texts::some(&model, lengths.len(), 70, &device);
    let mut pool = (model.new_pool(&KvPoolConfig::new(lengths.len(), 70).with_chunk(3))).unwrap();
    let ids = lengths.map(|_| pool.join().unwrap());
    texts.feed(&model, &mut pool, &ids, &lengths);
    texts.feed(&model, &mut pool, &ids, &[1; 14]);
    texts.feed(&model, &mut pool, &ids, &[3; 14]);
    let many: Vec<usize> = (0..ids.len()).map(|at| 1 + at % 3).collect();
    texts.feed(&model, &mut pool, &ids, &many);
    // A refused call changes nothing.
    let more = Tensor::<2, Int>::zeros([1, 70], &device);
    let refused = model.try_forward_pool(more, &[KvStep::new(ids[13], 70)], &mut pool);
    assert!(refused.is_err());
    pool.verify().unwrap();
    // One token at a time from the first on, together with other sequences.
    let new = pool.leave(ids[0]).and_then(|()| pool.join()).unwrap();
    for _ in 0..10 {
        texts.feed(&model, &mut pool, &[new], &[1]);
    }
    let tenth = Texts {
        tokens: texts.tokens.narrow(0, 9, 1),
        whole: texts.whole.narrow(0, 9, 1),
    };
    tenth.feed(&model, &mut pool, &ids[9..10], &[2]);
}

#[rstest]
fn pages_are_as_if_nothing_had_happened(
    #[values(0, 1, 2, 3, 4, 6)] text: usize,
    #[values(KvRetention::All, KvRetention::Reachable)] residency: KvRetention,
) {
    let (device, _guard) = seeded(Device::flex(), 23);
    let model = model(TEXTS[text], 2, &device);
    let config = KvPoolConfig::new(3, CONTEXT)
        .with_chunk(23)
        .with_residency(residency)
        .with_rollback(40);
    let (_, saved) = as_if_nothing_had_happened(&model, &config, 66, &device);
    let dense = SparseTransformerConfig::new(32, 4, Factorization::from(Pattern::causal()));
    let dense = dense.with_vocab_size(VOCAB).with_context(CONTEXT);
    let dense = dense.with_n_layers(2).with_n_kv_heads(Some(2));
    let dense = dense.try_init(&device).unwrap();
    refused! { dense.new_pool(&config).unwrap().load(&saved) => "…layers…"; }
}

/// Prefix reuse in pools that retain all keys.
#[rstest]
#[case(0, 80)]
#[case(4, 64)]
fn known_beginnings_are_not_read_again(#[case] text: usize, #[case] expected: usize) {
    let (device, _guard) = seeded(Device::flex(), 24);
    let model = model(TEXTS[text], 2, &device);
    let config = KvPoolConfig::new(2, CONTEXT).with_residency(KvRetention::All);
    assert_eq!(known_beginnings(&model, config, &device), expected);
}

/// Counted bytes: keys of all tokens, those of the window and of the last block, and pairs.
#[test]
fn bytes_of_all_branches_are_counted() {
    let (device, _guard) = seeded(Device::flex(), 25);
    let model = model(TEXTS[0], 2, &device);
    let texts = Texts::some(&model, 1, 100, &device);
    let (mut pool, id) = joined(&model, &KvPoolConfig::new(1, CONTEXT));
    texts.read(&model, &mut pool, id, 100, 99);
    let usage = pool.usage(id).unwrap();
    // Two layers, two heads, keys and values of width eight, f32.
    let slot = 2 * 2 * (8 + 8) * 4;
    // Seven pages of 16 have four pairs each; 24 blocks of eight tokens have ended.
    assert_eq!(usage.summary_bytes, 7 * 4 * slot);
    // The last block has four tokens; with three others 52 are selected. The window has 10, and 9 with the next query.
    assert_eq!(usage.read_bytes, (52 + 9 + 24) * slot);
    assert_eq!(usage.live_bytes, (100 + 9 + 7) * slot);
    assert_eq!(usage.all_bytes, 3 * 100 * slot);
    assert!(usage.bytes >= usage.live_bytes);
    assert!(pool.bytes() >= usage.bytes + usage.summary_bytes);
}

#[rstest]
fn generated_text_does_not_depend_on_the_batch(#[values(0, 4, 6)] text: usize) {
    let (device, _guard) = seeded(Device::flex(), 26);
    let model = model(TEXTS[text], 2, &device);
    let [(prompt, text), _] = generates_as_alone(&model);
    // Steps are not captured, and give the same.
    let pool = model.new_pool(&KvPoolConfig::new(1, CONTEXT)).unwrap();
    let mut decoder = GraphDecoder::new(model, pool).unwrap();
    let id = decoder.pool_mut().join().unwrap();
    let mut next = prompt;
    for token in text {
        let steps = [KvStep::new(id, next.len())];
        let logits = decoder.next_logits(&next, &steps).unwrap();
        let likeliest = logits.argmax(1).into_scalar::<i64>();
        assert_eq!(likeliest, i64::from(token));
        next = vec![token];
    }
    assert!(!decoder.is_recorded());
}

/// 8-bit elements are close to floats if all blocks or keys are selected, so that no rounding changes the selection.
#[rstest]
#[case("nsa:8,4,16,9,10", KvDtype::Int8, 0.02)]
#[case("nsa:8,4,16,9,10", KvDtype::Fp8E4m3, 0.1)]
#[case("dsa:128,0,3,8", KvDtype::Int8, 0.02)]
#[case("msa:16,7,8", KvDtype::Int8, 0.02)]
fn pages_in_eight_bits(#[case] text: &str, #[case] dtype: KvDtype, #[case] most: f32) {
    let (device, _guard) = seeded(Device::flex(), 27);
    let model = &model(text, 2, &device);
    let tokens = tokens(1, SEQ, VOCAB, &device);
    let whole = model.try_forward(tokens.clone()).unwrap();
    let config = KvPoolConfig::new(1, CONTEXT).with_dtype(dtype);
    let (rows, _) = single_tokens(model, &config, &tokens);
    let apart = (rows - whole.clone()).square().mean().into_scalar::<f32>();
    let size = whole.square().mean();
    let apart = (apart / size.into_scalar::<f32>()).sqrt();
    assert!(apart < most, "{apart}");
    assert!(apart > 1e-6, "they are stored in eight bits");
}

/// All tokens' keys of the indexer's one head are read; of the others the selected ones.
#[test]
fn bytes_of_indexers_are_counted() {
    let (device, _guard) = seeded(Device::flex(), 29);
    let model = model(TEXTS[4], 2, &device);
    let texts = Texts::some(&model, 1, 100, &device);
    let (mut pool, id) = joined(&model, &KvPoolConfig::new(1, CONTEXT));
    texts.read(&model, &mut pool, id, 100, 50);
    let usage = pool.usage(id).unwrap();
    let [slot, index] = [2 * 2 * (8 + 8) * 4, 2 * (8 + 4) * 4];
    // Pages of 32.
    assert_eq!(usage.summary_bytes, 128 * index);
    assert_eq!(usage.live_bytes, 100 * slot);
    assert_eq!(usage.read_bytes, 20 * slot + 100 * index);
    assert!(pool.bytes() >= usage.bytes + usage.summary_bytes);
}

#[test]
fn what_a_pool_does_not_do_is_refused() {
    let (device, _guard) = seeded(Device::flex(), 28);
    let room = || KvPoolConfig::new(1, 64);
    let window = window(9, 1);
    let pool = |text, pool| model(text, 2, &device).new_pool(&pool);
    refused! {
        pool(TEXTS[0], room().with_choosing_prompts()) => "choosing_prompts must be none with nsa, whose tokens all choose their keys, got some";
        pool(TEXTS[0], room().with_eviction(EvictionConfig::key_norm(9))) => "eviction must be none with nsa, whose attention sums are those of all tokens, got some";
        pool(TEXTS[0], room().with_residency(window)) => "residency must be All or Reachable with nsa, which has a window of its own, got Window { window: 9, sinks: 1 }";
        pool(TEXTS[0], room().with_page_size(32)) => "page_size must be a power of two that 4, the stride of nsa, divides, and a divisor of 16, its selected block, got 32";
        pool("nsa:8,4,8,4,10", room()) => "page_size must be a power of two that 4, the stride of nsa, divides, and a divisor of 8, its selected block, got 16";
        pool(TEXTS[6], room().with_choosing_prompts()) => "choosing_prompts must be none with msa, whose tokens all choose their keys, got some";
        pool(TEXTS[6], room().with_eviction(EvictionConfig::key_norm(9))) => "eviction must be none with msa, whose indexer chooses among all keys, got some";
        pool("msa:8,3,8", room()) => "page_size must be a power of two that divides 8, the block of msa, got 16";
        pool(TEXTS[6], room().with_page_size(32)) => "page_size must be a power of two that divides 16, the block of msa, got 32";
        pool(TEXTS[4], room().with_choosing_prompts()) => "choosing_prompts must be none with dsa, whose tokens all choose their keys, got some";
        pool(TEXTS[4], room().with_eviction(EvictionConfig::key_norm(9))) => "eviction must be none with dsa, whose indexer chooses among all keys, got some";
        pool(TEXTS[4], room().with_residency(window)) => "residency must be All or Reachable with dsa, whose indexer chooses among all keys, got Window { window: 9, sinks: 1 }";
    }
    // A pool belongs to one model configuration.
    let mut pool = model(TEXTS[0], 2, &device).new_pool(&room()).unwrap();
    let id = pool.join().unwrap();
    let other = model("nsa:8,4,16,5,10", 2, &device);
    let tokens = tokens(1, 4, VOCAB, &device);
    refused! { other.next_logits(tokens, &[KvStep::new(id, 4)], &mut pool) => "pool must be one that was made for these layers, got another"; }
}
