//! Dropout on each backend.

#[cfg(any(
    feature = "flex",
    feature = "ndarray",
    feature = "cube",
    feature = "autodiff"
))]
use crate::dropout::ops::DropoutOps;

#[cfg(feature = "flex")]
impl DropoutOps for burn::backend::Flex {}

#[cfg(feature = "ndarray")]
impl DropoutOps for burn::backend::NdArray {}

#[cfg(feature = "cube")]
mod kernels {
    use crate::kernels::rows;
    use blocksparse::ElementDropout;
    use burn::backend::cubecl::dtype_to_elem_type;
    use burn_cubecl::CubeBackend;
    use burn_cubecl::kernel::into_contiguous;
    use burn_cubecl::tensor::CubeTensor;

    use super::DropoutOps;
    use crate::norm::backend::shaped;
    use crate::norm::reference;
    use crate::norm::reference::matrix;
    use burn_blocksparse::internal::cube::uses_reference;

    impl DropoutOps for CubeBackend {
        fn stream_dropout(x: CubeTensor, dropout: ElementDropout) -> CubeTensor {
            if uses_reference() {
                return reference::dropout::<Self>(x, dropout);
            }
            let x = into_contiguous(x);
            let shape = x.meta.shape().clone();
            let sizes = matrix(&shape);
            let output = shaped(&x, shape, x.dtype);
            let typed = (&x.handle, dtype_to_elem_type(x.dtype));
            match rows::stream_dropout(&x.client, typed, sizes, &output.handle, &dropout) {
                Ok(()) => output,
                Err(_) => reference::dropout::<Self>(x, dropout),
            }
        }
    }
}

#[cfg(feature = "autodiff")]
mod steps {
    use blocksparse::ElementDropout;
    use burn::backend::autodiff::Autodiff;
    use burn::backend::autodiff::checkpoint::{base::Checkpointer, strategy::CheckpointStrategy};
    use burn::backend::autodiff::grads::Gradients;
    use burn::backend::autodiff::ops::{Backward, Ops, OpsKind};
    use burn::backend::tensor::FloatTensor;

    use super::DropoutOps;

    /// Keeps nothing: the mask is made again.
    #[derive(Debug)]
    struct Drop;

    impl<B: DropoutOps> Backward<B, 1> for Drop {
        type State = ElementDropout;

        fn backward(
            self,
            ops: Ops<Self::State, 1>,
            grads: &mut Gradients,
            _checkpointer: &mut Checkpointer,
        ) {
            let grad = grads.consume::<B>(&ops.node);
            let [parent] = ops.parents;
            if let Some(parent) = parent {
                grads.register::<B>(parent.id, B::stream_dropout(grad, ops.state));
            }
        }
    }

    impl<B: DropoutOps, C: CheckpointStrategy> DropoutOps for Autodiff<B, C> {
        fn stream_dropout(x: FloatTensor<Self>, dropout: ElementDropout) -> FloatTensor<Self> {
            let prepared = Drop.prepare::<C>([x.node()]).compute_bound();
            let output = B::stream_dropout(x.into_primitive(), dropout);
            match prepared.stateful() {
                OpsKind::Tracked(prep) => prep.finish(dropout, output),
                OpsKind::UnTracked(prep) => prep.finish(output),
            }
        }
    }
}
