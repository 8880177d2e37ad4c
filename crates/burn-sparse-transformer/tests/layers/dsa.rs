//! DeepSeek sparse attention: the layer, what its indexer learns by, and decoding.

use burn::module::Module;
use burn::nn::RotaryEncodingConfig;
use burn::tensor::activation::softmax;
use burn::tensor::{Device, Int, Tensor};
use burn_sparse_transformer::content::ContentAttention;
use burn_sparse_transformer::dsa::{DsaHeadsConfig, DsaStage};
use burn_sparse_transformer::{
    BlockAttentionConfig, Factorization, Pattern, SparseMhaCache, SparseMhaInput,
    SparseMultiHeadAttention, SparseMultiHeadAttentionConfig, SparseTransformer,
    SparseTransformerConfig,
};

use crate::common::{assert_close, attend, attend_cache, random, randomise, seed, tokens};
use crate::decoding::assert_decodes_and_sees_no_future;

/// Four heads of queries on two of keys; three index heads of width 6, of which four channels are rotated.
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
    randomise(config(heads(keep, near)).try_init(device).unwrap())
}

/// With room for all keys it is dense causal attention, whatever the indexer.
#[test]
fn with_all_keys_it_is_dense() {
    let device = Device::flex();
    let layer = layer(50, 0, &device);
    let x = random([2, 21, 16], &device);
    let got = attend(&layer, x.clone()).unwrap();
    let heads = |part: Tensor<3>, heads: usize| part.reshape([2, 21, heads, 4]).swap_dims(1, 2);
    let rope = layer.rope.as_ref().unwrap();
    let q = rope.forward(heads(layer.query.forward(x.clone()), 4));
    let twice = |x: Tensor<4>| {
        let x = x.reshape([2, 2, 1, 21, 4]).expand([2, 2, 2, 21, 4]);
        x.reshape([2, 4, 21, 4])
    };
    let k = twice(rope.forward(heads(layer.key.forward(x.clone()), 2)));
    let v = twice(heads(layer.value.forward(x), 2));
    let scores = q.matmul(k.swap_dims(2, 3)) / 2.0;
    let rows = Tensor::<1, Int>::arange(0..21, &device);
    let ahead = rows.clone().reshape([1, 21]).expand([21, 21]);
    let ahead = ahead.greater(rows.reshape([21, 1]).expand([21, 21]));
    let ahead = ahead.reshape([1, 1, 21, 21]).expand([2, 4, 21, 21]);
    let weights = softmax(scores.mask_fill(ahead, -1e30), 3);
    let seen = weights.matmul(v).swap_dims(1, 2).reshape([2, 21, 16]);
    assert_close(got, layer.output.forward(seen), 1e-5);
}

/// Token by token, and in pieces, with what came before in the cache.
#[test]
fn decoding_gives_what_the_whole_gives() {
    let device = Device::flex();
    for near in [0, 3] {
        let layer = layer(5, near, &device);
        let x = random([2, 24, 16], &device);
        let whole = attend(&layer, x.clone()).unwrap();
        for pieces in [vec![1; 24], vec![10, 1, 1, 5, 7]] {
            let mut cache = SparseMhaCache::new();
            assert!(cache.is_empty());
            let mut rows = Vec::new();
            for count in pieces {
                let piece = x.clone().narrow(1, cache.len(), count);
                rows.push(attend_cache(&layer, piece, &mut cache).unwrap());
            }
            assert_close(Tensor::cat(rows, 1), whole.clone(), 1e-5);
            // What is taken back is forgotten.
            cache.truncate(11);
            let again = attend_cache(&layer, x.clone().narrow(1, 11, 4), &mut cache);
            assert_close(again.unwrap(), whole.clone().narrow(1, 11, 4), 1e-5);
            let other = random([1, 1, 16], &device);
            refused! { attend_cache(&layer, other, &mut cache) => "…batch…"; }
            assert_eq!(cache.len(), 15);
        }
    }
}

