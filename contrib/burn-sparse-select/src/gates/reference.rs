//! Sums of gated branches in Burn's primitives.

use burn::backend::tensor::FloatTensor;
use burn::backend::{Backend, TensorMetadata};
use burn::tensor::{FloatDType, Shape};

use crate::gates::values::{GatedGrads, GatedInputs, GatedSaved, GatedTask, MOST_BRANCHES};
use burn_blocksparse::internal::dtype::accumulate_in;
use burn_blocksparse::internal::prelude::Array;
use burn_blocksparse::internal::values::ThreeFloats;

/// The gates of each branch, `[batch, heads, seq, 1]`, in the dtype of sums.
fn columns<B: Backend>(
    gates: FloatTensor<B>,
    sums: FloatDType,
) -> impl Iterator<Item = FloatTensor<B>> {
    let gates = Array::<B>(gates).cast(sums);
    (0..MOST_BRANCHES).map(move |branch| gates.clone().narrow(3, branch..branch + 1).0)
}

pub(crate) fn forward<B: Backend>(inputs: GatedInputs<B>) -> FloatTensor<B> {
    let branches = inputs.branches.into_list();
    let first = branches.iter().flatten().next().expect("one branch");
    let dtype = FloatDType::from(first.dtype());
    let shape = first.shape();
    if shape.num_elements() == 0 {
        // A slice of a tensor without numbers may begin behind its end, which Flex does not read.
        return B::float_zeros(shape, &first.device(), dtype);
    }
    let sums = accumulate_in(dtype);
    let parts = branches.into_iter().zip(columns::<B>(inputs.gates, sums));
    let parts = parts.filter_map(|(branch, gate)| {
        let branch = B::float_cast(branch?, sums);
        Some(B::float_mul(branch, gate))
    });
    let sum = parts.reduce(B::float_add).expect("one branch");
    B::float_cast(sum, dtype)
}

pub(crate) fn backward<B: Backend>(saved: GatedSaved<B>, task: GatedTask) -> GatedGrads<B> {
    let GatedSaved { inputs, grad } = saved;
    let dtype = FloatDType::from(grad.dtype());
    let gate_dtype = FloatDType::from(inputs.gates.dtype());
    let (shape, device) = (grad.shape(), grad.device());
    let [batch, heads, seq, _] = shape.dims();
    let branches = inputs.branches.into_list();
    let wanted = |branch: usize, there: bool| task.branches[branch] && there;
    if shape.num_elements() == 0 {
        let there = branches.each_ref().map(Option::is_some);
        let zeros = |shape: Shape, dtype| B::float_zeros(shape, &device, dtype);
        let by_branches =
            [0, 1, 2].map(|at| wanted(at, there[at]).then(|| zeros(shape.clone(), dtype)));
        let by_gates = task.gates.then(|| zeros(inputs.gates.shape(), gate_dtype));
        return GatedGrads {
            branches: ThreeFloats::of_list(by_branches),
            gates: by_gates.into(),
        };
    }
    let sums = accumulate_in(dtype);
    let grad = B::float_cast(grad, sums);
    let mut by_gates = Vec::new();
    let mut by_branches = [const { None }; MOST_BRANCHES];
    let gates = columns::<B>(inputs.gates, sums);
    for (at, (branch, gate)) in branches.into_iter().zip(gates).enumerate() {
        if wanted(at, branch.is_some()) {
            let by_branch = B::float_mul(grad.clone(), gate);
            by_branches[at] = Some(B::float_cast(by_branch, dtype));
        }
        if task.gates {
            by_gates.push(match branch {
                Some(branch) => {
                    let product = B::float_mul(B::float_cast(branch, sums), grad.clone());
                    B::float_sum_dim(product, 3)
                }
                None => B::float_zeros(Shape::new([batch, heads, seq, 1]), &device, sums),
            });
        }
    }
    let by_gates = (task.gates).then(|| B::float_cast(B::float_cat(by_gates, 3), gate_dtype));
    GatedGrads {
        branches: ThreeFloats::of_list(by_branches),
        gates: by_gates.into(),
    }
}
