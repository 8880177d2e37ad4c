//! Block-sparse tensors on each backend, and their steps in Burn's autodiff graph.

#[cfg(any(
    feature = "flex",
    feature = "ndarray",
    feature = "cube",
    feature = "autodiff"
))]
use crate::blocks::BlockSparseTensorOps;

#[cfg(feature = "flex")]
impl BlockSparseTensorOps for burn::backend::Flex {}

#[cfg(feature = "ndarray")]
impl BlockSparseTensorOps for burn::backend::NdArray {}

#[cfg(feature = "cube")]
impl BlockSparseTensorOps for burn_cubecl::CubeBackend {}

#[cfg(feature = "autodiff")]
mod steps {
    use burn::backend::TensorMetadata;
    use burn::backend::autodiff::checkpoint::{base::Checkpointer, strategy::CheckpointStrategy};
    use burn::backend::autodiff::grads::Gradients;
    use burn::backend::autodiff::ops::{Backward, Ops, OpsKind};
    use burn::backend::autodiff::{Autodiff, NodeId};
    use burn::backend::tensor::FloatTensor;

    use super::BlockSparseTensorOps;
    use crate::attention::autodiff::inner_layout;
    use crate::base::values::LayoutTensors;

    /// A product of two factors. The three products are each other's gradients:
    ///
    /// ```text
    /// w = a · bᵀ   da = dw · b      db = dwᵀ · a      masked pairs of dw do not count
    /// y = w · b    dw = dy · bᵀ     db = wᵀ · dy
    /// y = wᵀ · a   dw = a · dyᵀ     da = w · dy
    /// ```
    #[derive(Clone, Copy, Debug)]
    enum Product {
        Nt,
        Nn,
        Tn { kv_heads: usize },
    }

    #[derive(Clone, Debug)]
    struct Factors<B: BlockSparseTensorOps> {
        lhs: NodeId,
        rhs: NodeId,
        layout: LayoutTensors<B>,
    }

    impl Product {
        fn forward<B: BlockSparseTensorOps>(
            self,
            lhs: FloatTensor<B>,
            rhs: FloatTensor<B>,
            layout: LayoutTensors<B>,
        ) -> FloatTensor<B> {
            match self {
                Self::Nt => B::block_sparse_nt(lhs, rhs, layout),
                Self::Nn => B::block_sparse_nn(lhs, rhs, layout),
                Self::Tn { kv_heads } => B::block_sparse_tn(lhs, rhs, layout, kv_heads),
            }
        }

        fn track<B: BlockSparseTensorOps, C: CheckpointStrategy>(
            self,
            lhs: FloatTensor<Autodiff<B, C>>,
            rhs: FloatTensor<Autodiff<B, C>>,
            layout: LayoutTensors<Autodiff<B, C>>,
        ) -> FloatTensor<Autodiff<B, C>> {
            let layout = inner_layout(layout);
            let run = |lhs: FloatTensor<Autodiff<B, C>>, rhs: FloatTensor<Autodiff<B, C>>| {
                let (lhs, rhs) = (lhs.into_primitive(), rhs.into_primitive());
                self.forward::<B>(lhs, rhs, layout.clone())
            };
            let prepared = self.prepare::<C>([lhs.node(), rhs.node()]).compute_bound();
            match prepared.stateful() {
                OpsKind::Tracked(mut prep) => {
                    let state = Factors::<B> {
                        lhs: prep.checkpoint(&lhs),
                        rhs: prep.checkpoint(&rhs),
                        layout: layout.clone(),
                    };
                    prep.finish(state, run(lhs, rhs))
                }
                OpsKind::UnTracked(prep) => prep.finish(run(lhs, rhs)),
            }
        }
    }

    impl<B: BlockSparseTensorOps> Backward<B, 2> for Product {
        type State = Factors<B>;

        fn backward(
            self,
            ops: Ops<Self::State, 2>,
            grads: &mut Gradients,
            checkpointer: &mut Checkpointer,
        ) {
            let mut grad = grads.consume::<B>(&ops.node);
            let Factors { lhs, rhs, layout } = ops.state;
            if let Self::Nt = self {
                grad = B::block_sparse_mask(grad, layout.clone());
            }
            let lhs: FloatTensor<B> = checkpointer.retrieve_node_output(lhs);
            let rhs: FloatTensor<B> = checkpointer.retrieve_node_output(rhs);
            let kv_heads = rhs.shape()[1];
            let [lhs_parent, rhs_parent] = ops.parents;
            if let Some(parent) = lhs_parent {
                let (grad, rhs, layout) = (grad.clone(), rhs.clone(), layout.clone());
                let by_lhs = match self {
                    Self::Nt => B::block_sparse_nn(grad, rhs, layout),
                    Self::Nn => B::block_sparse_nt(grad, rhs, layout),
                    Self::Tn { .. } => B::block_sparse_nt(rhs, grad, layout),
                };
                grads.register::<B>(parent.id, by_lhs);
            }
            if let Some(parent) = rhs_parent {
                let by_rhs = match self {
                    Self::Nt => B::block_sparse_tn(grad, lhs, layout, kv_heads),
                    Self::Nn => B::block_sparse_tn(lhs, grad, layout, kv_heads),
                    Self::Tn { .. } => B::block_sparse_nn(lhs, grad, layout),
                };
                grads.register::<B>(parent.id, by_rhs);
            }
        }
    }

