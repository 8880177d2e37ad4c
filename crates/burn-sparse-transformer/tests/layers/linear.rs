//! The linear layer against burn-nn's.

use burn::store::ModuleRecord;
use burn_sparse_transformer::linear::{MixedPrecisionLinear, MixedPrecisionLinearConfig};

use crate::common::*;

#[rstest]
fn it_does_what_burn_nns_does(#[values(false, true)] bias: bool) {
    let device = Device::flex().autodiff();
    let config = LinearConfig::new(12, 7).with_bias(bias);
    let dense = randomise(config.init(&device));
    let ours = MixedPrecisionLinear::from_dense(&dense);
    let x = random([2, 9, 12], &device);
    let theirs = dense.forward(x.clone());
    assert_close(ours.forward(x.clone()), theirs.clone(), 1e-5);
    let gradient = |y: Tensor<3>| {
        let grads = y.powi_scalar(2).sum().backward();
        let bias = dense
            .bias
            .as_ref()
            .map(|bias| bias.val().grad(&grads).unwrap());
        (dense.weight.val().grad(&grads).unwrap(), bias)
    };
    let (got, expected) = (gradient(ours.forward(x)), gradient(theirs));
    assert_close(got.0, expected.0, 1e-3);
    assert_eq!(got.1.is_some(), bias);
    if let (Some(got), Some(expected)) = (got.1, expected.1) {
        assert_close(got.unsqueeze::<2>(), expected.unsqueeze::<2>(), 1e-3);
    }
}

#[test]
fn records_load_both_ways() {
    let device = Device::flex();
    let config = LinearConfig::new(12, 7);
    let dense = randomise(config.init(&device));
    let bytes = dense.clone().into_record().into_bytes().unwrap();
    let ours = MixedPrecisionLinearConfig::new(config.clone())
        .init(&device)
        .try_load_record(ModuleRecord::from_bytes(bytes).unwrap())
        .unwrap();
    let x = random([2, 9, 12], &device);
    let expected = dense.forward(x.clone());
    assert_close(ours.forward(x.clone()), expected.clone(), 1e-5);
    let back = config.init(&device).try_load_record(ours.into_record());
    assert_close(back.unwrap().forward(x), expected, 1e-6);
}

#[test]
fn products_are_rounded_and_nothing_else() {
    let device = Device::flex().autodiff();
    let dense = randomise(LinearConfig::new(64, 16).init(&device));
    let half = MixedPrecisionLinear::from_dense(&dense)
        .with_precision(Precision::Bf16)
        .unwrap();
    let x = random([4, 5, 64], &device);
    let y = half.forward(x.clone());
    let expected = (DType::F32, DType::F32);
    assert_eq!((y.dtype(), half.weight.val().dtype()), expected);
    assert_rounded(y.clone(), dense.forward(x), 0.01);
    let grads = y.sum().backward();
    let gradient = half.weight.val().grad(&grads).unwrap();
    assert_eq!(gradient.dtype(), DType::F32);
    refused! { half.try_forward(random([4, 5, 63], &device)) => "weight's in must be 63, x's last dimension, got 64"; }
}
