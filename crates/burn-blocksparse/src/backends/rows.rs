//! Rows by an index on each backend, and their step in Burn's autodiff graph.

#[cfg(any(
    feature = "flex",
    feature = "ndarray",
    feature = "cube",
    feature = "autodiff"
))]
use crate::ops::RowOps;

#[cfg(feature = "flex")]
impl RowOps for burn::backend::Flex {}

#[cfg(feature = "ndarray")]
impl RowOps for burn::backend::NdArray {}

#[cfg(feature = "cube")]
impl RowOps for burn_cubecl::CubeBackend {}

#[cfg(feature = "autodiff")]
mod steps {
    use burn::backend::autodiff::Autodiff;
    use burn::backend::autodiff::checkpoint::{base::Checkpointer, strategy::CheckpointStrategy};
    use burn::backend::autodiff::grads::Gradients;
    use burn::backend::autodiff::ops::{Backward, Ops, OpsKind};
    use burn::backend::tensor::{FloatTensor, IntTensor};

    use super::RowOps;

    /// The step behind the rows.
    #[derive(Debug)]
    struct RowsAt;

    impl<B: RowOps> Backward<B, 1> for RowsAt {
        /// Which places use each row.
        type State = IntTensor<B>;

        fn backward(
            self,
            ops: Ops<Self::State, 1>,
            grads: &mut Gradients,
            _checkpointer: &mut Checkpointer,
        ) {
            let grad = grads.consume::<B>(&ops.node);
            if let [Some(parent)] = ops.parents {
                grads.register::<B>(parent.id, B::rows_at_backward(grad, ops.state));
            }
        }
    }

    impl<B: RowOps, C: CheckpointStrategy> RowOps for Autodiff<B, C> {
        fn rows_at(
            x: FloatTensor<Self>,
            index: IntTensor<Self>,
            users: IntTensor<Self>,
        ) -> FloatTensor<Self> {
            let prepared = RowsAt.prepare::<C>([x.node()]).compute_bound();
            let x = x.into_primitive();
            match prepared.stateful() {
                OpsKind::Tracked(prep) => {
                    let rows = B::rows_at(x, index, users.clone());
                    prep.finish(users, rows)
                }
                OpsKind::UnTracked(prep) => prep.finish(B::rows_at(x, index, users)),
            }
        }

        /// Overridden so that the reference does not itself run through autodiff.
        fn rows_at_backward(
            _grad: FloatTensor<Self>,
            _users: IntTensor<Self>,
        ) -> FloatTensor<Self> {
            unimplemented!("rows_at is differentiable once")
        }
    }
}
