//! Heads with content-based attention besides those of a pattern, in attention, blocks and models.

use burn_blocksparse::sparse_attention;
use burn_fused_ops::join_heads;
use burn_sparse_transformer::content::{LshHeadsConfig, RoutingHeadsConfig};

use crate::common::*;
use crate::golden::numbers;

fn text(text: &str) -> ContentAttention {
    text.parse().unwrap()
}

fn config(content: &str) -> SparseMultiHeadAttentionConfig {
    SparseMultiHeadAttentionConfig::new(32, 4, Pattern::local(5))
        .with_block_size(8)
        .with_content(Some(text(content)))
        .with_local_heads(Some(1))
}

fn forward(mha: &SparseMultiHeadAttention, x: &Tensor<3>) -> Tensor<3> {
    attend(mha, x.clone()).unwrap()
}

/// The first head uses the pattern, with its own keys; the others give the results of such heads alone.
#[test]
fn heads_of_both_kinds_stand_side_by_side() {
    let (device, _guard) = seeded(Device::flex(), 1);
    let x = random([2, 45, 32], &device);
    for content in ["routing:8,6", "lsh:8,2,dedup"] {
        let mha = randomise(config(content).init(&device));
        assert_eq!(mha.key.weight.dims(), [32, 8]);
        let query = split_heads(mha.query.forward(x.clone()), 4);
        let key = split_heads(mha.key.forward(x.clone()), 1);
        let value = split_heads(mha.value.forward(x.clone()), 4);
        let part = |x: &Tensor<4>, from: usize, to: usize| x.clone().slice_dim(1, from..to);
        let layout = Pattern::local(5).layout(1, 45, 8).unwrap();
        let (near_q, near_v) = (part(&query, 0, 1), part(&value, 0, 1));
        let near = sparse_attention(near_q, key, near_v, &layout).unwrap();
        let (far_q, far_v) = (part(&query, 1, 4), part(&value, 1, 4));
        let far = match &mha.content.as_ref().unwrap().routing {
            Some(routing) => routing.forward(far_q, far_v).context,
            None => {
                let heads = LshHeadsConfig::new().with_bucket(8).with_rounds(2);
                let heads = heads.with_dedup(true).init();
                heads.forward(far_q, far_v, None)
            }
        };
        let joined = join_heads(Tensor::cat(vec![near, far], 1)).unwrap();
        let expected = mha.output.forward(joined);
        assert_close(forward(&mha, &x), expected, 1e-5);
        let printed = format!("{mha}");
        let is_right = printed.contains(content) && printed.contains("local_heads: 1");
        assert!(is_right, "{printed}");
    }
}

fn model(content: &str, local_heads: &[usize], device: &Device) -> SparseTransformer {
    let config = small([16, 2], Pattern::local(6), [11, 32, 3])
        .with_content(Some(text(content)))
        .with_local_heads(Some(local_heads.to_vec()));
    config.init(device)
}

fn means(model: &SparseTransformer) -> Vec<Vec<f64>> {
    let of_layers = model.blocks.iter().map(|block| {
        let content = block.mha.content.as_ref();
        let routing = content.and_then(|content| content.routing.as_ref());
        routing.map_or(Vec::new(), |routing| numbers(routing.means.val()))
    });
    of_layers.collect()
}

#[test]
fn layers_have_their_local_heads() {
    let (device, _guard) = seeded(Device::flex(), 2);
    let of = |model: &SparseTransformer| -> Vec<usize> {
        let heads = model.blocks.iter().map(|block| {
            let content = block.mha.content.as_ref();
            content.map_or(2, |content| content.local_heads())
        });
        heads.collect()
    };
    assert_eq!(of(&model("lsh:8,2", &[2, 1, 1], &device)), [2, 1, 1]);
    let routing = model("routing:8", &[1], &device);
    assert_eq!(of(&routing), [1, 1, 1]);
    // As many clusters as windows fit into the context.
    let content = routing.blocks[0].mha.content.as_ref().unwrap();
    assert_eq!(content.config().to_string(), "routing:8,4");
    let means = content.routing.as_ref().unwrap().means.val();
    assert_eq!(means.dims(), [1, 4, 8]);
}

