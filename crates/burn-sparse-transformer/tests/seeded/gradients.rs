//! Gradients with and without recomputation, with and without dropout and gradient checkpointing.
#![cfg(feature = "autodiff")]

use std::ops::Range;

use burn::module::ModuleMapper;
use burn::optim::GradientsParams;
use burn::tensor::Distribution;

use crate::common::*;

const VOCAB: usize = 7;
const SEQ: usize = 21;

fn config(dropout: f64) -> SparseTransformerConfig {
    let patterns = vec![Pattern::fixed(8, 2), Pattern::merged_strided(8)];
    let factorization = Factorization::Interleaved(patterns);
    small([16, 2], factorization, [VOCAB, 24, 3])
        .with_embedding_width(Some(8))
        .with_n_kv_heads(Some(1))
        .with_dropout(dropout)
}

fn model(dropout: f64, device: &Device) -> SparseTransformer {
    randomise(config(dropout).init(device))
}

/// Returns tokens and targets; ids need no autodiff device.
fn data() -> (Tensor<2, Int>, Tensor<2, Int>) {
    let x = tokens(2, SEQ, VOCAB, &Device::flex());
    (x.clone(), x.flip([1]))
}

fn device(checkpointing: bool) -> Device {
    let device = Device::flex().autodiff();
    match checkpointing {
        true => device.gradient_checkpointing(),
        false => device,
    }
}

/// Returns the loss of a step and the gradients of all parameters.
fn step(
    model: &SparseTransformer,
    (x, y): (Tensor<2, Int>, Tensor<2, Int>),
    seed: u64,
    recompute: impl Into<Recompute>,
) -> (f32, Gradients) {
    let (loss, gradients) = model.loss_and_gradients(x, y, seed, recompute).unwrap();
    assert!(!loss.is_autodiff());
    (loss.into_scalar(), gradients_of(model, &gradients))
}

/// Returns the largest difference of two gradients of a parameter, relative to its largest element. Every parameter must have both, and neither may
/// be 0, except for the key projection's bias, which shifts all scores of a query equally, without effect on the softmax.
fn difference(a: &Gradients, b: &Gradients) -> f32 {
    assert_eq!([a.len(), b.len()], [3 + 3 * 16 + 3; 2]);
    let mut worst = 0f32;
    for ((path, a), b) in a.iter().zip(b.values()) {
        if path.ends_with("key.bias") {
            assert!(largest(a) < 1e-6 && largest(b) < 1e-6, "{path}");
            continue;
        }
        let is_right = largest(a) > 1e-5 && largest(b) > 1e-5;
        assert!(is_right, "{path}: no gradient");
        let apart: Vec<f32> = a.iter().zip(b).map(|(a, b)| a - b).collect();
        worst = worst.max(largest(&apart) / largest(a));
    }
    worst
}

/// Returns the mean of several gradients of each parameter.
fn mean(parts: &[Gradients]) -> Gradients {
    let mut mean = parts[0].clone();
    for (path, numbers) in &mut mean {
        for (at, number) in numbers.iter_mut().enumerate() {
            let all = parts.iter().map(|part| f64::from(part[path][at]));
            *number = (all.sum::<f64>() / parts.len() as f64) as f32;
        }
    }
    mean
}

/// Gradients of the mean over a batch are sums over its parts, including dropout: each part drops the same elements as in the whole batch.
#[test]
fn parts_of_a_batch_add_up_to_it() {
    let (device, _guard) = seeded(device(false), 1);
    let model = model(0.3, &device);
    let x = tokens(6, SEQ, VOCAB, &Device::flex());
    let y = x.clone().flip([1]);
    for mode in ["none", "mlp", "segment:2", "block+attention"] {
        let mode: Recompute = mode.parse().unwrap();
        let (loss, whole) = step(&model, (x.clone(), y.clone()), 99, mode);
        // Claimed first entry of the last part.
        for (third, is_whole) in [(4, true), (0, false)] {
            let mut losses = 0.0;
            let parts = [(0, 0), (2, 2), (4, third)].map(|(first, says)| {
                let [x, y] = [&x, &y].map(|all| all.clone().narrow(0, first, 2));
                let (loss, part) = model
                    .loss_and_gradients_of_part(x, y, says, 99, mode)
                    .unwrap();
                losses += loss.into_scalar::<f32>() / 3.0;
                gradients_of(&model, &part)
            });
            let (apart, worst) = ((losses - loss).abs(), difference(&whole, &mean(&parts)));
            match is_whole {
                true => assert!(apart < 1e-5 && worst < 1e-4, "{mode}: {apart}, {worst}"),
                false => assert!(worst > 1e-2, "{mode}: {worst}"),
            }
        }
    }
}

