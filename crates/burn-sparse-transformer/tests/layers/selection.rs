//! Layers with content-based selection of keys.

use burn_blocksparse::layout::TopKOptions;
use burn_sparse_select::{ReferenceInputs, top_k_blocks_on_device};
use burn_sparse_transformer::{HeadSelections, Selection, SelectionQuality};

use crate::common::*;

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
    randomise(config(Pattern::causal()).init(device))
}

fn forward(mha: &SparseMultiHeadAttention, x: &Tensor<3>) -> Tensor<3> {
    attend(mha, x.clone()).unwrap()
}

#[test]
fn the_choice_takes_the_patterns_place() {
    let (device, _guard) = seeded(Device::flex(), 1);
    let mha = init(&device);
    let x = random([2, 75, D_MODEL], &device);
    let chosen = mha.clone().with_selection(Some(text("topk:8,4"))).unwrap();
    let four = TopKOptions::new(8, 4);
    let input = SparseMhaInput::self_attn(x.clone());
    let expected = mha.try_forward_choosing(input, |q, k| top_k_blocks_on_device(q, k, four));
    assert_close(forward(&chosen, &x), expected.unwrap().context, 1e-6);
    assert!(apart(forward(&chosen, &x), forward(&mha, &x)) > 1e-3);
    let all = mha.clone().with_selection(Some(text("topk:8,ratio=1")));
    assert_close(forward(&all.unwrap(), &x), forward(&mha, &x), 1e-5);
    let none = chosen.with_selection(None).unwrap();
    assert_close(forward(&none, &x), forward(&mha, &x), 0.0);
}

fn model(selections: &[&str], full_last: usize, device: &Device) -> SparseTransformer {
    let selections = selections.iter().map(|selection| text(selection));
    let config = small([16, 2], Pattern::causal(), [11, 64, 4])
        .with_selections(Some(selections.collect()))
        .with_full_last_layers(Some(full_last));
    config.init(device)
}

#[test]
fn layers_take_turns() {
    let (device, _guard) = seeded(Device::flex(), 2);
    let of = |model: &SparseTransformer| -> Vec<String> {
        let layers = model.blocks.iter().map(|block| block.mha.selection());
        let texts = layers.map(|one| one.map_or_else(String::new, |one| one.to_string()));
        texts.collect()
    };
    let two = model(&["topk:8,3", "topk:8,p=0.5"], 1, &device);
    assert_eq!(of(&two), ["topk:8,3", "topk:8,p=0.5", "topk:8,3", ""]);
    let tokens = tokens(2, 64, 11, &device);
    let quality = two.selection_quality(tokens.clone(), None).unwrap();
    assert!(quality.iter().map(Vec::len).eq([2, 2, 2, 0]));
    let first = model(&["quest:8,24,1"], 2, &device);
    assert_eq!(of(&first), ["", "quest:8,24", "", ""]);
    let none = two.with_selections(&[], 0).unwrap();
    assert_eq!(of(&none), [""; 4]);
    let all = text("topk:8,ratio=1");
    let quality = none.selection_quality(tokens, Some(&all)).unwrap();
    for head in quality.iter().flatten() {
        let numbers = [
            head.recall,
            head.oracle,
            head.density,
            head.first_percentile,
        ];
        let is_all = numbers.iter().all(|number| (number - 1.0).abs() < 1e-5);
        assert!(is_all, "{head:?}");
    }
}

/// With selection per query, tokens can come one by one; the last layers may see everything.
#[rstest::rstest]
#[case("moba:8,2,1")]
#[case("moba:8,4,1,first=1,local=2")]
fn a_mixture_of_blocks_is_decoded_token_by_token(#[case] moba: &str) {
    let (device, _guard) = seeded(Device::flex(), 5);
    let model = randomise(model(&[moba], 0, &device));
    let of_last = model.blocks[3].mha.selection();
    assert!(of_last.is_none() && model.blocks[2].mha.selection().is_some());
    let tokens = tokens(2, 50, 11, &device);
    let whole = model.forward(tokens.clone());
    let mut cache = model.new_cache();
    let parts = in_pieces(&[&[21][..], &[1; 29]].concat(), |first, count| {
        model.forward_cache(tokens.clone().narrow(1, first, count), &mut cache)
    });
    assert_close(parts, whole.clone(), 1e-4);
    let everything = model.with_selections(&[], 0).unwrap().forward(tokens);
    assert!(apart(everything, whole) > 1e-3);
}