/// Later tokens change nothing before them, and fewer keys change something.
#[test]
fn it_is_prefix_stable() {
    let device = Device::flex();
    let layer = layer(5, 0, &device);
    let x = random([1, 30, 16], &device);
    let before = attend(&layer, x.clone()).unwrap();
    let other = Tensor::cat(
        vec![x.clone().narrow(1, 0, 20), random([1, 10, 16], &device)],
        1,
    );
    let after = attend(&layer, other).unwrap();
    assert_close(
        after.narrow(1, 0, 20),
        before.clone().narrow(1, 0, 20),
        1e-5,
    );
    let dense = attend(&self::layer(30, 0, &device), x).unwrap();
    let difference = (dense - before).abs().max().into_scalar::<f32>();
    assert!(difference > 1e-3, "{difference}");
}

/// The indexer learns by its own loss alone, and nothing else learns by that.
#[cfg(feature = "autodiff")]
#[test]
fn each_loss_reaches_its_own_parameters() {
    let device = Device::flex().autodiff();
    let in_fp8 = heads(5, 1).with_index_dim(8).with_index_fp8(true);
    for heads in [heads(5, 1), in_fp8] {
        let layer = config(heads).try_init(&device).unwrap();
        assert_own_losses(&randomise(layer), &device);
    }
}

