//! Queries that walk lists of their own on each backend, and their step in Burn's autodiff graph.

use crate::selection::list_ops::BlockIndicesOps;

#[cfg(feature = "flex")]
impl BlockIndicesOps for burn::backend::Flex {}

#[cfg(feature = "ndarray")]
impl BlockIndicesOps for burn::backend::NdArray {}

pub(crate) mod kernels {
    use crate::kernels::listed;
    use crate::kernels::listed::{ListedGradients, ListedLists, ListedPlan, ListedRequest};
    use blocksparse_cubecl::OutputGrads as KernelGrads;
    use blocksparse_cubecl::Outputs;
    use burn::backend::cubecl::dtype_to_elem_type;
    use burn::tensor::{DType, IntDType};
    use burn_cubecl::kernel::{cast, into_contiguous};
    use burn_cubecl::tensor::CubeTensor;
    use burn_cubecl::{CubeBackend, CubeDevice};

    use super::BlockIndicesOps;
    use crate::selection::list_ops::{
        BlockIndicesCall, BlockIndicesGrads, BlockIndicesInputs, BlockIndicesOutput,
        BlockIndicesSaved,
    };
    use burn_blocksparse::AttentionOptions;
    use burn_blocksparse::backend::BlockSparseOps;
    use burn_blocksparse::internal::cube::{contiguous, launched, readable, view};
    use burn_blocksparse::internal::values::{
        AttentionInputs, AttentionOutput, LayoutTensors, NeedsGrad, OptFloat, OutputGrads,
        SavedTensors, ScoreTensors,
    };

    /// Elements of 16 bytes, which rows begin at multiples of.
    pub(crate) const ALIGNMENT: usize = 8;

