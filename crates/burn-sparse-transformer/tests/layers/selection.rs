//! Layers that choose their keys by content.

use burn::tensor::{Device, Tensor};
use burn_blocksparse::{TopKOptions, top_k_blocks_on_device};
use burn_sparse_transformer::{
    Factorization, KvPool, KvPoolConfig, LongformerAttentionConfig, Pattern, Recompute, Selection,
    SparseMhaCache, SparseMhaInput, SparseMultiHeadAttention, SparseMultiHeadAttentionConfig,
    SparseTransformer, SparseTransformerConfig,
};

use crate::common::{assert_close, random, randomise, seed, tokens};

const D_MODEL: usize = 16;

fn config(pattern: Pattern) -> SparseMultiHeadAttentionConfig {
    SparseMultiHeadAttentionConfig::new(D_MODEL, 4, pattern)
        .with_n_kv_heads(Some(2))
        .with_block_size(8)
}

fn text(text: &str) -> Selection {
    text.parse().unwrap()
}

fn init(device: &Device) -> SparseMultiHeadAttention {
    randomise(config(Pattern::causal()).init(device).unwrap())
}

fn forward(mha: &SparseMultiHeadAttention, x: &Tensor<3>) -> Tensor<3> {
    let input = SparseMhaInput::self_attn(x.clone());
    mha.forward(input).unwrap().context
}

#[test]
fn the_choice_takes_the_patterns_place() {
    let device = Device::flex();
    let _guard = seed(&device, 1);
    let mha = init(&device);
    let x = random([2, 75, D_MODEL], &device);
    let chosen = mha.clone().with_selection(Some(text("topk:8,4"))).unwrap();
    let four = TopKOptions::new(8, 4);
    let input = SparseMhaInput::self_attn(x.clone());
    let expected = mha.forward_choosing(input, |q, k| top_k_blocks_on_device(q, k, four));
    assert_close(forward(&chosen, &x), expected.unwrap().context, 1e-6);
    let difference = (forward(&chosen, &x) - forward(&mha, &x)).abs().max();
    assert!(difference.into_scalar::<f32>() > 1e-3);
    let all = mha.clone().with_selection(Some(text("topk:8,ratio=1")));
    assert_close(forward(&all.unwrap(), &x), forward(&mha, &x), 1e-5);
    let none = chosen.with_selection(None).unwrap();
    assert_close(forward(&none, &x), forward(&mha, &x), 0.0);
}

fn model(selections: &[&str], full_last: usize, device: &Device) -> SparseTransformer {
    let selections = selections.iter().map(|selection| text(selection));
    let config = SparseTransformerConfig::new(16, 2, Factorization::from(Pattern::causal()))
        .with_vocab_size(11)
        .with_context(64)
        .with_n_layers(4)
        .with_block_size(8)
        .with_selections(Some(selections.collect()))
        .with_full_last_layers(Some(full_last));
    config.init(device).unwrap()
}

#[test]
fn layers_take_turns() {
    let device = Device::flex();
    let _guard = seed(&device, 2);
    let of = |model: &SparseTransformer| -> Vec<String> {
        let texts = model
            .blocks
            .iter()
            .map(|block| match block.mha.selection() {
                Some(selection) => selection.to_string(),
                None => String::new(),
            });
        texts.collect()
    };
    let two = model(&["topk:8,3", "topk:8,p=0.5"], 1, &device);
    assert_eq!(of(&two), ["topk:8,3", "topk:8,p=0.5", "topk:8,3", ""]);
    let quality = two
        .selection_quality(tokens(2, 64, 11, &device), None)
        .unwrap();
    assert_eq!(
        quality.iter().map(Vec::len).collect::<Vec<_>>(),
        [2, 2, 2, 0]
    );
    let first = model(&["quest:8,24,1"], 2, &device);
    assert_eq!(of(&first), ["", "quest:8,24,1", "", ""]);
    let none = two.with_selections(&[], 0).unwrap();
    assert_eq!(of(&none), [""; 4]);
    let all = text("topk:8,ratio=1");
    let quality = none
        .selection_quality(tokens(2, 64, 11, &device), Some(&all))
        .unwrap();
    for head in quality.iter().flatten() {
        for number in [
            head.recall,
            head.oracle,
            head.density,
            head.first_percentile,
        ] {
            assert!((number - 1.0).abs() < 1e-5, "{head:?}");
        }
    }
}

/// Where every query chooses for itself, tokens can come one by one; the last layers may see everything.
#[test]
fn a_mixture_of_blocks_is_decoded_token_by_token() {
    let device = Device::flex();
    let _guard = seed(&device, 5);
    let model = randomise(model(&["moba:8,2,1"], 0, &device));
    let of_last = model.blocks[3].mha.selection();
    assert!(of_last.is_none() && model.blocks[2].mha.selection().is_some());
    let tokens = tokens(2, 50, 11, &device);
    let whole = model.forward(tokens.clone()).unwrap();
    let mut cache = model.new_cache();
    let first = model.forward_cache(tokens.clone().slice_dim(1, 0..21), &mut cache);
    let mut parts = vec![first.unwrap()];
    for at in 21..50 {
        let token = tokens.clone().slice_dim(1, at..at + 1);
        parts.push(model.forward_cache(token, &mut cache).unwrap());
    }
    assert_close(Tensor::cat(parts, 1), whole.clone(), 1e-4);
    let everything = model
        .with_selections(&[], 0)
        .unwrap()
        .forward(tokens)
        .unwrap();
    let difference = (everything - whole).abs().max();
    assert!(difference.into_scalar::<f32>() > 1e-3);
}

