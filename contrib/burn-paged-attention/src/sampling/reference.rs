//! Tokens on the host, which for CPUs is where logits are.

use burn::backend::Backend;
use burn::backend::tensor::{FloatTensor, IntTensor};
use burn::tensor::{TensorData, try_read_sync};

use crate::sample_options::SampleOptions;

pub(crate) fn tokens<B: Backend>(
    logits: FloatTensor<B>,
    draws: FloatTensor<B>,
    seen: Option<IntTensor<B>>,
    options: &SampleOptions,
) -> IntTensor<B> {
    let device = burn::backend::TensorMetadata::device(&logits);
    let read = |tensor: FloatTensor<B>| {
        let data = try_read_sync(B::float_into_data(tensor));
        let data = data.expect("a device that can be waited for");
        data.expect("a tensor that can be read")
    };
    let (logits, draws) = (read(logits), read(draws));
    let vocab = logits.shape()[1];
    let logits: Vec<f32> = logits.iter().collect();
    let seen: Option<Vec<i64>> = seen.map(|seen| {
        let data = try_read_sync(B::int_into_data(seen));
        let data = data.expect("a device that can be waited for");
        data.expect("a tensor that can be read").iter().collect()
    });
    let tokens = logits.chunks(vocab).zip(draws.iter::<f64>()).enumerate();
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
