//! Sequences with eviction that fork, roll back and get scores from the caller.

use std::slice::from_ref;

use burn_paged_attention::pool::EvictionScore;

use crate::eviction::{
    SEQ, VOCAB, WIDTH, attention, calls_of_two, go_on, model, part, policies, pool_config,
};
use crate::prelude::*;

/// A fork continues like the sequence would have; both retain the same as alone.
#[test]
fn forks() {
    let device = Device::flex();
    let model = model(&device);
    let text = tokens(1, SEQ, VOCAB, &device);
    let other = tokens(1, 2 * SEQ, VOCAB, &device).narrow(1, SEQ, SEQ);
    let continuation = |tokens: &Tensor<2, Int>, from: usize| {
        let parts = [part(&text, 0, from), part(tokens, from, SEQ - from)];
        Tensor::cat(parts.to_vec(), 1)
    };
    for config in policies() {
        // After an eviction and between two.
        for from in [20, 23] {
            let [a, b] = [&text, &other].map(|tokens| continuation(tokens, from));
            let alone = [&a, &b].map(|tokens| {
                let (mut pool, id) = joined(&model, &pool_config(1, config));
                go_on(&model, tokens, &mut pool, id, &[20]);
                go_on(&model, tokens, &mut pool, id, &[1; 3][..from - 20]);
                let logits = go_on(&model, tokens, &mut pool, id, &[1; 14]);
                let kept = pool.retained_positions(id, 2).unwrap();
                (Tensor::cat(logits, 1), kept)
            });
            let (mut pool, id) = joined(&model, &pool_config(3, config));
            go_on(&model, &text, &mut pool, id, &[20]);
            go_on(&model, &text, &mut pool, id, &[1; 3][..from - 20]);
            let fork = pool.fork(id).unwrap();
            let mut logits = [Vec::new(), Vec::new()];
            for _ in 0..14 {
                logits[0].extend(go_on(&model, &a, &mut pool, id, &[1]));
                logits[1].extend(go_on(&model, &b, &mut pool, fork, &[1]));
            }
            for ((logits, id), (expected, kept)) in logits.into_iter().zip([id, fork]).zip(alone) {
                assert_close(Tensor::cat(logits, 1), expected, 1e-5);
                assert_eq!(pool.retained_positions(id, 2).unwrap(), kept, "{config:?}");
                pool.leave(id).unwrap();
                pool.verify().unwrap();
            }
            let mut books = pool.page_pools();
            assert!(books.all(|books| books.free_pages() == books.config().pages()));
        }
    }
}

/// Within the rollback, a sequence continues as if the rolled-back tokens had never existed; further back its keys are gone.
#[test]
fn going_back() {
    let device = Device::flex();
    let model = model(&device);
    let text = tokens(1, SEQ, VOCAB, &device);
    let other = tokens(1, 2 * SEQ, VOCAB, &device).narrow(1, SEQ, SEQ);
    for config in policies() {
        let mut config = config.with_slack(6);
        config.recent = config.recent.max(3);
        let run = |drafts: bool| {
            let (mut pool, id) = joined(&model, &pool_config(1, config).with_rollback(3));
            // Evicted after the prompt of 20 tokens; then not before six more.
            go_on(&model, &text, &mut pool, id, &[20, 1]);
            if drafts {
                go_on(&model, &other, &mut pool, id, &[2]);
                pool.truncate(id, 21).unwrap();
                pool.verify().unwrap();
            }
            let mut logits = go_on(&model, &text, &mut pool, id, &[1, 1]);
            if drafts {
                go_on(&model, &other, &mut pool, id, &[1, 1]);
                let reads_attention = config.score != EvictionScore::KeyNorm;
                assert!(!reads_attention || pool.truncate(id, 21).is_err());
                pool.truncate(id, 23).unwrap();
                pool.verify().unwrap();
            }
            logits.extend(go_on(&model, &text, &mut pool, id, &[1; 14]));
            let kept = pool.retained_positions(id, 1).unwrap();
            (Tensor::cat(logits, 1), kept, pool, id)
        };
        let (logits, kept, mut pool, id) = run(true);
        let (expected, expected_kept, ..) = run(false);
        assert_close(logits, expected, 1e-5);
        assert_eq!(kept, expected_kept, "{config:?}");
        refused! { pool.truncate(id, 3) => "cannot go back to 3 tokens…"; }
        assert_eq!(pool.len(id).unwrap(), SEQ);
    }
}

