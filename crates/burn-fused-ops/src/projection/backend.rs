//! Projections to heads and from them on each backend, and their steps in Burn's autodiff graph.

#[cfg(any(
    feature = "flex",
    feature = "ndarray",
    feature = "cube",
    feature = "autodiff"
))]
use crate::projection::ops::ProjectionOps;

#[cfg(feature = "flex")]
impl ProjectionOps for burn::backend::Flex {}

#[cfg(feature = "ndarray")]
impl ProjectionOps for burn::backend::NdArray {}

#[cfg(all(feature = "cube", not(feature = "cuda")))]
impl ProjectionOps for burn_cubecl::CubeBackend {}

#[cfg(feature = "cube")]
pub(crate) use texts::{from_heads_text, to_heads_text};

#[cfg(feature = "cube")]
mod texts {
    use burn::tensor::DType;
    use burn_cubecl::CubeDevice;

    /// How a projection to heads is launched: in one kernel, or in two.
    pub(crate) fn to_heads_text(
        device: &CubeDevice,
        dtype: DType,
        [batch, seq, inputs]: [usize; 3],
        parts: &[(usize, usize)],
        bias: Option<DType>,
    ) -> Result<String, String> {
        #[cfg(feature = "cuda")]
        let fused = {
            let listed = std::array::from_fn(|part| parts.get(part).copied());
            let lengths = [batch, seq, inputs];
            super::wgmma::by_heads_text(device, dtype, lengths, bias, listed)
        };
        #[cfg(not(feature = "cuda"))]
        let fused = {
            let _ = bias;
            Err::<String, _>("built without the feature cuda".to_owned())
        };
        fused.or_else(|why| {
            let outputs = parts.iter().map(|(heads, dim)| heads * dim).sum();
            let product = crate::linear::backend::kernels::text(
                device,
                dtype,
                [batch * seq, inputs, outputs],
            )?;
            let split = crate::heads::backend::text(device, [batch * seq, seq], parts, dtype)
                .map_err(|error| error.to_string())?;
            Ok(format!("{product}; {split}; not as one: {why}"))
        })
    }

    /// How a projection of heads of a dtype in another one is launched.
    pub(crate) fn from_heads_text(
        device: &CubeDevice,
        [own, dtype]: [DType; 2],
        [batch, heads, seq, dim]: [usize; 4],
        outputs: usize,
    ) -> Result<String, String> {
        #[cfg(feature = "cuda")]
        let fused = match own == dtype {
            true => super::wgmma::of_heads_text(device, dtype, [batch, heads, seq, dim], outputs),
            false => Err(format!("{own:?} is rounded to {dtype:?}")),
        };
        #[cfg(not(feature = "cuda"))]
        let fused = Err::<String, _>("built without the feature cuda".to_owned());
        fused.or_else(|why| {
            let join =
                crate::heads::backend::text(device, [batch * seq, seq], &[(heads, dim)], own)
                    .map_err(|error| error.to_string())?;
            let product = crate::linear::backend::kernels::text(
                device,
                dtype,
                [batch * seq, heads * dim, outputs],
            )?;
            Ok(format!("{join}; {product}; not as one: {why}"))
        })
    }
}

#[cfg(feature = "cuda")]
use crate::linear::wgmma;

#[cfg(feature = "cuda")]
mod kernels {
    use burn::backend::ops::FloatTensorOps;
    use burn::tensor::{FloatDType, Shape};
    use burn_cubecl::CubeBackend;
    use burn_cubecl::kernel::into_contiguous;
    use burn_cubecl::tensor::CubeTensor;

    use super::{ProjectionOps, wgmma};
    use crate::linear::backend::kernels::Kernels;
    use crate::linear::products::{Products, rounded};
    use crate::projection::steps;
    use crate::projection::values::{
        MergeGrads, MergeInputs, MergeOutput, MergeSaved, MergeTask, ProjectionCall,
        ProjectionInputs, ProjectionOutput,
    };
    use burn_blocksparse::internal::cube::{as_matrix, contiguous, uses_reference};
    use burn_blocksparse::internal::values::{OptFloat, ThreeFloats};

