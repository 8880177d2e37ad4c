//! The parts of a feed-forward network and of its backward pass, in the operations of products and activations.

use burn::backend::TensorMetadata;
use burn::backend::tensor::FloatTensor;
use burn::tensor::FloatDType;

use crate::activation::ops::ActivationOps;
use crate::activation::values::{
    Activation, ActivationGrads, ActivationInputs, ActivationSaved, ActivationTask,
};
use crate::linear::ops::LinearOps;
use crate::linear::values::{LinearInputs, LinearOutput, LinearSaved, LinearTask};
use crate::mlp::ops::MlpOps;
use crate::mlp::values::{
    MlpActive, MlpCall, MlpInnerInputs, MlpInputs, MlpOuterSaved, MlpOuterTask,
};
use burn_blocksparse::internal::values::{OptFloat, ThreeFloats};

/// What a backend has to have for the halves.
pub(crate) trait Parts: LinearOps + ActivationOps {}

impl<B: LinearOps + ActivationOps> Parts for B {}

/// The first product and the activation.
pub(crate) fn inner<B: Parts>(
    inputs: MlpInnerInputs<B>,
    call: MlpCall,
    keep: bool,
) -> MlpActive<B> {
    let MlpInnerInputs { x, inner, bias } = inputs;
    let first = product::<B>(x, inner, call.dtype);
    let hidden = keep.then(|| first.out.clone());
    MlpActive {
        // In place, where nobody keeps what comes in.
        active: between::<B>(first.out, bias, call.activation),
        hidden: hidden.into(),
        x: first.rounded,
        inner: first.joined,
    }
}

/// The gradient by the activation, and what it becomes before it.
pub(crate) fn outer_backward<B: Parts>(
    saved: MlpOuterSaved<B>,
    task: MlpOuterTask,
) -> ActivationGrads<B> {
    let MlpOuterSaved {
        hidden,
        bias,
        outer,
        grad,
    } = saved;
    let [hidden_width, outputs] = outer.shape().dims();
    let by_active = B::linear_backward(
        LinearSaved {
            x: OptFloat::None,
            weight: OptFloat::Some(outer),
            grad,
        },
        LinearTask {
            inputs: hidden_width,
            x: Some(task.dtype),
            weights: [Some((outputs, None)), None, None],
        },
    );
    B::bias_activation_backward(
        ActivationSaved {
            x: OptFloat::Some(hidden),
            bias,
            grad: by_active.x.into_option().expect("it was asked for"),
        },
        task.activation,
        ActivationTask {
            x: true,
            bias: task.bias,
            y: task.active,
        },
    )
}

fn one<B: Parts>(weight: FloatTensor<B>) -> ThreeFloats<B> {
    ThreeFloats::of_list([Some(weight), None, None])
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
    bias: OptFloat<B>,
    activation: Activation,
) -> FloatTensor<B> {
    match (&bias, activation) {
        (OptFloat::None, Activation::None) => x,
        _ => B::bias_activation(ActivationInputs { x, bias }, activation),
    }
}

/// The result and what a backward pass may need: the factors as they were multiplied, where they are not the inputs themselves.
pub(crate) struct Forward<B: MlpOps> {
    pub out: FloatTensor<B>,
    /// `x · W₁`, unless it is computed again.
    pub hidden: Option<FloatTensor<B>>,
    pub x: Option<FloatTensor<B>>,
    pub inner: Option<FloatTensor<B>>,
    pub outer: Option<FloatTensor<B>>,
}

/// `keep`: whether `x · W₁` is wanted behind the call.
pub(crate) fn forward<B: MlpOps>(inputs: MlpInputs<B>, call: MlpCall, keep: bool) -> Forward<B> {
    let MlpInputs {
        x,
        inner,
        bias,
        outer,
    } = inputs;
    let first = B::mlp_inner(MlpInnerInputs { x, inner, bias }, call, keep);
    let second = product::<B>(first.active, outer, call.dtype);
    Forward {
        out: second.out,
        hidden: first.hidden.into_option(),
        x: first.x.into_option(),
        inner: first.inner.into_option(),
        outer: second.joined.into_option(),
    }
}

/// What a backward pass gets: factors as they were multiplied, as far as a gradient that is wanted needs them.
pub(crate) struct SavedTensors<B: MlpOps> {
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
pub(crate) fn backward<B: MlpOps>(
    saved: SavedTensors<B>,
    call: MlpCall,
    task: Task,
) -> [Option<FloatTensor<B>>; 4] {
    let [inputs, hidden_width, outputs] = task.lengths;
    let SavedTensors {
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
                let by_active = B::linear_backward(
                    LinearSaved {
                        x: OptFloat::None,
                        weight: outer.into(),
                        grad: grad.clone(),
                    },
                    LinearTask {
                        inputs: hidden_width,
                        x: Some(call.dtype),
                        weights: [Some((outputs, None)), None, None],
                    },
                );
                B::bias_activation_backward(
                    ActivationSaved {
                        x: OptFloat::None,
                        bias: OptFloat::None,
                        grad: by_active.x.into_option().expect("it was asked for"),
                    },
                    Activation::None,
                    ActivationTask {
                        x: true,
                        bias: task.bias,
                        y: false,
                    },
                )
            }
        };
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
                weight: OptFloat::None,
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
