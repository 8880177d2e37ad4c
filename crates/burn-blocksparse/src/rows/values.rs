//! What crosses backends of rows that are taken by an index.

use burn::backend::tensor::{FloatTensor, IntTensor};
use burn::backend::{Backend, ExtensionType};

use crate::float_list;

/// A part of each query and others at places, to be merged by their lse, as [`RowOps::merged_parts`](crate::rows::ops::RowOps::merged_parts) takes them.
#[derive(ExtensionType, Clone, Debug)]
#[extension_type(fusion: cfg(feature = "fusion"))]
#[non_exhaustive]
pub struct MergedParts<B: Backend> {
    /// A row of each query: `[batch, heads, queries, dim]`.
    pub own: FloatTensor<B>,
    /// Its lse, `[batch, heads, queries]`, in the dtype of sums.
    pub own_lse: FloatTensor<B>,
    /// Gathered rows: `[batch, heads, places, dim]`, in the dtype of `own`.
    pub rows: FloatTensor<B>,
    /// Their lse, `[batch, heads, places]`.
    pub lses: FloatTensor<B>,
    /// The places of each query: `[batch, heads, queries, most]`, negative for none.
    pub places: IntTensor<B>,
    /// The query at each place, times `most`, plus the number among the query's: `[batch, heads, places]`, negative for none.
    pub choices: IntTensor<B>,
}

/// Output of merged parts.
#[derive(ExtensionType, Clone, Debug)]
#[extension_type(fusion: cfg(feature = "fusion"))]
#[non_exhaustive]
pub struct MergedOutput<B: Backend> {
    /// As `own`.
    pub out: FloatTensor<B>,
    /// As `own_lse`, −∞ where no part has keys.
    pub lse: FloatTensor<B>,
}

/// Gradients with respect to the floats of [`MergedParts`].
#[derive(ExtensionType, Clone, Debug)]
#[extension_type(fusion: cfg(feature = "fusion"))]
#[non_exhaustive]
pub struct MergedGrads<B: Backend> {
    /// By a query's own row.
    pub own: FloatTensor<B>,
    /// By its lse.
    pub own_lse: FloatTensor<B>,
    /// By the gathered rows.
    pub rows: FloatTensor<B>,
    /// By their lse.
    pub lses: FloatTensor<B>,
}

float_list!(MergedOutput, 2: out lse;);
float_list!(MergedGrads, 4: own own_lse rows lses;);
