//! Page selection in a pool: rows equal those of whole calls, whatever happened to the pages in between.

use crate::prelude::*;
use crate::texts::{
    SEQ, Texts, VOCAB, as_if_nothing_had_happened, config, known_beginnings, part, single_tokens,
};

fn model(selections: &[&str], kv_heads: usize, device: &Device) -> SparseTransformer {
    let selections = selections.iter().map(|text| text.parse().unwrap());
    let config = config(Pattern::causal(), 3, kv_heads);
    let config = config.with_selections(Some(selections.collect()));
    randomise(config.try_init(device).unwrap())
}

#[rstest]
#[case::quest(&["quest:16,48"], 2)]
#[case::quest_of_own_keys(&["quest:16,64,1,share=sum"], 4)]
#[case::moba(&["moba:16,3"], 4)]
#[case::moba_of_several_pages(&["moba:32,2,share=mean"], 1)]
#[case::quest_with_forced_pages(&["quest:16,80,first=1,local=2"], 2)]
#[case::moba_with_forced_blocks(&["moba:16,4,first=1,local=2,share=mean"], 1)]
#[case::forced_blocks_alone(&["moba:16,1,first=1,local=2"], 4)]
fn tokens_one_by_one_choose_as_the_whole(#[case] selections: &[&str], #[case] kv_heads: usize) {
    for device in devices() {
        let _guard = seed(&device, 11);
        let model = model(selections, kv_heads, &device);
        let texts = Texts::some(&model, 2, SEQ, &device);
        let everything = model.clone().with_selections(&[], 0).unwrap();
        let everything = everything.try_forward(texts.tokens.clone()).unwrap();
        let difference = (everything - texts.whole.clone()).abs().max();
        assert!(difference.into_scalar::<f32>() > 1e-3);
        texts.one_by_one(&model, &KvPoolConfig::new(2, 128).with_page_size(16));
    }
}

#[test]
fn pages_are_looked_at_again() {
    let (device, _guard) = seeded(Device::flex(), 12);
    let model = model(&["quest:16,48"], 2, &device);
    let config = KvPoolConfig::new(3, 128).with_residency(KvRetention::All);
    let (usage, _) = as_if_nothing_had_happened(&model, &config, 32, &device);
    // Maximum and minimum of seven pages, two heads of width eight, three layers.
    assert_eq!(usage.summary_bytes, 7 * 2 * 2 * 8 * 4 * 3);
}

#[test]
fn known_beginnings_are_chosen_from() {
    let (device, _guard) = seeded(Device::flex(), 13);
    let model = model(&["quest:16,48"], 4, &device);
    let known = known_beginnings(&model, KvPoolConfig::new(2, 128), &device);
    assert_eq!(known, 80);
}

#[test]
fn a_budget_of_everything_is_full_attention() {
    let (device, _guard) = seeded(Device::flex(), 14);
    let model = model(&["quest:32,128"], 2, &device);
    let tokens = tokens(1, SEQ, VOCAB, &device);
    let everything = model.clone().with_selections(&[], 0).unwrap();
    let texts = Texts::new(&everything, tokens);
    let (mut pool, id) = joined(&model, &KvPoolConfig::new(1, 128));
    texts.read(&model, &mut pool, id, 50, 50);
    texts.read(&model, &mut pool, id, SEQ, 1);
}

/// Moved keys update the summaries of their new pages.
#[test]
fn evicted_keys_are_not_chosen() {
    let (device, _guard) = seeded(Device::flex(), 15);
    let model = model(&["quest:16,48"], 2, &device);
    let tokens = tokens(1, SEQ, VOCAB, &device);
    let config = |keys: usize| {
        let eviction = EvictionConfig::key_norm(keys).with_slack(8);
        KvPoolConfig::new(1, 128)
            .with_page_size(16)
            .with_chunk(60)
            .with_eviction(eviction)
    };
    let everything = model.clone().with_selections(&[], 0).unwrap();
    // Up to 40 keys are three pages, which are all selected; with 72 some are not.
    for (keys, is_equal) in [(32, true), (64, false)] {
        let config = config(keys);
        let mut pools = [&model, &everything].map(|model| model.new_pool(&config).unwrap());
        let ids = pools.each_mut().map(|pool| pool.join().unwrap());
        let mut at = 0;
        for count in std::iter::once(20).chain(std::iter::repeat_n(1, SEQ - 20)) {
            let tokens = part(&tokens, 0, at..at + count);
            let step = |model: &SparseTransformer, pool: &mut KvPool, id| {
                let logits = model.next_logits(tokens.clone(), &[KvStep::new(id, count)], pool);
                pool.verify().unwrap();
                logits.unwrap()
            };
            let got = step(&model, &mut pools[0], ids[0]);
            let expected = step(&everything, &mut pools[1], ids[1]);
            match is_equal {
                true => assert_close(got, expected, 2e-4),
                false => assert!(got.is_finite().all().into_scalar::<bool>()),
            }
            at += count;
        }
    }
}

