//! Attention over index lists on each backend, and its node in Burn's autodiff graph.

#[cfg(any(feature = "cube", feature = "autodiff"))]
use crate::selection::token_sparse::ops::TokenSparseOps;

#[cfg(feature = "cube")]
pub(crate) use kernels::{gathers, plan};
#[cfg(not(feature = "cube"))]
pub(crate) use without_kernels::{gathers, plan};

#[cfg(not(feature = "cube"))]
mod without_kernels {
    use burn::tensor::Tensor;

    use crate::selection::token_sparse::ops::TokenSparseCall;
    use burn_blocksparse::AttentionOptions;

    const OFF: &str = "no feature with kernels is on";

    pub(crate) fn gathers(_: &Tensor<4>, _: &AttentionOptions) -> Result<(), &'static str> {
        Err(OFF)
    }

    pub(crate) fn plan(
        _: [&Tensor<4>; 3],
        _: [usize; 2],
        _: &TokenSparseCall,
    ) -> Result<String, &'static str> {
        Err(OFF)
    }
}

#[cfg(feature = "cube")]
mod kernels {
    use std::sync::Arc;

    use crate::kernels::listed;
    use crate::kernels::listed::{
        ListedGradients, ListedLists, ListedPass, ListedPlan, ListedRequest, PlacedLists,
    };
    use blocksparse_cubecl::OutputGrads as KernelGrads;
    use blocksparse_cubecl::Outputs;
    use burn::backend::cubecl::dtype_to_elem_type;
    use burn::tensor::IntDType;
    use burn_cubecl::kernel::{cast, into_contiguous};
    use burn_cubecl::tensor::CubeTensor;
    use burn_cubecl::{CubeBackend, CubeDevice};

    use super::TokenSparseOps;
    use crate::selection::token_sparse::ops::{
        BlockLists, QueryLists, Sparsity, TokenSparseCall, TokenSparseGrads, TokenSparseInputs,
        TokenSparseOutput, TokenSparseSaved, reference_attention, reference_gradients,
    };
    use burn_blocksparse::AttentionOptions;
    use burn_blocksparse::backend::BlockSparseOps;
    use burn_blocksparse::internal::DispatchMode;
    use burn_blocksparse::internal::cube::{
        checked, contiguous, empty, filled, launched, readable, uses_reference, view,
    };
    use burn_blocksparse::internal::device::cube;
    use burn_blocksparse::internal::prelude::*;
    use burn_blocksparse::internal::values::{
        AttentionInputs, AttentionOutput, DynamicBlocks, KernelPlan, LayoutTensors, NeedsGrad,
        OutputGrads, SavedTensors, ScoreTensors,
    };

    /// Alignment of rows in elements: 16 bytes.
    const ALIGNMENT: usize = 8;

