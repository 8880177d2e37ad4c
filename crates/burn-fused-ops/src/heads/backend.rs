//! Heads on each backend, and their steps in Burn's autodiff graph.

#[cfg(any(
    feature = "flex",
    feature = "ndarray",
    feature = "cube",
    feature = "autodiff"
))]
use crate::heads::ops::HeadOps;

#[cfg(feature = "flex")]
impl HeadOps for burn::backend::Flex {}

#[cfg(feature = "ndarray")]
impl HeadOps for burn::backend::NdArray {}

#[cfg(feature = "cube")]
pub(crate) use kernels::text;

#[cfg(feature = "cube")]
mod kernels {
    use crate::kernels::rows;
    use crate::kernels::rows::heads::HeadsPart;
    use blocksparse_cubecl::KernelError;
    use burn::backend::cubecl::dtype_to_elem_type;
    use burn::tensor::DType;
    use burn_cubecl::kernel::into_contiguous;
    use burn_cubecl::tensor::CubeTensor;
    use burn_cubecl::{CubeBackend, CubeDevice};

    use super::HeadOps;
    use crate::heads::reference;
    use crate::heads::values::{HeadParts, JoinCall, Joined, MOST_PARTS, SplitInputs};
    use burn_blocksparse::internal::cube::{contiguous, empty, uses_reference};
    use burn_blocksparse::internal::values::{OptFloat, ThreeFloats};

    fn part((heads, dim): (usize, usize)) -> HeadsPart {
        HeadsPart { heads, dim }
    }

    /// How a call is launched.
    pub(crate) fn text(
        device: &CubeDevice,
        rows: [usize; 2],
        parts: &[(usize, usize)],
        dtype: DType,
    ) -> Result<String, KernelError> {
        let parts: Vec<HeadsPart> = parts.iter().copied().map(part).collect();
        rows::heads_text(&device.client(), rows, &parts, dtype_to_elem_type(dtype))
    }

    impl HeadOps for CubeBackend {
        fn split_heads(inputs: SplitInputs<Self>, parts: HeadParts) -> ThreeFloats<Self> {
            if uses_reference() {
                return reference::split::<Self>(inputs, parts);
            }
            let x = into_contiguous(inputs.x);
            let bias = contiguous(inputs.bias);
            match split(&x, bias.as_ref(), parts) {
                Ok(tensors) => tensors,
                Err(_) => {
                    let bias = bias.into();
                    reference::split::<Self>(SplitInputs { x, bias }, parts)
                }
            }
        }

        fn join_heads(tensors: ThreeFloats<Self>, call: JoinCall) -> Joined<Self> {
            if uses_reference() {
                return reference::join::<Self>(tensors, &call);
            }
            let tensors = tensors
                .into_list()
                .map(|tensor| tensor.map(into_contiguous));
            match join(&tensors, &call) {
                Ok(joined) => joined,
                Err(_) => reference::join::<Self>(ThreeFloats::of_list(tensors), &call),
            }
        }
    }

    fn split(
        x: &CubeTensor,
        bias: Option<&CubeTensor>,
        parts: HeadParts,
    ) -> Result<ThreeFloats<CubeBackend>, KernelError> {
        let [batch, seq, _] = x.meta.shape().dims();
        let tensors =
            parts.map(|part| part.map(|(heads, dim)| empty(x, [batch, heads, seq, dim], x.dtype)));
        let written: Vec<_> = (parts.iter().flatten().copied().map(part))
            .zip(tensors.iter().flatten().map(|tensor| &tensor.handle))
            .collect();
        rows::split_heads(
            &x.client,
            (&x.handle, dtype_to_elem_type(x.dtype)),
            bias.map(|bias| (&bias.handle, dtype_to_elem_type(bias.dtype))),
            [batch * seq, seq],
            &written,
        )?;
        Ok(ThreeFloats::of_list(tensors))
    }

    fn join(
        tensors: &[Option<CubeTensor>; MOST_PARTS],
        call: &JoinCall,
    ) -> Result<Joined<CubeBackend>, KernelError> {
        let like = (tensors.iter().flatten().next()).expect("at least one tensor");
        let [batch, seq] = call.rows;
        let x = empty(like, [batch, seq, call.width()], call.dtype.into());
        let sums = (call.bias).map(|dtype| empty(like, [call.width()], dtype.into()));
        let read: Vec<_> = (call.parts.iter().zip(tensors))
            .filter_map(|(of, tensor)| {
                Some((part((*of)?), tensor.as_ref().map(|tensor| &tensor.handle)))
            })
            .collect();
        rows::join_heads(
            &like.client,
            &read,
            [batch * seq, seq],
            (&x.handle, dtype_to_elem_type(x.dtype)),
            (sums.as_ref()).map(|sums| (&sums.handle, dtype_to_elem_type(sums.dtype))),
        )?;
        Ok(Joined {
            x,
            bias: OptFloat::from(sums),
        })
    }
}

#[cfg(feature = "autodiff")]
mod steps {
    use burn::backend::autodiff::Autodiff;
    use burn::backend::autodiff::checkpoint::{base::Checkpointer, strategy::CheckpointStrategy};
    use burn::backend::autodiff::grads::Gradients;
    use burn::backend::autodiff::ops::{Backward, NodeGuard, Ops, OpsKind};
    use burn::backend::tensor::FloatTensor;
    use burn::backend::{AutodiffBackend, Backend, TensorMetadata};

