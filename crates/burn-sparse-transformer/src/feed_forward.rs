use burn::module::{Module, Param};
use burn::nn::Linear;
use burn::tensor::Tensor;
use burn_blocksparse::{Activation, MlpOptions, MlpParams, bias_activation, mlp};

use crate::attention::linear_flops;
use crate::stream::Projected;
use crate::{Precision, TransformerError};

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
    /// # Errors
    /// If the last axis is not `d_model`.
    pub fn forward(&self, x: Tensor<3>) -> Result<Tensor<3>, TransformerError> {
        let dtype = x.dtype();
        let Projected { x, bias } = self.forward_projected(x, false)?;
        Ok(bias_activation(x, bias, Activation::None)?.cast(dtype))
    }

    /// [`Self::forward`] without its last bias; with `recompute` the backward pass computes the first product again.
    pub(crate) fn forward_projected(
        &self,
        x: Tensor<3>,
        recompute: bool,
    ) -> Result<Projected, TransformerError> {
        let value = |layer: &Linear| layer.weight.val();
        let mut params = MlpParams::new(value(&self.linear_inner), value(&self.linear_outer));
        params.bias = self.linear_inner.bias.as_ref().map(Param::val);
        let dtype = self.precision.dtype(x.dtype());
        let options = MlpOptions::default().dtype(dtype).recompute(recompute);
        Ok(Projected {
            x: mlp(x, params, Activation::GeluSigmoid, &options)?,
            bias: self.linear_outer.bias.as_ref().map(Param::val),
        })
    }

    /// Operations of both layers for one position, forward: two per weight.
    pub fn matmul_flops_per_token(&self) -> u64 {
        linear_flops(&self.linear_inner) + linear_flops(&self.linear_outer)
    }
}
