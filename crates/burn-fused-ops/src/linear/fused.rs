//! Products on tensor cores with fused prologues and epilogues.

use blocksparse_cubecl::rows::column_sums;
use burn::backend::ops::FloatTensorOps;

use crate::linear::activation::kernels::kind;
use crate::linear::cube_products::Kernels;
use crate::linear::ops::{composed_backward, composed_forward, composed_outer_backward, one_part};
use crate::linear::products::{Products, factors, rounded, with_width};
use crate::linear::values::{
    ActivationGrads, LinearCall, LinearForm, LinearGrads, LinearInputs, LinearOutput, LinearSaved,
    LinearTask, MlpOuterSaved, MlpOuterTask,
};
use crate::linear::wgmma;
use burn_blocksparse::internal::cube::*;
use burn_blocksparse::internal::prelude::*;

/// Reshapes a matrix to `[.., width]` with the leading dimensions of `like`.
fn shaped(matrix: CubeTensor, like: &Shape) -> CubeTensor {
    let shape = with_width(like, matrix.meta.shape()[1]);
    reshaped(matrix, shape)
}

/// Computes a half-precision product in any form but `Rows`. An x by heads has the product's dtype.
pub(crate) fn forward(
    inputs: LinearInputs<CubeBackend>,
    call: LinearCall,
) -> LinearOutput<CubeBackend> {
    let LinearInputs { x, weights, bias } = inputs;
    let ([x, weight], [is_rounded, is_joined]) =
        factors::<CubeBackend, Kernels>(x, weights, call.dtype);
    let x = into_contiguous(x);
    let bias = contiguous(bias);
    let shape = x.meta.shape().clone();
    let made = match call.form {
        LinearForm::Rows | LinearForm::Gated(_) => None,
        LinearForm::Activated { activation, keep } => {
            let lhs = as_matrix(x.clone());
            let made = wgmma::activated([&lhs, &weight], bias.as_ref(), kind(activation), keep);
            made.map(|[active, hidden]| {
                let [active, hidden] = [active, hidden].map(|made| Some(shaped(made?, &shape)));
                [active, hidden, None]
            })
        }
        LinearForm::ToHeads(parts) => {
            let lhs = as_matrix(x.clone());
            wgmma::by_heads([&lhs, &weight], bias.as_ref(), [shape[0], shape[1]], parts)
        }
        LinearForm::FromHeads => wgmma::of_heads(&x, &weight).map(|out| {
            let width = out.meta.shape()[1];
            let rows = Shape::new([shape[0], shape[2], width]);
            [Some(CubeBackend::float_reshape(out, rows)), None, None]
        }),
    };
    let out = match made {
        Some(made) => ThreeFloats::of_list(made),
        None => {
            let inputs = LinearInputs {
                x: x.clone(),
                weights: ThreeFloats::one(weight.clone()),
                bias: bias.into(),
            };
            composed_forward::<CubeBackend, Kernels>(inputs, call).out
        }
    };
    LinearOutput {
        out,
        rounded: is_rounded.then_some(x).into(),
        joined: is_joined.then_some(weight).into(),
    }
    .of(call)
}

/// Computes the gradients with respect to the factors of a half-precision product with x by heads.
pub(crate) fn backward_of_heads(
    saved: LinearSaved<CubeBackend>,
    heads: (usize, usize),
    task: LinearTask,
) -> LinearGrads<CubeBackend> {
    let LinearSaved { x, weight, grad } = saved;
    let grad = into_contiguous(grad);
    let [batch, seq, outputs] = grad.meta.shape().dims();
    let rows = as_matrix(grad.clone());
    let weight = weight.into_option();
    let mut by_x = None;
    if let (Some(dtype), Some(weight)) = (task.x, &weight)
        && dtype == task.dtype
    {
        let weight = CubeBackend::float_swap_dims(weight.clone(), 0, 1);
        let parts = one_part(heads);
        let made = wgmma::by_heads([&rows, &weight], None, [batch, seq], parts);
        by_x = made.and_then(|[first, _, _]| first);
    }
    let x = x.into_option();
    let [of_weight, _, _] = task.weights;
    let of_weight = of_weight.and_then(|(_, dtype)| dtype);
    let mut by_weight = None;
    if let (Some(dtype), Some(x)) = (of_weight, &x)
        && FloatDType::from(x.dtype) == task.dtype
    {
        let x = into_contiguous(x.clone());
        by_weight = wgmma::parts_of_heads(&x, &rows).map(|parts| {
            let sum = Kernels::sum_matrices(parts, &[outputs]).remove(0);
            rounded::<CubeBackend>(sum, dtype)
        });
    }
    drop(rows);
    // Gradients that the kernel did not compute.
    let rest = LinearTask {
        x: task.x.filter(|_| by_x.is_none()),
        weights: [
            Some((outputs, of_weight.filter(|_| by_weight.is_none()))),
            None,
            None,
        ],
        ..task
    };
    if rest.x.is_some() || rest.by_weights() {
        let x = x.filter(|_| rest.by_weights());
        let saved = LinearSaved::new(x, weight.filter(|_| rest.x.is_some()), grad);
        let made = composed_backward::<CubeBackend, Kernels>(saved, rest);
        by_x = by_x.or(made.x.into_option());
        by_weight = by_weight.or(made.weights.first.into_option());
    }
    LinearGrads {
        x: by_x.into(),
        weights: ThreeFloats::of_list([by_weight, None, None]),
    }
}

/// Computes the backward pass from the output of a half-precision feed-forward network to the input of its activation.
pub(crate) fn outer_backward(
    saved: MlpOuterSaved<CubeBackend>,
    task: MlpOuterTask,
) -> ActivationGrads<CubeBackend> {
    let hidden = into_contiguous(saved.hidden);
    let bias = contiguous(saved.bias);
    let (outer, grad) = (saved.outer, into_contiguous(saved.grad));
    // The activation overwrites `hidden` if no one else holds it.
    let in_place = hidden.can_mut();
    let shape = hidden.meta.shape().clone();
    let rows = as_matrix(grad.clone());
    let made = wgmma::through(
        [&rows, &outer],
        &hidden,
        bias.as_ref(),
        kind(task.activation),
        [task.bias.is_some(), task.active, in_place],
    );
    drop(rows);
    let Some(made) = made else {
        let saved = MlpOuterSaved {
            hidden,
            bias: bias.into(),
            outer,
            grad,
        };
        return composed_outer_backward::<CubeBackend>(saved, task);
    };
    let by_bias = match (task.bias, made.totals) {
        (Some(dtype), Some(totals)) => {
            let [rows, width] = totals.meta.shape().dims();
            let sums = empty(&totals, [width], dtype.into());
            let result = column_sums(&totals.client, typed(&totals), [rows, width], typed(&sums));
            // Sums of f32 and half precision are supported everywhere.
            result.unwrap_or_else(|error| panic!("mlp: sums over rows: {error}"));
            OptFloat::Some(sums)
        }
        _ => OptFloat::None,
    };
    ActivationGrads {
        x: OptFloat::Some(shaped(made.grad, &shape)),
        bias: by_bias,
        y: made.active.map(|active| shaped(active, &shape)).into(),
    }
}
