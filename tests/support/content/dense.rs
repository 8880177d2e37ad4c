//! Hash and cluster attention against dense attention with masks made on the host: outputs, lse and gradients.

use std::num::NonZeroUsize;

use burn::module::Param;
use burn::tensor::activation::softmax;
use burn_sparse_transformer::content::{LshOptions, RoutingHeadsConfig, lsh_attention};

use crate::prelude::*;

/// Score of masked pairs.
const NOTHING: f64 = -1e30;

/// Returns each device with its exact dtypes, except f64 on CUDA: the interpreter of its kernels lacks f64 powers.
fn compared(devices: &[Device]) -> impl Iterator<Item = (&Device, DType, f64)> {
    exact(devices).filter(|&(device, dtype, _)| dtype == DType::F32 || !is_cuda(device))
}

/// Multiplies `[.., n, m]` and `[.., m, w]` elementwise, because devices round factors of matmuls.
fn product(a: Tensor<4>, b: Tensor<4>) -> Tensor<4> {
    let [batch, heads, n, _] = a.dims();
    let [.., width] = b.dims();
    let a = a.unsqueeze_dim::<5>(4);
    let b = b.unsqueeze_dim::<5>(2);
    (a * b).sum_dim(3).reshape([batch, heads, n, width])
}

fn unit(x: Tensor<4>) -> Tensor<4> {
    x.clone() / x.square().sum_dim(3).sqrt()
}

/// Computes attention with keys scaled to norm 1; returns out and lse `[.., 1]`. `shares`, `[batch, heads, n, n]`, multiply the weights, and pairs
/// of 0 are masked. Rows without a pair get `alone` and its lse.
fn dense(
    [q, k, v]: [&Tensor<4>; 3],
    shares: &[f64],
    alone: (Tensor<4>, f64),
) -> (Tensor<4>, Tensor<4>) {
    let [batch, heads, n, dim] = q.dims();
    let device = q.device().without_autodiff();
    let hidden: Vec<bool> = shares.iter().map(|&share| share == 0.0).collect();
    let empty: Vec<bool> = hidden.chunks(n).map(|row| !row.contains(&false)).collect();
    let hidden = bools(&hidden, [batch, heads, n, n], &device);
    let empty = bools(&empty, [batch, heads, n, 1], &device);
    let shares = tensor(shares, [batch, heads, n, n], &q.device(), q.dtype());
    // Multiplied, not divided by the root: Burn's gradient of a division by a number has that number in f32.
    let scale = 1.0 / (dim as f64).sqrt();
    let scores = product(q.clone(), unit(k.clone()).swap_dims(2, 3)) * scale;
    let scores = scores.mask_fill(hidden, NOTHING);
    let max = scores.clone().max_dim(3).detach();
    let weights = (scores - max.clone()).exp() * shares;
    let sum = weights.clone().sum_dim(3).mask_fill(empty.clone(), 1.0);
    let out = product(weights / sum.clone(), v.clone());
    let out = out.mask_where(empty.clone().expand(v.dims()), alone.0);
    (out, (max + sum.log()).mask_fill(empty, alone.1))
}

/// Returns the products of a row with the columns of a rotation, and their negatives.
fn hashes(x: &[f64], rotation: &[f64], half: usize) -> Vec<f64> {
    let column = |e: usize| {
        let products = x
            .iter()
            .enumerate()
            .map(|(c, x)| x * rotation[c * half + e]);
        products.sum::<f64>()
    };
    let columns: Vec<f64> = (0..half).map(column).collect();
    let opposites = columns.iter().map(|x| -x).collect();
    [columns, opposites].concat()
}

/// Draws a row whose buckets no rounding of products can change.
fn decided(dim: usize, rotations: &[f64], half: usize, rng: &mut ChaCha8Rng) -> Vec<f64> {
    loop {
        let row = drawn(rng, dim, -1.0..1.0);
        let clear = rotations.chunks(dim * half).all(|rotation| {
            let mut all = hashes(&row, rotation, half);
            all.sort_by(|a, b| b.total_cmp(a));
            all[0] - all[1] > 0.02
        });
        if clear {
            return row;
        }
    }
}

/// Returns the pairs that a round of hashing finds, for one head.
fn hashed(qk: &[&[f64]], rotation: &[f64], half: usize, options: LshOptions) -> Vec<bool> {
    let (n, size) = (qk.len(), options.bucket.get());
    let bucket_of = |x: &&[f64]| {
        let first = |best: (usize, f64), (at, x)| if x > best.1 { (at, x) } else { best };
        let all = hashes(x, rotation, half);
        all.into_iter().enumerate().fold((0, f64::MIN), first).0
    };
    let buckets: Vec<usize> = qk.iter().map(bucket_of).collect();
    let mut order: Vec<usize> = (0..n).collect();
    order.sort_by_key(|&i| buckets[i]);
    let mut chunk = vec![0; n];
    (order.iter().enumerate()).for_each(|(place, &i)| chunk[i] = place / size);
    let chunks = n.div_ceil(2 * size) * 2;
    let sees = |i: usize, j: usize| {
        let allowed = if options.causal { j < i } else { j != i };
        let is_near = chunk[j] == chunk[i] || (chunk[j] + 1) % chunks == chunk[i];
        allowed && is_near && (!options.own_bucket || buckets[i] == buckets[j])
    };
    (0..n * n).map(|pair| sees(pair / n, pair % n)).collect()
}

