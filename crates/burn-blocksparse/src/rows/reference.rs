//! Indexed rows in Burn primitives: selections in both passes, without scatter-adds.

use burn::backend::get_device_settings;
use burn::tensor::IntDType;

use crate::base::prelude::*;
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
    // The rows of all heads form one list.
    let first = B::int_arange(0..(batch * heads) as i64, &device, IntDType::I32);
    let first = B::int_mul_scalar(first, (rows as i64).into());
    let first = B::int_reshape(first, Shape::new([batch, heads, 1]));
    let index = B::int_add(index, B::int_expand(first, wide));
    let count = batch * heads * places;
    let index = B::int_reshape(index, Shape::new([count]));
    let none = B::bool_reshape(none, Shape::new([count, 1]));
    let none = B::bool_expand(none, Shape::new([count, dim]));
    let x = Array::<B>(x).reshape([batch * heads * rows, dim]);
    let taken = x.select(0, index).fill(none, 0.0);
    taken.reshape([batch, heads, places, dim]).0
}

pub fn rows_at_backward<B: Backend>(grad: FloatTensor<B>, users: IntTensor<B>) -> FloatTensor<B> {
    let [batch, heads, rows, most] = users.shape().dims();
    let dim = grad.shape()[3];
    let users = B::int_reshape(users, Shape::new([batch, heads, rows * most]));
    let dtype = grad.dtype().into();
    let mut sums = Array::<B>(gather_rows::<B>(grad, users));
    if most > 1 {
        let taken = sums.cast(accumulate_in(dtype));
        let taken = taken.reshape([batch * heads * rows, most, dim]);
        sums = taken.sum_dim(1).cast(dtype);
    }
    sums.reshape([batch, heads, rows, dim]).0
}

/// Stands for the lse of a row without keys in sums: far below any score, but finite, so that ∞ − ∞ cannot occur.
pub const LOWEST: f64 = -1e30;

/// Weights of the parts of each query.
struct Weighed<B: Backend> {
    /// lse of the parts, the query's own first: `[batch, heads, queries, 1 + most]`.
    parts: Array<B>,
    /// Weights of the parts, in the same shape.
    weights: Array<B>,
    /// lse of the union, `[batch, heads, queries, 1]`.
    lse: Array<B>,
}

impl<B: Backend> Weighed<B> {
    fn new(own_lse: FloatTensor<B>, lses: FloatTensor<B>, places: IntTensor<B>) -> Self {
        let [batch, heads, queries, most] = places.shape().dims();
        let count = lses.shape()[2];
        let bools = get_device_settings::<B>(&places.device()).bool_dtype;
        let none = B::int_lower_elem(places.clone(), 0i64.into(), bools);
        let lses = Array::<B>(lses).reshape([batch, heads, count, 1]);
        let others = at_places(lses, places).reshape([batch, heads, queries, most]);
        let own = Array::<B>(own_lse).reshape([batch, heads, queries, 1]);
        let parts = Array::cat([own, others.fill(none, LOWEST)], 3).at_least(LOWEST);
        let top = parts.clone().max_dim(3);
        let weights = (parts.clone() - &top).exp();
        let total = weights.clone().sum_dim(3);
        let empty = top.at_most(LOWEST);
        let lse = top + total.clone().log();
        Self {
            weights: weights / total,
            lse: lse.fill(empty, f64::NEG_INFINITY),
            parts,
        }
    }
}

/// Returns the own row and those at the places of each query, in the dtype of sums: `[batch, heads, queries, 1 + most, dim]`.
fn all_rows<B: Backend>(
    own: FloatTensor<B>,
    rows: FloatTensor<B>,
    places: IntTensor<B>,
) -> Array<B> {
    let [batch, heads, queries, dim] = own.shape().dims();
    let sums = accumulate_in(own.dtype().into());
    let own = Array::<B>(own).reshape([batch, heads, queries, 1, dim]);
    Array::cat([own, at_places(Array::<B>(rows), places)], 3).cast(sums)
}

pub fn merged_parts<B: Backend>(inputs: MergedParts<B>) -> MergedOutput<B> {
    let [batch, heads, queries, dim] = inputs.own.shape().dims();
    let most = inputs.places.shape()[3];
    let dtype = inputs.own.dtype().into();
    let weighed = Weighed::<B>::new(inputs.own_lse, inputs.lses, inputs.places.clone());
    let all = all_rows::<B>(inputs.own, inputs.rows, inputs.places);
    let weights = (weighed.weights).reshape([batch, heads, queries, most + 1, 1]);
    let out = (all * weights).sum_dim(3);
    MergedOutput {
        out: out.reshape([batch, heads, queries, dim]).cast(dtype).0,
        lse: weighed.lse.reshape([batch, heads, queries]).0,
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
    let Weighed {
        parts,
        weights,
        lse,
    } = Weighed::<B>::new(inputs.own_lse, inputs.lses, inputs.places.clone());
    let of_places = |x: Array<B>| {
        let others = x.narrow(3, 1..most + 1);
        let others = others.reshape([batch, heads, queries * most, 1]);
        Array::<B>(gather_rows::<B>(others.0, inputs.choices.clone()))
    };
    let wide = Array::<B>(grads.out.clone()).cast(accumulate_in(dtype));
    let own = wide.clone() * weights.clone().narrow(3, 0..1);
    let of_choices = queries_of::<B>(inputs.choices.clone(), most);
    let taken = Array::<B>(gather_rows::<B>(grads.out, of_choices));
    let rows = taken.cast(wide.dtype()) * of_places(weights.clone());

    let all = all_rows::<B>(inputs.own, inputs.rows, inputs.places);
    let wide = wide.reshape([batch, heads, queries, 1, dim]);
    let dots = (all * wide).sum_dim(4).reshape(parts.shape());
    let mut less = (weights.clone() * &dots).sum_dim(3);
    if let OptFloat::Some(grad) = grads.lse {
        let empty = lse.at_most(LOWEST);
        less = less - Array::<B>(grad).reshape(lse.shape()).fill(empty, 0.0);
    }
    let by = (weights * (dots - less)).fill(parts.at_most(LOWEST), 0.0);
    let own_lse = by.clone().narrow(3, 0..1);
    MergedGrads {
        own: own.cast(dtype).0,
        own_lse: own_lse.reshape([batch, heads, queries]).0,
        rows: rows.cast(dtype).0,
        lses: of_places(by).reshape([batch, heads, places]).0,
    }
}

/// Returns the rows at the places of each query: `[batch, heads, queries, most, dim]`.
fn at_places<B: Backend>(rows: Array<B>, places: IntTensor<B>) -> Array<B> {
    let [batch, heads, queries, most] = places.shape().dims();
    let dim = rows.shape()[3];
    let places = B::int_reshape(places, Shape::new([batch, heads, queries * most]));
    let taken = Array::<B>(gather_rows::<B>(rows.0, places));
    taken.reshape([batch, heads, queries, most, dim])
}

/// Returns the query of each choice, or −1 if there is none.
pub fn queries_of<B: Backend>(choices: IntTensor<B>, most: usize) -> IntTensor<B> {
    let device = choices.device();
    let bools = get_device_settings::<B>(&device).bool_dtype;
    let none = B::int_lower_elem(choices.clone(), 0i64.into(), bools);
    let queries = B::int_clamp_min(choices, 0i64.into());
    let queries = B::int_div_scalar(queries, (most as i64).into());
    B::int_mask_fill(queries, none, (-1i64).into())
}
