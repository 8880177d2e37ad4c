//! The backward pass in Burn's autodiff graph: one step, instead of the graph of the forward's steps.

use burn::backend::autodiff::checkpoint::{base::Checkpointer, strategy::CheckpointStrategy};
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, NodeGuard, Ops, OpsKind};
use burn::backend::autodiff::{Autodiff, NodeId};
use burn::backend::{AutodiffBackend, Backend};

use crate::attention::ops::BlockSparseOps;
use crate::attention::reference;
use crate::base::outputs::{OutputGradients, or_zeros};
use crate::base::values::{
    AttentionGrads, AttentionInputs, AttentionOutput, DynamicBlocks, KnownOutput, LayoutTensors,
    NeedsGrad, OptFloat, OutputGrads, SCORE_TENSORS, SavedTensors, ScoreTensors,
};
use crate::options::AttentionOptions;

/// The attention step, whose outputs are out and lse.
#[derive(Debug)]
struct BlockSparseAttention;

/// q, k and v stay with the checkpointer: under gradient checkpointing it may compute them again.
#[derive(Clone, Debug)]
struct State<B: Backend> {
    inputs: [NodeId; 3],
    /// The tensors that are added to scores.
    scores: [Option<NodeId>; SCORE_TENSORS],
    output: AttentionOutput<B>,
    layout: LayoutTensors<B>,
    options: AttentionOptions,
    /// By out and lse.
    grads: OutputGradients<B, 2>,
}

/// Of q, k, v, and the tensors added to scores that there are.
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
            scores,
            output,
            layout,
            options,
            grads: cell,
        } = ops.state;
        let [grad_out, grad_lse] = cell.take();
        let output_grads = OutputGrads {
            out: or_zeros::<B>(grad_out, &output.out),
            lse: grad_lse.into(),
        };
        let [q, k, v] = inputs.map(|id| checkpointer.retrieve_node_output(id));
        // Behind q, k and v come those that there are.
        let mut parents = ops.parents[3..].iter();
        let wanted =
            scores.map(|id| id.is_some() && parents.next().is_some_and(|parent| parent.is_some()));
        let tensors = scores.map(|id| id.map(|id| checkpointer.retrieve_node_output(id)).into());
        let inputs = AttentionInputs {
            q,
            k,
            v,
            scores: ScoreTensors::of_list(tensors),
        };
        let saved = SavedTensors { inputs, output };
        let wanted = NeedsGrad::of_list(wanted);
        let made = B::block_sparse_attention_backward(saved, output_grads, layout, options, wanted);
        let by_scores = (made.scores.into_list().into_iter())
            .zip(scores)
            .filter(|(_, id)| id.is_some())
            .map(|(grad, _)| grad.into_option());
        let gradients = [made.q, made.k, made.v].into_iter().map(Some);
        let gradients = gradients.chain(by_scores);
        for (parent, grad) in ops.parents.into_iter().zip(gradients) {
            if let (Some(parent), Some(grad)) = (parent, grad) {
                grads.register::<B>(parent.id, grad);
            }
        }
    }
}

/// The attention step behind the nodes of its inputs: q, k, v and the tensors added to scores that there are. There must be `N`. What is `given`
/// is not computed.
fn attention_step<B: BlockSparseOps, C: CheckpointStrategy, const N: usize>(
    nodes: Vec<NodeGuard>,
    inputs: AttentionInputs<Autodiff<B, C>>,
    given: Option<KnownOutput<B>>,
    layout: LayoutTensors<B>,
    options: AttentionOptions,
) -> AttentionOutput<Autodiff<B, C>> {
    let nodes: [NodeGuard; N] = nodes.try_into().expect("as many nodes as the step has");
    let prepared = BlockSparseAttention.prepare::<C>(nodes).compute_bound();
    let run = |inputs: AttentionInputs<Autodiff<B, C>>| {
        if let Some(given) = given {
            return given.into();
        }
        let inputs = AttentionInputs {
            q: inputs.q.into_primitive(),
            k: inputs.k.into_primitive(),
            v: inputs.v.into_primitive(),
            scores: inner_scores(inputs.scores),
        };
        B::block_sparse_attention(inputs, layout.clone(), options.clone())
    };
    let (out, lse, weights, max_scores) = match prepared.stateful() {
        OpsKind::Tracked(mut prep) => {
            let nodes = [&inputs.q, &inputs.k, &inputs.v].map(|input| prep.checkpoint(input));
            let scores = (inputs.scores.list()).map(|tensor| Some(prep.checkpoint(tensor?)));
            let mut output = run(inputs);
            // The backward pass does not read it, so the graph does not keep it.
            let max_scores = std::mem::replace(&mut output.max_scores, OptFloat::None);
            let AttentionOutput {
                out, lse, weights, ..
            } = output.clone();
            let grads = OutputGradients::<B, 2>::default();
            let state = State {
                inputs: nodes,
                scores,
                output,
                layout: layout.clone(),
                options: options.clone(),
                grads: grads.clone(),
            };
            let step = prep.finish(state, lse.clone());
            let out = grads.node::<C>(&step, 0, out);
            let lse = grads.node::<C>(&step, 1, lse);
            (out, lse, weights, max_scores)
        }
        OpsKind::UnTracked(prep) => {
            let AttentionOutput {
                out,
                lse,
                weights,
                max_scores,
            } = run(inputs);
            let lse = <Autodiff<B, C> as AutodiffBackend>::from_inner(lse);
            (prep.finish(out), lse, weights, max_scores)
        }
    };
    // Weights and largest scores leave the graph.
    let constant = |tensor: OptFloat<B>| {
        let tensor = tensor.into_option();
        tensor
            .map(<Autodiff<B, C> as AutodiffBackend>::from_inner)
            .into()
    };
    AttentionOutput {
        out,
        lse,
        weights: constant(weights),
        max_scores: constant(max_scores),
    }
}

