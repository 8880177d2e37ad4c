//! What crosses backends of rows that are taken by an index.

use crate::{float_list, op_values};

op_values! {
    /// A part of each query and others at places, to be merged by their lse, as [`RowOps::merged_parts`](crate::rows::ops::RowOps::merged_parts) takes them.
    pub struct MergedParts {
        /// A row of each query: `[batch, heads, queries, dim]`.
        pub own: FloatTensor,
        /// Its lse, `[batch, heads, queries]`, in the dtype of sums.
        pub own_lse: FloatTensor,
        /// Gathered rows: `[batch, heads, places, dim]`, in the dtype of `own`.
        pub rows: FloatTensor,
        /// Their lse, `[batch, heads, places]`.
        pub lses: FloatTensor,
        /// The places of each query: `[batch, heads, queries, most]`, negative for none.
        pub places: IntTensor,
        /// The query at each place, times `most`, plus the number among the query's: `[batch, heads, places]`, negative for none.
        pub choices: IntTensor,
    }

    /// Output of merged parts.
    pub struct MergedOutput {
        /// As `own`.
        pub out: FloatTensor,
        /// As `own_lse`, −∞ where no part has keys.
        pub lse: FloatTensor,
    }

    /// Gradients with respect to the floats of [`MergedParts`].
    pub struct MergedGrads {
        /// By a query's own row.
        pub own: FloatTensor,
        /// By its lse.
        pub own_lse: FloatTensor,
        /// By the gathered rows.
        pub rows: FloatTensor,
        /// By their lse.
        pub lses: FloatTensor,
    }
}

float_list!(MergedOutput, 2: out lse;);
float_list!(MergedGrads, 4: own own_lse rows lses;);
