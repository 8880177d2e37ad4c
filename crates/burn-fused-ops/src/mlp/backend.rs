//! Feed-forward networks on each backend, and their step in Burn's autodiff graph.

#[cfg(any(
    feature = "flex",
    feature = "ndarray",
    feature = "cube",
    feature = "autodiff"
))]
use crate::mlp::ops::MlpOps;

#[cfg(feature = "flex")]
impl MlpOps for burn::backend::Flex {}

#[cfg(feature = "ndarray")]
impl MlpOps for burn::backend::NdArray {}

#[cfg(all(feature = "cube", not(feature = "cuda")))]
impl MlpOps for burn_cubecl::CubeBackend {}

#[cfg(feature = "cube")]
pub(crate) use texts::inner_text;

#[cfg(feature = "cube")]
mod texts {
    use burn::tensor::DType;
    use burn_cubecl::CubeDevice;

    use crate::activation::backend as between;
    use crate::activation::values::Activation;

    /// How the first product and the activation are launched: in one kernel, or in two.
    pub(crate) fn inner_text(
        device: &CubeDevice,
        dtype: DType,
        [rows, inputs, hidden]: [usize; 3],
        bias: Option<DType>,
        activation: Activation,
    ) -> Result<String, String> {
        let lengths = [rows, inputs, hidden];
        #[cfg(feature = "cuda")]
        let fused = {
            let kind = between::kind(activation);
            crate::linear::wgmma::activated_text(device, dtype, lengths, bias, kind)
        };
        #[cfg(not(feature = "cuda"))]
        let fused = {
            let _ = bias;
            Err::<String, _>("built without the feature cuda".to_owned())
        };
        fused.or_else(|why| {
            let product = crate::linear::backend::kernels::text(device, dtype, lengths)?;
            let text = between::text(device, [rows, hidden], dtype, activation)
                .map_err(|error| error.to_string())?;
            Ok(format!("{product}; {text}; not as one: {why}"))
        })
    }
}

#[cfg(feature = "cuda")]
mod kernels {
    use blocksparse_cubecl::rows::column_sums;
    use burn::tensor::{FloatDType, Shape};
    use burn_cubecl::CubeBackend;
    use burn_cubecl::kernel::into_contiguous;
    use burn_cubecl::tensor::CubeTensor;

    use super::MlpOps;
    use crate::activation::backend::kind;
    use crate::activation::values::ActivationGrads;
    use crate::linear::backend::kernels::Kernels;
    use crate::linear::products::{Products, rounded, with_width};
    use crate::linear::wgmma;
    use crate::mlp::steps;
    use crate::mlp::values::{MlpActive, MlpCall, MlpInnerInputs, MlpOuterSaved, MlpOuterTask};
    use burn_blocksparse::internal::cube::{as_matrix, contiguous, empty, typed, uses_reference};
    use burn_blocksparse::internal::values::OptFloat;

    /// As `[.., width]`.
    fn shaped(matrix: CubeTensor, like: &Shape) -> CubeTensor {
        let width = matrix.meta.shape()[1];
        CubeTensor::new_contiguous(
            matrix.client,
            matrix.device,
            with_width(like, width),
            matrix.handle,
            matrix.dtype,
        )
    }

