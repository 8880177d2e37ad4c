//! Routing attention (attention within clusters).

use burn_sparse_transformer::content::{
    RoutingAttention, RoutingAttentionConfig, RoutingAttentionInput, RoutingHeads,
    RoutingHeadsConfig,
};

use crate::common::*;
use crate::golden::{
    assert_near, devices, differences, dot, filled, numbers, scattered, tensor, unit, vals,
};

/// Makes heads with these means, `[heads, clusters, dim]`.
fn heads(config: RoutingHeadsConfig, means: Tensor<3>) -> RoutingHeads {
    let [heads, clusters, dim] = means.dims();
    let config = config.with_clusters(Some(clusters));
    let mut routing = config.init(heads, dim, 1, &means.device());
    routing.means = Param::from_tensor(means).set_require_grad(false);
    routing
}

/// Returns the golden case: heads with the means at positions 0, 5, 10 and 15, queries and values.
fn golden(device: &Device, decay: f64) -> (RoutingHeads, Tensor<4>, Tensor<4>) {
    let [q, v] = [1, 2].map(|of| {
        let flat = vals(of, 16).concat();
        tensor(&flat, [1, 1, 16, 4], device, DType::F32)
    });
    let rows = vals(1, 16);
    let means = [0, 5, 10, 15].map(|i| unit(&rows[i])).concat();
    let means = tensor(&means, [1, 4, 4], device, DType::F32);
    let config = RoutingHeadsConfig::new(4)
        .with_means_decay(decay)
        .with_commitment(1.0);
    (heads(config, means), q, v)
}

#[test]
fn the_golden_case() {
    devices().iter().for_each(golden_on);
}

fn golden_on(device: &Device) {
    let (routing, q, v) = golden(device, 0.999);
    let clusters = routing.clusters(q.clone()).unwrap().into_data();
    let clusters: Vec<i32> = clusters.iter().collect();
    let expected = [0, 3, 4, 12, 3, 5, 7, 11, 2, 4, 8, 10, 1, 7, 14, 15];
    assert_eq!(clusters, expected);
    let out = routing.forward(q, v);
    assert!(out.commitment.is_none());
    let out = numbers(out.context);
    let row = |i: usize| &out[4 * i..4 * i + 4];
    // Position 5 sees only 3, and 6, 9 and 13 are in no cluster.
    assert_near("5", row(5), &[-0.875, 0.25, 1.375, -0.375], 5e-7);
    assert_near("10", row(10), &[0.1635, -0.5409, 0.6623, -0.0421], 5e-5);
    assert_near("15", row(15), &[0.1549, -0.7417, 0.3263, 0.3113], 5e-5);
    for i in [6, 9, 13] {
        assert_near("none", row(i), &[0.0; 4], 0.0);
    }
}

#[test]
fn means_follow_queries_in_training_alone() {
    let device = Device::flex().autodiff();
    for (decay, expected, tolerance) in [
        (0.999, [-0.694966, 0.624826, 0.347737, 0.069985], 1e-6),
        (0.5, [-0.6542, 0.2671, 0.4538, 0.3094], 5e-5),
    ] {
        let (mut routing, q, v) = golden(&device, decay);
        let before = numbers(routing.means.val());
        // An evaluation pass of a copy without autodiff.
        let [plain_q, plain_v] = [&q, &v].map(|x| x.clone().without_autodiff());
        let mut plain = routing.valid();
        plain.forward(plain_q, plain_v);
        plain.ema_update();
        routing.ema_update();
        assert_eq!(numbers(plain.means.val()), before);
        assert_eq!(numbers(routing.means.val()), before);
        // Two passes, like with recomputed blocks, move them once.
        let out = routing.forward(q.clone(), v.clone());
        routing.forward(q.clone(), v.clone());
        assert_eq!(numbers(routing.means.val()), before);
        let commitment = numbers(out.commitment.unwrap());
        assert_near("commitment", &commitment, &[0.209251], 5e-7);
        routing.ema_update();
        let after = numbers(routing.means.val());
        assert_near("mean 1", &after[4..8], &expected, tolerance);
        routing.ema_update();
        assert_eq!(numbers(routing.means.val()), after);
        assert!(!routing.means.val().is_require_grad());
    }
}