#[test]
fn what_knows_patterns_alone_is_refused() {
    let (device, _guard) = seeded(Device::flex(), 4);
    let selection = || Some(text("topk:8,4"));
    let whole = "pattern must be the dense causal pattern, or dense, with a selection by which every query…";
    let moba = || Some(text("moba:8,2"));
    let mha = init(&device).with_selection(moba()).unwrap();
    refused! {
        config(Pattern::local(9)).with_selection(moba()).try_init(&device) => whole;
        mha.with_pattern(Pattern::local(9), 8) => whole;
    }

    let mha = init(&device).with_selection(selection()).unwrap();
    let x = random([2, 16, D_MODEL], &device);
    let input = || SparseMhaInput::self_attn(x.clone());
    let left = Tensor::<2, Int>::from_data([[0, 0, 0, 0], [1, 0, 0, 0]], &device).bool();
    let left = left.repeat_dim(1, 4);
    let end = "padding must be at the end of self-attention's sequences with a selection…";
    let other = SparseMhaInput::new(x.clone(), x.clone(), x.clone());
    let one = x.clone().slice_dim(0, 0..1);
    let mut cache = SparseMhaCache::new();
    refused! {
        mha.try_forward(input().lengths([9, 17])) => "lengths must be at most 16, the number of keys, got 17";
        mha.try_forward(input().mask_pad(left)) => end;
        mha.try_forward(other.lengths([9, 4])) => end;
        mha.try_forward_packed(one, &[0, 9, 16]) => "selection must be none where layouts…";
        mha.try_forward_with_weights(input()) => "selection must be none where layouts…";
        mha.try_forward_cache(input(), &mut cache) => "selection must be prefix stable with a cache…";
    }
    assert!(cache.is_empty());
    let longformer = config(Pattern::causal()).with_selection(selection());
    refused! { LongformerAttentionConfig::new(longformer).try_init(&device) => "selection must be none in LongformerAttention, got some"; }
    let dense = config(Pattern::dense()).with_selection(selection());
    let mha = randomise(dense.init(&device));
    assert_eq!(forward(&mha, &x).dims(), [2, 16, D_MODEL]);
}

/// Selection is among a pattern's blocks, and within them the pattern's pairs apply.
#[test]
fn patterns_cut_what_is_chosen() {
    let (device, _guard) = seeded(Device::flex(), 6);
    let x = random([2, 75, D_MODEL], &device);
    for pattern in [
        Pattern::local(30),
        Pattern::fixed(32, 4),
        Pattern::packed([0, 21, 50], Pattern::causal()),
        Pattern::per_head([Pattern::local(9), Pattern::causal()]),
        Pattern::window(12),
    ] {
        let mha = randomise(config(pattern.clone()).init(&device));
        let with = |selection: &str| mha.clone().with_selection(Some(text(selection))).unwrap();
        // Blocks of another size than the pattern's are restricted by it too.
        for all in ["topk:8,ratio=1", "topk:16,ratio=1"] {
            assert_close(forward(&with(all), &x), forward(&mha, &x), 1e-5);
        }
        let two = with("topk:8,2,1,1");
        let input = || SparseMhaInput::self_attn(x.clone());
        let chosen = two.chosen(input()).unwrap().unwrap().to_host().unwrap();
        let whole = mha.layout(75, 75).unwrap();
        for (batch, head) in (0..2).flat_map(|batch| (0..4).map(move |head| (batch, head))) {
            let (chosen, whole) = (chosen.to_dense_batch(batch, head), whole.to_dense(head));
            for (i, (chosen, whole)) in chosen.iter().zip(&whole).enumerate() {
                let pairs = chosen.iter().zip(whole);
                assert!(pairs.clone().all(|(&chosen, &whole)| !chosen || whole));
                let blocks = chosen.chunks(8).filter(|block| block.contains(&true));
                // The own block is forced, and the first one if the pattern has it.
                assert!(blocks.count() <= 2 && chosen[i], "{pattern}, row {i}");
            }
        }
        // Recall is relative to the attention over the pattern.
        let everything = mha.selection_quality(input(), &text("topk:8,ratio=1"));
        for head in everything.unwrap() {
            let mut numbers = [head.recall, head.oracle, head.density].into_iter();
            let is_all = numbers.all(|number| (number - 1.0).abs() < 1e-5);
            assert!(is_all, "{pattern}: {head:?}");
        }
        let quality = mha
            .selection_quality(input(), &text("topk:8,2,1,1"))
            .unwrap();
        assert!(quality.iter().any(|head| head.recall < 0.99), "{quality:?}");
        for head in quality {
            let is_right = head.recall > 0.0 && head.recall <= head.oracle + 1e-6;
            assert!(is_right, "{head:?}");
        }
        let expected = mha.try_forward_choosing(input(), |_, _| Ok(chosen.clone()));
        assert_close(forward(&two, &x), expected.unwrap().context, 1e-6);
    }
}

