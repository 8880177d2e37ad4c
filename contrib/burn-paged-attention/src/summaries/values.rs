//! What crosses the backend trait of summaries of pages.

use burn::backend::tensor::{FloatTensor, IntTensor};
use burn::backend::{Backend, ExtensionType};

use crate::paged::values::StoredRows;

/// The tensors of [`summarize_pages`](crate::summaries::summarize_pages) and [`summarize_stored`](crate::summaries::summarize_stored).
#[derive(ExtensionType, Clone, Debug)]
#[extension_type(fusion: cfg(feature = "fusion"))]
#[non_exhaustive]
pub struct SummarizeInputs<B: Backend> {
    /// `[pages, 2 or 1, d_k]`
    pub summaries: FloatTensor<B>,
    /// Keys of the pages.
    #[extension_type]
    pub keys: StoredRows<B>,
    /// `[batch, T, s]`: where rows went, or a negative number.
    pub slots: IntTensor<B>,
}

/// The tensors of [`page_scores`](crate::summaries::page_scores).
#[derive(ExtensionType, Clone, Debug)]
#[extension_type(fusion: cfg(feature = "fusion"))]
#[non_exhaustive]
pub struct PageScoreInputs<B: Backend> {
    /// `[batch, heads, d_k]`
    pub q: FloatTensor<B>,
    /// `[pages, 2 or 1, d_k]`
    pub summaries: FloatTensor<B>,
    /// `[batch, T, max_pages]`
    pub table: IntTensor<B>,
    /// `[batch, T, 4]`
    pub spans: IntTensor<B>,
}
