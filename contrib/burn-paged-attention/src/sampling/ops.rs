//! The backend trait of sampling.

use crate::paged::values::OptInt;
use crate::sample_options::SampleOptions;
use burn_blocksparse::internal::host;
use burn_blocksparse::internal::prelude::*;

/// Sampling as a backend operation, on tensors that are not on an autodiff device. The public function checks the arguments.
#[backend_extension(
    Flex: cfg(feature = "flex"),
    NdArray: cfg(feature = "ndarray"),
    Cube: cfg(feature = "cube"),
    Fusion: cfg(feature = "fusion"),
)]
pub trait SamplingOps: Backend {
    /// Samples a token, i32, from each row of `[rows, vocab]`, f32.
    #[fusion(dtype = DType::I32, shape = [logits[0]].into())]
    fn sample_tokens(
        logits: FloatTensor<Self>,
        draws: FloatTensor<Self>,
        #[extension_type] seen: OptInt<Self>,
        options: SampleOptions,
    ) -> IntTensor<Self> {
        sampled_on_host::<Self>(logits, draws, seen.into_option(), &options)
    }
}

reference_backends!(SamplingOps);

pub(crate) fn sampled_on_host<B: Backend>(
    logits: FloatTensor<B>,
    draws: FloatTensor<B>,
    seen: Option<IntTensor<B>>,
    options: &SampleOptions,
) -> IntTensor<B> {
    let device = logits.device();
    let vocab = logits.shape()[1];
    let logits: Vec<f32> = host::floats::<B, _>(logits);
    let draws: Vec<f64> = host::floats::<B, _>(draws);
    let seen: Option<Vec<i64>> = seen.map(host::ints::<B, _>);
    let tokens = logits.chunks(vocab).zip(draws).enumerate();
    let tokens = tokens.map(|(row, (logits, draw))| {
        let was_seen = |token: u32| {
            let at = row * vocab + token as usize;
            seen.as_ref().is_some_and(|seen| seen[at] != 0)
        };
        let token = options.choose(logits, was_seen, draw);
        token.map_or(-1, |token| token as i32)
    });
    let tokens: Vec<i32> = tokens.collect();
    let count = tokens.len();
    B::int_from_data(TensorData::new(tokens, [count]), &device)
}