#[cfg(feature = "autodiff")]
fn assert_own_losses(layer: &SparseMultiHeadAttention, device: &Device) {
    let x = random([2, 24, 16], device).require_grad();
    let indexer = &layer.dsa().unwrap().indexer;
    let run = |layer: &SparseMultiHeadAttention| {
        let output = layer.try_forward(SparseMhaInput::self_attn(x.clone()));
        output.unwrap()
    };
    let output = run(layer);
    let of_model = output.context.powi_scalar(2).sum().backward();
    assert!(layer.key.weight.val().grad(&of_model).is_some());
    assert!(x.grad(&of_model).is_some());
    assert!(indexer.key.weight.val().grad(&of_model).is_none());
    let warming = layer.clone().with_dsa_stage(DsaStage::WarmUp).unwrap();
    for loss in [output.aux_loss, run(&warming).aux_loss] {
        let loss = loss.unwrap();
        assert!(loss.clone().into_scalar::<f32>() > 0.0);
        let of_indexer = loss.backward();
        for part in [&indexer.query, &indexer.key, &indexer.weights] {
            let grad = part.weight.val().grad(&of_indexer).unwrap();
            assert!(grad.abs().max().into_scalar::<f32>() > 1e-5);
        }
        assert!(layer.key.weight.val().grad(&of_indexer).is_none());
        assert!(layer.query.weight.val().grad(&of_indexer).is_none());
        assert!(x.grad(&of_indexer).is_none());
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

/// Two layers that choose six of up to 40 tokens.
fn model(text: &str, device: &Device) -> SparseTransformer {
    let attention = BlockAttentionConfig::new().with_rope_theta(Some(1000.0));
    let config = SparseTransformerConfig::new(16, 4, Factorization::from(Pattern::causal()))
        .with_vocab_size(11)
        .with_context(40)
        .with_n_layers(2)
        .with_n_kv_heads(Some(2))
        .with_block_size(8)
        .with_attention(Some(attention))
        .with_content(Some(text.parse().unwrap()));
    randomise(config.try_init(device).unwrap())
}

const TEXT: &str = "dsa:6,2,3,8";

#[test]
fn models_decode_and_do_not_look_ahead() {
    let device = Device::flex();
    let _guard = seed(&device, 31);
    let tokens = tokens(2, 40, 11, &device);
    for (text, stage) in [
        (TEXT, DsaStage::Sparse),
        (TEXT, DsaStage::WarmUp),
        ("dsa:6,2,3,8,fp8", DsaStage::Sparse),
    ] {
        let model = model(text, &device).with_dsa_stage(stage).unwrap();
        assert_eq!(model.dsa_stage(), Some(stage));
        assert_decodes_and_sees_no_future(&model, &tokens);
    }
    let model = model(TEXT, &device);
    // A cache of dense attention has no index keys.
    let dense = model.clone().with_dsa_stage(DsaStage::Dense).unwrap();
    let mut cache = dense.new_cache();
    let part = |from, count| tokens.clone().narrow(1, from, count);
    dense.try_forward_cache(part(0, 9), &mut cache).unwrap();
    refused! { model.try_forward_cache(part(9, 1), &mut cache) => "cache must be one whose 9 tokens an indexer has seen, got one of 0"; }
}

/// Before the choice, and with a choice of everything, layers are those of dense attention.
#[test]
fn stages_before_the_choice_are_dense() {
    let device = Device::flex();
    let _guard = seed(&device, 32);
    let tokens = tokens(2, 33, 11, &device);
    let sparse = model(TEXT, &device);
    let all = model("dsa:40,0,3,8", &device).load_record(sparse.clone().into_record());
    let expected = all.try_forward(tokens.clone()).unwrap();
    for stage in [DsaStage::Dense, DsaStage::WarmUp] {
        let dense = sparse.clone().with_dsa_stage(stage).unwrap();
        assert_close(
            dense.try_forward(tokens.clone()).unwrap(),
            expected.clone(),
            1e-4,
        );
        // The operations of the pairs, and no scores.
        let flops = dense.attention_flops(33).unwrap();
        assert_eq!(flops, all.attention_flops(33).unwrap());
        assert_eq!(flops, 2 * 2 * 4 * (33 * 34 / 2) * (4 + 4));
    }
    let pairs = 21 + 27 * 6;
    let scores = 2 * 3 * 8 * (33 * 34 / 2);
    let flops = sparse.attention_flops(33).unwrap();
    assert_eq!(flops, 2 * (2 * 4 * pairs * (4 + 4) + scores));
    assert!(
        sparse.matmul_flops_per_token() > {
            let dense = sparse.clone().with_dsa_stage(DsaStage::Dense).unwrap();
            dense.matmul_flops_per_token()
        }
    );
    let got = sparse.try_forward(tokens).unwrap();
    let difference = (got - expected).abs().max().into_scalar::<f32>();
    assert!(difference > 1e-3, "{difference}");
    let plain = SparseTransformerConfig::new(16, 4, Factorization::from(Pattern::causal()))
        .with_vocab_size(11)
        .with_context(40)
        .with_n_layers(1)
        .try_init(&device)
        .unwrap();
    assert_eq!(plain.dsa_stage(), None);
    refused! { plain.with_dsa_stage(DsaStage::Dense) => "dsa_stage must be of a model with layers of dsa or msa, got Dense of one without"; }
}

#[test]
fn what_does_not_go_with_it_is_said() {
    let device = Device::flex();
    let config = || {
        SparseMultiHeadAttentionConfig::new(16, 2, Pattern::causal())
            .with_block_size(8)
            .with_content(Some(TEXT.parse().unwrap()))
    };
    let beside = "none with dsa, which is all heads of a layer, got some";
    let pattern = "pattern must be causal with dsa, whose tokens choose from all earlier ones, got";
    refused! {
        SparseMultiHeadAttentionConfig { pattern: Pattern::local(8), ..config() }.try_init(&device) => format!("{pattern} local(8)");
        config().with_local_heads(Some(1)).try_init(&device) => format!("local_heads must be {beside}");
        config().with_softcap(Some(5.0)).try_init(&device) => format!("softcap must be {beside}");
        config().with_dropout(0.1).try_init(&device) => format!("dropout must be {beside}");
    }
    let mha = config().try_init(&device).unwrap();
    let x = Tensor::<3>::zeros([2, 20, 16], &device);
    let input = SparseMhaInput::self_attn(x.clone()).lengths([20, 10]);
    refused! { mha.try_forward(input) => "padding must be none with dsa, got some"; }
    let input = SparseMhaInput::new(x.clone(), x.clone(), x.clone());
    refused! {
        mha.try_forward(input) => "input must be self-attention with dsa, got another key or value";
        mha.try_forward_packed(x.narrow(0, 0, 1), &[0, 5, 20]) => "…its indexer, got dsa:6,2,3,8";
    }
    let printed = format!("{mha}");
    assert!(printed.contains("content: dsa:6,2,3,8"), "{printed}");
    refused! { mha.with_pattern(Pattern::local(8), 8) => format!("{pattern} local(8)"); }
}

#[cfg(feature = "autodiff")]
mod training {
    use burn::module::{ModuleVisitor, Param, ParamId};
    use burn::optim::GradientsParams;
    use burn::tensor::DType;
    use burn::tensor::activation::log_softmax;
    use burn_fused_ops::optim::FusedAdamWConfig;
    use burn_sparse_transformer::{Precision, Recompute};

    use super::*;

    /// All parameters: of which rank, and whether they are an indexer's.
    fn params(model: &SparseTransformer) -> Vec<(ParamId, usize, bool)> {
        struct Params(Vec<(ParamId, usize)>);
        impl ModuleVisitor for Params {
            fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
                self.0.push((param.id, D));
            }
        }
        let visit = |module: &dyn Fn(&mut Params)| {
            let mut params = Params(Vec::new());
            module(&mut params);
            params.0
        };
        let of_indexers = visit(&|params| {
            for block in &model.blocks {
                let content = block.mha.content.as_ref().unwrap();
                content.dsa.as_ref().unwrap().indexer.visit(params);
            }
        });
        let all = visit(&|params| model.visit(params));
        let of_indexer = |id| of_indexers.iter().any(|(own, _)| *own == id);
        all.into_iter()
            .map(|(id, rank)| (id, rank, of_indexer(id)))
            .collect()
    }

    /// The gradient of each parameter, if it has one.
    fn numbers(
        gradients: &GradientsParams,
        params: &[(ParamId, usize, bool)],
    ) -> Vec<Option<Vec<f32>>> {
        let of = |&(id, rank, _): &(ParamId, usize, bool)| match rank {
            1 => gradients.get::<1>(id).map(Tensor::into_data),
            _ => gradients.get::<2>(id).map(Tensor::into_data),
        };
        let numbers = params.iter().map(of);
        numbers
            .map(|data| data.map(|data| data.try_to_vec::<f32>().unwrap()))
            .collect()
    }

    /// Each learns by its own loss: the model as by cross-entropy alone, and the indexers, which that does not reach, by what is added.
    #[test]
    fn the_model_and_its_indexers_learn_apart() {
        let device = Device::flex().autodiff();
        let _guard = seed(&device, 33);
        let model = model(TEXT, &device);
        let tokens = tokens(2, 40, 11, &device);
        let params = params(&model);
        assert_eq!(params.iter().filter(|param| param.2).count(), 2 * 5);
        let step = |model: &SparseTransformer, recompute| {
            let (losses, gradients) = model
                .losses_and_gradients(tokens.clone(), tokens.clone(), 0, 1u64, recompute)
                .unwrap();
            let of = |x: Tensor<1>| x.into_scalar::<f32>();
            let losses = (of(losses.loss), losses.aux_loss.map(of));
            (losses, numbers(&gradients, &params))
        };
        let ((loss, aux_loss), plain) = step(&model, Recompute::None);
        let aux_loss = aux_loss.unwrap();
        assert!(aux_loss > 1e-3, "{aux_loss}");
        let logits = model.try_forward(tokens.clone()).unwrap();
        let targets = tokens.clone().without_autodiff().unsqueeze_dim(2);
        let entropy = log_softmax(logits, 2).gather(2, targets).mean().neg();
        assert!((entropy.clone().into_scalar::<f32>() - loss).abs() < 1e-5);
        let alone = GradientsParams::from_grads(entropy.backward(), &model);
        let alone = numbers(&alone, &params);
        let whole = model.try_loss(tokens.clone(), tokens.clone()).unwrap();
        assert!((whole.clone().into_scalar::<f32>() - loss - aux_loss).abs() < 1e-5);
        let whole = GradientsParams::from_grads(whole.backward(), &model);
        let near = |a: &[f32], b: &[f32]| a.iter().zip(b).all(|(a, b)| (a - b).abs() < 1e-5);
        let whole = numbers(&whole, &params);
        for (place, (_, _, of_indexer)) in params.iter().enumerate() {
            let got = plain[place].as_ref().unwrap();
            assert!(near(got, whole[place].as_ref().unwrap()));
            match of_indexer {
                true => {
                    assert!(alone[place].is_none());
                    assert!(got.iter().any(|x| x.abs() > 1e-6));
                }
                false => assert!(near(got, alone[place].as_ref().unwrap())),
            }
        }
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
        for ((_, _, of_indexer), gradient) in params.iter().zip(&of_dense) {
            assert_eq!(gradient.is_none(), *of_indexer);
        }
        // In the warm-up the indexers alone learn, as by the loss that Burn differentiates.
        let warming = model.clone().with_dsa_stage(DsaStage::WarmUp).unwrap();
        let ((loss, aux_loss), of_warm_up) = step(&warming, Recompute::BLOCK);
        let whole = warming.try_loss(tokens.clone(), tokens.clone()).unwrap();
        let sum = loss + aux_loss.unwrap();
        assert!((whole.clone().into_scalar::<f32>() - sum).abs() < 1e-5);
        let whole = GradientsParams::from_grads(whole.backward(), &warming);
        let whole = numbers(&whole, &params);
        for (place, (_, _, of_indexer)) in params.iter().enumerate() {
            let got = (&of_warm_up[place], &whole[place]);
            match (of_indexer, got) {
                (true, (Some(got), Some(whole))) => assert!(near(got, whole)),
                (false, (None, None)) => {}
                other => panic!("{other:?}"),
            }
        }
    }

    /// In mixed precision all stages train, with an index in either precision.
    #[test]
    fn models_in_bf16_learn() {
        let device = Device::flex().autodiff();
        let tokens = tokens(2, 40, 11, &device);
        for text in ["dsa:10,0,4,16", "dsa:10,0,4,16,f32"] {
            let _guard = seed(&device, 35);
            let config =
                SparseTransformerConfig::new(16, 4, Factorization::from(Pattern::causal()))
                    .with_vocab_size(11)
                    .with_context(40)
                    .with_n_layers(2)
                    .with_block_size(8)
                    .with_precision(Precision::Bf16)
                    .with_content(Some(text.parse().unwrap()));
            let mut model = randomise(config.try_init(&device).unwrap());
            let indexer = |model: &SparseTransformer| {
                let content = model.blocks[0].mha.content.as_ref().unwrap();
                content.dsa.as_ref().unwrap().indexer.clone()
            };
            let is_half = DType::from(indexer(&model).dtype()) == DType::BF16;
            assert_eq!(is_half, !text.ends_with("f32"));
            let mut optimizer = FusedAdamWConfig::new().init();
            let mut found = Vec::new();
            for step in 0..40 {
                let stage = match step {
                    0..30 => DsaStage::WarmUp,
                    _ => DsaStage::Sparse,
                };
                model = model.with_dsa_stage(stage).unwrap();
                let (losses, gradients) = model
                    .losses_and_gradients(tokens.clone(), tokens.clone(), 0, 1u64, Recompute::None)
                    .unwrap();
                let numbers = [losses.loss, losses.aux_loss.unwrap()];
                found.push(numbers.map(|x| x.into_scalar::<f32>()));
                let weight = indexer(&model).query.weight;
                let gradient = gradients.get::<2>(weight.id).unwrap();
                assert_eq!(gradient.dtype(), DType::F32);
                (model, _) = optimizer.step(0.02, model, gradients).unwrap();
            }
            assert!(found.iter().flatten().all(|x| x.is_finite()), "{found:?}");
            assert!(found[29][1] < 0.8 * found[0][1], "{found:?}");
            assert!(found[39][0] < 0.9 * found[30][0], "{found:?}");
            assert!(indexer(&model).query.weight.val().dtype() == DType::F32);
        }
    }

    /// A warm-up brings the indexers near the attention, and leaves all else as it is; what they choose then keeps more of it.
    #[test]
    fn a_warm_up_teaches_what_to_choose() {
        let device = Device::flex().autodiff();
        let _guard = seed(&device, 34);
        let tokens = tokens(2, 40, 11, &device);
        let mut sparse = model("dsa:10,0,4,16", &device);
        for block in &mut sparse.blocks {
            // Some keys get much, and others nothing.
            let weight = &mut block.mha.query.weight;
            *weight = weight.clone().map(|weight| weight * 20.0);
        }
        let far = |model: &SparseTransformer| {
            let logits = |stage| {
                let model = model.valid().with_dsa_stage(stage).unwrap();
                model
                    .try_forward(tokens.clone().without_autodiff())
                    .unwrap()
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
