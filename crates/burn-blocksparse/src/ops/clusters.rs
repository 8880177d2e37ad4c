//! The backend trait of attention within clusters, where a kernel makes it.

use burn::backend::tensor::{FloatTensor, IntTensor};
use burn::backend::{Backend, ExtensionType, backend_extension};

/// Out and lse by place.
#[derive(ExtensionType, Clone, Debug)]
#[extension_type(fusion: cfg(feature = "fusion"))]
#[non_exhaustive]
pub struct ClusterOutput<B: Backend> {
    /// `[batch, heads, clusters · width, value_dim]`, in the values' dtype.
    pub out: FloatTensor<B>,
    /// `[batch, heads, clusters · width]`, f32.
    pub lse: FloatTensor<B>,
}

/// Attention within clusters as a backend operation. It is asked for only where a kernel takes the call: elsewhere the same is composed of other operations.
#[backend_extension(Cube, Fusion: cfg(feature = "fusion"))]
pub trait ClusterOps: Backend {
    /// Attention of rows `[batch, heads, length, head_dim]` to the earlier ones of clusters `[batch, heads, clusters, width]`.
    #[fusion(meta = meta::output)]
    fn attention_in_clusters(
        x: FloatTensor<Self>,
        value: FloatTensor<Self>,
        tokens: IntTensor<Self>,
        scale: f64,
    ) -> ClusterOutput<Self>;
}

/// Output shapes and dtypes for fusion.
#[cfg(feature = "fusion")]
mod meta {
    use burn::backend::fusion::custom::TensorSpec;
    use burn::tensor::DType;

    use super::ClusterOutputMetadata;

    pub fn output(
        _x: &TensorSpec,
        value: &TensorSpec,
        tokens: &TensorSpec,
        _scale: &f64,
    ) -> ClusterOutputMetadata {
        let [batch, heads, clusters, width] = tokens.shape.dims::<4>();
        let places = clusters * width;
        let out = [batch, heads, places, value.shape[3]];
        ClusterOutputMetadata {
            out: TensorSpec::new(out.into(), value.dtype),
            lse: TensorSpec::new([batch, heads, places].into(), DType::F32),
        }
    }
}
