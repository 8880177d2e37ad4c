//! Products and their gradients, built from matmuls and sums over rows, which every backend has.

use crate::linear::values::{LinearGrads, LinearOutput, LinearSaved, LinearTask};
use burn_blocksparse::internal::prelude::*;

/// Rows that one product of `xᵀ · dy` sums over. The product of two tall matrices has few tiles and long sums, so it is computed as one product per group of
/// rows, and the results are added.
const WEIGHT_ROWS: usize = 1024;

/// Columns that one product of `dy · Wᵀ` sums over, if there are at least twice as many, as for a vocabulary. A product of few rows has few tiles then, and
/// in a long sum small terms vanish next to large ones.
const INPUT_COLUMNS: usize = 8192;

/// Least rows for which groups pay off.
const LEAST_ROWS: usize = 4096;

/// Matrix products and sums of a backend.
pub(crate) trait Products<B: Backend> {
    /// Returns `lhs · rhs` for matrices or batches of matrices of one dtype, in that dtype or in that of its sums. No length is 0.
    fn product(lhs: FloatTensor<B>, rhs: FloatTensor<B>, dtype: FloatDType) -> FloatTensor<B>;

    /// Concatenates weights in `dtype` to `[in, Σ out]`. There is at least one.
    fn joined(weights: Vec<FloatTensor<B>>, dtype: FloatDType) -> FloatTensor<B> {
        let weights = weights
            .into_iter()
            .map(|weight| Array::<B>(weight).cast(dtype));
        Array::cat(weights, 1).0
    }

    /// Returns partial products that add up to `lhs · rhs`, in the dtype of sums: `[parts, rows, columns]`. `None` if the backend has no kernel that chooses
    /// the number of parts. No length is 0.
    fn parts(_lhs: &FloatTensor<B>, _rhs: &FloatTensor<B>) -> Option<FloatTensor<B>> {
        None
    }

    /// Sums over the rows of `[rows, width]`: `[width]`.
    fn sum_rows(matrix: FloatTensor<B>) -> FloatTensor<B>;

    /// Sums over matrices `[matrices, inner, Σ widths]` and returns one contiguous matrix `[inner, width]` for each width.
    fn sum_matrices(matrices: FloatTensor<B>, widths: &[usize]) -> Vec<FloatTensor<B>> {
        let [count, inner, width] = matrices.shape().dims();
        let rows = Array::<B>(matrices).reshape([count, inner * width]);
        let sum = Array::<B>(Self::sum_rows(rows.0)).reshape([inner, width]).0;
        let mut start = 0;
        let parts = widths.iter().map(|width| {
            start += width;
            columns::<B>(sum.clone(), start - width, *width)
        });
        parts.collect()
    }
}

/// Products in Burn's own operations.
pub(crate) struct Primitives;

impl<B: Backend> Products<B> for Primitives {
    fn product(lhs: FloatTensor<B>, rhs: FloatTensor<B>, dtype: FloatDType) -> FloatTensor<B> {
        // Products of half-precision numbers are exact in f32.
        let sums = accumulate_in(lhs.dtype().into());
        let [lhs, rhs] = [lhs, rhs].map(|factor| rounded::<B>(factor, sums));
        rounded::<B>(B::float_matmul(lhs, rhs), dtype)
    }

    fn sum_rows(matrix: FloatTensor<B>) -> FloatTensor<B> {
        let width = matrix.shape()[1];
        Array::<B>(matrix).sum_dim(0).reshape([width]).0
    }
}

/// Casts `tensor` to `dtype`, if it has another.
pub(crate) fn rounded<B: Backend>(tensor: FloatTensor<B>, dtype: FloatDType) -> FloatTensor<B> {
    Array::<B>(tensor).cast(dtype).0
}

/// Returns the number of row groups for the gradient with respect to weights.
pub(crate) fn groups(rows: usize) -> usize {
    match rows >= LEAST_ROWS && rows.is_multiple_of(WEIGHT_ROWS) {
        true => rows / WEIGHT_ROWS,
        false => 1,
    }
}

