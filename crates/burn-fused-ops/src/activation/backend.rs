//! Activations on each backend, and their step in Burn's autodiff graph.

#[cfg(any(
    feature = "flex",
    feature = "ndarray",
    feature = "cube",
    feature = "autodiff"
))]
use crate::activation::ops::ActivationOps;

#[cfg(feature = "flex")]
impl ActivationOps for burn::backend::Flex {}

#[cfg(feature = "ndarray")]
impl ActivationOps for burn::backend::NdArray {}

#[cfg(feature = "cuda")]
pub(crate) use kernels::kind;
#[cfg(feature = "cube")]
pub(crate) use kernels::text;

#[cfg(feature = "cube")]
mod kernels {
    use crate::kernels::rows;
    use crate::kernels::rows::activation::ActivationBackward;
    use blocksparse_cubecl::KernelError;
    use blocksparse_cubecl::rows::ActivationKind;
    use burn::backend::cubecl::dtype_to_elem_type;
    use burn::tensor::DType;
    use burn_cubecl::kernel::into_contiguous;
    use burn_cubecl::tensor::CubeTensor;
    use burn_cubecl::{CubeBackend, CubeDevice};

    use super::ActivationOps;
    use crate::activation::reference;
    use crate::activation::values::{
        Activation, ActivationGrads, ActivationInputs, ActivationSaved, ActivationTask,
    };
    use burn_blocksparse::internal::cube::{
        contiguous, empty, matrix, shaped, typed, uses_reference,
    };
    use burn_blocksparse::internal::values::OptFloat;

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

    /// How a call is launched.
    pub(crate) fn text(
        device: &CubeDevice,
        matrix: [usize; 2],
        dtype: DType,
        activation: Activation,
    ) -> Result<String, KernelError> {
        let element = dtype_to_elem_type(dtype);
        rows::activation_text(&device.client(), matrix, element, kind(activation))
    }

    impl ActivationOps for CubeBackend {
        fn bias_activation(inputs: ActivationInputs<Self>, activation: Activation) -> CubeTensor {
            if uses_reference() {
                return reference::forward::<Self>(inputs, activation);
            }
            let x = into_contiguous(inputs.x);
            let bias = contiguous(inputs.bias);
            // Where nobody else has x, the result takes its place.
            let y = match x.can_mut() {
                true => x.clone(),
                false => shaped(&x, x.meta.shape().clone(), x.dtype),
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
                Err(_) => {
                    let bias = bias.into();
                    reference::forward::<Self>(ActivationInputs { x, bias }, activation)
                }
            }
        }

        fn bias_activation_backward(
            saved: ActivationSaved<Self>,
            activation: Activation,
            task: ActivationTask,
        ) -> ActivationGrads<Self> {
            if uses_reference() {
                return reference::backward::<Self>(saved, activation, task);
            }
            let ActivationSaved { x, bias, grad } = saved;
            let [x, bias] = [x, bias].map(contiguous);
            let grad = into_contiguous(grad);
            // Where nobody else has the gradient or x, the results take their places.
            let in_place = [grad.can_mut(), x.as_ref().is_some_and(CubeTensor::can_mut)];
            match backward(x.as_ref(), bias.as_ref(), &grad, activation, task, in_place) {
                Ok(grads) => grads,
                Err(_) => {
                    let [x, bias] = [x, bias].map(OptFloat::from);
                    let saved = ActivationSaved { x, bias, grad };
                    reference::backward::<Self>(saved, activation, task)
                }
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
                false => shaped(grad, grad.meta.shape().clone(), grad.dtype),
            });
        let y = (x.filter(|_| task.y)).map(|x| match in_place[1] {
            true => x.clone(),
            false => shaped(x, x.meta.shape().clone(), x.dtype),
        });
        let sums = task.bias.map(|dtype| empty(grad, [width], dtype.into()));
        let pass = ActivationBackward {
            activation: kind(activation),
            x: x.map(|x| &x.handle),
            bias: bias.map(typed),
            dy: typed(grad),
            // Without an activation it is there.
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
}

#[cfg(feature = "autodiff")]
mod steps {
    use burn::backend::TensorMetadata;
    use burn::backend::autodiff::checkpoint::{base::Checkpointer, strategy::CheckpointStrategy};
    use burn::backend::autodiff::grads::Gradients;
    use burn::backend::autodiff::ops::{Backward, NodeGuard, Ops, OpsKind};
    use burn::backend::autodiff::{Autodiff, NodeId};
    use burn::backend::tensor::FloatTensor;
    use burn::tensor::FloatDType;