/// Within the rollback, the call that begins a sequence is rolled back like any other, and so is a step across a page boundary: the sequence
/// continues as if those tokens had never existed.
#[test]
fn going_back_into_the_first_call_and_over_pages() {
    let device = Device::flex();
    let model = model(&device);
    let text = tokens(1, SEQ, VOCAB, &device);
    let other = tokens(1, 2 * SEQ, VOCAB, &device).narrow(1, SEQ, SEQ);
    for config in policies() {
        // Nothing is evicted before the end, so that any call can be the shorter one.
        let mut config = config.with_slack(14);
        config.recent = config.recent.max(5);
        let run = |calls: &[(usize, usize)], to_come: usize| {
            let config = pool_config(1, config).with_rollback(5);
            let (mut pool, id) = joined(&model, &config);
            for &(tokens, back) in calls {
                let len = pool.len(id).unwrap();
                let right = part(&text, 0, len + tokens - back);
                let wrong = Tensor::cat(vec![right, part(&other, len, back.max(1))], 1);
                go_on(&model, &wrong, &mut pool, id, &[tokens]);
                pool.truncate(id, len + tokens - back).unwrap();
                pool.verify().unwrap();
            }
            let logits = go_on(&model, &text, &mut pool, id, &vec![1; to_come]);
            let kept = pool.retained_positions(id, 1).unwrap();
            let sums = pool.attention_sums(id, 1);
            (Tensor::cat(logits, 1), kept, sums, pool, id)
        };
        for calls in [
            vec![(8, 2)],
            vec![(18, 5)],
            vec![(5, 4), (12, 0), (4, 5 - 1), (1, 0)],
            vec![(3, 2), (17, 5)],
            vec![(14, 0), (4, 3), (1, 0)],
        ] {
            let len: usize = calls.iter().map(|(tokens, back)| tokens - back).sum();
            let (logits, kept, sums, mut pool, id) = run(&calls, SEQ - len);
            let (expected, expected_kept, expected_sums, ..) = run(&[(len, 0)], SEQ - len);
            assert_close(logits, expected, 1e-5);
            assert_eq!(kept, expected_kept, "{config:?} {calls:?}");
            assert_eq!(sums.is_some(), expected_sums.is_some());
            if let (Some(sums), Some(expected)) = (sums, expected_sums) {
                assert_close(sums, expected, 1e-5);
            }
            if config.score != EvictionScore::KeyNorm {
                assert!(pool.truncate(id, SEQ - 6).is_err());
            }
            pool.truncate(id, SEQ - 5).unwrap();
            pool.verify().unwrap();
        }
    }
}

/// Rejected drafts leave no trace in the sums of attention: while nothing is evicted, texts equal those without drafts.
#[test]
fn drafts_go_back_over_pages() {
    let device = Device::flex();
    let model = model(&device);
    let prompts = [vec![1, 2, 3, 1, 2, 3, 1, 2], vec![7; 15], vec![4]];
    for config in policies() {
        let mut config = config;
        (config.heavy, config.recent) = (config.heavy + SEQ, config.recent.max(3));
        let options = GenerateOptions::default()
            .max_new(20)
            .sampling(Sampling::default().seed(5))
            .page_size(16)
            .eviction(config);
        let run = |options: &GenerateOptions| {
            let go_on = &mut |_| ControlFlow::Continue(());
            generate(&model, &prompts, options, go_on).unwrap()
        };
        let plain = run(&options);
        let drafted = run(&options.drafts(PromptLookup::new(3).with_match(1, 4)));
        let back = drafted.iter().map(|text| text.drafted - text.accepted);
        assert!(back.sum::<usize>() > 5);
        for (text, plain) in drafted.iter().zip(&plain) {
            assert_eq!(text.tokens, plain.tokens, "{config:?}");
        }
    }
}

