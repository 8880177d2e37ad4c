//! The backward pass in Burn's autodiff graph: one step, instead of the graph of the forward's steps.

use std::sync::{Arc, Mutex, MutexGuard};

use burn::backend::autodiff::Autodiff;
use burn::backend::autodiff::NodeId;
use burn::backend::autodiff::checkpoint::{base::Checkpointer, strategy::CheckpointStrategy};
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, Ops, OpsKind};
use burn::backend::tensor::FloatTensor;
use burn::backend::{AutodiffBackend, Backend, TensorMetadata};

use crate::AttentionOptions;
use crate::ops::{
    AttentionGrads, AttentionInputs, AttentionOutput, BlockSparseOps, LayoutTensors, MaybeFloat,
    OutputGrads, Saved,
};

/// The attention step. A step of Burn's autodiff has one output, attention has two: the node of this step is hidden, and
/// `out` and `lse` are steps behind it ([`OutputStep`]), which run before it and leave their gradients in a cell. Its own
/// gradient only says that one of them did.
#[derive(Debug)]
struct BlockSparseAttention;

/// q, k and v stay with the checkpointer: under gradient checkpointing it may compute them again.
#[derive(Clone, Debug)]
struct State<B: Backend> {
    inputs: [NodeId; 3],
    output: AttentionOutput<B>,
    layout: LayoutTensors<B>,
    options: AttentionOptions,
    grads: GradCell<B>,
}

/// The gradients by out and lse, as far as their steps have run.
type GradCell<B> = Arc<Mutex<[Option<FloatTensor<B>>; 2]>>;

fn lock<T>(cell: &Mutex<T>) -> MutexGuard<'_, T> {
    match cell.lock() {
        Ok(guard) => guard,
        Err(poisoned) => poisoned.into_inner(),
    }
}

impl<B: BlockSparseOps> Backward<B, 3> for BlockSparseAttention {
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
            output,
            layout,
            options,
            grads: cell,
        } = ops.state;
        let [grad_out, grad_lse] = std::mem::take(&mut *lock(&cell));
        let output_grads = OutputGrads {
            out: grad_out.unwrap_or_else(|| {
                let out = &output.out;
                B::float_zeros(out.shape(), &out.device(), out.dtype().into())
            }),
            lse: match grad_lse {
                Some(grad) => MaybeFloat::Some(grad),
                None => MaybeFloat::None,
            },
        };
        let [q, k, v] = inputs.map(|id| checkpointer.retrieve_node_output(id));
        let inputs = AttentionInputs { q, k, v };
        let saved = Saved { inputs, output };
        let AttentionGrads { q, k, v } =
            B::block_sparse_attention_backward(saved, output_grads, layout, options);
        for (parent, grad) in ops.parents.into_iter().zip([q, k, v]) {
            if let Some(parent) = parent {
                grads.register::<B>(parent.id, grad);
            }
        }
    }
}

/// An output of the attention step.
#[derive(Debug)]
struct OutputStep;

#[derive(Clone, Debug)]
struct OutputState<B: Backend> {
    /// 0: out, 1: lse.
    index: usize,
    grads: GradCell<B>,
    /// A tensor that is there anyway, in place of a gradient of the hidden node: nothing is computed with it.
    token: FloatTensor<B>,
}

impl<B: Backend> Backward<B, 1> for OutputStep {
    type State = OutputState<B>;

    fn backward(
        self,
        ops: Ops<Self::State, 1>,
        grads: &mut Gradients,
        _checkpointer: &mut Checkpointer,
    ) {
        let grad = grads.consume::<B>(&ops.node);
        let mut cell = lock(&ops.state.grads);
        let first = cell.iter().all(Option::is_none);
        cell[ops.state.index] = Some(grad);
        if let ([Some(parent)], true) = (ops.parents, first) {
            grads.register::<B>(parent.id, ops.state.token);
        }
    }
}

/// Makes the output `index` of an attention step, whose node is `step`'s, a node of its own.
fn output_node<B: BlockSparseOps, C: CheckpointStrategy>(
    step: &FloatTensor<Autodiff<B, C>>,
    index: usize,
    grads: &GradCell<B>,
    value: FloatTensor<B>,
) -> FloatTensor<Autodiff<B, C>> {
    match OutputStep
        .prepare::<C>([step.node()])
        .compute_bound()
        .stateful()
    {
        OpsKind::Tracked(prep) => {
            let state = OutputState {
                index,
                grads: grads.clone(),
                token: step.primitive().clone(),
            };
            prep.finish(state, value)
        }
        OpsKind::UnTracked(prep) => prep.finish(value),
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
        let (out, lse, weights) = match prepared.stateful() {
            OpsKind::Tracked(mut prep) => {
                let inputs = [&q, &k, &v].map(|input| prep.checkpoint(input));
                let output = run(q, k, v);
                let AttentionOutput { out, lse, weights } = output.clone();
                let grads = GradCell::<B>::default();
                let state = State {
                    inputs,
                    output,
                    layout: layout.clone(),
                    options: options.clone(),
                    grads: grads.clone(),
                };
                let step = prep.finish(state, lse.clone());
                let out = output_node::<B, C>(&step, 0, &grads, out);
                let lse = output_node::<B, C>(&step, 1, &grads, lse);
                (out, lse, weights)
            }
            OpsKind::UnTracked(prep) => {
                let AttentionOutput { out, lse, weights } = run(q, k, v);
                let lse = <Self as AutodiffBackend>::from_inner(lse);
                (prep.finish(out), lse, weights)
            }
        };
        AttentionOutput {
            out,
            lse,
            // The weights leave the graph.
            weights: match weights {
                MaybeFloat::Some(w) => MaybeFloat::Some(<Self as AutodiffBackend>::from_inner(w)),
                MaybeFloat::None => MaybeFloat::None,
            },
        }
    }

    /// Overridden so that the reference's backward does not itself run through autodiff.
    fn block_sparse_attention_backward(
        _saved: Saved<Self>,
        _grads: OutputGrads<Self>,
        _layout: LayoutTensors<Self>,
        _options: AttentionOptions,
    ) -> AttentionGrads<Self> {
        unimplemented!("block-sparse attention is differentiable once")
    }
}
