//! Products on each backend, and their step in Burn's autodiff graph.

#[cfg(any(
    feature = "flex",
    feature = "ndarray",
    feature = "cube",
    feature = "autodiff"
))]
use crate::linear::ops::LinearOps;

#[cfg(feature = "flex")]
impl LinearOps for burn::backend::Flex {}

#[cfg(feature = "ndarray")]
impl LinearOps for burn::backend::NdArray {}

#[cfg(feature = "cube")]
pub(crate) mod kernels {
    use crate::kernels::rows::beside::rounded_beside;
    use blocksparse_cubecl::rows::{Window, column_sums, window_sums};
    use burn::backend::TensorMetadata;
    use burn::backend::cubecl::dtype_to_elem_type;
    use burn::tensor::{DType, FloatDType};
    use burn_cubecl::kernel::into_contiguous;
    use burn_cubecl::kernel::matmul::{MatmulStrategy, matmul};
    use burn_cubecl::tensor::CubeTensor;
    use burn_cubecl::{CubeBackend, CubeDevice};

    use super::LinearOps;
    use crate::linear::named_product as named;
    use crate::linear::products;
    use crate::linear::products::{Primitives, Products};
    use crate::linear::values::{LinearGrads, LinearInputs, LinearOutput, LinearSaved, LinearTask};
    #[cfg(feature = "cuda")]
    use crate::linear::wgmma;
    use burn_blocksparse::internal::cube::{empty, typed, uses_reference};

    /// Burn's matmul, called directly, and our sums over rows.
    pub(crate) struct Kernels;

    impl Products<CubeBackend> for Kernels {
        /// Sums are f32 in any case, so products of half-precision numbers may be written as f32, too: by the same kernels, without a copy of the
        /// factors.
        fn product(lhs: CubeTensor, rhs: CubeTensor, dtype: FloatDType) -> CubeTensor {
            let rows = lhs.meta.shape()[lhs.rank() - 2];
            let columns = rhs.meta.shape()[rhs.rank() - 1];
            // Burn's own outputs may have gaps between their rows.
            let out = match lhs.rank() {
                2 => empty(&lhs, [rows, columns], dtype.into()),
                _ => empty(&lhs, [lhs.meta.shape()[0], rows, columns], dtype.into()),
            };
            #[cfg(feature = "cuda")]
            if wgmma::multiply(&lhs, &rhs, &out) {
                return out;
            }
            if named::multiply(&lhs, &rhs, &out) {
                return out;
            }
            let result = matmul(lhs, rhs, Some(out), MatmulStrategy::default(), dtype.into());
            result.unwrap_or_else(|error| panic!("linear: Burn's matmul: {error:?}"))
        }

        fn sum_matrices(matrices: CubeTensor, widths: &[usize]) -> Vec<CubeTensor> {
            let matrices = into_contiguous(matrices);
            let [count, inner, pitch] = matrices.meta.shape().dims();
            let mut start = 0;
            let mut parts = Vec::new();
            for &width in widths {
                let sum = empty(&matrices, [inner, width], matrices.dtype);
                let window = Window {
                    start,
                    width,
                    pitch,
                };
                let result = window_sums(
                    &matrices.client,
                    typed(&matrices),
                    [count, inner],
                    window,
                    typed(&sum),
                );
                if result.is_err() {
                    return <Primitives as Products<CubeBackend>>::sum_matrices(matrices, widths);
                }
                parts.push(sum);
                start += width;
            }
            parts
        }

        fn joined(weights: Vec<CubeTensor>, dtype: FloatDType) -> CubeTensor {
            let weights: Vec<CubeTensor> = weights.into_iter().map(into_contiguous).collect();
            let [rows, _] = weights[0].meta.shape().dims();
            let element = weights[0].dtype;
            let matrices: Vec<_> = weights
                .iter()
                .map(|weight| (&weight.handle, weight.meta.shape()[1]))
                .collect();
            let width = matrices.iter().map(|(_, width)| width).sum();
            if weights.iter().all(|weight| weight.dtype == element) {
                let out = empty(&weights[0], [rows, width], dtype.into());
                let result = rounded_beside(
                    &out.client,
                    &matrices,
                    dtype_to_elem_type(element),
                    rows,
                    typed(&out),
                );
                if result.is_ok() {
                    return out;
                }
            }
            <Primitives as Products<CubeBackend>>::joined(weights, dtype)
        }

        #[cfg(feature = "cuda")]
        fn parts(lhs: &CubeTensor, rhs: &CubeTensor) -> Option<CubeTensor> {
            wgmma::parts(lhs, rhs)
        }

