//! The backend trait of block-sparse tensors.

use burn::backend::tensor::FloatTensor;
use burn::backend::{Backend, backend_extension};

use super::compute;
use crate::base::values::LayoutTensors;

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
    #[fusion(meta = meta::mask)]
    fn block_sparse_mask(
        values: FloatTensor<Self>,
        #[extension_type] layout: LayoutTensors<Self>,
    ) -> FloatTensor<Self> {
        compute::mask::<Self>(values, &layout)
    }

    /// Blocks of `a · bᵀ`, in f32 (f64 for f64): `a` `[batch, heads, seq_q, dim]`, `b` `[batch, kv_heads, seq_kv, dim]`.
    #[fusion(meta = meta::nt)]
    fn block_sparse_nt(
        a: FloatTensor<Self>,
        b: FloatTensor<Self>,
        #[extension_type] layout: LayoutTensors<Self>,
    ) -> FloatTensor<Self> {
        compute::nt::<Self>(a, b, &layout)
    }

    /// `w · b`: `[batch, heads, seq_q, dim]` in the dtype of `b`, `[batch, kv_heads, seq_kv, dim]`.
    #[fusion(meta = meta::nn)]
    fn block_sparse_nn(
        w: FloatTensor<Self>,
        b: FloatTensor<Self>,
        #[extension_type] layout: LayoutTensors<Self>,
    ) -> FloatTensor<Self> {
        compute::nn::<Self>(w, b, &layout)
    }

    /// `wᵀ · a`, summed over the heads that share one of `kv_heads`: `[batch, kv_heads, seq_kv, dim]` in the dtype of
    /// `a`, `[batch, heads, seq_q, dim]`.
    #[fusion(meta = meta::tn)]
    fn block_sparse_tn(
        w: FloatTensor<Self>,
        a: FloatTensor<Self>,
        #[extension_type] layout: LayoutTensors<Self>,
        kv_heads: usize,
    ) -> FloatTensor<Self> {
        compute::tn::<Self>(w, a, &layout, kv_heads)
    }

    /// Softmax of `scale · w` over the allowed pairs of each row.
    #[fusion(meta = meta::softmax)]
    fn block_sparse_softmax(
        w: FloatTensor<Self>,
        #[extension_type] layout: LayoutTensors<Self>,
        scale: f64,
    ) -> FloatTensor<Self> {
        compute::softmax::<Self>(w, &layout, scale)
    }

    /// The gradient by `w`, of the softmax `p` and the gradient by it.
    #[fusion(meta = meta::softmax_backward)]
    fn block_sparse_softmax_backward(
        p: FloatTensor<Self>,
        grad: FloatTensor<Self>,
        #[extension_type] layout: LayoutTensors<Self>,
        scale: f64,
    ) -> FloatTensor<Self> {
        compute::softmax_backward::<Self>(p, grad, &layout, scale)
    }
}

/// Output shapes and dtypes for fusion, which never compares them with what the backend returns.
#[cfg(feature = "fusion")]
mod meta {
    use burn::backend::fusion::custom::TensorSpec;

    use crate::base::dtype::accumulate_in;
    use crate::base::values::LayoutTensorsMetadata;
    use crate::weights;

    pub fn mask(values: &TensorSpec, _layout: &LayoutTensorsMetadata) -> TensorSpec {
        values.clone()
    }

    pub fn nt(a: &TensorSpec, _b: &TensorSpec, layout: &LayoutTensorsMetadata) -> TensorSpec {
        let shape = weights::shape(&layout.host, a.shape[0]);
        TensorSpec::new(shape.into(), accumulate_in(a.dtype.into()).into())
    }

    pub fn nn(w: &TensorSpec, b: &TensorSpec, layout: &LayoutTensorsMetadata) -> TensorSpec {
        let (heads, seq_q) = (layout.host.heads(), layout.host.seq_q());
        let shape = [w.shape[0], heads, seq_q, b.shape[3]];
        TensorSpec::new(shape.into(), b.dtype)
    }

    pub fn tn(
        w: &TensorSpec,
        a: &TensorSpec,
        layout: &LayoutTensorsMetadata,
        kv_heads: &usize,
    ) -> TensorSpec {
        let shape = [w.shape[0], *kv_heads, layout.host.seq_kv(), a.shape[3]];
        TensorSpec::new(shape.into(), a.dtype)
    }

    pub fn softmax(w: &TensorSpec, _layout: &LayoutTensorsMetadata, _scale: &f64) -> TensorSpec {
        w.clone()
    }

    pub fn softmax_backward(
        p: &TensorSpec,
        _grad: &TensorSpec,
        _layout: &LayoutTensorsMetadata,
        _scale: &f64,
    ) -> TensorSpec {
        p.clone()
    }
}
