//! Gated sums on each backend, and their step in Burn's autodiff graph.

#[cfg(any(
    feature = "flex",
    feature = "ndarray",
    feature = "cube",
    feature = "autodiff"
))]
use crate::gates::ops::GateOps;

#[cfg(feature = "flex")]
impl GateOps for burn::backend::Flex {}

#[cfg(feature = "ndarray")]
impl GateOps for burn::backend::NdArray {}

#[cfg(feature = "cube")]
pub(crate) use kernels::text;

#[cfg(feature = "cube")]
mod kernels {
    use crate::kernels::rows;
    use crate::kernels::rows::gates::GatedBackward;
    use blocksparse_cubecl::KernelError;
    use burn::backend::cubecl::dtype_to_elem_type;
    use burn::tensor::DType;
    use burn_cubecl::kernel::into_contiguous;
    use burn_cubecl::tensor::CubeTensor;
    use burn_cubecl::{CubeBackend, CubeDevice};

    use super::GateOps;
    use crate::gates::reference;
    use crate::gates::values::{GatedGrads, GatedInputs, GatedSaved, GatedTask, MOST_BRANCHES};
    use burn_blocksparse::internal::cube::{empty, filled, matrix, shaped, typed, uses_reference};
    use burn_blocksparse::internal::values::ThreeFloats;

    /// How a call is launched.
    pub(crate) fn text(
        device: &CubeDevice,
        width: usize,
        dtypes: [DType; 2],
    ) -> Result<String, KernelError> {
        let types = dtypes.map(dtype_to_elem_type);
        rows::gated_text(&device.client(), width, MOST_BRANCHES, types)
    }

    /// The inputs of a call, contiguous.
    struct Inputs {
        branches: [Option<CubeTensor>; MOST_BRANCHES],
        gates: CubeTensor,
    }

    impl Inputs {
        fn new(inputs: GatedInputs<CubeBackend>) -> Self {
            let branches = inputs.branches.into_list();
            Self {
                branches: branches.map(|branch| branch.map(into_contiguous)),
                gates: into_contiguous(inputs.gates),
            }
        }

        fn back(self) -> GatedInputs<CubeBackend> {
            GatedInputs {
                branches: ThreeFloats::of_list(self.branches),
                gates: self.gates,
            }
        }

        fn forward(&self) -> Result<CubeTensor, KernelError> {
            let there = || self.branches.iter().flatten();
            let first = there().next().expect("one branch");
            // Where nobody else has a branch, the result takes its place.
            let out = match there().find(|branch| branch.can_mut()) {
                Some(branch) => branch.clone(),
                None => shaped(first, first.meta.shape().clone(), first.dtype),
            };
            let branches = (self.branches.each_ref()).map(|x| x.as_ref().map(|x| &x.handle));
            let matrix = matrix(out.meta.shape());
            rows::gated_sum(
                &out.client,
                &branches,
                typed(&self.gates),
                typed(&out),
                matrix,
            )?;
            Ok(out)
        }

        fn backward(
            &self,
            grad: &CubeTensor,
            in_place: bool,
            task: GatedTask,
        ) -> Result<GatedGrads<CubeBackend>, KernelError> {
            let [rows, width] = matrix(grad.meta.shape());
            let wanted = [0, 1, 2].map(|at| task.branches[at] && self.branches[at].is_some());
            let last = wanted.iter().rposition(|wanted| *wanted);
            let by_branches = [0, 1, 2].map(|at| {
                wanted[at].then(|| match in_place && last == Some(at) {
                    true => grad.clone(),
                    false => shaped(grad, grad.meta.shape().clone(), grad.dtype),
                })
            });
            let by_gates = task.gates.then(|| {
                let (shape, dtype) = (self.gates.meta.shape().dims::<4>(), self.gates.dtype);
                match width {
                    // Sums of nothing.
                    0 => filled(grad, shape, 0.0, dtype),
                    _ => empty(grad, shape, dtype),
                }
            });
            let branches = (self.branches.each_ref()).map(|x| x.as_ref().map(|x| &x.handle));
            let written = by_branches
                .each_ref()
                .map(|x| x.as_ref().map(|x| &x.handle));
            let pass = GatedBackward {
                grad: typed(grad),
                branches: &branches,
                gates: typed(&self.gates),
                by_branches: &written,
                by_gates: by_gates.as_ref().map(|x| &x.handle),
            };
            rows::gated_sum_backward(&grad.client, [rows, width], &pass)?;
            Ok(GatedGrads {
                branches: ThreeFloats::of_list(by_branches),
                gates: by_gates.into(),
            })
        }
    }

    impl GateOps for CubeBackend {
        fn gated_sum(inputs: GatedInputs<Self>) -> CubeTensor {
            if uses_reference() {
                return reference::forward::<Self>(inputs);
            }
            let inputs = Inputs::new(inputs);
            (inputs.forward()).unwrap_or_else(|_| reference::forward::<Self>(inputs.back()))
        }

