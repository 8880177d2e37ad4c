//! MiniMax sparse attention: the layer, what its index branch learns by, and decoding.

use burn::module::Module;
use burn::nn::RotaryEncodingConfig;
use burn::tensor::{Device, Tensor};
use burn_sparse_transformer::content::ContentAttention;
use burn_sparse_transformer::dsa::DsaStage;
use burn_sparse_transformer::msa::MsaHeadsConfig;
use burn_sparse_transformer::{
    BlockAttentionConfig, Factorization, Pattern, SparseMhaCache, SparseMhaInput,
    SparseMultiHeadAttention, SparseMultiHeadAttentionConfig, SparseTransformer,
    SparseTransformerConfig,
};

use crate::common::{assert_close, attend, attend_cache, random, randomise, seed, tokens};
use crate::decoding::assert_decodes_and_sees_no_future;

/// Four heads of queries on some of keys; an index of width 6, of which four channels are rotated.
fn config(keep: usize, kv_heads: usize) -> SparseMultiHeadAttentionConfig {
    let heads = MsaHeadsConfig::new()
        .with_block(8)
        .with_keep(keep)
        .with_index_dim(6)
        .with_rope_dim(Some(4));
    SparseMultiHeadAttentionConfig::new(16, 4, Pattern::causal())
        .with_n_kv_heads(Some(kv_heads))
        .with_content(Some(ContentAttention::Msa(heads)))
        .with_rope(Some(RotaryEncodingConfig::new(64, 4)))
        .with_block_size(8)
}

fn layer(keep: usize, kv_heads: usize, device: &Device) -> SparseMultiHeadAttention {
    randomise(config(keep, kv_heads).try_init(device).unwrap())
}

/// With room for all blocks it is dense causal attention, as in the stages before the choice; with fewer it is not.
#[test]
fn with_all_blocks_it_is_dense() {
    let device = Device::flex();
    let x = random([2, 45, 16], &device);
    let layer = layer(2, 2, &device);
    let all = config(6, 2).try_init(&device).unwrap();
    let all = all.load_record(layer.clone().into_record());
    let dense = layer.clone().with_dsa_stage(DsaStage::Dense).unwrap();
    let dense = attend(&dense, x.clone()).unwrap();
    assert_close(attend(&all, x.clone()).unwrap(), dense.clone(), 1e-5);
    let difference = attend(&layer, x).unwrap() - dense;
    let difference = difference.abs().max().into_scalar::<f32>();
    assert!(difference > 1e-3, "{difference}");
}

/// Token by token, and in pieces, with what came before in the cache; of groups of four, two and one heads.
#[test]
fn decoding_gives_what_the_whole_gives() {
    let device = Device::flex();
    for kv_heads in [1, 2, 4] {
        let layer = layer(3, kv_heads, &device);
        let x = random([2, 45, 16], &device);
        let whole = attend(&layer, x.clone()).unwrap();
        for pieces in [vec![1; 45], vec![10, 1, 1, 5, 28]] {
            let mut cache = SparseMhaCache::new();
            let mut rows = Vec::new();
            for count in pieces {
                let piece = x.clone().narrow(1, cache.len(), count);
                rows.push(attend_cache(&layer, piece, &mut cache).unwrap());
            }
            assert_close(Tensor::cat(rows, 1), whole.clone(), 1e-5);
            // What is taken back is forgotten.
            cache.truncate(31);
            let again = attend_cache(&layer, x.clone().narrow(1, 31, 4), &mut cache);
            assert_close(again.unwrap(), whole.clone().narrow(1, 31, 4), 1e-5);
        }
    }
}

/// The index branch learns by its own loss alone, and nothing else learns by that.
#[cfg(feature = "autodiff")]
#[test]
fn each_loss_reaches_its_own_parameters() {
    let device = Device::flex().autodiff();
    let layer = layer(2, 2, &device);
    let x = random([2, 40, 16], &device).require_grad();
    let branch = layer.msa().unwrap();
    let run = |layer: &SparseMultiHeadAttention| {
        let output = layer.try_forward(SparseMhaInput::self_attn(x.clone()));
        output.unwrap()
    };
    let output = run(&layer);
    let of_model = output.context.powi_scalar(2).sum().backward();
    assert!(layer.key.weight.val().grad(&of_model).is_some());
    assert!(x.grad(&of_model).is_some());
    assert!(branch.key.weight.val().grad(&of_model).is_none());
    let warming = layer.clone().with_dsa_stage(DsaStage::WarmUp).unwrap();
    for loss in [output.aux_loss, run(&warming).aux_loss] {
        let loss = loss.unwrap();
        assert!(loss.clone().into_scalar::<f32>() > 0.0);
        let of_branch = loss.backward();
        for part in [&branch.query, &branch.key] {
            let grad = part.weight.val().grad(&of_branch).unwrap();
            assert!(grad.abs().max().into_scalar::<f32>() > 1e-5);
        }
        for part in [&branch.query_norm, &branch.key_norm] {
            let grad = part.gamma.val().grad(&of_branch).unwrap();
            assert!(grad.abs().max().into_scalar::<f32>() > 1e-6);
        }
        assert!(layer.key.weight.val().grad(&of_branch).is_none());
        assert!(layer.query.weight.val().grad(&of_branch).is_none());
        assert!(x.grad(&of_branch).is_none());
    }
}

