//! Rotary position embedding in Burn's primitives.

use burn::backend::tensor::FloatTensor;
use burn::backend::{Backend, TensorMetadata};
use burn::tensor::{FloatDType, Shape, Slice};

use crate::rope::values::{RopeCall, RopeInputs, TurnedRows};
use burn_blocksparse::internal::values::OptInt;

pub(crate) fn rope<B: Backend>(inputs: RopeInputs<B>, call: RopeCall) -> TurnedRows<B> {
    let RopeInputs {
        x,
        key,
        table,
        places,
    } = inputs;
    let of = |x: FloatTensor<B>| turned::<B>(x, table.clone(), places.clone(), call);
    TurnedRows {
        x: of(x),
        key: key.into_option().map(of).into(),
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
        return B::float_cast(x, call.dtype);
    }
    let dtype = FloatDType::from(table.dtype());
    let rows = match places.into_option() {
        Some(places) => B::float_select(table, 0, places),
        None => B::float_slice(table, &[Slice::from(call.first..call.first + seq)]),
    };
    let entries = rows.shape()[0] / seq;
    let rows = B::float_reshape(rows, Shape::new([entries, 1, seq, width / 2, 4]));
    let part = |of: &FloatTensor<B>, at: usize| {
        let mut slices = [Slice::full(); 5];
        slices[4] = Slice::from(at..at + 1);
        B::float_slice(of.clone(), &slices)
    };
    let (cosine, sine) = (part(&rows, 0), part(&rows, 1));
    let sine = match call.back {
        true => B::float_neg(sine),
        false => sine,
    };
    let pairs = Shape::new([batch, heads, seq, width / 2, 2]);
    let pairs = B::float_reshape(B::float_cast(x, dtype), pairs);
    let (a, b) = (part(&pairs, 0), part(&pairs, 1));
    let product = |x: &FloatTensor<B>, by: &FloatTensor<B>| B::float_mul(x.clone(), by.clone());
    let first = B::float_sub(product(&a, &cosine), product(&b, &sine));
    let second = B::float_add(product(&b, &cosine), product(&a, &sine));
    let turned = B::float_cat(vec![first, second], 4);
    B::float_cast(B::float_reshape(turned, shape), call.dtype)
}
