//! Sequences of a pool, of unequal lengths and in pieces, give the results of their whole calls.

use crate::prelude::*;
use crate::texts::part;

/// More than two pages, and not a multiple of the block size.
pub(crate) const SEQ: usize = 37;

pub(crate) fn config(sequences: usize) -> KvPoolConfig {
    KvPoolConfig::new(sequences, SEQ).with_page_size(16)
}

/// Returns the rows `first..first + seq` of an entry of `x`, as far as they exist.
fn piece(x: &Tensor<3>, entry: usize, first: usize, seq: usize) -> Tensor<3> {
    let [_, len, width] = x.dims();
    let own = seq.min(len - first);
    let rows = x.clone().slice([entry..entry + 1, first..first + own]);
    match seq - own {
        0 => rows,
        rest => {
            let rest = Tensor::full([1, rest, width], 7.0, &x.device());
            Tensor::cat(vec![rows, rest], 1)
        }
    }
}

/// Feeds an attention these numbers of tokens of each sequence; sequences without a new token are not in the call. Returns the rows of the others,
/// with their indices.
pub(crate) fn call(
    mha: &SparseMultiHeadAttention,
    x: &Tensor<3>,
    pool: &mut KvPool,
    ids: &[SequenceId],
    counts: &[usize],
) -> Vec<(usize, Tensor<3>)> {
    let taken: Vec<usize> = (0..ids.len()).filter(|&at| counts[at] > 0).collect();
    let seq = *counts.iter().max().unwrap();
    let rows = taken.iter();
    let rows = rows.map(|&at| piece(x, at, pool.len(ids[at]).unwrap(), seq));
    let rows = Tensor::cat(rows.collect(), 0);
    let steps = taken.iter().map(|&at| KvStep::new(ids[at], counts[at]));
    let steps: Vec<KvStep> = steps.collect();
    let out = pool.try_forward_attention(mha, rows, &steps).unwrap();
    pool.verify().unwrap();
    let of = |(place, at): (usize, usize)| {
        let rows = out.clone().narrow(0, place, 1);
        (at, rows.narrow(1, 0, counts[at]))
    };
    taken.into_iter().enumerate().map(of).collect()
}

/// Feeds an attention in such calls; returns rows like [`SparseMultiHeadAttention::forward`].
pub(crate) fn in_pieces(
    mha: &SparseMultiHeadAttention,
    x: &Tensor<3>,
    config: &KvPoolConfig,
    calls: &[Vec<usize>],
) -> Vec<Tensor<3>> {
    let [batch, ..] = x.dims();
    let mut pool = KvPool::for_attention(mha, config).unwrap();
    let ids: Vec<SequenceId> = (0..batch).map(|_| pool.join().unwrap()).collect();
    let mut rows: Vec<Vec<Tensor<3>>> = vec![Vec::new(); batch];
    for counts in calls {
        for (at, out) in call(mha, x, &mut pool, &ids, counts) {
            rows[at].push(out);
        }
    }
    rows.into_iter().map(|rows| Tensor::cat(rows, 1)).collect()
}

/// Pairs rows of sequences with the first rows of the whole.
pub(crate) fn beside(
    rows: Vec<Tensor<3>>,
    whole: &Tensor<3>,
) -> impl Iterator<Item = (Tensor<3>, Tensor<3>)> {
    rows.into_iter().enumerate().map(|(entry, rows)| {
        let [_, len, _] = rows.dims();
        (rows, whole.clone().narrow(0, entry, 1).narrow(1, 0, len))
    })
}

/// Returns the output of a whole call.
pub(crate) fn whole(mha: &SparseMultiHeadAttention, x: &Tensor<3>) -> Tensor<3> {
    let input = SparseMhaInput::self_attn(x.clone());
    mha.try_forward(input).unwrap().context
}

/// Token by token; a prompt and then tokens; and unequal lengths in unequal pieces.
pub(crate) fn chunkings() -> [Vec<Vec<usize>>; 3] {
    let each = |count: usize| vec![count; 2];
    let single: Vec<_> = (0..SEQ).map(|_| each(1)).collect();
    let mut prompt = vec![vec![19, 5]];
    prompt.extend((0..SEQ - 19).map(|_| each(1)));
    let ragged = [[3, 1], [0, 17], [9, 2], [1, 1], [20, 4], [1, 0], [3, 1]];
    [single, prompt, ragged.map(Vec::from).to_vec()]
}