    impl ProjectionOps for CubeBackend {
        fn project_heads(
            inputs: ProjectionInputs<Self>,
            call: ProjectionCall,
        ) -> ProjectionOutput<Self> {
            if uses_reference() || !wgmma::is_half(call.dtype) {
                return steps::project::<Self>(inputs, call);
            }
            let ProjectionInputs { x, weights, bias } = inputs;
            let [batch, seq, _] = x.meta.shape().dims();
            let changed = |tensor: &CubeTensor| FloatDType::from(tensor.dtype) != call.dtype;
            let list: Vec<CubeTensor> = weights.into_list().into_iter().flatten().collect();
            let is_joined = list.len() > 1 || list.iter().any(changed);
            let is_rounded = changed(&x);
            let weight = match is_joined {
                true => Kernels::joined(list, call.dtype),
                false => list.into_iter().next().expect("there is a weight"),
            };
            let x = into_contiguous(rounded::<Self>(x, call.dtype));
            let bias = contiguous(bias);
            let lhs = as_matrix(x.clone());
            let made = wgmma::by_heads([&lhs, &weight], bias.as_ref(), [batch, seq], call.parts);
            drop(lhs);
            let heads = match made {
                Some(heads) => ThreeFloats::of_list(heads),
                None => {
                    let inputs = ProjectionInputs {
                        x: x.clone(),
                        weights: ThreeFloats::of_list([Some(weight.clone()), None, None]),
                        bias: bias.into(),
                    };
                    steps::project::<Self>(inputs, call).heads
                }
            };
            ProjectionOutput {
                heads,
                rounded: is_rounded.then_some(x).into(),
                joined: is_joined.then_some(weight).into(),
            }
        }

        fn merge_heads(inputs: MergeInputs<Self>, task: MergeTask) -> MergeOutput<Self> {
            let own = FloatDType::from(inputs.x.dtype);
            if uses_reference() || own != task.dtype || !wgmma::is_half(own) {
                return steps::merge::<Self>(inputs, task);
            }
            let is_rounded = FloatDType::from(inputs.weight.dtype) != task.dtype;
            let weight = match is_rounded {
                true => Kernels::joined(vec![inputs.weight], task.dtype),
                false => inputs.weight,
            };
            let [batch, _, seq, _] = inputs.x.meta.shape().dims();
            let x = into_contiguous(inputs.x);
            let out = match wgmma::of_heads(&x, &weight) {
                Some(out) => {
                    let width = out.meta.shape()[1];
                    Self::float_reshape(out, Shape::new([batch, seq, width]))
                }
                None => {
                    let weight = weight.clone();
                    steps::merge::<Self>(MergeInputs { x, weight }, task).out
                }
            };
            MergeOutput {
                out,
                weight: is_rounded.then_some(weight).into(),
            }
        }

