//! Attention to what hashes alike.

use std::num::NonZeroUsize;

use burn::tensor::{DType, Device, Tensor};
use burn_sparse_transformer::Seed;
use burn_sparse_transformer::content::{
    LshAttentionConfig, LshHeadsConfig, LshOptions, lsh_attention,
};

use crate::common::{random, seed};
use crate::golden::{
    assert_near, attend, devices, differences, dot, numbers, scattered, tensor, unit, val, vals,
};

fn options(bucket: usize) -> LshOptions {
    LshOptions::new(NonZeroUsize::new(bucket).unwrap())
}

/// Out and lse of each token, and the keys that it finds in each round.
struct Expected {
    out: Vec<Vec<f64>>,
    lse: Vec<f64>,
    found: Vec<Vec<Vec<usize>>>,
}

/// Attention in loops, of one head: rows of queries and values, and `[rounds][dim][half]` of rotations. Out, lse, and the keys that each round finds.
fn reference(
    qk: &[Vec<f64>],
    v: &[Vec<f64>],
    rotations: &[Vec<Vec<f64>>],
    options: LshOptions,
) -> Expected {
    let (n, dim, size) = (qk.len(), qk[0].len(), options.bucket.get());
    let chunks = n.div_ceil(2 * size) * 2;
    let found: Vec<Vec<Vec<usize>>> = rotations
        .iter()
        .map(|rotation| {
            let half = rotation[0].len();
            let bucket = |x: &Vec<f64>| {
                let column = |e: usize| (0..dim).map(|c| x[c] * rotation[c][e]).sum::<f64>();
                let all = (0..half).map(column).chain((0..half).map(|e| -column(e)));
                let first = |best: (usize, f64), (at, x)| if x > best.1 { (at, x) } else { best };
                all.enumerate().fold((0, f64::MIN), first).0
            };
            let buckets: Vec<usize> = qk.iter().map(bucket).collect();
            let mut order: Vec<usize> = (0..n).collect();
            order.sort_by_key(|&i| buckets[i]);
            let chunk_of = |i: usize| order.iter().position(|&at| at == i).unwrap() / size;
            (0..n)
                .map(|i| {
                    let own = chunk_of(i);
                    let near = [(own + chunks - 1) % chunks, own];
                    let is_seen = |&j: &usize| {
                        let allowed = if options.causal { j < i } else { j != i };
                        let bucket = !options.own_bucket || buckets[i] == buckets[j];
                        allowed && bucket && near.contains(&chunk_of(j))
                    };
                    (0..n).filter(is_seen).collect()
                })
                .collect()
        })
        .collect();
    let (mut outs, mut lses) = (Vec::new(), Vec::new());
    for i in 0..n {
        let parts: Vec<(Vec<f64>, f64)> = (found.iter())
            .map(|round| {
                let times = |j: usize| {
                    let rounds = found.iter().filter(|round| round[i].contains(&j));
                    if options.dedup {
                        rounds.count() as f64
                    } else {
                        1.0
                    }
                };
                let scores: Vec<(f64, &[f64])> = (round[i].iter())
                    .map(|&j| {
                        let score = dot(&qk[i], &unit(&qk[j])) / (dim as f64).sqrt();
                        (score - times(j).ln(), &v[j][..])
                    })
                    .collect();
                match scores.is_empty() {
                    true => (v[i].clone(), -5e4),
                    false => attend(&scores),
                }
            })
            .collect();
        let parts: Vec<(f64, &[f64])> = parts.iter().map(|(out, lse)| (*lse, &out[..])).collect();
        let (out, lse) = attend(&parts);
        outs.push(out);
        lses.push(lse);
    }
    Expected {
        out: outs,
        lse: lses,
        found,
    }
}

/// Golden rotations of round `r`, `[4][2]`.
fn golden_rotation(round: usize) -> Vec<Vec<f64>> {
    let row = |c| (0..2).map(|e| val(6 + round, 0, c, e)).collect();
    (0..4).map(row).collect()
}

#[test]
fn the_golden_case() {
    for device in devices() {
        golden_on(&device);
    }
}

