//! Content-based attention that covers all heads of a layer: common properties of `nsa`, `dsa` and `msa`.

use crate::common::*;
use crate::decoding::assert_decodes_and_sees_no_future;

/// Makes the configuration of two layers of four query heads on two KV heads, rotated, for up to `context` tokens.
pub fn config(text: &str, context: usize) -> SparseTransformerConfig {
    let attention = BlockAttentionConfig::new().with_rope_theta(Some(1000.0));
    small([16, 4], Pattern::causal(), [11, context, 2])
        .with_n_kv_heads(Some(2))
        .with_attention(Some(attention))
        .with_content(Some(text.parse().unwrap()))
}

pub fn model(text: &str, context: usize, device: &Device) -> SparseTransformer {
    randomise(config(text, context).init(device))
}

/// Makes a model with normalized heads.
pub fn normed(text: &str, device: &Device) -> SparseTransformer {
    let mut config = config(text, 40);
    let attention = config.attention.take().unwrap();
    let config = config.with_attention(Some(attention.with_qk_norm(Some(QkNorm::Rms))));
    randomise(config.init(device))
}

#[test]
fn models_decode_and_do_not_look_ahead() {
    let (device, _guard) = seeded(Device::flex(), 31);
    let tokens = tokens(2, 40, 11, &device);
    for text in ["nsa:8,4,8,4,10", "nsa:8,4,8,4,10,mlp,shared"] {
        assert_decodes_and_sees_no_future(&normed(text, &device), &tokens);
    }
    for (text, stage) in [
        ("dsa:6,2,3,8", DsaStage::Sparse),
        ("dsa:6,2,3,8", DsaStage::WarmUp),
        ("dsa:6,2,3,8,fp8", DsaStage::Sparse),
        ("msa:8,2,8", DsaStage::Sparse),
        ("msa:8,2,8", DsaStage::WarmUp),
    ] {
        let model = model(text, 48, &device).with_dsa_stage(stage).unwrap();
        assert_eq!(model.dsa_stage(), Some(stage));
        assert_decodes_and_sees_no_future(&model, &tokens);
    }
}

#[test]
fn what_does_not_go_with_them_is_said() {
    let device = Device::flex();
    for (text, tokens, of) in [
        ("nsa:8,4,8,4,10", "see earlier ones alone", "branches"),
        ("dsa:6,2,3,8", "choose from all earlier ones", "indexer"),
        ("msa:8,2,6", "choose from all earlier ones", "indexer"),
    ] {
        let name = &text[..3];
        let pattern =
            format!("pattern must be causal with {name}, whose tokens {tokens}, got dense");
        let config = || {
            SparseMultiHeadAttentionConfig::new(16, 2, Pattern::causal())
                .with_block_size(8)
                .with_content(Some(text.parse().unwrap()))
        };
        let beside = format!("must be none with {name}, which is all heads of a layer, got some");
        let dense = SparseMultiHeadAttentionConfig {
            pattern: Pattern::dense(),
            ..config()
        };
        refused! {
            dense.try_init(&device) => &pattern;
            config().with_local_heads(Some(1)).try_init(&device) => format!("local_heads {beside}");
            config().with_selection(Some("topk:8,2".parse().unwrap())).try_init(&device) => format!("selection {beside}");
            config().with_sinks(true).try_init(&device) => format!("sinks {beside}");
            config().with_softcap(Some(5.0)).try_init(&device) => format!("softcap {beside}");
            config().with_dropout(0.1).try_init(&device) => format!("dropout {beside}");
        }
        let mha = config().init(&device);
        let printed = format!("{mha}");
        assert!(printed.contains(&format!("content: {text}")), "{printed}");
        assert!(mha.attention_flops(20).unwrap() > 0);
        let x = Tensor::<3>::zeros([2, 20, 16], &device);
        let padded = SparseMhaInput::self_attn(x.clone()).lengths([20, 10]);
        let other = SparseMhaInput::new(x.clone(), x.clone(), x.clone());
        let packed = mha.try_forward_packed(x.narrow(0, 0, 1), &[0, 5, 20]);
        refused! {
            mha.try_forward(padded) => format!("padding must be none with {name}, got some");
            mha.try_forward(other) => format!("input must be self-attention with {name}, got another key or value");
            packed => format!("content must be none with padding, packed sequences and weights, which know nothing of its {of}, got {text}");
            mha.with_pattern(Pattern::dense(), 8) => "pattern must be causal…";
        }
    }
}

#[cfg(feature = "autodiff")]
mod training {
    use burn::optim::GradientsParams;
    use burn::tensor::Gradients;
    use burn_fused_ops::optim::FusedAdamWConfig;

