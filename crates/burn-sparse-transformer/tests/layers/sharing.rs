//! Layers that reuse an earlier layer's selection.

use burn_sparse_select::ReferenceInputs;
use burn_sparse_transformer::Selection;
use burn_sparse_transformer::content::{ChoiceSharing, SharedChoice};
use burn_sparse_transformer::decoder::Positions;
use burn_sparse_transformer::internal::Indexed;

use crate::common::*;
use crate::decoding::assert_decodes_and_sees_no_future;
use crate::golden::{dot, numbers};

const SEQ: usize = 45;
/// Four query heads on two KV heads, four channels each.
const HEADS: [usize; 2] = [4, 2];

/// Parses a selection, or an indexer that covers all heads.
fn read(text: &str) -> (Option<Selection>, Option<ContentAttention>) {
    match text.parse() {
        Ok(content) => (None, Some(content)),
        Err(_) => (Some(text.parse().unwrap()), None),
    }
}

fn layer(text: &str, sharing: ChoiceSharing, device: &Device) -> SparseMultiHeadAttention {
    let (selection, content) = read(text);
    let config = SparseMultiHeadAttentionConfig::new(16, HEADS[0], Pattern::causal())
        .with_n_kv_heads(Some(HEADS[1]))
        .with_block_size(8)
        .with_selection(selection)
        .with_content(content)
        .with_choice_sharing(Some(sharing));
    randomise(config.init(device))
}

fn config(text: &str, every: Option<usize>) -> SparseTransformerConfig {
    let (selection, content) = read(text);
    small([16, HEADS[0]], Pattern::causal(), [11, 48, 4])
        .with_n_kv_heads(Some(HEADS[1]))
        .with_selections(selection.map(|one| vec![one]))
        .with_content(content)
        .with_share_every(every)
}

fn model(text: &str, every: usize, device: &Device) -> SparseTransformer {
    randomise(config(text, Some(every)).init(device))
}

/// Returns the indices of the `most` highest scores; ties go to the earlier.
fn highest(scores: &[f64], most: usize) -> Vec<usize> {
    let mut order: Vec<usize> = (0..scores.len()).collect();
    order.sort_by(|&a, &b| scores[b].total_cmp(&scores[a]).then(a.cmp(&b)));
    order.truncate(most);
    order
}

/// Returns the keys that each query of each head sees, for one sequence, by f64 loops: `[heads][queries][keys]`.
fn chosen_in_loops(giver: &SparseMultiHeadAttention, x: &Tensor<3>) -> Vec<Vec<Vec<bool>>> {
    let at = Positions::From(0);
    let of_keys = |keys: &dyn Fn(usize, usize) -> Vec<usize>| -> Vec<Vec<Vec<bool>>> {
        let rows = |head| (0..SEQ).map(move |i| (head, i));
        let row = |(head, i)| {
            let keys = keys(head, i);
            (0..SEQ).map(|j| j <= i && keys.contains(&j)).collect()
        };
        let heads = (0..HEADS[0]).map(|head| rows(head).map(row).collect());
        heads.collect()
    };
    if let Some(dsa) = giver.dsa() {
        let index = dsa.index(x.clone(), &at).unwrap();
        let [_, heads, _, width] = index.q.dims();
        let [q, k, w] = [numbers(index.q), numbers(index.k), numbers(index.weights)];
        let row = |x: &[f64], at: usize| x[at * width..][..width].to_vec();
        return of_keys(&|_, i| {
            let score = |j: usize| match j + dsa.config().near > i {
                true => f64::INFINITY,
                false => (0..heads)
                    .map(|u| w[u * SEQ + i] * dot(&row(&q, u * SEQ + i), &row(&k, j)).max(0.0))
                    .sum(),
            };
            let scores: Vec<f64> = (0..=i).map(score).collect();
            highest(&scores, dsa.config().keep)
        });
    }
    if let Some(msa) = giver.msa() {
        let (block, index) = (msa.config().block, msa.index(x.clone(), &at).unwrap());
        let [.., width] = index.q.dims();
        let [q, k] = [numbers(index.q), numbers(index.k)];
        return of_keys(&|head, i| {
            let group = head / (HEADS[0] / HEADS[1]);
            let q = &q[(group * SEQ + i) * width..][..width];
            let score = |j: usize| dot(q, &k[j * width..][..width]);
            let best = |of: usize| (of * block..(of + 1) * block).map(score).reduce(f64::max);
            let scores: Vec<f64> = (0..i / block).map(|of| best(of).unwrap()).collect();
            let mut blocks = highest(&scores, msa.config().keep - 1);
            blocks.push(i / block);
            (0..=i).filter(|j| blocks.contains(&(j / block))).collect()
        });
    }
    let [q, k, _] = giver.project_heads(x.clone(), &at).unwrap();
    let [.., head_dim] = q.dims();
    let inputs = ReferenceInputs {
        q: &numbers(q),
        k: &numbers(k),
        heads: HEADS[0],
        kv_heads: HEADS[1],
        seq_q: SEQ,
        seq_kv: SEQ,
        head_dim,
        scale: 1.0 / (head_dim as f64).sqrt(),
        causal: true,
    };
    let selection = giver.selection().unwrap();
    let layout = selection.choose_reference(&inputs).unwrap();
    (0..HEADS[0]).map(|head| layout.to_dense(head)).collect()
}

