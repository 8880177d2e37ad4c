//! Heads in two parts on each backend, and their steps in Burn's autodiff graph.

#[cfg(any(
    feature = "flex",
    feature = "ndarray",
    feature = "cube",
    feature = "autodiff"
))]
use crate::heads::apart_ops::{HeadGroupOps, HeadGroups};

#[cfg(feature = "flex")]
impl HeadGroupOps for burn::backend::Flex {}

#[cfg(feature = "ndarray")]
impl HeadGroupOps for burn::backend::NdArray {}

#[cfg(feature = "cube")]
mod kernels {
    use crate::kernels::rows::beside::side_by_side;
    use burn::backend::ops::FloatTensorOps;
    use burn::tensor::Slice;
    use burn_cubecl::CubeBackend;
    use burn_cubecl::kernel::into_contiguous;
    use burn_cubecl::tensor::CubeTensor;

    use super::{HeadGroupOps, HeadGroups};
    use burn_blocksparse::internal::cube::{empty, launched, typed};

    impl HeadGroupOps for CubeBackend {
        /// What is behind the first is contiguous: what chooses by content reads it several times. The first heads are read as they lie.
        fn split_head_groups(x: CubeTensor, first: usize) -> HeadGroups<Self> {
            let [_, heads, ..] = x.meta.shape().dims::<4>();
            let all = Slice::full();
            let part = |heads| Self::float_slice(x.clone(), &[all, Slice::from(heads), all, all]);
            HeadGroups {
                first: part(0..first),
                others: into_contiguous(part(first..heads)),
            }
        }

        fn cat_head_groups(parts: HeadGroups<Self>) -> CubeTensor {
            let (a, b) = (into_contiguous(parts.first), into_contiguous(parts.others));
            let [batch, first, seq, width] = a.meta.shape().dims();
            let [_, others, ..] = b.meta.shape().dims::<4>();
            let out = empty(&a, [batch, first + others, seq, width], a.dtype);
            let of = [first, others].map(|heads| heads * seq * width);
            let (handles, element) = ([&a.handle, &b.handle], typed(&a).1);
            launched(side_by_side(
                &a.client,
                handles,
                batch,
                of,
                (&out.handle, element),
            ));
            out
        }
    }
}

#[cfg(feature = "autodiff")]
mod steps {
    use burn::backend::autodiff::Autodiff;
    use burn::backend::autodiff::checkpoint::{base::Checkpointer, strategy::CheckpointStrategy};
    use burn::backend::autodiff::grads::Gradients;
    use burn::backend::autodiff::ops::{Backward, Ops, OpsKind};
    use burn::backend::tensor::FloatTensor;
    use burn::backend::{AutodiffBackend, Backend, TensorMetadata};

    use super::{HeadGroupOps, HeadGroups};
    use burn_blocksparse::internal::outputs::{OutputGradients, or_zeros};

    /// The step behind heads apart, whose outputs are the parts.
    #[derive(Debug)]
    struct Apart;

    #[derive(Clone, Debug)]
    struct ApartState<B: Backend> {
        parts: HeadGroups<B>,
        grads: OutputGradients<B, 2>,
    }

    impl<B: HeadGroupOps> Backward<B, 1> for Apart {
        type State = ApartState<B>;

        fn backward(
            self,
            ops: Ops<Self::State, 1>,
            grads: &mut Gradients,
            _checkpointer: &mut Checkpointer,
        ) {
            grads.consume::<B>(&ops.node);
            let ApartState { parts, grads: cell } = ops.state;
            let [first, others] = cell.take();
            let by = HeadGroups {
                first: or_zeros::<B>(first, &parts.first),
                others: or_zeros::<B>(others, &parts.others),
            };
            if let [Some(parent)] = ops.parents {
                grads.register::<B>(parent.id, B::cat_head_groups(by));
            }
        }
    }

    /// The step behind heads together.
    #[derive(Debug)]
    struct Together;

    impl<B: HeadGroupOps> Backward<B, 2> for Together {
        /// Heads of the first part.
        type State = usize;

        fn backward(
            self,
            ops: Ops<Self::State, 2>,
            grads: &mut Gradients,
            _checkpointer: &mut Checkpointer,
        ) {
            let grad = grads.consume::<B>(&ops.node);
            let HeadGroups { first, others } = B::split_head_groups(grad, ops.state);
            for (parent, grad) in ops.parents.into_iter().zip([first, others]) {
                if let Some(parent) = parent {
                    grads.register::<B>(parent.id, grad);
                }
            }
        }
    }

    impl<B: HeadGroupOps, C: CheckpointStrategy> HeadGroupOps for Autodiff<B, C> {
        fn split_head_groups(x: FloatTensor<Self>, first: usize) -> HeadGroups<Self> {
            let prepared = Apart.prepare::<C>([x.node()]).compute_bound();
            let parts = B::split_head_groups(x.into_primitive(), first);
            let HeadGroups { first, others } = parts.clone();
            match prepared.stateful() {
                OpsKind::Tracked(prep) => {
                    let grads = OutputGradients::<B, 2>::default();
                    let state = ApartState {
                        parts,
                        grads: grads.clone(),
                    };
                    let step = prep.finish(state, first.clone());
                    HeadGroups {
                        first: grads.node::<C>(&step, 0, first),
                        others: grads.node::<C>(&step, 1, others),
                    }
                }
                OpsKind::UnTracked(prep) => HeadGroups {
                    first: prep.finish(first),
                    others: <Self as AutodiffBackend>::from_inner(others),
                },
            }
        }

        fn cat_head_groups(parts: HeadGroups<Self>) -> FloatTensor<Self> {
            let nodes = [parts.first.node(), parts.others.node()];
            let prepared = Together.prepare::<C>(nodes).compute_bound();
            let parts: HeadGroups<B> = HeadGroups {
                first: parts.first.into_primitive(),
                others: parts.others.into_primitive(),
            };
            let [_, first, ..] = parts.first.shape().dims::<4>();
            let x = B::cat_head_groups(parts);
            match prepared.stateful() {
                OpsKind::Tracked(prep) => prep.finish(first, x),
                OpsKind::UnTracked(prep) => prep.finish(x),
            }
        }
    }
}
