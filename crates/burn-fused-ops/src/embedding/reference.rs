//! The gradient of a table in Burn's primitives.

use burn::backend::tensor::{FloatTensor, IntTensor};
use burn::backend::{Backend, TensorMetadata};
use burn::tensor::{FloatDType, IndexingUpdateOp, Shape};

use burn_blocksparse::internal::dtype::accumulate_in;

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
    let table = B::float_zeros(Shape::new([vocab, width]), &grad.device(), sums);
    if positions * vocab * width == 0 {
        return B::float_cast(table, dtype);
    }
    let grad = B::float_cast(grad, sums);
    let table = B::float_select_assign(table, 0, ids, grad, IndexingUpdateOp::Add);
    B::float_cast(table, dtype)
}
