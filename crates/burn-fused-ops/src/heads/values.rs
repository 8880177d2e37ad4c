//! The values that cross the backend trait of heads.

use burn::backend::tensor::FloatTensor;
use burn::backend::{Backend, ExtensionType};
use burn::tensor::FloatDType;

use burn_blocksparse::internal::values::OptFloat;

/// How many tensors a row may be split into.
pub const MOST_PARTS: usize = 3;

/// The heads of each part, and their width. None: there is no such part.
pub type HeadParts = [Option<(usize, usize)>; MOST_PARTS];

/// What is split.
#[derive(ExtensionType, Clone, Debug)]
#[extension_type(fusion: cfg(feature = "fusion"))]
#[non_exhaustive]
pub struct SplitInputs<B: Backend> {
    /// `[batch, seq, Σ heads · width]`
    pub x: FloatTensor<B>,
    /// `[Σ heads · width]`, of any float dtype.
    #[extension_type]
    pub bias: OptFloat<B>,
}

/// What is joined, as far as the tensors do not say it: any of them may be missing, and is 0 then.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct JoinCall {
    /// Batch and sequence.
    pub rows: [usize; 2],
    /// The heads.
    pub parts: HeadParts,
    /// Of the tensors and the result.
    pub dtype: FloatDType,
    /// The dtype of the sums over all rows, the bias's gradient, if they are wanted.
    pub bias: Option<FloatDType>,
}

impl JoinCall {
    /// Numbers of a row.
    pub fn width(&self) -> usize {
        let widths = self.parts.iter().flatten().map(|(heads, dim)| heads * dim);
        widths.sum()
    }
}

/// Joined tensors.
#[derive(ExtensionType, Clone, Debug)]
#[extension_type(fusion: cfg(feature = "fusion"))]
#[non_exhaustive]
pub struct Joined<B: Backend> {
    /// `[batch, seq, Σ heads · width]`
    pub x: FloatTensor<B>,
    /// Its sums over batch and sequence, `[Σ heads · width]`, if they are wanted.
    #[extension_type]
    pub bias: OptFloat<B>,
}
