//! Data that outlives a sequence of a pool: known pages, and snapshots.

use burn_paged_attention::pool::{KvPositions, KvSnapshot};
use serde_json::json;

use crate::prelude::*;
use crate::texts::ids;

const VOCAB: usize = 11;
const CONTEXT: usize = 128;

fn model(patterns: Vec<Pattern>, device: &Device) -> SparseTransformer {
    let config = SparseTransformerConfig::new(16, 4, Factorization::Interleaved(patterns))
        .with_vocab_size(VOCAB)
        .with_context(CONTEXT)
        .with_n_layers(3)
        .with_block_size(8)
        .with_n_kv_heads(Some(2));
    randomise(config.try_init(device).unwrap())
}

fn patterns() -> Vec<Vec<Pattern>> {
    vec![
        vec![Pattern::causal()],
        vec![Pattern::fixed(8, 4), Pattern::causal()],
        ["local:40", "streaming:9,20", "fixed:8,2"]
            .map(|text| text.parse().unwrap())
            .to_vec(),
    ]
}

fn text(count: usize, seed: usize) -> Vec<u32> {
    (0..count)
        .map(|i| ((i * 5 + i / 7 * seed + seed) % VOCAB) as u32)
        .collect()
}

/// Feeds tokens, and compares the last logits with those of the whole text.
fn feed(model: &SparseTransformer, pool: &mut KvPool, id: SequenceId, all: &[u32], tolerance: f32) {
    let device = Device::flex();
    let known = pool.len(id).unwrap();
    let rest = ids(&all[known..], &device);
    let steps = [KvStep::new(id, all.len() - known)];
    let got = model.next_logits(rest, &steps, pool).unwrap();
    pool.verify().unwrap();
    let whole = model.try_forward(ids(all, &device)).unwrap();
    let expected = whole.narrow(1, all.len() - 1, 1).reshape([1, VOCAB]);
    assert_close(got, expected, tolerance);
}

/// Prefixes that are known in all layers are not read again, whichever sequence read them, and even after it has left.
#[test]
fn known_beginnings_are_not_read_again() {
    for patterns in patterns() {
        let model = model(patterns.clone(), &Device::flex());
        let config = KvPoolConfig::new(3, CONTEXT)
            .with_page_size(16)
            .with_prefix_reuse();
        let mut pool = model.new_pool(&config).unwrap();
        let beginning = text(37, 3);
        let prompt = |tail: usize| [&beginning[..], &text(6, tail)].concat();
        let mut known = Vec::new();
        for (tail, leaves) in [(1, false), (2, true), (3, true)] {
            let (id, count) = pool.join_with_prefix(&prompt(tail)).unwrap();
            known.push(count);
            feed(&model, &mut pool, id, &prompt(tail), 1e-4);
            pool.remember(id, &prompt(tail)).unwrap();
            if leaves {
                pool.leave(id).unwrap();
            }
        }
        pool.verify().unwrap();
        // Pages with evicted keys are not known; where everything stays, two of 16 are.
        let expected = if patterns.len() == 1 { 32 } else { known[1] };
        assert_eq!(known, [0, expected, expected], "{patterns:?}");
        // For the whole prompt, its last token is still read.
        let (id, count) = pool.join_with_prefix(&beginning[..32]).unwrap();
        assert!(count <= 16);
        feed(&model, &mut pool, id, &beginning[..32], 1e-4);
    }
    let model = model(vec![Pattern::causal()], &Device::flex());
    let mut pool = model.new_pool(&KvPoolConfig::new(1, CONTEXT)).unwrap();
    refused! { pool.join_with_prefix(&[1, 2]) => "config must be one with prefix reuse, got one without it"; }
    let eviction = EvictionConfig::tova(9);
    let config = KvPoolConfig::new(1, CONTEXT)
        .with_eviction(eviction)
        .with_prefix_reuse();
    refused! { model.new_pool(&config) => "eviction must be none…"; }
}

