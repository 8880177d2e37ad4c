//! The backend trait of heads in two parts.

use burn::backend::tensor::FloatTensor;
use burn::backend::{Backend, ExtensionType, TensorMetadata, backend_extension};
use burn::tensor::Slice;

/// The heads of a tensor in two parts, or gradients by them.
#[derive(ExtensionType, Clone, Debug)]
#[extension_type(fusion: cfg(feature = "fusion"))]
#[non_exhaustive]
pub struct HeadsApart<B: Backend> {
    /// `[batch, first, seq, width]`.
    pub first: FloatTensor<B>,
    /// `[batch, heads − first, seq, width]`.
    pub others: FloatTensor<B>,
}

/// Heads apart and together as backend operations: the one is the gradient of the other. Arguments are checked by the public functions.
#[backend_extension(
    Flex: cfg(feature = "flex"),
    NdArray: cfg(feature = "ndarray"),
    Cube: cfg(feature = "cube"),
    Autodiff: cfg(feature = "autodiff"),
    Fusion: cfg(feature = "fusion"),
)]
pub trait HeadsApartOps: Backend {
    /// The first heads of `[batch, heads, seq, width]`, and the others.
    #[fusion(meta = meta::apart)]
    fn heads_apart(x: FloatTensor<Self>, first: usize) -> HeadsApart<Self> {
        let [_, heads, ..] = x.shape().dims::<4>();
        let all = Slice::full();
        let part = |heads| Self::float_slice(x.clone(), &[all, Slice::from(heads), all, all]);
        HeadsApart {
            first: part(0..first),
            others: part(first..heads),
        }
    }

    /// Both parts as one tensor.
    #[fusion(meta = meta::together)]
    fn heads_together(#[extension_type] parts: HeadsApart<Self>) -> FloatTensor<Self> {
        Self::float_cat(vec![parts.first, parts.others], 1)
    }
}

/// Output shapes and dtypes for fusion.
#[cfg(feature = "fusion")]
mod meta {
    use burn::backend::fusion::custom::TensorSpec;

    use super::HeadsApartMetadata;

    pub fn apart(x: &TensorSpec, first: &usize) -> HeadsApartMetadata {
        let [batch, heads, seq, width] = x.shape.dims::<4>();
        let part = |heads: usize| TensorSpec::new([batch, heads, seq, width].into(), x.dtype);
        HeadsApartMetadata {
            first: part(*first),
            others: part(heads - first),
        }
    }

    pub fn together(parts: &HeadsApartMetadata) -> TensorSpec {
        let [batch, first, seq, width] = parts.first.shape.dims::<4>();
        let [_, others, ..] = parts.others.shape.dims::<4>();
        let shape = [batch, first + others, seq, width];
        TensorSpec::new(shape.into(), parts.first.dtype)
    }
}
