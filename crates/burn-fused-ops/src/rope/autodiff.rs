//! Autodiff of rotary position embedding.

use crate::rope::ops::RopeOps;
use crate::rope::values::{RopeCall, RopeInputs, TurnedRows};
use burn_blocksparse::internal::custom_gradient::*;
use burn_blocksparse::internal::prelude::*;

impl<B: RopeOps, C: CheckpointStrategy> RopeOps for Autodiff<B, C> {
    /// Records one node for queries and one for keys.
    fn rope(inputs: RopeInputs<Self>, call: RopeCall) -> TurnedRows<Self> {
        let (table, places) = (inputs.table.into_primitive(), inputs.places.into_option());
        let turn = |x: FloatTensor<Self>| {
            custom_gradient::<B, C, _, _>([Some(x)], nothing, |[x], _| {
                let x = there(x);
                let of_gradient = RopeCall {
                    back: !call.back,
                    dtype: own_dtype(&x),
                    ..call
                };
                let (table, places) = (table.clone(), places.clone());
                let of = |x, table, places: Option<_>| RopeInputs::<B> {
                    x,
                    key: OptFloat::None,
                    table,
                    places: places.into(),
                };
                let turned = B::rope(of(x, table.clone(), places.clone()), call).x;
                (turned, move |_, grad| {
                    [Some(B::rope(of(grad, table, places), of_gradient).x)]
                })
            })
        };
        let key = inputs.key.into_option();
        TurnedRows {
            x: turn(inputs.x),
            key: key.map(turn).into(),
        }
    }
}