/// A sequence continues in another pool with pages of another size.
#[rstest]
#[case(KvDtype::Model, 1e-4)]
#[case(KvDtype::Int8, 0.2)]
fn snapshots_go_on_elsewhere(#[case] dtype: KvDtype, #[case] tolerance: f32) {
    for patterns in patterns() {
        let model = model(patterns, &Device::flex());
        let config = |page_size| {
            KvPoolConfig::new(2, CONTEXT)
                .with_page_size(page_size)
                .with_chunk(3)
                .with_rollback(2)
                .with_dtype(dtype)
        };
        let mut pool = model.new_pool(&config(16)).unwrap();
        let all = text(60, 4);
        let id = pool.join().unwrap();
        feed(&model, &mut pool, id, &all[..50], tolerance);
        feed(&model, &mut pool, id, &all[..51], tolerance);
        let saved = pool.save(id).unwrap();
        assert_eq!(saved.tokens(), 51);
        let text = serde_json::to_string(&saved).unwrap();
        let saved: KvSnapshot = serde_json::from_str(&text).unwrap();
        let (mut other, first) = joined(&model, &config(32));
        feed(&model, &mut other, first, &all[..7], tolerance);
        let loaded = other.load(&saved).unwrap();
        other.verify().unwrap();
        other.truncate(loaded, 50).unwrap();
        pool.truncate(id, 50).unwrap();
        for end in [51, 54, 55] {
            let next = |pool: &mut KvPool, id| {
                let from = pool.len(id).unwrap();
                let rest = ids(&all[from..end], &Device::flex());
                let step = [KvStep::new(id, end - from)];
                model.next_logits(rest, &step, pool).unwrap()
            };
            let expected = next(&mut pool, id);
            assert_close(next(&mut other, loaded), expected, 1e-5);
        }
        feed(&model, &mut other, first, &all[..9], tolerance);
    }
}