    /// What a device runs for a call, or why it does not.
    pub(crate) fn plan(
        device: &CubeDevice,
        request: ListedRequest,
    ) -> Result<ListedPlan, &'static str> {
        ListedPlan::of(&device.client(), request)
    }

    /// What runs of a call that was planned before.
    pub(crate) fn planned(q: &CubeTensor, request: ListedRequest) -> ListedPlan {
        let plan = ListedPlan::of(&q.client, request);
        plan.unwrap_or_else(|why| panic!("attention over lists: {why}"))
    }

    /// Lists as kernels read them.
    pub(crate) fn numbers(x: CubeTensor) -> CubeTensor {
        into_contiguous(cast(x, IntDType::I32.into()))
    }

    /// The sizes of a call by its shapes, and the dtype of its queries.
    pub(crate) fn request(
        [q, k, v]: [[usize; 4]; 3],
        dtype: DType,
        most: usize,
        tiles: usize,
        call: BlockIndicesCall,
    ) -> ListedRequest {
        let [batch, heads, seq_q, head_dim] = q;
        let [_, kv_heads, seq_kv, _] = k;
        ListedRequest::new(
            [batch, heads, kv_heads],
            [seq_q, seq_kv],
            [head_dim, v[3]],
            dtype_to_elem_type(dtype),
            [call.block, most],
            [call.tile, tiles],
        )
        .with_overlap(call.overlap)
    }

    /// The inputs as kernels read them, and what runs.
    struct Call {
        inputs: [CubeTensor; 3],
        blocks: CubeTensor,
        queries: CubeTensor,
        tile_blocks: CubeTensor,
        plan: ListedPlan,
        scale: f64,
    }

    impl Call {
        fn new(
            inputs: BlockIndicesInputs<CubeBackend>,
            options: &AttentionOptions,
            call: BlockIndicesCall,
        ) -> Self {
            let BlockIndicesInputs {
                q,
                k,
                v,
                blocks,
                queries,
                tile_blocks,
            } = inputs;
            let shapes = [&q, &k, &v].map(|x| x.meta.shape().dims());
            let (most, tiles) = (blocks.meta.shape()[3], tile_blocks.meta.shape()[2]);
            let request = request(shapes, q.dtype, most, tiles, call);
            Self {
                plan: planned(&q, request),
                scale: options.scale_for(request.head_dim),
                inputs: [q, k, v].map(|x| readable(x, ALIGNMENT)),
                blocks: numbers(blocks),
                queries: numbers(queries),
                tile_blocks: numbers(tile_blocks),
            }
        }
    }

    /// The inputs of attention over the layout alone.
    fn near(inputs: &BlockIndicesInputs<CubeBackend>) -> AttentionInputs<CubeBackend> {
        AttentionInputs {
            q: inputs.q.clone(),
            k: inputs.k.clone(),
            v: inputs.v.clone(),
            scores: ScoreTensors::default(),
        }
    }

    impl BlockIndicesOps for CubeBackend {
        /// Attention over the layout, which lists carry on.
        fn listed_attention(
            inputs: BlockIndicesInputs<Self>,
            layout: LayoutTensors<Self>,
            options: AttentionOptions,
            call: BlockIndicesCall,
        ) -> BlockIndicesOutput<Self> {
            let over_layout = Self::block_sparse_attention(near(&inputs), layout, options.clone());
            let AttentionOutput { out, lse, .. } = over_layout;
            let call = Call::new(inputs, &options, call);
            let views = [0, 1, 2].map(|input| view(&call.inputs[input]));
            launched(listed::forward(
                &out.client,
                &call.plan,
                [&views[0], &views[1], &views[2]],
                &call.blocks.handle,
                Outputs::new(&out.handle, &lse.handle),
                call.scale,
                true,
            ));
            BlockIndicesOutput { out, lse }
        }

        /// With lse and delta over all keys, the gradients by layout and lists are sums.
        fn listed_attention_backward(
            saved: BlockIndicesSaved<Self>,
            grads: OutputGrads<Self>,
            layout: LayoutTensors<Self>,
            options: AttentionOptions,
            call: BlockIndicesCall,
        ) -> BlockIndicesGrads<Self> {
            let BlockIndicesSaved { inputs, output } = saved;
            // Kernels read queries, and gradients by what they see, as rows of one matrix.
            let [q, out, lse, grad_out] =
                [inputs.q.clone(), output.out, output.lse, grads.out].map(into_contiguous);
            let inputs = BlockIndicesInputs { q, ..inputs };
            let grad_lse = contiguous(grads.lse);
            let over_layout = Self::block_sparse_attention_backward(
                SavedTensors {
                    inputs: near(&inputs),
                    output: AttentionOutput {
                        out: out.clone(),
                        lse: lse.clone(),
                        weights: OptFloat::None,
                        max_scores: OptFloat::None,
                    },
                },
                OutputGrads {
                    out: grad_out.clone(),
                    lse: grad_lse.clone().into(),
                },
                layout,
                options.clone(),
                NeedsGrad::default(),
            );
            let call = Call::new(inputs, &options, call);
            let views = [0, 1, 2].map(|input| view(&call.inputs[input]));
            let grad_view = view(&readable(grad_out, ALIGNMENT));
            launched(listed::backward(
                &out.client,
                &call.plan,
                [&views[0], &views[1], &views[2]],
                ListedLists::Blocks {
                    blocks: &call.blocks.handle,
                    queries: &call.queries.handle,
                    tile_blocks: &call.tile_blocks.handle,
                },
                Outputs::new(&out.handle, &lse.handle),
                KernelGrads {
                    out: &grad_view,
                    lse: grad_lse.as_ref().map(|grad| &grad.handle),
                },
                ListedGradients {
                    q: &over_layout.q.handle,
                    k: &over_layout.k.handle,
                    v: &over_layout.v.handle,
                },
                call.scale,
            ));
            BlockIndicesGrads {
                q: over_layout.q,
                k: over_layout.k,
                v: over_layout.v,
            }
        }
    }
}

#[cfg(feature = "autodiff")]
mod step {
    use burn::backend::Backend;
    use burn::backend::autodiff::checkpoint::{base::Checkpointer, strategy::CheckpointStrategy};
    use burn::backend::autodiff::grads::Gradients;
    use burn::backend::autodiff::ops::{Backward, Ops, OpsKind};
    use burn::backend::autodiff::{Autodiff, NodeId};
    use burn::backend::tensor::IntTensor;

    use super::BlockIndicesOps;
    use crate::selection::list_ops::{
        BlockIndicesCall, BlockIndicesGrads, BlockIndicesInputs, BlockIndicesOutput,
        BlockIndicesSaved,
    };
    use burn_blocksparse::AttentionOptions;
    use burn_blocksparse::internal::inner_layout;
    use burn_blocksparse::internal::outputs::{OutputGradients, or_zeros};
    use burn_blocksparse::internal::values::{LayoutTensors, OutputGrads};

    /// The step whose outputs are out and lse.
    #[derive(Debug)]
    struct Listed;

