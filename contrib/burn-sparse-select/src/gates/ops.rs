//! Backend trait of gated sums, its values, and a reference in Burn's operations.

use burn_blocksparse::internal::prelude::*;

/// Maximum number of branches, that of [`ThreeFloats`].
pub const MOST_BRANCHES: usize = 3;

op_values! {
    /// Branches and gates of a gated sum.
    pub struct GatedInputs {
        /// `[batch, heads, seq, width]` each, at least one.
        pub branches: ThreeFloats,
        /// `[batch, heads, seq, 3]`, in any float dtype.
        pub gates: FloatTensor,
    }
}

#[cfg(feature = "autodiff")]
impl<B: Backend> GatedInputs<B> {
    /// Returns the branches, then the gates.
    pub fn into_list(self) -> [Option<FloatTensor<B>>; MOST_BRANCHES + 1] {
        let [first, second, third] = self.branches.into_list();
        [first, second, third, Some(self.gates)]
    }

    /// Inverts [`Self::into_list`].
    pub fn of_list(list: [Option<FloatTensor<B>>; MOST_BRANCHES + 1]) -> Self {
        let [first, second, third, gates] = list;
        Self {
            branches: ThreeFloats::of_list([first, second, third]),
            gates: gates.expect("gates"),
        }
    }
}

op_values! {
    /// Tensors saved for the backward pass.
    pub struct GatedSaved {
        /// Inputs of the forward pass.
        pub inputs: GatedInputs,
        /// Gradient with respect to the result.
        pub grad: FloatTensor,
    }

    /// Gradients that were requested, each with its input's shape and dtype.
    pub struct GatedGrads {
        /// Gradients with respect to the branches that are present.
        pub branches: ThreeFloats,
        /// `[batch, heads, seq, 3]`, 0 for missing branches.
        pub gates: OptFloat,
    }
}

/// Gradients that the backward pass computes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct GatedTask {
    /// True for branches whose gradients are wanted.
    pub branches: [bool; MOST_BRANCHES],
    /// True if the gates' gradient is wanted.
    pub gates: bool,
}

/// Sums of branches with gates per row, as a backend operation. The callers check the arguments.
#[backend_extension(
    Flex: cfg(feature = "flex"),
    NdArray: cfg(feature = "ndarray"),
    Cube: cfg(feature = "cube"),
    Autodiff: cfg(feature = "autodiff"),
    Fusion: cfg(feature = "fusion"),
)]
pub trait GateOps: Backend {
    /// Computes `Σ gate · branch` in the branches' dtype.
    #[fusion(meta = meta::forward)]
    fn gated_sum(#[extension_type] inputs: GatedInputs<Self>) -> FloatTensor<Self> {
        reference_sum::<Self>(inputs)
    }

    /// Computes the backward pass: the gradients that `task` requests.
    #[fusion(meta = meta::backward)]
    fn gated_sum_backward(
        #[extension_type] saved: GatedSaved<Self>,
        task: GatedTask,
    ) -> GatedGrads<Self> {
        reference_gradients::<Self>(saved, task)
    }
}

reference_backends!(GateOps);

/// Returns the gates of each branch, `[batch, heads, seq, 1]`, in the accumulation dtype.
fn columns<B: Backend>(gates: FloatTensor<B>, sums: FloatDType) -> [Array<B>; MOST_BRANCHES] {
    let gates = Array::<B>(gates).cast(sums);
    [0, 1, 2].map(|branch| gates.clone().narrow(3, branch..branch + 1))
}

pub(crate) fn reference_sum<B: Backend>(inputs: GatedInputs<B>) -> FloatTensor<B> {
    let branches = inputs.branches.into_list();
    let first = branches.iter().flatten().next().expect("one branch");
    let dtype = FloatDType::from(first.dtype());
    let shape = first.shape();
    if shape.num_elements() == 0 {
        // Slicing an empty tensor may start beyond its end, which Flex does not accept.
        return B::float_zeros(shape, &first.device(), dtype);
    }
    let sums = accumulate_in(dtype);
    let parts = branches.into_iter().zip(columns::<B>(inputs.gates, sums));
    let parts = parts.filter_map(|(branch, gate)| Some(Array::<B>(branch?).cast(sums) * gate));
    let sum = parts.reduce(|a, b| a + b).expect("one branch");
    sum.cast(dtype).0
}

pub(crate) fn reference_gradients<B: Backend>(
    saved: GatedSaved<B>,
    task: GatedTask,
) -> GatedGrads<B> {
    let GatedSaved { inputs, grad } = saved;
    let grad = Array::<B>(grad);
    let (dtype, device) = (grad.dtype(), grad.0.device());
    let gate_dtype = FloatDType::from(inputs.gates.dtype());
    let branches = inputs.branches.into_list();
    let wanted = |branch: usize, there: bool| task.branches[branch] && there;
    if grad.shape().num_elements() == 0 {
        let zeros = |shape, dtype| B::float_zeros(shape, &device, dtype);
        let by_branches = [0, 1, 2].map(|at| {
            let is_wanted = wanted(at, branches[at].is_some());
            is_wanted.then(|| zeros(grad.shape(), dtype))
        });
        let by_gates = task.gates.then(|| zeros(inputs.gates.shape(), gate_dtype));
        return GatedGrads {
            branches: ThreeFloats::of_list(by_branches),
            gates: by_gates.into(),
        };
    }
    let sums = accumulate_in(dtype);
    let grad = grad.cast(sums);
    let [batch, heads, seq, _] = grad.dims();
    let mut by_gates = Vec::new();
    let mut by_branches = [const { None }; MOST_BRANCHES];
    let gates = columns::<B>(inputs.gates, sums);
    for (at, (branch, gate)) in branches.into_iter().zip(gates).enumerate() {
        if wanted(at, branch.is_some()) {
            by_branches[at] = Some((grad.clone() * gate).cast(dtype).0);
        }
        if task.gates {
            by_gates.push(match branch {
                Some(branch) => (Array::<B>(branch).cast(sums) * &grad).sum_dim(3),
                None => Array::zeros([batch, heads, seq, 1], &device, sums),
            });
        }
    }
    let by_gates = (task.gates).then(|| Array::cat(by_gates, 3).cast(gate_dtype).0);
    GatedGrads {
        branches: ThreeFloats::of_list(by_branches),
        gates: by_gates.into(),
    }
}

/// Output shapes and dtypes for fusion.
#[cfg(feature = "fusion")]
mod meta {
    use super::*;
    use burn_blocksparse::internal::values::ThreeFloatsMetadata;

    pub fn forward(inputs: &GatedInputsMetadata) -> TensorSpec {
        let there = inputs.branches.list().into_iter().flatten().next();
        there.expect("one branch").clone()
    }

    pub fn backward(saved: &GatedSavedMetadata, task: &GatedTask) -> GatedGradsMetadata {
        let branches = saved.inputs.branches.list();
        let wanted = |at: usize| branches[at].is_some() && task.branches[at];
        let branches = std::array::from_fn(|at| wanted(at).then(|| saved.grad.clone()));
        GatedGradsMetadata {
            branches: ThreeFloatsMetadata::of_list(branches),
            gates: task.gates.then(|| saved.inputs.gates.clone()).into(),
        }
    }
}