    use super::ActivationOps;
    use crate::activation::values::{
        Activation, ActivationGrads, ActivationInputs, ActivationSaved, ActivationTask,
    };
    use burn_blocksparse::internal::values::OptFloat;

    #[derive(Debug)]
    struct BiasActivation;

    #[derive(Clone, Debug)]
    struct State {
        activation: Activation,
        /// x, if the gradient depends on it.
        x: Option<NodeId>,
        /// The bias, likewise.
        bias: Option<NodeId>,
        /// The bias's dtype.
        bias_dtype: Option<FloatDType>,
    }

    /// Of x, and of the bias if there is one.
    impl<B: ActivationOps, const N: usize> Backward<B, N> for BiasActivation {
        type State = State;

        fn backward(
            self,
            ops: Ops<Self::State, N>,
            grads: &mut Gradients,
            checkpointer: &mut Checkpointer,
        ) {
            let grad = grads.consume::<B>(&ops.node);
            let state = ops.state;
            let mut parents = ops.parents.into_iter();
            let [x, bias] = [(); 2].map(|_| parents.next().flatten());
            let mut kept = |id: Option<NodeId>| -> OptFloat<B> {
                id.map(|id| checkpointer.retrieve_node_output(id)).into()
            };
            let saved = ActivationSaved {
                x: kept(state.x),
                bias: kept(state.bias),
                grad,
            };
            let task = ActivationTask {
                x: x.is_some(),
                bias: state.bias_dtype.filter(|_| bias.is_some()),
                y: false,
            };
            let made = B::bias_activation_backward(saved, state.activation, task);
            for (parent, grad) in [(x, made.x), (bias, made.bias)] {
                if let (Some(parent), OptFloat::Some(grad)) = (parent, grad) {
                    grads.register::<B>(parent.id, grad);
                }
            }
        }
    }

    fn step<B: ActivationOps, C: CheckpointStrategy, const N: usize>(
        nodes: [NodeGuard; N],
        inputs: ActivationInputs<Autodiff<B, C>>,
        activation: Activation,
    ) -> FloatTensor<Autodiff<B, C>> {
        let ActivationInputs { x, bias } = inputs;
        let bias = bias.into_option();
        let run = |x: FloatTensor<Autodiff<B, C>>, bias: Option<FloatTensor<Autodiff<B, C>>>| {
            let inputs = ActivationInputs {
                x: x.into_primitive(),
                bias: bias.map(|bias| bias.into_primitive()).into(),
            };
            B::bias_activation(inputs, activation)
        };
        let prepared = BiasActivation.prepare::<C>(nodes).compute_bound();
        match prepared.stateful() {
            OpsKind::Tracked(mut prep) => {
                let depends = activation != Activation::None;
                let state = State {
                    activation,
                    x: depends.then(|| prep.checkpoint(&x)),
                    bias: (bias.as_ref().filter(|_| depends)).map(|bias| prep.checkpoint(bias)),
                    bias_dtype: bias.as_ref().map(|bias| bias.dtype().into()),
                };
                prep.finish(state, run(x, bias))
            }
            OpsKind::UnTracked(prep) => prep.finish(run(x, bias)),
        }
    }

    impl<B: ActivationOps, C: CheckpointStrategy> ActivationOps for Autodiff<B, C> {
        fn bias_activation(
            inputs: ActivationInputs<Self>,
            activation: Activation,
        ) -> FloatTensor<Self> {
            let x = inputs.x.node();
            match inputs.bias.as_ref().map(|bias| bias.node()) {
                None => step::<B, C, 1>([x], inputs, activation),
                Some(bias) => step::<B, C, 2>([x, bias], inputs, activation),
            }
        }

        /// Overridden so that the reference's backward does not itself run through autodiff.
        fn bias_activation_backward(
            _saved: ActivationSaved<Self>,
            _activation: Activation,
            _task: ActivationTask,
        ) -> ActivationGrads<Self> {
            unimplemented!("bias_activation is differentiable once")
        }
    }
}
