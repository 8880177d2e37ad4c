//! Queries that list single keys on each backend, and their step in Burn's autodiff graph.

#[cfg(any(
    feature = "flex",
    feature = "ndarray",
    feature = "cube",
    feature = "autodiff"
))]
use crate::selection::key_list_ops::TokenSparseOps;

#[cfg(feature = "flex")]
impl TokenSparseOps for burn::backend::Flex {}

#[cfg(feature = "ndarray")]
impl TokenSparseOps for burn::backend::NdArray {}

#[cfg(all(feature = "cube", not(feature = "cuda")))]
impl TokenSparseOps for burn_cubecl::CubeBackend {}

#[cfg(feature = "cuda")]
pub(crate) mod kernels {
    use std::sync::Arc;

    use crate::kernels::listed;
    use crate::kernels::listed::{
        KeyListPlan, ListedGradients, ListedLists, ListedRequest, Way, neighbours,
    };
    use blocksparse_cubecl::OutputGrads as KernelGrads;
    use blocksparse_cubecl::Outputs;
    use burn::backend::cubecl::dtype_to_elem_type;
    use burn::tensor::DType;
    use burn_cubecl::CubeBackend;
    use burn_cubecl::kernel::into_contiguous;
    use burn_cubecl::tensor::CubeTensor;

    use super::TokenSparseOps;
    use crate::selection::key_list_ops::{
        TokenSparseCall, TokenSparseGrads, TokenSparseInputs, TokenSparseOutput, TokenSparseSaved,
    };
    use crate::selection::key_reference as reference;
    use crate::selection::list_backend::kernels::{ALIGNMENT, numbers};
    use burn_blocksparse::AttentionOptions;
    use burn_blocksparse::backend::BlockSparseOps;
    use burn_blocksparse::internal::cube::{
        checked, contiguous, empty, filled, launched, readable, view,
    };
    use burn_blocksparse::internal::values::{
        AttentionGrads, AttentionInputs, AttentionOutput, DynamicBlocks, KernelPlan, LayoutTensors,
        NeedsGrad, OptFloat, OutputGrads, SavedTensors, ScoreTensors,
    };

    /// The sizes of a call by its shapes, and the dtype of its queries.
    pub(crate) fn request(
        [q, k, v]: [[usize; 4]; 3],
        dtype: DType,
        most: usize,
        causal: bool,
        overlap: f64,
    ) -> ListedRequest {
        let [batch, heads, seq_q, head_dim] = q;
        let [_, kv_heads, seq_kv, _] = k;
        ListedRequest::of_keys(
            [batch, heads, kv_heads],
            [seq_q, seq_kv],
            [head_dim, v[3]],
            dtype_to_elem_type(dtype),
            most,
            causal,
        )
        .with_overlap(overlap)
    }

    /// What runs of a call that was planned before.
    fn planned(
        inputs: &TokenSparseInputs<CubeBackend>,
        call: &TokenSparseCall,
    ) -> Arc<KeyListPlan> {
        let TokenSparseInputs { q, k, v, keys } = inputs;
        let shapes = [q, k, v].map(|x| x.meta.shape().dims());
        let most = keys.meta.shape()[3];
        let request = request(shapes, q.dtype, most, call.causal, call.overlap);
        let plan = KeyListPlan::of(&q.client, request, call.scale);
        plan.unwrap_or_else(|why| panic!("attention over lists: {why}"))
    }

    /// The inputs as kernels that walk lists read them.
    struct Walked {
        inputs: [CubeTensor; 3],
        keys: CubeTensor,
    }

    impl Walked {
        fn new(inputs: TokenSparseInputs<CubeBackend>) -> Self {
            let TokenSparseInputs { q, k, v, keys } = inputs;
            Self {
                inputs: [q, k, v].map(|x| readable(x, ALIGNMENT)),
                keys: numbers(keys),
            }
        }
    }

    /// A call as one over a layout.
    struct InTiles {
        inputs: AttentionInputs<CubeBackend>,
        layout: LayoutTensors<CubeBackend>,
        options: AttentionOptions,
    }