/// Three blocks: 2 does not divide them, 3 and 50 make one segment. Gradients of all parameters, with and without those of the embeddings.
#[rstest]
fn every_mode_gives_the_same_bits(
    #[values(0.0, 0.3)] dropout: f64,
    #[values(false, true)] frozen_embeddings: bool,
    #[values(false, true)] checkpointing: bool,
    #[values(
        "mlp",
        "block",
        "segment:2",
        "segment:3",
        "segment:50",
        "block+attention",
        "segment:2+attention",
        "segment:3+attention"
    )]
    mode: &str,
) {
    let (device, _guard) = seeded(device(checkpointing), 15);
    let mut model = dropping_weights(dropout, dropout, &device);
    if frozen_embeddings {
        model.token_embedding = model.token_embedding.no_grad();
        model.position_embedding = model.position_embedding.no_grad();
    }
    let run = |recompute: Recompute| {
        let (loss, bits) = bits(&model, recompute);
        let embeddings = 3 * usize::from(!frozen_embeddings);
        assert_eq!(bits.len(), 3 * 16 + 3 + embeddings);
        (loss, bits)
    };
    assert!(run(Recompute::None) == run(mode.parse().unwrap()));
}

/// Options of a model's attention besides a pattern.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Kind {
    Sinks,
    RelativeBias,
    Alibi,
    All,
    Bf16,
    StoredWeights,
}

/// Makes a model of five blocks of grouped heads, whose queries and keys are half as wide as the stream: segments of 2 leave a last one of 1,
/// segments of 3 one of 2.
fn model_of(kind: Kind, dropout: f64, device: &Device) -> SparseTransformer {
    let has = |one| kind == one || kind == Kind::All;
    let attention = BlockAttentionConfig::new()
        .with_dropout(dropout)
        .with_alibi(has(Kind::Alibi))
        .with_relative_reach(has(Kind::RelativeBias).then_some(5))
        .with_sinks(has(Kind::Sinks))
        .with_qk_norm(has(Kind::RelativeBias).then_some(QkNorm::Rms))
        .with_rope_theta(has(Kind::Sinks).then_some(100.0));
    let patterns = vec![Pattern::fixed(8, 2), Pattern::merged_strided(8)];
    let patterns = Factorization::Interleaved(patterns);
    let config = small([16, 4], patterns, [VOCAB, 24, 5])
        .with_embedding_width(Some(8))
        .with_n_kv_heads(Some(2))
        .with_d_key(Some(8))
        .with_dropout(dropout)
        .with_attention(Some(attention))
        .with_store_weights(kind == Kind::StoredWeights)
        .with_precision(match kind {
            Kind::Bf16 => Precision::Bf16,
            _ => Precision::F32,
        });
    randomise(config.init(device))
}

/// Saved attention residuals give equal bits with any options; if they cannot be saved, attention is recomputed.
#[rstest]
fn kept_attention_gives_the_same_bits(
    #[values(
        Kind::Sinks,
        Kind::RelativeBias,
        Kind::Alibi,
        Kind::All,
        Kind::Bf16,
        Kind::StoredWeights
    )]
    kind: Kind,
    #[values(0.0, 0.3)] dropout: f64,
    #[values(false, true)] checkpointing: bool,
) {
    let (device, _guard) = seeded(device(checkpointing), 16);
    let model = model_of(kind, dropout, &device);
    let stored = bits(&model, Recompute::None);
    assert!(stored.1.len() >= 3 + 5 * 16 + 3);
    for mode in [
        "block",
        "block+attention",
        "segment:2+attention",
        "segment:3+attention",
    ] {
        assert!(stored == bits(&model, mode.parse().unwrap()), "{mode}");
    }
}

/// Returns the bits of the loss and of every parameter's gradient.
fn bits(model: &SparseTransformer, recompute: Recompute) -> (u32, Vec<Vec<u32>>) {
    let (loss, gradients) = step(model, data(), 99, recompute);
    let bits = |numbers: Vec<f32>| numbers.into_iter().map(f32::to_bits).collect();
    (loss.to_bits(), gradients.into_values().map(bits).collect())
}