fn check(mha: &SparseMultiHeadAttention, x: &Tensor<3>, config: &KvPoolConfig, what: &str) {
    let whole = whole(mha, x);
    for (index, calls) in chunkings().iter().enumerate() {
        println!("{what}, chunking {index}");
        for (rows, expected) in beside(in_pieces(mha, x, config, calls), &whole) {
            assert_close(rows, expected, 1e-5);
        }
    }
}

#[test]
fn rows_are_those_of_the_whole_for_every_pattern() {
    for device in devices() {
        let x = random([2, SEQ, 16], &device);
        for text in PATTERNS {
            for kv_heads in [1, 2] {
                let pattern: Pattern = text.parse().unwrap();
                let mha = SparseMultiHeadAttentionConfig::new(16, 2, pattern)
                    .with_block_size(8)
                    .with_n_kv_heads(Some(kv_heads))
                    .with_rope(Some(RotaryEncodingConfig::new(SEQ, 8)));
                let mha = randomise(mha.try_init(&device).unwrap());
                let config = config(2).with_chunk(20);
                check(&mha, &x, &config, &format!("{text}, {kv_heads} KV heads"));
            }
        }
    }
}

#[rstest]
#[case::all(config(2).with_residency(KvRetention::All))]
#[case::rollback(config(2).with_rollback(5).with_chunk(20))]
#[case::large_pages(config(2).with_page_size(64).with_chunk(20))]
fn what_is_kept_changes_nothing(#[case] config: KvPoolConfig) {
    let device = Device::flex();
    let x = random([2, SEQ, 16], &device);
    for text in [
        "causal",
        "local:5",
        "fixed:8,2,2",
        "streaming:4,3",
        "strided:4",
    ] {
        let mha = SparseMultiHeadAttentionConfig::new(16, 4, text.parse().unwrap());
        let mha = mha.with_block_size(8).with_n_kv_heads(Some(2));
        let mha = randomise(mha.try_init(&device).unwrap());
        check(&mha, &x, &config, text);
    }
}

type Config = SparseMultiHeadAttentionConfig;
type Build = fn(Config) -> Config;

#[rstest]
#[case::alibi(|config: Config| config.with_alibi(true))]
#[case::relative(|config: Config| config.with_relative_reach(Some(6)))]
#[case::alibi_and_relative(|config: Config| config.with_alibi(true).with_relative_reach(Some(3)).with_softcap(Some(2.0)))]
#[case::sinks(|config: Config| config.with_sinks(true))]
#[case::quiet(|config: Config| config.with_quiet_softmax(true))]
#[case::softcap(|config: Config| config.with_softcap(Some(3.0)).with_scale(Some(0.7)))]
#[case::qk_norm(|config: Config| config.with_qk_norm(Some(QkNorm::Rms)).with_rope(Some(RotaryEncodingConfig::new(SEQ, 4))))]
#[case::layer_norm(|config: Config| config.with_qk_norm(Some(QkNorm::Layer)).with_sinks(true).with_softcap(Some(3.0)))]
#[case::narrow_keys(|config: Config| config.with_d_key(Some(8)))]
#[case::stored_weights(|config: Config| config.with_store_weights(true))]
fn options(#[case] build: Build) {
    for device in devices() {
        let x = random([2, SEQ, 16], &device);
        for text in ["local:7", "fixed:8,2,2", "strided:4"] {
            let mha = SparseMultiHeadAttentionConfig::new(16, 4, text.parse().unwrap());
            let mha = build(mha.with_block_size(8).with_n_kv_heads(Some(2)));
            let mha = randomise(mha.try_init(&device).unwrap());
            check(&mha, &x, &config(2).with_chunk(20), text);
        }
    }
}

/// Pieces end where the pattern allows a boundary; the end may be anywhere.
#[test]
fn patterns_that_are_not_causal() {
    let device = Device::flex();
    let x = random([1, SEQ, 16], &device);
    let pattern: Pattern = "chunked:4,1,0".parse().unwrap();
    let mha = SparseMultiHeadAttentionConfig::new(16, 2, pattern).with_block_size(8);
    let mha = randomise(mha.try_init(&device).unwrap());
    let calls = [vec![8], vec![4], vec![12], vec![12]];
    let rows = in_pieces(&mha, &x, &config(1).with_chunk(12), &calls).remove(0);
    assert_close(rows, whole(&mha, &x).narrow(1, 0, 36), 1e-5);
    let mut pool = KvPool::for_attention(&mha, &config(1)).unwrap();
    let id = pool.join().unwrap();
    let steps = [KvStep::new(id, 5)];
    let next = Some(8);
    let error = pool
        .try_forward_attention(&mha, x.narrow(1, 0, 5), &steps)
        .unwrap_err();
    let is_right = matches!(error, PoolError::Layers(TransformerError::Boundary { position: 5, next: of, .. }) if of == next);
    assert!(is_right, "{error}");
    assert_eq!(pool.len(id).unwrap(), 0);
}

