//! The backend trait of heads in two parts.

use burn::backend::tensor::FloatTensor;
use burn::backend::{Backend, ExtensionType, TensorMetadata, backend_extension};
use burn::tensor::Slice;

/// The heads of a tensor in two parts, or gradients by them.
#[derive(ExtensionType, Clone, Debug)]
#[extension_type(fusion: cfg(feature = "fusion"))]
#[non_exhaustive]
pub struct HeadGroups<B: Backend> {
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
pub trait HeadGroupOps: Backend {
    /// The first heads of `[batch, heads, seq, width]`, and the others.
    #[fusion(meta = meta::apart)]
    fn split_head_groups(x: FloatTensor<Self>, first: usize) -> HeadGroups<Self> {
        let [_, heads, ..] = x.shape().dims::<4>();
        let all = Slice::full();
        let part = |heads| Self::float_slice(x.clone(), &[all, Slice::from(heads), all, all]);
        HeadGroups {
            first: part(0..first),
            others: part(first..heads),
        }
    }

    /// Both parts as one tensor.
    #[fusion(meta = meta::together)]
    fn cat_head_groups(#[extension_type] parts: HeadGroups<Self>) -> FloatTensor<Self> {
        Self::float_cat(vec![parts.first, parts.others], 1)
    }
}

/// Output shapes and dtypes for fusion.
#[cfg(feature = "fusion")]
mod meta {
    use burn::backend::fusion::custom::TensorSpec;

    use super::HeadGroupsMetadata;

    pub fn apart(x: &TensorSpec, first: &usize) -> HeadGroupsMetadata {
        let [batch, heads, seq, width] = x.shape.dims::<4>();
        let part = |heads: usize| TensorSpec::new([batch, heads, seq, width].into(), x.dtype);
        HeadGroupsMetadata {
            first: part(*first),
            others: part(heads - first),
        }
    }

    pub fn together(parts: &HeadGroupsMetadata) -> TensorSpec {
        let [batch, first, seq, width] = parts.first.shape.dims::<4>();
        let [_, others, ..] = parts.others.shape.dims::<4>();
        let shape = [batch, first + others, seq, width];
        TensorSpec::new(shape.into(), parts.first.dtype)
    }
}
