//! Layers with block-sparse weights, and feed-forward networks of them.

use burn::optim::GradientsParams;
use burn::store::ModuleRecord;
use burn_fused_ops::optim::FusedAdamWConfig;
use burn_sparse_transformer::feed_forward::FeedForwardSparsity;
use burn_sparse_transformer::linear::{
    BlockSparseLinear, BlockSparseLinearConfig, WeightLayout, WeightPattern,
};

use crate::common::*;

fn config() -> BlockSparseLinearConfig {
    BlockSparseLinearConfig::new(64, 96, 0.5)
        .with_block(16)
        .with_seed(3)
}

fn bytes_of<M: Module>(module: &M) -> ModuleRecord {
    let bytes = module.clone().into_record().into_bytes().unwrap();
    ModuleRecord::from_bytes(bytes).unwrap()
}

#[rstest]
fn a_layer_is_its_dense_form(
    #[values(false, true)] gates: bool,
    #[values(false, true)] bias: bool,
) {
    let device = Device::flex().autodiff();
    let layer = config().with_gates(gates).with_bias(bias).try_init(&device);
    let layer = randomise(layer.unwrap());
    assert_eq!(layer.gates.is_some(), gates);
    let dense = layer.to_dense().unwrap();
    let x = random([2, 9, 64], &device);
    assert_close(layer.forward(x.clone()), dense.forward(x.clone()), 1e-4);
    let grads = layer.forward(x).sum().backward();
    assert!(layer.weight.val().grad(&grads).is_some());
    let back = BlockSparseLinear::from_dense(&dense, 0.5, 16).unwrap();
    assert_eq!(back.layout().unwrap(), layer.layout().unwrap());
    let weight = back.to_dense().unwrap().weight.val();
    assert_close(weight, dense.weight.val(), 0.0);
}

#[test]
fn weights_are_initialised_by_what_an_output_sees() {
    let device = Device::flex();
    let layer = BlockSparseLinearConfig::new(512, 512, 0.25).init(&device);
    let weight = layer.weight.val();
    // U(−k, k) with k = 1 / √128
    let bound = 1.0 / 128f32.sqrt();
    assert!(weight.clone().abs().max().into_scalar::<f32>() <= bound);
    let std = weight.powi_scalar(2).mean().sqrt().into_scalar::<f32>();
    assert!((std * 3f32.sqrt() / bound - 1.0).abs() < 0.02, "{std}");
}

#[test]
fn the_largest_blocks_of_a_dense_layer_are_kept() {
    let device = Device::flex();
    let dense = randomise(LinearConfig::new(64, 48).init(&device));
    let layer = BlockSparseLinear::from_dense(&dense, 0.4, 16).unwrap();
    let layout = layer.layout().unwrap();
    assert_eq!(layout.len(), 5);
    let norm = |i: usize, o: usize| {
        let block = dense
            .weight
            .val()
            .narrow(0, i * 16, 16)
            .narrow(1, o * 16, 16);
        block.powi_scalar(2).sum().into_scalar::<f32>()
    };
    let blocks = || (0..4).flat_map(|i| (0..3).map(move |o| (i, o)));
    let (kept, gone): (Vec<_>, Vec<_>) = blocks().partition(|&(i, o)| layout.contains(i, o));
    let norms = kept.iter().map(|&(i, o)| norm(i, o));
    let least = norms.fold(f32::MAX, f32::min);
    assert!(gone.iter().all(|&(i, o)| norm(i, o) <= least));
    refused! { BlockSparseLinear::from_dense(&dense, 0.4, 32) => "outputs must be a positive multiple of the block, 32, got 48"; }
}

