//! Hashes and clusters against dense attention with masks that the host makes of them: outputs, lse and gradients.

use std::num::NonZeroUsize;

use burn::module::Param;
use burn::tensor::activation::softmax;
use burn_sparse_transformer::content::{LshOptions, RoutingHeadsConfig, lsh_attention};

use crate::prelude::*;

/// What a score weighs that is not there.
const NOTHING: f64 = -1e30;

fn tensor<const D: usize>(x: &[f64], dims: [usize; D], device: &Device) -> Tensor<D> {
    let data = TensorData::new(x.to_vec(), dims).convert_dtype(DType::F32);
    Tensor::from_data(data, (device, DType::F32))
}

/// `[.., n, m]` times `[.., m, w]`, one product at a time: devices round factors of products to fewer bits.
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

/// Attention to the pairs of `seen`, `[batch, heads, n, n]`, with keys that are made as long as 1: out, and lse `[.., 1]`; rows without a pair have `alone`, and
/// its lse.
fn dense(
    [q, k, v]: [&Tensor<4>; 3],
    seen: &[bool],
    alone: (Tensor<4>, f64),
) -> (Tensor<4>, Tensor<4>) {
    let [batch, heads, n, dim] = q.dims();
    let hidden: Vec<bool> = seen.iter().map(|seen| !seen).collect();
    let data = TensorData::new(hidden, [batch, heads, n, n]);
    let hidden = Tensor::<4, Bool>::from_data(data, &q.device().without_autodiff());
    let empty: Vec<bool> = (seen.chunks(n)).map(|row| !row.contains(&true)).collect();
    let data = TensorData::new(empty, [batch, heads, n, 1]);
    let empty = Tensor::<4, Bool>::from_data(data, &q.device().without_autodiff());
    let scores = product(q.clone(), unit(k.clone()).swap_dims(2, 3)) / (dim as f64).sqrt();
    let scores = scores.mask_fill(hidden.clone(), NOTHING);
    let max = scores.clone().max_dim(3).detach();
    let weights = (scores - max.clone()).exp().mask_fill(hidden, 0.0);
    let sum = weights.clone().sum_dim(3).mask_fill(empty.clone(), 1.0);
    let out = product(weights / sum.clone(), v.clone());
    let out = out.mask_where(empty.clone().expand(v.dims()), alone.0);
    (out, (max + sum.log()).mask_fill(empty, alone.1))
}

/// The products of a row with the columns of a rotation, and those with their opposites.
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

/// A row whose buckets are not in doubt, whatever products are rounded to.
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

/// The pairs that a round of hashing finds, of one head.
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
        allowed && is_near
    };
    (0..n * n).map(|pair| sees(pair / n, pair % n)).collect()
}