    impl MlpOps for CubeBackend {
        fn mlp_inner(inputs: MlpInnerInputs<Self>, call: MlpCall, keep: bool) -> MlpActive<Self> {
            if uses_reference() || !wgmma::is_half(call.dtype) {
                return steps::inner::<Self>(inputs, call, keep);
            }
            let MlpInnerInputs { x, inner, bias } = inputs;
            let changed = |tensor: &CubeTensor| FloatDType::from(tensor.dtype) != call.dtype;
            let changes = [changed(&x), changed(&inner)];
            let x = into_contiguous(rounded::<Self>(x, call.dtype));
            let inner = match changes[1] {
                true => Kernels::joined(vec![inner], call.dtype),
                false => inner,
            };
            let bias = contiguous(bias);
            let lhs = as_matrix(x.clone());
            let made = wgmma::activated([&lhs, &inner], bias.as_ref(), kind(call.activation), keep);
            drop(lhs);
            let shape = x.meta.shape().clone();
            let (active, hidden) = match made {
                Some([active, hidden]) => (
                    shaped(active.expect("it is made"), &shape),
                    hidden.map(|hidden| shaped(hidden, &shape)),
                ),
                None => {
                    let inputs = MlpInnerInputs {
                        x: x.clone(),
                        inner: inner.clone(),
                        bias: bias.into(),
                    };
                    let made = steps::inner::<Self>(inputs, call, keep);
                    (made.active, made.hidden.into_option())
                }
            };
            MlpActive {
                active,
                hidden: hidden.into(),
                x: changes[0].then_some(x).into(),
                inner: changes[1].then_some(inner).into(),
            }
        }

        fn mlp_outer_backward(
            saved: MlpOuterSaved<Self>,
            task: MlpOuterTask,
        ) -> ActivationGrads<Self> {
            if uses_reference() || !wgmma::is_half(task.dtype) {
                return steps::outer_backward::<Self>(saved, task);
            }
            let MlpOuterSaved {
                hidden,
                bias,
                outer,
                grad,
            } = saved;
            let hidden = into_contiguous(hidden);
            let bias = contiguous(bias);
            let grad = into_contiguous(grad);
            // Where nobody else has what came in, the activation takes its place.
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
                return steps::outer_backward::<Self>(saved, task);
            };
            let by_bias = match (task.bias, made.totals) {
                (Some(dtype), Some(totals)) => {
                    let [rows, width] = totals.meta.shape().dims();
                    let sums = empty(&totals, [width], dtype.into());
                    let result =
                        column_sums(&totals.client, typed(&totals), [rows, width], typed(&sums));
                    // f32 and half precision are summed everywhere.
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
    }
}

#[cfg(feature = "autodiff")]
mod steps {
    use burn::backend::TensorMetadata;
    use burn::backend::autodiff::Autodiff;
    use burn::backend::autodiff::checkpoint::{base::Checkpointer, strategy::CheckpointStrategy};
    use burn::backend::autodiff::grads::Gradients;
    use burn::backend::autodiff::ops::{Backward, NodeGuard, Ops, OpsKind};
    use burn::backend::tensor::FloatTensor;

    use super::MlpOps;
    use crate::linear::backend::Factor;
    use crate::mlp::steps::{Forward, SavedTensors, Task, backward, forward, own};
    use crate::mlp::values::{MlpCall, MlpInputs};

    /// The step behind x, the weights, and the bias if there is one.
    #[derive(Debug)]
    struct Mlp;

    #[derive(Clone, Debug)]
    struct State<B: MlpOps> {
        call: MlpCall,
        task: Task,
        x: Factor<B>,
        inner: Factor<B>,
        bias: Factor<B>,
        outer: Factor<B>,
        hidden: Factor<B>,
    }

    impl<B: MlpOps, const N: usize> Backward<B, N> for Mlp {
        type State = State<B>;

        fn backward(
            self,
            ops: Ops<Self::State, N>,
            grads: &mut Gradients,
            checkpointer: &mut Checkpointer,
        ) {
            let grad = grads.consume::<B>(&ops.node);
            let State {
                call,
                task,
                x,
                inner,
                bias,
                outer,
                hidden,
            } = ops.state;
            let mut get = |factor: Factor<B>| factor.get(checkpointer).into_option();
            let saved = SavedTensors {
                x: get(x),
                inner: get(inner),
                bias: get(bias),
                outer: get(outer),
                hidden: get(hidden),
                grad,
            };
            let [by_x, by_inner, by_bias, by_outer] = backward::<B>(saved, call, task);
            let gradients = [by_x, by_inner, by_outer, by_bias];
            for (parent, grad) in ops.parents.into_iter().zip(gradients) {
                if let (Some(parent), Some(grad)) = (parent, grad) {
                    grads.register::<B>(parent.id, grad);
                }
            }
        }
    }