/// With any recomputation, gradients, commitment loss and the means after a step are equal, and the means move once.
#[test]
fn recomputed_blocks_choose_and_follow_the_same() {
    let (device, _guard) = seeded(Device::flex().autodiff(), 3);
    let tokens = tokens(2, 32, 11, &device);
    for content in ["routing:8", "lsh:8,2"] {
        let model = randomise(model(content, &[2, 1, 1], &device));
        let step = |recompute| {
            let mut model = model.clone();
            let (loss, gradients) = model
                .loss_and_gradients(tokens.clone(), tokens.clone(), 1u64, recompute)
                .unwrap();
            let gradients = [0, 1, 2].map(|layer| {
                let weight = &model.blocks[layer].mha.query.weight;
                gradients.get::<2>(weight.id).unwrap()
            });
            let before = means(&model);
            model.ema_update();
            let after = means(&model);
            model.ema_update();
            assert!(after == means(&model));
            (loss.into_data(), gradients, before, after)
        };
        let (loss, plain, before, after) = step(Recompute::None);
        let is_routing = content.starts_with("routing");
        assert_eq!(before != after, is_routing);
        for recompute in ["block", "segment:2", "block+attention", "mlp"] {
            let (again, gradients, _, moved) = step(recompute.parse().unwrap());
            assert_eq!(again, loss, "{content}, {recompute}");
            assert!(moved == after, "{content}, {recompute}");
            for (gradient, plain) in gradients.into_iter().zip(plain.clone()) {
                assert!(plain.clone().abs().max().into_scalar::<f32>() > 1e-6);
                assert_close(gradient, plain, 1e-6);
            }
        }
    }
}

/// The commitment loss is in the gradients, and in the differentiable loss, but not in the reported one.
#[test]
fn the_commitment_is_differentiated_and_not_reported() {
    let (device, _guard) = seeded(Device::flex().autodiff(), 4);
    let tokens = tokens(2, 32, 11, &device);
    let new = |factor| {
        let content = RoutingHeadsConfig::new(8).with_commitment(factor);
        small([16, 2], Pattern::local(6), [11, 32, 2])
            .with_content(Some(ContentAttention::Routing(content)))
            .init(&device)
    };
    let weights = randomise(new(0.0));
    let model = |factor| new(factor).load_record(weights.clone().into_record());
    let of = |factor, recompute| {
        let model = model(factor);
        let (reported, gradients) = model
            .loss_and_gradients(tokens.clone(), tokens.clone(), 1u64, recompute)
            .unwrap();
        let whole = model.loss(tokens.clone(), tokens.clone());
        let weight = &model.blocks[0].mha.query.weight;
        let by_loss = weight.val().grad(&whole.backward()).unwrap();
        let by_step = gradients.get::<2>(weight.id).unwrap();
        (numbers(reported)[0], numbers(whole)[0], by_loss, by_step)
    };
    let (reported, whole, by_loss, by_step) = of(0.0, Recompute::None);
    assert!((reported - whole).abs() < 1e-6);
    assert_close(by_loss.clone(), by_step, 1e-6);
    for recompute in [Recompute::None, Recompute::BLOCK] {
        let (same, larger, by_whole, by_step) = of(5.0, recompute);
        assert_eq!(same, reported);
        assert!(larger > whole + 0.1, "{larger}, {whole}");
        assert_close(by_whole.clone(), by_step, 1e-5);
        assert!(apart(by_whole, by_loss.clone()) > 1e-3);
    }
}

