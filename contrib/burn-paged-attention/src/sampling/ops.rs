//! The backend trait of sampling.

use burn::backend::tensor::{FloatTensor, IntTensor};
use burn::backend::{Backend, backend_extension};
#[cfg(feature = "fusion")]
use burn::tensor::DType;

use crate::paged::values::OptInt;
use crate::sample_options::SampleOptions;
use crate::sampling::reference;
use burn_blocksparse::reference_backends;

/// Tokens drawn from logits as a backend operation, on tensors that are not on an autodiff device. Arguments are checked by the public function.
#[backend_extension(
    Flex: cfg(feature = "flex"),
    NdArray: cfg(feature = "ndarray"),
    Cube: cfg(feature = "cube"),
    Fusion: cfg(feature = "fusion"),
)]
pub trait SamplingOps: Backend {
    /// A token, i32, from each row of `[rows, vocab]`, f32.
    #[fusion(dtype = DType::I32, shape = [logits[0]].into())]
    fn sample_tokens(
        logits: FloatTensor<Self>,
        draws: FloatTensor<Self>,
        #[extension_type] seen: OptInt<Self>,
        options: SampleOptions,
    ) -> IntTensor<Self> {
        reference::tokens::<Self>(logits, draws, seen.into_option(), &options)
    }
}

reference_backends!(SamplingOps);
