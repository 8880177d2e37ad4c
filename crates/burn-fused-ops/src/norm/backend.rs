//! Residual norms on each backend.

#[cfg(any(
    feature = "flex",
    feature = "ndarray",
    feature = "cube",
    feature = "autodiff"
))]
use crate::norm::ops::NormOps;

#[cfg(feature = "flex")]
impl NormOps for burn::backend::Flex {}

#[cfg(feature = "ndarray")]
impl NormOps for burn::backend::NdArray {}

#[cfg(feature = "cube")]
pub(crate) use kernels::shaped;

#[cfg(feature = "cube")]
mod kernels {
    use crate::kernels::rows;
    use crate::kernels::rows::norm::{NormBranch, NormOf};
    use crate::kernels::rows::norm_backward::{NormBackward, NormGrad, StreamGrad};
    use blocksparse_cubecl::KernelError;
    use blocksparse_cubecl::rows::Typed;
    use burn::backend::cubecl::dtype_to_elem_type;
    use burn::tensor::{DType, FloatDType, Shape};
    use burn_cubecl::CubeBackend;
    use burn_cubecl::kernel::{cast, into_contiguous};
    use burn_cubecl::tensor::CubeTensor;

    use super::NormOps;
    use crate::norm::reference::matrix;
    use crate::norm::values::{
        NormBackwardCall, NormCall, NormGrads, NormInputs, NormOutput, NormOutputGrads, NormSaved,
    };
    use crate::norm::{NormKind, reference};
    use burn_blocksparse::internal::cube::{contiguous, empty, filled, uses_reference};
    use burn_blocksparse::internal::dtype::accumulate_in;
    use burn_blocksparse::internal::values::OptFloat;

    /// A tensor to be written, of a shape, on the device of another.
    pub(crate) fn shaped(like: &CubeTensor, shape: Shape, dtype: DType) -> CubeTensor {
        let elements = shape.num_elements().max(1);
        let CubeTensor { handle, .. } = empty(like, [elements], dtype);
        let (client, device) = (like.client.clone(), like.device.clone());
        CubeTensor::new_contiguous(client, device, shape, handle, dtype)
    }