/// Each batch entry gives the result of itself alone, and padding has no effect.
#[test]
fn batch_entries_with_padding_choose_alone() {
    let (device, _guard) = seeded(Device::flex().autodiff(), 7);
    let lengths = [45, 21, 0, 16];
    let x = random([4, 45, D_MODEL], &device);
    for (pattern, selection) in [
        (Pattern::causal(), "topk:8,3"),
        (Pattern::dense(), "topk:8,p=0.7,0,0"),
        (Pattern::local(20), "sparge:8,0.8,0.1"),
        (Pattern::causal(), "minference:8,3,4,9"),
        (Pattern::causal(), "moba:8,2"),
    ] {
        let mha = randomise(config(pattern).init(&device));
        let mha = mha.with_selection(Some(text(selection))).unwrap();
        let padded = |x: Tensor<3>| {
            let input = SparseMhaInput::self_attn(x).lengths(lengths);
            mha.forward(input).context
        };
        let by = |x: &Tensor<3>, y: &Tensor<3>| {
            let grads = y.clone().powi_scalar(2).sum().backward();
            x.grad(&grads).unwrap()
        };
        let x = x.clone().require_grad();
        let got = padded(x.clone());
        let gradient = by(&x, &got);
        for (entry, length) in lengths.into_iter().enumerate() {
            let part = |x: &Tensor<3>, from: usize, to: usize| {
                let x = x.clone().slice_dim(0, entry..entry + 1);
                x.slice_dim(1, from..to)
            };
            if length < 45 {
                let rest = part(&got, length, 45).abs().max().into_scalar::<f32>();
                assert_eq!(rest, 0.0, "{selection}");
            }
            if length == 0 {
                continue;
            }
            let alone = part(&x, 0, length).detach().require_grad();
            let expected = forward(&mha, &alone);
            assert_close(part(&got, 0, length), expected.clone(), 1e-5);
            assert_close(part(&gradient, 0, length), by(&alone, &expected), 1e-4);
        }
        // The contents of padding have no effect.
        let places = Tensor::<1, Int>::arange(0..45, &device).reshape([1, 45, 1]);
        let ends = Tensor::<1, Int>::from_data(lengths.map(|of| of as i32), &device);
        let is_padding = places
            .expand([4, 45, D_MODEL])
            .greater_equal(ends.reshape([4, 1, 1]).expand([4, 45, D_MODEL]));
        assert_close(padded(x.clone().mask_fill(is_padding, 1e3)), got, 1e-5);
    }
}