/// A record restores the layout with the parameters, even another layout with as many blocks.
#[test]
fn records_bring_their_layout() {
    let device = Device::flex();
    let saved = randomise(config().init(&device));
    let fresh = config().with_seed(4).init(&device);
    assert_ne!(fresh.layout().unwrap(), saved.layout().unwrap());
    let loaded = fresh.try_load_record(bytes_of(&saved)).unwrap();
    let x = random([5, 64], &device);
    let expected = saved.forward(x.clone());
    assert_close(loaded.forward(x.clone()), expected.clone(), 0.0);
    assert_eq!(loaded.layout().unwrap(), saved.layout().unwrap());
    // Copies on other devices and without autodiff have it too.
    let copy = loaded.clone().fork(&Device::flex().autodiff());
    let copy = copy.train().valid();
    assert_close(copy.forward(x), expected, 0.0);
    // Fewer blocks give another shape.
    let (pruned, _) = saved.prune(0.25).unwrap();
    let more = config().init(&device);
    assert!(more.try_load_record(bytes_of(&pruned)).is_err());
    let layout = pruned.layout().unwrap();
    let fresh = BlockSparseLinearConfig::new(64, 96, 0.25).with_block(16);
    let fresh = fresh.init(&device);
    assert_ne!(fresh.layout().unwrap(), layout);
    let loaded = fresh.try_load_record(bytes_of(&pruned)).unwrap();
    assert_eq!(loaded.layout().unwrap(), layout);
}

#[test]
fn pruning_keeps_the_largest_blocks() {
    let device = Device::flex().autodiff();
    let layer = randomise(config().with_gates(true).init(&device));
    let before = layer.to_dense().unwrap().weight.val();
    let (id, old) = (layer.weight.id, layer.layout().unwrap());
    refused! { layer.clone().prune(0.75) => "density must be at most 0.5, the layer's, got 0.75"; }
    let (pruned, stay) = layer.prune(0.25).unwrap();
    let layout = pruned.layout().unwrap();
    assert_eq!((layout.len(), stay.len(), pruned.weight.id), (6, 6, id));
    assert!(pruned.weight.is_require_grad());
    let all: Vec<(u32, u32)> = old.kept_blocks().collect();
    assert!(
        layout
            .kept_blocks()
            .eq(stay.iter().map(|&index| all[index]))
    );
    let (weight, bias) = (Param::from_tensor(before), None);
    let expected = BlockSparseLinear::from_dense(&Linear { weight, bias }, 0.25, 16).unwrap();
    assert_eq!(expected.layout().unwrap(), layout);
    let (got, expected) = (pruned.to_dense().unwrap(), expected.to_dense().unwrap());
    assert_close(got.weight.val(), expected.weight.val(), 0.0);
}

/// A step after pruning equals that of a layer that never had the pruned blocks: the optimizer does not mix up their states.
#[rstest]
fn optimizers_follow_pruning(#[values(false, true)] saved: bool) {
    let device = Device::flex().autodiff();
    let x = random([7, 64], &device);
    let layer = randomise(config().with_bias(false).init(&device));
    let adamw = || FusedAdamWConfig::new().with_weight_decay(0.0).init();
    let step = |optimizer: &mut burn_fused_ops::optim::FusedAdamW, layer: BlockSparseLinear| {
        // The gradient with respect to a block does not depend on other blocks.
        let loss = layer.forward(x.clone()).sum();
        let gradients = GradientsParams::from_grads(loss.backward(), &layer);
        optimizer.step(1e-2, layer, gradients).unwrap().0
    };
    let mut optimizer = adamw();
    let layer = step(&mut optimizer, layer);
    let full = step(&mut optimizer.clone(), layer.clone());
    let (pruned, stay) = layer.prune(0.25).unwrap();
    if saved {
        optimizer = adamw().from_bytes(optimizer.to_bytes().unwrap()).unwrap();
    }
    optimizer.keep_rows(pruned.weight.id, &stay).unwrap();
    refused! { optimizer.keep_rows(pruned.weight.id, &[6]) => "rows must be below the 6 rows of the parameter's moments, got 6"; }
    let got = step(&mut optimizer, pruned);
    let places: Vec<i32> = stay.iter().map(|&index| index as i32).collect();
    let places = Tensor::<1, burn::tensor::Int>::from_data(places.as_slice(), &device);
    assert_close(got.weight.val(), full.weight.val().select(0, places), 1e-6);
}

#[test]
fn half_precision() {
    let device = Device::flex();
    let layer = randomise(config().init(&device));
    let half = layer.clone().with_precision(Precision::Bf16).unwrap();
    let x = random([3, 5, 64], &device);
    let y = half.forward(x.clone());
    assert_eq!(y.dtype(), DType::F32);
    let expected = layer.forward(x);
    assert_rounded(y, expected, 0.01);
}

