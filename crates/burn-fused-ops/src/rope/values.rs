//! What crosses the backend trait of rotary position embedding.

use burn::backend::tensor::FloatTensor;
use burn::backend::{Backend, ExtensionType};
use burn::tensor::FloatDType;

use burn_blocksparse::internal::values::{OptFloat, OptInt};

/// Rows and the table that rotates them.
#[derive(ExtensionType, Clone, Debug)]
#[extension_type(fusion: cfg(feature = "fusion"))]
#[non_exhaustive]
pub struct RopeInputs<B: Backend> {
    /// `[batch, heads, seq, width]`
    pub x: FloatTensor<B>,
    /// Rows that are turned alike: the same with heads of its own.
    #[extension_type]
    pub key: OptFloat<B>,
    /// `[context, width, 2]`: cosine and sine, for both channels of a pair.
    pub table: FloatTensor<B>,
    /// `[batch · seq]`: rows of the table. None: those from the call's first on.
    #[extension_type]
    pub places: OptInt<B>,
}

/// Parameters of a rotation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct RopeCall {
    /// Position of the first row, where there are no places.
    pub first: usize,
    /// True if the other way round.
    pub back: bool,
    /// Of the result.
    pub dtype: FloatDType,
}

/// Rows, turned.
#[derive(ExtensionType, Clone, Debug)]
#[extension_type(fusion: cfg(feature = "fusion"))]
#[non_exhaustive]
pub struct TurnedRows<B: Backend> {
    /// As [`RopeInputs::x`].
    pub x: FloatTensor<B>,
    /// As [`RopeInputs::key`].
    #[extension_type]
    pub key: OptFloat<B>,
}
