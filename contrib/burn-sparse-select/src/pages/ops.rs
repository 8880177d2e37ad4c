//! The backend trait of choosing pages by content.

use burn::backend::tensor::{FloatTensor, IntTensor};
use burn::backend::{Backend, backend_extension};
#[cfg(feature = "fusion")]
use burn::tensor::DType;

use crate::pages::reference;
use crate::pages::values::{PageChoiceCall, PageScoreInputs, SummarizeInputs, SummarizePacked};
use crate::selection::PageSummary;
use burn_blocksparse::reference_backends;

/// Choices of pages as backend operations, on tensors that are not on an autodiff device. Arguments are checked by the public functions.
#[backend_extension(
    Flex: cfg(feature = "flex"),
    NdArray: cfg(feature = "ndarray"),
    Cube: cfg(feature = "cube"),
    Fusion: cfg(feature = "fusion"),
)]
pub trait PageChoiceOps: Backend {
    /// Summaries of the pages that rows were written to: in place where the call alone holds them, otherwise in a copy.
    #[fusion(dtype = inputs.summaries.dtype, shape = inputs.summaries.shape.clone())]
    fn summarize_pages(
        #[extension_type] inputs: SummarizeInputs<Self>,
        kv_heads: usize,
        summary: PageSummary,
    ) -> FloatTensor<Self> {
        reference::summarize::<Self>(inputs, kv_heads, summary)
    }

    /// The same of keys in eight bits a number.
    #[fusion(dtype = inputs.summaries.dtype, shape = inputs.summaries.shape.clone())]
    fn summarize_quantized(
        #[extension_type] inputs: SummarizePacked<Self>,
        kv_heads: usize,
        summary: PageSummary,
    ) -> FloatTensor<Self> {
        reference::summarize_packed::<Self>(inputs, kv_heads, summary)
    }

    /// Scores of pages, f32 `[batch, kv_heads, entries]`.
    #[fusion(
        dtype = DType::F32,
        shape = [inputs.table.shape[0], call.kv_heads, inputs.table.shape[2]].into()
    )]
    fn page_scores(
        #[extension_type] inputs: PageScoreInputs<Self>,
        call: PageChoiceCall,
    ) -> FloatTensor<Self> {
        reference::scores::<Self>(inputs, &call)
    }

    /// The pages of the highest scores, i32 `[batch, kv_heads, keep · block]`.
    #[fusion(dtype = DType::I32, shape = [scores[0], scores[1], call.choice.selected_pages()].into())]
    fn topk_pages(
        scores: FloatTensor<Self>,
        spans: IntTensor<Self>,
        call: PageChoiceCall,
    ) -> IntTensor<Self> {
        reference::highest::<Self>(scores, spans, &call)
    }
}

reference_backends!(PageChoiceOps);
