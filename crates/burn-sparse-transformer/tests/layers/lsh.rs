//! Attention to what hashes alike.

use std::num::NonZeroUsize;

use burn_sparse_transformer::Seed;
use burn_sparse_transformer::content::{
    LshAttentionConfig, LshHeadsConfig, LshOptions, lsh_attention,
};

use crate::common::*;
use crate::golden::{numbers, scattered, tensor};

fn options(bucket: usize) -> LshOptions {
    LshOptions::new(NonZeroUsize::new(bucket).unwrap())
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