/// Returns the number of equal slices for a sum over `columns`: 1 if no suitable number divides them.
fn slices(columns: usize) -> usize {
    let least = columns.div_ceil(INPUT_COLUMNS);
    match columns < 2 * INPUT_COLUMNS {
        true => 1,
        false => (least..8 * least)
            .find(|slices| columns.is_multiple_of(*slices))
            .unwrap_or(1),
    }
}

/// Returns `x · weight` for `[rows, in]` and `[in, out]`.
pub(crate) fn outputs<B: Backend, P: Products<B>>(
    x: FloatTensor<B>,
    weight: FloatTensor<B>,
    dtype: FloatDType,
) -> FloatTensor<B> {
    let [rows, inner] = x.shape().dims();
    let columns = weight.shape()[1];
    if [rows, inner, columns].contains(&0) {
        return Array::<B>::zeros([rows, columns], &x.device(), dtype).0;
    }
    let made = made_in(dtype, x.dtype().into());
    rounded::<B>(P::product(x, weight, made), dtype)
}

/// Returns the dtype that a product with factors of dtype `own` writes: `wanted` directly if it is the dtype of sums, so that nothing is rounded twice, else
/// `own`.
pub(crate) fn made_in(wanted: FloatDType, own: FloatDType) -> FloatDType {
    match wanted == accumulate_in(own) {
        true => wanted,
        false => own,
    }
}

/// Returns `grad · weightᵀ` for `[rows, out]` and `[in, out]`.
pub(crate) fn input_gradient<B: Backend, P: Products<B>>(
    grad: FloatTensor<B>,
    weight: FloatTensor<B>,
    dtype: FloatDType,
) -> FloatTensor<B> {
    let [rows, columns] = grad.shape().dims();
    let inputs = weight.shape()[0];
    let slices = slices(columns);
    if slices == 1 || rows * inputs == 0 {
        return outputs::<B, P>(grad, B::float_swap_dims(weight, 0, 1), dtype);
    }
    let width = columns / slices;
    let grad = Array::<B>(grad).reshape([rows, slices, width]).swap(0, 1);
    let weight = Array::<B>(weight).reshape([inputs, slices, width]);
    let weight = weight.swap(0, 1).swap(1, 2);
    let sums = accumulate_in(grad.dtype());
    let parts = Array::<B>(P::product(grad.0, weight.0, sums));
    let parts = parts.reshape([slices, rows * inputs]);
    let sum = Array::<B>(P::sum_rows(parts.0)).reshape([rows, inputs]);
    sum.cast(dtype).0
}

/// Returns `xᵀ · grad` for `[rows, in]` and `[rows, Σ widths]` in the dtype of sums: one matrix for each width.
pub(crate) fn weight_gradients<B: Backend, P: Products<B>>(
    x: FloatTensor<B>,
    grad: FloatTensor<B>,
    widths: &[usize],
) -> Vec<FloatTensor<B>> {
    let [rows, inputs] = x.shape().dims();
    let outputs = grad.shape()[1];
    let dtype = accumulate_in(x.dtype().into());
    if [rows, inputs, outputs].contains(&0) {
        let widths = widths.iter();
        let part = |width: &usize| Array::<B>::zeros([inputs, *width], &x.device(), dtype).0;
        return widths.map(part).collect();
    }
    let transposed = B::float_swap_dims(x.clone(), 0, 1);
    let parts = P::parts(&transposed, &grad).unwrap_or_else(|| {
        let groups = groups(rows);
        let x = Array::<B>(x).reshape([groups, rows / groups, inputs]);
        let grad = Array::<B>(grad).reshape([groups, rows / groups, outputs]);
        P::product(x.swap(1, 2).0, grad.0, dtype)
    });
    match (parts.shape()[0], widths) {
        (1, [_]) => vec![B::float_reshape(parts, Shape::new([inputs, outputs]))],
        _ => P::sum_matrices(parts, widths),
    }
}

/// [`weight_gradients`] for a single weight.
pub(crate) fn weight_gradient<B: Backend, P: Products<B>>(
    x: FloatTensor<B>,
    grad: FloatTensor<B>,
) -> FloatTensor<B> {
    let width = grad.shape()[1];
    weight_gradients::<B, P>(x, grad, &[width]).remove(0)
}

/// Reshapes `tensor` to a matrix with its last dimension's width.
pub(crate) fn as_rows<B: Backend>(tensor: FloatTensor<B>) -> FloatTensor<B> {
    let sizes = matrix(&tensor.shape());
    B::float_reshape(tensor, Shape::new(sizes))
}

