//! Embeddings on each backend, and their step in Burn's autodiff graph.

#[cfg(any(
    feature = "flex",
    feature = "ndarray",
    feature = "cube",
    feature = "autodiff"
))]
use crate::embedding::ops::EmbeddingOps;

#[cfg(feature = "flex")]
impl EmbeddingOps for burn::backend::Flex {}

#[cfg(feature = "ndarray")]
impl EmbeddingOps for burn::backend::NdArray {}

#[cfg(feature = "cube")]
pub(crate) use kernels::text;

#[cfg(feature = "cube")]
mod kernels {
    use crate::kernels::rows::embedding::{
        EmbeddingKind, embedding_table_gradient, embedding_text,
    };
    use blocksparse_cubecl::KernelError;
    use burn::backend::cubecl::dtype_to_elem_type;
    use burn::tensor::{DType, FloatDType};
    use burn_cubecl::kernel::into_contiguous;
    use burn_cubecl::tensor::CubeTensor;
    use burn_cubecl::{CubeBackend, CubeDevice};

    use super::EmbeddingOps;
    use crate::embedding::reference;
    use burn_blocksparse::internal::cube::{empty, uses_reference};

    /// How a call is launched, of the dtypes of gradients by rows, by the table, and of ids.
    pub(crate) fn text(
        device: &CubeDevice,
        table: [usize; 2],
        dtypes: [DType; 3],
        positions: usize,
    ) -> Result<String, KernelError> {
        let kind = EmbeddingKind::new(table, dtypes.map(dtype_to_elem_type));
        embedding_text(&device.client(), &kind, positions)
    }

    impl EmbeddingOps for CubeBackend {
        fn table_gradient(
            ids: CubeTensor,
            grad: CubeTensor,
            vocab: usize,
            dtype: FloatDType,
        ) -> CubeTensor {
            if uses_reference() {
                return reference::table_gradient::<Self>(ids, grad, vocab, dtype);
            }
            let [ids, grad] = [ids, grad].map(into_contiguous);
            let [positions, width] = grad.meta.shape().dims();
            let table = empty(&grad, [vocab, width], dtype.into());
            let dtypes = [grad.dtype, table.dtype, ids.dtype].map(dtype_to_elem_type);
            let kind = EmbeddingKind::new([vocab, width], dtypes);
            let result = embedding_table_gradient(
                &grad.client,
                &kind,
                positions,
                [&ids.handle, &grad.handle],
                &table.handle,
            );
            match result {
                Ok(()) => table,
                Err(_) => reference::table_gradient::<Self>(ids, grad, vocab, dtype),
            }
        }
    }
}

#[cfg(feature = "autodiff")]
mod steps {
    use burn::backend::TensorMetadata;
    use burn::backend::autodiff::Autodiff;
    use burn::backend::autodiff::checkpoint::{base::Checkpointer, strategy::CheckpointStrategy};
    use burn::backend::autodiff::grads::Gradients;
    use burn::backend::autodiff::ops::{Backward, Ops, OpsKind};
    use burn::backend::tensor::{FloatTensor, IntTensor};
    use burn::tensor::FloatDType;

    use super::EmbeddingOps;

    /// The step behind the table.
    #[derive(Debug)]
    struct TableRows;

    impl<B: EmbeddingOps> Backward<B, 1> for TableRows {
        /// The ids, the entries of the table and its dtype.
        type State = (IntTensor<B>, usize, FloatDType);

        fn backward(
            self,
            ops: Ops<Self::State, 1>,
            grads: &mut Gradients,
            _checkpointer: &mut Checkpointer,
        ) {
            let grad = grads.consume::<B>(&ops.node);
            if let [Some(parent)] = ops.parents {
                let (ids, vocab, dtype) = ops.state;
                let table = B::table_gradient(ids, grad, vocab, dtype);
                grads.register::<B>(parent.id, table);
            }
        }
    }

    impl<B: EmbeddingOps, C: CheckpointStrategy> EmbeddingOps for Autodiff<B, C> {
        fn table_rows(table: FloatTensor<Self>, ids: IntTensor<Self>) -> FloatTensor<Self> {
            let prepared = TableRows.prepare::<C>([table.node()]).compute_bound();
            let table = table.into_primitive();
            match prepared.stateful() {
                OpsKind::Tracked(prep) => {
                    let state = (ids.clone(), table.shape()[0], table.dtype().into());
                    prep.finish(state, B::table_rows(table, ids))
                }
                OpsKind::UnTracked(prep) => prep.finish(B::table_rows(table, ids)),
            }
        }

        /// Overridden so that the reference does not itself run through autodiff.
        fn table_gradient(
            _ids: IntTensor<Self>,
            _grad: FloatTensor<Self>,
            _vocab: usize,
            _dtype: FloatDType,
        ) -> FloatTensor<Self> {
            unimplemented!("embedding is differentiable once")
        }
    }
}