    impl InTiles {
        fn new(inputs: TokenSparseInputs<CubeBackend>, plan: &KeyListPlan, scale: f64) -> Self {
            let TokenSparseInputs { q, k, v, keys } = inputs;
            let (tiles, keys) = (plan.tiles(), numbers(keys));
            let layout = checked(tiles.layout(&q.client, &keys.handle));
            Self {
                layout: LayoutTensors {
                    // Kernels read none.
                    blocked: keys,
                    // The layout has its pairs.
                    choice: DynamicBlocks::Host,
                    host: layout,
                    plan: KernelPlan {
                        plan: Some(tiles.plan().clone()),
                    },
                },
                inputs: AttentionInputs {
                    q,
                    k,
                    v,
                    scores: ScoreTensors::default(),
                },
                options: AttentionOptions::default().scale(scale),
            }
        }
    }

    impl TokenSparseOps for CubeBackend {
        fn key_list_attention(
            inputs: TokenSparseInputs<Self>,
            call: TokenSparseCall,
        ) -> TokenSparseOutput<Self> {
            if !call.dispatch {
                return reference::forward::<Self>(inputs, &call);
            }
            let (plan, scale) = (planned(&inputs, &call), call.scale);
            if plan.forward() == Way::Tiles {
                let InTiles {
                    inputs,
                    layout,
                    options,
                } = InTiles::new(inputs, &plan, scale);
                let output = Self::block_sparse_attention(inputs, layout, options);
                let AttentionOutput { out, lse, .. } = output;
                return TokenSparseOutput { out, lse };
            }
            let call = Walked::new(inputs);
            let q = &call.inputs[0];
            let [batch, heads, seq_q, _] = q.meta.shape().dims();
            let value_dim = call.inputs[2].meta.shape()[3];
            let out = empty(q, [batch, heads, seq_q, value_dim], q.dtype);
            let lse = empty(q, [batch, heads, seq_q], DType::F32);
            let views = [0, 1, 2].map(|input| view(&call.inputs[input]));
            let inputs = [&views[0], &views[1], &views[2]];
            let (client, keys) = (&out.client, &call.keys.handle);
            let outputs = Outputs::new(&out.handle, &lse.handle);
            launched(match plan.forward() {
                Way::Neighbours => {
                    let plan = plan.neighbours();
                    neighbours::forward(client, plan, inputs, keys, outputs, scale, false)
                }
                _ => listed::forward(client, plan.walk(), inputs, keys, outputs, scale, false),
            });
            TokenSparseOutput { out, lse }
        }