/// Computes softmax attention of a layer's heads over some keys of one sequence, in dense operations.
fn attend_to(
    layer: &SparseMultiHeadAttention,
    x: &Tensor<3>,
    seen: &[Vec<Vec<bool>>],
    dtype: DType,
) -> Tensor<4> {
    let qkv = layer.project_heads(x.clone(), &Positions::From(0)).unwrap();
    let sees = |head: usize, i: usize, j: usize| seen[head][i][j];
    let unseen = hidden([HEADS[0], SEQ, SEQ], &x.device(), sees).cast(dtype);
    let [out, _] = dense_attention(qkv.map(|x| x.cast(dtype)), 0.5, None, unseen, None);
    out
}

const TEXTS: [&str; 5] = [
    "topk:8,3,1,1",
    "moba:8,2",
    "quest:8,24",
    "dsa:6,2,3,8",
    "msa:8,2,8",
];

/// Returns a layer's selection for tokens.
fn choice_of(giver: &SparseMultiHeadAttention, x: &Tensor<3>) -> SharedChoice {
    let output = giver.forward(SparseMhaInput::self_attn(x.clone()));
    output.choice.expect("the layer gives its choice")
}

fn taking(taker: &SparseMultiHeadAttention, x: &Tensor<3>, choice: &SharedChoice) -> Tensor<3> {
    let input = SparseMhaInput::self_attn(x.clone()).choice(choice.clone());
    taker.forward(input).context
}

/// A layer attends to the keys that another one selected, like f64 loops; the giving layer attends to its own selection.
#[test]
fn layers_attend_to_the_choice_of_another() {
    let (device, _guard) = seeded(Device::flex(), 61);
    for text in TEXTS {
        let giver = layer(text, ChoiceSharing::Gives, &device);
        let taker = layer(text, ChoiceSharing::Takes, &device);
        assert!(taker.dsa().is_none() && taker.msa().is_none());
        let [x, other] = [(); 2].map(|_| random([2, SEQ, 16], &device));
        let choice = choice_of(&giver, &x);
        let own = giver.forward(SparseMhaInput::self_attn(x.clone())).context;
        let taken = taking(&taker, &other, &choice);
        for entry in 0..2 {
            let part = |x: &Tensor<3>| x.clone().slice_dim(0, entry..entry + 1);
            let seen = chosen_in_loops(&giver, &part(&x));
            for (layer, x, got) in [(&giver, &x, &own), (&taker, &other, &taken)] {
                let heads = attend_to(layer, &part(x), &seen, DType::F64);
                let expected = layer.output_projection(heads.cast(DType::F32)).unwrap();
                assert_close(part(got), expected, 1e-5);
            }
        }
        let elsewhere = taking(&taker, &other, &choice_of(&giver, &other));
        assert!(apart(taken, elsewhere) > 1e-3, "{text}");
    }
}

