//! DeepSeek sparse attention: the layer, the losses of its indexer, and decoding.

use burn_sparse_transformer::dsa::DsaHeadsConfig;

use crate::common::*;
use crate::decoding::assert_layer_decodes;
use crate::whole_layers::model;

#[cfg(feature = "autodiff")]
use crate::whole_layers::assert_own_losses;

/// Four query heads on two KV heads; three index heads of width 6, of which four channels are rotated.
fn heads(keep: usize, near: usize) -> DsaHeadsConfig {
    DsaHeadsConfig::new()
        .with_keep(keep)
        .with_near(near)
        .with_index_heads(3)
        .with_index_dim(6)
        .with_rope_dim(Some(4))
}

fn config(heads: DsaHeadsConfig) -> SparseMultiHeadAttentionConfig {
    SparseMultiHeadAttentionConfig::new(16, 4, Pattern::causal())
        .with_n_kv_heads(Some(2))
        .with_content(Some(ContentAttention::Dsa(heads)))
        .with_rope(Some(RotaryEncodingConfig::new(64, 4)))
}

fn layer(keep: usize, near: usize, device: &Device) -> SparseMultiHeadAttention {
    randomise(config(heads(keep, near)).init(device))
}

/// With capacity for all keys it equals dense causal attention, whatever the indexer.
#[test]
fn with_all_keys_it_is_dense() {
    let device = Device::flex();
    let layer = layer(50, 0, &device);
    let x = random([2, 21, 16], &device);
    let got = attend(&layer, x.clone()).unwrap();
    let mut dense = config(heads(50, 0)).with_content(None).init(&device);
    (dense.query, dense.key) = (layer.query, layer.key);
    (dense.value, dense.output) = (layer.value, layer.output);
    assert_close(got, attend(&dense, x).unwrap(), 1e-5);
}

#[test]
fn decoding_gives_what_the_whole_gives() {
    let device = Device::flex();
    for near in [0, 3] {
        let x = random([2, 24, 16], &device);
        assert_layer_decodes(&layer(5, near, &device), &x);
        let in_blocks = heads(5, near).with_blocks(Some(3)).with_block(4);
        assert_layer_decodes(&randomise(config(in_blocks).init(&device)), &x);
    }
}

/// The indexer learns only from its own loss, and nothing else learns from that.
#[cfg(feature = "autodiff")]
#[test]
fn each_loss_reaches_its_own_parameters() {
    let device = Device::flex().autodiff();
    let in_fp8 = heads(5, 1).with_index_dim(8).with_index_fp8(true);
    for heads in [heads(5, 1), in_fp8] {
        let layer = config(heads).init(&device);
        assert_own_losses(&randomise(layer), 24, &device);
    }
}

#[test]
fn configurations_of_none_say_why() {
    let device = Device::flex();
    let init = |heads| config(heads).try_init(&device);
    refused! {
        init(heads(0, 0)) => "…keep must be at least 1…";
        init(heads(4, 5)) => "…near must be at most keep…";
        init(heads(4, 0).with_index_heads(0)) => "…index_heads…";
        init(heads(4, 0).with_rope_dim(Some(8))) => "rope_dim must be an even number, at most 6, the width of an index head, got 8";
        init(heads(4, 0).with_index_fp8(true)) => "index_dim must be a power of two from 8 to 256, for fp8, got 6";
    }
    let uneven = config(heads(4, 0))
        .with_n_kv_heads(Some(3))
        .try_init(&device);
    refused! { uneven => "…n_heads…"; }
    let x = random([1, 65, 16], &device);
    refused! { attend(&layer(4, 0, &device), x) => "…rope.max_sequence_length…"; }
    let pattern = SparseMultiHeadAttentionConfig::new(16, 4, Pattern::causal());
    let error = pattern.init(&device).with_dsa_stage(DsaStage::Dense);
    let message = "dsa_stage must be of a layer of dsa or msa, got Dense of one without";
    refused! { error => message; }
}

const TEXT: &str = "dsa:6,2,3,8";

