//! The backend trait of paged attention.

use crate::paged::values::{
    AppendInputs, PagedCall, PagedInputs, PagedRows, StoredPages, SumsInputs,
};
use crate::paged::{reference, slots_reference};
use burn_blocksparse::internal::prelude::*;

/// Attention over pages, writes into pages and slot index lists as backend operations, on tensors that are not on an autodiff device. The public
/// functions check the arguments.
#[backend_extension(
    Flex: cfg(feature = "flex"),
    NdArray: cfg(feature = "ndarray"),
    Cube: cfg(feature = "cube"),
    Fusion: cfg(feature = "fusion"),
)]
pub trait PagedOps: Backend {
    /// Computes the attention of a few queries of each sequence.
    #[fusion(meta = meta::attention)]
    fn paged_attention(
        #[extension_type] inputs: PagedInputs<Self>,
        call: PagedCall,
    ) -> PagedRows<Self> {
        reference::attention::<Self>(inputs, &call)
    }

    /// Writes rows into pages: in place if the call holds the only reference, otherwise into a copy.
    #[fusion(meta = |inputs| inputs.pages.clone())]
    fn append(#[extension_type] inputs: AppendInputs<Self>) -> StoredPages<Self> {
        reference::append::<Self>(inputs)
    }

    /// Lists the slots of region one of each page list, from a table `[page_lists, entries]` and spans `[page_lists, 4]`: i32
    /// `[page_lists, entries · page]`, `x · page + slot` for entry `x`, padded with negative numbers.
    #[fusion(dtype = DType::I32, shape = [table[0], table[1] * page].into())]
    fn page_list_slots(
        table: IntTensor<Self>,
        spans: IntTensor<Self>,
        page: usize,
    ) -> IntTensor<Self> {
        slots_reference::page_list_slots::<Self>(table, spans, page)
    }

    /// Maps places `[page_lists, most]` along the page lists to the slots of each KV head, i32 `[page_lists, heads, most]`; negative places stay
    /// negative. Entry `x` is the pages `x · heads ..`, one per head.
    #[fusion(dtype = DType::I32, shape = [places[0], *heads, places[1]].into())]
    fn picked_slots(
        places: IntTensor<Self>,
        table: IntTensor<Self>,
        heads: usize,
        page: usize,
    ) -> IntTensor<Self> {
        slots_reference::picked_slots::<Self>(places, table, heads, page)
    }

    /// Scatters integers into `to`, `[length]`, at the indices `at`, `[n]`: in place if the call holds the only reference, otherwise into a copy.
    /// Indices out of range are skipped.
    #[fusion(dtype = to, shape = to)]
    fn write_integers(
        to: IntTensor<Self>,
        at: IntTensor<Self>,
        values: IntTensor<Self>,
    ) -> IntTensor<Self> {
        slots_reference::write_integers::<Self>(to, at, values)
    }

    /// Adds to each key's sum of attention (region one of its page list) the probabilities of these queries, from their lse, summed over the queries
    /// that share the KV head: in place if the call holds the only reference, otherwise in a copy. Of a sequence's `tokens` queries, row `i` does
    /// not see the last `tokens − 1 − i` keys. Sums of the keys of these tokens start at 0.
    ///
    /// With a ring, the row of position `p` is stored at index `1 + p mod ring` instead of being added at once. The row that it overwrites is added
    /// to the sum first, once the ring is full of valid rows; `loose` of them were valid before the call.
    #[fusion(dtype = inputs.sums.dtype, shape = inputs.sums.shape.clone())]
    fn attention_sums(
        #[extension_type] inputs: SumsInputs<Self>,
        call: PagedCall,
    ) -> FloatTensor<Self> {
        reference::attention_sums::<Self>(inputs, &call)
    }
}

reference_backends!(PagedOps);

/// Output shapes and dtypes for fusion.
#[cfg(feature = "fusion")]
mod meta {
    use super::*;
    use crate::paged::values::{PagedInputsMetadata, PagedRowsMetadata, StoredRowsMetadata};
    use burn_blocksparse::internal::dtype::sums_of;

    pub fn attention(inputs: &PagedInputsMetadata, _call: &PagedCall) -> PagedRowsMetadata {
        let [batch, heads, rows, _] = inputs.q.shape.dims::<4>();
        let width = match &inputs.pages.values {
            StoredRowsMetadata::Plain(rows) => rows.shape[2],
            StoredRowsMetadata::Packed(rows) => 4 * rows.words.shape[2],
        };
        let sums = sums_of(inputs.q.dtype);
        PagedRowsMetadata {
            out: TensorSpec::new([batch, heads, rows, width].into(), inputs.q.dtype),
            lse: TensorSpec::new([batch, heads, rows].into(), sums),
        }
    }
}
