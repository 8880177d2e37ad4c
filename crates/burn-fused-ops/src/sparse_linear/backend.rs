//! Products with block-sparse weights on each backend, and their step in Burn's autodiff graph.

#[cfg(any(
    feature = "flex",
    feature = "ndarray",
    feature = "cube",
    feature = "autodiff"
))]
use crate::sparse_linear::ops::BlockSparseLinearOps;

#[cfg(feature = "flex")]
impl BlockSparseLinearOps for burn::backend::Flex {}

#[cfg(feature = "ndarray")]
impl BlockSparseLinearOps for burn::backend::NdArray {}

#[cfg(feature = "cube")]
pub(crate) mod kernels {
    use blocksparse::WeightLayout;
    use burn::tensor::{DType, FloatDType};
    use burn_cubecl::tensor::CubeTensor;
    use burn_cubecl::{CubeBackend, CubeDevice};

    use super::BlockSparseLinearOps;
    use crate::linear::backend::kernels::Kernels;
    use crate::linear::products::Primitives;
    use crate::sparse_linear::products::{
        Gathered, Pass, SparseProducts, backward_input, backward_weight, forward,
    };
    use crate::sparse_linear::values::{
        SparseLinearCall, SparseLinearInputs, SparseLinearOutput, SparseLinearSaved,
    };
    use burn_blocksparse::internal::cube::uses_reference;

    /// One product, as [`Pass`] describes it, if a kernel takes it: in the factors' dtype, or that of their sums.
    fn product(
        pass: Pass,
        factors: [&CubeTensor; 2],
        layout: &WeightLayout,
        dtype: FloatDType,
    ) -> Option<CubeTensor> {
        #[cfg(feature = "cuda")]
        return crate::sparse_linear::wgmma::product(pass, factors, layout, dtype.into());
        #[cfg(not(feature = "cuda"))]
        {
            let _ = (pass, factors, layout, dtype);
            None
        }
    }

    /// How the products of `rows` rows are launched, or why by Burn's operations.
    pub(crate) fn text(
        device: &CubeDevice,
        dtype: DType,
        rows: usize,
        layout: &WeightLayout,
    ) -> Result<String, String> {
        if uses_reference() {
            return Err("BLOCKSPARSE_REFERENCE is set".to_owned());
        }
        #[cfg(feature = "cuda")]
        let made = crate::sparse_linear::wgmma::text(device, dtype, rows, layout);
        #[cfg(not(feature = "cuda"))]
        let made: Result<String, String> = {
            let _ = (device, dtype, rows, layout);
            Err("the feature `cuda` is off".to_owned())
        };
        made.map_err(|why| {
            format!("{why}: kept blocks are gathered and multiplied in batches of Burn's")
        })
    }

    /// The kernel where it takes the call; gathered products elsewhere.
    struct SparseKernels;

    impl SparseProducts<CubeBackend> for SparseKernels {
        fn sparse_product(
            pass: Pass,
            factors: [CubeTensor; 2],
            layout: &WeightLayout,
            dtype: FloatDType,
        ) -> CubeTensor {
            match product(pass, [&factors[0], &factors[1]], layout, dtype) {
                Some(made) => made,
                None => <Gathered<Kernels> as SparseProducts<CubeBackend>>::sparse_product(
                    pass, factors, layout, dtype,
                ),
            }
        }
    }

    impl BlockSparseLinearOps for CubeBackend {
        fn block_sparse_linear_forward(
            inputs: SparseLinearInputs<Self>,
            call: SparseLinearCall,
        ) -> SparseLinearOutput<Self> {
            match uses_reference() {
                true => forward::<Self, Gathered<Primitives>>(inputs, call),
                false => forward::<Self, SparseKernels>(inputs, call),
            }
        }

        fn block_sparse_linear_backward_input(
            saved: SparseLinearSaved<Self>,
            call: SparseLinearCall,
        ) -> CubeTensor {
            match uses_reference() {
                true => backward_input::<Self, Gathered<Primitives>>(saved, call),
                false => backward_input::<Self, SparseKernels>(saved, call),
            }
        }

        fn block_sparse_linear_backward_weight(
            saved: SparseLinearSaved<Self>,
            call: SparseLinearCall,
        ) -> CubeTensor {
            match uses_reference() {
                true => backward_weight::<Self, Gathered<Primitives>>(saved, call),
                false => backward_weight::<Self, SparseKernels>(saved, call),
            }
        }
    }
}

#[cfg(feature = "autodiff")]
mod steps {
    use blocksparse::WeightLayout;
    use burn::backend::autodiff::Autodiff;
    use burn::backend::autodiff::checkpoint::{base::Checkpointer, strategy::CheckpointStrategy};
    use burn::backend::autodiff::grads::Gradients;
    use burn::backend::autodiff::ops::{Backward, Ops, OpsKind};
    use burn::backend::tensor::FloatTensor;
    use burn::backend::{AutodiffBackend, Backend, TensorMetadata};
    use burn::tensor::FloatDType;

