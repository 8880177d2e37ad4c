//! What crosses the backend trait of summaries of pages.

use burn_blocksparse::op_values;

use crate::paged::values::StoredRows;

op_values! {
    /// The tensors of [`summarize_pages`](crate::summaries::summarize_pages) and [`summarize_stored`](crate::summaries::summarize_stored).
    pub struct SummarizeInputs {
        /// `[pages, 2 or 1, d_k]`
        pub summaries: FloatTensor,
        /// Keys of the pages.
        pub keys: StoredRows,
        /// `[batch, T, s]`: where rows went, or a negative number.
        pub slots: IntTensor,
    }

    /// The tensors of [`page_scores`](crate::summaries::page_scores).
    pub struct PageScoreInputs {
        /// `[batch, heads, d_k]`
        pub q: FloatTensor,
        /// `[pages, 2 or 1, d_k]`
        pub summaries: FloatTensor,
        /// `[batch, T, max_pages]`
        pub table: IntTensor,
        /// `[batch, T, 4]`
        pub spans: IntTensor,
    }
}