/// What is computed again chooses again, and the same.
#[test]
fn recomputed_blocks_choose_the_same() {
    let device = Device::flex().autodiff();
    let _guard = seed(&device, 3);
    let model = randomise(model(&["topk:8,3", "moba:8,2"], 0, &device));
    let tokens = tokens(2, 64, 11, &device);
    let gradient = |recompute| {
        let (loss, gradients) = model
            .loss_and_gradients(tokens.clone(), tokens.clone(), 1u64, recompute)
            .unwrap();
        let weight = &model.blocks[0].mha.key.weight;
        let gradient = gradients.get::<2>(weight.id).unwrap();
        (loss.into_data(), gradient)
    };
    let (loss, plain) = gradient(Recompute::None);
    assert!(plain.clone().abs().max().into_scalar::<f32>() > 1e-6);
    for recompute in [Recompute::BLOCK, "block+attention".parse().unwrap()] {
        let (again, gradient) = gradient(recompute);
        assert_eq!(again, loss, "{recompute}");
        assert_close(gradient, plain.clone(), 1e-6);
    }
}

#[test]
fn configurations_and_records_go_through_files() {
    use burn::config::Config;
    let config = config(Pattern::causal()).with_selection(Some(text("topk:8,4,1,0,share=max")));
    let path = std::env::temp_dir().join(format!("selection-{}.json", std::process::id()));
    config.save(&path).unwrap();
    let read = SparseMultiHeadAttentionConfig::load(&path).unwrap();
    // A file from before there were selections.
    let json = std::fs::read_to_string(&path).unwrap();
    let older: serde_json::Value = serde_json::from_str(&json).unwrap();
    let mut older = older.as_object().unwrap().clone();
    older.remove("selection").unwrap();
    let older = serde_json::Value::Object(older).to_string();
    std::fs::write(&path, older).unwrap();
    let older = SparseMultiHeadAttentionConfig::load(&path).unwrap();
    std::fs::remove_file(&path).unwrap();
    assert_eq!(read.selection, config.selection);
    assert_eq!(older.selection, None);
}

#[test]
fn what_knows_patterns_alone_is_refused() {
    let device = Device::flex();
    let _guard = seed(&device, 4);
    let selection = || Some(text("topk:8,4"));
    let whole = "pattern must be causal or dense with a selection, which chooses from all keys";
    let local = config(Pattern::local(9)).with_selection(selection());
    let error = local.init(&device).unwrap_err().to_string();
    assert!(error.starts_with(whole), "{error}");
    let mha = init(&device).with_selection(selection()).unwrap();
    let error = mha.clone().with_pattern(Pattern::local(9), 8).unwrap_err();
    assert!(error.to_string().starts_with(whole), "{error}");

    let x = random([2, 16, D_MODEL], &device);
    let input = || SparseMhaInput::self_attn(x.clone());
    let padding =
        "padding must be none with a selection, which would choose padding, too, got some";
    let error = mha
        .forward(input().lengths([9, 4]))
        .unwrap_err()
        .to_string();
    assert_eq!(error, padding);
    let one = x.clone().slice_dim(0, 0..1);
    let refused = [
        mha.forward_packed(one, &[0, 9, 16]).map(drop),
        mha.forward_with_weights(input()).map(drop),
    ];
    for result in refused {
        let error = result.unwrap_err().to_string();
        assert!(
            error.starts_with("selection must be none where layouts"),
            "{error}"
        );
    }
    let error = KvPool::for_attention(&mha, &KvPoolConfig::new(2, 16)).unwrap_err();
    let stable = "selection must be prefix stable with a cache";
    assert!(error.to_string().starts_with(stable), "{error}");
    let mut cache = SparseMhaCache::new();
    let error = mha
        .forward_cache(input(), &mut cache)
        .unwrap_err()
        .to_string();
    assert!(
        error.starts_with("selection must be prefix stable with a cache"),
        "{error}"
    );
    assert!(cache.is_empty());
    let longformer = config(Pattern::causal()).with_selection(selection());
    let error = LongformerAttentionConfig::new(longformer)
        .init(&device)
        .unwrap_err();
    assert_eq!(
        error.to_string(),
        "selection must be none in LongformerAttention, got some"
    );
    let dense = config(Pattern::dense()).with_selection(selection());
    let mha = randomise(dense.init(&device).unwrap());
    assert_eq!(forward(&mha, &x).dims(), [2, 16, D_MODEL]);
}
