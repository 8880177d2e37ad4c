//! Products with weights.

use burn_fused_ops::{LinearOptions, fused_linear};
use rstest::rstest;

use burn_blocksparse_tests::prelude::*;

burn_blocksparse_tests::tests!(linear);

#[rstest]
#[case(&[5], "weight's in must be 4, x's last dimension, got 5")]
#[case(&[4, 5], "weight's in must be 4, x's last dimension, got 5")]
#[case(&[], "weights must be 1 to 3 matrices, got 0")]
#[case(&[4; 4], "weights must be 1 to 3 matrices, got 4")]
fn errors(#[case] inputs: &[usize], #[case] message: &str) {
    for device in devices() {
        let x = Tensor::<2>::zeros([3, 4], (&device, DType::F32));
        let weights = inputs
            .iter()
            .map(|inputs| Tensor::<2>::zeros([*inputs, 2], (&device, DType::F32)));
        let weights: Vec<Tensor<2>> = weights.collect();
        let options = LinearOptions::default();
        let error = options.explain(&x, &weights).unwrap_err();
        assert_eq!(error.to_string(), message);
        let error = fused_linear(x, weights, &options).unwrap_err();
        assert_eq!(error.to_string(), message);
    }
}

#[test]
fn plans_say_what_runs() {
    for device in devices() {
        let x = Tensor::<2>::zeros([5120, 4], (&device, DType::F32));
        let weights = [Tensor::<2>::zeros([4, 2], (&device, DType::F32))];
        let plan = LinearOptions::default().explain(&x, &weights).unwrap();
        assert!(
            plan.to_string().starts_with("Burn's primitives on"),
            "{plan}"
        );
    }
}
