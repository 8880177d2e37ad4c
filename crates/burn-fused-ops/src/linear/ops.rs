//! The backend trait of linear layers: products, activations and head layouts, and the compositions of them that backends without fused kernels run.

use crate::linear::activation::kind::Activation;
use crate::linear::activation::reference as activations;
use crate::linear::heads::reference as heads;
use crate::linear::products;
#[cfg(feature = "fusion")]
use crate::linear::products::with_width;
use crate::linear::products::{Primitives, Products, rounded};
use crate::linear::values::{
    ActivationGrads, ActivationSaved, ActivationTask, BiasedRows, HeadParts, JoinCall, Joined,
    LinearCall, LinearForm, LinearGrads, LinearInputs, LinearOutput, LinearSaved, LinearTask,
    MlpCall, MlpInputs, MlpOuterSaved, MlpOuterTask,
};
use burn_blocksparse::internal::prelude::*;

/// Linear layers as backend operations. The public functions check the arguments.
#[backend_extension(
    Flex: cfg(feature = "flex"),
    NdArray: cfg(feature = "ndarray"),
    Cube: cfg(feature = "cube"),
    Autodiff: cfg(feature = "autodiff"),
    Fusion: cfg(feature = "fusion"),
)]
pub trait LinearOps: Backend {
    /// Returns `x · [W₁ W₂ W₃]`, with factors rounded to the call's dtype, in that dtype and in the call's form.
    #[fusion(meta = meta::forward)]
    fn linear_forward(
        #[extension_type] inputs: LinearInputs<Self>,
        call: LinearCall,
    ) -> LinearOutput<Self> {
        composed_forward::<Self, Primitives>(inputs, call)
    }

    /// Backward pass of the product: the gradients that `task` wants.
    #[fusion(meta = meta::backward)]
    fn linear_backward(
        #[extension_type] saved: LinearSaved<Self>,
        task: LinearTask,
    ) -> LinearGrads<Self> {
        composed_backward::<Self, Primitives>(saved, task)
    }

    /// Returns `f(x + bias)` in x's dtype.
    #[fusion(dtype = inputs.x.dtype, shape = inputs.x.shape.clone())]
    fn bias_activation(
        #[extension_type] inputs: BiasedRows<Self>,
        activation: Activation,
    ) -> FloatTensor<Self> {
        activations::forward::<Self>(inputs, activation)
    }

    /// Backward pass of the activation: the gradients that `task` wants.
    #[fusion(meta = |saved, _activation, task| {
        meta::activation(&saved.grad, task.bias, [task.x, task.y])
    })]
    fn bias_activation_backward(
        #[extension_type] saved: ActivationSaved<Self>,
        activation: Activation,
        task: ActivationTask,
    ) -> ActivationGrads<Self> {
        activations::backward::<Self>(saved, activation, task)
    }

    /// Splits rows `[batch, seq, Σ heads · width]` plus a bias into tensors by heads.
    #[fusion(meta = |inputs, parts| {
        let shape = &inputs.x.shape;
        meta::by_heads([shape[0], shape[1]], *parts, inputs.x.dtype)
    })]
    fn split_heads(
        #[extension_type] inputs: BiasedRows<Self>,
        parts: HeadParts,
    ) -> ThreeFloats<Self> {
        heads::split::<Self>(inputs, parts)
    }

    /// Joins tensors by heads into rows, and sums over all rows if the call wants sums. At least one of the tensors is present.
    #[fusion(meta = meta::join)]
    fn join_heads(#[extension_type] tensors: ThreeFloats<Self>, call: JoinCall) -> Joined<Self> {
        heads::join::<Self>(tensors, &call)
    }

    /// Returns `f(x · W₁ + b) · W₂`.
    #[fusion(
        dtype = call.dtype.into(),
        shape = with_width(&inputs.x.shape, inputs.outer.shape[1])
    )]
    fn mlp(#[extension_type] inputs: MlpInputs<Self>, call: MlpCall) -> FloatTensor<Self> {
        composed_mlp::<Self>(inputs, call, false, false).0
    }

    /// Returns the gradients with respect to the input of a feed-forward activation and to the bias, and the activation, recomputed.
    #[fusion(meta = |saved, task| {
        meta::activation(&saved.hidden, task.bias, [true, task.active])
    })]
    fn mlp_outer_backward(
        #[extension_type] saved: MlpOuterSaved<Self>,
        task: MlpOuterTask,
    ) -> ActivationGrads<Self> {
        composed_outer_backward::<Self>(saved, task)
    }
}

