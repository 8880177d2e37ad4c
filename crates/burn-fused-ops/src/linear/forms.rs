//! The forms of a product, in the operations of products, activations and heads.

use burn::backend::TensorMetadata;
use burn::backend::tensor::FloatTensor;

use crate::linear::activation::kind::Activation;
use crate::linear::ops::LinearOps;
use crate::linear::products;
use crate::linear::products::{Products, rounded};
use crate::linear::values::{
    BiasedRows, HeadParts, JoinCall, LinearCall, LinearForm, LinearGrads, LinearInputs,
    LinearOutput, LinearSaved, LinearTask,
};
use burn_blocksparse::internal::values::{OptFloat, ThreeFloats};

/// One tensor by heads.
pub(crate) fn one_part((heads, dim): (usize, usize)) -> HeadParts {
    [Some((heads, dim)), None, None]
}

/// A tensor by heads as rows.
fn rows<B: LinearOps>(x: FloatTensor<B>) -> FloatTensor<B> {
    let [batch, heads, seq, dim] = x.shape().dims();
    let call = JoinCall {
        rows: [batch, seq],
        parts: one_part((heads, dim)),
        dtype: x.dtype().into(),
        bias: None,
    };
    B::join_heads(ThreeFloats::one(x), call).x
}

/// A bias and an activation, if there is either.
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

/// In these operations, of products as `P` makes them where the form is of rows.
pub(crate) fn forward<B: LinearOps, P: Products<B>>(
    inputs: LinearInputs<B>,
    call: LinearCall,
) -> LinearOutput<B> {
    let LinearInputs { x, weights, bias } = inputs;
    if call.form == LinearForm::Rows {
        return products::forward::<B, P>(x, weights, call.dtype).of(call);
    }
    let product = |x, weights| {
        let inputs = LinearInputs::new(x, weights);
        let form = LinearForm::Rows;
        B::linear_forward(inputs, LinearCall { form, ..call })
    };
    match call.form {
        LinearForm::Rows => product(x, weights),
        LinearForm::Activated { activation, keep } => {
            let made = product(x, weights);
            let first = made.out.into_one();
            let hidden = keep.then(|| first.clone());
            // In place, where nobody keeps what comes in.
            let active = between::<B>(first, bias, activation);
            LinearOutput {
                out: ThreeFloats::of_list([Some(active), hidden, None]),
                ..made
            }
        }
        LinearForm::Gated(activation) => {
            let ThreeFloats { first, second, .. } = weights;
            let half = |weight: OptFloat<B>| {
                let weight = ThreeFloats::one(weight.into_option().expect("two weights"));
                let inputs = LinearInputs::new(x.clone(), weight);
                B::linear_forward(inputs, LinearCall::rows(call.dtype))
                    .out
                    .into_one()
            };
            let gate = between::<B>(half(first), OptFloat::None, activation);
            LinearOutput::one(B::float_mul(gate, half(second)))
        }
        LinearForm::ToHeads(parts) => {
            let made = product(x, weights);
            let x = made.out.into_one();
            LinearOutput {
                out: B::split_heads(BiasedRows { x, bias }, parts),
                ..made
            }
        }
        LinearForm::FromHeads => LinearOutput {
            rounded: OptFloat::None,
            ..product(rows::<B>(x), weights)
        },
    }
}

/// The gradients by the factors of a product.
pub(crate) fn backward<B: LinearOps, P: Products<B>>(
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
    let by_x = x.into_option().map(|x| {
        let bias = OptFloat::None;
        B::split_heads(BiasedRows { x, bias }, one_part(heads)).into_one()
    });
    LinearGrads {
        x: by_x.into(),
        weights,
    }
}
