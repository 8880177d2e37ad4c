//! The backward pass in Burn's autodiff graph: one step, instead of the graph of the forward's steps.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use burn::backend::autodiff::Autodiff;
use burn::backend::autodiff::NodeId;
use burn::backend::autodiff::checkpoint::{base::Checkpointer, strategy::CheckpointStrategy};
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, NodeGuard, Ops, OpsKind};
use burn::backend::tensor::FloatTensor;
use burn::backend::{AutodiffBackend, Backend, TensorMetadata};

use crate::AttentionOptions;
use crate::ops::{
    AttentionGrads, AttentionInputs, AttentionOutput, BlockChoice, BlockSparseOps, LayoutTensors,
    MaybeFloat, OutputGrads, Saved, WantedGrads,
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
    /// The bias and the biases of distances, if there are any.
    biases: [Option<NodeId>; 2],
    output: AttentionOutput<B>,
    layout: LayoutTensors<B>,
    options: AttentionOptions,
    grads: GradCell<B>,
}

/// The gradients by out and lse, as far as their steps have run.
type GradCell<B> = Arc<Mutex<[Option<FloatTensor<B>>; 2]>>;

fn lock<T>(cell: &Mutex<T>) -> MutexGuard<'_, T> {
    cell.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Of q, k, v, and the biases that there are.
impl<B: BlockSparseOps, const N: usize> Backward<B, N> for BlockSparseAttention {
    type State = State<B>;

    fn backward(
        self,
        ops: Ops<Self::State, N>,
        grads: &mut Gradients,
        checkpointer: &mut Checkpointer,
    ) {
        grads.consume::<B>(&ops.node);
        let State {
            inputs,
            biases,
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
        // Behind q, k and v come the biases that there are.
        let mut parents = ops.parents[3..].iter();
        let [bias_grad, relative_grad] =
            biases.map(|id| id.is_some() && parents.next().is_some_and(|parent| parent.is_some()));
        let wanted = WantedGrads {
            bias: bias_grad,
            relative_bias: relative_grad,
        };
        let [bias, relative_bias] = biases.map(|id| match id {
            Some(id) => MaybeFloat::Some(checkpointer.retrieve_node_output(id)),
            None => MaybeFloat::None,
        });
        let inputs = AttentionInputs {
            q,
            k,
            v,
            bias,
            relative_bias,
        };
        let saved = Saved { inputs, output };
        let made = B::block_sparse_attention_backward(saved, output_grads, layout, options, wanted);
        let optional = [made.bias, made.relative_bias].map(|grad| match grad {
            MaybeFloat::Some(grad) => Some(grad),
            MaybeFloat::None => None,
        });
        let optional = optional
            .into_iter()
            .zip(biases)
            .filter(|(_, id)| id.is_some());
        let gradients = [Some(made.q), Some(made.k), Some(made.v)].into_iter();
        let gradients = gradients.chain(optional.map(|(grad, _)| grad));
        for (parent, grad) in ops.parents.into_iter().zip(gradients) {
            if let (Some(parent), Some(grad)) = (parent, grad) {
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

/// The attention step behind the nodes of its inputs.
fn attention_step<B: BlockSparseOps, C: CheckpointStrategy, const N: usize>(
    nodes: [NodeGuard; N],
    inputs: AttentionInputs<Autodiff<B, C>>,
    layout: LayoutTensors<B>,
    options: AttentionOptions,
) -> AttentionOutput<Autodiff<B, C>> {
    let prepared = BlockSparseAttention.prepare::<C>(nodes).compute_bound();
    let run = |inputs: AttentionInputs<Autodiff<B, C>>| {
        let inputs = AttentionInputs {
            q: inputs.q.into_primitive(),
            k: inputs.k.into_primitive(),
            v: inputs.v.into_primitive(),
            bias: inner(inputs.bias),
            relative_bias: inner(inputs.relative_bias),
        };
        B::block_sparse_attention(inputs, layout.clone(), options.clone())
    };
    let (out, lse, weights) = match prepared.stateful() {
        OpsKind::Tracked(mut prep) => {
            let nodes = [&inputs.q, &inputs.k, &inputs.v].map(|input| prep.checkpoint(input));
            let biases = [&inputs.bias, &inputs.relative_bias].map(|bias| match bias {
                MaybeFloat::Some(bias) => Some(prep.checkpoint(bias)),
                MaybeFloat::None => None,
            });
            let output = run(inputs);
            let AttentionOutput { out, lse, weights } = output.clone();
            let grads = GradCell::<B>::default();
            let state = State {
                inputs: nodes,
                biases,
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
            let AttentionOutput { out, lse, weights } = run(inputs);
            let lse = <Autodiff<B, C> as AutodiffBackend>::from_inner(lse);
            (prep.finish(out), lse, weights)
        }
    };
    AttentionOutput {
        out,
        lse,
        // The weights leave the graph.
        weights: match weights {
            MaybeFloat::Some(weights) => {
                MaybeFloat::Some(<Autodiff<B, C> as AutodiffBackend>::from_inner(weights))
            }
            MaybeFloat::None => MaybeFloat::None,
        },
    }
}

/// A tensor on the backend that autodiff decorates, if there is one.
pub(super) fn inner<B: Backend, C: CheckpointStrategy>(
    tensor: MaybeFloat<Autodiff<B, C>>,
) -> MaybeFloat<B> {
    match tensor {
        MaybeFloat::Some(tensor) => MaybeFloat::Some(tensor.into_primitive()),
        MaybeFloat::None => MaybeFloat::None,
    }
}

/// The layout on the backend that autodiff decorates.
pub(super) fn inner_layout<B: Backend, C: CheckpointStrategy>(
    layout: LayoutTensors<Autodiff<B, C>>,
) -> LayoutTensors<B> {
    LayoutTensors {
        blocked: layout.blocked,
        choice: match layout.choice {
            BlockChoice::Listed => BlockChoice::Listed,
            BlockChoice::Mask(mask) => BlockChoice::Mask(mask),
            BlockChoice::Indices(indices) => BlockChoice::Indices(indices),
            BlockChoice::Scores(scores) => BlockChoice::Scores(scores.into_primitive()),
        },
        host: layout.host,
    }
}

impl<B: BlockSparseOps, C: CheckpointStrategy> BlockSparseOps for Autodiff<B, C> {
    fn block_sparse_attention(
        inputs: AttentionInputs<Self>,
        layout: LayoutTensors<Self>,
        options: AttentionOptions,
    ) -> AttentionOutput<Self> {
        let layout = inner_layout(layout);
        let [q, k, v] = [&inputs.q, &inputs.k, &inputs.v].map(|input| input.node());
        let biases = [&inputs.bias, &inputs.relative_bias].map(|bias| match bias {
            MaybeFloat::Some(bias) => Some(bias.node()),
            MaybeFloat::None => None,
        });
        match biases {
            [None, None] => attention_step::<B, C, 3>([q, k, v], inputs, layout, options),
            [Some(a), Some(b)] => {
                attention_step::<B, C, 5>([q, k, v, a, b], inputs, layout, options)
            }
            [Some(a), None] | [None, Some(a)] => {
                attention_step::<B, C, 4>([q, k, v, a], inputs, layout, options)
            }
        }
    }

    /// Overridden so that the reference's backward does not itself run through autodiff.
    fn block_sparse_attention_backward(
        _saved: Saved<Self>,
        _grads: OutputGrads<Self>,
        _layout: LayoutTensors<Self>,
        _options: AttentionOptions,
        _wanted: WantedGrads,
    ) -> AttentionGrads<Self> {
        unimplemented!("block-sparse attention is differentiable once")
    }
}
