//! Native sparse attention: layers, models, and decoding.

use burn::module::{Module, ModuleVisitor, Param};
use burn::nn::{Linear, RotaryEncodingConfig};
use burn::tensor::activation::{gelu, sigmoid};
use burn::tensor::{Device, Tensor};
use burn_sparse_select::nsa::{Nsa, NsaKeysValues, NsaOptions};
use burn_sparse_transformer::content::ContentAttention;
use burn_sparse_transformer::nsa::{Compression, NsaCompressor, NsaHeadsConfig};
use burn_sparse_transformer::{
    Factorization, Pattern, Recompute, SparseMhaCache, SparseMhaInput, SparseMultiHeadAttention,
    SparseMultiHeadAttentionConfig, SparseTransformer, SparseTransformerConfig,
};

use crate::common::{assert_close, attend, attend_cache, random, randomise, seed, tokens};
use crate::decoding::assert_decodes_and_sees_no_future;

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

/// Four heads of queries on two of keys, values wider than keys, rotated.
fn layer(heads: NsaHeadsConfig, device: &Device) -> SparseMultiHeadAttention {
    let config = SparseMultiHeadAttentionConfig::new(24, 4, Pattern::causal())
        .with_n_kv_heads(Some(2))
        .with_d_key(Some(16))
        .with_d_value(Some(32))
        .with_content(Some(ContentAttention::Nsa(heads)))
        .with_rope(Some(RotaryEncodingConfig::new(64, 4)));
    randomise(config.try_init(device).unwrap())
}

fn all_kinds() -> [(Compression, bool); 4] {
    [
        (Compression::Mean, false),
        (Compression::Mean, true),
        (Compression::Mlp, false),
        (Compression::Mlp, true),
    ]
}

fn by_heads(layer: &Linear, x: &Tensor<3>, heads: usize) -> Tensor<4> {
    let projected = layer.forward(x.clone());
    let [batch, seq, width] = projected.dims();
    let split = projected.reshape([batch, seq, heads, width / heads]);
    split.swap_dims(1, 2)
}

/// One vector of each block, block by block, with a table of rotations for those that are rotated behind it.
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

/// Projections, rotations, compression and gates put together by hand.
#[test]
fn a_layer_equals_its_parts() {
    let device = Device::flex();
    let _guard = seed(&device, 1);
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
                // Each as at the last token of its block.
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
        let out = Nsa::new(options)
            .unwrap()
            .attention(q, keys_values, gates)
            .unwrap();
        let joined = out.swap_dims(1, 2).reshape([2, 45, 32]);
        let expected = layer.output.forward(joined);
        assert_close(attend(&layer, x.clone()).unwrap(), expected, 1e-5);
    }
}

/// Token by token, in pieces, and after some were taken back.
#[test]
fn decoding_gives_the_rows_of_the_whole() {
    let device = Device::flex();
    let _guard = seed(&device, 2);
    let x = random([2, 45, 24], &device);
    let other = random([2, 45, 24], &device);
    for (compression, shared) in all_kinds() {
        let layer = layer(heads(compression, shared), &device);
        let whole = attend(&layer, x.clone()).unwrap();
        for pieces in [vec![1; 45], vec![7, 1, 1, 20, 16], vec![45]] {
            let mut cache = SparseMhaCache::new();
            let mut rows = Vec::new();
            for piece in pieces {
                // Others first, which are taken back.
                let start = cache.len();
                let more = (45 - start).min(9);
                let piece_of_other = other.clone().narrow(1, start, more);
                attend_cache(&layer, piece_of_other, &mut cache).unwrap();
                cache.truncate(start);
                let new = x.clone().narrow(1, start, piece);
                rows.push(attend_cache(&layer, new, &mut cache).unwrap());
            }
            assert_eq!(cache.len(), 45);
            assert_close(Tensor::cat(rows, 1), whole.clone(), 1e-5);
        }
    }
}

fn model(content: &str, device: &Device) -> SparseTransformer {
    let attention = burn_sparse_transformer::BlockAttentionConfig::new()
        .with_rope_theta(Some(10_000.0))
        .with_qk_norm(Some(burn_sparse_transformer::QkNorm::Rms));
    let config = SparseTransformerConfig::new(16, 4, Factorization::from(Pattern::causal()))
        .with_vocab_size(11)
        .with_context(40)
        .with_n_layers(2)
        .with_n_kv_heads(Some(2))
        .with_block_size(8)
        .with_attention(Some(attention))
        .with_content(Some(content.parse().unwrap()));
    randomise(config.try_init(device).unwrap())
}

const TEXTS: [&str; 2] = ["nsa:8,4,8,4,10", "nsa:8,4,8,4,10,mlp,shared"];

