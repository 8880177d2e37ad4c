//! Embeddings on CubeCL devices.

use crate::kernels::rows::embedding::{EmbeddingKind, embedding_table_gradient};
use burn::tensor::FloatDType;

use crate::by_kernels::by_kernels;
use crate::embedding::ops::EmbeddingOps;
use crate::embedding::reference;
use burn_blocksparse::internal::cube::*;

impl EmbeddingOps for CubeBackend {
    fn table_gradient(
        ids: CubeTensor,
        grad: CubeTensor,
        vocab: usize,
        dtype: FloatDType,
    ) -> CubeTensor {
        by_kernels(|| {
            let [ids, grad] = [&ids, &grad].map(|x| into_contiguous(x.clone()));
            let [positions, width] = grad.meta.shape().dims();
            let table = empty(&grad, [vocab, width], dtype.into());
            let dtypes = [grad.dtype, table.dtype, ids.dtype].map(dtype_to_elem_type);
            let kind = EmbeddingKind::new([vocab, width], dtypes);
            let inputs = [&ids.handle, &grad.handle];
            embedding_table_gradient(&grad.client, &kind, positions, inputs, &table.handle)?;
            Ok(table)
        })
        .unwrap_or_else(|| reference::table_gradient::<Self>(ids, grad, vocab, dtype))
    }
}