/// The tokens of a cluster are the most similar ones, in the order of their positions.
#[test]
fn clusters_are_those_of_a_sort() {
    let device = Device::flex();
    for (seq, window) in [(50, 9), (200, 64), (20, 1), (7, 16), (1, 3)] {
        let (x, means) = (scattered(6 * seq * 5, 7), scattered(3 * 6 * 5, 10));
        for dtype in [DType::F64, DType::F32] {
            let segment_mean = tensor(&means, [3, 6, 5], &device, dtype);
            let routing = heads(RoutingHeadsConfig::new(window), segment_mean);
            let got = routing.clusters(tensor(&x, [2, 3, seq, 5], &device, dtype));
            let got: Vec<i32> = got.unwrap().into_data().iter().collect();
            let mut expected = Vec::new();
            for (group, x) in x.chunks(seq * 5).enumerate() {
                for mean in means[group % 3 * 30..][..30].chunks(5) {
                    let similarity: Vec<f64> = x.chunks(5).map(|x| dot(&unit(x), mean)).collect();
                    let mut order: Vec<usize> = (0..seq).collect();
                    order.sort_by(|&a, &b| similarity[b].total_cmp(&similarity[a]));
                    order.truncate(window);
                    order.sort_unstable();
                    expected.extend(order.into_iter().map(|token| token as i32));
                }
            }
            assert_eq!(got, expected, "{seq}, {window}, {dtype:?}");
        }
    }
}

/// Clusters that are gathered in parts give the result of all at once: here even one cluster exceeds the size of a part.
#[test]
fn many_clusters_are_gathered_in_parts() {
    const WIDTH: usize = 8_188;
    let device = Device::flex();
    let q = tensor(&scattered(700 * 4, 7), [1, 1, 700, 4], &device, DType::F32);
    let v = scattered(700 * WIDTH, 9);
    let v = tensor(&v, [1, 1, 700, WIDTH], &device, DType::F32);
    let means = tensor(&scattered(7 * 4, 10), [1, 7, 4], &device, DType::F32);
    let routing = heads(RoutingHeadsConfig::new(100), means);
    let forward = |v: Tensor<4>| routing.forward(q.clone(), v).context;
    // The first eight columns alone, which fit into one part.
    let columns = |x: Tensor<4>| x.slice_dim(3, 0..8);
    assert_close(columns(forward(v.clone())), forward(columns(v)), 1e-5);
}

/// Gradients of the commitment loss equal finite differences. The suite compares those of attention.
#[test]
fn gradients_of_the_commitment_are_those_of_differences() {
    let device = Device::flex().autodiff();
    let all = [7, 8].map(|of| scattered(33, of));
    let rows = |x: &[f64]| tensor(x, [1, 1, 11, 3], &device, DType::F64).require_grad();
    let commitment = |[q, k]: [Tensor<4>; 2], shared: bool| {
        let means = tensor(&scattered(9, 10), [1, 3, 3], &device, DType::F64);
        let routing = heads(RoutingHeadsConfig::new(6).with_commitment(3.0), means);
        let out = match shared {
            true => routing.try_forward(q, k),
            false => routing.try_forward_unshared(q, k.clone(), k),
        };
        out.unwrap().commitment.unwrap()
    };
    for (shared, of) in [(true, 0), (false, 0), (false, 1)] {
        let leaves = all.each_ref().map(|x| rows(x));
        let grads = commitment(leaves.clone(), shared).backward();
        let got = numbers(leaves[of].grad(&grads).unwrap());
        let expected = differences(&all[of], |x| {
            let mut moved = leaves.clone();
            moved[of] = rows(x);
            numbers(commitment(moved, shared))[0]
        });
        assert_near(&format!("{shared}, {of}"), &got, &expected, 1e-7);
    }
}

