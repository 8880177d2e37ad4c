//! Tokens on the host, which for CPUs is where logits are.

use burn::backend::tensor::{FloatTensor, IntTensor};
use burn::backend::{Backend, TensorMetadata};
use burn::tensor::TensorData;
use burn_blocksparse::internal::host;

use crate::sample_options::SampleOptions;

pub(crate) fn tokens<B: Backend>(
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
