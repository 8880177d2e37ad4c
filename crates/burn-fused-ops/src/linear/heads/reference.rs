//! Heads in Burn's primitives.

use crate::linear::values::{BiasedRows, HeadParts, JoinCall, Joined};
use burn_blocksparse::internal::prelude::*;

pub(crate) fn split<B: Backend>(inputs: BiasedRows<B>, parts: HeadParts) -> ThreeFloats<B> {
    let BiasedRows { x, bias } = inputs;
    let dtype = FloatDType::from(x.dtype());
    let [batch, seq, width] = x.shape().dims();
    if batch * seq == 0 {
        // A slice of an empty tensor may begin behind its end, which Flex does not support.
        let device = x.device();
        return ThreeFloats::of_list(parts.map(|part| {
            let (heads, dim) = part?;
            Some(Array::<B>::zeros([batch, heads, seq, dim], &device, dtype).0)
        }));
    }
    let mut x = Array::<B>(x);
    if let OptFloat::Some(bias) = bias {
        let sums = accumulate_in(dtype);
        let bias = Array::<B>(bias).cast(sums).reshape([1, 1, width]);
        x = (x.cast(sums) + bias).cast(dtype);
    }
    let mut start = 0;
    ThreeFloats::of_list(parts.map(|part| {
        let (heads, dim) = part?;
        let columns = start..start + heads * dim;
        start += heads * dim;
        let part = x.clone().narrow(2, columns);
        Some(part.reshape([batch, seq, heads, dim]).swap(1, 2).0)
    }))
}

pub(crate) fn join<B: Backend>(tensors: ThreeFloats<B>, call: &JoinCall) -> Joined<B> {
    let [batch, seq] = call.rows;
    let tensors = tensors.into_list();
    let device = (tensors.iter().flatten().next())
        .expect("at least one tensor")
        .device();
    let rows_of = |tensor: Option<FloatTensor<B>>, (heads, dim): (usize, usize)| {
        let shape = [batch, seq, heads * dim];
        match tensor {
            Some(tensor) => Array::<B>(tensor).swap(1, 2).reshape(shape),
            None => Array::zeros(shape, &device, call.dtype),
        }
    };
    let rows = (tensors.into_iter().zip(call.parts))
        .filter_map(|(tensor, part)| Some(rows_of(tensor, part?)));
    let x = Array::cat(rows, 2);
    let bias = call.bias.map(|dtype| {
        let wide = x.clone().cast(accumulate_in(call.dtype));
        let sums = wide.reshape([batch * seq, call.width()]).sum_dim(0);
        sums.reshape([call.width()]).cast(dtype).0
    });
    Joined::new(x.0, bias)
}
