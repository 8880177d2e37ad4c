//! Heads in Burn's primitives.

use burn::backend::tensor::FloatTensor;
use burn::backend::{Backend, TensorMetadata};
use burn::tensor::{FloatDType, Shape, Slice};

use crate::linear::values::{BiasedRows, HeadParts, JoinCall, Joined};
use burn_blocksparse::internal::dtype::accumulate_in;
use burn_blocksparse::internal::values::ThreeFloats;

pub(crate) fn split<B: Backend>(inputs: BiasedRows<B>, parts: HeadParts) -> ThreeFloats<B> {
    let BiasedRows { x, bias } = inputs;
    let dtype = FloatDType::from(x.dtype());
    let [batch, seq, width] = x.shape().dims();
    if batch * seq == 0 {
        // A slice of a tensor without numbers may begin behind its end, which Flex does not read.
        let device = x.device();
        return ThreeFloats::of_list(parts.map(|part| {
            let (heads, dim) = part?;
            let shape = Shape::new([batch, heads, seq, dim]);
            Some(B::float_zeros(shape, &device, dtype))
        }));
    }
    let x = match bias.into_option() {
        None => x,
        Some(bias) => {
            let sums = accumulate_in(dtype);
            let bias = B::float_reshape(B::float_cast(bias, sums), Shape::new([1, 1, width]));
            B::float_cast(B::float_add(B::float_cast(x, sums), bias), dtype)
        }
    };
    let mut start = 0;
    ThreeFloats::of_list(parts.map(|part| {
        let (heads, dim) = part?;
        let columns = Slice::from(start..start + heads * dim);
        start += heads * dim;
        let part = B::float_slice(x.clone(), &[Slice::full(), Slice::full(), columns]);
        let part = B::float_reshape(part, Shape::new([batch, seq, heads, dim]));
        Some(B::float_swap_dims(part, 1, 2))
    }))
}

/// `like` is on the device.
pub(crate) fn join<B: Backend>(tensors: ThreeFloats<B>, call: &JoinCall) -> Joined<B> {
    let [batch, seq] = call.rows;
    let tensors = tensors.into_list();
    let device = (tensors.iter().flatten().next())
        .expect("at least one tensor")
        .device();
    let rows = |tensor: Option<FloatTensor<B>>, (heads, dim): (usize, usize)| {
        let shape = Shape::new([batch, seq, heads * dim]);
        match tensor {
            Some(tensor) => B::float_reshape(B::float_swap_dims(tensor, 1, 2), shape),
            None => B::float_zeros(shape, &device, call.dtype),
        }
    };
    let mut rows: Vec<FloatTensor<B>> = (tensors.into_iter().zip(call.parts))
        .filter_map(|(tensor, part)| Some(rows(tensor, part?)))
        .collect();
    let x = match rows.len() {
        1 => rows.remove(0),
        _ => B::float_cat(rows, 2),
    };
    let bias = call.bias.map(|dtype| {
        let wide = B::float_cast(x.clone(), accumulate_in(call.dtype));
        let wide = B::float_reshape(wide, Shape::new([batch * seq, call.width()]));
        let sums = B::float_reshape(B::float_sum_dim(wide, 0), Shape::new([call.width()]));
        B::float_cast(sums, dtype)
    });
    Joined {
        x,
        bias: bias.into(),
    }
}