reference_backends!(LinearOps);

/// Returns parts with a single tensor by heads.
pub(crate) fn one_part((heads, dim): (usize, usize)) -> HeadParts {
    [Some((heads, dim)), None, None]
}

/// Joins a tensor by heads into rows.
fn rows<B: LinearOps>(x: FloatTensor<B>) -> FloatTensor<B> {
    let [batch, heads, seq, dim] = x.shape().dims();
    let call = JoinCall::new([batch, seq], one_part((heads, dim)), x.dtype().into());
    B::join_heads(ThreeFloats::one(x), call).x
}

/// Applies the bias and the activation, if there is either.
pub(crate) fn between<B: LinearOps>(
    x: FloatTensor<B>,
    bias: OptFloat<B>,
    activation: Activation,
) -> FloatTensor<B> {
    match (&bias, activation) {
        (OptFloat::None, Activation::None) => x,
        _ => B::bias_activation(BiasedRows { x, bias }, activation),
    }
}

/// Computes the forward pass by composing backend operations; products in row form are those of `P`.
pub(crate) fn composed_forward<B: LinearOps, P: Products<B>>(
    inputs: LinearInputs<B>,
    call: LinearCall,
) -> LinearOutput<B> {
    let LinearInputs { x, weights, bias } = inputs;
    if call.form == LinearForm::Rows {
        return products::forward::<B, P>(x, weights, call.dtype).of(call);
    }
    let joined = |x, weights| {
        let inputs = LinearInputs::new(x, weights);
        let form = LinearForm::Rows;
        B::linear_forward(inputs, LinearCall { form, ..call })
    };
    match call.form {
        LinearForm::Rows => joined(x, weights),
        LinearForm::Activated { activation, keep } => {
            let made = joined(x, weights);
            let first = made.out.into_one();
            let hidden = keep.then(|| first.clone());
            // Computed in place if nothing else holds the input.
            let active = between::<B>(first, bias, activation);
            LinearOutput {
                out: ThreeFloats::of_list([Some(active), hidden, None]),
                ..made
            }
        }
        LinearForm::Gated(activation) => {
            let ThreeFloats { first, second, .. } = weights;
            let half = |weight: OptFloat<B>| {
                let weight = weight.into_option().expect("two weights");
                let call = LinearCall::rows(call.dtype);
                product::<B>(x.clone(), weight, call).out.into_one()
            };
            let gate = between::<B>(half(first), OptFloat::None, activation);
            LinearOutput::new(ThreeFloats::one(B::float_mul(gate, half(second))))
        }
        LinearForm::ToHeads(parts) => {
            let made = joined(x, weights);
            let x = made.out.into_one();
            LinearOutput {
                out: B::split_heads(BiasedRows { x, bias }, parts),
                ..made
            }
        }
        LinearForm::FromHeads => LinearOutput {
            rounded: OptFloat::None,
            ..joined(rows::<B>(x), weights)
        },
    }
}

/// Computes the gradients with respect to the factors of a product by composition.
pub(crate) fn composed_backward<B: LinearOps, P: Products<B>>(
    saved: LinearSaved<B>,
    task: LinearTask,
) -> LinearGrads<B> {
    let Some(heads) = task.heads else {
        return products::backward::<B, P>(saved, task);
    };
    let x = saved.x.into_option();
    let x = x.map(|x| rounded::<B>(rows::<B>(x), task.dtype)).into();
    let of_rows = LinearTask {
        heads: None,
        ..task
    };
    let LinearGrads { x, weights } = B::linear_backward(LinearSaved { x, ..saved }, of_rows);
    let by_heads = |x| B::split_heads(BiasedRows::new(x, None), one_part(heads)).into_one();
    let by_x = x.into_option().map(by_heads);
    LinearGrads {
        x: by_x.into(),
        weights,
    }
}

