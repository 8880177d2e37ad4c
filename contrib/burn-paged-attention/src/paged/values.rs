//! What crosses the backend trait of attention over pages.

use blocksparse::Quantization;
use burn::backend::tensor::{FloatTensor, IntTensor};
use burn::backend::{Backend, ExtensionType, TensorMetadata};

use burn_blocksparse::internal::values::OptFloat;
pub use burn_blocksparse::internal::values::OptInt;

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

/// Output of attention over pages.
#[derive(ExtensionType, Clone, Debug)]
#[extension_type(fusion: cfg(feature = "fusion"))]
#[non_exhaustive]
pub struct PagedRows<B: Backend> {
    /// `[batch, heads, s, d_v]`, in the dtype of q.
    pub out: FloatTensor<B>,
    /// `[batch, heads, s]`; f32, or f64 for f64 inputs.
    pub lse: FloatTensor<B>,
}

/// Keys or values as pages store them.
#[derive(ExtensionType, Clone, Debug)]
#[extension_type(fusion: cfg(feature = "fusion"))]
pub enum StoredRows<B: Backend> {
    /// As floats, `[pages, P, width]`.
    Plain(FloatTensor<B>),
    /// In eight bits a number.
    Packed(#[extension_type] PackedRows<B>),
}

/// Keys or values in eight bits a number.
#[derive(ExtensionType, Clone, Debug)]
#[extension_type(fusion: cfg(feature = "fusion"))]
#[non_exhaustive]
pub struct PackedRows<B: Backend> {
    /// Type of the elements.
    pub quantization: Quantization,
    /// `[pages, P, width / 4]`
    pub words: IntTensor<B>,
    /// `[pages, P]`
    pub scales: FloatTensor<B>,
}

/// Keys and values, which are stored alike.
#[derive(ExtensionType, Clone, Debug)]
#[extension_type(fusion: cfg(feature = "fusion"))]
#[non_exhaustive]
pub struct StoredPages<B: Backend> {
    /// Rows of `d_k` numbers.
    #[extension_type]
    pub keys: StoredRows<B>,
    /// Rows of `d_v` numbers.
    #[extension_type]
    pub values: StoredRows<B>,
}

/// The tensors of [`append_rows`](crate::paged::append_rows) and [`append_quantized`](crate::paged::append_quantized).
#[derive(ExtensionType, Clone, Debug)]
#[extension_type(fusion: cfg(feature = "fusion"))]
#[non_exhaustive]
pub struct AppendInputs<B: Backend> {
    /// Where rows are written.
    #[extension_type]
    pub pages: StoredPages<B>,
    /// `[batch, kv_heads, s, d_k]`
    pub k: FloatTensor<B>,
    /// `[batch, kv_heads, s, d_v]`
    pub v: FloatTensor<B>,
    /// `[batch, T, s]`: where rows go, or a negative number.
    pub slots: IntTensor<B>,
}

/// The tensors of `PagedOps::attention_sums`.
#[derive(ExtensionType, Clone, Debug)]
#[extension_type(fusion: cfg(feature = "fusion"))]
#[non_exhaustive]
pub struct SumsInputs<B: Backend> {
    /// `[batch, heads, s, d_k]`
    pub q: FloatTensor<B>,
    /// `[batch, heads, s]`, in the dtype of sums.
    pub lse: FloatTensor<B>,
    /// Keys and values.
    #[extension_type]
    pub pages: StoredPages<B>,
    /// `[batch, T, max_pages]`
    pub table: IntTensor<B>,
    /// `[batch, T, 4]`
    pub spans: IntTensor<B>,
    /// `[batch, 4]`: of each sequence its seat, its queries, how many rows of its ring count, and the position of the first query.
    pub calls: IntTensor<B>,
    /// `[seats · kv_heads, slots, 1 + ring]`, in the dtype of sums: of the key in each slot of a page list the sum, and the rows of the ring.
    pub sums: FloatTensor<B>,
}

impl<B: Backend> StoredRows<B> {
    /// Pages, slots of a page, and the width of a row.
    pub fn dims(&self) -> [usize; 3] {
        match self {
            Self::Plain(rows) => rows.shape().dims(),
            Self::Packed(rows) => {
                let [pages, page, words] = rows.words.shape().dims();
                [pages, page, 4 * words]
            }
        }
    }

    /// Type of the elements, if they have eight bits.
    pub fn quantization(&self) -> Option<Quantization> {
        match self {
            Self::Plain(_) => None,
            Self::Packed(rows) => Some(rows.quantization),
        }
    }
}

impl<B: Backend> StoredPages<B> {
    /// Pages, and slots of a page.
    pub fn pages(&self) -> [usize; 2] {
        let [pages, page, _] = self.keys.dims();
        [pages, page]
    }

    /// Widths of keys and values.
    pub fn widths(&self) -> [usize; 2] {
        [&self.keys, &self.values].map(|rows| rows.dims()[2])
    }
}