    /// Returns the reason why kernels cannot gather by lists, if it does not depend on the call's sizes.
    pub(crate) fn gathers(q: &Tensor<4>, options: &AttentionOptions) -> Result<(), &'static str> {
        device(q)?;
        if uses_reference() {
            return Err("BLOCKSPARSE_REFERENCE is set");
        }
        if options.dispatch_mode == DispatchMode::GroupByBlock {
            return Err("options.dispatch_mode says so");
        }
        let scale = options.scale_for(q.dims()[3]);
        match scale > 0.0 && (scale as f32).is_normal() {
            true => Ok(()),
            false => Err("the scale is not positive"),
        }
    }

    fn device(q: &Tensor<4>) -> Result<CubeDevice, &'static str> {
        cube::of(&q.device()).ok_or("the device has no kernels")
    }

    /// Returns the plan for lists of `most` entries and `tiles` tiles of packed queries, or the reason why kernels do not take the call.
    pub(crate) fn plan(
        [q, k, v]: [&Tensor<4>; 3],
        lists: [usize; 2],
        call: &TokenSparseCall,
    ) -> Result<String, &'static str> {
        let dims = [q.dims(), k.dims(), v.dims()];
        let request = request(dims, q.dtype(), lists, call);
        let plan = ListedPlan::of(&device(q)?.client(), request, call.scale)?;
        Ok(plan.to_string())
    }

    /// Returns the request of a call with these shapes, and the dtype of its queries.
    fn request(
        [q, k, v]: [[usize; 4]; 3],
        dtype: DType,
        [most, tiles]: [usize; 2],
        call: &TokenSparseCall,
    ) -> ListedRequest {
        let [batch, heads, seq_q, head_dim] = q;
        let [_, kv_heads, seq_kv, _] = k;
        let (sizes, lengths) = ([batch, heads, kv_heads], [seq_q, seq_kv]);
        let (widths, dtype) = ([head_dim, v[3]], dtype_to_elem_type(dtype));
        let request = match call.sparsity {
            Sparsity::Tokens { causal } => {
                ListedRequest::of_keys(sizes, lengths, widths, dtype, most, causal)
            }
            Sparsity::Blocks { block, tile } => {
                ListedRequest::new(sizes, lengths, widths, dtype, [block, most], [tile, tiles])
            }
        };
        request.with_overlap(call.overlap)
    }

    /// Returns the plan of a call that was planned before.
    fn planned(inputs: &TokenSparseInputs<CubeBackend>, call: &TokenSparseCall) -> Arc<ListedPlan> {
        let TokenSparseInputs { q, k, v, lists } = inputs;
        let shapes = [q, k, v].map(|x| x.meta.shape().dims());
        let lists = match lists {
            QueryLists::Tokens(keys) => [keys.meta.shape()[3], 1],
            QueryLists::Blocks(lists) => [
                lists.blocks.meta.shape()[3],
                lists.tile_blocks.meta.shape()[2],
            ],
        };
        let request = request(shapes, q.dtype, lists, call);
        let plan = ListedPlan::of(&q.client, request, call.scale);
        plan.unwrap_or_else(|why| panic!("attention over lists: {why}"))
    }

    /// Converts lists to contiguous i32, as kernels read them.
    fn numbers(x: CubeTensor) -> CubeTensor {
        into_contiguous(cast(x, IntDType::I32.into()))
    }

    /// Returns the layout that layout kernels attend to: the layout next to block lists, or all token lists as masked tiles.
    fn layout(
        lists: &QueryLists<CubeBackend>,
        pass: &ListedPass,
    ) -> Option<LayoutTensors<CubeBackend>> {
        match (lists, pass) {
            (QueryLists::Blocks(lists), _) => Some(lists.near.clone()),
            (QueryLists::Tokens(keys), ListedPass::Tiles(tiles)) => {
                let keys = numbers(keys.clone());
                let host = checked(tiles.layout(&keys.client, &keys.handle));
                Some(LayoutTensors {
                    // Kernels do not read this.
                    blocked: keys,
                    // The layout itself holds the pairs.
                    choice: DynamicBlocks::Host,
                    host,
                    plan: KernelPlan {
                        plan: Some(tiles.plan().clone()),
                    },
                })
            }
            (QueryLists::Tokens(_), _) => None,
        }
    }

    /// Returns the inputs of attention over the layout.
    fn over_layout(inputs: &TokenSparseInputs<CubeBackend>) -> AttentionInputs<CubeBackend> {
        AttentionInputs {
            q: inputs.q.clone(),
            k: inputs.k.clone(),
            v: inputs.v.clone(),
            scores: ScoreTensors::default(),
        }
    }

    impl TokenSparseOps for CubeBackend {
        /// Runs attention over the layout, if there is one, and continues it with mainloops over the lists.
        fn token_sparse_attention(
            inputs: TokenSparseInputs<Self>,
            call: TokenSparseCall,
        ) -> TokenSparseOutput<Self> {
            if !call.dispatch {
                return reference_attention::<Self>(inputs, &call);
            }
            let (plan, scale) = (planned(&inputs, &call), call.scale);
            let near = layout(&inputs.lists, plan.forward()).map(|layout| {
                let options = AttentionOptions::default().scale(scale);
                Self::block_sparse_attention(over_layout(&inputs), layout, options)
            });
            let carry = near.is_some();
            let (out, lse) = match near {
                Some(AttentionOutput { out, lse, .. }) => (out, lse),
                None => {
                    let [batch, heads, seq_q, _] = inputs.q.meta.shape().dims();
                    let value_dim = inputs.v.meta.shape()[3];
                    let q = &inputs.q;
                    (
                        empty(q, [batch, heads, seq_q, value_dim], q.dtype),
                        empty(q, [batch, heads, seq_q], DType::F32),
                    )
                }
            };
            let TokenSparseInputs { q, k, v, lists } = inputs;
            let outputs = Outputs::new(&out.handle, &lse.handle);
            let pass = plan.forward();
            if !matches!(pass, ListedPass::Tiles(_)) {
                let x = [q, k, v].map(|x| view(&readable(x, ALIGNMENT)));
                let (x, lists) = (x.each_ref(), Numbers::new(lists));
                let (client, lists) = (&out.client, lists.handles());
                launched(match pass {
                    ListedPass::Mainloops(of) => {
                        let lists = lists.of_queries();
                        listed::forward(client, of, x, lists, outputs, scale, carry)
                    }
                    ListedPass::ByBlock(of) => lists.by_blocks().and_then(|lists| {
                        listed::forward_by_block(client, of, x, lists, outputs, scale, carry)
                    }),
                    ListedPass::Tiles(_) => Ok(()),
                });
            }
            TokenSparseOutput { out, lse }
        }

        /// Sums the gradients of the layout and of the lists, which is exact because lse and delta cover all keys.
        fn token_sparse_attention_backward(
            saved: TokenSparseSaved<Self>,
            grads: OutputGrads<Self>,
            call: TokenSparseCall,
        ) -> TokenSparseGrads<Self> {
            if !call.dispatch {
                return reference_gradients::<Self>(saved, grads, &call);
            }
            let TokenSparseSaved { inputs, output } = saved;
            let (plan, scale) = (planned(&inputs, &call), call.scale);
            let (pass, grad_lse) = (plan.backward(), contiguous(grads.lse));
            // The list kernels read queries and the gradients with respect to the outputs as rows of one matrix.
            let [q, out, lse, grad_out] = [inputs.q.clone(), output.out, output.lse, grads.out]
                .map(|x| match pass {
                    ListedPass::Tiles(_) => x,
                    ListedPass::Mainloops(_) | ListedPass::ByBlock(_) => into_contiguous(x),
                });
            let inputs = TokenSparseInputs { q, ..inputs };
            let near = layout(&inputs.lists, pass).map(|layout| {
                let output = AttentionOutput {
                    out: out.clone(),
                    lse: lse.clone(),
                    weights: OptFloat::None,
                    max_scores: OptFloat::None,
                };
                let saved = SavedTensors {
                    inputs: over_layout(&inputs),
                    output,
                };
                let grads = OutputGrads {
                    out: grad_out.clone(),
                    lse: grad_lse.clone().into(),
                };
                let options = AttentionOptions::default().scale(scale);
                let wanted = NeedsGrad::default();
                Self::block_sparse_attention_backward(saved, grads, layout, options, wanted)
            });
            // The list kernels accumulate onto these gradients.
            let made = match near {
                Some(near) => [near.q, near.k, near.v],
                None => [&inputs.q, &inputs.k, &inputs.v]
                    .map(|x| filled::<4>(x, x.meta.shape().dims(), 0.0, x.dtype)),
            };
            if !matches!(pass, ListedPass::Tiles(_)) {
                let TokenSparseInputs { q, k, v, lists } = inputs;
                let [q, k, v, grad_out] =
                    [q, k, v, grad_out].map(|x| view(&readable(x, ALIGNMENT)));
                let (client, x, lists) = (&out.client, [&q, &k, &v], Numbers::new(lists));
                let [to_q, to_k, to_v] = made.each_ref().map(|x| &x.handle);
                let outputs = Outputs::new(&out.handle, &lse.handle);
                let grads = KernelGrads {
                    out: &grad_out,
                    lse: grad_lse.as_ref().map(|grad| &grad.handle),
                };
                let to = ListedGradients {
                    q: to_q,
                    k: to_k,
                    v: to_v,
                };
                let lists = lists.handles();
                launched(match pass {
                    ListedPass::Mainloops(of) => {
                        listed::backward(client, of, x, lists, outputs, grads, to, scale)
                    }
                    ListedPass::ByBlock(of) => lists.by_blocks().and_then(|lists| {
                        listed::backward_by_block(client, of, x, lists, outputs, grads, to, scale)
                    }),
                    ListedPass::Tiles(_) => Ok(()),
                });
            }
            let [q, k, v] = made;
            TokenSparseGrads { q, k, v }
        }
    }

    /// Lists in the form that kernels read.
    struct Numbers {
        lists: CubeTensor,
        /// For block lists: queries by place, the blocks of their tiles, and the places of each query's selections.
        by_blocks: Option<[CubeTensor; 3]>,
    }

    impl Numbers {
        fn new(lists: QueryLists<CubeBackend>) -> Self {
            match lists {
                QueryLists::Tokens(keys) => Self {
                    lists: numbers(keys),
                    by_blocks: None,
                },
                QueryLists::Blocks(BlockLists {
                    blocks,
                    queries,
                    tile_blocks,
                    places,
                    ..
                }) => Self {
                    lists: numbers(blocks),
                    by_blocks: Some([queries, tile_blocks, places].map(numbers)),
                },
            }
        }

        fn handles(&self) -> ListedLists<'_> {
            match &self.by_blocks {
                None => ListedLists::Keys(&self.lists.handle),
                Some(of_blocks) => {
                    let [queries, tile_blocks, places] = of_blocks.each_ref().map(|x| &x.handle);
                    ListedLists::Blocks(PlacedLists {
                        blocks: &self.lists.handle,
                        queries,
                        tile_blocks,
                        places,
                    })
                }
            }
        }
    }
}

