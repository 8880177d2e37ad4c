//! The residual stream, and the branch that is still to be added to it.

use burn::nn::LayerNorm;
use burn::tensor::{FloatDType, Tensor};
use burn_fused_ops::{
    AddNormOptions, ElementDropout, NormParams, Residual, add_norm, residual_add,
};

use crate::error::Result;
use crate::shared_choice::SharedChoice;

/// What a layer computed and does not add to the stream itself: the addition, its bias, its dropout and the norm that follows are one pass.
#[derive(Clone, Debug)]
pub(crate) struct Projected {
    /// `[batch, seq, d_model]`, in the dtype of the products.
    pub(crate) x: Tensor<3>,
    pub(crate) bias: Option<Tensor<1>>,
    /// To be added to the loss.
    pub(crate) aux_loss: Option<Tensor<1>>,
    /// For the layers behind this one.
    pub(crate) choice: Option<SharedChoice>,
}

impl Projected {
    pub(crate) fn new(x: Tensor<3>, bias: Option<Tensor<1>>) -> Self {
        Self {
            x,
            bias,
            aux_loss: None,
            choice: None,
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
    /// What the layers so far add to the loss.
    aux_loss: Option<Tensor<1>>,
    /// The keys that the latest layer chose or took, for the next one.
    pub(crate) choice: Option<SharedChoice>,
}

impl Stream {
    pub(crate) fn new(x: Tensor<3>) -> Self {
        Self {
            x,
            pending: None,
            aux_loss: None,
            choice: None,
        }
    }

    pub(crate) fn x(&self) -> &Tensor<3> {
        &self.x
    }

    /// What the layers so far add to the loss, of which the stream is rid then.
    pub(crate) fn take_aside(&mut self) -> Option<Tensor<1>> {
        self.aux_loss.take()
    }

    /// Adds a branch, of which `dropout` drops, at the next norm.
    pub(crate) fn push(
        mut self,
        mut branch: Projected,
        dropout: Option<ElementDropout>,
    ) -> Result<Self> {
        let parts = [self.take_aside(), branch.aux_loss.take()];
        let choice = branch.choice.take().or(self.choice.take());
        Ok(Self {
            x: self.finish()?,
            pending: Some((branch, dropout)),
            aux_loss: parts.into_iter().flatten().reduce(|a, b| a + b),
            choice,
        })
    }

    /// The stream, and its norm in `dtype`.
    pub(crate) fn norm(
        self,
        norm: &LayerNorm,
        epsilon: f64,
        dtype: FloatDType,
    ) -> Result<(Self, Tensor<3>)> {
        let options = AddNormOptions::default().epsilon(epsilon).dtype(dtype);
        self.normed(options, layer_norm_params(norm))
    }

    /// The stream, and a norm of it.
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
            aux_loss: self.aux_loss,
            choice: self.choice,
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