/// Layers 1 and 3 of four reuse the selections of layers 0 and 2.
#[rstest]
fn one_layer_in_two_chooses(#[values(0, 1, 2, 3, 4)] of: usize) {
    let (device, text) = (Device::flex(), TEXTS[of]);
    let _guard = seed(&device, 62);
    let model = model(text, 2, &device);
    let tokens = tokens(2, SEQ, 11, &device);
    let layers = model.blocks.iter().map(|block| &block.mha);
    let sharing: Vec<_> = layers.clone().map(|mha| mha.choice_sharing()).collect();
    let pair = [ChoiceSharing::Gives, ChoiceSharing::Takes].map(Some);
    assert_eq!(sharing, [pair, pair].concat());
    let indexers = layers.map(|mha| mha.dsa().is_some() || mha.msa().is_some());
    let is_indexed = read(text).1.is_some();
    assert!(indexers.eq([is_indexed, false, is_indexed, false]));
    let run = |takes_of: [usize; 4]| {
        let x = model.token_embedding.forward(tokens.clone());
        let positions = model.position_embedding.as_ref().unwrap();
        let mut x = x + positions.forward(0, SEQ);
        let mut choices: Vec<Option<SharedChoice>> = Vec::new();
        for (layer, block) in model.blocks.iter().enumerate() {
            let mut input = SparseMhaInput::self_attn(block.norm_1.forward(x.clone()));
            if takes_of[layer] != layer {
                input = input.choice(choices[takes_of[layer]].clone().unwrap());
            }
            let output = block.mha.forward(input);
            choices.push(output.choice);
            x = x + output.context;
            x = x.clone() + block.pwff.forward(block.norm_2.forward(x));
        }
        model.output.forward(model.norm.forward(x))
    };
    let got = model.forward(tokens.clone());
    assert_close(got.clone(), run([0, 0, 2, 2]), 1e-4);
    assert!(apart(got, run([0, 0, 2, 0])) > 1e-3, "{text}");
}

/// Groups begin with the first selecting layer, and end with the last one.
#[test]
fn layers_without_a_choice_are_left_out() {
    let device = Device::flex();
    let of = |text: &str, every, full_last| {
        let config = config(text, Some(every)).with_full_last_layers(Some(full_last));
        let model = config.init(&device);
        let layers = model.blocks.iter().map(|block| block.mha.choice_sharing());
        let letter = |sharing| match sharing {
            None => '-',
            Some(ChoiceSharing::Gives) => 'g',
            Some(ChoiceSharing::Takes) => 't',
        };
        layers.map(letter).collect::<String>()
    };
    for (text, every, full_last, expected) in [
        ("moba:8,2", 1, 0, "----"),
        ("moba:8,2", 2, 0, "gtgt"),
        ("moba:8,2", 3, 0, "gtt-"),
        ("moba:8,2", 4, 0, "gttt"),
        ("moba:8,2", 9, 0, "gttt"),
        ("moba:8,2", 2, 1, "gt--"),
        ("quest:8,24,1", 2, 0, "-gt-"),
        ("dsa:6,2,3,8", 3, 0, "gtt-"),
    ] {
        assert_eq!(of(text, every, full_last), expected, "{text}, {every}");
    }
    // A selection set afterwards is each layer's own.
    let model = config("moba:8,2", Some(2)).init(&device);
    let topk = "topk:8,3".parse().unwrap();
    assert!(shares_nothing(&model.with_selections(&[topk], 0).unwrap()));
}

fn shares_nothing(model: &SparseTransformer) -> bool {
    let mut layers = model.blocks.iter();
    layers.all(|block| block.mha.choice_sharing().is_none())
}

