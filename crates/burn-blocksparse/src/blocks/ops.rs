//! The backend trait of block-sparse tensors.

use super::compute::{self, BlockProduct};
use crate::base::prelude::*;
use crate::base::values::LayoutTensors;
#[cfg(feature = "fusion")]
use crate::weights;
#[cfg(feature = "fusion")]
use blocksparse::BlockLayout;

/// Operations on block-sparse tensors `[batch, blocks, block_size, block_size]` as backend operations. The default bodies use Burn primitives. The public
/// functions check the arguments.
#[backend_extension(
    Flex: cfg(feature = "flex"),
    NdArray: cfg(feature = "ndarray"),
    Cube: cfg(feature = "cube"),
    Autodiff: cfg(feature = "autodiff"),
    Fusion: cfg(feature = "fusion"),
)]
pub trait BlockSparseTensorOps: Backend {
    /// Sets masked pairs to 0.
    #[fusion(dtype = values, shape = values)]
    fn block_sparse_mask(
        values: FloatTensor<Self>,
        #[extension_type] layout: LayoutTensors<Self>,
    ) -> FloatTensor<Self> {
        compute::mask::<Self>(values, &layout)
    }

    /// Computes a product of two operands.
    #[fusion(dtype = product.dtype(lhs, rhs), shape = product.shape(lhs, rhs, &layout.host))]
    fn block_sparse_product(
        lhs: FloatTensor<Self>,
        rhs: FloatTensor<Self>,
        #[extension_type] layout: LayoutTensors<Self>,
        product: BlockProduct,
    ) -> FloatTensor<Self> {
        compute::product::<Self>(lhs, rhs, &layout, product)
    }

    /// Computes the softmax of `scale · w` over the allowed pairs of each row.
    #[fusion(dtype = w, shape = w)]
    fn block_sparse_softmax(
        w: FloatTensor<Self>,
        #[extension_type] layout: LayoutTensors<Self>,
        scale: f64,
    ) -> FloatTensor<Self> {
        compute::softmax::<Self>(w, &layout, scale)
    }

    /// Computes the gradient with respect to `w` from the softmax `p` and the gradient with respect to `p`.
    #[fusion(dtype = p, shape = p)]
    fn block_sparse_softmax_backward(
        p: FloatTensor<Self>,
        grad: FloatTensor<Self>,
        #[extension_type] layout: LayoutTensors<Self>,
        scale: f64,
    ) -> FloatTensor<Self> {
        compute::softmax_backward::<Self>(p, grad, &layout, scale)
    }
}

reference_backends!(BlockSparseTensorOps);

#[cfg(feature = "cube")]
impl BlockSparseTensorOps for burn_cubecl::CubeBackend {}

#[cfg(feature = "fusion")]
impl BlockProduct {
    fn dtype(self, lhs: DType, rhs: DType) -> DType {
        match self {
            Self::Nt => sums_of(lhs),
            Self::Nn | Self::Tn { .. } => rhs,
        }
    }

    fn shape(self, lhs: &Shape, rhs: &Shape, layout: &BlockLayout) -> Shape {
        match self {
            Self::Nt => weights::shape(layout, lhs[0]).into(),
            Self::Nn => [lhs[0], layout.heads(), layout.seq_q(), rhs[3]].into(),
            Self::Tn { kv_heads } => [lhs[0], kv_heads, layout.seq_kv(), rhs[3]].into(),
        }
    }
}
