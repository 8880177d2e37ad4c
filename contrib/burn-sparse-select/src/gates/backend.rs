//! Gated sums on each backend, and their node in Burn's autodiff graph.

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

    use crate::gates::ops::{
        GateOps, GatedGrads, GatedInputs, GatedSaved, GatedTask, MOST_BRANCHES,
        reference_gradients, reference_sum,
    };
    use burn_blocksparse::internal::cube::{empty, filled, matrix, shaped, typed, uses_reference};
    use burn_blocksparse::internal::values::ThreeFloats;

    /// Returns the launch plan of a call as text.
    pub(crate) fn text(
        device: &CubeDevice,
        width: usize,
        dtypes: [DType; 2],
    ) -> Result<String, KernelError> {
        let types = dtypes.map(dtype_to_elem_type);
        rows::gated_text(&device.client(), width, MOST_BRANCHES, types)
    }

    /// Contiguous inputs of a call.
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
            // If a branch has no other owner, the result overwrites it.
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
                    // Sums over no elements.
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
                return reference_sum::<Self>(inputs);
            }
            let inputs = Inputs::new(inputs);
            (inputs.forward()).unwrap_or_else(|_| reference_sum::<Self>(inputs.back()))
        }

        fn gated_sum_backward(saved: GatedSaved<Self>, task: GatedTask) -> GatedGrads<Self> {
            if uses_reference() {
                return reference_gradients::<Self>(saved, task);
            }
            let inputs = Inputs::new(saved.inputs);
            let grad = into_contiguous(saved.grad);
            // If the gradient has no other owner, that of the last branch overwrites it.
            let in_place = grad.can_mut();
            match inputs.backward(&grad, in_place, task) {
                Ok(grads) => grads,
                Err(_) => {
                    let inputs = inputs.back();
                    reference_gradients::<Self>(GatedSaved { inputs, grad }, task)
                }
            }
        }
    }
}

#[cfg(feature = "autodiff")]
mod steps {
    use burn::backend::autodiff::Autodiff;
    use burn::backend::autodiff::checkpoint::strategy::CheckpointStrategy;
    use burn::backend::tensor::FloatTensor;

    use crate::gates::ops::{GateOps, GatedInputs, GatedSaved, GatedTask};
    use burn_blocksparse::internal::custom_gradient::{custom_gradient, everything};

    impl<B: GateOps, C: CheckpointStrategy> GateOps for Autodiff<B, C> {
        fn gated_sum(inputs: GatedInputs<Self>) -> FloatTensor<Self> {
            let inputs = inputs.into_list();
            custom_gradient::<B, C, _, _>(inputs, everything, |inputs, wanted| {
                let [a, b, c, gates] = wanted;
                let task = GatedTask {
                    branches: [a, b, c],
                    gates,
                };
                let out = B::gated_sum(GatedInputs::of_list(inputs));
                (out, move |inputs, grad| {
                    let inputs = GatedInputs::of_list(inputs);
                    let made = B::gated_sum_backward(GatedSaved { inputs, grad }, task);
                    let [a, b, c] = made.branches.into_list();
                    [a, b, c, made.gates.into_option()]
                })
            })
        }
    }
}
