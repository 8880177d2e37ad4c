//! Pools with eviction: queries see the retained keys, and scores equal the attention.

use std::sync::Arc;

use burn::module::Param;
use burn::nn::{Linear, RotaryEncodingConfig};
use burn::tensor::Tolerance;
use burn_paged_attention::pool::{
    EvictionBudget, EvictionConfig, EvictionScore, KvPool, KvPoolConfig, KvStep, ScoreSmoothing,
    SequenceId,
};
use burn_sparse_transformer::{
    Pattern, SparseMhaInput, SparseMultiHeadAttention, SparseMultiHeadAttentionConfig,
};

use crate::devices::is_cuda;
use crate::prelude::*;

const HEADS: usize = 4;
const KV_HEADS: usize = 2;
const WIDTH: usize = 32;
const SEQ: usize = 41;

/// Most sequences at a time; tokens of a prompt and in total; tokens that can be rolled back.
const MOST: usize = 4;
const PROMPT: usize = 40;
const LONGEST: usize = 120;
const ROLLBACK: usize = 5;
/// Number of calls, with random events between them.
const ROUNDS: usize = 60;

fn config(pattern: Pattern) -> SparseMultiHeadAttentionConfig {
    SparseMultiHeadAttentionConfig::new(WIDTH, HEADS, pattern)
        .with_block_size(8)
        .with_n_kv_heads(Some(KV_HEADS))
}

fn attention(pattern: Pattern, device: &Device) -> SparseMultiHeadAttention {
    initialised(config(pattern), device)
}

fn initialised(
    config: SparseMultiHeadAttentionConfig,
    device: &Device,
) -> SparseMultiHeadAttention {
    device.seed(3);
    let mut mha = config.try_init(device).unwrap();
    let random = |linear: &mut Linear| {
        let weight = linear.weight.val();
        let distribution = Distribution::Normal(0.0, 0.3);
        linear.weight = Param::from_tensor(on_grid(weight.random_like(distribution)));
    };
    for linear in [
        &mut mha.query,
        &mut mha.key,
        &mut mha.value,
        &mut mha.output,
    ] {
        random(linear);
    }
    mha
}

/// Rounds to numbers whose products and sums are exact in any order, even if factors are rounded to tf32, as Burn does on CUDA.
fn on_grid<const D: usize>(x: Tensor<D>) -> Tensor<D> {
    (x * 32.0).round() / 32.0
}

/// Returns the tolerance of rows after the output projection, and of sums of attention, whose factors are not such numbers; Burn multiplies both.
fn tolerance(device: &Device, exact: f32) -> f32 {
    if is_cuda(device) { 5e-3 } else { exact }
}

fn assert_close<const D: usize>(a: Tensor<D>, b: Tensor<D>, tolerance: f32) {
    let tolerance = Tolerance::absolute(tolerance).set_relative(tolerance);
    a.into_data()
        .assert_approx_eq::<f32>(&b.into_data(), tolerance);
}

fn pool_config(config: EvictionConfig) -> KvPoolConfig {
    KvPoolConfig::new(1, SEQ)
        .with_page_size(16)
        .with_chunk(20)
        .with_eviction(config)
}

/// After a prompt, single tokens and several at once, rows equal those of one call whose queries see the retained keys.
pub fn queries_see_the_keys_that_stay(devices: &[Device]) {
    let adaptive = EvictionBudget::Adaptive { alpha: 0.2 };
    for device in devices {
        for config in [
            EvictionConfig::h2o(6, 4),
            EvictionConfig::h2o_mean(6, 4).with_budget(adaptive),
            EvictionConfig::tova(9),
            EvictionConfig::snapkv_with(10, 3, 3, ScoreSmoothing::Average),
            EvictionConfig::key_norm(8),
        ] {
            let config = config.with_slack(3);
            let mha = attention(Pattern::causal(), device);
            let x = on_grid(Tensor::<3>::random(
                [1, SEQ, WIDTH],
                Distribution::Default,
                device,
            ));
            let mut pool = KvPool::for_attention(&mha, &pool_config(config)).unwrap();
            let id = pool.join().unwrap();
            let calls = [vec![18], vec![1; 14], vec![6], vec![1; 3]].concat();
            let mut seen: [Vec<Vec<usize>>; KV_HEADS] = Default::default();
            let mut rows = Vec::new();
            let mut first = 0;
            for count in calls {
                let kept = pool.retained_positions(id, 0).unwrap();
                for (seen, kept) in seen.iter_mut().zip(kept) {
                    let row = |i: usize| kept.iter().copied().chain(first..=i).collect();
                    seen.extend((first..first + count).map(row));
                }
                let input = x.clone().narrow(1, first, count);
                let steps = [KvStep::new(id, count)];
                rows.push(pool.try_forward_attention(&mha, input, &steps).unwrap());
                pool.verify().unwrap();
                first += count;
            }
            let stored: usize = pool
                .retained_positions(id, 0)
                .unwrap()
                .iter()
                .map(Vec::len)
                .sum();
            assert!(stored <= KV_HEADS * (config.capacity() + 3), "{config:?}");
            let seen = Arc::new(seen);
            let sees = move |head: usize, query: i64, key: i64| {
                let row = usize::try_from(query).ok();
                let row = row.and_then(|query| seen[head / (HEADS / KV_HEADS)].get(query));
                row.is_some_and(|row| row.contains(&(key as usize)))
            };
            let mut masked = attention(Pattern::from_fn("kept", sees), device);
            masked.query = mha.query.clone();
            masked.key = mha.key.clone();
            masked.value = mha.value.clone();
            masked.output = mha.output.clone();
            let whole = masked.try_forward(SparseMhaInput::self_attn(x)).unwrap();
            let what = format!("{config:?} on {device:?}");
            println!("{what}");
            assert_close(Tensor::cat(rows, 1), whole.context, tolerance(device, 1e-4));
        }
    }
}

