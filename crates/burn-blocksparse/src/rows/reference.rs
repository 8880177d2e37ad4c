//! Rows by an index in Burn's primitives: selections forward and backward, nothing that is added to where it lies.

use burn::backend::tensor::{FloatTensor, IntTensor};
use burn::backend::{Backend, TensorMetadata, get_device_settings};
use burn::tensor::{IntDType, Shape};

use crate::dtype::accumulate_in;

pub(crate) fn rows_at<B: Backend>(x: FloatTensor<B>, index: IntTensor<B>) -> FloatTensor<B> {
    let [batch, heads, rows, dim] = x.shape().dims();
    let [_, _, places] = index.shape().dims();
    let device = x.device();
    let bools = get_device_settings::<B>(&device).bool_dtype;
    let index = B::int_cast(index, IntDType::I32);
    let wide = Shape::new([batch, heads, places]);
    let none = B::int_lower_elem(index.clone(), 0i64.into(), bools);
    let index = B::int_mask_fill(index, none.clone(), 0i64.into());
    // Rows of all heads are one list.
    let first = B::int_arange(0..(batch * heads) as i64, &device, IntDType::I32);
    let first = B::int_mul_scalar(first, (rows as i64).into());
    let first = B::int_reshape(first, Shape::new([batch, heads, 1]));
    let index = B::int_add(index, B::int_expand(first, wide));
    let count = batch * heads * places;
    let index = B::int_reshape(index, Shape::new([count]));
    let x = B::float_reshape(x, Shape::new([batch * heads * rows, dim]));
    let taken = B::float_select(x, 0, index);
    let none = B::bool_reshape(none, Shape::new([count, 1]));
    let none = B::bool_expand(none, Shape::new([count, dim]));
    let taken = B::float_mask_fill(taken, none, 0f32.into());
    B::float_reshape(taken, Shape::new([batch, heads, places, dim]))
}

pub(crate) fn rows_at_backward<B: Backend>(
    grad: FloatTensor<B>,
    users: IntTensor<B>,
) -> FloatTensor<B> {
    let [batch, heads, rows, most] = users.shape().dims();
    let dim = grad.shape()[3];
    let users = B::int_reshape(users, Shape::new([batch, heads, rows * most]));
    let shape = Shape::new([batch, heads, rows, dim]);
    let dtype = grad.dtype().into();
    let taken = rows_at::<B>(grad, users);
    if most == 1 {
        return B::float_reshape(taken, shape);
    }
    let taken = B::float_cast(taken, accumulate_in(dtype));
    let taken = B::float_reshape(taken, Shape::new([batch * heads * rows, most, dim]));
    let sums = B::float_cast(B::float_sum_dim(taken, 1), dtype);
    B::float_reshape(sums, shape)
}
