//! The backend trait of attention over pages.

use burn::backend::{Backend, backend_extension};

use crate::paged::reference;
use crate::paged::values::{
    AppendInputs, AppendPacked, PackedPages, PagedCall, PagedInputs, PagedRows, Pages,
};

/// Attention over pages and writing into them as backend operations, on tensors that are not on an autodiff device. Arguments are checked by the public
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
    #[fusion(meta = meta::append)]
    fn append_rows(#[extension_type] inputs: AppendInputs<Self>) -> Pages<Self> {
        reference::append::<Self>(inputs)
    }

    /// The same into quantised pages.
    #[fusion(meta = meta::append_quantized)]
    fn append_quantized(#[extension_type] inputs: AppendPacked<Self>) -> PackedPages<Self> {
        reference::append_quantized::<Self>(inputs)
    }
}

/// Output shapes and dtypes for fusion.
#[cfg(feature = "fusion")]
mod meta {
    use burn::backend::fusion::custom::TensorSpec;

    use super::*;
    use crate::paged::values::{
        AppendInputsMetadata, AppendPackedMetadata, PackedPagesMetadata, PagedInputsMetadata,
        PagedRowsMetadata, PagesMetadata, StoredPagesMetadata,
    };
    use burn_blocksparse::internal::dtype::accumulate_in;

    pub fn attention(inputs: &PagedInputsMetadata, _call: &PagedCall) -> PagedRowsMetadata {
        let [batch, heads, rows, _] = inputs.q.shape.dims::<4>();
        let width = match &inputs.pages {
            StoredPagesMetadata::Plain(pages) => pages.values.shape[2],
            StoredPagesMetadata::Quantized(pages) => 4 * pages.values.shape[2],
        };
        let sums = accumulate_in(inputs.q.dtype.into()).into();
        PagedRowsMetadata {
            out: TensorSpec::new([batch, heads, rows, width].into(), inputs.q.dtype),
            lse: TensorSpec::new([batch, heads, rows].into(), sums),
        }
    }

    pub fn append(inputs: &AppendInputsMetadata) -> PagesMetadata {
        PagesMetadata {
            keys: inputs.keys.clone(),
            values: inputs.values.clone(),
        }
    }

    pub fn append_quantized(inputs: &AppendPackedMetadata) -> PackedPagesMetadata {
        inputs.pages.clone()
    }
}