/// With `share_every` 1 every layer selects for itself, with equal bits as without it; configurations without it load.
#[test]
fn one_shares_nothing() {
    let device = Device::flex();
    for text in TEXTS {
        let config = config(text, Some(1));
        let json = serde_json::to_string(&config).unwrap();
        let before = json.replace(",\"share_every\":1", "");
        assert!(before.len() < json.len());
        let before: SparseTransformerConfig = serde_json::from_str(&before).unwrap();
        assert_eq!(before.share_every, None);
        let run = |config: &SparseTransformerConfig| {
            let _guard = seed(&device, 63);
            let model = randomise(config.init(&device));
            assert!(shares_nothing(&model));
            let x = random([1, SEQ, 16], &device);
            let output = model.blocks[0].mha.forward(SparseMhaInput::self_attn(x));
            assert!(output.choice.is_none());
            model.forward(tokens(2, SEQ, 11, &device)).into_data()
        };
        assert_eq!(run(&config), run(&before));
    }
}

#[test]
fn models_decode_and_do_not_look_ahead() {
    let (device, _guard) = seeded(Device::flex(), 64);
    let tokens = tokens(2, 40, 11, &device);
    for text in &TEXTS[1..] {
        for every in [2, 3] {
            assert_decodes_and_sees_no_future(&model(text, every, &device), &tokens);
        }
    }
    let whole = model("topk:8,3", 2, &device);
    let mut cache = whole.new_cache();
    refused! { whole.try_forward_cache(tokens, &mut cache) => "selection must be prefix stable…"; }
}

/// Before the selection stage all layers are dense; the quality of a reused selection is measured with the layer that made it.
#[test]
fn stages_and_measures_know_of_it() {
    let (device, _guard) = seeded(Device::flex(), 65);
    let tokens = tokens(2, 40, 11, &device);
    for (text, all) in [("dsa:6,2,3,8", "dsa:40,2,3,8"), ("msa:8,2,8", "msa:8,5,8")] {
        let model = model(text, 2, &device);
        let record = model.clone().into_record();
        let all = config(all, Some(2)).init(&device).load_record(record);
        let expected = all.forward(tokens.clone());
        for stage in [DsaStage::Dense, DsaStage::WarmUp] {
            let dense = model.clone().with_dsa_stage(stage).unwrap();
            assert_close(dense.forward(tokens.clone()), expected.clone(), 1e-4);
            let flops = dense.attention_flops(40).unwrap();
            assert_eq!(flops, 4 * 2 * 4 * (40 * 41 / 2) * (4 + 4));
        }
        // Scores of two layers, pairs of four.
        let alone = config(text, None).init(&device);
        let [own, of_all] = [&model, &alone].map(|model| model.attention_flops(40).unwrap());
        let [one, taken] = [0, 1].map(|at| model.blocks[at].mha.attention_flops(40).unwrap());
        assert_eq!((of_all, own), (4 * one, 2 * (one + taken)));
        assert!(taken < one);
        assert!(model.matmul_flops_per_token() < alone.matmul_flops_per_token());
    }
    let model = model("topk:8,3", 2, &device);
    let quality = model.selection_quality(tokens, None).unwrap();
    assert!(quality.iter().map(Vec::len).eq([4, 0, 4, 0]));
    let taker = &model.blocks[1].mha;
    let [x, other] = [(); 2].map(|_| random([1, 40, 16], &device));
    let choice = choice_of(&model.blocks[0].mha, &x);
    let input = || SparseMhaInput::self_attn(other.clone()).choice(choice.clone());
    let layout = taker.chosen(input()).unwrap().unwrap().to_host().unwrap();
    let giver = &model.blocks[0].mha;
    let of_giver = giver.chosen(SparseMhaInput::self_attn(x)).unwrap().unwrap();
    assert_eq!(layout, of_giver.to_host().unwrap());
    assert!(taker.attention_density(input()).unwrap() < 0.9);
}