pub(crate) const VOCAB: usize = 13;

/// Makes a model with layers of three patterns, one of them twice.
pub(crate) fn model(device: &Device, attention: Option<BlockAttentionConfig>) -> SparseTransformer {
    let patterns = ["local:6", "fixed:8,2", "local:6", "merged-strided:4"];
    let patterns = patterns.map(|text| text.parse().unwrap()).to_vec();
    let config = SparseTransformerConfig::new(16, 2, Factorization::Interleaved(patterns))
        .with_vocab_size(VOCAB)
        .with_context(SEQ)
        .with_n_layers(4)
        .with_embedding_width(Some(8))
        .with_n_kv_heads(Some(1))
        .with_attention(attention)
        .with_block_size(8);
    randomise(config.try_init(device).unwrap())
}

/// Sequences that join when others are already long, are forked, and roll back.
#[rstest]
#[case::learned_positions(None)]
#[case::rotations(Some(BlockAttentionConfig::new().with_rope_theta(Some(100.0)).with_sinks(true)))]
fn a_model(#[case] attention: Option<BlockAttentionConfig>) {
    for device in devices() {
        let model = model(&device, attention.clone());
        let tokens = tokens(3, SEQ, VOCAB, &device);
        let whole = model.try_forward(tokens.clone()).unwrap();
        let config = config(4).with_rollback(6).with_chunk(8);
        let mut pool = model.new_pool(&config).unwrap();
        assert_eq!(pool.page_pools().count(), 3);
        let expect = |logits: Tensor<3>, entry: usize, first: usize| {
            let [_, count, _] = logits.dims();
            let expected = whole.clone().narrow(0, entry, 1).narrow(1, first, count);
            assert_close(logits, expected, 1e-4);
        };
        let a = pool.join().unwrap();
        let steps = [KvStep::new(a, 20)];
        let logits = model.try_forward_pool(part(&tokens, 0, 0..20), &steps, &mut pool);
        expect(logits.unwrap(), 0, 0);
        let b = pool.join().unwrap();
        for position in 0..8 {
            let pair = vec![
                part(&tokens, 1, position..position + 1),
                part(&tokens, 0, 20 + position..21 + position),
            ];
            let steps = [KvStep::new(b, 1), KvStep::new(a, 1)];
            let logits = model.try_forward_pool(Tensor::cat(pair, 0), &steps, &mut pool);
            let logits = logits.unwrap();
            pool.verify().unwrap();
            expect(logits.clone().narrow(0, 0, 1), 1, position);
            expect(logits.narrow(0, 1, 1), 0, 20 + position);
        }
        // Another text, and back; the fork continues from the sequence's length at the time.
        let c = pool.fork(a).unwrap();
        let steps = [KvStep::new(a, 6)];
        let logits = model.try_forward_pool(part(&tokens, 2, 0..6), &steps, &mut pool);
        assert!(logits.is_ok());
        pool.verify().unwrap();
        pool.truncate(a, 28).unwrap();
        pool.verify().unwrap();
        for (id, count) in [(a, 9), (c, 4)] {
            let steps = [KvStep::new(id, count)];
            let logits =
                model.try_forward_pool(part(&tokens, 0, 28..28 + count), &steps, &mut pool);
            expect(logits.unwrap(), 0, 28);
            pool.verify().unwrap();
        }
        pool.leave(a).unwrap();
        pool.verify().unwrap();
        let steps = [KvStep::new(c, 5)];
        let next = model.next_logits(part(&tokens, 0, 32..37), &steps, &mut pool);
        expect(next.unwrap().reshape([1, 1, VOCAB]), 0, 36);
        refused! { pool.truncate(c, 3) => "cannot go back to 3 tokens…"; }
        assert_eq!(pool.len(c).unwrap(), 37);
        for id in [b, c] {
            pool.leave(id).unwrap();
        }
        pool.verify().unwrap();
        let mut books = pool.page_pools();
        assert!(books.all(|books| books.free_pages() == books.config().pages()));
    }
}