/// Replaces the last dimension of `shape`.
pub(crate) fn with_width(shape: &Shape, width: usize) -> Shape {
    let leading = shape.iter().take(shape.num_dims() - 1).copied();
    Shape::from(leading.chain([width]).collect::<Vec<_>>())
}

/// Returns `width` columns of a matrix, from `start` on.
fn columns<B: Backend>(matrix: FloatTensor<B>, start: usize, width: usize) -> FloatTensor<B> {
    match width == matrix.shape()[1] {
        true => matrix,
        false => Array::<B>(matrix).narrow(1, start..start + width).0,
    }
}

/// Casts x and the concatenated weights to a product's dtype. The flags say which of the two differ from the inputs.
pub(crate) fn factors<B: Backend, P: Products<B>>(
    x: FloatTensor<B>,
    weights: ThreeFloats<B>,
    dtype: FloatDType,
) -> ([FloatTensor<B>; 2], [bool; 2]) {
    let mut weights: Vec<FloatTensor<B>> = weights.into_list().into_iter().flatten().collect();
    let changed = |tensor: &FloatTensor<B>| FloatDType::from(tensor.dtype()) != dtype;
    let are_new = [
        changed(&x),
        weights.len() > 1 || weights.iter().any(changed),
    ];
    let weight = match are_new[1] {
        true => P::joined(weights, dtype),
        false => weights.remove(0),
    };
    ([rounded::<B>(x, dtype), weight], are_new)
}

/// Returns `x · [W₁ W₂ W₃]` with factors rounded to `dtype`.
pub(crate) fn forward<B: Backend, P: Products<B>>(
    x: FloatTensor<B>,
    weights: ThreeFloats<B>,
    dtype: FloatDType,
) -> LinearOutput<B> {
    let ([x, weight], [is_rounded, is_joined]) = factors::<B, P>(x, weights, dtype);
    let out_shape = with_width(&x.shape(), weight.shape()[1]);
    let out = outputs::<B, P>(as_rows::<B>(x.clone()), weight.clone(), dtype);
    LinearOutput {
        out: ThreeFloats::one(B::float_reshape(out, out_shape)),
        rounded: is_rounded.then_some(x).into(),
        joined: is_joined.then_some(weight).into(),
    }
}

/// Computes `dx = dy · Wᵀ` and `dW = xᵀ · dy`, as far as they are wanted.
pub(crate) fn backward<B: Backend, P: Products<B>>(
    saved: LinearSaved<B>,
    task: LinearTask,
) -> LinearGrads<B> {
    let LinearSaved { x, weight, grad } = saved;
    let x_shape = with_width(&grad.shape(), task.inputs);
    let grad = as_rows::<B>(grad);
    let by_x = task.x.zip(weight.into_option()).map(|(dtype, weight)| {
        let by_x = input_gradient::<B, P>(grad.clone(), weight, dtype);
        B::float_reshape(by_x, x_shape)
    });
    let mut by_weights = [const { None }; 3];
    if let Some(x) = x.into_option() {
        let x = as_rows::<B>(x);
        let all = || task.weights.iter().flatten();
        // One product for all weights, unless the gradient of one is not wanted.
        let mut joined = match all().all(|(_, dtype)| dtype.is_some()) {
            true => {
                let widths: Vec<usize> = all().map(|(width, _)| *width).collect();
                weight_gradients::<B, P>(x.clone(), grad.clone(), &widths)
            }
            false => Vec::new(),
        }
        .into_iter();
        let mut start = 0;
        for (weight, by_weight) in task.weights.into_iter().zip(&mut by_weights) {
            let Some((width, dtype)) = weight else {
                continue;
            };
            let made = joined.next();
            *by_weight = dtype.map(|dtype| {
                let made = made.unwrap_or_else(|| {
                    let grad = columns::<B>(grad.clone(), start, width);
                    weight_gradient::<B, P>(x.clone(), grad)
                });
                rounded::<B>(made, dtype)
            });
            start += width;
        }
    }
    LinearGrads {
        x: by_x.into(),
        weights: ThreeFloats::of_list(by_weights),
    }
}
