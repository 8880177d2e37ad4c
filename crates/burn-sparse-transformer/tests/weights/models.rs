//! Models of `transformers`.

use burn::tensor::{Device, Tensor};
use burn_sparse_transformer::longformer::{LongformerEncoder, LongformerEncoderInput};
use burn_sparse_transformer::weights::{KeyMap, gpt2_config, longformer_config};
use burn_sparse_transformer::{Factorization, Pattern, SparseTransformer};

use crate::support::*;

fn gpt2(pattern: Pattern) -> SparseTransformer {
    let config = gpt2_config(8, 2, 2, 24, 20, Factorization::from(pattern)).with_block_size(8);
    let model = config.init(&Device::flex());
    let file = open("gpt2.safetensors");
    file.load(&model, &KeyMap::gpt2()).unwrap()
}

#[test]
fn gpt2_gives_the_logits_of_transformers() {
    let golden = open("gpt2.golden.safetensors");
    let tokens = ints(&golden, "tokens");
    let expected = floats(&golden, "logits");
    let logits = gpt2(Pattern::causal()).forward(tokens.clone());
    assert_close(&numbers(logits), &expected);

    // A window of six keys: the first six positions are unchanged, later ones see less.
    let local = gpt2(Pattern::local(6)).forward(tokens);
    assert_eq!(local.dims(), [2, 20, 20]);
    let logits = Tensor::<1>::from_floats(&expected[..], &Device::flex()).reshape([2, 20, 20]);
    let rows = |x: &Tensor<3>, range: std::ops::Range<usize>| {
        numbers(x.clone().narrow(1, range.start, range.len()))
    };
    assert_close(&rows(&local, 0..6), &rows(&logits, 0..6));
    let (sparse, dense) = (rows(&local, 6..20), rows(&logits, 6..20));
    let mut differences = sparse.iter().zip(&dense).map(|(a, b)| (a - b).abs());
    assert!(differences.any(|difference| difference > 0.1));
    assert!(sparse.iter().all(|x| x.is_finite()));
}

fn longformer(patterns: [Pattern; 2]) -> LongformerEncoder {
    let mut config = longformer_config(8, 2, 2, 32, 20, Pattern::dense())
        .with_patterns(Some(patterns.to_vec()))
        .with_token_types(2)
        .with_d_ff(Some(16));
    config.attention.attention.block_size = 8;
    let model = config.init(&Device::flex());
    let file = open("longformer.safetensors");
    file.load(&model, &KeyMap::longformer()).unwrap()
}

/// Returns the output at real positions: the first sequence has 32, the second 27.
fn real(rows: Vec<f32>) -> Vec<f32> {
    let padded = 5 * 8;
    let real = rows.len() - padded;
    rows[..real].to_vec()
}

#[test]
fn longformer_gives_the_states_of_transformers() {
    let golden = open("longformer.golden.safetensors");
    let padding = ints(&golden, "mask").equal_elem(0);
    let input = || LongformerEncoderInput::new(ints(&golden, "tokens")).mask_pad(padding.clone());
    let global = [vec![0, 13], vec![0]];

    // `attention_window=[8, 4]`.
    let model = longformer([Pattern::window(4), Pattern::window(2)]);
    let windows = model.forward(input());
    assert_close(&real(numbers(windows)), &real(floats(&golden, "windows")));
    let out = model.forward(input().global_per_entry(global.clone()));
    let expected = real(floats(&golden, "out"));
    assert_close(&real(numbers(out)), &expected);

    // The same weights with other patterns.
    let dilated = [Pattern::window(4), Pattern::dilated_window(4, 2)];
    let out = longformer(dilated).forward(input().global_per_entry(global));
    let out = real(numbers(out));
    assert!(out.iter().all(|x| x.is_finite()));
    let mut differences = out.iter().zip(&expected).map(|(a, b)| (a - b).abs());
    assert!(differences.any(|difference| difference > 0.1));
}