    fn typed(tensor: &CubeTensor) -> Typed<'_> {
        (&tensor.handle, dtype_to_elem_type(tensor.dtype))
    }

    impl NormOps for CubeBackend {
        fn add_norm(inputs: NormInputs<Self>, call: NormCall) -> NormOutput<Self> {
            if uses_reference() {
                return reference::forward::<Self>(inputs, &call);
            }
            let stream = into_contiguous(inputs.stream);
            let [branch, bias, gamma, beta] =
                [inputs.branch, inputs.bias, inputs.gamma, inputs.beta].map(contiguous);
            match forward(
                [
                    Some(stream.clone()),
                    branch.clone(),
                    bias.clone(),
                    gamma.clone(),
                    beta.clone(),
                ]
                .each_ref()
                .map(Option::as_ref),
                &call,
            ) {
                Ok(output) => output,
                // The plan says so.
                Err(_) => {
                    let inputs = NormInputs {
                        stream,
                        branch: branch.into(),
                        bias: bias.into(),
                        gamma: gamma.into(),
                        beta: beta.into(),
                    };
                    reference::forward::<Self>(inputs, &call)
                }
            }
        }

        fn residual_norm_backward(
            saved: NormSaved<Self>,
            grads: NormOutputGrads<Self>,
            call: NormBackwardCall,
        ) -> NormGrads<Self> {
            if uses_reference() {
                return reference::backward::<Self>(saved, grads, &call);
            }
            let [xhat, rstd, gamma] = [saved.xhat, saved.rstd, saved.gamma].map(contiguous);
            let [stream, normed] = [grads.stream, grads.normed].map(contiguous);
            // Asked before there are more handles.
            let in_place = stream.as_ref().is_some_and(CubeTensor::can_mut);
            let norm = [xhat, rstd, gamma];
            match backward(stream.as_ref(), normed.as_ref(), &norm, in_place, &call) {
                Ok(grads) => grads,
                Err(_) => {
                    let [xhat, rstd, gamma] = norm.map(OptFloat::from);
                    let saved = NormSaved { xhat, rstd, gamma };
                    let grads = NormOutputGrads {
                        stream: stream.into(),
                        normed: normed.into(),
                    };
                    reference::backward::<Self>(saved, grads, &call)
                }
            }
        }
    }

    /// Of the stream, the branch, its bias, gamma and beta.
    fn forward(
        [stream, branch, bias, gamma, beta]: [Option<&CubeTensor>; 5],
        call: &NormCall,
    ) -> Result<NormOutput<CubeBackend>, KernelError> {
        let stream = stream.expect("a stream");
        let shape = stream.meta.shape().clone();
        let [rows, width] = matrix(&shape);
        let sum = branch.map(|_| shaped(stream, shape.clone(), stream.dtype));
        let like = |wanted: bool, dtype: FloatDType| {
            wanted.then(|| shaped(stream, shape.clone(), dtype.into()))
        };
        let has_norm = call.norm.is_some();
        let [normed, xhat] =
            [has_norm, has_norm && call.keep].map(|wanted| like(wanted, call.dtype));
        let sums = accumulate_in(stream.dtype.into());
        let rstd = (xhat.as_ref()).map(|_| shaped(stream, Shape::new([rows]), sums.into()));
        let branch = branch.zip(sum.as_ref()).map(|(x, sum)| NormBranch {
            x: typed(x),
            bias: bias.map(typed),
            dropout: call.dropout.as_ref(),
            sum: &sum.handle,
        });
        let norm = gamma.zip(normed.as_ref()).map(|(gamma, normed)| NormOf {
            centered: call.norm == Some(NormKind::Layer),
            epsilon: call.epsilon,
            gamma: typed(gamma),
            beta: beta.map(typed),
            normed: typed(normed),
            kept: (xhat.as_ref().zip(rstd.as_ref()))
                .map(|(xhat, rstd)| [&xhat.handle, &rstd.handle]),
        });
        rows::add_norm(&stream.client, typed(stream), [rows, width], branch, norm)?;
        Ok(NormOutput {
            stream: sum.into(),
            normed: normed.into(),
            xhat: xhat.into(),
            rstd: rstd.into(),
        })
    }

    fn backward(
        by_sum: Option<&CubeTensor>,
        by_normed: Option<&CubeTensor>,
        [xhat, rstd, gamma]: &[Option<CubeTensor>; 3],
        in_place: bool,
        call: &NormBackwardCall,
    ) -> Result<NormGrads<CubeBackend>, KernelError> {
        let like = by_sum.or(by_normed).expect("a gradient by an output");
        let shape = like.meta.shape().clone();
        let [rows, width] = matrix(&shape);
        let norm = by_normed.and_then(|normed| {
            Some(NormGrad {
                centered: call.forward.norm == Some(NormKind::Layer),
                normed: typed(normed),
                xhat: &xhat.as_ref()?.handle,
                rstd: &rstd.as_ref()?.handle,
                gamma: typed(gamma.as_ref()?),
            })
        });
        let stream_type: DType = call.stream.into();
        // What is returned, and where it is written.
        let (stream, to) = match (by_sum, &norm) {
            (Some(by_sum), None) => (by_sum.clone(), None),
            (Some(by_sum), Some(_)) if in_place => (by_sum.clone(), None),
            _ => {
                let stream = shaped(like, shape.clone(), stream_type);
                (stream.clone(), Some(stream))
            }
        };
        let dropout = call.forward.dropout.as_ref();
        // Without dropout a branch of the stream's dtype has the stream's gradient.
        let same = dropout.is_none() && call.branch == Some(call.stream);
        let branch =
            (call.branch.filter(|_| !same)).map(|dtype| shaped(like, shape.clone(), dtype.into()));
        let wanted = [
            call.bias,
            call.gamma.filter(|_| norm.is_some()),
            call.beta.filter(|_| norm.is_some()),
        ];
        let pass = NormBackward {
            element: dtype_to_elem_type(stream_type),
            sum: by_sum.map(|grad| &grad.handle),
            stream: match (&to, &norm) {
                (Some(to), _) => StreamGrad::Written(&to.handle),
                (None, Some(_)) => StreamGrad::InPlace,
                (None, None) => StreamGrad::Kept,
            },
            norm,
            branch: branch.as_ref().map(typed),
            dropout: dropout.filter(|_| call.branch.is_some() || call.bias.is_some()),
            sums: wanted.map(|dtype| dtype.is_some()),
        };
        let nothing = pass.norm.is_none() && branch.is_none() && call.bias.is_none();
        let sums = match nothing {
            true => None,
            false => rows::residual_norm_backward(&like.client, [rows, width], &pass)?,
        };
        let sums_type: DType = accumulate_in(call.stream).into();
        let mut index = 0;
        let [bias, by_gamma, by_beta] = wanted.map(|dtype| {
            let (dtype, sums) = (dtype?, sums.as_ref()?);
            let bytes = (sums.pitch * sums_type.size()) as u64;
            let (start, count) = (index * bytes, wanted.iter().flatten().count() as u64);
            index += 1;
            let behind = count * bytes - start - (width * sums_type.size()) as u64;
            let handle = sums.handle.clone().offset_start(start).offset_end(behind);
            let (client, device) = (like.client.clone(), like.device.clone());
            let sum =
                CubeTensor::new_contiguous(client, device, Shape::new([width]), handle, sums_type);
            Some(cast(sum, dtype.into()))
        });
        // What was not used has no gradient but 0.
        let or_zeros = |sum: Option<CubeTensor>, dtype: Option<FloatDType>| {
            let zeros = || dtype.map(|dtype| filled(like, [width], 0.0, dtype.into()));
            OptFloat::from(sum.or_else(zeros))
        };
        Ok(NormGrads {
            branch: match same {
                true => OptFloat::Some(stream.clone()),
                false => branch.into(),
            },
            stream,
            bias: bias.into(),
            gamma: or_zeros(by_gamma, call.gamma),
            beta: or_zeros(by_beta, call.beta),
        })
    }
}