/// In each layer, slots are at most the live keys, two pages, and the tokens of a call and of the rollback.
#[test]
fn slots_are_within_the_bound() {
    let device = Device::flex();
    let pattern = Factorization::from(Pattern::local(20));
    let config = SparseTransformerConfig::new(16, 2, pattern)
        .with_vocab_size(VOCAB)
        .with_context(200)
        .with_n_layers(2);
    let model = config.try_init(&device).unwrap();
    let config = KvPoolConfig::new(1, 200)
        .with_page_size(16)
        .with_rollback(2);
    let (mut pool, id) = joined(&model, &config);
    let tokens = tokens(1, 200, VOCAB, &device);
    let read = |range: std::ops::Range<usize>, pool: &mut KvPool| {
        let steps = [KvStep::new(id, range.len())];
        let logits = model.try_forward_pool(part(&tokens, 0, range), &steps, pool);
        assert!(logits.is_ok());
    };
    read(0..60, &mut pool);
    for position in 60..200 {
        read(position..position + 1, &mut pool);
        let usage = pool.usage(id).unwrap();
        // Two layers of two heads.
        let is_right = usage.slots <= 4 * (19 + 2 * 16 + 2 + 1);
        assert!(is_right, "{position}: {usage:?}");
        assert_eq!(usage.live_bytes, 4 * 19 * 16 * 4);
        assert_eq!(usage.all_bytes, 4 * (position + 1) * 16 * 4);
    }
    assert!(pool.bytes() < pool.usage(id).unwrap().all_bytes);
}

/// What a window hides is hidden in prompts too.
#[test]
fn a_window_is_the_streaming_pattern() {
    let device = Device::flex();
    let x = random([2, SEQ, 16], &device);
    let attention = |text: &str| {
        let pattern: Pattern = text.parse().unwrap();
        let config = SparseMultiHeadAttentionConfig::new(16, 2, pattern).with_block_size(8);
        config.try_init(&device).unwrap()
    };
    let causal = attention("causal");
    let streaming = attention("streaming:6,3").load_record(causal.clone().into_record());
    let whole = whole(&streaming, &x);
    let window = window(6, 3);
    let config = config(2).with_residency(window).with_chunk(20);
    for calls in chunkings() {
        for (rows, expected) in beside(in_pieces(&causal, &x, &config, &calls), &whole) {
            assert_close(rows, expected, 1e-5);
        }
    }
}

#[test]
fn half_precision_stores() {
    let device = Device::flex();
    let x = random([2, SEQ, 16], &device);
    for (dtype, tolerance) in [(FloatDType::F16, 8e-3), (FloatDType::BF16, 6e-2)] {
        let mha = SparseMultiHeadAttentionConfig::new(16, 2, Pattern::local(7));
        let mha = randomise(mha.with_block_size(8).try_init(&device).unwrap());
        let rows = in_pieces(&mha, &x, &config(2).with_dtype(dtype), &chunkings()[0]);
        for (rows, expected) in beside(rows, &whole(&mha, &x)) {
            assert_close(rows, expected, tolerance);
        }
    }
}