#[cfg(feature = "autodiff")]
mod step {
    use burn::backend::Backend;
    use burn::backend::autodiff::Autodiff;
    use burn::backend::autodiff::checkpoint::strategy::CheckpointStrategy;

    use super::TokenSparseOps;
    use crate::selection::token_sparse::ops::{
        BlockLists, QueryLists, TokenSparseCall, TokenSparseGrads, TokenSparseInputs,
        TokenSparseOutput, TokenSparseSaved,
    };
    use burn_blocksparse::internal::custom_gradient::{
        Floats, custom_gradients, everything, or_zeros, there,
    };
    use burn_blocksparse::internal::inner_layout;
    use burn_blocksparse::internal::values::OutputGrads;

    /// Unwraps lists to the backend that autodiff decorates.
    fn inner_lists<B: Backend, C: CheckpointStrategy>(
        lists: QueryLists<Autodiff<B, C>>,
    ) -> QueryLists<B> {
        match lists {
            QueryLists::Tokens(keys) => QueryLists::Tokens(keys),
            QueryLists::Blocks(lists) => QueryLists::Blocks(BlockLists {
                blocks: lists.blocks,
                queries: lists.queries,
                tile_blocks: lists.tile_blocks,
                places: lists.places,
                near: inner_layout(lists.near),
            }),
        }
    }

