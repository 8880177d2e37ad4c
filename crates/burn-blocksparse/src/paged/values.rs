//! What crosses the backend trait of attention over pages.

use blocksparse::Quantization;
use burn::backend::tensor::{FloatTensor, IntTensor};
use burn::backend::{Backend, ExtensionType, TensorMetadata};

use super::page_choice::PageChoice;
use crate::values::OptFloat;

/// An optional tensor of integers.
#[derive(ExtensionType, Clone, Debug)]
#[extension_type(fusion: cfg(feature = "fusion"))]
pub enum OptInt<B: Backend> {
    /// The tensor.
    Some(IntTensor<B>),
    /// No tensor.
    None,
}

impl<B: Backend> OptInt<B> {
    pub(crate) fn into_option(self) -> Option<IntTensor<B>> {
        match self {
            Self::Some(tensor) => Some(tensor),
            Self::None => None,
        }
    }
}

impl<B: Backend> From<Option<IntTensor<B>>> for OptInt<B> {
    fn from(tensor: Option<IntTensor<B>>) -> Self {
        match tensor {
            Some(tensor) => Self::Some(tensor),
            None => Self::None,
        }
    }
}

/// The tensors of [`paged_attention`](crate::paged::paged_attention), contiguous or not.
#[derive(ExtensionType, Clone, Debug)]
#[extension_type(fusion: cfg(feature = "fusion"))]
#[non_exhaustive]
pub struct PagedInputs<B: Backend> {
    /// `[batch, heads, s, d_k]`
    pub q: FloatTensor<B>,
    /// Keys and values.
    #[extension_type]
    pub pages: StoredPages<B>,
    /// `[batch, T, max_pages]`
    pub table: IntTensor<B>,
    /// `[batch, T, 4]`
    pub spans: IntTensor<B>,
    /// `[ids, P]`: the position of each slot. It comes with the next two, or none of them does.
    #[extension_type]
    pub positions: OptInt<B>,
    /// `[ids, P]`: the last query that sees each slot.
    #[extension_type]
    pub last: OptInt<B>,
    /// `[batch]`: the position of the first query.
    #[extension_type]
    pub query_positions: OptInt<B>,
    /// `[batch, kv_heads, n]`: the entries of the table that count.
    #[extension_type]
    pub selected: OptInt<B>,
    /// `[heads]`, in the dtype of sums.
    #[extension_type]
    pub sinks: OptFloat<B>,
    /// Zeros, at least `batch · heads · s` of them, which calls leave as they find them.
    #[extension_type]
    pub counters: OptInt<B>,
}

/// Parameters of a call of [`paged_attention`](crate::paged::paged_attention).
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub struct PagedCall {
    /// Heads of keys and values.
    pub kv_heads: usize,
    /// Factor of the scores.
    pub scale: f64,
    /// Bound of the scores.
    pub softcap: Option<f64>,
    /// Pages of a part of a row, if that is not left to the kernels.
    pub fixed_split: Option<usize>,
}

impl PagedCall {
    pub(crate) fn new(
        kv_heads: usize,
        scale: f64,
        softcap: Option<f64>,
        fixed_split: Option<usize>,
    ) -> Self {
        Self {
            kv_heads,
            scale,
            softcap,
            fixed_split,
        }
    }
}

/// What attention over pages returns.
#[derive(ExtensionType, Clone, Debug)]
#[extension_type(fusion: cfg(feature = "fusion"))]
#[non_exhaustive]
pub struct PagedRows<B: Backend> {
    /// `[batch, heads, s, d_v]`, in the dtype of q.
    pub out: FloatTensor<B>,
    /// `[batch, heads, s]`; f32, or f64 for f64 inputs.
    pub lse: FloatTensor<B>,
}

