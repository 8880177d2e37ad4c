//! Native sparse attention: layers, models, and decoding.

use burn::tensor::activation::{gelu, sigmoid};
use burn_sparse_select::nsa::{Nsa, NsaKeysValues, NsaOptions};
use burn_sparse_transformer::nsa::{Compression, NsaCompressor, NsaHeadsConfig};

use crate::common::*;
use crate::decoding::assert_layer_decodes;
use crate::whole_layers::normed;

const BLOCK: usize = 8;
const STRIDE: usize = 4;

fn heads(compression: Compression, shared: bool) -> NsaHeadsConfig {
    NsaHeadsConfig::new()
        .with_block(BLOCK)
        .with_stride(STRIDE)
        .with_selected_block(8)
        .with_keep(4)
        .with_window(10)
        .with_compression(compression)
        .with_shared_kv(shared)
}

/// Four query heads on two KV heads, with values wider than keys, rotated.
fn layer(heads: NsaHeadsConfig, device: &Device) -> SparseMultiHeadAttention {
    let config = SparseMultiHeadAttentionConfig::new(24, 4, Pattern::causal())
        .with_n_kv_heads(Some(2))
        .with_d_key(Some(16))
        .with_d_value(Some(32))
        .with_content(Some(ContentAttention::Nsa(heads)))
        .with_rope(Some(RotaryEncodingConfig::new(64, 4)));
    randomise(config.init(device))
}

fn all_kinds() -> [(Compression, bool); 4] {
    let [mean, mlp] = [Compression::Mean, Compression::Mlp];
    [(mean, false), (mean, true), (mlp, false), (mlp, true)]
}

fn by_heads(layer: &Linear, x: &Tensor<3>, heads: usize) -> Tensor<4> {
    split_heads(layer.forward(x.clone()), heads)
}

/// Compresses block by block to one vector each.
fn compress(x: Tensor<4>, by: Option<&NsaCompressor>) -> Tensor<4> {
    let [batch, heads, seq, width] = x.dims();
    let entries = (seq - BLOCK) / STRIDE + 1;
    let blocks = (0..entries).map(|entry| {
        let block = x.clone().narrow(2, entry * STRIDE, BLOCK);
        match by {
            None => block.mean_dim(2),
            Some(by) => {
                let block = block + by.positions.val().unsqueeze::<4>();
                let inner = by
                    .linear_inner
                    .forward(block.reshape([batch, heads, BLOCK * width]));
                let one = by.linear_outer.forward(gelu(inner));
                one.reshape([batch, heads, 1, width])
            }
        }
    });
    Tensor::cat(blocks.collect(), 2)
}

/// A layer equals its projections, rotations, compression and gates combined here.
#[test]
fn a_layer_equals_its_parts() {
    let (device, _guard) = seeded(Device::flex(), 1);
    let x = random([2, 45, 24], &device);
    for (compression, shared) in all_kinds() {
        let layer = layer(heads(compression, shared), &device);
        let rope = layer.rope.as_ref().unwrap();
        let parts = layer.nsa().unwrap();
        assert_eq!(parts.compressed.is_none(), shared);
        let own = [&layer.key, &layer.value];
        let project = |[key, value]: [&Linear; 2]| [by_heads(key, &x, 2), by_heads(value, &x, 2)];
        let of = |branch: &Option<burn_sparse_transformer::nsa::NsaProjections>| match branch {
            Some(branch) => project([&branch.key, &branch.value]),
            None => project(own),
        };
        let ([ck, cv], [sk, sv], [wk, wv]) =
            (of(&parts.compressed), project(own), of(&parts.window));
        let ck = match compression {
            Compression::Mean => compress(rope.forward(ck), None),
            _ => {
                // Each rotated to the position of its block's last token.
                let ck = compress(ck, parts.key_compressor.as_ref());
                let entries = (0..ck.dims()[2]).map(|entry| {
                    let one = ck.clone().narrow(2, entry, 1);
                    rope.apply(one, entry * STRIDE + BLOCK - 1)
                });
                Tensor::cat(entries.collect(), 2)
            }
        };
        let keys_values = NsaKeysValues {
            compressed: Some([ck, compress(cv, parts.value_compressor.as_ref())]),
            selected: [rope.forward(sk), sv],
            window: [rope.forward(wk), wv],
        };
        let gates = parts.gate.forward(x.clone()).reshape([2, 45, 4, 3]);
        let gates = sigmoid(gates.swap_dims(1, 2));
        let options = NsaOptions::default()
            .block(BLOCK)
            .stride(STRIDE)
            .selected_block(8)
            .keep(4)
            .window(10);
        let q = rope.forward(by_heads(&layer.query, &x, 4));
        let nsa = Nsa::new(options).unwrap();
        let out = nsa.attention(q, keys_values, gates).unwrap();
        let expected = layer.output.forward(merge_heads(out));
        assert_close(attend(&layer, x.clone()).unwrap(), expected, 1e-5);
    }
}

