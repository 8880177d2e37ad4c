//! Pools that evict keys: queries see what is kept, and scores are what attention gives.

use std::sync::Arc;

use burn::module::Param;
use burn::nn::Linear;
use burn::tensor::{Device, Distribution, Tensor, Tolerance};
use burn_sparse_transformer::{
    EvictionBudget, EvictionConfig, KvPool, KvPoolConfig, KvStep, Pattern, SparseMhaInput,
    SparseMultiHeadAttention, SparseMultiHeadAttentionConfig, VotePool,
};

const HEADS: usize = 4;
const KV_HEADS: usize = 2;
const WIDTH: usize = 32;
const SEQ: usize = 41;

fn attention(pattern: Pattern, device: &Device) -> SparseMultiHeadAttention {
    device.seed(3);
    let config = SparseMultiHeadAttentionConfig::new(WIDTH, HEADS, pattern)
        .with_block_size(8)
        .with_n_kv_heads(Some(KV_HEADS));
    let mut mha = config.init(device).unwrap();
    let random = |linear: &mut Linear| {
        let weight = linear.weight.val();
        let distribution = Distribution::Normal(0.0, 0.3);
        linear.weight = Param::from_tensor(weight.random_like(distribution));
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

fn assert_close<const D: usize>(a: Tensor<D>, b: Tensor<D>, tolerance: f32) {
    let tolerance = Tolerance::absolute(tolerance).set_relative(tolerance);
    a.into_data()
        .assert_approx_eq::<f32>(&b.into_data(), tolerance);
}

fn pool(mha: &SparseMultiHeadAttention, config: EvictionConfig) -> KvPool {
    let pool = KvPoolConfig::new(1, SEQ)
        .with_page_size(16)
        .with_chunk(20)
        .with_eviction(config);
    KvPool::for_attention(mha, &pool).unwrap()
}

/// After a prompt, single tokens and several at once rows are those of one call whose queries see the keys that were kept.
pub fn queries_see_the_keys_that_stay(devices: &[Device]) {
    let adaptive = EvictionBudget::Adaptive { alpha: 0.2 };
    for device in devices {
        for config in [
            EvictionConfig::h2o(6, 4),
            EvictionConfig::h2o_mean(6, 4).with_budget(adaptive),
            EvictionConfig::tova(9),
            EvictionConfig::snapkv_with(10, 3, 3, VotePool::Average),
            EvictionConfig::key_norm(8),
        ] {
            let config = config.with_slack(3);
            let mha = attention(Pattern::causal(), device);
            let x = Tensor::<3>::random([1, SEQ, WIDTH], Distribution::Default, device);
            let mut pool = pool(&mha, config);
            let id = pool.join().unwrap();
            let calls = [vec![18], vec![1; 14], vec![6], vec![1; 3]].concat();
            let mut seen: [Vec<Vec<usize>>; KV_HEADS] = Default::default();
            let mut rows = Vec::new();
            let mut first = 0;
            for count in calls {
                let kept = pool.kept_positions(id, 0).unwrap();
                for (seen, kept) in seen.iter_mut().zip(kept) {
                    let row = |i: usize| kept.iter().copied().chain(first..=i).collect();
                    seen.extend((first..first + count).map(row));
                }
                let input = x.clone().narrow(1, first, count);
                let steps = [KvStep::new(id, count)];
                rows.push(mha.forward_pool(input, &steps, &mut pool).unwrap().context);
                pool.verify().unwrap();
                first += count;
            }
            let stored: usize = pool
                .kept_positions(id, 0)
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
            let whole = masked.forward(SparseMhaInput::self_attn(x)).unwrap();
            let what = format!("{config:?} on {device:?}");
            println!("{what}");
            assert_close(Tensor::cat(rows, 1), whole.context, 1e-4);
        }
    }
}

/// What keys got of the attention is the same from a prompt at once and from its tokens one by one.
pub fn sums_of_attention_are_the_same_by_both_roads(devices: &[Device]) {
    for device in devices {
        let mha = attention(Pattern::causal(), device);
        let x = Tensor::<3>::random([1, 20, WIDTH], Distribution::Default, device);
        let sums = |calls: &[usize]| {
            let mut pool = pool(&mha, EvictionConfig::h2o(20, 20));
            let id = pool.join().unwrap();
            for &count in calls {
                let input = x.clone().narrow(1, pool.len(id).unwrap(), count);
                mha.forward_pool(input, &[KvStep::new(id, count)], &mut pool)
                    .unwrap();
            }
            pool.attention_sums(id, 0).unwrap().narrow(1, 0, 20)
        };
        let whole = sums(&[20]);
        let total: f32 = whole.clone().sum().into_scalar();
        assert!((total - (HEADS * 20) as f32).abs() < 1e-3, "{total}");
        println!("sums on {device:?}");
        assert_close(sums(&[1; 20]), whole.clone(), 1e-5);
        assert_close(sums(&[7, 1, 9, 3]), whole, 1e-5);
    }
}