/// Out, lse and gradients of rounds of hashes.
pub fn hashes_equal_dense_attention(devices: &[Device]) {
    for (seq, bucket, half, rounds) in
        [(96, 16, 3, 3), (70, 10, 4, 2), (33, 8, 2, 1), (3, 16, 1, 2)]
    {
        let [batch, heads, dim, value_dim] = [2, 2, 16, 24];
        let mut rng = seeded(8100 + seq as u64);
        let groups = batch * heads;
        let widths = [value_dim, value_dim, 1];
        let [v, by_out, by_lse] =
            widths.map(|width| drawn(&mut rng, groups * seq * width, -1.0..1.0));
        let rotations = drawn(&mut rng, rounds * dim * half, -1.0..1.0);
        let rows = (0..groups * seq).flat_map(|_| decided(dim, &rotations, half, &mut rng));
        let qk: Vec<f64> = rows.collect();
        for causal in [true, false] {
            let options = LshOptions::new(NonZeroUsize::new(bucket).unwrap()).causal(causal);
            let seen: Vec<Vec<bool>> = (rotations.chunks(dim * half))
                .map(|rotation| {
                    let of_head = |qk: &[f64]| {
                        let rows: Vec<&[f64]> = qk.chunks(dim).collect();
                        hashed(&rows, rotation, half, options)
                    };
                    qk.chunks(seq * dim).flat_map(of_head).collect()
                })
                .collect();
            for device in with(devices, DType::F32) {
                let device = device.clone().autodiff();
                let run = |kernels: bool| {
                    let qk = tensor(&qk, [batch, heads, seq, dim], &device).require_grad();
                    let v = tensor(&v, [batch, heads, seq, value_dim], &device).require_grad();
                    let (out, lse) = match kernels {
                        true => {
                            let plain = device.clone().without_autodiff();
                            let rotations = tensor(&rotations, [rounds, dim, half], &plain);
                            lsh_attention(qk.clone(), v.clone(), rotations, options).unwrap()
                        }
                        false => {
                            let parts: Vec<_> = (seen.iter())
                                .map(|seen| dense([&qk, &qk, &v], seen, (v.clone(), -5e4)))
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
                    let by_out = tensor(&by_out, [batch, heads, seq, value_dim], &device);
                    let by_lse = tensor(&by_lse, [batch, heads, seq], &device);
                    let loss = (out.clone() * by_out).sum() + (lse.clone() * by_lse).sum();
                    let grads = loss.backward();
                    let by = |x: &Tensor<4>| x.grad(&grads).unwrap().into_data();
                    let names = ["out", "lse", "by qk", "by v"].into_iter();
                    names.zip([out.into_data(), lse.into_data(), by(&qk), by(&v)])
                };
                let what = format!("{seq}, {bucket}, {causal}, {device:?}");
                assert_alike(&what, run(true), run(false), 2e-5);
            }
        }
    }
}

/// Clusters of queries and of keys, of which queries see the earlier ones.
pub fn causal_clusters_equal_dense_attention(devices: &[Device]) {
    for (seq, window, clusters) in [(90, 16, 5), (50, 9, 4), (20, 32, 2)] {
        let [batch, heads, dim] = [2, 2, 16];
        let mut rng = seeded(8200 + seq as u64);
        let numbers = batch * heads * seq * dim;
        let [q, k, v, by_out] = [(); 4].map(|()| drawn(&mut rng, numbers, -1.0..1.0));
        let means = drawn(&mut rng, heads * clusters * dim, -1.0..1.0);
        for device in with(devices, DType::F32) {
            let device = device.clone().autodiff();
            let shape = [batch, heads, seq, dim];
            let config = RoutingHeadsConfig::new(window).with_clusters(Some(clusters));
            let mut routing = config.try_init(heads, dim, 1, &device).unwrap();
            let means = tensor(&means, [heads, clusters, dim], &device);
            routing.means = Param::from_tensor(means).set_require_grad(false);
            let leaves = || [&q, &k, &v].map(|x| tensor(x, shape, &device).require_grad());
            let taken = |x: &Tensor<4>| -> Vec<i32> {
                let tokens: Tensor<4, Int> = routing.clusters(x.clone()).unwrap();
                read_ints(tokens)
            };
            let [tq, tk, _] = leaves();
            let (queries, keys) = (taken(&tq), taken(&tk));
            let width = window.min(seq);
            let run = |kernels: bool| {
                let [q, k, v] = leaves();
                let out = match kernels {
                    true => {
                        let [q, k, v] = [&q, &k, &v].map(Clone::clone);
                        let made = routing.try_forward_unshared_causal(q, k, v);
                        made.unwrap().context
                    }
                    false => {
                        let mut counts = vec![0.0f64; batch * heads * seq];
                        let mut sum = v.zeros_like();
                        for cluster in 0..clusters {
                            let mut seen = vec![false; batch * heads * seq * seq];
                            for group in 0..batch * heads {
                                let first = (group * clusters + cluster) * width;
                                for &i in &queries[first..first + width] {
                                    counts[group * seq + i as usize] += 1.0;
                                    for &j in keys[first..first + width].iter().filter(|&&j| j <= i)
                                    {
                                        seen[(group * seq + i as usize) * seq + j as usize] = true;
                                    }
                                }
                            }
                            let nothing = v.zeros_like();
                            sum = sum + dense([&q, &k, &v], &seen, (nothing, 0.0)).0;
                        }
                        let shares: Vec<f64> = counts.iter().map(|x| 1.0 / x.max(1.0)).collect();
                        sum * tensor(&shares, [batch, heads, seq, 1], &device)
                    }
                };
                let grads = (out.clone() * tensor(&by_out, shape, &device))
                    .sum()
                    .backward();
                let by = |x: &Tensor<4>| x.grad(&grads).unwrap().into_data();
                let names = ["out", "by q", "by k", "by v"].into_iter();
                names.zip([out.into_data(), by(&q), by(&k), by(&v)])
            };
            let what = format!("{seq}, {window}, {device:?}");
            assert_alike(&what, run(true), run(false), 2e-5);
        }
    }
}
