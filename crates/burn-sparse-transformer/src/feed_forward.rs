use burn::module::Module;
use burn::nn::Linear;
use burn::tensor::Tensor;
use burn::tensor::activation::sigmoid;

use crate::Precision;
use crate::attention::linear_flops;

/// Slope of the sigmoid in `x · sigmoid(1.702 x)`, the paper's approximation of GELU (§5.2).
const GELU_SLOPE: f64 = 1.702;

/// `W_2 f(W_1 x + b_1) + b_2` with `f(x) = x · sigmoid(1.702 x)` (Child et al., 2019, §5.2).
///
/// The layers have the names of burn-nn's `PositionWiseFeedForward`. There is no dropout inside.
#[derive(Module, Debug)]
pub struct FeedForward {
    /// `W_1`, `b_1`: `d_model` to `d_ff`.
    pub linear_inner: Linear,
    /// `W_2`, `b_2`: `d_ff` to `d_model`.
    pub linear_outer: Linear,
    #[module(skip)]
    pub(crate) precision: Precision,
}

impl FeedForward {
    /// Applies the network to every position. The result has the input's dtype.
    ///
    /// # Shapes
    /// - input and output: `[batch, seq, d_model]`
    ///
    /// # Panics
    /// If the last axis is not `d_model`.
    pub fn forward(&self, x: Tensor<3>) -> Tensor<3> {
        let dtype = x.dtype();
        let x = self.precision.linear(&self.linear_inner, x);
        let x = self.precision.linear(&self.linear_outer, gelu_sigmoid(x));
        x.cast(dtype)
    }

    /// Operations of both layers for one position, forward: two per weight.
    pub fn matmul_flops_per_token(&self) -> u64 {
        linear_flops(&self.linear_inner) + linear_flops(&self.linear_outer)
    }
}

/// `x · sigmoid(1.702 x)`.
fn gelu_sigmoid(x: Tensor<3>) -> Tensor<3> {
    x.clone() * sigmoid(x * GELU_SLOPE)
}

#[cfg(test)]
mod tests {
    use super::*;
    use burn::tensor::{Device, TensorData};

    #[test]
    fn activation_is_x_times_sigmoid_of_1_702_x() {
        let xs = [-20.0f32, -3.0, -0.5, 0.0, 0.25, 1.0, 4.0, 30.0];
        let x = Tensor::<3>::from_data(TensorData::new(xs.to_vec(), [1, 1, 8]), &Device::flex());
        let y = gelu_sigmoid(x).into_data().try_to_vec::<f32>().unwrap();
        for (x, y) in xs.iter().zip(y) {
            let x = f64::from(*x);
            let expected = x / (1.0 + (-1.702 * x).exp());
            assert!((f64::from(y) - expected).abs() < 1e-6, "f({x}) = {y}");
        }
    }
}