#[test]
fn models_decode_and_do_not_look_ahead() {
    let device = Device::flex();
    let _guard = seed(&device, 3);
    for text in TEXTS {
        let model = model(text, &device);
        let tokens = tokens(2, 40, 11, &device);
        assert_decodes_and_sees_no_future(&model, &tokens);
    }
}

/// Every parameter has a gradient, the same whatever is computed again.
#[test]
fn all_parameters_learn() {
    struct Params(Vec<(burn::module::ParamId, usize)>);
    impl ModuleVisitor for Params {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
            self.0.push((param.id, D));
        }
    }
    let device = Device::flex().autodiff();
    let _guard = seed(&device, 4);
    let tokens = tokens(2, 40, 11, &device);
    for text in TEXTS {
        let model = model(text, &device);
        let mut params = Params(Vec::new());
        model.visit(&mut params);
        let gradients = |recompute| {
            let (_, gradients) = model
                .loss_and_gradients(tokens.clone(), tokens.clone(), 1u64, recompute)
                .unwrap();
            let numbers = params.0.iter().map(|&(id, rank)| match rank {
                1 => gradients.get::<1>(id).map(|x| x.into_data()),
                _ => gradients.get::<2>(id).map(|x| x.into_data()),
            });
            let numbers = numbers.map(|data| data.unwrap().try_to_vec::<f32>().unwrap());
            numbers.collect::<Vec<_>>()
        };
        let plain = gradients(Recompute::None);
        // Keys' biases move all scores of a row alike; but rotated, and normalised, they matter.
        let learns = |numbers: &Vec<f32>| numbers.iter().any(|x| x.abs() > 1e-9);
        let silent = plain.iter().filter(|numbers| !learns(numbers)).count();
        assert_eq!(silent, 0, "{text}: {} parameters", plain.len());
        assert!(plain.iter().flatten().all(|x| x.is_finite()));
        assert_eq!(plain, gradients(Recompute::BLOCK), "{text}");
    }
}

#[test]
fn records_hold_all_branches() {
    let device = Device::flex();
    let _guard = seed(&device, 5);
    let tokens = tokens(1, 33, 11, &device);
    for text in TEXTS {
        let one = model(text, &device);
        let other = model(text, &device);
        let expected = one.try_forward(tokens.clone()).unwrap().into_data();
        assert_ne!(
            other.try_forward(tokens.clone()).unwrap().into_data(),
            expected
        );
        let loaded = other.load_record(one.into_record());
        assert_eq!(
            loaded.try_forward(tokens.clone()).unwrap().into_data(),
            expected
        );
    }
}

#[test]
fn what_does_not_go_with_it_is_said() {
    let device = Device::flex();
    let config = || {
        SparseMultiHeadAttentionConfig::new(16, 2, Pattern::causal())
            .with_block_size(8)
            .with_content(Some("nsa:8,4,8,4,10".parse().unwrap()))
    };
    let beside = "none with nsa, which is all heads of a layer, got some";
    refused! {
        SparseMultiHeadAttentionConfig { pattern: Pattern::dense(), ..config() }.try_init(&device) => "pattern must be causal with nsa, whose tokens see earlier ones alone, got dense";
        config().with_local_heads(Some(1)).try_init(&device) => format!("local_heads must be {beside}");
        config().with_selection(Some("topk:8,2".parse().unwrap())).try_init(&device) => format!("selection must be {beside}");
        config().with_sinks(true).try_init(&device) => format!("sinks must be {beside}");
        config().with_softcap(Some(5.0)).try_init(&device) => format!("softcap must be {beside}");
        config().with_dropout(0.1).try_init(&device) => format!("dropout must be {beside}");
    }
    let keep = NsaHeadsConfig::new().with_keep(2);
    let error = config().with_content(Some(ContentAttention::Nsa(keep)));
    refused! { error.try_init(&device) => "keep must be at least 3, the forced blocks, got 2"; }

    let mha = config().try_init(&device).unwrap();
    let x = Tensor::<3>::zeros([2, 20, 16], &device);
    let input = SparseMhaInput::self_attn(x.clone()).lengths([20, 10]);
    refused! { mha.try_forward(input) => "padding must be none with nsa, got some"; }
    let input = SparseMhaInput::new(x.clone(), x.clone(), x.clone());
    refused! {
        mha.try_forward(input) => "input must be self-attention with nsa, got another key or value";
        mha.try_forward_packed(x.narrow(0, 0, 1), &[0, 5, 20]) => "content must be none with padding, packed sequences and weights, which know nothing of its branches, got nsa:8,4,8,4,10";
    }
    let short = Tensor::<3>::ones([1, 3, 16], &device);
    // Shorter than a block: nothing is compressed, and nothing is chosen.
    assert_eq!(attend(&mha, short).unwrap().dims(), [1, 3, 16]);
    let printed = format!("{mha}");
    assert!(printed.contains("content: nsa:8,4,8,4,10"), "{printed}");
    assert!(mha.attention_flops(20).unwrap() > 0);
}