        fn key_list_attention_backward(
            saved: TokenSparseSaved<Self>,
            grads: OutputGrads<Self>,
            call: TokenSparseCall,
        ) -> TokenSparseGrads<Self> {
            if !call.dispatch {
                return reference::backward::<Self>(saved, grads, &call);
            }
            let TokenSparseSaved { inputs, output } = saved;
            let (plan, scale) = (planned(&inputs, &call), call.scale);
            if plan.backward() == Way::Tiles {
                let InTiles {
                    inputs,
                    layout,
                    options,
                } = InTiles::new(inputs, &plan, scale);
                let saved = SavedTensors {
                    inputs,
                    output: AttentionOutput {
                        out: output.out,
                        lse: output.lse,
                        weights: OptFloat::None,
                        max_scores: OptFloat::None,
                    },
                };
                let wanted = NeedsGrad::default();
                let AttentionGrads { q, k, v, .. } =
                    Self::block_sparse_attention_backward(saved, grads, layout, options, wanted);
                return TokenSparseGrads { q, k, v };
            }
            // Kernels read queries, and gradients by what they see, as rows of one matrix.
            let [q, out, lse, grad_out] =
                [inputs.q.clone(), output.out, output.lse, grads.out].map(into_contiguous);
            let call = Walked::new(TokenSparseInputs { q, ..inputs });
            let grad_lse = contiguous(grads.lse);
            let views = [0, 1, 2].map(|input| view(&call.inputs[input]));
            let grad_view = view(&readable(grad_out, ALIGNMENT));
            // Kernels add to what is there.
            let [q, k, v] = [0, 1, 2].map(|input| {
                let x = &call.inputs[input];
                filled::<4>(x, x.meta.shape().dims(), 0.0, x.dtype)
            });
            let inputs = [&views[0], &views[1], &views[2]];
            let (client, keys) = (&out.client, &call.keys.handle);
            let outputs = Outputs::new(&out.handle, &lse.handle);
            let by = KernelGrads {
                out: &grad_view,
                lse: grad_lse.as_ref().map(|grad| &grad.handle),
            };
            let made = ListedGradients {
                q: &q.handle,
                k: &k.handle,
                v: &v.handle,
            };
            launched(match plan.backward() {
                Way::Neighbours => {
                    let plan = plan.neighbours();
                    neighbours::backward(client, plan, inputs, keys, outputs, by, made, scale)
                }
                _ => {
                    let (plan, lists) = (plan.walk(), ListedLists::Keys(keys));
                    listed::backward(client, plan, inputs, lists, outputs, by, made, scale)
                }
            });
            TokenSparseGrads { q, k, v }
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

    use super::TokenSparseOps;
    use crate::selection::key_list_ops::{
        TokenSparseCall, TokenSparseGrads, TokenSparseInputs, TokenSparseOutput, TokenSparseSaved,
    };
    use burn_blocksparse::internal::outputs::{OutputGradients, or_zeros};
    use burn_blocksparse::internal::values::OutputGrads;

    /// The step whose outputs are out and lse.
    #[derive(Debug)]
    struct OverKeys;

    /// q, k and v stay with the checkpointer: under gradient checkpointing it may compute them again.
    #[derive(Clone, Debug)]
    struct State<B: Backend> {
        inputs: [NodeId; 3],
        keys: IntTensor<B>,
        output: TokenSparseOutput<B>,
        call: TokenSparseCall,
        /// By out and lse.
        grads: OutputGradients<B, 2>,
    }

    impl<B: TokenSparseOps> Backward<B, 3> for OverKeys {
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
                keys,
                output,
                call,
                grads: cell,
            } = ops.state;
            let [grad_out, grad_lse] = cell.take();
            let output_grads = OutputGrads {
                out: or_zeros::<B>(grad_out, &output.out),
                lse: grad_lse.into(),
            };
            let [q, k, v] = inputs.map(|id| checkpointer.retrieve_node_output(id));
            let inputs = TokenSparseInputs { q, k, v, keys };
            let saved = TokenSparseSaved { inputs, output };
            let TokenSparseGrads { q, k, v } =
                B::key_list_attention_backward(saved, output_grads, call);
            for (parent, grad) in ops.parents.into_iter().zip([q, k, v]) {
                if let Some(parent) = parent {
                    grads.register::<B>(parent.id, grad);
                }
            }
        }
    }

    impl<B: TokenSparseOps, C: CheckpointStrategy> TokenSparseOps for Autodiff<B, C> {
        fn key_list_attention(
            inputs: TokenSparseInputs<Self>,
            call: TokenSparseCall,
        ) -> TokenSparseOutput<Self> {
            let nodes = [inputs.q.node(), inputs.k.node(), inputs.v.node()];
            let prepared = OverKeys.prepare::<C>(nodes).compute_bound();
            let run = |inputs: TokenSparseInputs<Self>| {
                let inputs = TokenSparseInputs {
                    q: inputs.q.into_primitive(),
                    k: inputs.k.into_primitive(),
                    v: inputs.v.into_primitive(),
                    keys: inputs.keys,
                };
                B::key_list_attention(inputs, call)
            };
            match prepared.stateful() {
                OpsKind::Tracked(mut prep) => {
                    let nodes =
                        [&inputs.q, &inputs.k, &inputs.v].map(|input| prep.checkpoint(input));
                    let keys = inputs.keys.clone();
                    let output = run(inputs);
                    let TokenSparseOutput { out, lse } = output.clone();
                    let grads = OutputGradients::<B, 2>::default();
                    let state = State {
                        inputs: nodes,
                        keys,
                        output,
                        call,
                        grads: grads.clone(),
                    };
                    let step = prep.finish(state, lse.clone());
                    TokenSparseOutput {
                        out: grads.node::<C>(&step, 0, out),
                        lse: grads.node::<C>(&step, 1, lse),
                    }
                }
                OpsKind::UnTracked(prep) => {
                    let TokenSparseOutput { out, lse } = run(inputs);
                    let lse = <Self as burn::backend::AutodiffBackend>::from_inner(lse);
                    TokenSparseOutput {
                        out: prep.finish(out),
                        lse,
                    }
                }
            }
        }

        /// Overridden so that nothing of it runs through autodiff.
        fn key_list_attention_backward(
            _saved: TokenSparseSaved<Self>,
            _grads: OutputGrads<Self>,
            _call: TokenSparseCall,
        ) -> TokenSparseGrads<Self> {
            unimplemented!("attention over lists of keys is differentiable once")
        }
    }
}
