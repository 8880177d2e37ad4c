//! Autodiff steps of indexed rows.

use burn::backend::tensor::{FloatTensor, IntTensor};

use crate::base::custom_gradient::*;
use crate::base::values::OutputGrads;
use crate::rows::ops::RowOps;
use crate::rows::values::{MergedOutput, MergedParts};

impl<B: RowOps, C: CheckpointStrategy> RowOps for Autodiff<B, C> {
    fn segment_sum(
        x: FloatTensor<Self>,
        index: IntTensor<Self>,
        users: IntTensor<Self>,
    ) -> FloatTensor<Self> {
        custom_gradient::<B, C, _, _>([Some(x)], nothing, |[x], _| {
            let sums = B::segment_sum(there(x), index.clone(), users.clone());
            (sums, move |_, grad| {
                [Some(B::gather_rows(grad, index, users))]
            })
        })
    }

    fn gather_rows(
        x: FloatTensor<Self>,
        index: IntTensor<Self>,
        users: IntTensor<Self>,
    ) -> FloatTensor<Self> {
        custom_gradient::<B, C, _, _>([Some(x)], nothing, |[x], _| {
            let rows = B::gather_rows(there(x), index, users.clone());
            (rows, move |_, grad| {
                [Some(B::rows_at_backward(grad, users))]
            })
        })
    }

    fn merged_parts(inputs: MergedParts<Self>) -> MergedOutput<Self> {
        let floats = [inputs.own, inputs.own_lse, inputs.rows, inputs.lses].map(Some);
        let (places, choices) = (inputs.places, inputs.choices);
        MergedOutput::of_list(custom_gradients::<B, C, _, _, _>(
            floats,
            nothing,
            |floats, _| {
                let [own, own_lse, rows, lses] = floats.map(there);
                let inputs = MergedParts::<B> {
                    own,
                    own_lse,
                    rows,
                    lses,
                    places,
                    choices,
                };
                let output = B::merged_parts(inputs.clone());
                (output.into_list(), move |_, [out, lse]| {
                    let by = OutputGrads {
                        out: or_zeros::<B>(out, &inputs.own),
                        lse: lse.into(),
                    };
                    B::merged_parts_backward(inputs, by).into_list()
                })
            },
        ))
    }
}
