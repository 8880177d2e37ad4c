//! Pools with 8-bit keys and values.

use crate::pool::{SEQ, VOCAB, beside, chunkings, config, in_pieces, model, whole};
use crate::prelude::*;
use crate::texts::part;

/// In place and gathered, for all chunkings: outputs of about 1 are as close as quantization allows. Inputs and weights are random, so the bound is
/// on the root mean square: 0.0072 and 0.036 at most in 1,440 cases each.
#[rstest]
#[case::int8(KvDtype::Int8, 0.02)]
#[case::fp8(KvDtype::Fp8E4m3, 0.08)]
fn rows_are_close_to_those_of_the_whole(#[case] dtype: KvDtype, #[case] bound: f32) {
    for device in devices() {
        let x = random([2, SEQ, 16], &device);
        let texts = [
            "causal",
            "local:7",
            "fixed:8,2,2",
            "streaming:4,3",
            "strided:4",
        ];
        for (text, alibi) in texts
            .map(|text| (text, false))
            .into_iter()
            .chain([("local:7", true)])
        {
            let mha = SparseMultiHeadAttentionConfig::new(16, 2, text.parse().unwrap())
                .with_block_size(8)
                .with_alibi(alibi)
                .with_rope((!alibi).then(|| RotaryEncodingConfig::new(SEQ, 8)));
            let mha = randomise(mha.try_init(&device).unwrap());
            let whole = whole(&mha, &x);
            let config = config(2).with_chunk(20).with_dtype(dtype);
            for calls in chunkings() {
                let (mut squares, mut count) = (0f32, 0);
                for (rows, expected) in beside(in_pieces(&mha, &x, &config, &calls), &whole) {
                    count += rows.shape().num_elements();
                    squares += (rows - expected).square().sum().into_scalar::<f32>();
                }
                let error = (squares / count as f32).sqrt();
                assert!(error < bound, "{dtype:?}, {text}: {error}");
            }
        }
    }
}

/// Feeds a list of tokens to a sequence, token by token, and returns the logits.
fn feed(
    model: &SparseTransformer,
    pool: &mut KvPool,
    id: SequenceId,
    list: &Tensor<2, burn::tensor::Int>,
    range: std::ops::Range<usize>,
) -> Vec<f32> {
    let mut logits = Vec::new();
    for position in range {
        let step = [KvStep::new(id, 1)];
        let row = model.next_logits(part(list, 0, position..position + 1), &step, pool);
        logits.extend(row.unwrap().into_data().iter::<f32>());
        pool.verify().unwrap();
    }
    logits
}

/// Compares except for the order of sums.
fn close(got: &[f32], expected: &[f32]) {
    assert_eq!(got.len(), expected.len());
    let error = |(got, expected): (&f32, &f32)| (got - expected).abs();
    let worst = got.iter().zip(expected).map(error).fold(0f32, f32::max);
    assert!(worst < 2e-6, "{worst}");
}

/// A written row never changes, so sequences that share, copy or roll back pages read the same elements.
#[rstest]
#[case::int8(KvDtype::Int8)]
#[case::fp8(KvDtype::Fp8E4m3)]
fn forks_and_steps_back_read_the_same_numbers(#[case] dtype: KvDtype) {
    for device in devices() {
        let model = model(&device, None);
        let text = tokens(1, SEQ, VOCAB, &device);
        let other = tokens(2, SEQ, VOCAB, &device).narrow(0, 1, 1);
        let pool = || {
            let config = config(4).with_rollback(6).with_dtype(dtype);
            model.new_pool(&config).unwrap()
        };
        let mut alone = pool();
        let id = alone.join().unwrap();
        let whole = feed(&model, &mut alone, id, &text, 0..SEQ);
        let mut pool = pool();
        let a = pool.join().unwrap();
        let start = feed(&model, &mut pool, a, &text, 0..21);
        close(&start, &whole[..21 * VOCAB]);
        // Both write after a common page; neither sees the other's writes.
        let b = pool.fork(a).unwrap();
        feed(&model, &mut pool, b, &other, 21..25);
        let rest = feed(&model, &mut pool, a, &text, 21..SEQ);
        close(&rest, &whole[21 * VOCAB..]);
        pool.truncate(b, 21).unwrap();
        pool.leave(a).unwrap();
        let c = pool.join().unwrap();
        feed(&model, &mut pool, c, &other, 0..9);
        let rest = feed(&model, &mut pool, b, &text, 21..SEQ);
        close(&rest, &whole[21 * VOCAB..]);
    }
}

#[test]
fn bytes_are_those_of_numbers_and_scales() {
    let device = Device::flex();
    let model = model(&device, None);
    let pool = |dtype: KvDtype| {
        let (mut pool, id) = joined(&model, &config(1).with_dtype(dtype));
        let step = [KvStep::new(id, 5)];
        let logits = model.next_logits(tokens(1, 5, VOCAB, &device), &step, &mut pool);
        assert!(logits.is_ok());
        let usage = pool.usage(id).unwrap();
        assert_eq!(usage.live_bytes % (usage.bytes / usage.slots), 0);
        [pool.bytes(), usage.bytes, usage.all_bytes]
    };
    // Keys and values of 8 elements.
    let floats = pool(KvDtype::Float(FloatDType::F16));
    for dtype in [KvDtype::Int8, KvDtype::Fp8E4m3] {
        let eight_bits = pool(dtype);
        for (of_floats, bytes) in floats.iter().zip(eight_bits) {
            assert_eq!(of_floats / 32 * 24, bytes);
        }
    }
}

#[test]
fn widths_are_multiples_of_four() {
    let device = Device::flex();
    let mha = SparseMultiHeadAttentionConfig::new(12, 2, "causal".parse().unwrap());
    let mha = mha.with_block_size(8).try_init(&device).unwrap();
    refused! { KvPool::for_attention(&mha, &config(1).with_dtype(KvDtype::Int8)) => "…keys' width must be a multiple of 4, got 6…"; }
}
