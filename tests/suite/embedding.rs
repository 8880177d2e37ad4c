//! Embeddings.

use burn::tensor::{DType, Int, Tensor};
use burn_blocksparse_tests::devices::devices;
use burn_fused_ops::embedding_backward;

burn_blocksparse_tests::tests!(
    embedding: embedding_equals_f64, embedding_in_half_precision, embedding_gives_the_same_bits,
    embedding_backward_equals_f64, embedding_of_a_frozen_table, embedding_plans
);

#[test]
fn as_many_ids_as_gradients() {
    for device in devices() {
        let ids = Tensor::<1, Int>::zeros([3], &device);
        let grad = Tensor::<2>::zeros([4, 2], (&device, DType::F32));
        let error = embedding_backward(ids, grad, 5).unwrap_err();
        let message = "ids' length must be 4, grad's rows, got 3";
        assert_eq!(error.to_string(), message);
    }
}