/// With different selections per head, a head's output does not depend on the others' selections.
#[test]
fn heads_choose_for_themselves() {
    let (device, _guard) = seeded(Device::flex(), 8);
    let mha = init(&device);
    let x = random([2, 75, D_MODEL], &device);
    let heads = |text: &str| {
        let heads: HeadSelections = text.parse().unwrap();
        assert_eq!(heads.to_string(), text);
        mha.clone().with_head_selections(Some(heads)).unwrap()
    };
    let alike = |selection: &str| mha.clone().with_selection(Some(text(selection))).unwrap();
    assert_close(forward(&heads("pattern"), &x), forward(&mha, &x), 1e-6);
    for selection in ["topk:8,3", "moba:8,2"] {
        let one = forward(&heads(selection), &x);
        assert_close(one, forward(&alike(selection), &x), 1e-6);
    }
    // The output is a sum over heads.
    let both = forward(&heads("topk:8,3 / moba:8,2 / pattern / topk:16,2"), &x)
        + forward(&heads("moba:8,2 / topk:8,3 / topk:16,2 / pattern"), &x);
    let sum = forward(&heads("topk:8,3 / moba:8,2 / topk:8,3 / moba:8,2"), &x)
        + forward(&heads("moba:8,2 / topk:8,3"), &x);
    let rest =
        forward(&heads("pattern / topk:16,2"), &x) + forward(&heads("topk:16,2 / pattern"), &x);
    let halves = forward(&heads("pattern / pattern / topk:8,3 / moba:8,2"), &x)
        + forward(&heads("topk:16,2 / topk:16,2 / moba:8,2 / topk:8,3"), &x);
    assert_close(both + halves, sum + rest, 1e-5);
    let padded = |mha: &SparseMultiHeadAttention| {
        let input = SparseMhaInput::self_attn(x.clone()).lengths([75, 30]);
        mha.forward(input).context
    };
    assert_close(padded(&heads("topk:8,3")), padded(&alike("topk:8,3")), 1e-6);
    let error = alike("topk:8,3").with_head_selections(Some("pattern".parse().unwrap()));
    let mut cache = SparseMhaCache::new();
    let input = SparseMhaInput::self_attn(x.clone());
    refused! {
        error => "selection must be none where heads choose in different ways, got some";
        "topk:8,3 / ".parse::<HeadSelections>() => "…cannot read ''…";
        heads("moba:8,2").try_forward_cache(input, &mut cache) => "head_selections must be none here…";
    }
}

/// Measurements of heads are of their own selections, also within a pattern, and with shared keys.
#[test]
fn heads_are_measured_each_by_its_own_choice() {
    let (device, _guard) = seeded(Device::flex(), 8);
    for (pattern, kv_heads) in [(Pattern::causal(), 4), (Pattern::local(30), 2)] {
        let mha = config(pattern).with_n_kv_heads(Some(kv_heads));
        let mha = randomise(mha.init(&device));
        let input = SparseMhaInput::self_attn(random([2, 75, D_MODEL], &device));
        let heads: HeadSelections = "topk:8,3 / pattern / topk:8,2,1,0 / topk:8,3"
            .parse()
            .unwrap();
        let found = mha.head_selection_quality(input.clone(), &heads).unwrap();
        let of = |selection: &str| {
            let found = mha.selection_quality(input.clone(), &text(selection));
            found.unwrap()
        };
        let (three, two) = (of("topk:8,3"), of("topk:8,2,1,0"));
        assert_eq!(found, [three[0], SelectionQuality::ALL, two[2], three[3]]);
        let is_right = found[2].density < found[0].density && found[0].density < 1.0;
        assert!(is_right, "{found:?}");
    }
    let model = model(&[], 0, &device);
    let tokens = tokens(1, 40, 11, &device);
    let layers = vec!["topk:8,2 / pattern".parse().unwrap(); model.blocks.len()];
    let measured = model
        .head_selection_quality(tokens.clone(), &layers)
        .unwrap();
    let own = (model.clone()).with_head_selections(layers.iter().cloned().map(Some).collect());
    let own = own
        .unwrap()
        .selection_quality(tokens.clone(), None)
        .unwrap();
    // The first layer's queries and keys do not depend on its attention.
    assert_eq!(own[0], measured[0]);
    assert_ne!(own[1], measured[1]);
    let [all, less] = [layers.len(), layers.len() - 1];
    refused! { model.head_selection_quality(tokens, &layers[1..]) => format!("layers must be {all}, the model's, got {less}"); }
}

/// Only a model can count full layers: its layers' selections do not mention them, and a single layer refuses a selection with them.
#[test]
fn a_layer_alone_counts_no_full_layers() {
    let device = Device::flex();
    for selection in ["moba:8,2,1", "quest:8,24,2", "quest:8,24,1,share=no"] {
        let of_layer = || config(Pattern::causal());
        let mha = of_layer().init(&device);
        let heads: HeadSelections = format!("pattern / {selection}").parse().unwrap();
        let block = SparseTransformerBlockConfig::new(D_MODEL, 4, Pattern::causal())
            .with_block_size(8)
            .with_selection(Some(text(selection)));
        let chosen = || Some(text(selection));
        let expected = format!(
            "selection must be one without full layers for a layer alone: a model's `selections` have them, got {selection}"
        );
        refused! {
            of_layer().with_selection(chosen()).try_init(&device) => &expected;
            mha.clone().with_selection(chosen()) => &expected;
            mha.with_head_selections(Some(heads)) => &expected;
            block.try_init(&device) => &expected;
        }
        let model = small([16, 2], Pattern::causal(), [11, 64, 4])
            .with_selections(Some(vec![text(selection)]));
        // A single layer accepts the selection that the model gives it.
        let written = model.block(2).unwrap().selection.unwrap();
        assert!(!selection.ends_with(&written.to_string()));
        assert_eq!(text(&written.to_string()), written);
        of_layer().with_selection(Some(written)).init(&device);
        model.init(&device);
    }
}