    use super::BlockSparseLinearOps;
    use crate::linear::backend::Factor;
    use crate::sparse_linear::values::{
        SparseLinearCall, SparseLinearInputs, SparseLinearOutput, SparseLinearSaved,
    };
    use burn_blocksparse::internal::values::OptFloat;

    /// The step behind x and the weight.
    #[derive(Debug)]
    struct SparseLinear;

    #[derive(Clone, Debug)]
    struct State<B: Backend> {
        layout: WeightLayout,
        /// The dtypes of x and of the weight.
        dtypes: [FloatDType; 2],
        x: Factor<B>,
        weight: Factor<B>,
    }

    impl<B: BlockSparseLinearOps> Backward<B, 2> for SparseLinear {
        type State = State<B>;

        fn backward(
            self,
            ops: Ops<Self::State, 2>,
            grads: &mut Gradients,
            checkpointer: &mut Checkpointer,
        ) {
            let grad = grads.consume::<B>(&ops.node);
            let State {
                layout,
                dtypes,
                x,
                weight,
            } = ops.state;
            let [by_x, by_weight] = dtypes.map(|dtype| SparseLinearCall {
                layout: layout.clone(),
                dtype,
            });
            let saved = |factor: Option<FloatTensor<B>>| SparseLinearSaved {
                factor: factor.expect("kept for the gradient that needs it"),
                grad: grad.clone(),
            };
            let [x_node, weight_node] = ops.parents;
            if let Some(node) = x_node {
                let saved = saved(weight.get(checkpointer).into_option());
                let made = B::block_sparse_linear_backward_input(saved, by_x);
                grads.register::<B>(node.id, made);
            }
            if let Some(node) = weight_node {
                let saved = saved(x.get(checkpointer).into_option());
                let made = B::block_sparse_linear_backward_weight(saved, by_weight);
                grads.register::<B>(node.id, made);
            }
        }
    }

    impl<B: BlockSparseLinearOps, C: CheckpointStrategy> BlockSparseLinearOps for Autodiff<B, C> {
        fn block_sparse_linear_forward(
            inputs: SparseLinearInputs<Self>,
            call: SparseLinearCall,
        ) -> SparseLinearOutput<Self> {
            let SparseLinearInputs { x, weight } = inputs;
            let own = |tensor: &FloatTensor<Self>| FloatDType::from(tensor.dtype());
            let constant = |tensor: OptFloat<B>| {
                let tensor = tensor.into_option();
                tensor.map(<Self as AutodiffBackend>::from_inner).into()
            };
            let run = |x: FloatTensor<Self>, weight: FloatTensor<Self>, call| {
                let inputs = SparseLinearInputs {
                    x: x.into_primitive(),
                    weight: weight.into_primitive(),
                };
                B::block_sparse_linear_forward(inputs, call)
            };
            let nodes = [x.node(), weight.node()];
            match SparseLinear.prepare::<C>(nodes).compute_bound().stateful() {
                OpsKind::Tracked(mut prep) => {
                    let dtypes = [own(&x), own(&weight)];
                    let is_tracked = [x.is_tracked(), weight.is_tracked()];
                    // The checkpointer keeps what the product reads as it is.
                    let x_node = (is_tracked[1] && dtypes[0] == call.dtype)
                        .then(|| Factor::Input(prep.checkpoint(&x)));
                    let weight_node = (is_tracked[0] && dtypes[1] == call.dtype)
                        .then(|| Factor::Input(prep.checkpoint(&weight)));
                    let layout = call.layout.clone();
                    let made = run(x, weight, call);
                    let kept = |wanted: bool, node: Option<Factor<B>>, made: OptFloat<B>| match node
                    {
                        _ if !wanted => Factor::Unused,
                        Some(node) => node,
                        None => made.into_option().map_or(Factor::Unused, Factor::Rounded),
                    };
                    let state = State {
                        layout,
                        dtypes,
                        x: kept(is_tracked[1], x_node, made.x),
                        weight: kept(is_tracked[0], weight_node, made.weight),
                    };
                    SparseLinearOutput {
                        out: prep.finish(state, made.out),
                        x: OptFloat::None,
                        weight: OptFloat::None,
                    }
                }
                OpsKind::UnTracked(prep) => {
                    let made = run(x, weight, call);
                    SparseLinearOutput {
                        out: prep.finish(made.out),
                        x: constant(made.x),
                        weight: constant(made.weight),
                    }
                }
            }
        }

        fn block_sparse_linear_backward_input(
            _saved: SparseLinearSaved<Self>,
            _call: SparseLinearCall,
        ) -> FloatTensor<Self> {
            unimplemented!("block_sparse_linear is differentiable once")
        }

        fn block_sparse_linear_backward_weight(
            _saved: SparseLinearSaved<Self>,
            _call: SparseLinearCall,
        ) -> FloatTensor<Self> {
            unimplemented!("block_sparse_linear is differentiable once")
        }
    }
}
