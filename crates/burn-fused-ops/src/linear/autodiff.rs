//! Autodiff of linear layers.

use crate::linear::activation::kind::Activation;
use crate::linear::mlp::steps::{Task, backward};
use crate::linear::ops::{LinearOps, MlpKept, composed_forward, composed_mlp};
use crate::linear::products::Primitives;
use crate::linear::values::{
    ActivationSaved, ActivationTask, BiasedRows, HeadParts, JoinCall, Joined, LinearCall,
    LinearForm, LinearInputs, LinearOutput, LinearSaved, LinearTask, MlpCall, MlpInputs,
};
use burn_blocksparse::internal::custom_gradient::*;
use burn_blocksparse::internal::prelude::*;

impl<B: LinearOps, C: CheckpointStrategy> LinearOps for Autodiff<B, C> {
    fn linear_forward(inputs: LinearInputs<Self>, call: LinearCall) -> LinearOutput<Self> {
        if let LinearForm::Activated { .. } | LinearForm::Gated(_) = call.form {
            return composed_forward::<Self, Primitives>(inputs, call);
        }
        let (shape, reads) = (inputs.x.shape(), inputs.reads(call));
        let inputs = inputs.into_list();
        let out = custom_gradients::<B, C, _, _, _>(inputs, reads, |inputs, wanted| {
            let dtypes = wanted_dtypes(&inputs, wanted);
            let inputs = LinearInputs::<B>::of_list(inputs);
            let task = LinearTask::new(&inputs, call, dtypes);
            let for_backward = wanted.contains(&true);
            let made = B::linear_forward(
                inputs,
                LinearCall {
                    for_backward,
                    ..call
                },
            );
            let [x, weight] = task.of_rounded([made.rounded, made.joined]);
            (
                made.out.into_list(),
                move |[own_x, own_weight, ..], grads| {
                    let grads = ThreeFloats::of_list(grads);
                    let (grad, by_bias) = match call.form {
                        LinearForm::ToHeads(parts) => {
                            let join = JoinCall::new([shape[0], shape[1]], parts, call.dtype)
                                .with_sums(dtypes[4]);
                            let joined = B::join_heads(grads, join);
                            (joined.x, joined.bias.into_option())
                        }
                        _ => (grads.into_one(), None),
                    };
                    let mut made = [const { None }; 4];
                    if task.x.is_some() || task.by_weights() {
                        let saved = LinearSaved::new(own_x.or(x), own_weight.or(weight), grad);
                        made = B::linear_backward(saved, task).into_list();
                    }
                    let [x, first, second, third] = made;
                    [x, first, second, third, by_bias]
                },
            )
        });
        LinearOutput::new(ThreeFloats::of_list(out))
    }

    fn bias_activation(inputs: BiasedRows<Self>, activation: Activation) -> FloatTensor<Self> {
        let depends = activation != Activation::None;
        let reads = |_| [depends; 2];
        custom_gradient::<B, C, _, _>(inputs.into_list(), reads, |inputs, wanted| {
            let [_, bias] = wanted_dtypes(&inputs, wanted);
            let task = ActivationTask::new(wanted[0], bias, false);
            let active = B::bias_activation(BiasedRows::of_list(inputs), activation);
            (active, move |[x, bias], grad| {
                let (x, bias) = (x.into(), bias.into());
                let saved = ActivationSaved { x, bias, grad };
                let made = B::bias_activation_backward(saved, activation, task);
                [made.x, made.bias].map(OptFloat::into_option)
            })
        })
    }

    fn split_heads(inputs: BiasedRows<Self>, parts: HeadParts) -> ThreeFloats<Self> {
        let [batch, seq, _] = inputs.x.shape().dims();
        let dtype = own_dtype(&inputs.x);
        let inputs = inputs.into_list();
        let heads = custom_gradients::<B, C, _, _, _>(inputs, nothing, |inputs, wanted| {
            let [_, bias] = wanted_dtypes(&inputs, wanted);
            let call = JoinCall::new([batch, seq], parts, dtype).with_sums(bias);
            let heads = B::split_heads(BiasedRows::of_list(inputs), parts);
            (heads.into_list(), move |_, grads| {
                B::join_heads(ThreeFloats::of_list(grads), call).into_list()
            })
        });
        ThreeFloats::of_list(heads)
    }

    /// Joins a single part without sums, as the public function does.
    fn join_heads(tensors: ThreeFloats<Self>, call: JoinCall) -> Joined<Self> {
        let first = [Some(tensors.into_one())];
        let x = custom_gradient::<B, C, _, _>(first, nothing, |[first], _| {
            let tensors = ThreeFloats::of_list([first, None, None]);
            (B::join_heads(tensors, call).x, move |_, x| {
                let heads = B::split_heads(BiasedRows::new(x, None), call.parts);
                [Some(heads.into_one())]
            })
        });
        Joined::new(x, None)
    }

    fn mlp(inputs: MlpInputs<Self>, call: MlpCall) -> FloatTensor<Self> {
        let lengths = [
            inputs.inner.shape()[0],
            inputs.inner.shape()[1],
            inputs.outer.shape()[1],
        ];
        let inputs = inputs.into_list();
        let dtypes = wanted_dtypes(&inputs, [true; 4]);
        let is_itself = dtypes.map(|dtype| dtype == Some(call.dtype));
        // The checkpointer stores the factors that the products read unchanged.
        let reads = |wanted| {
            let [x, inner, outer, bias] = Task::new(dtypes, wanted, lengths).needs(call);
            [
                x && is_itself[0],
                inner && is_itself[1],
                outer && is_itself[2],
                bias,
            ]
        };
        custom_gradient::<B, C, _, _>(inputs, reads, |inputs, wanted| {
            let task = Task::new(dtypes, wanted, lengths);
            let keep = task.depends(call.activation) && !call.recompute;
            let (out, made) = composed_mlp::<B>(MlpInputs::of_list(inputs), call, true, keep);
            let needs = task.needs(call);
            let x = made.x.filter(|_| needs[0]);
            let inner = made.inner.filter(|_| needs[1]);
            let outer = made.outer.filter(|_| needs[2]);
            (out, move |[own_x, own_inner, own_outer, bias], grad| {
                let kept = MlpKept {
                    x: own_x.or(x),
                    inner: own_inner.or(inner),
                    outer: own_outer.or(outer),
                    hidden: made.hidden,
                };
                backward::<B>(kept, bias, grad, call, task)
            })
        })
    }
}