/// Out, lse and gradients of hash rounds, for all variants, with full and partial last chunks.
pub fn hashes_equal_dense_attention(devices: &[Device]) {
    let cases = [
        ([96, 16, 3, 3], [16, 24]),
        ([70, 10, 4, 2], [16, 24]),
        ([33, 8, 2, 1], [5, 3]),
        ([3, 16, 1, 2], [16, 24]),
        ([1, 4, 2, 3], [5, 3]),
    ];
    for ([seq, bucket, half, rounds], [dim, value_dim]) in cases {
        let [batch, heads] = [2, 2];
        let mut rng = seeded(8100 + seq as u64);
        let groups = batch * heads;
        let widths = [value_dim, value_dim, 1];
        let [v, by_out, by_lse] =
            widths.map(|width| drawn(&mut rng, groups * seq * width, -1.0..1.0));
        let rotations = drawn(&mut rng, rounds * dim * half, -1.0..1.0);
        let rows = (0..groups * seq).flat_map(|_| decided(dim, &rotations, half, &mut rng));
        let qk: Vec<f64> = rows.collect();
        for variant in 0..8 {
            let options = (LshOptions::new(NonZeroUsize::new(bucket).unwrap()))
                .causal(variant & 1 == 0)
                .dedup(variant & 2 == 0)
                .own_bucket(variant & 4 == 0);
            let of_round = |rotation: &[f64]| -> Vec<bool> {
                let of_head = |qk: &[f64]| {
                    let rows: Vec<&[f64]> = qk.chunks(dim).collect();
                    hashed(&rows, rotation, half, options)
                };
                qk.chunks(seq * dim).flat_map(of_head).collect()
            };
            let seen: Vec<Vec<bool>> = rotations.chunks(dim * half).map(of_round).collect();
            // A pair that several rounds find is divided among them.
            let share = |seen: &[bool], pair: usize, all: &[Vec<bool>]| match seen[pair] {
                false => 0.0,
                true if options.dedup => 1.0 / all.iter().filter(|seen| seen[pair]).count() as f64,
                true => 1.0,
            };
            let shares: Vec<Vec<f64>> = (seen.iter())
                .map(|own| (0..own.len()).map(|pair| share(own, pair, &seen)).collect())
                .collect();
            for (device, dtype, tolerance) in compared(devices) {
                let device = device.clone().autodiff();
                let rows = |x: &[f64], width| tensor(x, [batch, heads, seq, width], &device, dtype);
                let run = |kernels: bool| {
                    let qk = rows(&qk, dim).require_grad();
                    let v = rows(&v, value_dim).require_grad();
                    let (out, lse) = match kernels {
                        true => {
                            let plain = device.clone().without_autodiff();
                            let rotations = tensor(&rotations, [rounds, dim, half], &plain, dtype);
                            lsh_attention(qk.clone(), v.clone(), rotations, options).unwrap()
                        }
                        false => {
                            let parts: Vec<_> = (shares.iter())
                                .map(|shares| dense([&qk, &qk, &v], shares, (v.clone(), -5e4)))
                                .collect();
                            let lses: Vec<_> = parts.iter().map(|(_, lse)| lse.clone()).collect();
                            let lses = Tensor::cat(lses, 3);
                            let shares = softmax(lses.clone(), 3);
                            let outs = parts.into_iter().enumerate().map(|(round, (out, _))| {
                                out * shares.clone().slice_dim(3, round..round + 1)
                            });
                            let max = lses.clone().max_dim(3).detach();
                            let total = (lses - max.clone()).exp().sum_dim(3).log() + max;
                            let out = outs.reduce(|a, b| a + b).unwrap();
                            (out, total.reshape([batch, heads, seq]))
                        }
                    };
                    let by_lse = rows(&by_lse, 1).reshape([batch, heads, seq]);
                    let by_out = rows(&by_out, value_dim);
                    let loss = (out.clone() * by_out).sum() + (lse.clone() * by_lse).sum();
                    let grads = loss.backward();
                    let by = |x: &Tensor<4>| x.grad(&grads).unwrap().into_data();
                    let names = ["out", "lse", "by qk", "by v"].into_iter();
                    names.zip([out.into_data(), lse.into_data(), by(&qk), by(&v)])
                };
                let what = format!("{seq}, {options:?}, {dtype:?}, {device:?}");
                // These variants use Burn's matmuls.
                let by_products = options.own_bucket || options.dedup && rounds > 1;
                let within = match by_products {
                    true => product_tolerance(&device, dtype, 10.0 * tolerance),
                    false => 10.0 * tolerance,
                };
                assert_alike(&what, run(true), run(false), within);
            }
        }
    }
}