        fn merge_heads_backward(saved: MergeSaved<Self>, task: MergeTask) -> MergeGrads<Self> {
            if uses_reference() || !wgmma::is_half(task.dtype) {
                return steps::merge_backward::<Self>(saved, task);
            }
            let MergeSaved { x, weight, grad } = saved;
            let grad = into_contiguous(grad);
            let [batch, seq, _] = grad.meta.shape().dims();
            let rows = as_matrix(grad.clone());
            let weight = weight.into_option();
            let mut by_x = None;
            if let (Some(dtype), Some(weight)) = (task.x, &weight)
                && dtype == task.dtype
            {
                let weight = Self::float_swap_dims(weight.clone(), 0, 1);
                let parts = steps::one_part(task.heads);
                let made = wgmma::by_heads([&rows, &weight], None, [batch, seq], parts);
                by_x = made.and_then(|[first, _, _]| first);
            }
            let x = x.into_option();
            let mut by_weight = None;
            if let (Some(dtype), Some(x)) = (task.weight, &x)
                && FloatDType::from(x.dtype) == task.dtype
            {
                let x = into_contiguous(x.clone());
                by_weight = wgmma::parts_of_heads(&x, &rows).map(|parts| {
                    let outputs = rows.meta.shape()[1];
                    let sum = Kernels::sum_matrices(parts, &[outputs]).remove(0);
                    rounded::<Self>(sum, dtype)
                });
            }
            drop(rows);
            // What the kernel did not take.
            let rest = MergeTask {
                x: task.x.filter(|_| by_x.is_none()),
                weight: task.weight.filter(|_| by_weight.is_none()),
                ..task
            };
            if rest.x.is_some() || rest.weight.is_some() {
                let saved = MergeSaved {
                    x: x.filter(|_| rest.weight.is_some()).into(),
                    weight: weight.filter(|_| rest.x.is_some()).into(),
                    grad,
                };
                let made = steps::merge_backward::<Self>(saved, rest);
                by_x = by_x.or(made.x.into_option());
                by_weight = by_weight.or(made.weight.into_option());
            }
            MergeGrads {
                x: OptFloat::from(by_x),
                weight: OptFloat::from(by_weight),
            }
        }
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
    use burn::tensor::FloatDType;

    use super::ProjectionOps;
    use crate::heads::values::{JoinCall, MOST_PARTS};
    use crate::linear::backend::Factor;
    use crate::linear::values::{LinearSaved, LinearTask, WEIGHTS};
    use crate::projection::values::{
        MergeGrads, MergeInputs, MergeOutput, MergeSaved, MergeTask, ProjectionCall,
        ProjectionInputs, ProjectionOutput,
    };
    use burn_blocksparse::internal::outputs::OutputGradients;
    use burn_blocksparse::internal::values::{OptFloat, ThreeFloats};

    type Tracked<B, C> = FloatTensor<Autodiff<B, C>>;

    fn own<T: TensorMetadata>(tensor: &T) -> FloatDType {
        tensor.dtype().into()
    }

    /// The step behind x, the weights, and the bias if there is one, whose outputs are the parts.
    #[derive(Debug)]
    struct Project;

    #[derive(Clone, Debug)]
    struct ProjectState<B: Backend> {
        x: Factor<B>,
        weight: Factor<B>,
        task: LinearTask,
        /// What joins the gradients, with the dtype of the bias whose gradient is wanted.
        join: JoinCall,
        /// How many weights there are.
        weights: usize,
        grads: OutputGradients<B, MOST_PARTS>,
    }

    impl<B: ProjectionOps, const N: usize> Backward<B, N> for Project {
        type State = ProjectState<B>;

        fn backward(
            self,
            ops: Ops<Self::State, N>,
            grads: &mut Gradients,
            checkpointer: &mut Checkpointer,
        ) {
            grads.consume::<B>(&ops.node);
            let state = ops.state;
            let joined = B::join_heads(ThreeFloats::of_list(state.grads.take()), state.join);
            let is_wanted = |wanted: &Option<(usize, Option<FloatDType>)>| {
                wanted.is_some_and(|(_, dtype)| dtype.is_some())
            };
            let mut made = [const { None }; WEIGHTS + 1];
            if state.task.x.is_some() || state.task.weights.iter().any(is_wanted) {
                let saved = LinearSaved {
                    x: state.x.get(checkpointer),
                    weight: state.weight.get(checkpointer),
                    grad: joined.x,
                };
                let gradients = B::linear_backward(saved, state.task);
                let [first, second, third] = gradients.weights.into_list();
                made = [gradients.x.into_option(), first, second, third];
            }
            let gradients = made.into_iter().take(1 + state.weights);
            let gradients = gradients.chain([joined.bias.into_option()]);
            for (parent, grad) in ops.parents.into_iter().zip(gradients) {
                if let (Some(parent), Some(grad)) = (parent, grad) {
                    grads.register::<B>(parent.id, grad);
                }
            }
        }
    }