    /// The step of `N` inputs: x, the inner weight, the outer one, the bias.
    fn step<B: MlpOps, C: CheckpointStrategy, const N: usize>(
        nodes: [NodeGuard; N],
        inputs: MlpInputs<Autodiff<B, C>>,
        call: MlpCall,
    ) -> FloatTensor<Autodiff<B, C>> {
        let MlpInputs {
            x,
            inner,
            bias,
            outer,
        } = inputs;
        let bias = bias.into_option();
        type Tracked<B, C> = FloatTensor<Autodiff<B, C>>;
        let run = |x: Tracked<B, C>,
                   inner: Tracked<B, C>,
                   bias: Option<Tracked<B, C>>,
                   outer: Tracked<B, C>,
                   keep: bool| {
            let inputs = MlpInputs {
                x: x.into_primitive(),
                inner: inner.into_primitive(),
                bias: bias.map(|bias| bias.into_primitive()).into(),
                outer: outer.into_primitive(),
            };
            forward::<B>(inputs, call, keep)
        };
        match Mlp.prepare::<C>(nodes).compute_bound().stateful() {
            OpsKind::Tracked(mut prep) => {
                let wanted = |tensor: &Tracked<B, C>| tensor.is_tracked().then(|| own(tensor));
                let task = Task {
                    x: wanted(&x),
                    inner: wanted(&inner),
                    bias: bias.as_ref().and_then(wanted),
                    outer: wanted(&outer),
                    lengths: [inner.shape()[0], inner.shape()[1], outer.shape()[1]],
                };
                let depends = task.depends(call.activation);
                // Whether the backward pass has something to do with the numbers between the products.
                let keep = depends && !call.recompute;
                let again = depends && call.recompute;
                // The checkpointer keeps what the products read as it is.
                let mut input = |wanted: bool, tensor: &Tracked<B, C>| {
                    let is_itself = own(tensor) == call.dtype;
                    (wanted && is_itself).then(|| Factor::Input(prep.checkpoint(tensor)))
                };
                let needs = [
                    task.inner.is_some() || again,
                    task.x.is_some() || again,
                    task.before(),
                ];
                let factors = [
                    input(needs[0], &x),
                    input(needs[1], &inner),
                    input(needs[2], &outer),
                ];
                let bias_factor = match &bias {
                    Some(bias) if depends => Factor::Input(prep.checkpoint(bias)),
                    _ => Factor::Unused,
                };
                let made = run(x, inner, bias, outer, keep);
                let Forward {
                    out,
                    hidden,
                    x,
                    inner,
                    outer,
                } = made;
                let mut made = [x, inner, outer].into_iter().zip(needs).zip(factors).map(
                    |((made, wanted), factor)| match (wanted, factor, made) {
                        (false, _, _) => Factor::Unused,
                        (true, Some(factor), _) => factor,
                        (true, None, made) => made.map_or(Factor::Unused, Factor::Rounded),
                    },
                );
                let mut next = || made.next().unwrap_or(Factor::Unused);
                let [x, inner, outer] = [next(), next(), next()];
                let state = State {
                    call,
                    task,
                    x,
                    inner,
                    bias: bias_factor,
                    outer,
                    hidden: hidden.map_or(Factor::Unused, Factor::Rounded),
                };
                prep.finish(state, out)
            }
            OpsKind::UnTracked(prep) => prep.finish(run(x, inner, bias, outer, false).out),
        }
    }

    impl<B: MlpOps, C: CheckpointStrategy> MlpOps for Autodiff<B, C> {
        fn mlp(inputs: MlpInputs<Self>, call: MlpCall) -> FloatTensor<Self> {
            let [x, inner, outer] = [&inputs.x, &inputs.inner, &inputs.outer].map(|x| x.node());
            match inputs.bias.as_ref().map(|bias| bias.node()) {
                None => step::<B, C, 3>([x, inner, outer], inputs, call),
                Some(bias) => step::<B, C, 4>([x, inner, outer, bias], inputs, call),
            }
        }
    }
}