/// Keys that the queries of a cluster see.
#[derive(Clone, Copy, PartialEq, Debug)]
enum Clusters {
    /// Queries are also keys: those before them, and for the first itself.
    Shared,
    /// Keys have their own clusters; all of them.
    Keys,
    /// Keys have their own clusters; those up to the query's position.
    KeysUpTo,
}

/// Out and gradients of clusters, of queries alone and of queries and of keys.
pub fn clusters_equal_dense_attention(devices: &[Device]) {
    let cases = [
        ([90, 16, 5], [16, 16]),
        ([50, 9, 4], [5, 6]),
        ([20, 32, 2], [16, 16]),
        ([20, 1, 6], [16, 24]),
        ([1, 3, 6], [5, 6]),
    ];
    for ([seq, window, clusters], [dim, value_dim]) in cases {
        let [batch, heads] = [2, 2];
        let mut rng = seeded(8200 + seq as u64);
        let rows = batch * heads * seq;
        let widths = [dim, dim, value_dim, value_dim];
        let [q, k, v, by_out] = widths.map(|width| drawn(&mut rng, rows * width, -1.0..1.0));
        let means = drawn(&mut rng, heads * clusters * dim, -1.0..1.0);
        let width = window.min(seq);
        for (device, dtype, tolerance) in compared(devices) {
            let device = device.clone().autodiff();
            let config = RoutingHeadsConfig::new(window).with_clusters(Some(clusters));
            let mut routing = config.try_init(heads, dim, 1, &device).unwrap();
            let means = tensor(&means, [heads, clusters, dim], &device, dtype);
            routing.means = Param::from_tensor(means).set_require_grad(false);
            let leaf = |x: &[f64], width| tensor(x, [batch, heads, seq, width], &device, dtype);
            let taken = |x: &[f64]| -> Vec<i32> {
                let tokens: Tensor<4, Int> = routing.clusters(leaf(x, dim)).unwrap();
                read_ints(tokens)
            };
            for kind in [Clusters::Shared, Clusters::Keys, Clusters::KeysUpTo] {
                let is_shared = kind == Clusters::Shared;
                let k = if is_shared { &q } else { &k };
                let (queries, keys) = (taken(&q), taken(k));
                let run = |kernels: bool| {
                    let [q, k, v] = [(&q, dim), (k, dim), (&v, value_dim)]
                        .map(|(x, width)| leaf(x, width).require_grad());
                    let out = if kernels {
                        let [q, k, v] = [&q, &k, &v].map(Clone::clone);
                        let made = match kind {
                            Clusters::Shared => routing.try_forward(q, v),
                            Clusters::Keys => routing.try_forward_unshared(q, k, v),
                            Clusters::KeysUpTo => routing.try_forward_unshared_causal(q, k, v),
                        };
                        made.unwrap().context
                    } else {
                        let mut counts = vec![0.0f64; rows];
                        let mut sum = v.zeros_like();
                        let keys_of = if is_shared { &q } else { &k };
                        for cluster in 0..clusters {
                            let mut shares = vec![0.0; rows * seq];
                            for group in 0..batch * heads {
                                let first = (group * clusters + cluster) * width;
                                let keys = &keys[first..first + width];
                                for (place, &i) in queries[first..first + width].iter().enumerate()
                                {
                                    let row = group * seq + i as usize;
                                    counts[row] += 1.0;
                                    let is_seen = |j: i32| match kind {
                                        Clusters::Shared => j < i || place == 0 && j == i,
                                        Clusters::Keys => true,
                                        Clusters::KeysUpTo => j <= i,
                                    };
                                    for &j in keys.iter().filter(|&&j| is_seen(j)) {
                                        shares[row * seq + j as usize] = 1.0;
                                    }
                                }
                            }
                            let nothing = v.zeros_like();
                            sum = sum + dense([&q, keys_of, &v], &shares, (nothing, 0.0)).0;
                        }
                        let parts: Vec<f64> = counts.iter().map(|x| 1.0 / x.max(1.0)).collect();
                        sum * leaf(&parts, 1)
                    };
                    let grads = (out.clone() * leaf(&by_out, value_dim)).sum().backward();
                    let by = |(name, x): (_, &Tensor<4>)| Some((name, x.grad(&grads)?.into_data()));
                    let gradients = [("by q", &q), ("by k", &k), ("by v", &v)];
                    let gradients: Vec<_> = gradients.into_iter().filter_map(by).collect();
                    assert_eq!(gradients.len(), if is_shared { 2 } else { 3 });
                    [("out", out.into_data())].into_iter().chain(gradients)
                };
                let what = format!("{seq}, {window}, {kind:?}, {dtype:?}, {device:?}");
                assert_alike(&what, run(true), run(false), 10.0 * tolerance);
            }
        }
    }
}
