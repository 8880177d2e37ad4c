//! Autodiff of losses.

use crate::loss::ops::LossOps;
use crate::loss::values::{LossDtypes, LossInputs, LossOutput, LossSaved, LossTask, Reduction};
use burn_blocksparse::internal::custom_gradient::*;
use burn_blocksparse::internal::values::OptFloat;

impl<B: LossOps, C: CheckpointStrategy> LossOps for Autodiff<B, C> {
    fn linear_cross_entropy(inputs: LossInputs<Self>, task: LossTask) -> LossOutput<Self> {
        let LossInputs { x, weight, targets } = inputs;
        let dtypes = LossDtypes {
            x: own_dtype(&x),
            weight: own_dtype(&weight),
        };
        let mut by_count = None;
        let factors = [x, weight].map(Some);
        let loss = custom_gradient::<B, C, _, _>(factors, nothing, |factors, wanted| {
            let ([x, weight], [by_x, by_weight]) = (factors.map(there), wanted);
            let task = LossTask {
                by_x,
                by_weight,
                ..task
            };
            let inputs = LossInputs::<B> { x, weight, targets };
            // The backward pass computes the logits again from them.
            let kept = (task.reduction == Reduction::None).then(|| inputs.clone());
            let made = B::linear_cross_entropy(inputs, task);
            by_count = Some(made.factor.clone());
            (made.loss, move |_, grad| {
                let grads = match kept {
                    Some(inputs) => B::position_cross_entropy_backward(inputs, grad, task, dtypes),
                    None => {
                        let saved = LossSaved {
                            factor: made.factor,
                            grad,
                            x: made.x,
                            weight: made.weight,
                        };
                        B::linear_cross_entropy_backward(saved, dtypes)
                    }
                };
                grads.into_list()
            })
        });
        LossOutput {
            loss,
            factor: <Self as AutodiffBackend>::from_inner(there(by_count)),
            x: OptFloat::None,
            weight: OptFloat::None,
        }
    }
}