    fn project_step<B: ProjectionOps, C: CheckpointStrategy, const N: usize>(
        x: Tracked<B, C>,
        weights: Vec<Tracked<B, C>>,
        bias: Option<Tracked<B, C>>,
        call: ProjectionCall,
    ) -> ProjectionOutput<Autodiff<B, C>> {
        let nodes: Vec<NodeGuard> = ([&x].into_iter().chain(&weights).chain(&bias))
            .map(|x| x.node())
            .collect();
        let nodes: [NodeGuard; N] = nodes.try_into().expect("as many nodes as the step has");
        let [batch, seq, _] = x.shape().dims();
        let run = |x: Tracked<B, C>, weights: Vec<Tracked<B, C>>, bias: Option<Tracked<B, C>>| {
            let mut weights = weights.into_iter().map(|weight| weight.into_primitive());
            let inputs = ProjectionInputs {
                x: x.into_primitive(),
                weights: ThreeFloats::of_list(std::array::from_fn(|_| weights.next())),
                bias: bias.map(|bias| bias.into_primitive()).into(),
            };
            B::project_heads(inputs, call)
        };
        let output = |heads| ProjectionOutput {
            heads,
            rounded: OptFloat::None,
            joined: OptFloat::None,
        };
        match Project.prepare::<C>(nodes).compute_bound().stateful() {
            OpsKind::Tracked(mut prep) => {
                let wanted = |tensor: &Tracked<B, C>| tensor.is_tracked().then(|| own(tensor));
                let task = LinearTask {
                    inputs: weights[0].shape()[0],
                    x: wanted(&x),
                    weights: std::array::from_fn(|index| {
                        let weight = weights.get(index)?;
                        Some((weight.shape()[1], wanted(weight)))
                    }),
                };
                let join = JoinCall {
                    rows: [batch, seq],
                    parts: call.parts,
                    dtype: call.dtype,
                    bias: bias.as_ref().and_then(wanted),
                };
                let any_weight = weights.iter().any(|weight| weight.is_tracked());
                // The checkpointer keeps what the product reads as it is.
                let x_node = (any_weight && own(&x) == call.dtype)
                    .then(|| Factor::Input(prep.checkpoint(&x)));
                let is_itself = weights.len() == 1 && own(&weights[0]) == call.dtype;
                let weight_node = (x.is_tracked() && is_itself)
                    .then(|| Factor::Input(prep.checkpoint(&weights[0])));
                let count = weights.len();
                let ProjectionOutput {
                    heads,
                    rounded,
                    joined,
                } = run(x, weights, bias);
                let kept = |wanted: bool, node: Option<Factor<B>>, made: OptFloat<B>| match node {
                    _ if !wanted => Factor::Unused,
                    Some(node) => node,
                    None => made.into_option().map_or(Factor::Unused, Factor::Rounded),
                };
                let grads = OutputGradients::<B, MOST_PARTS>::default();
                let state = ProjectState {
                    x: kept(any_weight, x_node, rounded),
                    weight: kept(task.x.is_some(), weight_node, joined),
                    task,
                    join,
                    weights: count,
                    grads: grads.clone(),
                };
                let tensors = heads.into_list();
                let token = tensors[0].clone().expect("a first part");
                let step = prep.finish(state, token);
                let mut index = 0;
                output(ThreeFloats::of_list(tensors.map(|tensor| {
                    let node = grads.node::<C>(&step, index, tensor?);
                    index += 1;
                    Some(node)
                })))
            }
            OpsKind::UnTracked(prep) => {
                let mut prep = Some(prep);
                let mut constant = |tensor| match prep.take() {
                    Some(prep) => prep.finish(tensor),
                    None => <Autodiff<B, C> as AutodiffBackend>::from_inner(tensor),
                };
                let tensors = run(x, weights, bias).heads.into_list();
                output(ThreeFloats::of_list(
                    tensors.map(|tensor| tensor.map(&mut constant)),
                ))
            }
        }
    }