fn golden_on(device: &Device) {
    let (qk, v) = (vals(1, 16), vals(2, 16));
    let rotations = [golden_rotation(0), golden_rotation(1)];
    let Expected { found, .. } = reference(&qk, &v, &rotations, options(4));
    assert_eq!(found[0][5], [0, 3, 4]);
    assert_eq!(found[1][5], [0, 1, 3]);
    assert_eq!(found[0][15], [7, 8, 9, 11, 12, 13, 14]);
    assert_eq!(found[1][15], [0, 1, 3, 5, 10, 13, 14]);
    assert!(found[0][0].is_empty() && found[1][0].is_empty());
    for (dtype, tolerance) in [(DType::F32, 5e-5), (DType::F64, 5e-5)] {
        let [tq, tv] = [&qk, &v].map(|x| tensor(&x.concat(), [1, 1, 16, 4], device, dtype));
        let run = |rounds: &[usize], options| {
            let flat: Vec<f64> = (rounds.iter())
                .flat_map(|&round| golden_rotation(round).concat())
                .collect();
            let rotations = tensor(&flat, [rounds.len(), 4, 2], device, dtype);
            let (out, lse) = lsh_attention(tq.clone(), tv.clone(), rotations, options).unwrap();
            (numbers(out), numbers(lse))
        };
        let near = |what: &str, got: &[f64], expected: &[f64]| {
            assert_near(what, got, expected, tolerance);
        };
        for (round, of_5, of_15) in [(0, 0.986510, 1.919406), (1, 1.049415, 1.964228)] {
            let (_, lse) = run(&[round], options(4));
            assert_near("lse", &[lse[5], lse[15]], &[of_5, of_15], 2e-6);
        }
        let (out, _) = run(&[0, 1], options(4));
        let row = |out: &[f64], i: usize| out[4 * i..4 * i + 4].to_vec();
        near("5", &row(&out, 5), &[-0.6257, -0.3779, 1.2870, 0.0768]);
        near("15", &row(&out, 15), &[-0.1056, -0.0311, 0.0824, -0.4176]);
        assert_near("0", &row(&out, 0), &v[0], 1e-6);
        let (out, lse) = run(&[0, 1], options(4).dedup(true));
        near(
            "5, dedup",
            &row(&out, 5),
            &[-0.5976, -0.5117, 1.2827, 0.2022],
        );
        near(
            "15, dedup",
            &row(&out, 15),
            &[-0.2056, -0.1953, 0.0965, -0.3306],
        );
        assert_near("lse", &[lse[5], lse[15]], &[1.241603, 2.476406], 2e-6);
    }
}

/// Of all variants, with sequences that fill their chunks and that do not.
#[test]
fn chunks_attend_as_in_loops() {
    let device = Device::flex();
    for (seq, bucket, half) in [(32, 4, 4), (33, 4, 5), (7, 4, 1), (1, 4, 2), (90, 8, 6)] {
        let [batch, heads, rounds, dim, value_dim] = [2, 2, 3, 5, 3];
        let qk = scattered(batch * heads * seq * dim, 1);
        let v = scattered(batch * heads * seq * value_dim, 2);
        let flat = scattered(rounds * dim * half, 3);
        let rotations: Vec<Vec<Vec<f64>>> = (flat.chunks(dim * half))
            .map(|round| round.chunks(half).map(<[f64]>::to_vec).collect())
            .collect();
        for variant in 0..8 {
            let options = (options(bucket).causal(variant & 1 == 0))
                .dedup(variant & 2 == 0)
                .own_bucket(variant & 4 == 0);
            for (dtype, tolerance) in [(DType::F64, 1e-11), (DType::F32, 2e-5)] {
                let (out, lse) = lsh_attention(
                    tensor(&qk, [batch, heads, seq, dim], &device, dtype),
                    tensor(&v, [batch, heads, seq, value_dim], &device, dtype),
                    tensor(&flat, [rounds, dim, half], &device, dtype),
                    options,
                )
                .unwrap();
                let (out, lse) = (numbers(out), numbers(lse));
                let rows = |x: &[f64], width: usize, group: usize| -> Vec<Vec<f64>> {
                    let own = &x[group * seq * width..][..seq * width];
                    own.chunks(width).map(<[f64]>::to_vec).collect()
                };
                for group in 0..batch * heads {
                    let (qk, v) = (rows(&qk, dim, group), rows(&v, value_dim, group));
                    let expected = reference(&qk, &v, &rotations, options);
                    let logs = expected.lse;
                    let what = format!("{seq}, {options:?}, {dtype:?}");
                    let got = rows(&out, value_dim, group).concat();
                    assert_near(&what, &got, &expected.out.concat(), tolerance);
                    let got = &lse[group * seq..][..seq];
                    let relative: Vec<f64> = got.iter().zip(&logs).map(|(a, b)| a / b).collect();
                    let near = |(a, b): (&f64, &f64)| (a - b).abs() <= tolerance * b.abs().max(1.0);
                    assert!(got.iter().zip(&logs).all(near), "{what}: {relative:?}");
                }
            }
        }
    }
}

