//! Residual norms.

use burn::tensor::FloatDType;
use burn_fused_ops::{
    AddNormOptions, ElementDropout, NormParams, Residual, add_norm, residual_add,
};
use rstest::rstest;

use burn_blocksparse_tests::prelude::*;

burn_blocksparse_tests::tests!(norm);

fn dropout(probability: f64) -> Option<ElementDropout> {
    Some(ElementDropout::new(probability, 0, 0))
}

#[rstest]
#[case([3, 8], [3, 7], [8, 8, 8], 1e-5, None, "branch's shape must be [3, 8], the stream's, got [3, 7]")]
#[case([3, 8], [3, 8], [1, 8, 8], 1e-5, None, "bias's shape must be [8], the stream's width, got [1]")]
#[case([3, 8], [3, 8], [8, 7, 8], 1e-5, None, "gamma's shape must be [8], the stream's width, got [7]")]
#[case([3, 8], [3, 8], [8, 8, 9], 1e-5, None, "beta's shape must be [8], the stream's width, got [9]")]
#[case([3, 0], [3, 0], [0, 0, 0], 1e-5, None, "stream's width must be at least 1, got 0")]
#[case([3, 8], [3, 8], [8, 8, 8], -1.0, None, "options.epsilon must be finite and at least 0, got -1")]
#[case([3, 8], [3, 8], [8, 8, 8], f64::INFINITY, None, "options.epsilon must be finite and at least 0, got inf")]
#[case([3, 8], [3, 8], [8, 8, 8], 1e-5, dropout(1.0), "options.dropout's probability must be at least 0 and less than 1, got 1")]
fn errors(
    #[case] stream: [usize; 2],
    #[case] branch: [usize; 2],
    #[case] widths: [usize; 3],
    #[case] epsilon: f64,
    #[case] dropout: Option<ElementDropout>,
    #[case] message: &str,
) {
    let [bias, gamma, beta] = widths;
    for device in devices() {
        let row = |width: usize| Tensor::<1>::zeros([width], &device);
        let branch = Residual::new(Tensor::<2>::zeros(branch, &device)).bias(row(bias));
        let params = NormParams::new(row(gamma)).beta(row(beta));
        let mut options = AddNormOptions::default().epsilon(epsilon);
        options.dropout = dropout;
        let stream = Tensor::<2>::zeros(stream, &device);
        refused! { add_norm(stream, Some(branch), params, &options) => message; }
    }
}

#[test]
fn errors_of_a_sum_and_of_dtypes() {
    for device in devices() {
        let x = Tensor::<2>::zeros([3, 8], &device);
        refused! { residual_add(x.clone(), Residual::new(x.clone()), dropout(-0.5)) => "options.dropout's probability must be at least 0 and less than 1, got -0.5"; }
        if !device.supports_dtype(FloatDType::BF16) {
            let params = NormParams::new(Tensor::ones([8], &device));
            let options = AddNormOptions::default().dtype(FloatDType::BF16);
            refused! { add_norm(x, None, params, &options) => "options.dtype must be a dtype of the device, got BF16"; }
        }
    }
}
