//! The backend trait of choosing pages by scores.

use burn::backend::tensor::{FloatTensor, IntTensor};
use burn::backend::{Backend, backend_extension};

use crate::pages::page_choice::PageChoiceCall;
use crate::pages::reference;

/// Choices of pages as backend operations, on tensors that are not on an autodiff device. Arguments are checked by the public functions.
#[backend_extension(
    Flex: cfg(feature = "flex"),
    NdArray: cfg(feature = "ndarray"),
    Cube: cfg(feature = "cube"),
    Fusion: cfg(feature = "fusion"),
)]
pub trait PageChoiceOps: Backend {
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

    pub fn highest(scores: &TensorSpec, _spans: &TensorSpec, call: &PageChoiceCall) -> TensorSpec {
        let [batch, kv_heads, _] = scores.shape.dims::<3>();
        let listed = call.choice.selected_pages();
        TensorSpec::new([batch, kv_heads, listed].into(), DType::I32)
    }
}