#[test]
fn decoding_gives_what_the_whole_gives() {
    let (device, _guard) = seeded(Device::flex(), 2);
    let x = random([2, 45, 24], &device);
    for (compression, shared) in all_kinds() {
        assert_layer_decodes(&layer(heads(compression, shared), &device), &x);
    }
}

const TEXTS: [&str; 2] = ["nsa:8,4,8,4,10", "nsa:8,4,8,4,10,mlp,shared"];

/// Every parameter has a gradient, which does not depend on recomputation.
#[cfg(feature = "autodiff")]
#[test]
fn all_parameters_learn() {
    use crate::common::{all_gradients_of, largest};
    let (device, _guard) = seeded(Device::flex().autodiff(), 4);
    let tokens = tokens(2, 40, 11, &device);
    for text in TEXTS {
        let model = normed(text, &device);
        let gradients = |recompute| {
            let step = model.loss_and_gradients(tokens.clone(), tokens.clone(), 1u64, recompute);
            all_gradients_of(&model, &step.unwrap().1)
        };
        let plain = gradients(Recompute::None);
        // Biases of keys shift all scores of a row equally; but after rotation and normalization they have an effect.
        let is_right = plain.values().all(|numbers| largest(numbers) > 1e-9);
        assert!(is_right, "{text}");
        assert!(plain.values().flatten().all(|x| x.is_finite()));
        assert_eq!(plain, gradients(Recompute::BLOCK), "{text}");
    }
}

#[test]
fn records_hold_all_branches() {
    let (device, _guard) = seeded(Device::flex(), 5);
    let tokens = tokens(1, 33, 11, &device);
    for text in TEXTS {
        let [one, other] = [(); 2].map(|_| normed(text, &device));
        let logits = |model: &SparseTransformer| model.forward(tokens.clone()).into_data();
        let expected = logits(&one);
        assert_ne!(logits(&other), expected);
        let loaded = other.load_record(one.into_record());
        assert_eq!(logits(&loaded), expected);
    }
}

#[test]
fn short_sequences_have_a_window_alone() {
    let device = Device::flex();
    let config = || {
        SparseMultiHeadAttentionConfig::new(16, 2, Pattern::causal())
            .with_block_size(8)
            .with_content(Some("nsa:8,4,8,4,10".parse().unwrap()))
    };
    let keep = NsaHeadsConfig::new().with_keep(2);
    let error = config().with_content(Some(ContentAttention::Nsa(keep)));
    refused! { error.try_init(&device) => "keep must be at least 3, the forced blocks, got 2"; }
    let mha = config().init(&device);
    // Shorter than a block: nothing is compressed, and nothing is selected.
    let short = Tensor::<3>::ones([1, 3, 16], &device);
    assert_eq!(attend(&mha, short).unwrap().dims(), [1, 3, 16]);
}
