//! The backend trait of choosing pages by scores.

use burn::backend::tensor::{FloatTensor, IntTensor};
use burn::backend::{Backend, backend_extension};
#[cfg(feature = "fusion")]
use burn::tensor::DType;

use crate::pages::page_choice::PageChoice;
use crate::pages::reference;
use burn_blocksparse::reference_backends;

/// Choices of pages as backend operations, on tensors that are not on an autodiff device. Arguments are checked by the public functions.
#[backend_extension(
    Flex: cfg(feature = "flex"),
    NdArray: cfg(feature = "ndarray"),
    Cube: cfg(feature = "cube"),
    Fusion: cfg(feature = "fusion"),
)]
pub trait PageChoiceOps: Backend {
    /// The pages of the highest scores, i32 `[batch, kv_heads, keep · block]`.
    #[fusion(dtype = DType::I32, shape = [scores[0], scores[1], choice.selected_pages()].into())]
    fn topk_pages(
        scores: FloatTensor<Self>,
        spans: IntTensor<Self>,
        choice: PageChoice,
    ) -> IntTensor<Self> {
        reference::highest::<Self>(scores, spans, &choice)
    }
}

reference_backends!(PageChoiceOps);
