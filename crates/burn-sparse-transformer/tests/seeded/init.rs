//! The paper's initialization: standard deviations, zeros, and the number of parameters.

use burn_sparse_transformer::SparseTransformerBlock;

use crate::common::*;

const D: usize = 128;
const LAYERS: usize = 3;

fn model(config: impl Fn(SparseTransformerConfig) -> SparseTransformerConfig) -> SparseTransformer {
    let fixed = Factorization::from(Pattern::fixed(64, 8));
    let new = SparseTransformerConfig::new(D, 4, fixed)
        .with_vocab_size(200)
        .with_context(4096)
        .with_n_layers(LAYERS)
        .with_embedding_width(Some(64));
    config(new).init(&Device::flex())
}

/// Asserts a mean within five standard errors of 0, and a standard deviation within five of `std`.
#[track_caller]
fn assert_normal(tensor: Tensor<2>, std: f64) {
    let values = tensor.into_data().try_to_vec::<f32>().unwrap();
    let n = values.len() as f64;
    let mean = values.iter().map(|v| f64::from(*v)).sum::<f64>() / n;
    let squares = values.iter().map(|v| (f64::from(*v) - mean).powi(2));
    let got = (squares.sum::<f64>() / n).sqrt();
    assert!(mean.abs() < 5.0 * std / n.sqrt(), "mean {mean}, std {std}");
    let is_near = (got / std - 1.0).abs() < 5.0 / (2.0 * n).sqrt();
    assert!(is_near, "std {got}, expected {std}");
}

#[track_caller]
fn assert_all<const R: usize>(tensor: Tensor<R>, value: f32) {
    let values = tensor.into_data().try_to_vec::<f32>().unwrap();
    assert!(values.iter().all(|v| *v == value));
}

fn std(width: usize) -> f64 {
    0.125 / (width as f64).sqrt()
}

#[test]
fn embeddings_and_output() {
    let (_, _guard) = seeded(Device::flex(), 7);
    let model = model(|config| config);
    assert_normal(model.token_embedding.weight.val(), std(D));
    let positions = model.position_embedding.as_ref().unwrap();
    assert_normal(positions.row.val(), std(2 * D));
    assert_normal(positions.column.val(), std(2 * D));
    assert_eq!(positions.row.dims(), [64, D]);
    assert_eq!(positions.column.dims(), [64, D]);
    assert_all(model.output.weight.val(), 0.0);
    assert!(model.output.bias.is_none());
    assert_all(model.norm.gamma.val(), 1.0);
}

fn assert_block(block: &SparseTransformerBlock, d_ff: usize) {
    let into_residual = 1.0 / (2.0 * LAYERS as f64).sqrt();
    let mha = &block.mha;
    let inner = block.pwff.linear_inner.as_dense().unwrap();
    for linear in [&mha.query, &mha.key, &mha.value, inner] {
        assert_normal(linear.weight.val(), std(D));
        assert_all(linear.bias.as_ref().unwrap().val(), 0.0);
    }
    assert_normal(mha.output.weight.val(), std(D) * into_residual);
    let outer = block.pwff.linear_outer.as_dense().unwrap();
    assert_eq!(outer.weight.dims(), [d_ff, D]);
    assert_normal(outer.weight.val(), std(d_ff) * into_residual);
    for linear in [&mha.output, outer] {
        assert_all(linear.bias.as_ref().unwrap().val(), 0.0);
    }
    for norm in [&block.norm_1, &block.norm_2] {
        assert_all(norm.gamma.val(), 1.0);
        assert_all(norm.beta.as_ref().unwrap().val(), 0.0);
    }
}

#[test]
fn blocks() {
    let (_, _guard) = seeded(Device::flex(), 8);
    for block in &model(|config| config).blocks {
        assert_block(block, 4 * D);
    }
}

#[test]
fn half_size_blocks() {
    let (_, _guard) = seeded(Device::flex(), 9);
    let model = model(SparseTransformerConfig::half_size);
    assert_eq!(model.blocks[0].mha.query.weight.dims(), [D, D / 2]);
    assert_eq!(model.blocks[0].mha.value.weight.dims(), [D, D]);
    assert_block(&model.blocks[0], 2 * D);
}

#[test]
fn another_scale() {
    let (_, _guard) = seeded(Device::flex(), 10);
    let model = model(|config| config.with_init_scale(1.0));
    assert_normal(model.token_embedding.weight.val(), 8.0 * std(D));
    let positions = model.position_embedding.as_ref().unwrap();
    assert_normal(positions.row.val(), 8.0 * std(2 * D));
    let block = &model.blocks[0];
    assert_normal(block.mha.query.weight.val(), 8.0 * std(D));
    let into_residual = 1.0 / (2.0 * LAYERS as f64).sqrt();
    let outer = block.pwff.linear_outer.as_dense().unwrap();
    assert_normal(outer.weight.val(), 8.0 * std(4 * D) * into_residual);
    assert_all(model.output.weight.val(), 0.0);
}

#[test]
fn the_papers_enwik8_model_has_95_million_parameters() {
    let fixed = Factorization::from(Pattern::fixed(128, 32));
    let config = SparseTransformerConfig::new(512, 8, fixed)
        .with_vocab_size(256)
        .with_context(12_288)
        .with_n_layers(30)
        .with_embedding_width(Some(128));
    let model = config.init(&Device::flex());
    let (d, per_block) = (512, 12 * 512 * 512 + 9 * 512 + 4 * 512);
    let embeddings = (256 + 96 + 128) * d;
    let expected = embeddings + 30 * per_block + 2 * d + d * 256;
    assert_eq!(model.num_params(), expected);
    assert_eq!(expected, 94_949_376);
    // Two operations per weight of the blocks' six matrices and the output.
    let flops = 2 * (30 * 12 * 512 * 512 + 512 * 256);
    assert_eq!(model.matmul_flops_per_token(), flops);
}

#[test]
fn the_papers_cifar_10_model_has_59_million_parameters() {
    let strided = Factorization::from(Pattern::merged_strided(96));
    let config = SparseTransformerConfig::new(256, 2, strided)
        .with_vocab_size(256)
        .with_context(3072)
        .with_n_layers(128)
        .with_embedding_width(Some(96))
        .half_size();
    let millions = config.init(&Device::flex()).num_params() as f64 / 1e6;
    assert!((millions - 59.0).abs() < 0.5, "{millions} million");
}

#[test]
fn seeds_decide_the_parameters() {
    let device = Device::flex();
    let draw = |seed| {
        let _guard = crate::common::seed(&device, seed);
        model(|config| config).blocks[0].mha.query.weight.to_data()
    };
    assert_eq!(draw(1), draw(1));
    assert_ne!(draw(1), draw(2));
}