#[test]
fn without_dropout_they_are_the_gradients_of_the_loss() {
    let (device, _guard) = seeded(device(false), 2);
    let model = model(0.0, &device);
    let (x, y) = data();
    let loss = model.loss(x.clone(), y.clone());
    let expected = GradientsParams::from_grads(loss.clone().backward(), &model);
    let loss = loss.into_scalar::<f32>();
    let (got_loss, got) = step(&model, (x, y), 0, true);
    assert!((got_loss - loss).abs() < 1e-6);
    assert!(difference(&gradients_of(&model, &expected), &got) < 1e-5);
}

/// Sums over thousands of rows, and frequent embeddings, use other algorithms.
#[rstest]
fn many_windows_give_the_mean_of_single_ones(#[values(false, true)] recompute: bool) {
    const WINDOWS: usize = 64;
    const SEQ: usize = 64;
    let (device, _guard) = seeded(device(false), 12);
    let mut config = config(0.0);
    config.context = SEQ;
    let model = randomise(config.init(&device));
    let x = tokens(WINDOWS, SEQ, VOCAB, &Device::flex());
    let gradients = |windows: Range<usize>| {
        let x = x.clone().slice([windows, 0..SEQ]);
        let y = x.clone().flip([1]);
        step(&model, (x, y), 0, recompute).1
    };
    let parts: Vec<Gradients> = (0..WINDOWS).map(|i| gradients(i..i + 1)).collect();
    assert!(difference(&gradients(0..WINDOWS), &mean(&parts)) < 1e-4);
}

/// Adds `step` times a fixed random direction to every parameter, and sums direction · gradient.
struct Move<'a> {
    step: f64,
    gradients: &'a GradientsParams,
    slope: f64,
}

impl ModuleMapper for Move<'_> {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let gradient = self.gradients.get::<D>(param.id).expect("a gradient");
        let direction = gradient.random_like(Distribution::Normal(0.0, 1.0));
        self.slope += (gradient * direction.clone()).sum().into_scalar::<f64>();
        let step = Tensor::from_inner(direction * self.step);
        param.map(|value| (value + step).detach())
    }
}

#[test]
fn gradients_are_the_slope_of_the_loss() {
    let (device, _guard) = seeded(device(false), 3);
    let model = model(0.0, &device);
    let (x, y) = data();
    let (_, gradients) = model
        .loss_and_gradients(x.clone(), y.clone(), 0, true)
        .unwrap();
    let moved = |step: f64| {
        device.seed(4); // the same direction every time
        let mut mapper = Move {
            step,
            gradients: &gradients,
            slope: 0.0,
        };
        let model = model.clone().map(&mut mapper);
        let loss = model.loss(x.clone(), y.clone());
        (loss.into_scalar::<f64>(), mapper.slope)
    };
    let step = 1e-3;
    let ((ahead, slope), (behind, _)) = (moved(step), moved(-step));
    let measured = (ahead - behind) / (2.0 * step);
    let is_near = (measured / slope - 1.0).abs() < 2e-2;
    assert!(is_near, "{measured}, expected {slope}");
}

/// Dropout of attention weights, of branches, and of both.
#[rstest]
fn dropout_depends_on_its_seed_alone(
    #[values([0.0, 0.3], [0.4, 0.0], [0.4, 0.3])] drops: [f64; 2],
    #[values(false, true)] recompute: bool,
    #[values(false, true)] checkpointing: bool,
) {
    let (device, _guard) = seeded(device(checkpointing), 5);
    let [weights, branches] = drops;
    let model = dropping_weights(weights, branches, &device);
    let run = |seed| step(&model, data(), seed, recompute);
    let ((loss, first), (other_loss, other)) = (run(1), run(2));
    assert_eq!(difference(&first, &run(1).1), 0.0);
    assert!((other_loss - loss).abs() > 1e-4);
    assert!(difference(&first, &other) > 1e-2);
}

