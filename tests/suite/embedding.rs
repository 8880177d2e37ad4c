//! Embeddings.

use burn_fused_ops::embedding_backward;

use burn_blocksparse_tests::prelude::*;

burn_blocksparse_tests::tests!(embedding);

#[test]
fn as_many_ids_as_gradients() {
    for device in devices() {
        let ids = Tensor::<1, Int>::zeros([3], &device);
        let grad = Tensor::<2>::zeros([4, 2], (&device, DType::F32));
        refused! { embedding_backward(ids, grad, 5) => "ids' length must be 4, grad's rows, got 3"; }
    }
}