fn model_config(sparsity: Option<FeedForwardSparsity>) -> SparseTransformerConfig {
    small([32, 2], Pattern::causal(), [11, 16, 2])
        .with_dropout(0.2)
        .with_feed_forward_sparsity(sparsity)
}

fn sparsity() -> FeedForwardSparsity {
    FeedForwardSparsity::new(0.25)
        .with_block(16)
        .with_pattern(WeightPattern::Random)
}

fn layouts(model: &SparseTransformer) -> Vec<WeightLayout> {
    let layers = model.blocks.iter();
    let layers = layers.flat_map(|block| [&block.pwff.linear_inner, &block.pwff.linear_outer]);
    let layouts = layers.map(|layer| layer.as_block_sparse().unwrap().layout().unwrap());
    layouts.collect()
}

#[test]
fn models_with_sparse_feed_forward_networks() {
    let device = Device::flex().autodiff();
    let config = model_config(Some(sparsity()));
    let model = randomise(config.init(&device));
    let found = layouts(&model);
    let expected = "random(2×8 blocks of 16, 25.0 %, seed 0)";
    assert_eq!(found[0].to_string(), expected);
    let expected = "random(8×2 blocks of 16, 25.0 %, seed 3)";
    assert_eq!(found[3].to_string(), expected);
    let dense = model_config(None).init(&device);
    let removed = 2 * 2 * 32 * 128 * 3 / 4;
    assert_eq!(model.num_params(), dense.num_params() - removed);
    let flops = dense.matmul_flops_per_token() - model.matmul_flops_per_token();
    assert_eq!(flops, 2 * removed as u64);

    // Equal gradients with every kind of recomputation.
    let x = tokens(2, 16, 11, &device);
    let run = |recompute: Recompute| {
        let made = model.loss_and_gradients(x.clone(), x.clone(), 5, recompute);
        let (loss, gradients) = made.unwrap();
        let inner = model.blocks[0].pwff.linear_inner.as_block_sparse().unwrap();
        (loss, gradients.get::<3>(inner.weight.id).unwrap())
    };
    let (loss, gradient) = run(Recompute::None);
    assert!(gradient.clone().abs().sum().into_scalar::<f32>() > 0.0);
    for recompute in [Recompute::Mlp, Recompute::BLOCK] {
        let (other_loss, other) = run(recompute);
        assert_close(other_loss, loss.clone(), 1e-6);
        assert_close(other, gradient.clone(), 1e-5);
    }

    // Records, and the configuration as text.
    let text = serde_json::to_string(&config).unwrap();
    let read: SparseTransformerConfig = serde_json::from_str(&text).unwrap();
    let fresh = read.init(&Device::flex());
    let loaded = fresh.try_load_record(bytes_of(&model)).unwrap();
    let x = tokens(2, 16, 11, &Device::flex());
    assert_close(loaded.forward(x.clone()), model.valid().forward(x), 1e-6);
    assert_eq!(layouts(&loaded), found);
}

/// With all blocks the network is the dense one.
#[test]
fn dense_layouts_are_dense_networks() {
    let device = Device::flex();
    let all = FeedForwardSparsity::new(1.0)
        .with_block(16)
        .with_pattern(WeightPattern::Dense);
    let config = model_config(Some(all)).block(0).unwrap();
    let mut block = randomise(config.init(&device));
    let x = random([2, 5, 32], &device);
    let got = block.pwff.forward(x.clone());
    for layer in [&mut block.pwff.linear_inner, &mut block.pwff.linear_outer] {
        *layer = layer.as_block_sparse().unwrap().to_dense().unwrap().into();
    }
    assert_close(got, block.pwff.forward(x), 1e-4);
}

#[test]
fn blocks_that_do_not_divide_the_widths() {
    let model = model_config(Some(sparsity().with_block(64)));
    refused! { model.try_init(&Device::flex()) => "inputs must be a positive multiple of the block, 64, got 32"; }
    let layout = WeightLayout::dense([32, 96], 16).unwrap();
    refused! { config().try_init_with_layout(layout, &Device::flex()) => "layout must be of a weight [64, 96], got [32, 96]"; }
}
