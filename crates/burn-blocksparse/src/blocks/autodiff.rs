//! The autodiff steps of block-sparse tensors.

use crate::attention::autodiff::inner_layout;
use crate::base::custom_gradient::*;
use crate::base::prelude::*;
use crate::base::values::LayoutTensors;
use crate::blocks::{BlockProduct, BlockSparseTensorOps};

fn gradients<B: BlockSparseTensorOps>(
    product: BlockProduct,
    [lhs, rhs]: [FloatTensor<B>; 2],
    mut grad: FloatTensor<B>,
    layout: LayoutTensors<B>,
    [by_lhs, by_rhs]: [bool; 2],
) -> [Option<FloatTensor<B>>; 2] {
    if let BlockProduct::Nt = product {
        grad = B::block_sparse_mask(grad, layout.clone());
    }
    let kv_heads = rhs.shape()[1];
    let of = |lhs, rhs, product| B::block_sparse_product(lhs, rhs, layout.clone(), product);
    let by_lhs = by_lhs.then(|| {
        let grad = grad.clone();
        match product {
            BlockProduct::Nt => of(grad, rhs, BlockProduct::Nn),
            BlockProduct::Nn => of(grad, rhs, BlockProduct::Nt),
            BlockProduct::Tn { .. } => of(rhs, grad, BlockProduct::Nt),
        }
    });
    let by_rhs = by_rhs.then(|| match product {
        BlockProduct::Nt => of(grad, lhs, BlockProduct::Tn { kv_heads }),
        BlockProduct::Nn => of(lhs, grad, BlockProduct::Tn { kv_heads }),
        BlockProduct::Tn { .. } => of(lhs, grad, BlockProduct::Nn),
    });
    [by_lhs, by_rhs]
}

impl<B: BlockSparseTensorOps, C: CheckpointStrategy> BlockSparseTensorOps for Autodiff<B, C> {
    /// The gradient is masked in the same way.
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

    fn block_sparse_product(
        lhs: FloatTensor<Self>,
        rhs: FloatTensor<Self>,
        layout: LayoutTensors<Self>,
        product: BlockProduct,
    ) -> FloatTensor<Self> {
        let layout = inner_layout(layout);
        let factors = [lhs, rhs].map(Some);
        custom_gradient::<B, C, _, _>(factors, everything, |factors, wanted| {
            let [lhs, rhs] = factors.map(there);
            let out = B::block_sparse_product(lhs, rhs, layout.clone(), product);
            (out, move |factors, grad| {
                gradients::<B>(product, factors.map(there), grad, layout, wanted)
            })
        })
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
