//! The backward pass in Burn's autodiff graph, as one step instead of one per operation of the forward pass.

use std::ops::Range;

use burn::backend::Backend;

use crate::attention::ops::BlockSparseOps;
use crate::base::custom_gradient::*;
use crate::base::values::{
    AccumulatedInputs, AccumulatedOutput, AttentionInputs, AttentionOutput, DynamicBlocks,
    KnownOutput, LayoutTensors, NeedsGrad, OptFloat, OutputGrads, SavedTensors, ScoreTensors,
};
use crate::options::AttentionOptions;

/// Creates the autodiff step of attention, with outputs `out` and `lse`. Outputs that are `given` are not computed.
fn attention_step<B: BlockSparseOps, C: CheckpointStrategy>(
    inputs: AttentionInputs<Autodiff<B, C>>,
    given: Option<KnownOutput<B>>,
    layout: LayoutTensors<Autodiff<B, C>>,
    options: AttentionOptions,
) -> AttentionOutput<Autodiff<B, C>> {
    let layout = inner_layout(layout);
    let mut constants = [OptFloat::None, OptFloat::None];
    let [out, lse] =
        custom_gradients::<B, C, _, _, _>(inputs.into_list(), everything, |inputs, wanted| {
            let mut output = match given {
                Some(given) => given.into(),
                None => {
                    let inputs = AttentionInputs::of_list(inputs);
                    B::block_sparse_attention(inputs, layout.clone(), options.clone())
                }
            };
            // The backward pass does not read it, so the graph does not store it.
            let max_scores = std::mem::replace(&mut output.max_scores, OptFloat::None);
            constants = [output.weights.clone(), max_scores];
            let outputs = [&output.out, &output.lse].map(|output| Some(output.clone()));
            let [_, _, _, bias, relative_bias] = wanted;
            let wanted = NeedsGrad {
                bias,
                relative_bias,
            };
            (outputs, move |inputs, [out, lse]| {
                let grads = OutputGrads {
                    out: or_zeros::<B>(out, &output.out),
                    lse: lse.into(),
                };
                let inputs = AttentionInputs::of_list(inputs);
                let saved = SavedTensors { inputs, output };
                B::block_sparse_attention_backward(saved, grads, layout, options, wanted)
                    .into_list()
            })
        });
    // Weights and row maxima are detached from the graph.
    let [weights, max_scores] = constants.map(constant);
    AttentionOutput {
        out: there(out),
        lse: there(lse),
        weights,
        max_scores,
    }
}

/// Converts a layout to the backend that autodiff wraps.
pub fn inner_layout<B: Backend, C: CheckpointStrategy>(
    layout: LayoutTensors<Autodiff<B, C>>,
) -> LayoutTensors<B> {
    LayoutTensors {
        blocked: layout.blocked,
        choice: match layout.choice {
            DynamicBlocks::Host => DynamicBlocks::Host,
            DynamicBlocks::Bools(mask) => DynamicBlocks::Bools(mask),
            DynamicBlocks::Ints(numbers) => DynamicBlocks::Ints(numbers),
            DynamicBlocks::Floats(scores) => DynamicBlocks::Floats(scores.into_primitive()),
        },
        host: layout.host,
        plan: layout.plan,
    }
}

/// The backward methods keep their default bodies, whose operations are steps of the graph. This gives gradients of gradients.
impl<B: BlockSparseOps, C: CheckpointStrategy> BlockSparseOps for Autodiff<B, C> {
    fn block_sparse_attention(
        inputs: AttentionInputs<Self>,
        layout: LayoutTensors<Self>,
        options: AttentionOptions,
    ) -> AttentionOutput<Self> {
        attention_step(inputs, None, layout, options)
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
        attention_step(inputs, Some(given), layout, options)
    }

    /// The sums are detached from the graph.
    fn accumulated_attention(
        inputs: AccumulatedInputs<Self>,
        layout: LayoutTensors<Self>,
        options: AttentionOptions,
        queries: Range<usize>,
    ) -> AccumulatedOutput<Self> {
        let inputs = AccumulatedInputs {
            q: inputs.q.into_primitive(),
            k: inputs.k.into_primitive(),
            lse: inputs.lse.into_primitive(),
            scores: ScoreTensors {
                bias: inner(inputs.scores.bias),
                relative_bias: inner(inputs.scores.relative_bias),
            },
        };
        let sums = B::accumulated_attention(inputs, inner_layout(layout), options, queries);
        AccumulatedOutput {
            columns: <Self as AutodiffBackend>::from_inner(sums.columns),
            diagonals: <Self as AutodiffBackend>::from_inner(sums.diagonals),
        }
    }
}
