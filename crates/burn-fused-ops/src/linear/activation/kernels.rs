//! Activations on CubeCL devices.

use crate::kernels::rows;
use crate::kernels::rows::activation::ActivationBackward;
use blocksparse_cubecl::rows::ActivationKind;

use crate::linear::activation::kind::Activation;
use crate::linear::activation::reference;
use crate::linear::values::{ActivationGrads, ActivationSaved, ActivationTask, BiasedRows};
use burn_blocksparse::internal::cube::*;
use burn_blocksparse::internal::prelude::*;

pub(crate) fn kind(activation: Activation) -> ActivationKind {
    match activation {
        Activation::None => ActivationKind::None,
        Activation::GeluSigmoid => ActivationKind::GeluSigmoid,
        Activation::GeluTanh => ActivationKind::GeluTanh,
        Activation::GeluErf => ActivationKind::GeluErf,
        Activation::Relu => ActivationKind::Relu,
        Activation::Silu => ActivationKind::Silu,
    }
}

/// Describes the launches of a call.
pub(crate) fn text(
    device: &CubeDevice,
    matrix: [usize; 2],
    dtype: DType,
    activation: Activation,
) -> Result<String, KernelError> {
    let element = dtype_to_elem_type(dtype);
    rows::activation_text(&device.client(), matrix, element, kind(activation))
}

pub(crate) fn bias_activation(
    inputs: BiasedRows<CubeBackend>,
    activation: Activation,
) -> CubeTensor {
    if uses_reference() {
        return reference::forward::<CubeBackend>(inputs, activation);
    }
    let x = into_contiguous(inputs.x);
    let bias = contiguous(inputs.bias);
    // The result overwrites x if no one else holds it.
    let y = match x.can_mut() {
        true => x.clone(),
        false => empty_like(&x, x.dtype),
    };
    let result = rows::bias_activation(
        &x.client,
        typed(&x),
        bias.as_ref().map(typed),
        &y.handle,
        matrix(x.meta.shape()),
        kind(activation),
    );
    match result {
        Ok(()) => y,
        Err(_) => reference::forward::<CubeBackend>(BiasedRows::new(x, bias), activation),
    }
}

pub(crate) fn bias_activation_backward(
    saved: ActivationSaved<CubeBackend>,
    activation: Activation,
    task: ActivationTask,
) -> ActivationGrads<CubeBackend> {
    if uses_reference() {
        return reference::backward::<CubeBackend>(saved, activation, task);
    }
    let ActivationSaved { x, bias, grad } = saved;
    let [x, bias] = [x, bias].map(contiguous);
    let grad = into_contiguous(grad);
    // The results overwrite the gradient and x if no one else holds them.
    let in_place = [grad.can_mut(), x.as_ref().is_some_and(CubeTensor::can_mut)];
    match backward(x.as_ref(), bias.as_ref(), &grad, activation, task, in_place) {
        Ok(grads) => grads,
        Err(_) => {
            let [x, bias] = [x, bias].map(OptFloat::from);
            let saved = ActivationSaved { x, bias, grad };
            reference::backward::<CubeBackend>(saved, activation, task)
        }
    }
}

fn backward(
    x: Option<&CubeTensor>,
    bias: Option<&CubeTensor>,
    grad: &CubeTensor,
    activation: Activation,
    task: ActivationTask,
    in_place: [bool; 2],
) -> Result<ActivationGrads<CubeBackend>, KernelError> {
    let [rows, width] = matrix(grad.meta.shape());
    let dx = task
        .x
        .then(|| match in_place[0] || activation == Activation::None {
            true => grad.clone(),
            false => empty_like(grad, grad.dtype),
        });
    let y = (x.filter(|_| task.y)).map(|x| match in_place[1] {
        true => x.clone(),
        false => empty_like(x, x.dtype),
    });
    let sums = task.bias.map(|dtype| empty(grad, [width], dtype.into()));
    let pass = ActivationBackward {
        activation: kind(activation),
        x: x.map(|x| &x.handle),
        bias: bias.map(typed),
        dy: typed(grad),
        // Without an activation, the gradient with respect to x is the incoming one.
        dx: (dx.as_ref())
            .filter(|_| activation != Activation::None)
            .map(|dx| &dx.handle),
        y: y.as_ref().map(|y| &y.handle),
        sums: sums.as_ref().map(typed),
    };
    rows::bias_activation_backward(&grad.client, [rows, width], &pass)?;
    Ok(ActivationGrads {
        x: dx.into(),
        bias: sums.into(),
        y: y.into(),
    })
}