        fn weight_rows(x: &CubeTensor) -> usize {
            match named::kernel(&x.client, x.dtype) {
                // A partial product is written and read in f32, and these kernels are as fast with few.
                Some(_) => 4096,
                None => <Primitives as Products<CubeBackend>>::weight_rows(x),
            }
        }

        fn sum_rows(matrix: CubeTensor) -> CubeTensor {
            let matrix = into_contiguous(matrix);
            let [rows, width] = matrix.meta.shape().dims();
            let sums = empty(&matrix, [width], matrix.dtype);
            let element = dtype_to_elem_type(matrix.dtype);
            let result = column_sums(
                &matrix.client,
                (&matrix.handle, element),
                [rows, width],
                (&sums.handle, element),
            );
            match result {
                Ok(()) => sums,
                Err(_) => <Primitives as Products<CubeBackend>>::sum_rows(matrix),
            }
        }
    }

    /// Which kernel runs the products of a layer of `[rows, inputs, outputs]`, or why Burn's first one does.
    pub(crate) fn text(
        device: &CubeDevice,
        dtype: DType,
        lengths: [usize; 3],
    ) -> Result<String, String> {
        #[cfg(feature = "cuda")]
        let own = wgmma::text(device, dtype, lengths);
        #[cfg(not(feature = "cuda"))]
        let own = Err::<String, _>("built without the feature cuda".to_owned());
        own.or_else(|why| match named::text(device, dtype, lengths) {
            Ok(text) => Ok(format!("{text}; not on wgmma or mma.sync: {why}")),
            Err(other) => Err(format!("{other}; not on wgmma or mma.sync: {why}")),
        })
    }

    impl LinearOps for CubeBackend {
        fn linear_forward(inputs: LinearInputs<Self>, dtype: FloatDType) -> LinearOutput<Self> {
            match uses_reference() {
                true => products::forward::<Self, Primitives>(inputs, dtype),
                false => products::forward::<Self, Kernels>(inputs, dtype),
            }
        }

        fn linear_backward(saved: LinearSaved<Self>, task: LinearTask) -> LinearGrads<Self> {
            match uses_reference() {
                true => products::backward::<Self, Primitives>(saved, task),
                false => products::backward::<Self, Kernels>(saved, task),
            }
        }
    }
}

#[cfg(feature = "autodiff")]
pub(crate) use steps::Factor;

#[cfg(feature = "autodiff")]
mod steps {
    use burn::backend::autodiff::checkpoint::{base::Checkpointer, strategy::CheckpointStrategy};
    use burn::backend::autodiff::grads::Gradients;
    use burn::backend::autodiff::ops::{Backward, NodeGuard, Ops, OpsKind};
    use burn::backend::autodiff::{Autodiff, NodeId};
    use burn::backend::tensor::FloatTensor;
    use burn::backend::{AutodiffBackend, Backend, TensorMetadata};
    use burn::tensor::FloatDType;

    use super::LinearOps;
    use crate::linear::values::{
        LinearGrads, LinearInputs, LinearOutput, LinearSaved, LinearTask, WEIGHTS,
    };
    use burn_blocksparse::internal::values::{OptFloat, ThreeFloats};

    /// A factor that the backward pass needs: kept by the checkpointer if it is an input itself, or else here as it was rounded.
    #[derive(Clone, Debug)]
    pub(crate) enum Factor<B: Backend> {
        Input(NodeId),
        Rounded(FloatTensor<B>),
        Unused,
    }

    impl<B: Backend> Factor<B> {
        pub fn get(self, checkpointer: &mut Checkpointer) -> OptFloat<B> {
            match self {
                Self::Input(id) => OptFloat::Some(checkpointer.retrieve_node_output(id)),
                Self::Rounded(tensor) => OptFloat::Some(tensor),
                Self::Unused => OptFloat::None,
            }
        }
    }

    /// The step behind x and the weights.
    #[derive(Debug)]
    struct Linear;

    #[derive(Clone, Debug)]
    struct State<B: Backend> {
        x: Factor<B>,
        weight: Factor<B>,
        task: LinearTask,
    }

    impl<B: LinearOps, const N: usize> Backward<B, N> for Linear {
        type State = State<B>;