#[test]
fn means_settle_and_are_in_records() {
    let (device, _guard) = seeded(Device::flex().autodiff(), 5);
    let mut first = randomise(model("routing:8", &[2, 1, 1], &device));
    let before = means(&first);
    let tokens = tokens(2, 32, 11, &device);
    first.kmeans_init(tokens.clone(), 1u64).unwrap();
    let settled = means(&first);
    assert!(settled[0].is_empty());
    for layer in 1..3 {
        assert!(settled[layer] != before[layer]);
        for mean in settled[layer].chunks(8) {
            let length: f64 = mean.iter().map(|x| x * x).sum();
            assert!((length - 1.0).abs() < 1e-5, "{length}");
        }
    }
    // K-means initialization is not a training pass.
    first.ema_update();
    assert!(means(&first) == settled);
    let second = model("routing:8", &[2, 1, 1], &device);
    let second = second.load_record(first.clone().into_record());
    assert!(means(&second) == settled);
    let logits = |model: &SparseTransformer| numbers(model.forward(tokens.clone()));
    assert!(logits(&second) == logits(&first));
    // Plain models have no means to move.
    let mut plain = model("lsh:8,2", &[1], &device);
    plain.kmeans_init(tokens, 1u64).unwrap();
    plain.ema_update();
}

/// As documented, a later token can change what earlier ones see, unlike in causal attention. With one cluster, or chunks that contain everything,
/// no selection is left, and nothing leaks.
#[test]
fn later_tokens_take_part_in_the_choice_alone() {
    let (device, _guard) = seeded(Device::flex(), 8);
    let x = random([1, 64, 32], &device);
    for (content, leaks) in [
        ("routing:16,4", true),
        ("lsh:4,2", true),
        ("routing:64,1", false),
        ("lsh:32,2", false),
    ] {
        assert!(!text(content).is_prefix_stable());
        let mha = randomise(config(content).init(&device));
        let seen = x.clone().slice_dim(1, 0..48);
        let mut largest = 0f32;
        for _ in 0..4 {
            let other = Tensor::cat(vec![seen.clone(), random([1, 16, 32], &device)], 1);
            let rows = |x: &Tensor<3>| forward(&mha, x).slice_dim(1, 0..48);
            largest = largest.max(apart(rows(&other), rows(&x)));
        }
        assert_eq!(largest > 1e-3, leaks, "{content}: {largest}");
        assert!(leaks || largest < 1e-5, "{content}: {largest}");
    }
}

/// Rotations follow from the dropout seed: a training pass is repeatable with a seed, and an evaluation pass always is.
#[test]
fn rotations_of_a_pass_follow_from_its_seed() {
    let (device, _guard) = seeded(Device::flex(), 6);
    let mha = randomise(config("lsh:8,1").init(&device));
    let x = random([1, 64, 32], &device);
    let with = |seed: u64| {
        let input = SparseMhaInput::self_attn(x.clone()).dropout_seed(seed);
        numbers(mha.forward(input).context)
    };
    assert!(with(1) == with(1) && with(1) != with(2));
    let plain = || numbers(forward(&mha, &x));
    assert!(plain() == plain());
}

