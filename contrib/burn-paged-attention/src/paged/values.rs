//! What crosses the backend trait of attention over pages.

use blocksparse::Quantization;
use burn::backend::ExtensionType;

use burn_blocksparse::internal::prelude::*;
pub use burn_blocksparse::internal::values::OptInt;

op_values! {
    /// The tensors of [`paged_attention`](crate::paged::paged_attention), contiguous or not.
    pub struct PagedInputs {
        /// `[batch, heads, s, d_k]`
        pub q: FloatTensor,
        /// Keys and values.
        pub pages: StoredPages,
        /// `[batch, T, max_pages]`
        pub table: IntTensor,
        /// `[batch, T, 4]`
        pub spans: IntTensor,
        /// `[ids, P]`: the position of each slot. It comes with the next two, or none of them does.
        pub positions: OptInt,
        /// `[ids, P]`: the last query that sees each slot.
        pub last: OptInt,
        /// `[batch]`: the position of the first query.
        pub query_positions: OptInt,
        /// `[batch, kv_heads, n]`: the entries of the table that count.
        pub selected: OptInt,
        /// `[heads]`, in the dtype of sums.
        pub sinks: OptFloat,
        /// Zeros, at least `batch · heads · s` of them, which calls leave as they find them.
        pub counters: OptInt,
    }
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

op_values! {
    /// Output of attention over pages.
    pub struct PagedRows {
        /// `[batch, heads, s, d_v]`, in the dtype of q.
        pub out: FloatTensor,
        /// `[batch, heads, s]`; f32, or f64 for f64 inputs.
        pub lse: FloatTensor,
    }
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

op_values! {
    /// Keys and values, which are stored alike.
    pub struct StoredPages {
        /// Rows of `d_k` numbers.
        pub keys: StoredRows,
        /// Rows of `d_v` numbers.
        pub values: StoredRows,
    }

    /// The tensors of [`append_rows`](crate::paged::append_rows) and [`append_quantized`](crate::paged::append_quantized).
    pub struct AppendInputs {
        /// Where rows are written.
        pub pages: StoredPages,
        /// `[batch, kv_heads, s, d_k]`
        pub k: FloatTensor,
        /// `[batch, kv_heads, s, d_v]`
        pub v: FloatTensor,
        /// `[batch, T, s]`: where rows go, or a negative number.
        pub slots: IntTensor,
    }

    /// The tensors of `PagedOps::attention_sums`.
    pub struct SumsInputs {
        /// `[batch, heads, s, d_k]`
        pub q: FloatTensor,
        /// `[batch, heads, s]`, in the dtype of sums.
        pub lse: FloatTensor,
        /// Keys and values.
        pub pages: StoredPages,
        /// `[batch, T, max_pages]`
        pub table: IntTensor,
        /// `[batch, T, 4]`
        pub spans: IntTensor,
        /// `[batch, 4]`: of each sequence its seat, its queries, how many rows of its ring count, and the position of the first query.
        pub calls: IntTensor,
        /// `[seats · kv_heads, slots, 1 + ring]`, in the dtype of sums: of the key in each slot of a page list the sum, and the rows of the ring.
        pub sums: FloatTensor,
    }
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
