//! Packed sequences. The suite's random layers compare their attention with f64.

use crate::common::*;

fn attention(pattern: Pattern) -> SparseMultiHeadAttention {
    let config = SparseMultiHeadAttentionConfig::new(32, 4, pattern)
        .with_block_size(8)
        .with_n_kv_heads(Some(2))
        .with_rope(Some(RotaryEncodingConfig::new(40, 8)))
        .with_qk_norm(Some(QkNorm::Rms));
    randomise(config.init(&Device::flex()))
}

/// Applies `run` to every sequence of `x` alone.
fn one_by_one(
    x: &Tensor<3>,
    cu_seqlens: &[usize],
    run: impl Fn(Tensor<3>) -> Tensor<3>,
) -> Tensor<3> {
    let sequences = cu_seqlens.windows(2).filter(|pair| pair[0] < pair[1]);
    let alone = sequences.map(|pair| run(x.clone().narrow(1, pair[0], pair[1] - pair[0])));
    Tensor::cat(alone.collect(), 1)
}

#[test]
fn blocks_take_packed_sequences() {
    let device = Device::flex();
    let config = SparseTransformerBlockConfig::new(16, 2, Pattern::fixed(8, 2)).with_block_size(8);
    let block = randomise(config.init(&device));
    let x = random([1, 31, 16], &device);
    let cu_seqlens = [0, 10, 11, 31];
    let expected = one_by_one(&x, &cu_seqlens, |x| block.forward(x));
    assert_close(block.forward_packed(x, &cu_seqlens), expected, 1e-5);
}

#[test]
fn what_does_not_fit_is_refused() {
    let mha = attention(Pattern::causal());
    let packed = |batch, seq, cu_seqlens: &[usize]| {
        let x = Tensor::<3>::zeros([batch, seq, 32], &Device::flex());
        mha.try_forward_packed(x, cu_seqlens)
    };
    let rising = "cu_seqlens must be rising from 0 to 20, the length of x, got";
    for wrong in [&[][..], &[0], &[1, 20], &[0, 9, 8, 20], &[0, 19]] {
        refused! { packed(1, 20, wrong) => format!("{rising} {wrong:?}"); }
    }
    refused! {
        packed(2, 20, &[0, 20]) => "x must be [batch = 1, seq ≥ 1, d_model = 32], got [2, 20, 32]";
        packed(1, 50, &[0, 5, 50]) => "positions must stay below 40, rope.max_sequence_length, got positions 0..45";
    }
}