/// Computes the gradient with respect to the activation, and from it the one before the activation.
pub(crate) fn composed_outer_backward<B: LinearOps>(
    saved: MlpOuterSaved<B>,
    task: MlpOuterTask,
) -> ActivationGrads<B> {
    let widths = saved.outer.shape().dims();
    let by_active = by_active::<B>(Some(saved.outer), saved.grad, task.dtype, widths);
    let saved = ActivationSaved {
        x: OptFloat::Some(saved.hidden),
        bias: saved.bias,
        grad: by_active,
    };
    let of_activation = ActivationTask::new(true, task.bias, task.active);
    B::bias_activation_backward(saved, task.activation, of_activation)
}

/// Returns `grad · W₂ᵀ`, for W₂ `[hidden, outputs]`.
pub(crate) fn by_active<B: LinearOps>(
    outer: Option<FloatTensor<B>>,
    grad: FloatTensor<B>,
    dtype: FloatDType,
    widths: [usize; 2],
) -> FloatTensor<B> {
    let saved = LinearSaved::new(None, outer, grad);
    let made = B::linear_backward(saved, LinearTask::one(dtype, widths, Some(dtype), None));
    made.x.into_option().expect("it was asked for")
}

/// Returns one product in row form.
pub(crate) fn product<B: LinearOps>(
    x: FloatTensor<B>,
    weight: FloatTensor<B>,
    call: LinearCall,
) -> LinearOutput<B> {
    B::linear_forward(LinearInputs::new(x, ThreeFloats::one(weight)), call)
}

/// Tensors that the backward pass of a feed-forward network may read. Factors are present only if the forward pass rounded them; otherwise the backward pass
/// reads the inputs.
#[cfg_attr(not(feature = "autodiff"), allow(dead_code))]
pub(crate) struct MlpKept<B: LinearOps> {
    pub x: Option<FloatTensor<B>>,
    pub inner: Option<FloatTensor<B>>,
    pub outer: Option<FloatTensor<B>>,
    /// `x · W₁`, unless it is recomputed.
    pub hidden: Option<FloatTensor<B>>,
}

/// Computes a feed-forward network by composition. `for_backward`: a backward pass follows; `keep`: it needs `x · W₁`.
pub(crate) fn composed_mlp<B: LinearOps>(
    inputs: MlpInputs<B>,
    call: MlpCall,
    for_backward: bool,
    keep: bool,
) -> (FloatTensor<B>, MlpKept<B>) {
    let weights = ThreeFloats::one(inputs.inner);
    let form = LinearForm::Activated {
        activation: call.activation,
        keep,
    };
    let of = |form| LinearCall {
        for_backward,
        ..LinearCall::new(call.dtype, form)
    };
    let (x, bias) = (inputs.x, inputs.bias);
    let first = B::linear_forward(LinearInputs { x, weights, bias }, of(form));
    let [active, hidden, _] = first.out.into_list();
    let second = product::<B>(
        active.expect("it is made"),
        inputs.outer,
        of(LinearForm::Rows),
    );
    let kept = MlpKept {
        x: first.rounded.into_option(),
        inner: first.joined.into_option(),
        outer: second.joined.into_option(),
        hidden,
    };
    (second.out.into_one(), kept)
}

/// Output shapes and dtypes for fusion, which never compares them with what the backend returns.
#[cfg(feature = "fusion")]
mod meta {
    use super::*;
    use crate::linear::values::{
        ActivationGradsMetadata, BiasedRowsMetadata, LinearGradsMetadata, LinearInputsMetadata,
        LinearOutputMetadata, LinearSavedMetadata,
    };
    use burn_blocksparse::internal::values::ThreeFloatsMetadata;

