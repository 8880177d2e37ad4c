//! Block-sparse tensors on each backend, and their steps in Burn's autodiff graph.

#[cfg(feature = "cube")]
impl crate::blocks::BlockSparseTensorOps for burn_cubecl::CubeBackend {}

#[cfg(feature = "autodiff")]
mod steps {
    use burn::backend::TensorMetadata;
    use burn::backend::autodiff::Autodiff;
    use burn::backend::autodiff::checkpoint::strategy::CheckpointStrategy;
    use burn::backend::tensor::FloatTensor;

    use crate::attention::autodiff::inner_layout;
    use crate::base::custom_gradient::{custom_gradient, everything, nothing, there};
    use crate::base::values::LayoutTensors;
    use crate::blocks::BlockSparseTensorOps;

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
            let factors = [lhs, rhs].map(Some);
            custom_gradient::<B, C, _, _>(factors, everything, |factors, wanted| {
                let [lhs, rhs] = factors.map(there);
                let out = self.forward::<B>(lhs, rhs, layout.clone());
                (out, move |factors, grad| {
                    let [lhs, rhs] = factors.map(there);
                    self.backward::<B>([lhs, rhs], grad, layout, wanted)
                })
            })
        }

        fn backward<B: BlockSparseTensorOps>(
            self,
            [lhs, rhs]: [FloatTensor<B>; 2],
            mut grad: FloatTensor<B>,
            layout: LayoutTensors<B>,
            [by_lhs, by_rhs]: [bool; 2],
        ) -> [Option<FloatTensor<B>>; 2] {
            if let Self::Nt = self {
                grad = B::block_sparse_mask(grad, layout.clone());
            }
            let kv_heads = rhs.shape()[1];
            let by_lhs = by_lhs.then(|| {
                let (grad, layout) = (grad.clone(), layout.clone());
                match self {
                    Self::Nt => B::block_sparse_nn(grad, rhs, layout),
                    Self::Nn => B::block_sparse_nt(grad, rhs, layout),
                    Self::Tn { .. } => B::block_sparse_nt(rhs, grad, layout),
                }
            });
            let by_rhs = by_rhs.then(|| match self {
                Self::Nt => B::block_sparse_tn(grad, lhs, layout, kv_heads),
                Self::Nn => B::block_sparse_tn(lhs, grad, layout, kv_heads),
                Self::Tn { .. } => B::block_sparse_nn(lhs, grad, layout),
            });
            [by_lhs, by_rhs]
        }
    }

    impl<B: BlockSparseTensorOps, C: CheckpointStrategy> BlockSparseTensorOps for Autodiff<B, C> {
        /// It does the same to the gradient.
        fn block_sparse_mask(
            values: FloatTensor<Self>,
            layout: LayoutTensors<Self>,
        ) -> FloatTensor<Self> {
            let layout = inner_layout(layout);
            custom_gradient::<B, C, _, _>([Some(values)], nothing, |[values], _| {
                let masked = B::block_sparse_mask(there(values), layout.clone());
                (masked, move |_, grad| {
                    [Some(B::block_sparse_mask(grad, layout))]
                })
            })
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
            custom_gradient::<B, C, _, _>([Some(w)], nothing, |[w], _| {
                let p = B::block_sparse_softmax(there(w), layout.clone(), scale);
                (p.clone(), move |_, grad| {
                    [Some(B::block_sparse_softmax_backward(
                        p, grad, layout, scale,
                    ))]
                })
            })
        }
    }
}
