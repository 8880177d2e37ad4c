//! The backend trait of attention within clusters, where kernels make it.

use burn::backend::tensor::FloatTensor;
use burn::backend::{Backend, backend_extension};

/// Attention within clusters as a backend operation. It is asked for only where kernels take the call: elsewhere the same is composed of other operations.
#[backend_extension(Cube, Fusion: cfg(feature = "fusion"))]
pub trait ClusterOps: Backend {
    /// Attention of rows `[batch, heads, length, head_dim]` to the earlier ones of the clusters that means `[heads, clusters, head_dim]` attract.
    #[fusion(dtype = value, shape = value)]
    fn routed_attention(
        x: FloatTensor<Self>,
        value: FloatTensor<Self>,
        means: FloatTensor<Self>,
        window: usize,
        scale: f64,
    ) -> FloatTensor<Self>;
}
