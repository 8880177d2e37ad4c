//! Projections to heads and from them.

use burn_fused_ops::{LinearOptions, out_proj, qkv_proj};
use rstest::rstest;

use burn_blocksparse_tests::prelude::*;

burn_blocksparse_tests::tests!(projection);

#[rstest]
#[case(&[6], &[(2, 3)], 5, 6, "weight's in must be 4, x's last dimension, got 5")]
#[case(&[], &[(2, 3)], 4, 6, "weights must be 1 to 3 matrices, got 0")]
#[case(&[6], &[], 4, 6, "parts must be of 1 to 3 tensors, got 0")]
#[case(&[6], &[(1, 1); 4], 4, 6, "parts must be of 1 to 3 tensors, got 4")]
#[case(&[6, 2], &[(2, 3)], 4, 8, "parts must be heads of 8 columns in all, those of the weights, got [(2, 3)]")]
#[case(&[6], &[(usize::MAX, 2)], 4, 6, "parts must be heads of 6 columns in all, those of the weights, got [(18446744073709551615, 2)]")]
#[case(&[6], &[(2, 3)], 4, 7, "bias's length must be 6, the weights' columns, got 7")]
fn errors_to_heads(
    #[case] widths: &[usize],
    #[case] parts: &[(usize, usize)],
    #[case] inputs: usize,
    #[case] bias: usize,
    #[case] message: &str,
) {
    for device in devices() {
        let x = Tensor::<3>::zeros([2, 5, 4], (&device, DType::F32));
        let weights: Vec<Tensor<2>> = (widths.iter())
            .map(|width| Tensor::zeros([inputs, *width], (&device, DType::F32)))
            .collect();
        let bias = Tensor::<1>::zeros([bias], (&device, DType::F32));
        let options = LinearOptions::default();
        refused! {
            options.explain_to_heads(&x, &weights, Some(&bias), parts) => message;
            qkv_proj(x, weights, Some(bias), parts, &options) => message;
        }
    }
}

#[test]
fn errors_from_heads() {
    for device in devices() {
        let x = Tensor::<4>::zeros([2, 3, 5, 4], (&device, DType::F32));
        let weight = Tensor::<2>::zeros([11, 4], (&device, DType::F32));
        let options = LinearOptions::default();
        let message = "weight's in must be 12, x's heads · width, got 11";
        refused! {
            options.explain_from_heads(&x, &weight) => message;
            out_proj(x, weight, &options) => message;
        }
    }
}
