//! The backend trait of block-sparse tensors.

use burn::backend::tensor::FloatTensor;
use burn::backend::{Backend, backend_extension};

use super::compute;
#[cfg(feature = "fusion")]
use crate::base::dtype::sums_of;
use crate::base::values::LayoutTensors;
use crate::reference_backends;
#[cfg(feature = "fusion")]
use crate::weights;

/// Operations on block-sparse tensors `[batch, blocks, block_size, block_size]`, as backend operations: the default bodies are
/// in Burn primitives. Arguments are checked by the public functions.
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

    /// Blocks of `a · bᵀ`, in f32 (f64 for f64): `a` `[batch, heads, seq_q, dim]`, `b` `[batch, kv_heads, seq_kv, dim]`.
    #[fusion(dtype = sums_of(a), shape = weights::shape(&layout.host, a[0]).into())]
    fn block_sparse_nt(
        a: FloatTensor<Self>,
        b: FloatTensor<Self>,
        #[extension_type] layout: LayoutTensors<Self>,
    ) -> FloatTensor<Self> {
        compute::nt::<Self>(a, b, &layout)
    }

    /// `w · b`: `[batch, heads, seq_q, dim]` in the dtype of `b`, `[batch, kv_heads, seq_kv, dim]`.
    #[fusion(dtype = b, shape = [w[0], layout.host.heads(), layout.host.seq_q(), b[3]].into())]
    fn block_sparse_nn(
        w: FloatTensor<Self>,
        b: FloatTensor<Self>,
        #[extension_type] layout: LayoutTensors<Self>,
    ) -> FloatTensor<Self> {
        compute::nn::<Self>(w, b, &layout)
    }

    /// `wᵀ · a`, summed over the heads that share one of `kv_heads`: `[batch, kv_heads, seq_kv, dim]` in the dtype of
    /// `a`, `[batch, heads, seq_q, dim]`.
    #[fusion(dtype = a, shape = [w[0], *kv_heads, layout.host.seq_kv(), a[3]].into())]
    fn block_sparse_tn(
        w: FloatTensor<Self>,
        a: FloatTensor<Self>,
        #[extension_type] layout: LayoutTensors<Self>,
        kv_heads: usize,
    ) -> FloatTensor<Self> {
        compute::tn::<Self>(w, a, &layout, kv_heads)
    }

    /// Softmax of `scale · w` over the allowed pairs of each row.
    #[fusion(dtype = w, shape = w)]
    fn block_sparse_softmax(
        w: FloatTensor<Self>,
        #[extension_type] layout: LayoutTensors<Self>,
        scale: f64,
    ) -> FloatTensor<Self> {
        compute::softmax::<Self>(w, &layout, scale)
    }

    /// The gradient with respect to `w`, of the softmax `p` and the gradient with respect to it.
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
