//! What crosses the backend trait of summaries of pages.

use blocksparse::Quantization;
use burn::backend::tensor::{FloatTensor, IntTensor};
use burn::backend::{Backend, ExtensionType};

/// The tensors of [`summarize_pages`](crate::summaries::summarize_pages).
#[derive(ExtensionType, Clone, Debug)]
#[extension_type(fusion: cfg(feature = "fusion"))]
#[non_exhaustive]
pub struct SummarizeInputs<B: Backend> {
    /// `[pages, 2 or 1, d_k]`
    pub summaries: FloatTensor<B>,
    /// `[pages, P, d_k]`
    pub keys: FloatTensor<B>,
    /// `[batch, T, s]`: where rows went, or a negative number.
    pub slots: IntTensor<B>,
}

/// The tensors of [`summarize_stored`](crate::summaries::summarize_stored), of keys in eight bits a number.
#[derive(ExtensionType, Clone, Debug)]
#[extension_type(fusion: cfg(feature = "fusion"))]
#[non_exhaustive]
pub struct SummarizePacked<B: Backend> {
    /// What the elements are.
    pub quantization: Quantization,
    /// `[pages, 2 or 1, d_k]`
    pub summaries: FloatTensor<B>,
    /// `[pages, P, d_k / 4]`
    pub words: IntTensor<B>,
    /// `[pages, P]`
    pub scales: FloatTensor<B>,
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