/// A cache of dense attention has no index keys.
#[test]
fn caches_of_dense_attention_are_refused() {
    let device = Device::flex();
    let tokens = tokens(2, 40, 11, &device);
    let model = model(TEXT, 40, &device);
    let dense = model.clone().with_dsa_stage(DsaStage::Dense).unwrap();
    let mut cache = dense.new_cache();
    let part = |from, count| tokens.clone().narrow(1, from, count);
    dense.forward_cache(part(0, 9), &mut cache);
    refused! { model.try_forward_cache(part(9, 1), &mut cache) => "cache must be one whose 9 tokens an indexer has seen, got one of 0"; }
}

/// Before the selection stage, and with all keys selected, layers equal dense attention.
#[test]
fn stages_before_the_choice_are_dense() {
    let (device, _guard) = seeded(Device::flex(), 32);
    let tokens = tokens(2, 33, 11, &device);
    let sparse = model(TEXT, 40, &device);
    let all = model("dsa:40,0,3,8", 40, &device).load_record(sparse.clone().into_record());
    let expected = all.forward(tokens.clone());
    for stage in [DsaStage::Dense, DsaStage::WarmUp] {
        let dense = sparse.clone().with_dsa_stage(stage).unwrap();
        assert_close(dense.forward(tokens.clone()), expected.clone(), 1e-4);
        // Operations of the pairs only, not of index scores.
        let flops = dense.attention_flops(33).unwrap();
        assert_eq!(flops, all.attention_flops(33).unwrap());
        assert_eq!(flops, 2 * 2 * 4 * (33 * 34 / 2) * (4 + 4));
    }
    let pairs = 21 + 27 * 6;
    let scores = 2 * 3 * 8 * (33 * 34 / 2);
    let flops = sparse.attention_flops(33).unwrap();
    assert_eq!(flops, 2 * (2 * 4 * pairs * (4 + 4) + scores));
    let dense = sparse.clone().with_dsa_stage(DsaStage::Dense).unwrap();
    assert!(sparse.matmul_flops_per_token() > dense.matmul_flops_per_token());
    let got = sparse.forward(tokens);
    let difference = apart(got, expected);
    assert!(difference > 1e-3, "{difference}");
    let plain = small([16, 4], Pattern::causal(), [11, 40, 1]).init(&device);
    assert_eq!(plain.dsa_stage(), None);
    refused! { plain.with_dsa_stage(DsaStage::Dense) => "dsa_stage must be of a model with layers of dsa or msa, got Dense of one without"; }
}

#[cfg(feature = "autodiff")]
mod training {
    use burn::optim::GradientsParams;
    use burn::tensor::activation::log_softmax;
    use burn_fused_ops::optim::FusedAdamWConfig;

    use super::*;