#[test]
fn what_heads_by_content_cannot_do_is_refused() {
    let (device, _guard) = seeded(Device::flex(), 7);
    let x = random([2, 16, 32], &device);
    let one = x.clone().slice_dim(0, 0..1);
    for content in ["routing:8,2", "lsh:8,2"] {
        let mut mha = config(content).init(&device);
        let input = || SparseMhaInput::self_attn(x.clone());
        let mut cache = SparseMhaCache::new();
        let none = "content must be none with padding, packed sequences, weights, caches and pools: later tokens influence what its heads see, got";
        let (none, topk) = (format!("{none} {content}"), "topk:8,2".parse().unwrap());
        let chosen = mha.clone().with_selection(Some(topk));
        let error = chosen.map(drop).unwrap_err().to_string();
        assert!(
            error == none || error.starts_with("pattern must be"),
            "{error}"
        );
        refused! {
            mha.try_forward_cache(input(), &mut cache) => &none;
            mha.try_forward_packed(one.clone(), &[0, 9, 16]) => &none;
            mha.try_forward_with_weights(input()) => &none;
        }
        assert!(cache.is_empty());
        let bias = Tensor::<4>::zeros([1, 1, 16, 16], &device);
        let other = SparseMhaInput::new(x.clone(), x.clone(), x.clone());
        refused! {
            mha.try_forward(input().lengths([16, 4])) => "padding must be none with heads that choose by content…";
            mha.try_forward(input().bias(bias)) => "bias must be none with heads that choose by content…";
            mha.try_forward(other) => "input must be self-attention with heads that choose by content…";
            mha.clone().with_pattern(Pattern::window(3), 8) => "pattern must be causal next to…";
        }
        let wider = mha.clone().with_pattern(Pattern::local(9), 8).unwrap();
        assert!(numbers(forward(&wider, &x)) != numbers(forward(&mha, &x)));
        mha.ema_update();
        let model = model(content, &[2, 1, 1], &device);
        let mut cache = model.new_cache();
        let tokens = tokens(1, 8, 11, &device);
        refused! { model.try_forward_cache(tokens, &mut cache) => "content must be none with…"; }
    }
}

#[test]
fn configurations_that_do_not_go_together_are_refused() {
    let device = Device::flex();
    let routing = || config("routing:8,2");
    let beside = "must be none next to content-based heads, got some";
    refused! {
        routing().with_local_heads(Some(0)).try_init(&device) => "local_heads must be at least 1 and below n_heads = 4…";
        routing().with_local_heads(Some(4)).try_init(&device) => "local_heads must be at least 1 and below n_heads = 4…";
        routing().with_content(None).try_init(&device) => "local_heads must be none without content…";
        config("routing:8").try_init(&device) => "clusters must be given where the context is not, got none…";
        config("lsh:8,2").with_softcap(Some(5.0)).try_init(&device) => format!("softcap {beside}…");
        routing().with_scale(Some(1.0)).try_init(&device) => format!("scale {beside}…");
        routing().with_qk_norm(Some(QkNorm::Rms)).try_init(&device) => format!("qk_norm {beside}…");
        routing().with_alibi(true).try_init(&device) => format!("alibi {beside}…");
        routing().with_sinks(true).try_init(&device) => format!("sinks {beside}…");
        routing().with_dropout(0.1).try_init(&device) => format!("dropout {beside}…");
        routing().with_n_kv_heads(Some(2)).try_init(&device) => format!("n_kv_heads {beside}…");
        routing().with_store_weights(true).try_init(&device) => format!("store_weights {beside}…");
    }
    let window = SparseMultiHeadAttentionConfig::new(32, 4, Pattern::window(5))
        .with_content(Some(text("lsh:8,2")));
    refused! { window.try_init(&device) => "pattern must be causal next to content-based heads…"; }
    let lsh = LshHeadsConfig::new().with_bucket(8).with_causal(false);
    let open = routing().with_content(Some(ContentAttention::Lsh(lsh)));
    refused! {
        open.try_init(&device) => "causal must be true…";
        LongformerAttentionConfig::new(routing()).try_init(&device) => "content must be none in LongformerAttention, got some";
    }
    let layers = small([16, 2], Pattern::local(6), [11, 32, 3])
        .with_content(Some(text("lsh:8,2")))
        .with_local_heads(Some(vec![1, 1]));
    refused! { layers.try_init(&device) => "local_heads must be one number, or 3, one for each layer, got 2"; }
    let block = SparseTransformerBlockConfig::new(16, 2, Pattern::local(6))
        .with_content(Some(text("routing:8")));
    refused! { block.try_init(&device) => "clusters must be given where the context is not, got none"; }
    assert!(block.with_context(Some(32)).try_init(&device).is_ok());
}