/// The tensors of [`append_rows`](crate::paged::append_rows).
#[derive(ExtensionType, Clone, Debug)]
#[extension_type(fusion: cfg(feature = "fusion"))]
#[non_exhaustive]
pub struct AppendInputs<B: Backend> {
    /// `[pages, P, d_k]`
    pub keys: FloatTensor<B>,
    /// `[pages, P, d_v]`
    pub values: FloatTensor<B>,
    /// `[batch, kv_heads, s, d_k]`
    pub k: FloatTensor<B>,
    /// `[batch, kv_heads, s, d_v]`
    pub v: FloatTensor<B>,
    /// `[batch, T, s]`: where rows go, or a negative number.
    pub slots: IntTensor<B>,
}

/// Pages with rows written into them.
#[derive(ExtensionType, Clone, Debug)]
#[extension_type(fusion: cfg(feature = "fusion"))]
#[non_exhaustive]
pub struct Pages<B: Backend> {
    /// `[pages, P, d_k]`
    pub keys: FloatTensor<B>,
    /// `[pages, P, d_v]`
    pub values: FloatTensor<B>,
}

/// Keys and values in eight bits a number.
#[derive(ExtensionType, Clone, Debug)]
#[extension_type(fusion: cfg(feature = "fusion"))]
#[non_exhaustive]
pub struct PackedPages<B: Backend> {
    /// What the elements are.
    pub quantization: Quantization,
    /// `[pages, P, d_k / 4]`
    pub keys: IntTensor<B>,
    /// `[pages, P, d_v / 4]`
    pub values: IntTensor<B>,
    /// `[pages, P]`
    pub key_scales: FloatTensor<B>,
    /// `[pages, P]`
    pub value_scales: FloatTensor<B>,
}

/// Keys and values as pages store them.
#[derive(ExtensionType, Clone, Debug)]
#[extension_type(fusion: cfg(feature = "fusion"))]
pub enum StoredPages<B: Backend> {
    /// As floats.
    Plain(#[extension_type] Pages<B>),
    /// In eight bits a number.
    Quantized(#[extension_type] PackedPages<B>),
}

/// The tensors of [`append_quantized`](crate::paged::append_quantized).
#[derive(ExtensionType, Clone, Debug)]
#[extension_type(fusion: cfg(feature = "fusion"))]
#[non_exhaustive]
pub struct AppendPacked<B: Backend> {
    /// Where rows are written.
    #[extension_type]
    pub pages: PackedPages<B>,
    /// `[batch, kv_heads, s, d_k]`
    pub k: FloatTensor<B>,
    /// `[batch, kv_heads, s, d_v]`
    pub v: FloatTensor<B>,
    /// `[batch, T, s]`: where rows go, or a negative number.
    pub slots: IntTensor<B>,
}

impl<B: Backend> StoredPages<B> {
    /// Pages, and slots of a page.
    pub(crate) fn pages(&self) -> [usize; 2] {
        let shape = match self {
            Self::Plain(pages) => pages.keys.shape(),
            Self::Quantized(pages) => pages.keys.shape(),
        };
        [shape[0], shape[1]]
    }

    /// Widths of keys and values.
    pub(crate) fn widths(&self) -> [usize; 2] {
        match self {
            Self::Plain(pages) => [&pages.keys, &pages.values].map(|rows| rows.shape()[2]),
            Self::Quantized(pages) => {
                [&pages.keys, &pages.values].map(|words| 4 * words.shape()[2])
            }
        }
    }
}

/// The tensors of [`summarize_pages`](crate::paged::summarize_pages).
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

/// The tensors of [`summarize_stored`](crate::paged::summarize_stored), of keys in eight bits a number.
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

/// The tensors of [`page_scores`](crate::paged::page_scores).
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

/// Parameters of a choice of pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct PageChoiceCall {
    /// Heads of keys.
    pub kv_heads: usize,
    /// How pages are chosen.
    pub choice: PageChoice,
}

impl PageChoiceCall {
    pub(crate) fn new(kv_heads: usize, choice: &PageChoice) -> Self {
        Self {
            kv_heads,
            choice: *choice,
        }
    }

    /// What sums over so many heads that share keys are multiplied by.
    pub(crate) fn factor(&self, group: usize) -> f64 {
        match self.choice.mean {
            true => 1.0 / group as f64,
            false => 1.0,
        }
    }
}
