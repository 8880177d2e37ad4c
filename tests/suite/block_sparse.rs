//! Products with block-sparse weights.

use burn_fused_ops::sparse_linear::{BlockSparseLinearOptions, WeightLayout, block_sparse_linear};
use rstest::rstest;

use burn_blocksparse_tests::prelude::*;

burn_blocksparse_tests::tests!(block_sparse);

#[rstest]
#[case(16, [4, 16, 16], None, None, "x's last dimension must be 32, the layout's inputs, got 16")]
#[case(32, [3, 16, 16], None, None, "weight's shape must be [4, 16, 16], the layout's, got [3, 16, 16]")]
#[case(32, [4, 16, 16], Some(32), None, "bias's length must be 48, the layout's outputs, got 32")]
#[case(32, [4, 16, 16], None, Some(3), "gates's length must be 4, the layout's blocks, got 3")]
fn errors(
    #[case] width: usize,
    #[case] shape: [usize; 3],
    #[case] bias: Option<usize>,
    #[case] gates: Option<usize>,
    #[case] message: &str,
) {
    let layout = WeightLayout::random([32, 48], 16, 0.7, 1).unwrap();
    for device in devices() {
        let x = Tensor::<2>::zeros([3, width], (&device, DType::F32));
        let weight = Tensor::<3>::zeros(shape, (&device, DType::F32));
        let list = |length: usize| Tensor::<1>::zeros([length], (&device, DType::F32));
        let mut options = BlockSparseLinearOptions::default();
        options.bias = bias.map(list);
        options.gates = gates.map(list);
        let error = options.explain(&x, &weight, &layout).unwrap_err();
        assert_eq!(error.to_string(), message);
        let error = block_sparse_linear(x, weight, &layout, options).unwrap_err();
        assert_eq!(error.to_string(), message);
    }
}

#[test]
fn plans_say_what_runs() {
    let layout = WeightLayout::random([32, 48], 16, 0.7, 1).unwrap();
    for device in devices() {
        let x = Tensor::<2>::zeros([300, 32], (&device, DType::F32));
        let weight = Tensor::<3>::zeros(layout.shape(), (&device, DType::F32));
        let options = BlockSparseLinearOptions::default();
        let plan = options.explain(&x, &weight, &layout).unwrap();
        let text = plan.to_string();
        assert!(text.starts_with("Burn's primitives on"), "{text}");
    }
}