    /// q, k and v stay with the checkpointer: under gradient checkpointing it may compute them again.
    #[derive(Clone, Debug)]
    struct State<B: Backend> {
        inputs: [NodeId; 3],
        blocks: IntTensor<B>,
        queries: IntTensor<B>,
        tile_blocks: IntTensor<B>,
        output: BlockIndicesOutput<B>,
        layout: LayoutTensors<B>,
        options: AttentionOptions,
        call: BlockIndicesCall,
        /// By out and lse.
        grads: OutputGradients<B, 2>,
    }

    impl<B: BlockIndicesOps> Backward<B, 3> for Listed {
        type State = State<B>;

        fn backward(
            self,
            ops: Ops<Self::State, 3>,
            grads: &mut Gradients,
            checkpointer: &mut Checkpointer,
        ) {
            grads.consume::<B>(&ops.node);
            let State {
                inputs,
                blocks,
                queries,
                tile_blocks,
                output,
                layout,
                options,
                call,
                grads: cell,
            } = ops.state;
            let [grad_out, grad_lse] = cell.take();
            let output_grads = OutputGrads {
                out: or_zeros::<B>(grad_out, &output.out),
                lse: grad_lse.into(),
            };
            let [q, k, v] = inputs.map(|id| checkpointer.retrieve_node_output(id));
            let inputs = BlockIndicesInputs {
                q,
                k,
                v,
                blocks,
                queries,
                tile_blocks,
            };
            let saved = BlockIndicesSaved { inputs, output };
            let BlockIndicesGrads { q, k, v } =
                B::listed_attention_backward(saved, output_grads, layout, options, call);
            for (parent, grad) in ops.parents.into_iter().zip([q, k, v]) {
                if let Some(parent) = parent {
                    grads.register::<B>(parent.id, grad);
                }
            }
        }
    }

    impl<B: BlockIndicesOps, C: CheckpointStrategy> BlockIndicesOps for Autodiff<B, C> {
        fn listed_attention(
            inputs: BlockIndicesInputs<Self>,
            layout: LayoutTensors<Self>,
            options: AttentionOptions,
            call: BlockIndicesCall,
        ) -> BlockIndicesOutput<Self> {
            let nodes = [inputs.q.node(), inputs.k.node(), inputs.v.node()];
            let prepared = Listed.prepare::<C>(nodes).compute_bound();
            let layout = inner_layout(layout);
            let run = |inputs: BlockIndicesInputs<Self>| {
                let inputs = BlockIndicesInputs {
                    q: inputs.q.into_primitive(),
                    k: inputs.k.into_primitive(),
                    v: inputs.v.into_primitive(),
                    blocks: inputs.blocks,
                    queries: inputs.queries,
                    tile_blocks: inputs.tile_blocks,
                };
                B::listed_attention(inputs, layout.clone(), options.clone(), call)
            };
            match prepared.stateful() {
                OpsKind::Tracked(mut prep) => {
                    let nodes =
                        [&inputs.q, &inputs.k, &inputs.v].map(|input| prep.checkpoint(input));
                    let lists = [&inputs.blocks, &inputs.queries, &inputs.tile_blocks];
                    let [blocks, queries, tile_blocks] = lists.map(Clone::clone);
                    let output = run(inputs);
                    let BlockIndicesOutput { out, lse } = output.clone();
                    let grads = OutputGradients::<B, 2>::default();
                    let state = State {
                        inputs: nodes,
                        blocks,
                        queries,
                        tile_blocks,
                        output,
                        layout: layout.clone(),
                        options: options.clone(),
                        call,
                        grads: grads.clone(),
                    };
                    let step = prep.finish(state, lse.clone());
                    BlockIndicesOutput {
                        out: grads.node::<C>(&step, 0, out),
                        lse: grads.node::<C>(&step, 1, lse),
                    }
                }
                OpsKind::UnTracked(prep) => {
                    let BlockIndicesOutput { out, lse } = run(inputs);
                    let lse = <Self as burn::backend::AutodiffBackend>::from_inner(lse);
                    BlockIndicesOutput {
                        out: prep.finish(out),
                        lse,
                    }
                }
            }
        }

        /// Overridden so that nothing of it runs through autodiff.
        fn listed_attention_backward(
            _saved: BlockIndicesSaved<Self>,
            _grads: OutputGrads<Self>,
            _layout: LayoutTensors<Self>,
            _options: AttentionOptions,
            _call: BlockIndicesCall,
        ) -> BlockIndicesGrads<Self> {
            unimplemented!("attention over lists is differentiable once")
        }
    }
}