#[test]
fn gradients_are_those_of_differences() {
    let device = Device::flex().autodiff();
    let (seq, dim, value_dim) = (11, 3, 2);
    let inputs = [
        scattered(2 * seq * dim, 11),
        scattered(2 * seq * value_dim, 12),
    ];
    let shapes = [[1, 2, seq, dim], [1, 2, seq, value_dim]];
    let rotations = scattered(2 * dim * 2, 13);
    let weights = scattered(2 * seq * value_dim, 14);
    for dedup in [false, true] {
        let value = |inputs: [Tensor<4>; 2]| {
            let [qk, v] = inputs;
            let rotations = tensor(&rotations, [2, dim, 2], &Device::flex(), DType::F64);
            let weights = tensor(&weights, shapes[1], &qk.device(), DType::F64);
            let (out, _) = lsh_attention(qk, v, rotations, options(2).dedup(dedup)).unwrap();
            (out * weights).sum()
        };
        let leaves: [Tensor<4>; 2] = std::array::from_fn(|of| {
            tensor(&inputs[of], shapes[of], &device, DType::F64).require_grad()
        });
        let grads = value(leaves.clone()).backward();
        for of in 0..2 {
            let got = numbers(leaves[of].grad(&grads).unwrap());
            assert!(got.iter().any(|x| x.abs() > 1e-3));
            let expected = differences(&inputs[of], |x| {
                let inputs = std::array::from_fn(|other| {
                    let x = if other == of { x } else { &inputs[other] };
                    tensor(x, shapes[other], &Device::flex(), DType::F64)
                });
                numbers(value(inputs))[0]
            });
            assert_near(&format!("{dedup}, {of}"), &got, &expected, 1e-7);
        }
    }
}

#[test]
fn rotations_follow_from_seeds() {
    let device = Device::flex();
    let _guard = seed(&device, 1);
    let heads = LshHeadsConfig::new()
        .with_bucket(8)
        .with_rounds(2)
        .with_seed(5);
    let config = LshAttentionConfig::new(16, 2).with_heads(heads);
    let x = random([2, 60, 16], &device);
    let attention = config.init(&device);
    let of = |seed: Option<u64>| {
        let out = attention.forward(x.clone(), seed.map(Seed::from));
        numbers(out)
    };
    let first = of(None);
    assert!(first.iter().all(|x| x.is_finite()));
    assert_eq!(of(Some(5)), first);
    assert_ne!(of(Some(6)), first);
    for _ in 0..3 {
        assert_eq!(of(None), first);
        assert_eq!(of(Some(6)), of(Some(6)));
    }
    // In training every call has rotations of its own.
    let training = Device::flex().autodiff();
    let attention = config.init(&training);
    let x = random([1, 60, 16], &training);
    let of = || numbers(attention.forward(x.clone(), None));
    assert_ne!(of(), of());
}

/// A zero query has no direction, and its gradient stays finite.
#[test]
fn zeros_are_finite() {
    let device = Device::flex().autodiff();
    let x = Tensor::<4>::zeros([1, 1, 20, 4], &device).require_grad();
    let v = tensor(&scattered(80, 1), [1, 1, 20, 4], &device, DType::F32).require_grad();
    let heads = LshHeadsConfig::new().with_bucket(4).with_rounds(2);
    let out = heads.init().forward(x.clone(), v.clone(), None);
    let grads = (out.clone() * out).sum().backward();
    for x in [x.grad(&grads).unwrap(), v.grad(&grads).unwrap()] {
        assert!(numbers(x).iter().all(|x| x.is_finite()));
    }
}

#[test]
fn bad_numbers_and_shapes_are_refused() {
    const BUCKETS: &str = "n_buckets must be even, from 2 to 2²⁰…";
    let heads = LshHeadsConfig::new;
    for (config, message) in [
        (heads().with_bucket(0), "bucket must be at least 1, got 0"),
        (heads().with_rounds(0), "rounds must be at least 1, got 0"),
        (heads().with_n_buckets(Some(3)), BUCKETS),
        (heads().with_n_buckets(Some(0)), BUCKETS),
    ] {
        let layer = LshAttentionConfig::new(16, 2).with_heads(config.clone());
        refused! {
            config.try_init() => message;
            layer.try_init(&Device::flex()) => message;
        }
    }
    let device = Device::flex();
    let x = |seq, dim| Tensor::<4>::zeros([1, 2, seq, dim], &device);
    let rotations = |dim| Tensor::<3>::zeros([1, dim, 2], &device);
    let attention = LshAttentionConfig::new(16, 2).init(&device);
    refused! {
        lsh_attention(x(8, 4), x(9, 4), rotations(4), options(4)) => "value must be [batch = 1, heads = 2, seq = 8…";
        lsh_attention(x(8, 4), x(8, 4), rotations(5), options(4)) => "rotations must be [rounds ≥ 1, head_dim = 4…";
        attention.try_forward(Tensor::zeros([2, 5, 15], &device), None) => "x must be [batch ≥ 1, seq ≥ 1, d_model = 16], got [2, 5, 15]";
    }
}