/// Padding restricts the selection, so each entry gives the result of itself alone.
#[test]
fn padding_is_cut_once() {
    let (device, _guard) = seeded(Device::flex(), 66);
    for text in ["topk:8,3", "moba:8,2"] {
        let giver = layer(text, ChoiceSharing::Gives, &device);
        let taker = layer(text, ChoiceSharing::Takes, &device);
        let [x, other] = [(); 2].map(|_| random([2, SEQ, 16], &device));
        let part = |x: &Tensor<3>| x.clone().slice_dim(0, 1..2).slice_dim(1, 0..21);
        let input = |x: &Tensor<3>| SparseMhaInput::self_attn(x.clone()).lengths([SEQ, 21]);
        let choice = giver.forward(input(&x)).choice.unwrap();
        let got = taker.forward(input(&other).choice(choice)).context;
        let alone = taking(&taker, &part(&other), &choice_of(&giver, &part(&x)));
        assert_close(part(&got), alone, 1e-5);
        let rest = got.slice_dim(0, 1..2).slice_dim(1, 21..SEQ);
        assert_eq!(rest.abs().max().into_scalar::<f32>(), 0.0);
    }
}

#[test]
fn what_cannot_be_shared_is_said() {
    let device = Device::flex();
    let init = |config: SparseTransformerConfig| config.try_init(&device);
    let plain = || small([16, 4], Pattern::causal(), [11, 48, 4]);
    let two = ["topk:8,3", "topk:8,2"].map(|text| text.parse().unwrap());
    let patterns = vec![Pattern::local(9), Pattern::fixed(8, 2)];
    let patterns = small([16, 4], Factorization::Interleaved(patterns), [11, 48, 4])
        .with_selections(Some(vec!["topk:8,3".parse().unwrap()]));
    refused! {
        init(config("moba:8,2", Some(0))) => "share_every must be at least 1, got 0";
        init(plain().with_share_every(Some(2))) => "share_every must be 1 where no layer chooses by a selection, dsa or msa, got 2";
        init(config("nsa:8,4,8,4,10", Some(4))) => "share_every must be 1 where no layer…";
        init(config("moba:8,2", Some(2)).with_full_last_layers(Some(4))) => "share_every must be 1 where no layer…";
        init(plain().with_share_every(Some(2)).with_selections(Some(two.to_vec()))) => "selections must be one, where layers share a choice, got 2";
        init(patterns.clone().with_share_every(Some(2))) => "factorization must be local(9) in layer 1, which shares a choice, got fixed(8, 2)";
        SparseMultiHeadAttentionConfig::new(16, 4, Pattern::causal()).with_choice_sharing(Some(ChoiceSharing::Takes)).try_init(&device) => "choice_sharing must be none without a selection, dsa or msa, got some";
    }
    init(plain().with_share_every(Some(1))).unwrap();
    init(patterns).unwrap();
    let x = || SparseMhaInput::self_attn(random([1, SEQ, 16], &device));
    for text in TEXTS {
        let giver = layer(text, ChoiceSharing::Gives, &device);
        let taker = layer(text, ChoiceSharing::Takes, &device);
        let choice = giver.forward(x()).choice.unwrap();
        let mut cache = SparseMhaCache::new();
        refused! {
            taker.try_forward(x()) => "choice must be that of an earlier layer, for one that takes it, got none";
            giver.try_forward(x().choice(choice.clone())) => "choice must be none for a layer that chooses its keys itself…";
        }
        let fewer = SparseMhaInput::self_attn(random([1, 30, 16], &device)).choice(choice);
        assert!(taker.try_forward(fewer).is_err(), "{text}");
        if text != TEXTS[0] {
            refused! { taker.try_forward_cache(x(), &mut cache) => "choice must be that of an earlier layer…"; }
            assert!(cache.is_empty());
        }
    }
    let printed = format!("{}", layer("msa:8,2,8", ChoiceSharing::Takes, &device));
    assert!(printed.contains("choice_sharing: takes") && printed.contains("content: msa:8,2,8"));
}

