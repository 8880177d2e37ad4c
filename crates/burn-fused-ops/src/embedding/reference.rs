//! The gradient with respect to the table in Burn's primitives.

use burn::tensor::IndexingUpdateOp;

use burn_blocksparse::internal::prelude::*;

pub(crate) fn table_gradient<B: Backend>(
    ids: IntTensor<B>,
    grad: FloatTensor<B>,
    vocab: usize,
    dtype: FloatDType,
) -> FloatTensor<B> {
    let [positions, width] = grad.shape().dims();
    let sums = match (dtype, accumulate_in(grad.dtype().into())) {
        (FloatDType::F64, _) | (_, FloatDType::F64) => FloatDType::F64,
        _ => FloatDType::F32,
    };
    let mut table = Array::<B>::zeros([vocab, width], &grad.device(), sums);
    if positions * vocab * width > 0 {
        let grad = Array::<B>(grad).cast(sums).0;
        table.0 = B::float_select_assign(table.0, 0, ids, grad, IndexingUpdateOp::Add);
    }
    table.cast(dtype).0
}