/// The density counts the pairs of patterns and of all methods, with each length counted by itself; forced blocks are part of a budget.
#[test]
fn density_counts_pairs() {
    let (device, _guard) = seeded(Device::flex(), 23);
    let x = random([4, 45, D_MODEL], &device);
    let lengths = [45, 21, 0, 16];
    let mut moba = Vec::new();
    for (pattern, selection) in [
        (Pattern::causal(), None),
        (Pattern::local(20), None),
        (Pattern::dense(), None),
        (Pattern::causal(), Some("topk:8,3")),
        (Pattern::local(20), Some("sparge:8,0.8,0.1")),
        (Pattern::dense(), Some("xattention:8,4,ratio=0.3")),
        (Pattern::causal(), Some("moba:8,4")),
        (Pattern::causal(), Some("moba:8,4,first=1,local=2")),
        (Pattern::causal(), Some("moba:8,1,first=2,local=2")),
        (Pattern::causal(), Some("quest:8,24")),
    ] {
        let what = format!("{pattern}, {selection:?}");
        let causal = pattern.is_causal();
        let mha = randomise(config(pattern.clone()).init(&device));
        let mha = mha.with_selection(selection.map(text)).unwrap();
        let all = |n: usize| if causal { n * (n + 1) / 2 } else { n * n };
        let density = |input| mha.attention_density(input).unwrap();
        let mut kept = 0.0;
        for (entry, length) in lengths.into_iter().enumerate() {
            if length == 0 {
                continue;
            }
            let part = x.clone().slice_dim(0, entry..entry + 1);
            let alone = || SparseMhaInput::self_attn(part.clone().slice_dim(1, 0..length));
            let got = density(alone());
            let layout = match selection.map(text) {
                None => pattern.layout(4, length, 8).unwrap(),
                Some(selection) if selection.estimator().grid().query_rows > 1 => {
                    mha.chosen(alone()).unwrap().unwrap().to_host().unwrap()
                }
                // The number of blocks that a query keeps does not depend on scores.
                Some(selection) => {
                    let call = ReferenceInputs {
                        q: &vec![1.0; 4 * length],
                        k: &vec![1.0; 4 * length],
                        heads: 4,
                        kv_heads: 4,
                        seq_q: length,
                        seq_kv: length,
                        head_dim: 1,
                        causal,
                        scale: 1.0,
                    };
                    selection.choose_reference(&call).unwrap()
                }
            };
            let dense = (0..4).flat_map(|head| layout.to_dense(head));
            let pairs = dense.flatten().filter(|kept| *kept).count() as f64 / 4.0;
            let is_near = (got - pairs / all(length) as f64).abs() < 1e-12;
            assert!(is_near, "{what}: {got}");
            kept += pairs;
            if selection.is_some_and(|text| text.starts_with("moba:8,4")) && length == 45 {
                moba.push(got);
            }
        }
        let expected = kept / lengths.map(all).iter().sum::<usize>() as f64;
        let got = density(SparseMhaInput::self_attn(x.clone()).lengths(lengths));
        let is_near = (got - expected).abs() < 1e-12;
        assert!(is_near, "{what}: {got}, not {expected}");
    }
    assert_eq!(moba[0], moba[1]);
    assert!(moba[0] < 1.0);
    let dense = randomise(config(Pattern::dense()).init(&device));
    let by_query = dense.with_selection(Some(text("moba:8,2"))).unwrap();
    let error = by_query.attention_density(SparseMhaInput::self_attn(x));
    let expected = "pattern must be causal where every query chooses for itself, got dense";
    refused! { error => expected; }
}
