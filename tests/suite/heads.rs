//! Rows split into heads, and joined.

use burn_fused_ops::split_heads;
use rstest::rstest;

use burn_blocksparse_tests::prelude::*;

burn_blocksparse_tests::tests!(heads);

#[rstest]
#[case(&[], 8, "parts must be of 1 to 3 tensors, got 0")]
#[case(&[(1, 2); 4], 8, "parts must be of 1 to 3 tensors, got 4")]
#[case(&[(2, 3)], 8, "x's width must be 6, the heads of all parts, got 8")]
#[case(&[(2, 3), (1, 4)], 8, "x's width must be 10, the heads of all parts, got 8")]
#[case(&[(usize::MAX, 2)], 8, "x's width must be the heads of [(18446744073709551615, 2)], got 8")]
#[case(&[(2, 4)], 7, "bias's length must be 8, x's width, got 7")]
fn errors(#[case] parts: &[(usize, usize)], #[case] bias: usize, #[case] message: &str) {
    for device in devices() {
        let x = Tensor::<3>::zeros([2, 5, 8], &device);
        let bias = Tensor::<1>::zeros([bias], &device);
        let error = burn_fused_ops::explain::split_heads(&x, Some(&bias), parts).unwrap_err();
        assert_eq!(error.to_string(), message);
        let error = split_heads(x, Some(bias), parts).unwrap_err();
        assert_eq!(error.to_string(), message);
    }
}