/// With W_p = W_2 = 0 a block adds masked biases to the residual stream, so its gradient passes all blocks unchanged: the biases of two layers have
/// equal gradients exactly if their masks are equal.
#[rstest]
fn layers_draw_different_masks(#[values(0.0, 0.5)] dropout: f64) {
    let (device, _guard) = seeded(device(false), 6);
    let mut model = model(dropout, &device);
    for block in &mut model.blocks {
        let outer = block.pwff.linear_outer.as_dense_mut().unwrap();
        for linear in [&mut block.mha.output, outer] {
            let zero = |weight: Tensor<2>| weight.zeros_like().require_grad();
            linear.weight = linear.weight.clone().map(zero);
        }
    }
    let (x, y) = data();
    let (_, gradients) = model.loss_and_gradients(x, y, 1, true).unwrap();
    let gradient = |layer: usize, of_attention: bool| {
        let block = &model.blocks[layer];
        let linear = match of_attention {
            true => &block.mha.output,
            false => block.pwff.linear_outer.as_dense().unwrap(),
        };
        let bias = linear.bias.as_ref().unwrap();
        gradients.get::<1>(bias.id).unwrap()
    };
    for (a, b) in [
        (gradient(0, false), gradient(1, false)),
        (gradient(0, true), gradient(2, true)),
        (gradient(1, true), gradient(1, false)),
    ] {
        let difference = apart(a, b);
        assert_eq!(difference > 1e-3, dropout > 0.0, "{difference}");
        assert_eq!(difference < 1e-6, dropout == 0.0, "{difference}");
    }
}

#[rstest]
fn a_model_that_was_never_used_draws_its_parameters_before_its_masks(
    #[values(false, true)] recompute_first: bool,
) {
    let (device, _guard) = seeded(device(false), 7);
    let mut model = config(0.3).init(&device);
    // The output matrix is initialized to 0, which would hide the blocks.
    model.output = LinearConfig::new(16, VOCAB).with_bias(false).init(&device);
    let loss = |recompute| step(&model, data(), 3, recompute).0;
    let (first, second) = (loss(recompute_first), loss(!recompute_first));
    assert!((first - second).abs() < 1e-6, "{first}, {second}");
}

#[rstest]
fn frozen_parts_get_no_gradients(#[values(false, true)] recompute: bool) {
    let (device, _guard) = seeded(device(false), 8);
    let mut model = model(0.3, &device);
    model.token_embedding = model.token_embedding.no_grad();
    model.position_embedding = model.position_embedding.no_grad();
    model.blocks[1] = model.blocks[1].clone().no_grad();
    model.output = model.output.no_grad();
    let (x, y) = data();
    let (_, gradients) = model.loss_and_gradients(x, y, 1, recompute).unwrap();
    assert_eq!(gradients.len(), 2 * 16 + 2);
    let query = |layer: usize| model.blocks[layer].mha.query.weight.id;
    assert!(gradients.get::<2>(query(0)).is_some());
    assert!(gradients.get::<2>(query(1)).is_none());
}

#[test]
fn a_model_without_dropout_leaves_the_generator_alone() {
    let (device, _guard) = seeded(device(false), 9);
    let model = model(0.0, &device);
    let draw = || Tensor::<1>::random([4], Distribution::Default, &Device::flex()).into_data();
    device.seed(10);
    let expected = draw();
    device.seed(10);
    let (x, y) = data();
    model.loss_and_gradients(x, y, 1, true).unwrap();
    assert_eq!(draw(), expected);
}

#[test]
fn a_plain_device_is_refused() {
    let (device, _guard) = seeded(Device::flex(), 11);
    let model = model(0.0, &device);
    let (x, y) = data();
    refused! { model.loss_and_gradients(x, y, 0, true).map(drop) => "the model's device must be an autodiff device, got …"; }
}

/// Makes a model with `dropout` of the attention weights and `branches` of the residual branches.
fn dropping_weights(dropout: f64, branches: f64, device: &Device) -> SparseTransformer {
    let mut model = model(branches, device);
    for block in &mut model.blocks {
        block.mha.dropout.prob = dropout;
    }
    model
}

/// Weights are dropped in both runs of a block: without dropout in the first run, the loss would be the undropped one.
#[rstest]
fn dropped_weights_change_the_loss_unless_frozen(#[values(false, true)] recompute: bool) {
    let (device, _guard) = seeded(device(false), 14);
    let dropping = dropping_weights(0.4, 0.0, &device);
    let loss = |model: &SparseTransformer| step(model, data(), 1, recompute).0;
    let mut plain = dropping.clone();
    let mut frozen = dropping.clone();
    for (plain, frozen) in plain.blocks.iter_mut().zip(&mut frozen.blocks) {
        plain.mha.dropout.prob = 0.0;
        frozen.mha = frozen.mha.clone().freeze();
    }
    assert!((loss(&dropping) - loss(&plain)).abs() > 1e-4);
    assert_eq!(loss(&frozen), loss(&plain));
}
