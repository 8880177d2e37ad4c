//! Residual stream with a pending branch.

use std::mem::take;

use burn::nn::LayerNorm;
use burn::tensor::{FloatDType, Tensor};
use burn_fused_ops::{
    AddNormOptions, ElementDropout, NormParams, Residual, add_norm, residual_add,
};

use crate::error::Result;
use crate::shared_choice::Aside;

/// Output of a layer that is not yet added to the stream: the addition, the bias, the dropout and the following norm are one pass.
#[derive(Clone, Debug)]
pub(crate) struct Projected {
    /// Branch, `[batch, seq, d_model]`, in the dtype of the products.
    pub(crate) x: Tensor<3>,
    pub(crate) bias: Option<Tensor<1>>,
    pub(crate) aside: Aside,
}

impl Projected {
    pub(crate) fn new(x: Tensor<3>, bias: Option<Tensor<1>>) -> Self {
        Self {
            x,
            bias,
            aside: Aside::default(),
        }
    }

    fn branch(self) -> Residual<3> {
        let branch = Residual::new(self.x);
        match self.bias {
            Some(bias) => branch.bias(bias),
            None => branch,
        }
    }
}

pub(crate) struct Stream {
    x: Tensor<3>,
    pending: Option<(Projected, Option<ElementDropout>)>,
    /// Auxiliary loss and choice of the layers so far.
    pub(crate) aside: Aside,
}

impl Stream {
    pub(crate) fn new(x: Tensor<3>) -> Self {
        Self {
            x,
            pending: None,
            aside: Aside::default(),
        }
    }

    pub(crate) fn x(&self) -> &Tensor<3> {
        &self.x
    }

    /// Adds a branch with dropout at the next norm.
    pub(crate) fn push(
        mut self,
        mut branch: Projected,
        dropout: Option<ElementDropout>,
    ) -> Result<Self> {
        let aside = take(&mut self.aside).then(take(&mut branch.aside));
        Ok(Self {
            x: self.finish()?,
            pending: Some((branch, dropout)),
            aside,
        })
    }

    /// Returns the stream, and its norm in `dtype`.
    pub(crate) fn norm(
        self,
        norm: &LayerNorm,
        epsilon: f64,
        dtype: FloatDType,
    ) -> Result<(Self, Tensor<3>)> {
        let options = AddNormOptions::default().epsilon(epsilon).dtype(dtype);
        self.normed(options, layer_norm_params(norm))
    }

    /// Returns the stream, and its norm with these options and parameters.
    pub(crate) fn normed(
        self,
        mut options: AddNormOptions,
        params: NormParams,
    ) -> Result<(Self, Tensor<3>)> {
        let branch = self.pending.map(|(branch, dropout)| {
            if let Some(dropout) = dropout {
                options = options.clone().dropout(dropout);
            }
            branch.branch()
        });
        let (x, normed) = add_norm(self.x, branch, params, &options)?;
        let stream = Self {
            aside: self.aside,
            ..Self::new(x)
        };
        Ok((stream, normed))
    }

    pub(crate) fn finish(self) -> Result<Tensor<3>> {
        Ok(match self.pending {
            Some((branch, dropout)) => residual_add(self.x, branch.branch(), dropout)?,
            None => self.x,
        })
    }
}

pub(crate) fn layer_norm_params(norm: &LayerNorm) -> NormParams {
    let params = NormParams::new(norm.gamma.val());
    match &norm.beta {
        Some(beta) => params.beta(beta.val()),
        None => params,
    }
}