        fn backward(
            self,
            ops: Ops<Self::State, N>,
            grads: &mut Gradients,
            checkpointer: &mut Checkpointer,
        ) {
            let grad = grads.consume::<B>(&ops.node);
            let State { x, weight, task } = ops.state;
            let saved = LinearSaved {
                x: x.get(checkpointer),
                weight: weight.get(checkpointer),
                grad,
            };
            let made = B::linear_backward(saved, task);
            let gradients = [made.x.into_option()].into_iter();
            let gradients = gradients.chain(made.weights.into_list());
            for (parent, grad) in ops.parents.into_iter().zip(gradients) {
                if let (Some(parent), Some(grad)) = (parent, grad) {
                    grads.register::<B>(parent.id, grad);
                }
            }
        }
    }

    /// The step of `N − 1` weights.
    fn step<B: LinearOps, C: CheckpointStrategy, const N: usize>(
        x: FloatTensor<Autodiff<B, C>>,
        weights: Vec<FloatTensor<Autodiff<B, C>>>,
        dtype: FloatDType,
    ) -> LinearOutput<Autodiff<B, C>> {
        let nodes: Vec<NodeGuard> = [&x].into_iter().chain(&weights).map(|x| x.node()).collect();
        let nodes: [NodeGuard; N] = nodes.try_into().expect("as many nodes as the step has");
        let run = |x: FloatTensor<Autodiff<B, C>>, weights: Vec<FloatTensor<Autodiff<B, C>>>| {
            let mut weights = weights.into_iter().map(|weight| weight.into_primitive());
            let inputs = LinearInputs {
                x: x.into_primitive(),
                weights: ThreeFloats::of_list(std::array::from_fn(|_| weights.next())),
            };
            B::linear_forward(inputs, dtype)
        };
        let constant = |tensor: OptFloat<B>| {
            let tensor = tensor.into_option();
            tensor
                .map(<Autodiff<B, C> as AutodiffBackend>::from_inner)
                .into()
        };
        match Linear.prepare::<C>(nodes).compute_bound().stateful() {
            OpsKind::Tracked(mut prep) => {
                let own = |tensor: &FloatTensor<Autodiff<B, C>>| FloatDType::from(tensor.dtype());
                let wanted =
                    |tensor: &FloatTensor<Autodiff<B, C>>| tensor.is_tracked().then(|| own(tensor));
                let task = LinearTask {
                    inputs: weights[0].shape()[0],
                    x: wanted(&x),
                    weights: std::array::from_fn(|index| {
                        let weight = weights.get(index)?;
                        Some((weight.shape()[1], wanted(weight)))
                    }),
                };
                let any_weight = weights.iter().any(|weight| weight.is_tracked());
                // The checkpointer keeps what the product reads as it is.
                let x_node =
                    (any_weight && own(&x) == dtype).then(|| Factor::Input(prep.checkpoint(&x)));
                let is_itself = weights.len() == 1 && own(&weights[0]) == dtype;
                let weight_node = (x.is_tracked() && is_itself)
                    .then(|| Factor::Input(prep.checkpoint(&weights[0])));
                let LinearOutput {
                    out,
                    rounded,
                    joined,
                } = run(x, weights);
                let kept = |wanted: bool, node: Option<Factor<B>>, made: OptFloat<B>| match node {
                    _ if !wanted => Factor::Unused,
                    Some(node) => node,
                    None => made.into_option().map_or(Factor::Unused, Factor::Rounded),
                };
                let state = State {
                    x: kept(any_weight, x_node, rounded),
                    weight: kept(task.x.is_some(), weight_node, joined),
                    task,
                };
                LinearOutput {
                    out: prep.finish(state, out),
                    rounded: OptFloat::None,
                    joined: OptFloat::None,
                }
            }
            OpsKind::UnTracked(prep) => {
                let made = run(x, weights);
                LinearOutput {
                    out: prep.finish(made.out),
                    rounded: constant(made.rounded),
                    joined: constant(made.joined),
                }
            }
        }
    }

    impl<B: LinearOps, C: CheckpointStrategy> LinearOps for Autodiff<B, C> {
        fn linear_forward(inputs: LinearInputs<Self>, dtype: FloatDType) -> LinearOutput<Self> {
            let LinearInputs { x, weights } = inputs;
            let weights: Vec<_> = weights.into_list().into_iter().flatten().collect();
            // The number of a step's inputs is part of its type.
            match weights.len() {
                1 => step::<B, C, 2>(x, weights, dtype),
                2 => step::<B, C, 3>(x, weights, dtype),
                3 => step::<B, C, 4>(x, weights, dtype),
                more => unreachable!("{more} weights of {WEIGHTS}"),
            }
        }

        fn linear_backward(_saved: LinearSaved<Self>, _task: LinearTask) -> LinearGrads<Self> {
            unimplemented!("linear is differentiable once")
        }
    }
}