/// K-means finds well separated groups of tokens, from any initial tokens.
#[test]
fn means_settle_where_tokens_are() {
    let (device, _guard) = seeded(Device::flex(), 6);
    let centre = |group: usize| [0, 1, 2, 3].map(|c| f64::from(u8::from(c == group)));
    let noise = scattered(2 * 60 * 4, 3).into_iter().enumerate();
    let x = noise.map(|(at, noise)| centre(at / 4 % 4)[at % 4] + 0.02 * noise);
    let x = tensor(&x.collect::<Vec<_>>(), [2, 1, 60, 4], &device, DType::F32);
    let settled = |seed: u64| {
        let mut routing = RoutingHeadsConfig::new(15).init(1, 4, 60, &device);
        routing.settle(x.clone(), seed).unwrap();
        numbers(routing.means.val())
    };
    assert_eq!(settled(1), settled(1));
    assert_ne!(settled(1), settled(2));
    let mut whole = 0;
    for seed in 0..10 {
        let means = settled(seed);
        for mean in means.chunks(4) {
            assert!((dot(mean, mean) - 1.0).abs() < 1e-5);
        }
        let found = |group: usize| means.chunks(4).any(|mean| dot(mean, &centre(group)) > 0.99);
        whole += usize::from((0..4).all(found));
    }
    // Some begin with two tokens of a group, which k-means does not separate; with probability 4!/4⁴ = 0.09 they begin in all four.
    assert!((1..10).contains(&whole), "{whole}");
    let mut many = RoutingHeadsConfig::new(1).with_clusters(Some(121));
    many.commitment = 0.0;
    refused! { many.init(1, 4, 60, &device).settle(x, 1u64) => "x must be of 121 tokens at least, as many as clusters, got 120"; }
}

fn module(device: &Device) -> RoutingAttention {
    let config = RoutingAttentionConfig::new(16, 2, 8, 48).with_means_decay(0.5);
    config.init(device)
}

#[test]
fn a_module_is_repeatable_and_its_record_holds_the_means() {
    let device = Device::flex().autodiff();
    let run = || {
        let _guard = seed(&device, 5);
        let mut attention = filled(module(&device));
        let x = tensor(&scattered(2 * 40 * 16, 4), [2, 40, 16], &device, DType::F32);
        attention.settle(x.clone(), 3u64).unwrap();
        let out = attention.forward(RoutingAttentionInput::new(x.clone()));
        let loss = (out.context.clone() * out.context).sum() + out.commitment.unwrap();
        let grads = loss.backward();
        let by_query = attention.query.weight.val().grad(&grads).unwrap();
        attention.ema_update();
        (attention, x, numbers(by_query))
    };
    let (attention, x, by_query) = run();
    assert!(by_query.iter().all(|x| x.is_finite()) && by_query.iter().any(|x| x.abs() > 1e-6));
    for _ in 0..3 {
        let (again, _, gradient) = run();
        assert!(gradient == by_query);
        let [again, first] = [&again, &attention].map(|it| numbers(it.heads.means.val()));
        assert!(again == first);
    }
    let [heads, clusters, dim] = attention.heads.means.val().dims();
    assert_eq!([heads, clusters, dim], [2, 6, 8]);
    let _guard = seed(&device, 9);
    let loaded = module(&device).load_record(attention.clone().into_record());
    let forward = |attention: &RoutingAttention| {
        let input = RoutingAttentionInput::new(x.clone());
        attention.forward(input).context
    };
    assert_close(forward(&loaded), forward(&attention), 0.0);
    let mut shifted = attention.clone();
    shifted.heads.means = shifted.heads.means.map(|means| -means);
    assert!(apart(forward(&shifted), forward(&attention)) > 1e-3);
}

