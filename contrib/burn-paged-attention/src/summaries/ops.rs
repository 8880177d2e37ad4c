//! The backend trait of summaries of pages, and scores by them.

use burn::backend::tensor::FloatTensor;
use burn::backend::{Backend, backend_extension};
use burn_sparse_select::PageSummary;
use burn_sparse_select::backend::PageChoiceCall;

use crate::summaries::reference;
use crate::summaries::values::{PageScoreInputs, SummarizeInputs, SummarizePacked};

/// Summaries of pages and scores by them as backend operations, on tensors that are not on an autodiff device. Arguments are checked by the public functions.
#[backend_extension(
    Flex: cfg(feature = "flex"),
    NdArray: cfg(feature = "ndarray"),
    Cube: cfg(feature = "cube"),
    Fusion: cfg(feature = "fusion"),
)]
pub trait PageSummaryOps: Backend {
    /// Summaries of the pages that rows were written to: in place where the call alone holds them, otherwise in a copy.
    #[fusion(meta = meta::summaries)]
    fn summarize_pages(
        #[extension_type] inputs: SummarizeInputs<Self>,
        kv_heads: usize,
        summary: PageSummary,
    ) -> FloatTensor<Self> {
        reference::summarize::<Self>(inputs, kv_heads, summary)
    }

    /// The same of keys in eight bits a number.
    #[fusion(meta = meta::packed_summaries)]
    fn summarize_quantized(
        #[extension_type] inputs: SummarizePacked<Self>,
        kv_heads: usize,
        summary: PageSummary,
    ) -> FloatTensor<Self> {
        reference::summarize_packed::<Self>(inputs, kv_heads, summary)
    }

    /// Scores of pages, f32 `[batch, kv_heads, entries]`.
    #[fusion(meta = meta::scores)]
    fn page_scores(
        #[extension_type] inputs: PageScoreInputs<Self>,
        call: PageChoiceCall,
    ) -> FloatTensor<Self> {
        reference::scores::<Self>(inputs, &call)
    }
}

/// Output shapes and dtypes for fusion.
#[cfg(feature = "fusion")]
mod meta {
    use burn::backend::fusion::custom::TensorSpec;
    use burn::tensor::DType;

    use super::*;
    use crate::summaries::values::{
        PageScoreInputsMetadata, SummarizeInputsMetadata, SummarizePackedMetadata,
    };

    pub fn summaries(
        inputs: &SummarizeInputsMetadata,
        _kv_heads: &usize,
        _summary: &PageSummary,
    ) -> TensorSpec {
        inputs.summaries.clone()
    }

    pub fn packed_summaries(
        inputs: &SummarizePackedMetadata,
        _kv_heads: &usize,
        _summary: &PageSummary,
    ) -> TensorSpec {
        inputs.summaries.clone()
    }

    pub fn scores(inputs: &PageScoreInputsMetadata, call: &PageChoiceCall) -> TensorSpec {
        let [batch, _, entries] = inputs.table.shape.dims::<3>();
        TensorSpec::new([batch, call.kv_heads, entries].into(), DType::F32)
    }
}