    pub fn by_heads(
        [batch, seq]: [usize; 2],
        parts: HeadParts,
        dtype: DType,
    ) -> ThreeFloatsMetadata {
        let of = |(heads, dim)| TensorSpec::new([batch, heads, seq, dim].into(), dtype);
        ThreeFloatsMetadata::of_list(parts.map(|part| part.map(of)))
    }

    pub fn forward(inputs: &LinearInputsMetadata, call: &LinearCall) -> LinearOutputMetadata {
        let (shape, dtype) = (&inputs.x.shape, call.dtype.into());
        let weights: Vec<_> = inputs.weights.list().into_iter().flatten().collect();
        let width = weights.iter().map(|weight| weight.shape[1]).sum();
        let rows = || TensorSpec::new(with_width(shape, width), dtype);
        let out = match call.form {
            LinearForm::Rows => [Some(rows()), None, None],
            LinearForm::Activated { keep, .. } => [Some(rows()), keep.then(rows), None],
            LinearForm::Gated(_) => {
                let half = with_width(shape, weights[0].shape[1]);
                [Some(TensorSpec::new(half, dtype)), None, None]
            }
            LinearForm::FromHeads => {
                let out = [shape[0], shape[2], width];
                [Some(TensorSpec::new(out.into(), dtype)), None, None]
            }
            LinearForm::ToHeads(_) => [const { None }; 3],
        };
        let is_joined = weights.len() > 1 || weights.iter().any(|weight| weight.dtype != dtype);
        let is_joined = is_joined && call.for_backward;
        let is_rounded =
            call.form != LinearForm::FromHeads && inputs.x.dtype != dtype && call.for_backward;
        let joined = || TensorSpec::new([weights[0].shape[0], width].into(), dtype);
        let rounded = || TensorSpec::new(shape.clone(), dtype);
        LinearOutputMetadata {
            out: match call.form {
                LinearForm::ToHeads(parts) => by_heads([shape[0], shape[1]], parts, dtype),
                _ => ThreeFloatsMetadata::of_list(out),
            },
            rounded: is_rounded.then(rounded).into(),
            joined: is_joined.then(joined).into(),
        }
    }

    pub fn backward(saved: &LinearSavedMetadata, task: &LinearTask) -> LinearGradsMetadata {
        let grad = &saved.grad.shape;
        let x = match task.heads {
            Some((heads, dim)) => [grad[0], heads, grad[1], dim].into(),
            None => with_width(grad, task.inputs),
        };
        let weights = task.weights.map(|weight| {
            let (width, dtype) = weight?;
            Some(TensorSpec::new([task.inputs, width].into(), dtype?.into()))
        });
        LinearGradsMetadata {
            x: (task.x)
                .map(|dtype| TensorSpec::new(x, dtype.into()))
                .into(),
            weights: ThreeFloatsMetadata::of_list(weights),
        }
    }

    pub fn activation(
        like: &TensorSpec,
        bias: Option<FloatDType>,
        [x, y]: [bool; 2],
    ) -> ActivationGradsMetadata {
        let width = like.shape[like.shape.num_dims() - 1];
        let bias = bias.map(|dtype| TensorSpec::new([width].into(), dtype.into()));
        ActivationGradsMetadata {
            x: x.then(|| like.clone()).into(),
            bias: bias.into(),
            y: y.then(|| like.clone()).into(),
        }
    }

    pub fn join(_tensors: &ThreeFloatsMetadata, call: &JoinCall) -> BiasedRowsMetadata {
        let ([batch, seq], width) = (call.rows, call.width());
        let bias = (call.bias).map(|dtype| TensorSpec::new([width].into(), dtype.into()));
        BiasedRowsMetadata {
            x: TensorSpec::new([batch, seq, width].into(), call.dtype.into()),
            bias: bias.into(),
        }
    }
}