/// Two layers that choose two blocks of 8 of up to 48 tokens.
fn model(text: &str, device: &Device) -> SparseTransformer {
    let attention = BlockAttentionConfig::new().with_rope_theta(Some(1000.0));
    let config = SparseTransformerConfig::new(16, 4, Factorization::from(Pattern::causal()))
        .with_vocab_size(11)
        .with_context(48)
        .with_n_layers(2)
        .with_n_kv_heads(Some(2))
        .with_block_size(8)
        .with_attention(Some(attention))
        .with_content(Some(text.parse().unwrap()));
    randomise(config.try_init(device).unwrap())
}

#[test]
fn models_decode_and_do_not_look_ahead() {
    let device = Device::flex();
    let _guard = seed(&device, 31);
    let tokens = tokens(2, 40, 11, &device);
    for stage in [DsaStage::Sparse, DsaStage::WarmUp] {
        let model = model("msa:8,2,8", &device).with_dsa_stage(stage).unwrap();
        assert_eq!(model.dsa_stage(), Some(stage));
        assert_decodes_and_sees_no_future(&model, &tokens);
    }
    let sparse = model("msa:8,2,8", &device);
    // One block, and two from the second on.
    let pairs = 36 + (8 * 8 * 5) + 5 * 36;
    let scores = 2 * 2 * 8 * (48 * 49 / 2);
    let flops = sparse.attention_flops(48).unwrap();
    assert_eq!(flops, 2 * (2 * 4 * pairs * (4 + 4) + scores));
}

#[test]
fn what_does_not_go_with_it_is_said() {
    let device = Device::flex();
    let with = |heads| {
        SparseMultiHeadAttentionConfig::new(16, 4, Pattern::causal())
            .with_content(Some(ContentAttention::Msa(heads)))
            .try_init(&device)
    };
    let heads = || MsaHeadsConfig::new().with_block(8).with_index_dim(6);
    let pattern = "pattern must be causal with msa, whose tokens choose from all earlier ones, got";
    let local = SparseMultiHeadAttentionConfig {
        pattern: Pattern::local(8),
        ..config(2, 2)
    };
    refused! {
        with(heads().with_block(12)) => "…block must be 8, 16…";
        with(heads().with_keep(0)) => "…keep must be at least 1…";
        with(heads().with_index_dim(0)) => "index_dim must be at least 1, got 0";
        with(heads().with_rope_dim(Some(8))) => "rope_dim must be an even number, at most 6, the width of an index head, got 8";
        local.try_init(&device) => format!("{pattern} local(8)");
        config(2, 2).with_local_heads(Some(1)).try_init(&device) => "local_heads must be none with msa, which is all heads of a layer, got some";
        config(2, 2).with_softcap(Some(5.0)).try_init(&device) => "softcap must be none with msa, which is all heads of a layer, got some";
    }
    let mha = layer(2, 2, &device);
    let x = Tensor::<3>::zeros([2, 20, 16], &device);
    let input = SparseMhaInput::self_attn(x.clone()).lengths([20, 10]);
    refused! {
        mha.try_forward(input) => "padding must be none with msa, got some";
        mha.try_forward_packed(x.narrow(0, 0, 1), &[0, 5, 20]) => "…its indexer, got msa:8,2,6";
    }
    let printed = format!("{mha}");
    assert!(printed.contains("content: msa:8,2,6"), "{printed}");
}

#[cfg(feature = "autodiff")]
mod training {
    use burn_fused_ops::optim::FusedAdamWConfig;
    use burn_sparse_transformer::{Precision, Recompute};

    use super::*;

    /// The branch's own loss falls by a warm-up that changes nothing else, then both fall; in f32 and bf16, and recomputed with the same bits.
    #[test]
    fn models_learn_in_stages() {
        let device = Device::flex().autodiff();
        let tokens = tokens(2, 48, 11, &device);
        for precision in [Precision::F32, Precision::Bf16] {
            let _guard = seed(&device, 35);
            let config =
                SparseTransformerConfig::new(16, 4, Factorization::from(Pattern::causal()))
                    .with_vocab_size(11)
                    .with_context(48)
                    .with_n_layers(2)
                    .with_block_size(8)
                    .with_n_kv_heads(Some(2))
                    .with_precision(precision)
                    .with_content(Some("msa:8,2,8".parse().unwrap()));
            let mut model = randomise(config.try_init(&device).unwrap());
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
                (model, _) = optimizer.step(0.02, model, gradients).unwrap();
            }
            assert!(found.iter().flatten().all(|x| x.is_finite()), "{found:?}");
            assert!(found[29][1] < 0.8 * found[0][1], "{found:?}");
            assert!((found[29][0] - found[0][0]).abs() < 1e-5, "{found:?}");
            assert!(found[39][0] < 0.9 * found[30][0], "{found:?}");
        }
    }
}