/// The sums of attention per key are the same from a whole prompt and token by token, with and without rollbacks; also with options.
pub fn sums_of_attention_are_the_same_by_both_roads(devices: &[Device]) {
    let options = config(Pattern::causal())
        .with_rope(Some(RotaryEncodingConfig::new(SEQ, WIDTH / HEADS)))
        .with_sinks(true)
        .with_softcap(Some(3.0));
    for device in devices {
        for (config, total) in [
            (config(Pattern::causal()), HEADS * 20),
            (options.clone(), 0),
        ] {
            let mha = initialised(config, device);
            let x = Tensor::<3>::random([1, 20, WIDTH], Distribution::Default, device);
            let x = on_grid(x);
            let sums = |calls: &[usize], rollback: usize| {
                let config = pool_config(EvictionConfig::h2o(20, 20)).with_rollback(rollback);
                let mut pool = KvPool::for_attention(&mha, &config).unwrap();
                let id = pool.join().unwrap();
                for &count in calls {
                    let input = x.clone().narrow(1, pool.len(id).unwrap(), count);
                    let steps = [KvStep::new(id, count)];
                    pool.try_forward_attention(&mha, input, &steps).unwrap();
                }
                pool.attention_sums(id, 0).unwrap().narrow(1, 0, 20)
            };
            let whole = sums(&[20], 0);
            if total > 0 {
                let sum: f32 = whole.clone().sum().into_scalar();
                assert!((sum - total as f32).abs() < 1e-3, "{sum}");
            }
            println!("sums on {device:?}");
            for (calls, rollback) in [(&[1; 20][..], 0), (&[7, 1, 9, 3], 0), (&[1; 20], 3)] {
                let got = sums(calls, rollback);
                assert_close(got, whole.clone(), tolerance(device, 1e-5));
            }
        }
    }
}

/// A sequence of a batch, and the same alone in a pool.
struct Pair {
    id: SequenceId,
    alone: KvPool,
    alone_id: SequenceId,
}

/// Sequences join, grow, roll back and leave in any order, with unequal lengths and over page boundaries: each gets the same as in its own pool.
pub fn sequences_of_a_batch_get_what_they_get_alone(devices: &[Device]) {
    let adaptive = EvictionBudget::Adaptive { alpha: 0.2 };
    let (heavy, recent) = (14, ROLLBACK + 1);
    let policies = [
        EvictionConfig::h2o(heavy, recent),
        EvictionConfig::h2o(50, recent),
        EvictionConfig::h2o_mean(heavy, recent),
        EvictionConfig::h2o(heavy, recent).with_budget(adaptive),
        EvictionConfig::combined(EvictionScore::Sum, 3, recent, heavy),
        EvictionConfig::combined(EvictionScore::KeyNorm, 3, recent, heavy),
        EvictionConfig::combined(EvictionScore::LastRow, 3, recent, heavy),
        EvictionConfig::snapkv_with(20, recent, 3, ScoreSmoothing::Average),
        EvictionConfig::snapkv_with(20, recent, 3, ScoreSmoothing::Max).with_budget(adaptive),
    ];
    for device in devices {
        let mha = attention(Pattern::causal(), device);
        for (seed, config) in some_of(policies.into_iter().enumerate(), 4) {
            let config = config.with_slack(9);
            println!("{config:?} on {device:?}");
            come_and_go(&mha, config, seed as u64, device);
        }
    }
}

