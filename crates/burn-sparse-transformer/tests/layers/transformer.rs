//! The model's forward pass: residual form, causality, decoding, and errors.

use crate::common::*;
use crate::decoding::assert_decodes_and_sees_no_future;

const VOCAB: usize = 11;
const CONTEXT: usize = 40;

fn config(factorization: impl Into<Factorization>) -> SparseTransformerConfig {
    small([16, 2], factorization, [VOCAB, CONTEXT, 3]).with_embedding_width(Some(8))
}

fn model(factorization: impl Into<Factorization>) -> SparseTransformer {
    randomise(config(factorization).init(&Device::flex()))
}

fn factorizations() -> Vec<Factorization> {
    let two = || vec![Pattern::local(8), Pattern::strided(8)];
    vec![
        Pattern::causal().into(),
        Pattern::local(5).into(),
        Pattern::fixed(8, 2).into(),
        Pattern::fixed_heads(8, 2, 2).into(),
        Factorization::Interleaved(two()),
        Factorization::Merged(two()),
        Factorization::MultiHead(two()),
    ]
}

#[test]
fn a_block_adds_a_and_b_to_the_residual_stream() {
    let device = Device::flex();
    let config = SparseTransformerBlockConfig::new(16, 2, Pattern::causal()).with_block_size(8);
    let block = randomise(config.init(&device));
    let h = random([2, 13, 16], &device);
    let a = attend(&block.mha, block.norm_1.forward(h.clone())).unwrap();
    let b = block.norm_2.forward(h.clone() + a.clone());
    let b = block.pwff.forward(b);
    assert_close(block.forward(h.clone()), h + a + b, 1e-5);
}

#[test]
fn a_new_model_finds_every_token_equally_likely() {
    let device = Device::flex();
    let model = config(Pattern::fixed(8, 2)).init(&device);
    let x = tokens(2, CONTEXT, VOCAB, &device);
    let logits = model.forward(x.clone());
    assert_eq!(logits.dims(), [2, CONTEXT, VOCAB]);
    assert_close(logits.clone(), logits.zeros_like(), 0.0);
    let loss: f64 = model.loss(x.clone(), x).into_scalar();
    assert!((loss - (VOCAB as f64).ln()).abs() < 1e-6);
}

#[test]
fn loss_is_the_mean_negative_log_likelihood_of_the_targets() {
    let device = Device::flex();
    let model = model(Pattern::causal());
    let x = tokens(2, 9, VOCAB, &device);
    let y = x.clone().flip([1]);
    let logits = model.forward(x.clone()).into_data();
    let logits = logits.try_to_vec::<f32>().unwrap();
    let targets = y.clone().into_data().iter::<i64>().collect::<Vec<_>>();
    let rows = logits.chunks(VOCAB).zip(&targets);
    let nats = rows.map(|(row, target)| {
        let sum: f64 = row.iter().map(|v| f64::from(*v).exp()).sum();
        sum.ln() - f64::from(row[*target as usize])
    });
    let nats: f64 = nats.sum();
    let loss: f64 = model.loss(x, y).into_scalar();
    assert!((loss - nats / targets.len() as f64).abs() < 1e-5);
}

/// One token at a time and several, with rollbacks.
#[test]
fn models_decode_and_see_no_future() {
    let tokens = tokens(2, CONTEXT, VOCAB, &Device::flex());
    for factorization in factorizations() {
        assert_decodes_and_sees_no_future(&model(factorization), &tokens);
    }
}

#[test]
fn blocks_have_their_layers_pattern() {
    let two = vec![Pattern::local(8), Pattern::strided(8)];
    let of = |factorization| -> Vec<String> {
        let model = model(factorization);
        let patterns = model.blocks.iter().map(|b| b.mha.pattern().to_string());
        patterns.collect()
    };
    let expected = ["local(8)", "strided(8)", "local(8)"];
    assert_eq!(of(Factorization::Interleaved(two.clone())), expected);
    let expected = ["union(local(8), strided(8))"; 3];
    assert_eq!(of(Factorization::Merged(two.clone())), expected);
    let expected = ["per_head(local(8), strided(8))"; 3];
    assert_eq!(of(Factorization::MultiHead(two)), expected);
}

