//! What crosses the backend trait of rotary position embedding.

use burn::backend::tensor::FloatTensor;
use burn::backend::{Backend, ExtensionType};
use burn::tensor::FloatDType;

use burn_blocksparse::internal::values::OptInt;

/// Rows and the table that rotates them.
#[derive(ExtensionType, Clone, Debug)]
#[extension_type(fusion: cfg(feature = "fusion"))]
#[non_exhaustive]
pub struct RopeInputs<B: Backend> {
    /// `[batch, heads, seq, width]`
    pub x: FloatTensor<B>,
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

/// Queries and keys that are turned alike.
#[derive(ExtensionType, Clone, Debug)]
#[extension_type(fusion: cfg(feature = "fusion"))]
#[non_exhaustive]
pub struct RopePair<B: Backend> {
    /// `[batch, heads, seq, width]`
    pub query: FloatTensor<B>,
    /// The same with heads of its own.
    pub key: FloatTensor<B>,
    /// As [`RopeInputs::table`].
    pub table: FloatTensor<B>,
    /// As [`RopeInputs::places`].
    #[extension_type]
    pub places: OptInt<B>,
}

/// Both, turned.
#[derive(ExtensionType, Clone, Debug)]
#[extension_type(fusion: cfg(feature = "fusion"))]
#[non_exhaustive]
pub struct TurnedPair<B: Backend> {
    /// As the queries.
    pub query: FloatTensor<B>,
    /// As the keys.
    pub key: FloatTensor<B>,
}