        fn gated_sum_backward(saved: GatedSaved<Self>, task: GatedTask) -> GatedGrads<Self> {
            if uses_reference() {
                return reference::backward::<Self>(saved, task);
            }
            let inputs = Inputs::new(saved.inputs);
            let grad = into_contiguous(saved.grad);
            // Where nobody else has the gradient, the last branch's takes its place.
            let in_place = grad.can_mut();
            match inputs.backward(&grad, in_place, task) {
                Ok(grads) => grads,
                Err(_) => {
                    let inputs = inputs.back();
                    reference::backward::<Self>(GatedSaved { inputs, grad }, task)
                }
            }
        }
    }
}

#[cfg(feature = "autodiff")]
mod steps {
    use burn::backend::autodiff::checkpoint::{base::Checkpointer, strategy::CheckpointStrategy};
    use burn::backend::autodiff::grads::Gradients;
    use burn::backend::autodiff::ops::{Backward, NodeGuard, Ops, OpsKind};
    use burn::backend::autodiff::{Autodiff, NodeId};
    use burn::backend::tensor::FloatTensor;

    use super::GateOps;
    use crate::gates::values::{GatedGrads, GatedInputs, GatedSaved, GatedTask, MOST_BRANCHES};
    use burn_blocksparse::internal::values::ThreeFloats;

    /// The step of a sum.
    #[derive(Debug)]
    struct GatedSum;

    #[derive(Clone, Debug)]
    struct State {
        branches: [Option<NodeId>; MOST_BRANCHES],
        gates: NodeId,
    }

    /// Of the branches that there are, and of the gates behind them.
    impl<B: GateOps, const N: usize> Backward<B, N> for GatedSum {
        type State = State;

        fn backward(
            self,
            ops: Ops<Self::State, N>,
            grads: &mut Gradients,
            checkpointer: &mut Checkpointer,
        ) {
            let grad = grads.consume::<B>(&ops.node);
            let State { branches, gates } = ops.state;
            let mut parents = ops.parents.into_iter();
            let by_branches = branches.map(|id| id.and_then(|_| parents.next().flatten()));
            let by_gates = parents.next().flatten();
            let kept = branches.map(|id| id.map(|id| checkpointer.retrieve_node_output(id)));
            let inputs = GatedInputs {
                branches: ThreeFloats::of_list(kept),
                gates: checkpointer.retrieve_node_output(gates),
            };
            let task = GatedTask {
                branches: by_branches.each_ref().map(Option::is_some),
                gates: by_gates.is_some(),
            };
            let made = B::gated_sum_backward(GatedSaved { inputs, grad }, task);
            let made_of = made.branches.into_list().into_iter();
            let made_of = made_of.chain([made.gates.into_option()]);
            for (parent, grad) in by_branches.into_iter().chain([by_gates]).zip(made_of) {
                if let (Some(parent), Some(grad)) = (parent, grad) {
                    grads.register::<B>(parent.id, grad);
                }
            }
        }
    }

    /// [`GatedSum`] behind the nodes of the branches that there are and of the gates. There must be `N`.
    fn step<B: GateOps, C: CheckpointStrategy, const N: usize>(
        nodes: Vec<NodeGuard>,
        branches: [Option<FloatTensor<Autodiff<B, C>>>; MOST_BRANCHES],
        gates: FloatTensor<Autodiff<B, C>>,
    ) -> FloatTensor<Autodiff<B, C>> {
        let nodes: [NodeGuard; N] = nodes.try_into().expect("as many nodes as the step has");
        let prepared = GatedSum.prepare::<C>(nodes).compute_bound();
        let run = |branches: [Option<FloatTensor<Autodiff<B, C>>>; MOST_BRANCHES],
                   gates: FloatTensor<Autodiff<B, C>>| {
            let branches = branches.map(|branch| branch.map(|branch| branch.into_primitive()));
            B::gated_sum(GatedInputs {
                branches: ThreeFloats::of_list(branches),
                gates: gates.into_primitive(),
            })
        };
        match prepared.stateful() {
            OpsKind::Tracked(mut prep) => {
                let state = State {
                    branches: (branches.each_ref())
                        .map(|branch| branch.as_ref().map(|branch| prep.checkpoint(branch))),
                    gates: prep.checkpoint(&gates),
                };
                prep.finish(state, run(branches, gates))
            }
            OpsKind::UnTracked(prep) => prep.finish(run(branches, gates)),
        }
    }

    impl<B: GateOps, C: CheckpointStrategy> GateOps for Autodiff<B, C> {
        fn gated_sum(inputs: GatedInputs<Self>) -> FloatTensor<Self> {
            let (branches, gates) = (inputs.branches.into_list(), inputs.gates);
            let there = branches.iter().flatten().chain([&gates]);
            let nodes: Vec<NodeGuard> = there.map(|input| input.node()).collect();
            // The number of a step's inputs is part of its type.
            match nodes.len() {
                2 => step::<B, C, 2>(nodes, branches, gates),
                3 => step::<B, C, 3>(nodes, branches, gates),
                4 => step::<B, C, 4>(nodes, branches, gates),
                more => unreachable!("{more} inputs of 1 to {MOST_BRANCHES} branches"),
            }
        }

        /// Overridden so that the reference's backward does not itself run through autodiff.
        fn gated_sum_backward(_saved: GatedSaved<Self>, _task: GatedTask) -> GatedGrads<Self> {
            unimplemented!("gated_sum is differentiable once")
        }
    }
}