#[test]
fn a_cleared_cache_takes_another_batch() {
    let model = model(Pattern::fixed(8, 2));
    let x = tokens(2, 30, VOCAB, &Device::flex());
    let mut cache = model.new_cache();
    model.forward_cache(x.clone().narrow(0, 0, 1), &mut cache);
    cache.clear();
    let got = model.forward_cache(x.clone(), &mut cache);
    assert_close(got, model.forward(x), 1e-5);
}

#[test]
fn positions_past_the_context_are_refused_and_the_cache_kept() {
    let device = Device::flex();
    let model = model(Pattern::causal());
    let long = tokens(1, CONTEXT + 1, VOCAB, &device);
    refused! { model.try_forward(long) => "positions must stay below 40, the model's context, got positions 0..41"; }
    let mut cache = model.new_cache();
    let most = tokens(1, CONTEXT - 1, VOCAB, &device);
    model.forward_cache(most, &mut cache);
    let two = tokens(1, 2, VOCAB, &device);
    refused! { model.try_forward_cache(two, &mut cache) => "positions must stay below 40, the model's context, got positions 39..41"; }
    assert_eq!(cache.position(), CONTEXT - 1);
    let one = tokens(1, 1, VOCAB, &device);
    model.forward_cache(one, &mut cache);
}

#[test]
fn inputs_that_do_not_fit_are_refused() {
    let device = Device::flex();
    let model = model(Pattern::causal());
    let ids = |batch, seq| Tensor::<2, Int>::zeros([batch, seq], &device);
    refused! {
        model.try_forward(ids(1, 0)) => "tokens must be [batch ≥ 1, seq ≥ 1], got [1, 0]";
        model.try_loss(ids(1, 4), ids(1, 3)) => "targets must be [batch = 1, seq = 4], got [1, 3]";
    }
    let mut cache = model.new_cache();
    model.forward_cache(ids(1, 4), &mut cache);
    refused! { model.try_forward_cache(ids(2, 1), &mut cache) => "batch must be 1, the cache's, got 2"; }
    assert_eq!(cache.position(), 4);
    let mut shorter = model.clone();
    shorter.blocks.pop();
    refused! { shorter.try_forward_cache(ids(1, 1), &mut cache) => "cache must be of 2 blocks, the model's, got 3 blocks"; }
}

#[test]
fn configurations_that_do_not_fit_are_refused() {
    let init = |config: SparseTransformerConfig| config.try_init(&Device::flex());
    let new = |d_model, heads, width| {
        let causal = Pattern::causal().into();
        SparseTransformerConfig::new(d_model, heads, causal)
            .with_vocab_size(5)
            .with_context(8)
            .with_n_layers(1)
            .with_embedding_width(Some(width))
    };
    refused! { init(new(9, 2, 4)) => "d_model must be a positive multiple of n_heads = 2, got 9"; }
    for width in [0, 9] {
        refused! { init(new(8, 1, width)) => format!("embedding_width must be between 1 and 8, the context, got {width}"); }
    }
    for dropout in [-0.1, 1.0, f64::NAN] {
        refused! { init(new(8, 1, 4).with_dropout(dropout)) => format!("dropout must be at least 0 and below 1, got {dropout}"); }
    }
    refused! { init(new(8, 1, 4).with_d_ff(Some(0))) => "d_ff must be at least 1, got 0"; }
    let none = Factorization::Interleaved(vec![]);
    let patternless = SparseTransformerConfig {
        factorization: none,
        ..new(8, 1, 4)
    };
    refused! { init(patternless) => "factorization must be at least one pattern, got none"; }
}

#[test]
fn attention_flops_count_allowed_pairs() {
    let model = model(Pattern::local(3));
    // Positions 0 and 1 see 1 and 2 keys, the others 3: 3 layers, 2 heads, 4 · 8 per pair.
    let pairs = 1 + 2 + 8 * 3;
    assert_eq!(model.attention_flops(10).unwrap(), 3 * 2 * 4 * 8 * pairs);
}
