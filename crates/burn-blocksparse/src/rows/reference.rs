//! Rows by an index in Burn's primitives: selections forward and backward, nothing that is added to where it lies.

use burn::backend::tensor::{FloatTensor, IntTensor};
use burn::backend::{Backend, TensorMetadata, get_device_settings};
use burn::tensor::{IntDType, Shape, Slice};

use crate::dtype::accumulate_in;
use crate::ops::{MergedRows, MergedRowsGrads};

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

pub(crate) fn merged_rows<B: Backend>(inputs: MergedRows<B>) -> FloatTensor<B> {
    let [batch, heads, queries, dim] = inputs.own.shape().dims();
    let most = inputs.places.shape()[3];
    let dtype = inputs.own.dtype().into();
    let sums = accumulate_in(dtype);
    let taken = at_places::<B>(inputs.rows, inputs.places);
    let own = B::float_reshape(inputs.own, Shape::new([batch, heads, queries, 1, dim]));
    let all = B::float_cast(B::float_cat(vec![own, taken], 3), sums);
    let weights = B::float_reshape(
        inputs.weights,
        Shape::new([batch, heads, queries, most + 1, 1]),
    );
    let weights = B::float_expand(weights, all.shape());
    let out = B::float_sum_dim(B::float_mul(all, weights), 3);
    let out = B::float_reshape(out, Shape::new([batch, heads, queries, dim]));
    B::float_cast(out, dtype)
}

pub(crate) fn merged_rows_backward<B: Backend>(
    inputs: MergedRows<B>,
    grad: FloatTensor<B>,
) -> MergedRowsGrads<B> {
    let [batch, heads, queries, dim] = inputs.own.shape().dims();
    let [_, _, places, _] = inputs.rows.shape().dims();
    let most = inputs.places.shape()[3];
    let dtype = inputs.own.dtype().into();
    let sums = accumulate_in(dtype);
    let part = |tensor: &FloatTensor<B>, from: usize, to: usize| {
        B::float_slice(tensor.clone(), &ranges([batch, heads, queries], from..to))
    };
    let first = part(&inputs.weights, 0, 1);
    let others = part(&inputs.weights, 1, most + 1);

    let wide = B::float_cast(grad.clone(), sums);
    let own = B::float_mul(wide.clone(), B::float_expand(first, wide.shape()));

    let others = B::float_reshape(others, Shape::new([batch, heads, queries * most, 1]));
    let factors = rows_at::<B>(others, inputs.choices.clone());
    let taken = rows_at::<B>(grad, queries_of::<B>(inputs.choices, most));
    let taken = B::float_cast(taken, sums);
    let factors = B::float_expand(factors, Shape::new([batch, heads, places, dim]));
    let rows = B::float_mul(taken, factors);

    let all = at_places::<B>(inputs.rows, inputs.places);
    let own_rows = B::float_reshape(inputs.own, Shape::new([batch, heads, queries, 1, dim]));
    let all = B::float_cast(B::float_cat(vec![own_rows, all], 3), sums);
    let wide = B::float_reshape(wide, Shape::new([batch, heads, queries, 1, dim]));
    let wide = B::float_expand(wide, all.shape());
    let weights = B::float_sum_dim(B::float_mul(all, wide), 4);
    MergedRowsGrads {
        own: B::float_cast(own, dtype),
        rows: B::float_cast(rows, dtype),
        weights: B::float_reshape(weights, Shape::new([batch, heads, queries, most + 1])),
    }
}

/// The rows at the places of each query: `[batch, heads, queries, most, dim]`.
fn at_places<B: Backend>(rows: FloatTensor<B>, places: IntTensor<B>) -> FloatTensor<B> {
    let [batch, heads, queries, most] = places.shape().dims();
    let dim = rows.shape()[3];
    let places = B::int_reshape(places, Shape::new([batch, heads, queries * most]));
    let taken = rows_at::<B>(rows, places);
    B::float_reshape(taken, Shape::new([batch, heads, queries, most, dim]))
}

/// The query of each choice, −1 where there is none.
pub(crate) fn queries_of<B: Backend>(choices: IntTensor<B>, most: usize) -> IntTensor<B> {
    let device = choices.device();
    let bools = get_device_settings::<B>(&device).bool_dtype;
    let none = B::int_lower_elem(choices.clone(), 0i64.into(), bools);
    let queries = B::int_clamp_min(choices, 0i64.into());
    let queries = B::int_div_scalar(queries, (most as i64).into());
    B::int_mask_fill(queries, none, (-1i64).into())
}

/// All of the first three dimensions, and a range of the last.
pub(crate) fn ranges(dims: [usize; 3], last: std::ops::Range<usize>) -> [Slice; 4] {
    let all = |length: usize| Slice::new(0, Some(length as isize), 1);
    let [batch, heads, rows] = dims.map(all);
    let last = Slice::new(last.start as isize, Some(last.end as isize), 1);
    [batch, heads, rows, last]
}
