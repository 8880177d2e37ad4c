//! The parts of a feed-forward network and of its backward pass, in the operations of products and activations.

use burn::backend::TensorMetadata;
use burn::backend::tensor::FloatTensor;
use burn::tensor::FloatDType;

use super::values::{MlpCall, MlpInputs};
use crate::activation::values::Activation;
use crate::activation::values::{ActivationInputs, ActivationSaved, ActivationTask};
use crate::linear::values::{LinearInputs, LinearOutput, LinearSaved, LinearTask, WeightTensors};
use crate::ops::{ActivationOps, LinearOps};
use crate::values::MaybeFloat;

/// What a backend has to have.
pub(crate) trait Parts: LinearOps + ActivationOps {}

impl<B: LinearOps + ActivationOps> Parts for B {}

fn one<B: Parts>(weight: FloatTensor<B>) -> WeightTensors<B> {
    WeightTensors::of_list([Some(weight), None, None])
}

fn product<B: Parts>(
    x: FloatTensor<B>,
    weight: FloatTensor<B>,
    dtype: FloatDType,
) -> LinearOutput<B> {
    let weights = one(weight);
    B::linear_forward(LinearInputs { x, weights }, dtype)
}

fn between<B: Parts>(
    x: FloatTensor<B>,
    bias: MaybeFloat<B>,
    activation: Activation,
) -> FloatTensor<B> {
    match (&bias, activation) {
        (MaybeFloat::None, Activation::None) => x,
        _ => B::bias_activation(ActivationInputs { x, bias }, activation),
    }
}

/// The result and what a backward pass may need: the factors as they were multiplied, where they are not the inputs themselves.
pub(crate) struct Forward<B: Parts> {
    pub out: FloatTensor<B>,
    /// `x · W₁`, unless it is computed again.
    pub hidden: Option<FloatTensor<B>>,
    pub x: Option<FloatTensor<B>>,
    pub inner: Option<FloatTensor<B>>,
    pub outer: Option<FloatTensor<B>>,
}

/// `keep`: whether `x · W₁` is wanted behind the call.
pub(crate) fn forward<B: Parts>(inputs: MlpInputs<B>, call: MlpCall, keep: bool) -> Forward<B> {
    let MlpInputs {
        x,
        inner,
        bias,
        outer,
    } = inputs;
    let first = product::<B>(x, inner, call.dtype);
    let hidden = keep.then(|| first.out.clone());
    // In place, where nobody keeps what comes in.
    let active = between::<B>(first.out, bias, call.activation);
    let second = product::<B>(active, outer, call.dtype);
    Forward {
        out: second.out,
        hidden,
        x: first.rounded.into_option(),
        inner: first.joined.into_option(),
        outer: second.joined.into_option(),
    }
}

/// What a backward pass gets: factors as they were multiplied, as far as a gradient that is wanted needs them.
pub(crate) struct Saved<B: Parts> {
    pub x: Option<FloatTensor<B>>,
    pub inner: Option<FloatTensor<B>>,
    pub bias: Option<FloatTensor<B>>,
    pub outer: Option<FloatTensor<B>>,
    pub hidden: Option<FloatTensor<B>>,
    pub grad: FloatTensor<B>,
}

/// The dtypes of the gradients that are wanted, and lengths.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Task {
    pub x: Option<FloatDType>,
    pub inner: Option<FloatDType>,
    pub bias: Option<FloatDType>,
    pub outer: Option<FloatDType>,
    /// in, hidden, out.
    pub lengths: [usize; 3],
}

impl Task {
    /// Whether the backward pass reads what is between the products.
    pub(crate) fn depends(&self, activation: Activation) -> bool {
        self.outer.is_some() || (self.before() && activation != Activation::None)
    }

    /// Whether something before the activation is differentiated by.
    pub(crate) fn before(&self) -> bool {
        self.x.is_some() || self.inner.is_some() || self.bias.is_some()
    }
}

/// Gradients by x, the inner weight, the bias and the outer weight.
pub(crate) fn backward<B: Parts>(
    saved: Saved<B>,
    call: MlpCall,
    task: Task,
) -> [Option<FloatTensor<B>>; 4] {
    let [inputs, hidden_width, outputs] = task.lengths;
    let Saved {
        x,
        inner,
        bias,
        outer,
        hidden,
        grad,
    } = saved;
    let depends = task.depends(call.activation);
    let hidden = hidden.or_else(|| {
        let factors = depends.then_some(()).and(x.clone()).zip(inner.clone());
        factors.map(|(x, inner)| product::<B>(x, inner, call.dtype).out)
    });
    let mut by_x = None;
    let mut by_inner = None;
    let mut by_bias = None;
    let mut active = None;
    // Without an activation, what it makes is not among the results of its backward pass.
    let together = task.before() && call.activation != Activation::None;
    if task.outer.is_some() && !together {
        let bias = bias.clone().into();
        active = (hidden.clone()).map(|hidden| between::<B>(hidden, bias, call.activation));
    }
    if task.before() {
        let by_active = B::linear_backward(
            LinearSaved {
                x: MaybeFloat::None,
                weight: outer.into(),
                grad: grad.clone(),
            },
            LinearTask {
                inputs: hidden_width,
                x: Some(call.dtype),
                weights: [Some((outputs, None)), None, None],
            },
        );
        let curved = call.activation != Activation::None;
        let made = B::bias_activation_backward(
            ActivationSaved {
                x: hidden.filter(|_| curved).into(),
                bias: bias.filter(|_| curved).into(),
                grad: by_active.x.into_option().expect("it was asked for"),
            },
            call.activation,
            ActivationTask {
                x: true,
                bias: task.bias,
                y: together && task.outer.is_some(),
            },
        );
        by_bias = made.bias.into_option();
        active = made.y.into_option().or(active);
        if task.x.is_some() || task.inner.is_some() {
            let made = B::linear_backward(
                LinearSaved {
                    x: x.filter(|_| task.inner.is_some()).into(),
                    weight: inner.filter(|_| task.x.is_some()).into(),
                    grad: made.x.into_option().expect("it was asked for"),
                },
                LinearTask {
                    inputs,
                    x: task.x,
                    weights: [Some((hidden_width, task.inner)), None, None],
                },
            );
            by_x = made.x.into_option();
            [by_inner, _, _] = made.weights.into_list();
        }
    }
    let by_outer = task.outer.and_then(|dtype| {
        let made = B::linear_backward(
            LinearSaved {
                x: active.into(),
                weight: MaybeFloat::None,
                grad,
            },
            LinearTask {
                inputs: hidden_width,
                x: None,
                weights: [Some((outputs, Some(dtype))), None, None],
            },
        );
        let [by_outer, _, _] = made.weights.into_list();
        by_outer
    });
    [by_x, by_inner, by_bias, by_outer]
}

/// The dtype of a tensor's gradient.
pub(crate) fn own<T: TensorMetadata>(tensor: &T) -> FloatDType {
    tensor.dtype().into()
}
