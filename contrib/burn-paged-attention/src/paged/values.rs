//! Types that cross the backend trait of paged attention.

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
        /// `[ids, P]`: the position of each slot. Present together with `last` and `query_positions`.
        pub positions: OptInt,
        /// `[ids, P]`: the last query that sees each slot.
        pub last: OptInt,
        /// `[batch]`: the position of the first query.
        pub query_positions: OptInt,
        /// `[batch, kv_heads, n]`: indices of the table entries to attend to.
        pub selected: OptInt,
        /// `[heads]`, in the accumulation dtype.
        pub sinks: OptFloat,
        /// `[batch · heads · s]` or longer, zeros; calls leave zeros behind.
        pub counters: OptInt,
    }
}

/// Parameters of a call of [`paged_attention`](crate::paged::paged_attention).
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub struct PagedCall {
    /// Number of KV heads.
    pub kv_heads: usize,
    /// Factor of the scores.
    pub scale: f64,
    /// Softcap of the scores.
    pub softcap: Option<f64>,
    /// Pages of a split of a row; None: the kernels choose.
    pub fixed_split: Option<usize>,
}

op_values! {
    /// Output of paged attention.
    pub struct PagedRows {
        /// `[batch, heads, s, d_v]`, in the dtype of q.
        pub out: FloatTensor,
        /// `[batch, heads, s]`; f32, or f64 for f64 inputs.
        pub lse: FloatTensor,
    }
}

/// Storage of keys or of values.
#[derive(ExtensionType, Clone, Debug)]
#[extension_type(fusion: cfg(feature = "fusion"))]
pub enum StoredRows<B: Backend> {
    /// Floats `[pages, P, width]`.
    Plain(FloatTensor<B>),
    /// Eight bits per element.
    Packed(#[extension_type] PackedRows<B>),
}

/// Keys or values with eight bits per element.
#[derive(ExtensionType, Clone, Debug)]
#[extension_type(fusion: cfg(feature = "fusion"))]
#[non_exhaustive]
pub struct PackedRows<B: Backend> {
    /// Element type.
    pub quantization: Quantization,
    /// `[pages, P, width / 4]`
    pub words: IntTensor<B>,
    /// `[pages, P]`
    pub scales: FloatTensor<B>,
}

op_values! {
    /// Keys and values in the same storage format.
    pub struct StoredPages {
        /// Rows of `d_k` elements.
        pub keys: StoredRows,
        /// Rows of `d_v` elements.
        pub values: StoredRows,
    }

    /// The tensors of [`append_rows`](crate::paged::append_rows) and [`append_quantized`](crate::paged::append_quantized).
    pub struct AppendInputs {
        /// Pages to write to.
        pub pages: StoredPages,
        /// `[batch, kv_heads, s, d_k]`
        pub k: FloatTensor,
        /// `[batch, kv_heads, s, d_v]`
        pub v: FloatTensor,
        /// `[batch, T, s]`: destination slots; negative: the row is not stored.
        pub slots: IntTensor,
    }

    /// The tensors of `PagedOps::attention_sums`.
    pub struct SumsInputs {
        /// `[batch, heads, s, d_k]`
        pub q: FloatTensor,
        /// `[batch, heads, s]`, in the accumulation dtype.
        pub lse: FloatTensor,
        /// Keys and values.
        pub pages: StoredPages,
        /// `[batch, T, max_pages]`
        pub table: IntTensor,
        /// `[batch, T, 4]`
        pub spans: IntTensor,
        /// `[batch, 4]`: per sequence the seat, the number of queries, the number of valid ring rows, and the position of the first query.
        pub calls: IntTensor,
        /// `[seats · kv_heads, slots, 1 + ring]`, in the accumulation dtype: per key slot of a page list, the sum followed by the ring's rows.
        pub sums: FloatTensor,
    }
}

impl<B: Backend> StoredRows<B> {
    /// Returns `[pages, slots of a page, width of a row]`.
    pub fn dims(&self) -> [usize; 3] {
        match self {
            Self::Plain(rows) => rows.shape().dims(),
            Self::Packed(rows) => {
                let [pages, page, words] = rows.words.shape().dims();
                [pages, page, 4 * words]
            }
        }
    }

    /// Returns the element type if elements have eight bits.
    pub fn quantization(&self) -> Option<Quantization> {
        match self {
            Self::Plain(_) => None,
            Self::Packed(rows) => Some(rows.quantization),
        }
    }
}

impl<B: Backend> StoredPages<B> {
    /// Returns `[pages, slots of a page]`.
    pub fn pages(&self) -> [usize; 2] {
        let [pages, page, _] = self.keys.dims();
        [pages, page]
    }

    /// Returns the widths of keys and values.
    pub fn widths(&self) -> [usize; 2] {
        [&self.keys, &self.values].map(|rows| rows.dims()[2])
    }
}
