//! Autodiff of residual norms and dropout.

use blocksparse::ElementDropout;

use crate::norm::ops::NormOps;
use crate::norm::values::{
    NormBackwardCall, NormCall, NormInputs, NormOutput, NormOutputGrads, NormSaved,
};
use burn_blocksparse::internal::custom_gradient::*;
use burn_blocksparse::internal::prelude::*;

impl<B: NormOps, C: CheckpointStrategy> NormOps for Autodiff<B, C> {
    /// Computes the mask again in the backward pass.
    fn stream_dropout(x: FloatTensor<Self>, dropout: ElementDropout) -> FloatTensor<Self> {
        custom_gradient::<B, C, _, _>([Some(x)], nothing, |[x], _| {
            let output = B::stream_dropout(there(x), dropout);
            (output, move |_, grad| {
                [Some(B::stream_dropout(grad, dropout))]
            })
        })
    }

    fn add_norm(inputs: NormInputs<Self>, mut call: NormCall) -> NormOutput<Self> {
        let inputs = inputs.into_list();
        let [stream, normed] =
            custom_gradients::<B, C, _, _, _>(inputs, nothing, |inputs, wanted| {
                let is_tracked = wanted.contains(&true);
                call.keep = is_tracked && call.norm.is_some();
                let [_, branch, bias, gamma, beta] = wanted_dtypes(&inputs, wanted);
                let inputs = NormInputs::<B>::of_list(inputs);
                let task = NormBackwardCall {
                    forward: call,
                    stream: own_dtype(&inputs.stream),
                    branch,
                    bias,
                    gamma,
                    beta,
                };
                let (gamma, came) = (inputs.gamma.clone(), inputs.stream.clone());
                let made = B::add_norm(inputs, call);
                let (xhat, rstd) = (made.xhat, made.rstd);
                let saved = NormSaved { xhat, rstd, gamma };
                let stream = made.stream.into_option();
                let stream = stream.or(is_tracked.then_some(came));
                let outputs = [stream, made.normed.into_option()];
                (outputs, move |_, grads| {
                    let [stream, normed] = grads.map(OptFloat::from);
                    let by = NormOutputGrads { stream, normed };
                    B::residual_norm_backward(saved, by, task).into_list()
                })
            });
        NormOutput {
            stream: stream.into(),
            normed: normed.into(),
            xhat: OptFloat::None,
            rstd: OptFloat::None,
        }
    }
}