#[cfg(feature = "autodiff")]
mod training {
    use burn::optim::GradientsParams;

    use super::*;

    /// Gradients equal those of attention over the same keys in Burn's operations, and none reach the selecting layer.
    #[test]
    fn gradients_are_those_of_attention_to_the_same_keys() {
        let (device, _guard) = seeded(Device::flex().autodiff(), 67);
        for text in TEXTS {
            let giver = layer(text, ChoiceSharing::Gives, &device);
            let taker = layer(text, ChoiceSharing::Takes, &device);
            let [x, other] = [(); 2].map(|_| random([1, SEQ, 16], &device).require_grad());
            let factor = random([1, SEQ, 16], &device);
            let run = |context: Tensor<3>| {
                let grads = (context * factor.clone()).sum().backward();
                assert!(x.grad(&grads).is_none());
                let of_input = other.grad(&grads).unwrap();
                let found = GradientsParams::from_grads(grads, &taker);
                (of_input, gradients_of(&taker, &found))
            };
            let (got, of_layer) = run(taking(&taker, &other, &choice_of(&giver, &x)));
            let seen = chosen_in_loops(&giver, &x);
            let heads = attend_to(&taker, &other, &seen, DType::F32);
            let context = taker.output_projection(heads).unwrap();
            let (expected, of_operations) = run(context);
            assert_close(got, expected, 1e-4);
            assert!(of_layer.keys().eq(of_operations.keys()) && of_layer.len() == 8);
            for (path, numbers) in &of_layer {
                let others = of_operations[path].iter();
                let apart: Vec<f32> = numbers.iter().zip(others).map(|(a, b)| a - b).collect();
                let within = 1e-4 * (1.0 + largest(numbers));
                assert!(largest(&apart) < within, "{text}, {path}");
            }
        }
    }

    /// With any recomputation, a layer reuses the selection of the forward pass.
    #[rstest]
    fn recomputed_layers_take_the_same_choice(
        #[values(0, 1, 3, 4)] of: usize,
        #[values(2, 3)] every: usize,
    ) {
        let (device, text) = (Device::flex().autodiff(), TEXTS[of]);
        let _guard = seed(&device, 68);
        let config = config(text, Some(every)).with_dropout(0.3);
        let model = randomise(config.init(&device));
        let tokens = tokens(2, SEQ, 11, &device);
        let step = |recompute: &str| {
            let (x, y) = (tokens.clone(), tokens.clone().flip([1]));
            let recompute: Recompute = recompute.parse().unwrap();
            let (losses, found) = model.losses_and_gradients(x, y, 0, 5, recompute).unwrap();
            let of = |x: Tensor<1>| x.into_scalar::<f32>();
            let found = gradients_of(&model, &found);
            (of(losses.loss), losses.aux_loss.map(of), found)
        };
        let (loss, aux_loss, plain) = step("none");
        // The selecting layers have one loss each.
        assert_eq!(aux_loss.is_some(), read(text).1.is_some());
        let of_indexers = plain.iter().filter(|(path, _)| path.contains(".content."));
        let of_layer = if of == 3 { 5 } else { 4 };
        let learning = if aux_loss.is_some() { 2 * of_layer } else { 0 };
        assert_eq!(of_indexers.clone().count(), learning);
        for (path, numbers) in of_indexers {
            assert!(largest(numbers) > 1e-7, "{path}");
        }
        for recompute in ["mlp", "block", "segment:2", "segment:3", "block+attention"] {
            let (same, again, found) = step(recompute);
            assert_eq!(same, loss, "{text}, {recompute}");
            let far = again.zip(aux_loss).map_or(0.0, |(a, b)| (a - b).abs());
            assert!(far < 1e-6, "{far}");
            assert!(found == plain, "{text}, {recompute}");
        }
    }
}