/// One cluster contains everything, so rounding changes no selection.
#[test]
fn half_precision_is_near() {
    let (device, _guard) = seeded(Device::flex().autodiff(), 10);
    let x = tensor(&scattered(40 * 16, 4), [1, 40, 16], &device, DType::F32);
    let run = |precision| {
        let config = RoutingAttentionConfig::new(16, 2, 40, 40).with_precision(precision);
        let attention = filled(config.init(&device));
        let out = attention.forward(RoutingAttentionInput::new(x.clone()));
        let commitment = numbers(out.commitment.clone().unwrap());
        let grads = (out.context.clone() * out.context.clone()).sum().backward();
        let by_query = attention.query.weight.val().grad(&grads).unwrap();
        assert_eq!(out.context.dtype(), DType::F32);
        (numbers(out.context), numbers(by_query), commitment)
    };
    let (out, by_query, commitment) = run(Precision::F32);
    let (near, near_by_query, near_commitment) = run(Precision::Bf16);
    let largest = |x: &[f64]| x.iter().fold(0.0, |a: f64, b| a.max(b.abs()));
    assert!(out != near);
    assert_near("out", &near, &out, 0.02 * largest(&out));
    let most = 0.05 * largest(&by_query);
    assert_near("by query", &near_by_query, &by_query, most);
    assert_near("commitment", &near_commitment, &commitment, 1e-6);
}

#[test]
fn bad_numbers_and_shapes_are_refused() {
    let device = Device::flex();
    let config = || RoutingAttentionConfig::new(16, 2, 8, 48);
    refused! {
        config().with_causal(false).with_shared_qk(Some(true)).try_init(&device) => "shared_qk must be false without causal attention…";
        RoutingAttentionConfig::new(16, 2, 0, 48).try_init(&device) => "window must be at least 1, got 0…";
        config().with_clusters(Some(0)).try_init(&device) => "clusters must be at least 1, got 0…";
        RoutingAttentionConfig::new(16, 2, 8, 0).try_init(&device) => "context must be at least 1, got 0…";
        RoutingAttentionConfig::new(15, 2, 8, 48).try_init(&device) => "d_model must be a positive multiple…";
        config().with_means_decay(1.5).try_init(&device) => "means_decay must be from 0 to 1, got 1.5…";
        config().with_means_decay(f64::NAN).try_init(&device) => "means_decay must be from 0 to 1, got NaN…";
        config().with_commitment(-1.0).try_init(&device) => "commitment must be at least 0 and finite, got -1…";
        config().with_clusters(Some(1 << 29)).try_init(&device) => "clusters must be such that clusters · window is at most 2³⁰…";
    }
    let _guard = seed(&device, 7);
    let attention = config().init(&device);
    let forward = |input| attention.try_forward(input);
    let x = Tensor::<3>::zeros([2, 5, 16], &device);
    refused! { forward(RoutingAttentionInput::new(x.clone()).lengths([5, 3])) => "padding must be none with clusters…"; }
    assert!(forward(RoutingAttentionInput::new(x).lengths([5, 5])).is_ok());
    refused! { forward(RoutingAttentionInput::new(Tensor::zeros([2, 5, 15], &device))) => "x must be [batch ≥ 1, seq ≥ 1, d_model = 16], got [2, 5, 15]"; }
    let q = Tensor::<4>::zeros([1, 3, 5, 8], &device);
    refused! { attention.heads.try_forward(q.clone(), q) => "query must be [batch ≥ 1, heads = 2…"; }
}

/// Without causality, keys have their own projection, and later tokens are seen.
#[test]
fn attention_that_is_not_causal_has_keys() {
    let (device, _guard) = seeded(Device::flex(), 8);
    let config = RoutingAttentionConfig::new(16, 2, 16, 32).with_causal(false);
    let mut attention = config.init(&device);
    assert!(attention.key.is_some());
    let x = random([1, 32, 16], &device);
    attention.settle(x.clone(), 1u64).unwrap();
    let forward = |x: Tensor<3>| attention.forward(RoutingAttentionInput::new(x)).context;
    let last = Tensor::cat(
        vec![x.clone().slice_dim(1, 0..31), random([1, 1, 16], &device)],
        1,
    );
    let rows = |x| forward(x).slice_dim(1, 0..31);
    assert!(apart(rows(last), rows(x)) > 1e-4);
}
