//! Argument types of the backend trait of indexed rows.

use crate::{float_list, op_values};

op_values! {
    /// A part of each query and gathered parts at places, to be merged by lse with [`RowOps::merged_parts`](crate::rows::ops::RowOps::merged_parts).
    pub struct MergedParts {
        /// Own row of each query: `[batch, heads, queries, dim]`.
        pub own: FloatTensor,
        /// lse of the own rows, `[batch, heads, queries]`, in the dtype of sums.
        pub own_lse: FloatTensor,
        /// Gathered rows: `[batch, heads, places, dim]`, in the dtype of `own`.
        pub rows: FloatTensor,
        /// lse of the gathered rows, `[batch, heads, places]`.
        pub lses: FloatTensor,
        /// Places of each query: `[batch, heads, queries, most]`, negative for none.
        pub places: IntTensor,
        /// For each place its query times `most`, plus its index among the query's places: `[batch, heads, places]`, negative for none.
        pub choices: IntTensor,
    }

    /// Result of merging parts.
    pub struct MergedOutput {
        /// Merged rows, with the shape and dtype of `own`.
        pub out: FloatTensor,
        /// lse of the merged rows, with the shape and dtype of `own_lse`; −∞ if no part has keys.
        pub lse: FloatTensor,
    }

    /// Gradients with respect to the float tensors of [`MergedParts`].
    pub struct MergedGrads {
        /// With respect to a query's own row.
        pub own: FloatTensor,
        /// With respect to its lse.
        pub own_lse: FloatTensor,
        /// With respect to the gathered rows.
        pub rows: FloatTensor,
        /// With respect to their lse.
        pub lses: FloatTensor,
    }
}

float_list!(MergedOutput, 2: out lse;);
float_list!(MergedGrads, 4: own own_lse rows lses;);
