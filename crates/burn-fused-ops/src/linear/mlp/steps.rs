//! The backward pass of a feed-forward network, composed of products and activations.

use crate::linear::activation::kind::Activation;
use crate::linear::ops::{LinearOps, MlpKept, between, by_active, product};
use crate::linear::values::{
    ActivationSaved, ActivationTask, LinearCall, LinearSaved, LinearTask, MlpCall, MlpOuterSaved,
    MlpOuterTask,
};
use burn_blocksparse::internal::prelude::*;

/// Dtypes of the wanted gradients, and the lengths of the network.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Task {
    pub x: Option<FloatDType>,
    pub inner: Option<FloatDType>,
    pub bias: Option<FloatDType>,
    pub outer: Option<FloatDType>,
    /// Lengths in, hidden and out.
    pub lengths: [usize; 3],
}

impl Task {
    /// Returns the task for inputs of these dtypes and these wanted gradients, in the order x, inner weight, outer weight, bias.
    pub(crate) fn new(
        dtypes: [Option<FloatDType>; 4],
        wanted: [bool; 4],
        lengths: [usize; 3],
    ) -> Self {
        let of = |input: usize| dtypes[input].filter(|_| wanted[input]);
        Self {
            x: of(0),
            inner: of(1),
            outer: of(2),
            bias: of(3),
            lengths,
        }
    }

    /// Returns whether the backward pass reads x, the inner weight, the outer weight and the bias.
    pub(crate) fn needs(&self, call: MlpCall) -> [bool; 4] {
        let depends = self.depends(call.activation);
        let again = depends && call.recompute;
        [
            self.inner.is_some() || again,
            self.x.is_some() || again,
            self.before(),
            depends,
        ]
    }

    /// Returns whether the backward pass reads the tensor between the products.
    pub(crate) fn depends(&self, activation: Activation) -> bool {
        self.outer.is_some() || (self.before() && activation != Activation::None)
    }

    /// Returns whether a gradient before the activation is wanted.
    pub(crate) fn before(&self) -> bool {
        self.x.is_some() || self.inner.is_some() || self.bias.is_some()
    }
}

/// Computes the wanted gradients with respect to x, the inner weight, the outer weight and the bias, with the intermediate gradients they need.
pub(crate) fn backward<B: LinearOps>(
    kept: MlpKept<B>,
    bias: Option<FloatTensor<B>>,
    grad: FloatTensor<B>,
    call: MlpCall,
    task: Task,
) -> [Option<FloatTensor<B>>; 4] {
    let [inputs, hidden_width, outputs] = task.lengths;
    let MlpKept {
        x,
        inner,
        outer,
        hidden,
    } = kept;
    let depends = task.depends(call.activation);
    let hidden = hidden.or_else(|| {
        let factors = depends.then_some(()).and(x.clone()).zip(inner.clone());
        let rows = LinearCall::rows(call.dtype);
        factors.map(|(x, inner)| product::<B>(x, inner, rows).out.into_one())
    });
    let (mut by_x, mut by_inner, mut by_bias, mut active) = (None, None, None, None);
    // Without an activation, its backward pass does not return the activation.
    let together = task.before() && call.activation != Activation::None;
    if task.outer.is_some() && !together {
        let bias = bias.clone().into();
        active = (hidden.clone()).map(|hidden| between::<B>(hidden, bias, call.activation));
    }
    if task.before() {
        let made = match hidden.filter(|_| together) {
            Some(hidden) => B::mlp_outer_backward(
                MlpOuterSaved {
                    hidden,
                    bias: bias.into(),
                    outer: outer.expect("what is before it needs it"),
                    grad: grad.clone(),
                },
                MlpOuterTask {
                    activation: call.activation,
                    dtype: call.dtype,
                    bias: task.bias,
                    active: task.outer.is_some(),
                },
            ),
            None => {
                let widths = [hidden_width, outputs];
                let by_active = by_active::<B>(outer, grad.clone(), call.dtype, widths);
                let saved = ActivationSaved {
                    x: OptFloat::None,
                    bias: OptFloat::None,
                    grad: by_active,
                };
                let of_bias = ActivationTask::new(true, task.bias, false);
                B::bias_activation_backward(saved, Activation::None, of_bias)
            }
        };
        by_bias = made.bias.into_option();
        active = made.y.into_option().or(active);
        if task.x.is_some() || task.inner.is_some() {
            let x = x.filter(|_| task.inner.is_some());
            let inner = inner.filter(|_| task.x.is_some());
            let grad = made.x.into_option().expect("it was asked for");
            let of_inner = LinearTask::one(call.dtype, [inputs, hidden_width], task.x, task.inner);
            let made = B::linear_backward(LinearSaved::new(x, inner, grad), of_inner);
            by_x = made.x.into_option();
            [by_inner, _, _] = made.weights.into_list();
        }
    }
    let by_outer = task.outer.and_then(|dtype| {
        let of_outer = LinearTask::one(call.dtype, [hidden_width, outputs], None, Some(dtype));
        let made = B::linear_backward(LinearSaved::new(active, None, grad), of_outer);
        let [by_outer, _, _] = made.weights.into_list();
        by_outer
    });
    [by_x, by_inner, by_outer, by_bias]
}
