//! LSH attention.

use std::num::NonZeroUsize;

use burn_sparse_transformer::Seed;
use burn_sparse_transformer::content::{
    LshAttentionConfig, LshHeadsConfig, LshOptions, lsh_attention,
};

use crate::common::*;
use crate::golden::{assert_near, devices, numbers, scattered, tensor, val, vals};

fn options(bucket: usize) -> LshOptions {
    LshOptions::new(NonZeroUsize::new(bucket).unwrap())
}

/// Returns golden rotations of a round, `[4][2]`.
fn golden_rotation(round: usize) -> Vec<Vec<f64>> {
    let row = |c| (0..2).map(|e| val(6 + round, 0, c, e)).collect();
    (0..4).map(row).collect()
}

#[test]
fn the_golden_case() {
    devices().iter().for_each(golden_on);
}

fn golden_on(device: &Device) {
    let (qk, v, tolerance) = (vals(1, 16), vals(2, 16), 5e-5);
    for dtype in [DType::F32, DType::F64] {
        let [tq, tv] = [&qk, &v].map(|x| tensor(&x.concat(), [1, 1, 16, 4], device, dtype));
        let run = |rounds: &[usize], options| {
            let flat = rounds
                .iter()
                .flat_map(|&round| golden_rotation(round).concat());
            let flat: Vec<f64> = flat.collect();
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
        let [of_5, of_15] = [
            [-0.5976, -0.5117, 1.2827, 0.2022],
            [-0.2056, -0.1953, 0.0965, -0.3306],
        ];
        near("5, dedup", &row(&out, 5), &of_5);
        near("15, dedup", &row(&out, 15), &of_15);
        assert_near("lse", &[lse[5], lse[15]], &[1.241603, 2.476406], 2e-6);
    }
}

#[test]
fn rotations_follow_from_seeds() {
    let (device, _guard) = seeded(Device::flex(), 1);
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
    // In training every call has new rotations.
    let training = Device::flex().autodiff();
    let attention = config.init(&training);
    let x = random([1, 60, 16], &training);
    let of = || numbers(attention.forward(x.clone(), None));
    assert_ne!(of(), of());
}

/// A zero query has no direction, and its gradient is finite.
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