/// The caller's scores of the tokens of two sequences of unequal lengths; ties go to the later ones.
#[test]
fn importance() {
    let device = Device::flex();
    let x = random([2, SEQ, WIDTH], &device);
    let mha = attention(Pattern::causal(), 2).try_init(&device).unwrap();
    let config = pool_config(2, EvictionConfig::importance(3).with_slack(0));
    let mut pool = KvPool::for_attention(&mha, &config).unwrap();
    let ids = calls_of_two(&mha, &x, &mut pool, &[[6, 5], [1, 1]]);
    // Nothing is evicted before the caller asks.
    let expected = [[0, 1, 2, 3, 4, 5]; 2];
    assert_eq!(pool.retained_positions(ids[1], 0).unwrap(), expected);
    let scores = Tensor::<3>::from_data(
        [
            [[9.0, 1.0, 8.0, 2.0, 7.0, 3.0, 0.0], [0.0; 7]],
            [
                [1.0, 2.0, f32::NAN, 3.0, 4.0, 0.0, 9.0],
                [5.0, 4.0, 3.0, 2.0, 1.0, 0.0, 9.0],
            ],
        ],
        &device,
    );
    pool.evict(&ids, from_ref(&scores)).unwrap();
    pool.verify().unwrap();
    let expected = [[0, 2, 4], [4, 5, 6]];
    assert_eq!(pool.retained_positions(ids[0], 0).unwrap(), expected);
    let expected = [[1, 3, 4], [0, 1, 2]];
    assert_eq!(pool.retained_positions(ids[1], 0).unwrap(), expected);
    // Scores belong to tokens, not to the retained keys.
    let step = [KvStep::new(ids[1], 1)];
    pool.forward_attention(&mha, x.clone().slice([1..2, 6..7]), &step);
    let scores_of_one = scores.clone().narrow(0, 1, 1);
    pool.evict(&ids[1..], from_ref(&scores_of_one)).unwrap();
    let expected = [[3, 4, 6], [0, 1, 6]];
    assert_eq!(pool.retained_positions(ids[1], 0).unwrap(), expected);
    refused! {
        pool.evict(&[ids[0]; 2], from_ref(&scores)) => "sequences must be different ones, got sequence 0 twice";
        pool.evict(&ids, &[]) => "importance must be one for each of the 1 layers, got 0";
        pool.evict(&ids, from_ref(&scores_of_one)) => "importance must be [2, 2, at least 7], got [1, 2, 7]";
    }
    let mut other = KvPool::for_attention(&mha, &pool_config(1, EvictionConfig::tova(4))).unwrap();
    let id = other.join().unwrap();
    refused! { other.evict(&[id], from_ref(&scores_of_one)) => "pool must be one whose keys are evicted by the caller's scores, got another"; }
}

#[test]
fn what_a_sequence_takes() {
    let device = Device::flex();
    let model = model(&device);
    let text = tokens(1, SEQ, VOCAB, &device);
    let config = EvictionConfig::tova(8).with_slack(4);
    let (mut pool, id) = joined(&model, &pool_config(1, config).with_chunk(1));
    go_on(&model, &text, &mut pool, id, &[1; SEQ]);
    let usage = pool.usage(id).unwrap();
    // Three layers of two heads; 37 tokens, of which 8 stayed, plus up to 4 new ones.
    let stored = pool.retained_positions(id, 0).unwrap()[0].len();
    assert!((8..=12).contains(&stored));
    assert_eq!(usage.live_bytes, 3 * 2 * stored * 8 * 4);
    assert_eq!(usage.all_bytes, 3 * 2 * SEQ * 8 * 4);
    // One query of each head.
    assert_eq!(usage.score_bytes, 3 * 4 * 4 * 4);
    assert!(pool.bytes() < 3 * 2 * 64 * 8 * 4);
}

