//! Values in the signatures of the backend trait of rotary position embedding.

use burn_blocksparse::internal::prelude::*;

op_values! {
    /// Rows, and the table that rotates them.
    pub struct RopeInputs {
        /// Rows, `[batch, heads, seq, width]`.
        pub x: FloatTensor,
        /// Second tensor of rows to rotate: the same shape, with its own number of heads.
        pub key: OptFloat,
        /// Cosine and sine for both channels of a pair, `[context, width, 2]`.
        pub table: FloatTensor,
        /// Table row of each row, `[batch · seq]`. None: consecutive table rows, from the call's first on.
        pub places: OptInt,
    }
}

/// Parameters of a rotation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct RopeCall {
    /// Position of the first row, if there are no places.
    pub first: usize,
    /// True if the rotation is reversed.
    pub back: bool,
    /// Dtype of the result.
    pub dtype: FloatDType,
}

op_values! {
    /// Rotated rows.
    pub struct TurnedRows {
        /// [`RopeInputs::x`], rotated.
        pub x: FloatTensor,
        /// [`RopeInputs::key`], rotated.
        pub key: OptFloat,
    }
}
