//! Clusters and hashes on planted structure: how much of full attention they keep, against numbers that were computed elsewhere.

use burn::module::Param;
use burn::tensor::{DType, Device, Tensor};
use burn_sparse_transformer::content::{LshOptions, RoutingHeadsConfig, lsh_attention};

use crate::golden::{dot, numbers, tensor, unit};

const ROWS: usize = 1024;
const DIM: usize = 64;
const BLOCK: usize = 64;
/// Rows that are counted.
const COUNTED: std::ops::Range<usize> = ROWS / 2..ROWS;

/// The finaliser of MurmurHash3.
fn mix(mut x: u32) -> u32 {
    x ^= x >> 16;
    x = x.wrapping_mul(0x85eb_ca6b);
    x ^= x >> 13;
    x = x.wrapping_mul(0xc2b2_ae35);
    x ^ x >> 16
}

fn uniform(of: usize, head: usize, i: usize, c: usize) -> f64 {
    let place = ((8 * of + head) * 65_536 + i) * 256 + c;
    f64::from(mix(place as u32) >> 8) / f64::from(1 << 23) - 1.0
}

/// Blocks of four topics: rows of queries of a head, and of keys.
fn topics(head: usize) -> [Vec<Vec<f64>>; 2] {
    let lean = |i: usize, c: usize| uniform(2, 0, mix((i / BLOCK) as u32) as usize % 4, c);
    let rows = |of: &dyn Fn(usize, usize) -> f64| -> Vec<Vec<f64>> {
        let row = |i| (0..DIM).map(|c| of(i, c)).collect();
        (0..ROWS).map(row).collect()
    };
    [
        rows(&|i, c| uniform(0, head, i, c) + 1.5 * lean(i, c)),
        rows(&|i, c| uniform(1, 0, i, c) + lean(i, c)),
    ]
}

/// The share of a row's attention that what is seen has.
fn share(scores: &[f64], is_seen: impl Fn(usize) -> bool) -> f64 {
    let max = scores.iter().fold(f64::MIN, |a, &b| a.max(b));
    let weights: Vec<f64> = scores.iter().map(|x| (x - max).exp()).collect();
    let seen = weights.iter().enumerate().filter(|(j, _)| is_seen(*j));
    seen.map(|(_, weight)| weight).sum::<f64>() / weights.iter().sum::<f64>()
}

#[test]
fn hashes_find_topics() {
    let device = Device::flex();
    let [_, k] = topics(0);
    // Keys are as long as 1 and scores have a factor of 1/8: queries that are 16 times as long have one of 2.
    let long: Vec<f64> = k.iter().flatten().map(|x| 16.0 * x).collect();
    let qk = tensor(&long, [1, 1, ROWS, DIM], &device, DType::F32);
    let keys: Vec<Vec<f64>> = k.iter().map(|k| unit(k)).collect();
    let full: Vec<f64> = COUNTED
        .map(|i| {
            let scores: Vec<f64> = (0..i).map(|j| 2.0 * dot(&k[i], &keys[j])).collect();
            let max = scores.iter().fold(f64::MIN, |a, &b| a.max(b));
            max + scores.iter().map(|x| (x - max).exp()).sum::<f64>().ln()
        })
        .collect();
    for (rounds, expected) in [(1, 0.2148), (2, 0.4402), (4, 0.6974), (8, 0.8921)] {
        let rotations: Vec<f64> = (0..rounds * DIM * 8)
            .map(|at| uniform(6, at / (DIM * 8), at / 8 % DIM, at % 8))
            .collect();
        let rotations = tensor(&rotations, [rounds, DIM, 8], &device, DType::F32);
        let options = LshOptions::new(BLOCK.try_into().unwrap()).dedup(true);
        let (_, lse) = lsh_attention(qk.clone(), qk.clone(), rotations, options).unwrap();
        let lse = numbers(lse);
        let recall = COUNTED
            .map(|i| (lse[i] - full[i - ROWS / 2]).exp())
            .sum::<f64>();
        let recall = recall / COUNTED.len() as f64;
        assert!((recall - expected).abs() < 5e-4, "{rounds}: {recall}");
    }
}

/// Ten iterations of k-means are ten updates in which nothing of a mean stays.
#[test]
fn clusters_find_topics() {
    let device = Device::flex().autodiff();
    for (head, expected, density) in [(0, 0.8128, 0.244), (1, 0.8010, 0.251)] {
        let [q, k] = topics(head);
        let config = RoutingHeadsConfig::new(256).with_means_decay(0.0);
        let mut routing = config.init(1, DIM, ROWS, &device);
        let first: Vec<f64> = [0, 64, 128, 256]
            .iter()
            .flat_map(|&i| unit(&q[i]))
            .collect();
        let first = tensor(&first, [1, 4, DIM], &device, DType::F32);
        routing.means = Param::from_tensor(first).set_require_grad(false);
        let [tq, tk]: [Tensor<4>; 2] =
            [&q, &k].map(|x| tensor(&x.concat(), [1, 1, ROWS, DIM], &device, DType::F32));
        for _ in 0..10 {
            let value = tk.clone().slice_dim(3, 0..1);
            routing.forward_unshared(tq.clone(), tk.clone(), value);
            routing.ema_update();
        }
        // Whether each token is in each cluster.
        let members = |x: Tensor<4>| {
            let tokens: Vec<i32> = routing.clusters(x).unwrap().into_data().iter().collect();
            let mut members = vec![[false; 4]; ROWS];
            for (place, token) in tokens.into_iter().enumerate() {
                members[token as usize][place / 256] = true;
            }
            members
        };
        let [of_queries, of_keys] = [tq, tk].map(members);
        let is_seen = |i: usize, j: usize| (0..4).any(|c| of_queries[i][c] && of_keys[j][c]);
        let (mut recall, mut seen, mut pairs) = (0.0, 0, 0);
        for i in COUNTED {
            let scores: Vec<f64> = (0..=i).map(|j| dot(&q[i], &k[j]) / 8.0).collect();
            recall += share(&scores, |j| is_seen(i, j)) / COUNTED.len() as f64;
            seen += (0..=i).filter(|&j| is_seen(i, j)).count();
            pairs += i + 1;
        }
        let got = seen as f64 / pairs as f64;
        assert!((recall - expected).abs() < 5e-4, "{head}: {recall}");
        assert!((got - density).abs() < 1e-3, "{head}: {got}");
    }
}
