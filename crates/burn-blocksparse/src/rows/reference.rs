//! Rows by an index in Burn's primitives: selections forward and backward, nothing that is added to where it lies.

use burn::backend::tensor::{FloatTensor, IntTensor};
use burn::backend::{Backend, TensorMetadata, get_device_settings};
use burn::tensor::{IntDType, Shape, Slice};

use crate::base::dtype::accumulate_in;
use crate::base::values::OutputGrads;
use crate::rows::values::{MergedGrads, MergedOutput, MergedParts};

pub fn gather_rows<B: Backend>(x: FloatTensor<B>, index: IntTensor<B>) -> FloatTensor<B> {
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

pub fn rows_at_backward<B: Backend>(grad: FloatTensor<B>, users: IntTensor<B>) -> FloatTensor<B> {
    let [batch, heads, rows, most] = users.shape().dims();
    let dim = grad.shape()[3];
    let users = B::int_reshape(users, Shape::new([batch, heads, rows * most]));
    let shape = Shape::new([batch, heads, rows, dim]);
    let dtype = grad.dtype().into();
    let taken = gather_rows::<B>(grad, users);
    if most == 1 {
        return B::float_reshape(taken, shape);
    }
    let taken = B::float_cast(taken, accumulate_in(dtype));
    let taken = B::float_reshape(taken, Shape::new([batch * heads * rows, most, dim]));
    let sums = B::float_cast(B::float_sum_dim(taken, 1), dtype);
    B::float_reshape(sums, shape)
}

/// lse where a row has no keys, in sums: far below any score, but finite, so that no ∞ − ∞ can arise.
const LOWEST: f64 = -1e30;

/// What the parts of each query weigh.
struct Weighed<B: Backend> {
    /// Their lse, the own one first: `[batch, heads, queries, 1 + most]`.
    parts: FloatTensor<B>,
    /// Of the same shape.
    weights: FloatTensor<B>,
    /// `[batch, heads, queries, 1]`.
    lse: FloatTensor<B>,
}

impl<B: Backend> Weighed<B> {
    fn new(own_lse: FloatTensor<B>, lses: FloatTensor<B>, places: IntTensor<B>) -> Self {
        let [batch, heads, queries, most] = places.shape().dims();
        let count = lses.shape()[2];
        let bools = get_device_settings::<B>(&places.device()).bool_dtype;
        let none = B::int_lower_elem(places.clone(), 0i64.into(), bools);
        let lses = B::float_reshape(lses, Shape::new([batch, heads, count, 1]));
        let index = B::int_reshape(places, Shape::new([batch, heads, queries * most]));
        let others = gather_rows::<B>(lses, index);
        let others = B::float_reshape(others, Shape::new([batch, heads, queries, most]));
        let others = B::float_mask_fill(others, none, LOWEST.into());
        let own = B::float_reshape(own_lse, Shape::new([batch, heads, queries, 1]));
        let parts = B::float_clamp_min(B::float_cat(vec![own, others], 3), LOWEST.into());
        let top = B::float_max_dim(parts.clone(), 3);
        let wide = B::float_expand(top.clone(), parts.shape());
        let weights = B::float_exp(B::float_sub(parts.clone(), wide));
        let total = B::float_sum_dim(weights.clone(), 3);
        let wide = B::float_expand(total.clone(), parts.shape());
        let empty = B::float_lower_equal_elem(top.clone(), LOWEST.into(), bools);
        let lse = B::float_add(top, B::float_log(total));
        Self {
            weights: B::float_div(weights, wide),
            lse: B::float_mask_fill(lse, empty, f64::NEG_INFINITY.into()),
            parts,
        }
    }
}

/// The own row and those at the places of each query, in the dtype of sums: `[batch, heads, queries, 1 + most, dim]`.
fn all_rows<B: Backend>(
    own: FloatTensor<B>,
    rows: FloatTensor<B>,
    places: IntTensor<B>,
) -> FloatTensor<B> {
    let [batch, heads, queries, dim] = own.shape().dims();
    let sums = accumulate_in(own.dtype().into());
    let own = B::float_reshape(own, Shape::new([batch, heads, queries, 1, dim]));
    B::float_cast(
        B::float_cat(vec![own, at_places::<B>(rows, places)], 3),
        sums,
    )
}

pub fn merged_parts<B: Backend>(inputs: MergedParts<B>) -> MergedOutput<B> {
    let [batch, heads, queries, dim] = inputs.own.shape().dims();
    let most = inputs.places.shape()[3];
    let dtype = inputs.own.dtype().into();
    let weighed = Weighed::<B>::new(inputs.own_lse, inputs.lses, inputs.places.clone());
    let all = all_rows::<B>(inputs.own, inputs.rows, inputs.places);
    let weights = B::float_reshape(
        weighed.weights,
        Shape::new([batch, heads, queries, most + 1, 1]),
    );
    let weights = B::float_expand(weights, all.shape());
    let out = B::float_sum_dim(B::float_mul(all, weights), 3);
    let out = B::float_reshape(out, Shape::new([batch, heads, queries, dim]));
    MergedOutput {
        out: B::float_cast(out, dtype),
        lse: B::float_reshape(weighed.lse, Shape::new([batch, heads, queries])),
    }
}

pub fn merged_parts_backward<B: Backend>(
    inputs: MergedParts<B>,
    grads: OutputGrads<B>,
) -> MergedGrads<B> {
    let [batch, heads, queries, dim] = inputs.own.shape().dims();
    let [_, _, places, _] = inputs.rows.shape().dims();
    let most = inputs.places.shape()[3];
    let dtype = inputs.own.dtype().into();
    let sums = accumulate_in(dtype);
    let bools = get_device_settings::<B>(&inputs.own.device()).bool_dtype;
    let Weighed {
        parts,
        weights,
        lse,
    } = Weighed::<B>::new(inputs.own_lse, inputs.lses, inputs.places.clone());
    let all_parts = parts.shape();
    let part = |tensor: &FloatTensor<B>, from: usize, to: usize| {
        B::float_slice(tensor.clone(), &ranges([batch, heads, queries], from..to))
    };
    let of_places = |tensor: FloatTensor<B>| {
        let others = part(&tensor, 1, most + 1);
        let others = B::float_reshape(others, Shape::new([batch, heads, queries * most, 1]));
        gather_rows::<B>(others, inputs.choices.clone())
    };
    let grad = grads.out;
    let wide = B::float_cast(grad.clone(), sums);
    let first = part(&weights, 0, 1);
    let own = B::float_mul(wide.clone(), B::float_expand(first, wide.shape()));

    let factors = of_places(weights.clone());
    let taken = gather_rows::<B>(grad, queries_of::<B>(inputs.choices.clone(), most));
    let taken = B::float_cast(taken, sums);
    let factors = B::float_expand(factors, Shape::new([batch, heads, places, dim]));
    let rows = B::float_mul(taken, factors);

    let all = all_rows::<B>(inputs.own, inputs.rows, inputs.places);
    let wide = B::float_reshape(wide, Shape::new([batch, heads, queries, 1, dim]));
    let wide = B::float_expand(wide, all.shape());
    let dots = B::float_reshape(
        B::float_sum_dim(B::float_mul(all, wide), 4),
        all_parts.clone(),
    );
    let mean = B::float_sum_dim(B::float_mul(weights.clone(), dots.clone()), 3);
    let less = match grads.lse.into_option() {
        Some(grad) => {
            let empty = B::float_lower_equal_elem(lse.clone(), LOWEST.into(), bools);
            let grad = B::float_reshape(grad, lse.shape());
            B::float_sub(mean, B::float_mask_fill(grad, empty, 0f32.into()))
        }
        None => mean,
    };
    let by = B::float_mul(
        weights,
        B::float_sub(dots, B::float_expand(less, all_parts)),
    );
    let lowest = B::float_lower_equal_elem(parts, LOWEST.into(), bools);
    let by = B::float_mask_fill(by, lowest, 0f32.into());
    MergedGrads {
        own: B::float_cast(own, dtype),
        own_lse: B::float_reshape(part(&by, 0, 1), Shape::new([batch, heads, queries])),
        rows: B::float_cast(rows, dtype),
        lses: B::float_reshape(of_places(by), Shape::new([batch, heads, places])),
    }
}

/// The rows at the places of each query: `[batch, heads, queries, most, dim]`.
fn at_places<B: Backend>(rows: FloatTensor<B>, places: IntTensor<B>) -> FloatTensor<B> {
    let [batch, heads, queries, most] = places.shape().dims();
    let dim = rows.shape()[3];
    let places = B::int_reshape(places, Shape::new([batch, heads, queries * most]));
    let taken = gather_rows::<B>(rows, places);
    B::float_reshape(taken, Shape::new([batch, heads, queries, most, dim]))
}

/// The query of each choice, −1 where there is none.
pub fn queries_of<B: Backend>(choices: IntTensor<B>, most: usize) -> IntTensor<B> {
    let device = choices.device();
    let bools = get_device_settings::<B>(&device).bool_dtype;
    let none = B::int_lower_elem(choices.clone(), 0i64.into(), bools);
    let queries = B::int_clamp_min(choices, 0i64.into());
    let queries = B::int_div_scalar(queries, (most as i64).into());
    B::int_mask_fill(queries, none, (-1i64).into())
}

/// All of the first three dimensions, and a range of the last.
pub fn ranges(dims: [usize; 3], last: std::ops::Range<usize>) -> [Slice; 4] {
    let all = |length: usize| Slice::new(0, Some(length as isize), 1);
    let [batch, heads, rows] = dims.map(all);
    let last = Slice::new(last.start as isize, Some(last.end as isize), 1);
    [batch, heads, rows, last]
}
