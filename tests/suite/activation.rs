//! A bias and an activation.

use burn_fused_ops::{Activation, bias_activation};
use rstest::rstest;

use burn_blocksparse_tests::prelude::*;

burn_blocksparse_tests::tests!(activation);

#[rstest]
#[case([3, 8], 7, "bias's length must be 8, x's width, got 7")]
#[case([3, 8], 0, "bias's length must be 8, x's width, got 0")]
#[case([3, 0], 1, "bias's length must be 0, x's width, got 1")]
fn errors(#[case] x: [usize; 2], #[case] bias: usize, #[case] message: &str) {
    for device in devices() {
        let x = Tensor::<2>::zeros(x, &device);
        let bias = Tensor::<1>::zeros([bias], &device);
        for activation in Activation::ALL {
            refused! {
                activation.explain(&x, Some(&bias)) => message;
                bias_activation(x.clone(), Some(bias.clone()), activation) => message;
            }
        }
    }
}

#[test]
fn a_bias_of_another_device() {
    let devices = devices();
    for (x, bias) in devices.iter().zip(devices.iter().skip(1)) {
        let x = Tensor::<2>::zeros([3, 8], x);
        let bias = Tensor::<1>::zeros([8], bias);
        refused! { bias_activation(x, Some(bias), Activation::Relu) => "bias's device must be…"; }
    }
}
