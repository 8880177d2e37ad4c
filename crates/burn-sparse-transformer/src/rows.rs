//! Operations on matrices with tens of thousands of rows and hundreds of columns, which keep a GPU busy forward
//! but not backward: what met every row has a gradient that is a sum over rows.
//!
//! - A vector (a bias, the gain of a layer norm): Burn sums a column with one thread. Here the rows are seen as
//!   √rows groups of √rows, so that the gradient is two short sums.
//! - A matrix of weights: the product of two tall matrices has few tiles to compute and a long sum in each. Here
//!   it is a product for each group of rows, and their sum.

use burn::nn::{LayerNorm, RmsNorm};
use burn::tensor::Tensor;
use burn::tensor::module::linear;

/// Fewer rows are not worth two sums.
const MIN_ROWS: usize = 4096;

/// Rows that a product takes at a time.
const PRODUCT_ROWS: usize = 1024;

/// The largest divisor of `rows` that is not above its square root; 1 for few rows.
pub(crate) fn groups(rows: usize) -> usize {
    match rows < MIN_ROWS {
        true => 1,
        false => (1..=rows.isqrt())
            .rev()
            .find(|groups| rows.is_multiple_of(*groups))
            .unwrap_or(1),
    }
}

/// `[batch, seq, width]`, or rows grouped in another way, as `[groups, rows, width]`.
pub(crate) fn group(x: Tensor<3>) -> Tensor<3> {
    let [batch, seq, width] = x.dims();
    let groups = groups(batch * seq);
    x.reshape([groups, batch * seq / groups, width])
}

/// `x · weight`.
pub(crate) fn product(x: Tensor<3>, weight: Tensor<2>) -> Tensor<3> {
    let [batch, seq, width] = x.dims();
    let rows = batch * seq;
    match rows >= MIN_ROWS && rows.is_multiple_of(PRODUCT_ROWS) {
        true => x
            .reshape([rows / PRODUCT_ROWS, PRODUCT_ROWS, width])
            .matmul(weight.unsqueeze()),
        false => linear(x, weight, None),
    }
}

/// `[width]` as `[groups, 1, width]`, for a sum or product with grouped rows.
pub(crate) fn spread(vector: Tensor<1>, groups: usize) -> Tensor<3> {
    let [width] = vector.dims();
    vector.reshape([1, 1, width]).expand([groups, 1, width])
}

/// burn-nn's layer norm of `[batch, seq, d_model]`.
///
/// Without autodiff it is the module's own forward, which some backends have as one operation.
pub(crate) fn layer_norm(norm: &LayerNorm, epsilon: f64, x: Tensor<3>) -> Tensor<3> {
    let shape = x.dims();
    let groups = groups(shape[0] * shape[1]);
    if groups == 1 || !x.is_autodiff() {
        return norm.forward(x);
    }
    let x = group(x);
    let centered = x.clone() - x.mean_dim(2);
    let variance = centered.clone().square().mean_dim(2);
    let normalized = centered / (variance + epsilon).sqrt();
    let scaled = normalized * spread(norm.gamma.val(), groups);
    let shifted = match &norm.beta {
        Some(beta) => scaled + spread(beta.val(), groups),
        None => scaled,
    };
    shifted.reshape(shape)
}

/// burn-nn's root mean square norm of `[batch, rows, width]`, as [`layer_norm`].
pub(crate) fn rms_norm(norm: &RmsNorm, x: Tensor<3>) -> Tensor<3> {
    let shape = x.dims();
    let groups = groups(shape[0] * shape[1]);
    if groups == 1 || !x.is_autodiff() {
        return norm.forward(x);
    }
    let x = group(x);
    let rms = (x.clone().square().mean_dim(2) + norm.epsilon).sqrt();
    (x / rms * spread(norm.gamma.val(), groups)).reshape(shape)
}

#[cfg(test)]
mod tests {
    use super::*;
    use burn::nn::{LayerNormConfig, RmsNormConfig};
    use burn::tensor::{Device, Distribution, Tolerance};

    #[test]
    fn groups_divide_the_rows_near_their_root() {
        for (rows, expected) in [
            (1_024, 1),
            (49_152, 192),
            (65_536, 256),
            (4_099, 1),
            (4_100, 50),
        ] {
            assert_eq!(groups(rows), expected, "{rows}");
        }
    }

    #[test]
    fn rms_norm_is_burns() {
        let device = Device::flex().autodiff();
        let norm = RmsNormConfig::new(8).init(&device);
        let x = Tensor::<3>::random([2, 2_050, 8], Distribution::Default, &device).require_grad();
        let weights = Tensor::<3>::random([2, 2_050, 8], Distribution::Default, &device);
        let run = |own: bool| {
            let y = match own {
                true => rms_norm(&norm, x.clone()),
                false => norm.forward(x.clone()),
            };
            let grads = (y.clone() * weights.clone()).sum().backward();
            let gamma = norm.gamma.val().grad(&grads).unwrap().into_data();
            [
                y.into_data(),
                x.grad(&grads).unwrap().into_data(),
                gamma.clone(),
            ]
        };
        let tolerance = Tolerance::<f32>::absolute(1e-3).set_relative(1e-4);
        for (own, burns) in run(true).iter().zip(&run(false)) {
            own.assert_approx_eq(burns, tolerance);
        }
    }

    #[test]
    fn layer_norm_is_burns() {
        let device = Device::flex().autodiff();
        let norm = LayerNormConfig::new(8).init(&device);
        let x = Tensor::<3>::random([2, 2_050, 8], Distribution::Default, &device).require_grad();
        let weights = Tensor::<3>::random([2, 2_050, 8], Distribution::Default, &device);
        let run = |own: bool| {
            let y = match own {
                true => layer_norm(&norm, 1e-5, x.clone()),
                false => norm.forward(x.clone()),
            };
            let grads = (y.clone() * weights.clone()).sum().backward();
            let beta = norm.beta.as_ref().unwrap();
            let vectors = [&norm.gamma, beta].map(|p| p.val().grad(&grads).unwrap().into_data());
            (y.into_data(), x.grad(&grads).unwrap().into_data(), vectors)
        };
        let (own, burns) = (run(true), run(false));
        let tolerance = Tolerance::<f32>::absolute(1e-3).set_relative(1e-4);
        own.0.assert_approx_eq(&burns.0, tolerance);
        own.1.assert_approx_eq(&burns.1, tolerance);
        for (own, burns) in own.2.iter().zip(&burns.2) {
            own.assert_approx_eq(burns, tolerance);
        }
    }
}
