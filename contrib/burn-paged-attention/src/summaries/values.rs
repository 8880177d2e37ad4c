//! What crosses the backend trait of summaries of pages.

use blocksparse::Quantization;
use burn::backend::tensor::{FloatTensor, IntTensor};
use burn::backend::{Backend, ExtensionType, TensorMetadata};

/// The tensors of [`summarize_pages`](crate::summaries::summarize_pages) and [`summarize_stored`](crate::summaries::summarize_stored).
#[derive(ExtensionType, Clone, Debug)]
#[extension_type(fusion: cfg(feature = "fusion"))]
#[non_exhaustive]
pub struct SummarizeInputs<B: Backend> {
    /// `[pages, 2 or 1, d_k]`
    pub summaries: FloatTensor<B>,
    /// Keys of the pages.
    #[extension_type]
    pub keys: StoredKeys<B>,
    /// `[batch, T, s]`: where rows went, or a negative number.
    pub slots: IntTensor<B>,
}

/// Keys as pages store them.
#[derive(ExtensionType, Clone, Debug)]
#[extension_type(fusion: cfg(feature = "fusion"))]
pub enum StoredKeys<B: Backend> {
    /// As floats, `[pages, P, d_k]`.
    Plain(FloatTensor<B>),
    /// In eight bits a number.
    Quantized(#[extension_type] PackedKeys<B>),
}

/// Keys in eight bits a number.
#[derive(ExtensionType, Clone, Debug)]
#[extension_type(fusion: cfg(feature = "fusion"))]
#[non_exhaustive]
pub struct PackedKeys<B: Backend> {
    /// Type of the elements.
    pub quantization: Quantization,
    /// `[pages, P, d_k / 4]`
    pub words: IntTensor<B>,
    /// `[pages, P]`
    pub scales: FloatTensor<B>,
}

impl<B: Backend> StoredKeys<B> {
    /// Pages, slots of a page, and the width of a key.
    pub fn dims(&self) -> [usize; 3] {
        match self {
            Self::Plain(keys) => keys.shape().dims(),
            Self::Quantized(keys) => {
                let [pages, page, words] = keys.words.shape().dims();
                [pages, page, 4 * words]
            }
        }
    }
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
