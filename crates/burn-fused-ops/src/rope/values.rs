//! What crosses the backend trait of rotary position embedding.

use burn_blocksparse::internal::prelude::*;

op_values! {
    /// Rows and the table that rotates them.
    pub struct RopeInputs {
        /// `[batch, heads, seq, width]`
        pub x: FloatTensor,
        /// Rows that are turned alike: the same with heads of its own.
        pub key: OptFloat,
        /// `[context, width, 2]`: cosine and sine, for both channels of a pair.
        pub table: FloatTensor,
        /// `[batch · seq]`: rows of the table. None: those from the call's first on.
        pub places: OptInt,
    }
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

op_values! {
    /// Rows, turned.
    pub struct TurnedRows {
        /// As [`RopeInputs::x`].
        pub x: FloatTensor,
        /// As [`RopeInputs::key`].
        pub key: OptFloat,
    }
}