/// Checks that texts of a batch equal those that the prompts have alone. Returns two prompts with their texts.
pub(crate) fn generates_as_alone(model: &SparseTransformer) -> [(Vec<u32>, Vec<u32>); 2] {
    let prompts = [70usize, 33].map(|len| {
        let prompt: Vec<u32> = (0..len).map(|i| (i * i % VOCAB) as u32).collect();
        prompt
    });
    let likeliest = Sampling::default().temperature(0.0);
    let options = GenerateOptions::default().max_new(12).sampling(likeliest);
    let go_on = &mut |_| std::ops::ControlFlow::Continue(());
    let both = generate(model, &prompts, &options, go_on).unwrap();
    assert_eq!(both.len(), prompts.len());
    let mut both = both.into_iter();
    prompts.map(|prompt| {
        let alone = generate(model, std::slice::from_ref(&prompt), &options, go_on).unwrap();
        let tokens = both.next().unwrap().tokens;
        assert_eq!(alone[0].tokens, tokens);
        (prompt, tokens)
    })
}

#[test]
fn generated_text_does_not_depend_on_the_batch() {
    let (device, _guard) = seeded(Device::flex(), 16);
    let model = model(&["quest:16,48,1"], 2, &device);
    generates_as_alone(&model);
}

#[test]
fn what_cannot_be_chosen_from_is_refused() {
    let (device, _guard) = seeded(Device::flex(), 17);
    let room = || KvPoolConfig::new(1, 64);
    let eviction = EvictionConfig::h2o(4, 4);
    let window = window(9, 1);
    let pool = |selection, pool| model(&[selection], 2, &device).new_pool(&pool);
    refused! {
        pool("topk:16,3", room()) => "selection must be prefix stable with a cache: later tokens influence this one's choice; take quest or moba, \
             or let prompts alone choose: `with_choosing_prompts` of a pool, got topk:16,3";
        pool("quest:16,48", room().with_page_size(32)) => "page_size must be 16, the page of quest:16,48, got 32";
        pool("moba:16,3,share=mean", room().with_page_size(64)) => "page_size must be a divisor of 16, the block of moba:16,3,share=mean, got 64";
        pool("quest:16,48,share=max", room()) => "share must be mean or sum over a pool of pages, where heads that share keys read the same pages: add share=mean to the text of the selection, got max";
        pool("moba:16,3", room()) => "share must be mean or sum over a pool of pages, where heads that share keys read the same pages: add share=mean to the text of the selection, got no";
        pool("quest:8,24", room()) => "page_size must be 16, 32, 64 or 128, got 8";
        pool("quest:16,48", room().with_residency(window)) => "residency must be All, Reachable or by eviction with the selection quest:16,48, got Window { window: 9, sinks: 1 }";
        pool("quest:16,48", room().with_eviction(eviction)) => "eviction must be none that goes by attention to all keys, with a selection, got some";
    }
    let sinks = SparseMultiHeadAttentionConfig::new(16, 2, Pattern::causal())
        .with_sinks(true)
        .with_selection(Some("quest:16,48".parse().unwrap()));
    let sinks = sinks.try_init(&device).unwrap();
    refused! { KvPool::for_attention(&sinks, &room()) => "sinks must be none with a selection by which every query chooses for itself, got some"; }
    // A pool belongs to one selection.
    let chosen = model(&["quest:16,48"], 2, &device);
    let (mut pool, id) = joined(&chosen, &room());
    let other = chosen.with_selections(&[], 0).unwrap();
    let tokens = tokens(1, 4, VOCAB, &device);
    refused! { other.next_logits(tokens, &[KvStep::new(id, 4)], &mut pool) => "pool must be one that was made for these layers, got another"; }
}

/// 8-bit pages are selected by their dequantized keys: with all pages the result equals that without selection, and with some it is close to that
/// with float keys.
#[rstest]
#[case("quest:16,48", "quest:16,112", 2)]
#[case("moba:16,3", "moba:16,7", 4)]
fn pages_in_eight_bits_are_chosen(
    #[case] some: &str,
    #[case] every: &str,
    #[case] kv_heads: usize,
    #[values(KvDtype::Int8, KvDtype::Fp8E4m3)] dtype: KvDtype,
) {
    let (device, _guard) = seeded(Device::flex(), 19);
    let plain = model(&[], kv_heads, &device);
    let tokens = tokens(1, SEQ, VOCAB, &device);
    let read = |selection: Option<&str>, dtype: KvDtype| {
        let selections = selection.into_iter().map(|text| text.parse().unwrap());
        let selections: Vec<_> = selections.collect();
        let model = plain.clone().with_selections(&selections, 0).unwrap();
        let config = KvPoolConfig::new(1, 128).with_page_size(16);
        single_tokens(&model, &config.with_dtype(dtype), &tokens)
    };
    let (all, usage) = read(None, dtype);
    assert_eq!(usage.summary_bytes, 0);
    let (chosen_all, usage) = read(Some(every), dtype);
    assert_close(chosen_all, all.clone(), 1e-4);
    // Seven pages in each of three layers, two rows of f32 or one, eight elements per head.
    let rows = if some.starts_with("quest") { 2 } else { 1 };
    let expected = 3 * 7 * kv_heads * rows * 8 * size_of::<f32>();
    assert_eq!(usage.summary_bytes, expected);
    let (chosen, usage) = read(Some(some), dtype);
    assert!(usage.read_bytes < usage.live_bytes / 2, "{usage:?}");
    let (expected, _) = read(Some(some), KvDtype::Model);
    let square =
        |a: &Tensor<3>, b: &Tensor<3>| (a.clone() - b.clone()).square().mean().into_scalar::<f32>();
    let (apart, by_choice) = (square(&chosen, &expected), square(&all, &expected));
    // fp8 has three mantissa bits.
    let most = if dtype == KvDtype::Int8 { 0.1 } else { 0.3 };
    assert!(apart < most * by_choice, "{apart}, {by_choice}");
}
