//! The backend trait of summaries of pages, and scores by them.

use burn::backend::tensor::FloatTensor;
use burn::backend::{Backend, backend_extension};
#[cfg(feature = "fusion")]
use burn::tensor::DType;
use burn_blocksparse::reference_backends;
use burn_sparse_select::PageSummary;
use burn_sparse_select::pages::PageChoice;

use crate::summaries::reference;
use crate::summaries::values::{PageScoreInputs, SummarizeInputs};

/// Summaries of pages and scores by them as backend operations, on tensors that are not on an autodiff device. Arguments are checked by the public functions.
#[backend_extension(
    Flex: cfg(feature = "flex"),
    NdArray: cfg(feature = "ndarray"),
    Cube: cfg(feature = "cube"),
    Fusion: cfg(feature = "fusion"),
)]
pub trait PageSummaryOps: Backend {
    /// Summaries of the pages that rows were written to: in place where the call alone holds them, otherwise in a copy.
    #[fusion(dtype = inputs.summaries.dtype, shape = inputs.summaries.shape.clone())]
    fn summarize_pages(
        #[extension_type] inputs: SummarizeInputs<Self>,
        kv_heads: usize,
        summary: PageSummary,
    ) -> FloatTensor<Self> {
        reference::summarize::<Self>(inputs, kv_heads, summary)
    }

    /// Scores of pages, f32 `[batch, kv_heads, entries]`.
    #[fusion(
        dtype = DType::F32,
        shape = [inputs.table.shape[0], *kv_heads, inputs.table.shape[2]].into()
    )]
    fn page_scores(
        #[extension_type] inputs: PageScoreInputs<Self>,
        kv_heads: usize,
        choice: PageChoice,
    ) -> FloatTensor<Self> {
        reference::scores::<Self>(inputs, kv_heads, &choice)
    }
}

reference_backends!(PageSummaryOps);
