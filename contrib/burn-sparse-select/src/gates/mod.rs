//! Sums of branches, each times a gate per row.
pub(crate) mod backend;
#[doc(hidden)]
pub mod ops;

use crate::gates::ops::{GateOps, GatedInputs, MOST_BRANCHES};
use burn_blocksparse::internal::prelude::*;

/// Computes `Σ gate · branch` in the branches' dtype, in f32 (f64 for f64) from gates of any float dtype, and rounds once. A missing branch counts as 0, and
/// its gates have gradients of 0. Deterministic.
///
/// This is one node of the autodiff graph, whose backward pass reads the gradient and the branches once. Callers check shapes and devices.
///
/// # Shapes
/// - `branches` and result: `[batch, heads, seq, width]`, at least one branch
/// - `gates`: `[batch, heads, seq, 3]`
pub(crate) fn gated_sum(
    branches: [Option<Tensor<4>>; MOST_BRANCHES],
    gates: Tensor<4>,
) -> Tensor<4> {
    let branches = branches.map(|branch| branch.map(Tensor::into_dispatch));
    let inputs = GatedInputs {
        branches: ThreeFloats::of_list(branches),
        gates: gates.into_dispatch(),
    };
    Tensor::from_dispatch(<burn::backend::Dispatch as GateOps>::gated_sum(inputs))
}

/// Returns the plan of [`gated_sum`] and its backward pass, for branches like `branch`.
#[cfg_attr(not(feature = "cube"), allow(unused_variables))]
pub(crate) fn gated_plan(branch: &Tensor<4>, gates: &Tensor<4>) -> OpPlan {
    burn_blocksparse::op_plan!(&branch.device(), |device| {
        let [.., width] = branch.dims();
        let dtypes = [branch.dtype(), gates.dtype()];
        crate::gates::backend::text(device, width, dtypes)
    })
}