    fn inputs_of<B: Backend>(
        [q, k, v]: Floats<B, 3>,
        lists: QueryLists<B>,
    ) -> TokenSparseInputs<B> {
        TokenSparseInputs {
            q: there(q),
            k: there(k),
            v: there(v),
            lists,
        }
    }

    impl<B: TokenSparseOps, C: CheckpointStrategy> TokenSparseOps for Autodiff<B, C> {
        fn token_sparse_attention(
            inputs: TokenSparseInputs<Self>,
            call: TokenSparseCall,
        ) -> TokenSparseOutput<Self> {
            let TokenSparseInputs { q, k, v, lists } = inputs;
            let lists = inner_lists(lists);
            let floats = [q, k, v].map(Some);
            let [out, lse] = custom_gradients::<B, C, _, _, _>(floats, everything, |floats, _| {
                let inputs = inputs_of(floats, lists.clone());
                let output = B::token_sparse_attention(inputs, call);
                let outputs = [&output.out, &output.lse].map(|output| Some(output.clone()));
                (outputs, move |floats, [out, lse]| {
                    let grads = OutputGrads {
                        out: or_zeros::<B>(out, &output.out),
                        lse: lse.into(),
                    };
                    let inputs = inputs_of(floats, lists);
                    let saved = TokenSparseSaved { inputs, output };
                    let TokenSparseGrads { q, k, v } =
                        B::token_sparse_attention_backward(saved, grads, call);
                    [q, k, v].map(Some)
                })
            });
            TokenSparseOutput {
                out: there(out),
                lse: there(lse),
            }
        }
    }
}
