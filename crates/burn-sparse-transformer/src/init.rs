//! The initialisation of the paper (Child et al., 2019, §6), whose unit is a standard deviation of
//! `scale / √width`; the paper's scale is 0.125.

use burn::module::{Initializer, Param};
use burn::nn::Linear;
use burn::tensor::{Device, Tensor};
use burn_fused_ops::sparse_linear::WeightLayout;

use crate::linear::{BlockSparseLinear, fans};

/// Initialises `W` from `N(0, scale / √d_input)` and `b` to 0.
pub(crate) fn linear(d_input: usize, d_output: usize, scale: f64, device: &Device) -> Linear {
    Linear {
        weight: normal([d_input, d_output], scale / (d_input as f64).sqrt(), device),
        bias: Some(Initializer::Zeros.init([d_output], device)),
    }
}

/// Initialises the kept blocks from `N(0, scale / √(mean inputs of an output))` and `b` to 0.
pub(crate) fn block_sparse_linear(
    layout: WeightLayout,
    scale: f64,
    device: &Device,
) -> BlockSparseLinear {
    let [fan_in, _] = fans(&layout);
    let weight = normal(layout.shape(), scale / fan_in.sqrt(), device);
    let bias = Initializer::Zeros.init([layout.outputs()], device);
    BlockSparseLinear::new(weight, Some(bias), layout, device)
}

/// Initialises `W` to 0 without a bias: all logits start at 0, all tokens equally likely.
pub(crate) fn zero_linear(d_input: usize, d_output: usize, device: &Device) -> Linear {
    Linear {
        weight: Initializer::Zeros.init([d_input, d_output], device),
        bias: None,
    }
}

/// Initialises one of `n_emb` tables that are summed: `N(0, scale / √(d_model · n_emb))`.
pub(crate) fn embedding(
    rows: usize,
    d_model: usize,
    n_emb: usize,
    scale: f64,
    device: &Device,
) -> Param<Tensor<2>> {
    let std = scale / ((d_model * n_emb) as f64).sqrt();
    normal([rows, d_model], std, device)
}

fn normal<const D: usize>(shape: [usize; D], std: f64, device: &Device) -> Param<Tensor<D>> {
    Initializer::Normal { mean: 0.0, std }.init(shape, device)
}
