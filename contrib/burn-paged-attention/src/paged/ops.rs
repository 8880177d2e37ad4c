//! The backend trait of attention over pages.

use crate::paged::values::{
    AppendInputs, PagedCall, PagedInputs, PagedRows, StoredPages, SumsInputs,
};
use crate::paged::{reference, slots_reference};
use burn_blocksparse::internal::prelude::*;

/// Attention over pages, writing into them and their slots one by one as backend operations, on tensors that are not on an autodiff device. Arguments are checked by the public
/// functions.
#[backend_extension(
    Flex: cfg(feature = "flex"),
    NdArray: cfg(feature = "ndarray"),
    Cube: cfg(feature = "cube"),
    Fusion: cfg(feature = "fusion"),
)]
pub trait PagedOps: Backend {
    /// Attention of a few queries of each sequence.
    #[fusion(meta = meta::attention)]
    fn paged_attention(
        #[extension_type] inputs: PagedInputs<Self>,
        call: PagedCall,
    ) -> PagedRows<Self> {
        reference::attention::<Self>(inputs, &call)
    }

    /// Rows written into pages: in place where the call alone holds them, otherwise into a copy.
    #[fusion(meta = |inputs| inputs.pages.clone())]
    fn append(#[extension_type] inputs: AppendInputs<Self>) -> StoredPages<Self> {
        reference::append::<Self>(inputs)
    }

    /// The slots of region one of page lists over a table `[page_lists, entries]` with spans `[page_lists, 4]`, i32 `[page_lists, entries · page]`: `x · page + slot` of entry `x`,
    /// and below 0 after the last.
    #[fusion(dtype = DType::I32, shape = [table[0], table[1] * page].into())]
    fn page_list_slots(
        table: IntTensor<Self>,
        spans: IntTensor<Self>,
        page: usize,
    ) -> IntTensor<Self> {
        slots_reference::page_list_slots::<Self>(table, spans, page)
    }

    /// The slots of each of so many heads of keys at places `[page_lists, most]` of page lists, i32 `[page_lists, heads, most]`: below 0 where a place is. Of an entry `x` the
    /// heads have pages `x · heads` and those after it.
    #[fusion(dtype = DType::I32, shape = [places[0], *heads, places[1]].into())]
    fn picked_slots(
        places: IntTensor<Self>,
        table: IntTensor<Self>,
        heads: usize,
        page: usize,
    ) -> IntTensor<Self> {
        slots_reference::picked_slots::<Self>(places, table, heads, page)
    }

    /// Numbers written at places `[n]` of others `[length]`, in place where the call alone holds these and otherwise in a copy; what has no place there is left out.
    #[fusion(dtype = to, shape = to)]
    fn write_integers(
        to: IntTensor<Self>,
        at: IntTensor<Self>,
        values: IntTensor<Self>,
    ) -> IntTensor<Self> {
        slots_reference::write_integers::<Self>(to, at, values)
    }

    /// What each key of region one of page lists got of attention so far and gets of the queries, by their lse, summed over the queries that share its head: in
    /// place where the call alone holds the sums, otherwise in a copy. Of row `i` of a sequence's `tokens` queries the last `tokens − 1 − i` keys are not seen. Keys of
    /// these tokens begin at 0.
    ///
    /// With a ring the row of position `p` goes to place `1 + p mod ring` after the sum; before, what is there is added to it, once the ring is full of rows
    /// that count: `loose` did before the call.
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