/// [`attention_step`] of the inputs that there are.
fn step_of<B: BlockSparseOps, C: CheckpointStrategy>(
    inputs: AttentionInputs<Autodiff<B, C>>,
    given: Option<KnownOutput<B>>,
    layout: LayoutTensors<B>,
    options: AttentionOptions,
) -> AttentionOutput<Autodiff<B, C>> {
    let always = [&inputs.q, &inputs.k, &inputs.v].into_iter();
    let optional = inputs.scores.list().into_iter().flatten();
    let nodes: Vec<NodeGuard> = always.chain(optional).map(|input| input.node()).collect();
    // The number of a step's inputs is part of its type.
    match nodes.len() {
        3 => attention_step::<B, C, 3>(nodes, inputs, given, layout, options),
        4 => attention_step::<B, C, 4>(nodes, inputs, given, layout, options),
        5 => attention_step::<B, C, 5>(nodes, inputs, given, layout, options),
        more => unreachable!("{more} inputs of 3 and {SCORE_TENSORS}"),
    }
}

/// The tensors added to scores on the backend that autodiff decorates.
pub fn inner_scores<B: Backend, C: CheckpointStrategy>(
    scores: ScoreTensors<Autodiff<B, C>>,
) -> ScoreTensors<B> {
    let inner = |tensor: OptFloat<Autodiff<B, C>>| {
        let tensor = tensor.into_option();
        tensor.map(|tensor| tensor.into_primitive()).into()
    };
    ScoreTensors::of_list(scores.into_list().map(inner))
}

/// The layout on the backend that autodiff decorates.
pub fn inner_layout<B: Backend, C: CheckpointStrategy>(
    layout: LayoutTensors<Autodiff<B, C>>,
) -> LayoutTensors<B> {
    LayoutTensors {
        blocked: layout.blocked,
        choice: match layout.choice {
            DynamicBlocks::Host => DynamicBlocks::Host,
            DynamicBlocks::Mask(mask) => DynamicBlocks::Mask(mask),
            DynamicBlocks::Indices(indices) => DynamicBlocks::Indices(indices),
            DynamicBlocks::Positions(positions) => DynamicBlocks::Positions(positions),
            DynamicBlocks::Keys(keys) => DynamicBlocks::Keys(keys),
            DynamicBlocks::Scores(scores) => DynamicBlocks::Scores(scores.into_primitive()),
        },
        host: layout.host,
        plan: layout.plan,
    }
}

impl<B: BlockSparseOps, C: CheckpointStrategy> BlockSparseOps for Autodiff<B, C> {
    fn block_sparse_attention(
        inputs: AttentionInputs<Self>,
        layout: LayoutTensors<Self>,
        options: AttentionOptions,
    ) -> AttentionOutput<Self> {
        step_of(inputs, None, inner_layout(layout), options)
    }

    fn block_sparse_attention_known(
        inputs: AttentionInputs<Self>,
        given: KnownOutput<Self>,
        layout: LayoutTensors<Self>,
        options: AttentionOptions,
    ) -> AttentionOutput<Self> {
        let given = KnownOutput {
            out: given.out.into_primitive(),
            lse: given.lse.into_primitive(),
        };
        step_of(inputs, Some(given), inner_layout(layout), options)
    }

    /// Overridden so that the reference's backward does not itself run through autodiff.
    fn block_sparse_attention_backward(
        _saved: SavedTensors<Self>,
        _grads: OutputGrads<Self>,
        _layout: LayoutTensors<Self>,
        _options: AttentionOptions,
        _wanted: NeedsGrad,
    ) -> AttentionGrads<Self> {
        unimplemented!(
            "block-sparse attention is differentiable once; attention_gradients is for second derivatives"
        )
    }

    /// On this backend each operation of the reference is a step of the graph.
    fn block_sparse_attention_gradients(
        saved: SavedTensors<Self>,
        grads: OutputGrads<Self>,
        layout: LayoutTensors<Self>,
        options: AttentionOptions,
        wanted: NeedsGrad,
    ) -> AttentionGrads<Self> {
        reference::backward::<Self>(saved, grads, &layout, &options, wanted)
    }
}