    /// Setting masked pairs to 0, which does the same to the gradient.
    #[derive(Debug)]
    struct Mask;

    impl<B: BlockSparseTensorOps> Backward<B, 1> for Mask {
        type State = LayoutTensors<B>;

        fn backward(
            self,
            ops: Ops<Self::State, 1>,
            grads: &mut Gradients,
            _checkpointer: &mut Checkpointer,
        ) {
            let grad = grads.consume::<B>(&ops.node);
            if let [Some(parent)] = ops.parents {
                grads.register::<B>(parent.id, B::block_sparse_mask(grad, ops.state));
            }
        }
    }

    #[derive(Debug)]
    struct Softmax;

    #[derive(Clone, Debug)]
    struct SoftmaxState<B: BlockSparseTensorOps> {
        p: FloatTensor<B>,
        layout: LayoutTensors<B>,
        scale: f64,
    }

    impl<B: BlockSparseTensorOps> Backward<B, 1> for Softmax {
        type State = SoftmaxState<B>;

        fn backward(
            self,
            ops: Ops<Self::State, 1>,
            grads: &mut Gradients,
            _checkpointer: &mut Checkpointer,
        ) {
            let grad = grads.consume::<B>(&ops.node);
            let SoftmaxState { p, layout, scale } = ops.state;
            if let [Some(parent)] = ops.parents {
                let by_w = B::block_sparse_softmax_backward(p, grad, layout, scale);
                grads.register::<B>(parent.id, by_w);
            }
        }
    }

    impl<B: BlockSparseTensorOps, C: CheckpointStrategy> BlockSparseTensorOps for Autodiff<B, C> {
        fn block_sparse_mask(
            values: FloatTensor<Self>,
            layout: LayoutTensors<Self>,
        ) -> FloatTensor<Self> {
            let layout = inner_layout(layout);
            let prepared = Mask.prepare::<C>([values.node()]).compute_bound();
            match prepared.stateful() {
                OpsKind::Tracked(prep) => {
                    let masked = B::block_sparse_mask(values.into_primitive(), layout.clone());
                    prep.finish(layout, masked)
                }
                OpsKind::UnTracked(prep) => {
                    prep.finish(B::block_sparse_mask(values.into_primitive(), layout))
                }
            }
        }

        fn block_sparse_nt(
            a: FloatTensor<Self>,
            b: FloatTensor<Self>,
            layout: LayoutTensors<Self>,
        ) -> FloatTensor<Self> {
            Product::Nt.track(a, b, layout)
        }

        fn block_sparse_nn(
            w: FloatTensor<Self>,
            b: FloatTensor<Self>,
            layout: LayoutTensors<Self>,
        ) -> FloatTensor<Self> {
            Product::Nn.track(w, b, layout)
        }

        fn block_sparse_tn(
            w: FloatTensor<Self>,
            a: FloatTensor<Self>,
            layout: LayoutTensors<Self>,
            kv_heads: usize,
        ) -> FloatTensor<Self> {
            Product::Tn { kv_heads }.track(w, a, layout)
        }

        fn block_sparse_softmax(
            w: FloatTensor<Self>,
            layout: LayoutTensors<Self>,
            scale: f64,
        ) -> FloatTensor<Self> {
            let layout = inner_layout(layout);
            let prepared = Softmax.prepare::<C>([w.node()]).compute_bound();
            match prepared.stateful() {
                OpsKind::Tracked(prep) => {
                    let p = B::block_sparse_softmax(w.into_primitive(), layout.clone(), scale);
                    let state = SoftmaxState::<B> {
                        p: p.clone(),
                        layout,
                        scale,
                    };
                    prep.finish(state, p)
                }
                OpsKind::UnTracked(prep) => {
                    prep.finish(B::block_sparse_softmax(w.into_primitive(), layout, scale))
                }
            }
        }

        fn block_sparse_softmax_backward(
            _p: FloatTensor<Self>,
            _grad: FloatTensor<Self>,
            _layout: LayoutTensors<Self>,
            _scale: f64,
        ) -> FloatTensor<Self> {
            unimplemented!("the softmax of a block-sparse tensor is differentiable once")
        }
    }
}