    /// The step behind x by heads and the weight.
    #[derive(Debug)]
    struct Merge;

    #[derive(Clone, Debug)]
    struct MergeState<B: Backend> {
        x: Factor<B>,
        weight: Factor<B>,
        task: MergeTask,
    }

    impl<B: ProjectionOps> Backward<B, 2> for Merge {
        type State = MergeState<B>;

        fn backward(
            self,
            ops: Ops<Self::State, 2>,
            grads: &mut Gradients,
            checkpointer: &mut Checkpointer,
        ) {
            let grad = grads.consume::<B>(&ops.node);
            let MergeState { x, weight, task } = ops.state;
            let saved = MergeSaved {
                x: x.get(checkpointer),
                weight: weight.get(checkpointer),
                grad,
            };
            let MergeGrads { x, weight } = B::merge_heads_backward(saved, task);
            for (parent, grad) in ops.parents.into_iter().zip([x, weight]) {
                if let (Some(parent), OptFloat::Some(grad)) = (parent, grad) {
                    grads.register::<B>(parent.id, grad);
                }
            }
        }
    }

    impl<B: ProjectionOps, C: CheckpointStrategy> ProjectionOps for Autodiff<B, C> {
        fn project_heads(
            inputs: ProjectionInputs<Self>,
            call: ProjectionCall,
        ) -> ProjectionOutput<Self> {
            let ProjectionInputs { x, weights, bias } = inputs;
            let weights: Vec<_> = weights.into_list().into_iter().flatten().collect();
            let bias = bias.into_option();
            // The number of a step's inputs is part of its type.
            match weights.len() + usize::from(bias.is_some()) {
                1 => project_step::<B, C, 2>(x, weights, bias, call),
                2 => project_step::<B, C, 3>(x, weights, bias, call),
                3 => project_step::<B, C, 4>(x, weights, bias, call),
                4 => project_step::<B, C, 5>(x, weights, bias, call),
                more => unreachable!("{more} weights of {WEIGHTS}, and a bias"),
            }
        }

        fn merge_heads(inputs: MergeInputs<Self>, task: MergeTask) -> MergeOutput<Self> {
            let MergeInputs { x, weight } = inputs;
            let prepared = Merge
                .prepare::<C>([x.node(), weight.node()])
                .compute_bound();
            let run = |x: Tracked<B, C>, weight: Tracked<B, C>| {
                let inputs = MergeInputs {
                    x: x.into_primitive(),
                    weight: weight.into_primitive(),
                };
                B::merge_heads(inputs, task)
            };
            let out = match prepared.stateful() {
                OpsKind::Tracked(mut prep) => {
                    let wanted = |tensor: &Tracked<B, C>| tensor.is_tracked().then(|| own(tensor));
                    let task = MergeTask {
                        x: wanted(&x),
                        weight: wanted(&weight),
                        ..task
                    };
                    let x_kept = match task.weight {
                        Some(_) => Factor::Input(prep.checkpoint(&x)),
                        None => Factor::Unused,
                    };
                    let is_itself = own(&weight) == task.dtype;
                    let weight_node = (task.x.is_some() && is_itself)
                        .then(|| Factor::Input(prep.checkpoint(&weight)));
                    let made = run(x, weight);
                    let weight = match (task.x, weight_node) {
                        (None, _) => Factor::Unused,
                        (Some(_), Some(node)) => node,
                        (Some(_), None) => {
                            (made.weight.into_option()).map_or(Factor::Unused, Factor::Rounded)
                        }
                    };
                    let state = MergeState {
                        x: x_kept,
                        weight,
                        task,
                    };
                    prep.finish(state, made.out)
                }
                OpsKind::UnTracked(prep) => prep.finish(run(x, weight).out),
            };
            MergeOutput {
                out,
                weight: OptFloat::None,
            }
        }

        fn merge_heads_backward(_saved: MergeSaved<Self>, _task: MergeTask) -> MergeGrads<Self> {
            unimplemented!("out_proj is differentiable once")
        }
    }
}