#[cfg(feature = "autodiff")]
mod steps {
    use burn::backend::autodiff::Autodiff;
    use burn::backend::autodiff::checkpoint::{base::Checkpointer, strategy::CheckpointStrategy};
    use burn::backend::autodiff::grads::Gradients;
    use burn::backend::autodiff::ops::{Backward, NodeGuard, Ops, OpsKind};
    use burn::backend::{AutodiffBackend, Backend, TensorMetadata};
    use burn::tensor::FloatDType;

    use super::NormOps;
    use crate::norm::values::{
        NormBackwardCall, NormCall, NormGrads, NormInputs, NormOutput, NormOutputGrads, NormSaved,
    };
    use burn_blocksparse::internal::outputs::OutputGradients;
    use burn_blocksparse::internal::values::OptFloat;

    #[derive(Debug)]
    struct ResidualNorm;

    #[derive(Clone, Debug)]
    struct State<B: Backend> {
        saved: NormSaved<B>,
        /// With the dtypes of all inputs that there are.
        call: NormBackwardCall,
        /// By the stream and the normed one. None without a norm: then the step's own output is the stream.
        grads: Option<OutputGradients<B, 2>>,
    }

    /// Of the stream, and the branch, its bias, gamma and beta as far as there are.
    impl<B: NormOps, const N: usize> Backward<B, N> for ResidualNorm {
        type State = State<B>;

        fn backward(
            self,
            ops: Ops<Self::State, N>,
            grads: &mut Gradients,
            _checkpointer: &mut Checkpointer,
        ) {
            let own = grads.consume::<B>(&ops.node);
            let State {
                saved,
                mut call,
                grads: cell,
            } = ops.state;
            let [stream, normed] = match cell {
                Some(cell) => cell.take(),
                None => [Some(own), None],
            };
            let by_outputs = NormOutputGrads {
                stream: stream.into(),
                normed: normed.into(),
            };
            let mut parents = ops.parents.into_iter();
            let stream = parents.next().flatten();
            let mut others = [None, None, None, None];
            let inputs = [
                &mut call.branch,
                &mut call.bias,
                &mut call.gamma,
                &mut call.beta,
            ];
            for (dtype, other) in inputs.into_iter().zip(&mut others) {
                if dtype.is_some() {
                    *other = parents.next().flatten();
                }
                if other.is_none() {
                    *dtype = None;
                }
            }
            let made = B::residual_norm_backward(saved, by_outputs, call);
            if let Some(stream) = stream {
                grads.register::<B>(stream.id, made.stream);
            }
            let made = [made.branch, made.bias, made.gamma, made.beta];
            for (parent, grad) in others.into_iter().zip(made) {
                if let (Some(parent), OptFloat::Some(grad)) = (parent, grad) {
                    grads.register::<B>(parent.id, grad);
                }
            }
        }
    }