    use super::*;

    /// Checks that the selecting part of a layer learns only from its own loss, in both stages, and that nothing else learns from it.
    pub fn assert_own_losses(layer: &SparseMultiHeadAttention, seq: usize, device: &Device) {
        let found = |gradients: Gradients| {
            let found = GradientsParams::from_grads(gradients, &layer.content);
            gradients_of(&layer.content, &found)
        };
        let x = random([2, seq, 16], device).require_grad();
        let run = |layer: &SparseMultiHeadAttention| {
            let output = layer.try_forward(SparseMhaInput::self_attn(x.clone()));
            output.unwrap()
        };
        let output = run(layer);
        let of_model = output.context.powi_scalar(2).sum().backward();
        assert!(layer.key.weight.val().grad(&of_model).is_some());
        assert!(x.grad(&of_model).is_some());
        assert!(found(of_model).is_empty());
        let warming = layer.clone().with_dsa_stage(DsaStage::WarmUp).unwrap();
        for loss in [output.aux_loss, run(&warming).aux_loss] {
            let loss = loss.unwrap();
            assert!(loss.clone().into_scalar::<f32>() > 0.0);
            let gradients = loss.backward();
            assert!(layer.key.weight.val().grad(&gradients).is_none());
            assert!(layer.query.weight.val().grad(&gradients).is_none());
            assert!(x.grad(&gradients).is_none());
            let found = found(gradients);
            let is_right = found.len() > 3 && found.values().all(|x| largest(x) > 1e-6);
            assert!(is_right, "{found:?}");
        }
    }

    /// The indexers' loss falls in a warm-up that changes nothing else, then both losses fall; in f32 and bf16, including a bf16 index, and with
    /// equal bits under recomputation.
    #[test]
    fn models_learn_in_stages() {
        let device = Device::flex().autodiff();
        let tokens = tokens(2, 48, 11, &device);
        for (text, precision) in [
            ("dsa:10,0,4,16", Precision::Bf16),
            ("dsa:10,0,4,16,f32", Precision::Bf16),
            ("msa:8,2,8", Precision::F32),
            ("msa:8,2,8", Precision::Bf16),
        ] {
            let _guard = seed(&device, 35);
            let mut config = config(text, 48).with_precision(precision);
            config.attention = None;
            let mut model = randomise(config.init(&device));
            let of_query = |model: &SparseTransformer| {
                let mha = &model.blocks[0].mha;
                let of_dsa = mha
                    .dsa()
                    .map(|dsa| (&dsa.indexer.query, dsa.indexer.dtype()));
                let of_msa = mha.msa().map(|msa| (&msa.query, msa.dtype()));
                let (query, dtype) = of_dsa.or(of_msa).unwrap();
                (query.weight.clone(), DType::from(dtype))
            };
            let is_half = precision == Precision::Bf16 && !text.ends_with("f32");
            assert_eq!(of_query(&model).1 == DType::BF16, is_half);
            let mut optimizer = FusedAdamWConfig::new().init();
            let mut found = Vec::new();
            for step in 0..40 {
                let stage = match step {
                    0..30 => DsaStage::WarmUp,
                    _ => DsaStage::Sparse,
                };
                model = model.with_dsa_stage(stage).unwrap();
                let run = |recompute| {
                    let (losses, gradients) = model
                        .losses_and_gradients(tokens.clone(), tokens.clone(), 0, 1u64, recompute)
                        .unwrap();
                    let numbers = [losses.loss, losses.aux_loss.unwrap()];
                    (numbers.map(|x| x.into_scalar::<f32>()), gradients)
                };
                let (numbers, gradients) = run(Recompute::None);
                if step == 39 {
                    assert_eq!(run(Recompute::BLOCK).0, numbers);
                }
                found.push(numbers);
                let gradient = gradients.get::<2>(of_query(&model).0.id).unwrap();
                assert_eq!(gradient.dtype(), DType::F32);
                (model, _) = optimizer.step(0.02, model, gradients).unwrap();
            }
            assert!(found.iter().flatten().all(|x| x.is_finite()), "{found:?}");
            assert!(found[29][1] < 0.8 * found[0][1], "{text}: {found:?}");
            let is_near = (found[29][0] - found[0][0]).abs() < 1e-5;
            assert!(is_near, "{text}: {found:?}");
            assert!(found[39][0] < 0.9 * found[30][0], "{text}: {found:?}");
            assert!(of_query(&model).0.val().dtype() == DType::F32);
        }
    }
}

#[cfg(feature = "autodiff")]
pub use training::assert_own_losses;
