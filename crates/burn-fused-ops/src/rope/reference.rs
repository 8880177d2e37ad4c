//! Rotary position embedding in Burn's primitives.

use crate::rope::values::{RopeCall, RopeInputs, TurnedRows};
use burn_blocksparse::internal::prelude::*;

pub(crate) fn rope<B: Backend>(inputs: RopeInputs<B>, call: RopeCall) -> TurnedRows<B> {
    let (table, places) = (inputs.table, inputs.places);
    let of = |x: FloatTensor<B>| turned::<B>(x, table.clone(), places.clone(), call);
    TurnedRows {
        x: of(inputs.x),
        key: inputs.key.into_option().map(of).into(),
    }
}

fn turned<B: Backend>(
    x: FloatTensor<B>,
    table: FloatTensor<B>,
    places: OptInt<B>,
    call: RopeCall,
) -> FloatTensor<B> {
    let shape = x.shape();
    let [batch, heads, seq, width] = shape.dims();
    if shape.num_elements() == 0 {
        return Array::<B>(x).cast(call.dtype).0;
    }
    let table = Array::<B>(table);
    let x = Array::<B>(x).cast(table.dtype());
    let rows = match places {
        OptInt::Some(places) => table.select(0, places),
        OptInt::None => table.narrow(0, call.first..call.first + seq),
    };
    let entries = rows.shape()[0] / seq;
    let rows = rows.reshape([entries, 1, seq, width / 2, 4]);
    let part = |of: &Array<B>, at: usize| of.clone().narrow(4, at..at + 1);
    let (cosine, sine) = (part(&rows, 0), part(&rows, 1));
    let sine = if call.back { -sine } else { sine };
    let pairs = x.reshape([batch, heads, seq, width / 2, 2]);
    let (a, b) = (part(&pairs, 0), part(&pairs, 1));
    let first = a.clone() * &cosine - b.clone() * &sine;
    let second = b * cosine + a * sine;
    let turned = Array::cat([first, second], 4);
    turned.reshape(shape).cast(call.dtype).0
}
