//! The initialisation of the paper (Child et al., 2019, §6), whose unit is a standard deviation of
//! `0.125 / √width`.

use burn::module::{Initializer, Param};
use burn::nn::Linear;
use burn::tensor::{Device, Tensor};

const SCALE: f64 = 0.125;

/// `W` from `N(0, gain · 0.125 / √d_input)`, `b` = 0.
pub(crate) fn linear(d_input: usize, d_output: usize, gain: f64, device: &Device) -> Linear {
    Linear {
        weight: normal(
            [d_input, d_output],
            gain * SCALE / (d_input as f64).sqrt(),
            device,
        ),
        bias: Some(Initializer::Zeros.init([d_output], device)),
    }
}

/// `W` = 0 and no bias: every logit starts at 0, every token equally likely.
pub(crate) fn zero_linear(d_input: usize, d_output: usize, device: &Device) -> Linear {
    Linear {
        weight: Initializer::Zeros.init([d_input, d_output], device),
        bias: None,
    }
}

/// One of `n_emb` tables that are summed: `N(0, 0.125 / √(d_model · n_emb))`.
pub(crate) fn embedding(
    rows: usize,
    d_model: usize,
    n_emb: usize,
    device: &Device,
) -> Param<Tensor<2>> {
    let std = SCALE / ((d_model * n_emb) as f64).sqrt();
    normal([rows, d_model], std, device)
}

fn normal(shape: [usize; 2], std: f64, device: &Device) -> Param<Tensor<2>> {
    Initializer::Normal { mean: 0.0, std }.init(shape, device)
}