/// Nothing has changed after an error.
#[test]
fn errors() {
    let device = Device::flex();
    let model = model(&device, None);
    let mut pool = model.new_pool(&config(1).with_pages(2)).unwrap();
    let (a, b) = (pool.join().unwrap(), pool.join().unwrap());
    let ids = |batch: usize, count: usize| tokens(batch, count, VOCAB, &device);
    let mut call = |batch, count, steps: &[(SequenceId, usize)]| {
        let steps: Vec<KvStep> = steps.iter().map(|&(id, n)| KvStep::new(id, n)).collect();
        let result = model.try_forward_pool(ids(batch, count), &steps, &mut pool);
        pool.verify().unwrap();
        assert_eq!([pool.len(a).unwrap(), pool.len(b).unwrap()], [0, 0]);
        result
    };
    refused! {
        call(2, 20, &[(a, 20), (b, 20)]) => "the call needs 4 pages, 2 are free";
        call(2, 2, &[(a, 2), (a, 2)]) => "sequences must be different ones, got sequence 0 twice";
        call(2, 1, &[(a, 1)]) => "steps must be as many as the batch's 2 entries, got 1";
        call(1, 2, &[(a, 3)]) => "tokens must be from 1 to 2 of each sequence, the input's, got 3";
        call(1, SEQ + 1, &[(a, SEQ + 1)]) => "positions must stay below 37, the model's context, got positions 0..38";
    }
    let one = [KvStep::new(a, 1)];
    let empty = pool.join().unwrap();
    pool.leave(empty).unwrap();
    let gone = [KvStep::new(empty, 1)];
    refused! { model.try_forward_pool(ids(1, 1), &gone, &mut pool) => "sequence must be one that joined this pool and has not left it, got sequence 2"; }
    let other = SparseMultiHeadAttentionConfig::new(16, 2, Pattern::causal());
    let other = other.try_init(&device).unwrap();
    let error = pool.try_forward_attention(&other, random([1, 1, 16], &device), &one);
    refused! {
        error => "pool must be of 1 layers, the model's, got 4 layers";
        model.new_pool(&config(1).with_page_size(17)) => "page_size must be 16, 32, 64 or 128, got 17";
        model.new_pool(&KvPoolConfig::new(0, 5)) => "sequences must be at least 1, got 0";
    }
}

/// Keys that forks share are read once for all of them: the rows are the same for any pattern, with sinks, a softcap and several tokens at once, and
/// when a fork leaves or its pages are copied.
#[rstest]
#[case(Pattern::causal())]
#[case(Pattern::fixed(8, 4))]
#[case(Pattern::streaming(9, 20))]
fn what_forks_share_is_read_once(#[case] pattern: Pattern) {
    let device = Device::flex();
    let config = SparseTransformerConfig::new(16, 4, Factorization::from(pattern))
        .with_vocab_size(11)
        .with_context(128)
        .with_n_layers(2)
        .with_block_size(8)
        .with_n_kv_heads(Some(2))
        .with_attention(Some(BlockAttentionConfig::new().with_sinks(true)));
    let model: SparseTransformer = randomise(config.try_init(&device).unwrap());
    let of = |cascade| {
        let config = KvPoolConfig::new(4, 128)
            .with_page_size(16)
            .with_rollback(3)
            .with_cascade(cascade);
        model.new_pool(&config).unwrap()
    };
    let mut pools = [of(16), of(usize::MAX)];
    let step = |pools: &mut [KvPool; 2], steps: &[KvStep], seed: i64| {
        let seq = steps.iter().map(|step| step.tokens).max().unwrap();
        let ids: Vec<i64> = (0..(steps.len() * seq) as i64)
            .map(|i| (i * 5 + seed * 3) % 11)
            .collect();
        let ids = burn::tensor::TensorData::new(ids, [steps.len(), seq]);
        let [got, expected] = pools.each_mut().map(|pool| {
            let ids = Tensor::<2, Int>::from_data(ids.clone(), &device);
            let logits = model.try_forward_pool(ids, steps, pool).unwrap();
            pool.verify().unwrap();
            logits
        });
        for (entry, step) in steps.iter().enumerate() {
            let rows =
                |logits: &Tensor<3>| logits.clone().slice([entry..entry + 1, 0..step.tokens]);
            assert_close(rows(&got), rows(&expected), 1e-4);
        }
    };
    let a = pools.each_mut().map(|pool| pool.join().unwrap())[0];
    step(&mut pools, &[KvStep::new(a, 70)], 1);
    let fork = |pools: &mut [KvPool; 2]| pools.each_mut().map(|pool| pool.fork(a).unwrap())[0];
    let (b, c) = (fork(&mut pools), fork(&mut pools));
    for seed in 0..20 {
        let each = [c, a, b].map(|id| KvStep::new(id, 1));
        step(&mut pools, &each, seed);
    }
    let several = [(b, 3), (a, 1), (c, 2)].map(|(id, tokens)| KvStep::new(id, tokens));
    step(&mut pools, &several, 4);
    for pool in &mut pools {
        let len = pool.len(b).unwrap();
        pool.truncate(b, len - 2).unwrap();
        pool.leave(a).unwrap();
    }
    for seed in 0..3 {
        step(&mut pools, &[b, c].map(|id| KvStep::new(id, 1)), seed);
    }
    let d = pools.each_mut().map(|pool| pool.fork(b).unwrap())[0];
    step(&mut pools, &[d, b, c].map(|id| KvStep::new(id, 1)), 9);
}