    /// The step behind the nodes of its inputs. There must be `N`.
    fn step<B: NormOps, C: CheckpointStrategy, const N: usize>(
        nodes: Vec<NodeGuard>,
        inputs: NormInputs<Autodiff<B, C>>,
        mut call: NormCall,
    ) -> NormOutput<Autodiff<B, C>> {
        let nodes: [NodeGuard; N] = nodes.try_into().expect("as many nodes as the step has");
        let inner = |tensor: OptFloat<Autodiff<B, C>>| {
            let tensor = tensor.into_option();
            OptFloat::from(tensor.map(|tensor| tensor.into_primitive()))
        };
        let inputs = NormInputs {
            stream: inputs.stream.into_primitive(),
            branch: inner(inputs.branch),
            bias: inner(inputs.bias),
            gamma: inner(inputs.gamma),
            beta: inner(inputs.beta),
        };
        let prepared = ResidualNorm.prepare::<C>(nodes).compute_bound();
        let none = || OptFloat::None;
        let (stream, normed) = match prepared.stateful() {
            OpsKind::Tracked(prep) => {
                call.keep = call.norm.is_some();
                let dtype = |tensor: &OptFloat<B>| Some(FloatDType::from(tensor.as_ref()?.dtype()));
                let backward = NormBackwardCall {
                    forward: call,
                    stream: FloatDType::from(TensorMetadata::dtype(&inputs.stream)),
                    branch: dtype(&inputs.branch),
                    bias: dtype(&inputs.bias),
                    gamma: dtype(&inputs.gamma),
                    beta: dtype(&inputs.beta),
                };
                let (gamma, came) = (inputs.gamma.clone(), inputs.stream.clone());
                let output = B::add_norm(inputs, call);
                let stream = output.stream.into_option().unwrap_or(came);
                let mut state = State {
                    saved: NormSaved {
                        xhat: output.xhat,
                        rstd: output.rstd.clone(),
                        gamma,
                    },
                    call: backward,
                    grads: None,
                };
                match (output.normed, output.rstd) {
                    (OptFloat::Some(normed), OptFloat::Some(rstd)) => {
                        let grads = OutputGradients::<B, 2>::default();
                        state.grads = Some(grads.clone());
                        let step = prep.finish(state, rstd);
                        let stream = grads.node::<C>(&step, 0, stream);
                        let normed = grads.node::<C>(&step, 1, normed);
                        (OptFloat::Some(stream), OptFloat::Some(normed))
                    }
                    _ => (OptFloat::Some(prep.finish(state, stream)), none()),
                }
            }
            OpsKind::UnTracked(prep) => {
                let NormOutput { stream, normed, .. } = B::add_norm(inputs, call);
                let constant = <Autodiff<B, C> as AutodiffBackend>::from_inner;
                match (stream, normed) {
                    (OptFloat::Some(stream), normed) => (
                        OptFloat::Some(prep.finish(stream)),
                        normed.into_option().map(constant).into(),
                    ),
                    (OptFloat::None, OptFloat::Some(normed)) => {
                        (none(), OptFloat::Some(prep.finish(normed)))
                    }
                    (OptFloat::None, OptFloat::None) => (none(), none()),
                }
            }
        };
        NormOutput {
            stream,
            normed,
            xhat: none(),
            rstd: none(),
        }
    }

    impl<B: NormOps, C: CheckpointStrategy> NormOps for Autodiff<B, C> {
        fn add_norm(inputs: NormInputs<Self>, call: NormCall) -> NormOutput<Self> {
            let others = [&inputs.branch, &inputs.bias, &inputs.gamma, &inputs.beta];
            let others = others.into_iter().filter_map(OptFloat::as_ref);
            let nodes: Vec<NodeGuard> = (std::iter::once(&inputs.stream).chain(others))
                .map(|input| input.node())
                .collect();
            // The number of a step's inputs is part of its type.
            match nodes.len() {
                1 => step::<B, C, 1>(nodes, inputs, call),
                2 => step::<B, C, 2>(nodes, inputs, call),
                3 => step::<B, C, 3>(nodes, inputs, call),
                4 => step::<B, C, 4>(nodes, inputs, call),
                _ => step::<B, C, 5>(nodes, inputs, call),
            }
        }

        /// Overridden so that the reference's backward does not itself run through autodiff.
        fn residual_norm_backward(
            _saved: NormSaved<Self>,
            _grads: NormOutputGrads<Self>,
            _call: NormBackwardCall,
        ) -> NormGrads<Self> {
            unimplemented!("add_norm is differentiable once")
        }
    }
}