fn come_and_go(mha: &SparseMultiHeadAttention, config: EvictionConfig, seed: u64, device: &Device) {
    let rng = &mut seeded(seed);
    let pool_of = |sequences| {
        let pool = KvPoolConfig::new(sequences, LONGEST)
            .with_page_size(16)
            .with_chunk(PROMPT)
            .with_rollback(ROLLBACK)
            .with_eviction(config);
        KvPool::for_attention(mha, &pool).unwrap()
    };
    let mut pool = pool_of(MOST);
    let mut pairs: Vec<Pair> = Vec::new();
    // Ensures that the run covers evictions and page boundaries.
    let (mut evicted, mut over_edges) = (0, 0);
    for round in 0..ROUNDS {
        while pairs.len() < MOST && (pairs.is_empty() || rng.random_bool(0.5)) {
            let mut alone = pool_of(1);
            let (id, alone_id) = (pool.join().unwrap(), alone.join().unwrap());
            pairs.push(Pair {
                id,
                alone,
                alone_id,
            });
        }
        for pair in &mut pairs {
            let len = pool.len(pair.id).unwrap();
            let back = rng.random_range(0..=ROLLBACK + 1).min(len);
            if back > 0 && rng.random_bool(0.4) {
                let gone = pool.truncate(pair.id, len - back).is_ok();
                let expected = pair.alone.truncate(pair.alone_id, len - back).is_ok();
                assert_eq!(gone, expected, "round {round}: {back} of {len} back");
                over_edges += usize::from(gone && (len - back) / 16 < len / 16);
            }
        }
        // Some of them, in random order, with different numbers of tokens.
        let mut chosen: Vec<usize> = (0..pairs.len()).filter(|_| rng.random_bool(0.7)).collect();
        for at in (1..chosen.len()).rev() {
            chosen.swap(at, rng.random_range(0..=at));
        }
        let counts: Vec<usize> = (chosen.iter())
            .map(|&at| match pool.len(pairs[at].id).unwrap() {
                0 => rng.random_range(1..=PROMPT),
                _ if rng.random_bool(0.5) => 1,
                _ => rng.random_range(1..=9),
            })
            .collect();
        let Some(&seq) = counts.iter().max() else {
            continue;
        };
        let numbers = (0..chosen.len() * seq * WIDTH).map(|_| rng.random_range(-1.0f32..1.0));
        let data =
            burn::tensor::TensorData::new(numbers.collect::<Vec<_>>(), [chosen.len(), seq, WIDTH]);
        let x = on_grid(Tensor::<3>::from_data(data, device));
        let steps = chosen.iter().zip(&counts);
        let steps = steps.map(|(&at, &count)| KvStep::new(pairs[at].id, count));
        let steps: Vec<KvStep> = steps.collect();
        let rows = pool.forward_attention(mha, x.clone(), &steps);
        pool.verify().unwrap();
        for (entry, (&at, &count)) in chosen.iter().zip(&counts).enumerate() {
            let Pair {
                id,
                alone,
                alone_id,
            } = &mut pairs[at];
            let own = |x: &Tensor<3>| x.clone().slice([entry..entry + 1, 0..count]);
            let step = [KvStep::new(*alone_id, count)];
            let expected = alone.forward_attention(mha, own(&x), &step);
            assert_close(own(&rows), expected, tolerance(device, 1e-4));
            let kept = pool.retained_positions(*id, 0).unwrap();
            let len = pool.len(*id).unwrap();
            evicted += usize::from(kept[0].len() < len);
            let expected = alone.retained_positions(*alone_id, 0).unwrap();
            assert_eq!(kept, expected, "round {round}");
            let sums = pool.attention_sums(*id, 0);
            let expected = alone.attention_sums(*alone_id, 0);
            assert_eq!(sums.is_some(), expected.is_some());
            if let (Some(sums), Some(expected)) = (sums, expected) {
                assert_close(sums, expected, tolerance(device, 1e-4));
            }
            let usage = |pool: &KvPool, id| pool.usage(id).unwrap().score_bytes;
            assert_eq!(usage(&pool, *id), usage(alone, *alone_id));
        }
        let ends = |pair: &Pair, pool: &KvPool| pool.len(pair.id).unwrap() > LONGEST - PROMPT;
        let gone: Vec<Pair>;
        (gone, pairs) = pairs
            .into_iter()
            .partition(|pair| ends(pair, &pool) || rng.random_bool(0.03));
        for pair in gone {
            pool.leave(pair.id).unwrap();
        }
    }
    assert!(evicted > 10 && over_edges > 3, "{evicted}, {over_edges}");
}
