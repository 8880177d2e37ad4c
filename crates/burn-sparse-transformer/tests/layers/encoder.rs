//! The encoder on the training ops, against burn-nn's.

use burn::nn::activation::ActivationConfig;
use burn::nn::transformer::{TransformerEncoder, TransformerEncoderInput};
use burn::tensor::Gradients;
use burn_sparse_transformer::SparseTransformerEncoderInput;

use crate::common::*;

fn config(norm_first: bool) -> TransformerEncoderConfig {
    TransformerEncoderConfig::new(32, 48, 4, 2)
        .with_norm_first(norm_first)
        .with_dropout(0.0)
}

fn sparse(dense: &TransformerEncoder) -> SparseTransformerEncoder {
    SparseTransformerEncoder::from_dense(dense, Pattern::dense(), 8).unwrap()
}

/// Returns the output and the gradients with respect to x and to parameters of the first layer, with burn-nn's names.
macro_rules! results {
    ($encoder:expr, $x:expr, $run:expr) => {{
        let x = $x.clone().require_grad();
        let y: Tensor<3> = $run(x.clone());
        let seed = Tensor::<3>::ones(y.dims(), &y.device()).cumsum(1) * 0.1;
        let grads: Gradients = (y.clone() * seed).sum().backward();
        let layer = &$encoder.layers[0];
        let linear = |layer: &burn::nn::Linear| layer.weight.val().grad(&grads).unwrap();
        let vector = |param: &Option<burn::module::Param<Tensor<1>>>| {
            let param = param.as_ref().unwrap().val();
            param.grad(&grads).unwrap().unsqueeze::<2>()
        };
        let matrices = vec![
            linear(&layer.mha.query),
            linear(&layer.mha.output),
            linear(&layer.pwff.linear_inner),
            linear(&layer.pwff.linear_outer),
            vector(&layer.mha.output.bias),
            vector(&layer.pwff.linear_inner.bias),
            vector(&layer.pwff.linear_outer.bias),
            vector(&layer.norm_1.beta),
            (layer.norm_1.gamma.val().grad(&grads).unwrap()).unsqueeze::<2>(),
            (layer.norm_2.gamma.val().grad(&grads).unwrap()).unsqueeze::<2>(),
        ];
        (y.inner(), x.grad(&grads).unwrap(), matrices)
    }};
}

#[rstest]
fn gradients_are_those_of_burn_nn(
    #[values(false, true)] norm_first: bool,
    #[values(
        ActivationConfig::Gelu,
        ActivationConfig::GeluApproximate,
        ActivationConfig::Relu,
        // Not one of ours: burn-nn's own runs between the products.
        ActivationConfig::Tanh
    )]
    activation: ActivationConfig,
) {
    let device = Device::flex().autodiff();
    let config = config(norm_first)
        .with_activation(activation)
        .with_layer_norm_eps(1e-2);
    let dense = randomise(config.init(&device));
    let ours = sparse(&dense);
    let x = random([2, 19, 32], &device);
    let theirs = results!(dense, x, |x| dense.forward(TransformerEncoderInput::new(x)));
    let got = results!(ours, x, |x| ours
        .forward(SparseTransformerEncoderInput::new(x)));
    assert_close(got.0, theirs.0, 2e-5);
    assert_close(got.1, theirs.1, 1e-3);
    for (got, expected) in got.2.into_iter().zip(theirs.2) {
        assert_close(got, expected, 5e-3);
    }
}

#[rstest]
fn half_precision_stays_near(#[values(false, true)] norm_first: bool) {
    let device = Device::flex();
    let full = sparse(&randomise(config(norm_first).init(&device)));
    let half = full.clone().with_precision(Precision::Bf16).unwrap();
    let x = random([2, 19, 32], &device);
    let run = |encoder: &SparseTransformerEncoder| {
        let input = SparseTransformerEncoderInput::new(x.clone());
        encoder.forward(input)
    };
    let (full, half) = (run(&full), run(&half));
    assert_eq!(half.dtype(), DType::F32);
    assert_rounded(half, full, 0.03);
}

/// Training drops different elements each time; evaluation drops none.
#[rstest]
fn training_drops(#[values(false, true)] norm_first: bool) {
    for device in [Device::flex(), Device::flex().autodiff()] {
        let training = device.is_autodiff();
        let dense = config(norm_first).with_dropout(0.3).init(&device);
        let encoder = sparse(&randomise(dense));
        let x = random([2, 19, 32], &device);
        let run = || {
            let input = SparseTransformerEncoderInput::new(x.clone());
            encoder.forward(input).into_data()
        };
        assert_eq!(run() != run(), training);
    }
}
