//! Feed-forward networks.

use burn_fused_ops::{Activation, MlpOptions, MlpParams, mlp};
use rstest::rstest;

use burn_blocksparse_tests::prelude::*;

burn_blocksparse_tests::tests!(mlp);

#[rstest]
#[case([5, 6], [6, 2], 6, "the inner weight's in must be 4, x's last dimension, got 5")]
#[case([4, 6], [5, 2], 6, "the outer weight's in must be 6, the inner weight's out, got 5")]
#[case([4, 6], [6, 2], 5, "bias's length must be 6, the inner weight's out, got 5")]
fn errors(
    #[case] inner: [usize; 2],
    #[case] outer: [usize; 2],
    #[case] bias: usize,
    #[case] message: &str,
) {
    for device in devices() {
        let zeros = |shape: [usize; 2]| Tensor::<2>::zeros(shape, (&device, DType::F32));
        let params = MlpParams::new(zeros(inner), zeros(outer))
            .bias(Tensor::<1>::zeros([bias], (&device, DType::F32)));
        let (x, options) = (zeros([3, 4]), MlpOptions::default());
        let error = options.explain(&x, &params, Activation::Silu).unwrap_err();
        assert_eq!(error.to_string(), message);
        let error = mlp(x, params, Activation::Silu, &options).unwrap_err();
        assert_eq!(error.to_string(), message);
    }
}

#[test]
fn plans_say_what_runs() {
    for device in devices() {
        let zeros = |shape: [usize; 2]| Tensor::<2>::zeros(shape, (&device, DType::F32));
        let params = MlpParams::new(zeros([4, 6]), zeros([6, 2]));
        let options = MlpOptions::default();
        let plan = options
            .explain(&zeros([3, 4]), &params, Activation::Silu)
            .unwrap();
        assert!(
            plan.to_string().starts_with("Burn's primitives on"),
            "{plan}"
        );
    }
}