#[test]
fn snapshots_of_others_are_refused() {
    let device = Device::flex();
    let model = self::model(vec![Pattern::causal()], &device);
    let config = KvPoolConfig::new(2, CONTEXT).with_page_size(16);
    let (mut pool, id) = joined(&model, &config);
    feed(&model, &mut pool, id, &text(40, 2), 1e-4);
    let saved = pool.save(id).unwrap();
    let empty = pool.join().unwrap();
    let nothing = pool.save(empty).unwrap();
    let loaded = pool.load(&nothing).unwrap();
    assert_eq!(pool.len(loaded).unwrap(), 0);
    let refused = |model: &SparseTransformer, config: &KvPoolConfig, what: &str| {
        let mut pool = model.new_pool(config).unwrap();
        let error = pool.load(&saved).unwrap_err();
        assert!(error.to_string().starts_with(what), "{error}");
        pool.verify().unwrap();
        assert_eq!(pool.sequences().count(), 0);
        // The failed call leaves no trace: the next sequence is that of a new pool.
        let next = pool.join().unwrap();
        assert_eq!(next, model.new_pool(config).unwrap().join().unwrap());
    };
    let local = self::model(vec![Pattern::local(9)], &device);
    refused(&local, &config, "pattern of the saved sequence must be");
    let dtype = config.clone().with_dtype(KvDtype::Int8);
    let what = "dtype of the saved sequence must be Int8, got F32";
    refused(&model, &dtype, what);
    let two = self::model(vec![Pattern::causal(), Pattern::local(9)], &device);
    let what = "patterns of the saved sequence must be 2, got 1";
    refused(&two, &config, what);
    let few = config.clone().with_pages(2);
    refused(&model, &few, "the call needs 3 pages, 2 are free");
    // Altered snapshots.
    let written = serde_json::to_string(&saved).unwrap();
    for (from, to, what) in [
        (
            r#""version":1"#,
            r#""version":9"#,
            "version of the saved sequence must be 1, got 9",
        ),
        (r#""next":40"#, r#""next":39"#, "corrupt pages"),
        (r#""shape":[80,"#, r#""shape":[40,"#, ""),
    ] {
        assert!(written.contains(from), "{from}");
        let altered = serde_json::from_str::<KvSnapshot>(&written.replacen(from, to, 1));
        let Ok(altered) = altered else { continue };
        let mut pool = model.new_pool(&config).unwrap();
        let error = pool.load(&altered).unwrap_err().to_string();
        assert!(error.starts_with(what), "{error}");
        assert_eq!(pool.sequences().count(), 0);
    }
    // Numbers from a snapshot are validated before any arithmetic.
    let json = serde_json::to_value(&saved).unwrap();
    let (half, large) = (1u64 << 63, u64::MAX);
    for (name, value) in [
        ("rows/0/permanent", json!([[0, half]])),
        ("rows/0/permanent", json!([[0, large]])),
        ("rows/0/permanent", json!([[0, half], [0, half]])),
        ("rows/0/permanent", json!([[1, large], [large, 41]])),
        ("rows/0/timed", json!([[0, large - 39]])),
        ("rows/0/timed", json!([[large, large]])),
        ("next", json!(half)),
        ("next", json!(large)),
        ("oldest", json!(large)),
    ] {
        let mut altered = json.clone();
        *altered.pointer_mut(&format!("/books/0/{name}")).unwrap() = value.clone();
        let mut pool = model.new_pool(&config).unwrap();
        let altered: KvSnapshot = serde_json::from_value(altered).unwrap();
        let error = pool.load(&altered).unwrap_err();
        let is_corrupt = matches!(error, PoolError::Cache(CacheError::Corrupt { .. }));
        assert!(is_corrupt, "{name} {value}: {error}");
        assert_eq!(pool.sequences().count(), 0);
    }
    // Two patterns with different lengths.
    let two = self::model(vec![Pattern::causal(), Pattern::local(60)], &device);
    let (mut pool, id) = joined(&two, &config);
    feed(&two, &mut pool, id, &text(40, 2), 1e-4);
    let mut altered = serde_json::to_value(pool.save(id).unwrap()).unwrap();
    *altered.pointer_mut("/books/1/next").unwrap() = json!(41);
    let altered: KvSnapshot = serde_json::from_value(altered).unwrap();
    refused! { pool.load(&altered) => "tokens of the saved sequence must be 40, got 41"; }
    pool.verify().unwrap();
    let evicting = config.with_residency(KvRetention::Evict);
    let evicting = evicting.with_eviction(EvictionConfig::tova(9));
    let mut pool = model.new_pool(&evicting).unwrap();
    refused! { pool.load(&saved) => "eviction must be none…"; }
}

/// With positions counted in the cache, each row is the last one of a call over only the keys that it sees, wherever they were.
#[rstest]
#[case(4, 2, &[1; 37])]
#[case(7, 3, &[5, 1, 1, 4, 9, 1, 16])]
#[case(1, 4, &[12, 1, 1, 23])]
#[case(5, 0, &[20, 1, 1, 15])]
fn rotations_are_of_places_in_the_cache(
    #[case] window: usize,
    #[case] sinks: usize,
    #[case] calls: &[usize],
) {
    let device = Device::flex();
    let seq: usize = calls.iter().sum();
    let mha = SparseMultiHeadAttentionConfig::new(16, 4, Pattern::causal())
        .with_block_size(8)
        .with_n_kv_heads(Some(2))
        .with_rope(Some(RotaryEncodingConfig::new(64, 4)))
        .with_sinks(true)
        .try_init(&device)
        .unwrap();
    let mha = randomise(mha);
    let x = random([2, seq, 16], &device);
    let config = KvPoolConfig::new(2, seq)
        .with_page_size(16)
        .with_chunk(seq)
        .with_residency(KvRetention::Window { window, sinks })
        .with_positions(KvPositions::InCache);
    let mut pool = KvPool::for_attention(&mha, &config).unwrap();
    let ids = [(); 2].map(|()| pool.join().unwrap());
    let mut first = 0;
    for &count in calls {
        let part = x.clone().narrow(1, first, count);
        let steps = ids.map(|id| KvStep::new(id, count));
        let got = pool.try_forward_attention(&mha, part, &steps).unwrap();
        for row in 0..count {
            let query = first + row;
            let kept = (0..=query).filter(|&key| key < sinks || key + window > query);
            let kept: Vec<i32> = kept.map(|key| key as i32).collect();
            let places = kept.len();
            let kept = Tensor::<1, Int>::from_ints(kept.as_slice(), &device);
            let alone = SparseMhaInput::self_attn(x.clone().select(1, kept));
            let expected = mha.try_forward(alone).unwrap().context;
            let expected = expected.narrow(1, places - 1, 1);
            assert_close(got.clone().narrow(1, row, 1), expected, 1e-4);
        }
        first += count;
    }
}

#[test]
fn positions_are_counted_in_windows_alone() {
    let device = Device::flex();
    let model = self::model(vec![Pattern::causal()], &device);
    let config = KvPoolConfig::new(1, CONTEXT).with_positions(KvPositions::InCache);
    refused! { model.new_pool(&config) => "positions must be Original, because the residency is no Window, got InCache"; }
    let window = window(8, 2);
    let config = config.with_residency(window);
    model.new_pool(&config).unwrap();
    let local = self::model(vec![Pattern::local(20)], &device);
    refused! { local.new_pool(&config) => "positions must be Original: heads are not causal…"; }
}