    /// Each learns from its own loss: the model from cross-entropy, which does not reach the indexers, and these from the added loss.
    #[test]
    fn the_model_and_its_indexers_learn_apart() {
        let (device, _guard) = seeded(Device::flex().autodiff(), 33);
        let model = model(TEXT, 40, &device);
        let tokens = tokens(2, 40, 11, &device);
        let is_indexers = |path: &String| path.contains(".indexer.");
        let numbers = |gradients: GradientsParams| gradients_of(&model, &gradients);
        let step = |model: &SparseTransformer, recompute| {
            let (losses, gradients) = model
                .losses_and_gradients(tokens.clone(), tokens.clone(), 0, 1u64, recompute)
                .unwrap();
            let of = |x: Tensor<1>| x.into_scalar::<f32>();
            let losses = (of(losses.loss), losses.aux_loss.map(of));
            (losses, numbers(gradients))
        };
        let assert_near = |a: &Gradients, b: &Gradients| {
            assert!(a.keys().eq(b.keys()));
            let pairs = a.values().flatten().zip(b.values().flatten());
            pairs.for_each(|(a, b)| assert!((a - b).abs() < 1e-5));
        };
        let ((loss, aux_loss), plain) = step(&model, Recompute::None);
        let aux_loss = aux_loss.unwrap();
        assert!(aux_loss > 1e-3, "{aux_loss}");
        let (of_indexers, of_model): (Gradients, Gradients) =
            (plain.clone().into_iter()).partition(|(path, _)| is_indexers(path));
        assert_eq!(of_indexers.len(), 2 * 5);
        assert!(of_indexers.values().all(|x| largest(x) > 1e-6));
        let logits = model.forward(tokens.clone());
        let targets = tokens.clone().without_autodiff().unsqueeze_dim(2);
        let entropy = log_softmax(logits, 2).gather(2, targets).mean().neg();
        assert!((entropy.clone().into_scalar::<f32>() - loss).abs() < 1e-5);
        let alone = GradientsParams::from_grads(entropy.backward(), &model);
        assert_near(&of_model, &numbers(alone));
        let whole = model.loss(tokens.clone(), tokens.clone());
        assert!((whole.clone().into_scalar::<f32>() - loss - aux_loss).abs() < 1e-5);
        let whole = GradientsParams::from_grads(whole.backward(), &model);
        assert_near(&plain, &numbers(whole));
        for recompute in ["block", "block+attention", "mlp"] {
            let ((same, again), gradients) = step(&model, recompute.parse().unwrap());
            assert_eq!(same, loss, "{recompute}");
            assert!((again.unwrap() - aux_loss).abs() < 1e-6);
            assert_eq!(gradients, plain, "{recompute}");
        }
        // Dense attention has neither.
        let dense = model.clone().with_dsa_stage(DsaStage::Dense).unwrap();
        let ((_, none), of_dense) = step(&dense, Recompute::None);
        assert_eq!(none, None);
        assert!(of_dense.keys().eq(of_model.keys()));
        // In the warm-up only the indexers learn, like from the loss that Burn differentiates.
        let warming = model.clone().with_dsa_stage(DsaStage::WarmUp).unwrap();
        let ((loss, aux_loss), of_warm_up) = step(&warming, Recompute::BLOCK);
        let whole = warming.loss(tokens.clone(), tokens.clone());
        let sum = loss + aux_loss.unwrap();
        assert!((whole.clone().into_scalar::<f32>() - sum).abs() < 1e-5);
        let whole = GradientsParams::from_grads(whole.backward(), &warming);
        assert_near(&of_warm_up, &numbers(whole));
        assert!(of_warm_up.keys().eq(of_indexers.keys()));
    }

    /// A warm-up brings the indexers close to the attention, and leaves the rest unchanged; their selection then has more recall.
    #[test]
    fn a_warm_up_teaches_what_to_choose() {
        let (device, _guard) = seeded(Device::flex().autodiff(), 34);
        let tokens = tokens(2, 40, 11, &device);
        let mut sparse = model("dsa:10,0,4,16", 40, &device);
        for block in &mut sparse.blocks {
            // Some keys get much attention, and others none.
            let weight = &mut block.mha.query.weight;
            *weight = weight.clone().map(|weight| weight * 20.0);
        }
        let far = |model: &SparseTransformer| {
            let logits = |stage| {
                let model = model.valid().with_dsa_stage(stage).unwrap();
                model.forward(tokens.clone().without_autodiff())
            };
            let difference = logits(DsaStage::Sparse) - logits(DsaStage::Dense);
            difference.square().mean().into_scalar::<f32>()
        };
        let before = (far(&sparse), sparse.valid().blocks[1].mha.key.weight.val());
        let mut model = sparse.with_dsa_stage(DsaStage::WarmUp).unwrap();
        let mut optimizer = FusedAdamWConfig::new().init();
        let mut found = Vec::new();
        for _ in 0..60 {
            let (losses, gradients) = model
                .losses_and_gradients(tokens.clone(), tokens.clone(), 0, 1u64, Recompute::None)
                .unwrap();
            found.push(losses.aux_loss.unwrap().into_scalar::<f32>());
            (model, _) = optimizer.step(0.02, model, gradients).unwrap();
        }
        assert!(found[59] < 0.5 * found[0], "{found:?}");
        let after = (far(&model), model.valid().blocks[1].mha.key.weight.val());
        assert!(after.0 < 0.7 * before.0, "{}, {}", before.0, after.0);
        after.1.into_data().assert_eq(&before.1.into_data(), true);
    }
}
