//! The backend trait of choosing pages by content.

use burn::backend::tensor::{FloatTensor, IntTensor};
use burn::backend::{Backend, backend_extension};

use crate::pages::reference;
use crate::pages::values::{PageChoiceCall, PageScoreInputs, SummarizeInputs, SummarizePacked};
use crate::selection::PageSummary;

/// Choices of pages as backend operations, on tensors that are not on an autodiff device. Arguments are checked by the public functions.
#[backend_extension(
    Flex: cfg(feature = "flex"),
    NdArray: cfg(feature = "ndarray"),
    Cube: cfg(feature = "cube"),
    Fusion: cfg(feature = "fusion"),
)]
pub trait PageChoiceOps: Backend {
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

    /// The pages of the highest scores, i32 `[batch, kv_heads, keep · block]`.
    #[fusion(meta = meta::highest)]
    fn topk_pages(
        scores: FloatTensor<Self>,
        spans: IntTensor<Self>,
        call: PageChoiceCall,
    ) -> IntTensor<Self> {
        reference::highest::<Self>(scores, spans, &call)
    }
}

/// Output shapes and dtypes for fusion.
#[cfg(feature = "fusion")]
mod meta {
    use burn::backend::fusion::custom::TensorSpec;
    use burn::tensor::DType;

    use super::*;
    use crate::pages::values::{
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

    pub fn highest(scores: &TensorSpec, _spans: &TensorSpec, call: &PageChoiceCall) -> TensorSpec {
        let [batch, kv_heads, _] = scores.shape.dims::<3>();
        let listed = call.choice.selected_pages();
        TensorSpec::new([batch, kv_heads, listed].into(), DType::I32)
    }
}
