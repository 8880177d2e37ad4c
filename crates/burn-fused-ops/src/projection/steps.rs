//! Projections to heads and from them, in the operations of products and heads.

use burn::backend::TensorMetadata;
use burn::backend::tensor::FloatTensor;

use crate::heads::ops::HeadOps;
use crate::heads::values::{HeadParts, JoinCall, SplitInputs};
use crate::linear::ops::LinearOps;
use crate::linear::products::rounded;
use crate::linear::values::{LinearInputs, LinearSaved, LinearTask};
use crate::projection::values::{
    MergeGrads, MergeInputs, MergeOutput, MergeSaved, MergeTask, ProjectionCall, ProjectionInputs,
    ProjectionOutput,
};
use burn_blocksparse::internal::values::{OptFloat, ThreeFloats};

/// What a backend has to have.
pub(crate) trait Parts: LinearOps + HeadOps {}

impl<B: LinearOps + HeadOps> Parts for B {}

/// One tensor by heads.
pub(crate) fn one_part((heads, dim): (usize, usize)) -> HeadParts {
    [Some((heads, dim)), None, None]
}

pub(crate) fn project<B: Parts>(
    inputs: ProjectionInputs<B>,
    call: ProjectionCall,
) -> ProjectionOutput<B> {
    let ProjectionInputs { x, weights, bias } = inputs;
    let made = B::linear_forward(LinearInputs { x, weights }, call.dtype);
    let split = SplitInputs { x: made.out, bias };
    ProjectionOutput {
        heads: B::split_heads(split, call.parts),
        rounded: made.rounded,
        joined: made.joined,
    }
}

/// A tensor by heads as rows.
fn rows<B: Parts>(x: FloatTensor<B>) -> FloatTensor<B> {
    let [batch, heads, seq, dim] = x.shape().dims();
    let call = JoinCall {
        rows: [batch, seq],
        parts: one_part((heads, dim)),
        dtype: x.dtype().into(),
        bias: None,
    };
    B::join_heads(ThreeFloats::of_list([Some(x), None, None]), call).x
}

pub(crate) fn merge<B: Parts>(inputs: MergeInputs<B>, task: MergeTask) -> MergeOutput<B> {
    let inputs = LinearInputs {
        x: rows::<B>(inputs.x),
        weights: ThreeFloats::of_list([Some(inputs.weight), None, None]),
    };
    let made = B::linear_forward(inputs, task.dtype);
    MergeOutput {
        out: made.out,
        weight: made.joined,
    }
}

pub(crate) fn merge_backward<B: Parts>(saved: MergeSaved<B>, task: MergeTask) -> MergeGrads<B> {
    let MergeSaved { x, weight, grad } = saved;
    let (heads, dim) = task.heads;
    let outputs = grad.shape()[2];
    let made = B::linear_backward(
        LinearSaved {
            x: x.into_option()
                .map(|x| rounded::<B>(rows::<B>(x), task.dtype))
                .into(),
            weight,
            grad,
        },
        LinearTask {
            inputs: heads * dim,
            x: task.x,
            weights: [Some((outputs, task.weight)), None, None],
        },
    );
    let by_x = made.x.into_option().map(|x| {
        let split = SplitInputs {
            x,
            bias: OptFloat::None,
        };
        let [first, ..] = B::split_heads(split, one_part(task.heads)).into_list();
        first.expect("a first part")
    });
    let [by_weight, ..] = made.weights.into_list();
    MergeGrads {
        x: by_x.into(),
        weight: by_weight.into(),
    }
}