/// Nothing has changed after an error.
#[test]
fn errors() {
    let device = Device::flex();
    let tova = EvictionConfig::tova(9).with_slack(2);
    let pool = |mha: SparseMultiHeadAttentionConfig, config: KvPoolConfig| {
        KvPool::for_attention(&mha.try_init(&device).unwrap(), &config)
    };
    let causal = || attention(Pattern::causal(), 2);
    let config = || pool_config(1, tova);
    let biased = "eviction must be none with ALiBi or biases of distances, got some";
    refused! {
        pool(attention(Pattern::local(5), 2), config()) => "pattern must be the dense causal pattern in every head where a cache evicts keys by attention, got local(5)";
        pool(causal().with_alibi(true), config()) => biased;
        pool(causal().with_relative_reach(Some(3)), config()) => biased;
        pool(causal(), pool_config(1, EvictionConfig::tova(1))) => "capacity must be at least 2: 0 sinks, 1 recent keys and one for its score, got 1";
        pool(causal(), config().with_rollback(2)) => "recent must be at least 2, what can be taken back, got 1";
        pool(causal(), config().with_residency(KvRetention::Evict)) => "residency must be another; `with_eviction` says which keys stay, got Evict";
    }

    // Both sequences have the same three pages: one that continues copies one of them, and its eviction two more.
    let model = model(&device);
    let text = tokens(1, SEQ, VOCAB, &device);
    for config in [
        EvictionConfig::h2o(14, 4).with_slack(18),
        EvictionConfig::tova(18).with_slack(18),
    ] {
        let config = pool_config(1, config).with_chunk(36).with_pages(4);
        let (mut pool, id) = joined(&model, &config);
        go_on(&model, &text, &mut pool, id, &[36]);
        let fork = pool.fork(id).unwrap();
        let kept = pool.retained_positions(id, 1).unwrap();
        let steps = [KvStep::new(id, 1)];
        let next = part(&text, 36, 1);
        refused! { model.try_forward_pool(next, &steps, &mut pool) => "the call needs…"; }
        pool.verify().unwrap();
        assert_eq!(pool.retained_positions(id, 1).unwrap(), kept);
        assert_eq!(pool.len(id).unwrap(), 36);
        // Once the other has left, it continues.
        pool.leave(fork).unwrap();
        go_on(&model, &text, &mut pool, id, &[1]);
        assert_eq!(pool.retained_positions(id, 1).unwrap()[0].len(), 18);
    }
}

/// 8-bit keys are moved unchanged: after an eviction results are as close to those of floats as without one.
#[test]
fn eight_bits_are_evicted() {
    let device = Device::flex();
    let model = model(&device);
    let text = tokens(1, SEQ, VOCAB, &device);
    for (dtype, share) in [(KvDtype::Int8, 0.03), (KvDtype::Fp8E4m3, 0.15)] {
        let run = |dtype: KvDtype| {
            let eviction = EvictionConfig::importance(7).with_slack(0);
            let config = pool_config(1, eviction).with_dtype(dtype);
            let (mut pool, id) = joined(&model, &config);
            let mut logits = go_on(&model, &text, &mut pool, id, &[20, 1]);
            let layers = model.blocks.len();
            let scores = (0..layers).map(|layer| {
                let heads = model.blocks[layer].mha.n_kv_heads();
                let scores = (0..heads * 21).map(|at| ((at * 7 + layer) % 11) as f32);
                let scores = scores.collect::<Vec<f32>>();
                Tensor::<1>::from_floats(scores.as_slice(), &device).reshape([1, heads, 21])
            });
            pool.evict(&[id], &scores.collect::<Vec<_>>()).unwrap();
            pool.verify().unwrap();
            logits.extend(go_on(&model, &text, &mut pool, id, &[1, 3, 1]));
            let kept = pool.retained_positions(id, 1).unwrap();
            (Tensor::cat(logits, 1), kept)
        };
        let (got, kept) = run(dtype);
        let (expected, expected_kept) = run(KvDtype::Model);
        assert_eq!(kept, expected_kept);
        let most = expected.clone().abs().max().into_scalar::<f32>();
        assert!(most > 0.1);
        assert_close(got, expected, share * most);
    }
}
