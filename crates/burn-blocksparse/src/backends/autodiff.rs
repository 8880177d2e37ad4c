//! The backward pass in Burn's autodiff graph: one step, instead of the graph of the forward's steps.

use burn::backend::autodiff::Autodiff;
use burn::backend::autodiff::NodeId;
use burn::backend::autodiff::checkpoint::{base::Checkpointer, strategy::CheckpointStrategy};
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, Ops, OpsKind};
use burn::backend::tensor::FloatTensor;
use burn::backend::{AutodiffBackend, Backend};

use crate::AttentionOptions;
use crate::ops::{
    AttentionGrads, AttentionInputs, AttentionOutput, BlockSparseOps, LayoutTensors, MaybeFloat,
    Saved,
};

#[derive(Debug)]
struct BlockSparseAttention;

/// q, k and v stay with the checkpointer: under gradient checkpointing it may compute them again.
#[derive(Clone, Debug)]
struct State<B: Backend> {
    inputs: [NodeId; 3],
    output: AttentionOutput<B>,
    layout: LayoutTensors<B>,
    options: AttentionOptions,
}

impl<B: BlockSparseOps> Backward<B, 3> for BlockSparseAttention {
    type State = State<B>;

    fn backward(
        self,
        ops: Ops<Self::State, 3>,
        grads: &mut Gradients,
        checkpointer: &mut Checkpointer,
    ) {
        let grad_out = grads.consume::<B>(&ops.node);
        let State {
            inputs,
            output,
            layout,
            options,
        } = ops.state;
        let [q, k, v] = inputs.map(|id| checkpointer.retrieve_node_output(id));
        let inputs = AttentionInputs { q, k, v };
        let saved = Saved { inputs, output };
        let AttentionGrads { q, k, v } =
            B::block_sparse_attention_backward(saved, grad_out, layout, options);
        for (parent, grad) in ops.parents.into_iter().zip([q, k, v]) {
            if let Some(parent) = parent {
                grads.register::<B>(parent.id, grad);
            }
        }
    }
}

impl<B: BlockSparseOps, C: CheckpointStrategy> BlockSparseOps for Autodiff<B, C> {
    fn block_sparse_attention(
        inputs: AttentionInputs<Self>,
        layout: LayoutTensors<Self>,
        options: AttentionOptions,
    ) -> AttentionOutput<Self> {
        let AttentionInputs { q, k, v } = inputs;
        let layout = LayoutTensors::<B> {
            blocked: layout.blocked,
            host: layout.host,
        };
        let run = |q: FloatTensor<Self>, k: FloatTensor<Self>, v: FloatTensor<Self>| {
            let inputs = AttentionInputs {
                q: q.into_primitive(),
                k: k.into_primitive(),
                v: v.into_primitive(),
            };
            B::block_sparse_attention(inputs, layout.clone(), options.clone())
        };
        let nodes = [q.node(), k.node(), v.node()];
        let prepared = BlockSparseAttention.prepare::<C>(nodes).compute_bound();
        let (out, output) = match prepared.stateful() {
            OpsKind::Tracked(mut prep) => {
                let inputs = [&q, &k, &v].map(|input| prep.checkpoint(input));
                let output = run(q, k, v);
                let state = State {
                    inputs,
                    output: output.clone(),
                    layout: layout.clone(),
                    options: options.clone(),
                };
                (prep.finish(state, output.out.clone()), output)
            }
            OpsKind::UnTracked(prep) => {
                let output = run(q, k, v);
                (prep.finish(output.out.clone()), output)
            }
        };
        // lse and the weights leave the graph: a step of Burn's autodiff has one tracked output.
        AttentionOutput {
            out,
            lse: <Self as AutodiffBackend>::from_inner(output.lse),
            weights: match output.weights {
                MaybeFloat::Some(w) => MaybeFloat::Some(<Self as AutodiffBackend>::from_inner(w)),
                MaybeFloat::None => MaybeFloat::None,
            },
        }
    }

    /// Overridden so that the reference's backward does not itself run through autodiff.
    fn block_sparse_attention_backward(
        _saved: Saved<Self>,
        _grad_out: FloatTensor<Self>,
        _layout: LayoutTensors<Self>,
        _options: AttentionOptions,
    ) -> AttentionGrads<Self> {
        unimplemented!("block-sparse attention is differentiable once")
    }
}
