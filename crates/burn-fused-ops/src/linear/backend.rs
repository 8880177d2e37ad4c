//! Linear layers on CubeCL devices.

use crate::by_kernels::by_kernels;
use crate::linear::activation::kernels as activations;
use crate::linear::activation::kind::Activation;
use crate::linear::cube_products::Kernels;
use crate::linear::few_rows;
use crate::linear::fused;
use crate::linear::heads::kernels as heads;
use crate::linear::heads::reference;
use crate::linear::ops::{LinearOps, composed_backward, composed_forward, composed_outer_backward};
use crate::linear::products::Primitives;
use crate::linear::values::{
    ActivationGrads, ActivationSaved, ActivationTask, BiasedRows, HeadParts, JoinCall, Joined,
    LinearCall, LinearForm, LinearGrads, LinearInputs, LinearOutput, LinearSaved, LinearTask,
    MlpOuterSaved, MlpOuterTask,
};
use crate::linear::wgmma;
use burn_blocksparse::internal::cube::*;
use burn_blocksparse::internal::prelude::*;

/// Returns the kernel of the products of a layer of `[rows, inputs, outputs]`, or why Burn's matmul runs instead.
pub(crate) fn text(
    device: &CubeDevice,
    dtype: DType,
    lengths: [usize; 3],
) -> Result<String, String> {
    let text = wgmma::text(device, dtype, lengths);
    let text = text.map_err(|why| format!("not on wgmma or mma.sync: {why}"));
    let [rows, inputs, outputs] = lengths;
    match few_rows::text(device, dtype.into(), [rows, inputs], &[outputs]) {
        Some(few) => Ok(format!("{}; {few}", text.unwrap_or_else(|why| why))),
        None => text,
    }
}

impl LinearOps for CubeBackend {
    fn linear_forward(inputs: LinearInputs<Self>, call: LinearCall) -> LinearOutput<Self> {
        if uses_reference() {
            return composed_forward::<Self, Primitives>(inputs, call);
        }
        if let Some(made) = few_rows::forward(&inputs, call) {
            return made;
        }
        let is_fused = match call.form {
            LinearForm::Rows | LinearForm::Gated(_) => false,
            LinearForm::FromHeads => FloatDType::from(inputs.x.dtype) == call.dtype,
            _ => true,
        };
        if is_fused && wgmma::is_half(call.dtype) {
            return fused::forward(inputs, call);
        }
        composed_forward::<Self, Kernels>(inputs, call)
    }

    fn linear_backward(saved: LinearSaved<Self>, task: LinearTask) -> LinearGrads<Self> {
        if uses_reference() {
            return composed_backward::<Self, Primitives>(saved, task);
        }
        if let Some(heads) = task.heads.filter(|_| wgmma::is_half(task.dtype)) {
            return fused::backward_of_heads(saved, heads, task);
        }
        composed_backward::<Self, Kernels>(saved, task)
    }

    fn bias_activation(inputs: BiasedRows<Self>, activation: Activation) -> CubeTensor {
        activations::bias_activation(inputs, activation)
    }

    fn bias_activation_backward(
        saved: ActivationSaved<Self>,
        activation: Activation,
        task: ActivationTask,
    ) -> ActivationGrads<Self> {
        activations::bias_activation_backward(saved, activation, task)
    }

    fn split_heads(inputs: BiasedRows<Self>, parts: HeadParts) -> ThreeFloats<Self> {
        by_kernels(|| heads::split(&inputs, parts))
            .unwrap_or_else(|| reference::split::<Self>(inputs, parts))
    }

    fn join_heads(tensors: ThreeFloats<Self>, call: JoinCall) -> Joined<Self> {
        by_kernels(|| heads::join(tensors.clone(), &call))
            .unwrap_or_else(|| reference::join::<Self>(tensors, &call))
    }

    fn mlp_outer_backward(saved: MlpOuterSaved<Self>, task: MlpOuterTask) -> ActivationGrads<Self> {
        match uses_reference() || !wgmma::is_half(task.dtype) {
            true => composed_outer_backward::<Self>(saved, task),
            false => fused::outer_backward(saved, task),
        }
    }
}