    use super::HeadOps;
    use crate::heads::values::{HeadParts, JoinCall, Joined, MOST_PARTS, SplitInputs};
    use burn_blocksparse::internal::outputs::OutputGradients;
    use burn_blocksparse::internal::values::{OptFloat, ThreeFloats};

    /// The step of a split, whose outputs are the parts.
    #[derive(Debug)]
    struct Split;

    #[derive(Clone, Debug)]
    struct SplitState<B: Backend> {
        /// What joins the gradients, with the bias's dtype.
        call: JoinCall,
        grads: OutputGradients<B, MOST_PARTS>,
    }

    /// Of x, and of the bias if there is one.
    impl<B: HeadOps, const N: usize> Backward<B, N> for Split {
        type State = SplitState<B>;

        fn backward(
            self,
            ops: Ops<Self::State, N>,
            grads: &mut Gradients,
            _checkpointer: &mut Checkpointer,
        ) {
            grads.consume::<B>(&ops.node);
            let SplitState {
                mut call,
                grads: cell,
            } = ops.state;
            let mut parents = ops.parents.into_iter();
            let [x, bias] = [(); 2].map(|_| parents.next().flatten());
            if bias.is_none() {
                call.bias = None;
            }
            let joined = B::join_heads(ThreeFloats::of_list(cell.take()), call);
            if let Some(x) = x {
                grads.register::<B>(x.id, joined.x);
            }
            if let (Some(bias), OptFloat::Some(grad)) = (bias, joined.bias) {
                grads.register::<B>(bias.id, grad);
            }
        }
    }

    fn split_step<B: HeadOps, C: CheckpointStrategy, const N: usize>(
        nodes: [NodeGuard; N],
        inputs: SplitInputs<Autodiff<B, C>>,
        parts: HeadParts,
    ) -> ThreeFloats<Autodiff<B, C>> {
        let bias = inputs.bias.into_option();
        let inputs = SplitInputs::<B> {
            x: inputs.x.into_primitive(),
            bias: bias.map(|bias| bias.into_primitive()).into(),
        };
        let [batch, seq, _] = inputs.x.shape().dims();
        let call = JoinCall {
            rows: [batch, seq],
            parts,
            dtype: inputs.x.dtype().into(),
            bias: inputs.bias.as_ref().map(|bias| bias.dtype().into()),
        };
        match Split.prepare::<C>(nodes).compute_bound().stateful() {
            OpsKind::Tracked(prep) => {
                let tensors = B::split_heads(inputs, parts).into_list();
                let grads = OutputGradients::<B, MOST_PARTS>::default();
                let state = SplitState {
                    call,
                    grads: grads.clone(),
                };
                let token = tensors[0].clone().expect("a first part");
                let step = prep.finish(state, token);
                let mut index = 0;
                ThreeFloats::of_list(tensors.map(|tensor| {
                    let node = grads.node::<C>(&step, index, tensor?);
                    index += 1;
                    Some(node)
                }))
            }
            OpsKind::UnTracked(prep) => {
                let mut prep = Some(prep);
                let mut constant = |tensor| match prep.take() {
                    Some(prep) => prep.finish(tensor),
                    None => <Autodiff<B, C> as AutodiffBackend>::from_inner(tensor),
                };
                let tensors = B::split_heads(inputs, parts).into_list();
                ThreeFloats::of_list(tensors.map(|tensor| tensor.map(&mut constant)))
            }
        }
    }

    /// The step of a join of one part.
    #[derive(Debug)]
    struct Join;

    impl<B: HeadOps> Backward<B, 1> for Join {
        type State = HeadParts;

        fn backward(
            self,
            ops: Ops<Self::State, 1>,
            grads: &mut Gradients,
            _checkpointer: &mut Checkpointer,
        ) {
            let x = grads.consume::<B>(&ops.node);
            if let [Some(parent)] = ops.parents {
                let inputs = SplitInputs {
                    x,
                    bias: OptFloat::None,
                };
                let [first, ..] = B::split_heads(inputs, ops.state).into_list();
                if let Some(first) = first {
                    grads.register::<B>(parent.id, first);
                }
            }
        }
    }

    impl<B: HeadOps, C: CheckpointStrategy> HeadOps for Autodiff<B, C> {
        fn split_heads(inputs: SplitInputs<Self>, parts: HeadParts) -> ThreeFloats<Self> {
            let x = inputs.x.node();
            match inputs.bias.as_ref().map(|bias| bias.node()) {
                None => split_step::<B, C, 1>([x], inputs, parts),
                Some(bias) => split_step::<B, C, 2>([x, bias], inputs, parts),
            }
        }

        /// Of one part and without sums, as the public function asks for it.
        fn join_heads(tensors: ThreeFloats<Self>, call: JoinCall) -> Joined<Self> {
            let [first, ..] = tensors.into_list();
            let first: FloatTensor<Self> = first.expect("a first part");
            let prepared = Join.prepare::<C>([first.node()]).compute_bound();
            let run = |first: FloatTensor<Self>| {
                let tensors = [Some(first.into_primitive()), None, None];
                B::join_heads(ThreeFloats::of_list(tensors), call).x
            };
            let x = match prepared.stateful() {
                OpsKind::Tracked(prep) => prep.finish(call.parts, run(first)),
                OpsKind::UnTracked(prep) => prep.finish(run(first)),
            };
            Joined {
                x,
                bias: OptFloat::None,
            }
        }
    }
}
