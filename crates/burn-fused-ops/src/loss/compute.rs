//! The loss and its gradients, computed in chunks of positions. A backend supplies the steps.

use std::ops::Range;

use burn::backend::get_device_settings;
use burn::tensor::IndexingUpdateOp;

use crate::linear::products::{
    Primitives, Products, input_gradient, outputs, rounded, weight_gradient,
};
use crate::loss::values::{
    LossDtypes, LossGrads, LossInputs, LossOutput, LossSaved, LossTask, Reduction,
};
use burn_blocksparse::internal::prelude::*;

/// Computes and sums the losses of positions.
pub(crate) trait Losses<B: Backend>: Sized {
    /// Implementation of matrix products.
    type Products: Products<B>;

    /// Begins the losses of `targets` for logits over `vocab` columns in the dtype of sums. The gradient with respect to the logits has dtype `gradient`, if
    /// it is wanted.
    fn new(
        x: &FloatTensor<B>,
        targets: IntTensor<B>,
        vocab: usize,
        gradient: Option<FloatDType>,
        task: LossTask,
    ) -> Self;

    /// Takes the logits of `positions`, which arrive in order, and returns their gradient if it is wanted.
    fn take(&mut self, logits: FloatTensor<B>, positions: Range<usize>) -> Option<FloatTensor<B>>;

    /// Returns the loss and the factor that the sum of losses was multiplied by: `[1]` each; with [`Reduction::None`] the loss is `[positions]`.
    fn loss(self) -> [FloatTensor<B>; 2];
}

/// Returns the number of positions in a chunk.
pub(crate) fn chunk_rows(positions: usize, vocab: usize, chunk_elements: usize) -> usize {
    let rows = (chunk_elements / vocab.max(1)).max(1);
    let rows = match rows {
        // Whole row groups of the weight's gradient, and chunks that begin at an alignment a buffer may have.
        1024.. => rows - rows % 1024,
        8.. => rows - rows % 8,
        _ => rows,
    };
    rows.min(positions.max(1))
}

pub(crate) fn forward<B: Backend, L: Losses<B>>(
    inputs: LossInputs<B>,
    task: LossTask,
) -> LossOutput<B> {
    // Gradients with respect to the losses of single positions are not known yet.
    let is_whole = task.reduction != Reduction::None;
    let task = LossTask {
        by_x: task.by_x && is_whole,
        by_weight: task.by_weight && is_whole,
        ..task
    };
    let LossInputs { x, weight, targets } = inputs;
    let dtype = FloatDType::from(x.dtype());
    let [positions, width] = x.shape().dims();
    let vocab = weight.shape()[1];
    let gradient = (task.by_x || task.by_weight).then_some(dtype);
    let mut losses = L::new(&x, targets, vocab, gradient, task);
    let as_it_is = |made, _: &Range<usize>| made;
    let [by_x, by_weight] = in_chunks(&mut losses, &x, weight, task, as_it_is, as_it_is);
    let zeros = |shape: [usize; 2], dtype| Array::<B>::zeros(shape, &x.device(), dtype).0;
    let by_x = (task.by_x).then(|| by_x.unwrap_or_else(|| zeros([positions, width], dtype)));
    let by_weight = (task.by_weight)
        .then(|| by_weight.unwrap_or_else(|| zeros([width, vocab], accumulate_in(dtype))));
    let [loss, factor] = losses.loss();
    LossOutput {
        loss,
        factor,
        x: by_x.into(),
        weight: by_weight.into(),
    }
}

/// Computes the logits of all positions in chunks, and the gradients that `task` wants. `of_x` maps each chunk's gradient with respect to x to what is
/// returned; `of_rows` maps x's rows before the product for the gradient with respect to the weight.
fn in_chunks<B: Backend, L: Losses<B>>(
    losses: &mut L,
    x: &FloatTensor<B>,
    weight: FloatTensor<B>,
    task: LossTask,
    of_x: impl Fn(FloatTensor<B>, &Range<usize>) -> FloatTensor<B>,
    of_rows: impl Fn(FloatTensor<B>, &Range<usize>) -> FloatTensor<B>,
) -> [Option<FloatTensor<B>>; 2] {
    let dtype = FloatDType::from(x.dtype());
    let sums = accumulate_in(dtype);
    let (positions, vocab) = (x.shape()[0], weight.shape()[1]);
    let weight = rounded::<B>(weight, dtype);
    let mut by_x = Vec::new();
    let mut by_weight: Option<FloatTensor<B>> = None;
    let chunk = chunk_rows(positions, vocab, task.chunk_elements);
    for start in (0..positions).step_by(chunk) {
        let taken = start..(start + chunk).min(positions);
        let rows = rows_of::<B>(x, &taken);
        let logits = outputs::<B, L::Products>(rows.clone(), weight.clone(), sums);
        let Some(gradient) = losses.take(logits, taken.clone()) else {
            continue;
        };
        if task.by_x {
            let made = input_gradient::<B, L::Products>(gradient.clone(), weight.clone(), dtype);
            by_x.push(Array::<B>(of_x(made, &taken)));
        }
        if task.by_weight {
            let made = weight_gradient::<B, L::Products>(of_rows(rows, &taken), gradient);
            by_weight = Some(match by_weight {
                Some(sum) => B::float_add(sum, made),
                None => made,
            });
        }
    }
    let by_x = (!by_x.is_empty()).then(|| Array::cat(by_x, 0).0);
    [by_x, by_weight]
}

/// Returns the given rows of a matrix.
fn rows_of<B: Backend>(x: &FloatTensor<B>, rows: &Range<usize>) -> FloatTensor<B> {
    match rows.len() == x.shape()[0] {
        true => x.clone(),
        false => Array::<B>(x.clone()).narrow(0, rows.clone()).0,
    }
}

/// Returns the losses of positions, `[positions]`, from the first column of `[rows, columns]`, and a factor of 1 since nothing is summed.
#[cfg(feature = "cube")]
pub(crate) fn of_positions<B: Backend>(x: FloatTensor<B>, positions: usize) -> [FloatTensor<B>; 2] {
    let (device, dtype) = (x.device(), FloatDType::from(x.dtype()));
    let losses = match positions {
        0 => B::float_zeros(Shape::new([0]), &device, dtype),
        _ => {
            let column = Array::<B>(x).narrow(0, 0..positions).narrow(1, 0..1);
            column.reshape([positions]).0
        }
    };
    [losses, B::float_ones(Shape::new([1]), &device, dtype)]
}

/// Computes the gradients for [`Reduction::None`], given a gradient `grad`, `[positions]`, for each loss.
pub(crate) fn backward_of_positions<B: Backend, L: Losses<B>>(
    inputs: LossInputs<B>,
    grad: FloatTensor<B>,
    task: LossTask,
    dtypes: LossDtypes,
) -> LossGrads<B> {
    let LossInputs { x, weight, targets } = inputs;
    let dtype = FloatDType::from(x.dtype());
    let sums = accumulate_in(dtype);
    let device = x.device();
    let bools = get_device_settings::<B>(&device).bool_dtype;
    let [positions, width] = x.shape().dims();
    let vocab = weight.shape()[1];
    let zeros = |shape: [usize; 2], dtype| Array::<B>::zeros(shape, &device, dtype).0;
    if positions == 0 {
        let [x, weight] = [task.by_x, task.by_weight];
        return LossGrads {
            x: x.then(|| zeros([0, width], dtypes.x)).into(),
            weight: weight.then(|| zeros([width, vocab], dtypes.weight)).into(),
        };
    }
    let by = Array::<B>(grad).cast(sums).reshape([positions, 1]);
    // Divide by the largest gradient: x times a gradient may overflow or underflow f16, x times its share of the largest does not.
    let largest = B::float_max(B::float_abs(by.0.clone()));
    let is_none = B::float_equal_elem(largest.clone(), 0.0.into(), bools);
    let largest = Array::<B>(largest).fill(is_none, 1.0).reshape([1, 1]);
    let shares = by.clone() / &largest;
    let mut losses = L::new(&x, targets, vocab, Some(dtype), task);
    let scaled = |x: FloatTensor<B>, by: &Array<B>, dtype, taken: &Range<usize>| {
        let by = Array::<B>(rows_of::<B>(&by.0, taken));
        (Array::<B>(x).cast(sums) * by).cast(dtype).0
    };
    let [by_x, by_weight] = in_chunks(
        &mut losses,
        &x,
        weight,
        task,
        |made, taken| scaled(made, &by, dtypes.x, taken),
        |rows, taken| scaled(rows, &shares, dtype, taken),
    );
    let of_largest = |made| (Array::<B>(made).cast(sums) * largest).cast(dtypes.weight);
    let by_weight = by_weight.map(|made| of_largest(made).0);
    LossGrads {
        x: by_x.into(),
        weight: by_weight.into(),
    }
}

/// Multiplies the gradients of the sum by the loss's factor and by the gradient with respect to the loss.
pub(crate) fn backward<B: Backend>(saved: LossSaved<B>, dtypes: LossDtypes) -> LossGrads<B> {
    let factor = Array::<B>(saved.factor) * Array::<B>(saved.grad);
    let factor = factor.reshape([1, 1]);
    let scaled = |tensor: FloatTensor<B>, dtype| {
        let tensor = Array::<B>(tensor).cast(factor.dtype());
        (tensor * &factor).cast(dtype).0
    };
    let [x, weight] = [saved.x, saved.weight].map(OptFloat::into_option);
    LossGrads {
        x: x.map(|x| scaled(x, dtypes.x)).into(),
        weight: weight.map(|w| scaled(w, dtypes.weight)).into(),
    }
}

/// Returns the ignored target if the targets' dtype can represent it.
pub(crate) fn ignored_in(dtype: DType, ignore_index: Option<i64>) -> Option<i64> {
    ignore_index.filter(|ignored| dtype != DType::I32 || i32::try_from(*ignored).is_ok())
}

/// Losses in Burn's own operations.
pub(crate) struct PrimitiveLosses<B: Backend> {
    like: FloatTensor<B>,
    targets: IntTensor<B>,
    vocab: usize,
    gradient: Option<FloatDType>,
    task: LossTask,
    /// Losses and count flags of the positions taken so far, `[rows, 1]` each.
    taken: Vec<[Array<B>; 2]>,
}

impl<B: Backend> Losses<B> for PrimitiveLosses<B> {
    type Products = Primitives;

    fn new(
        x: &FloatTensor<B>,
        targets: IntTensor<B>,
        vocab: usize,
        gradient: Option<FloatDType>,
        task: LossTask,
    ) -> Self {
        Self {
            like: x.clone(),
            targets,
            vocab,
            gradient,
            task,
            taken: Vec::new(),
        }
    }

    fn take(&mut self, logits: FloatTensor<B>, positions: Range<usize>) -> Option<FloatTensor<B>> {
        let rows = positions.len();
        let bools = get_device_settings::<B>(&logits.device()).bool_dtype;
        let targets = B::int_slice(self.targets.clone(), &[Slice::from(positions)]);
        let targets = B::int_reshape(targets, Shape::new([rows, 1]));
        let vocab = (self.vocab as i64).into();
        let out_of_range = B::bool_or(
            B::int_lower_elem(targets.clone(), 0i64.into(), bools),
            B::int_greater_equal_elem(targets.clone(), vocab, bools),
        );
        let ignored: Option<BoolTensor<B>> = ignored_in(targets.dtype(), self.task.ignore_index)
            .map(|ignored| B::int_equal_elem(targets.clone(), ignored.into(), bools));
        let targets = B::int_mask_fill(targets, out_of_range.clone(), 0i64.into());
        let targets = match &ignored {
            Some(ignored) => B::int_mask_fill(targets, ignored.clone(), 0i64.into()),
            None => targets,
        };
        let of_rows = |mut x: Array<B>, nan: bool| {
            let shape = x.shape();
            let spread = |mask: &BoolTensor<B>| B::bool_expand(mask.clone(), shape.clone());
            if nan {
                x = x.fill(spread(&out_of_range), f64::NAN);
            }
            match &ignored {
                Some(ignored) => x.fill(spread(ignored), 0.0),
                None => x,
            }
        };

        let smoothing = self.task.smoothing;
        let share = smoothing / self.vocab as f64;
        let logits = Array::<B>(logits);
        let logits = logits.clone() - logits.max_dim(1);
        let exponentials = logits.clone().exp();
        let sum = exponentials.clone().sum_dim(1);
        let chosen = B::float_gather(1, logits.0.clone(), targets.clone());
        let mut expected = Array::<B>(chosen) * (1.0 - smoothing);
        let ones = B::float_ones(Shape::new([rows, 1]), &logits.0.device(), logits.dtype());
        let ones = Array::<B>(ones);
        if smoothing != 0.0 {
            expected = expected + logits.sum_dim(1) * share;
        }
        let losses = sum.clone().log() - expected;
        let taken = [of_rows(losses, true), of_rows(ones.clone(), false)];
        self.taken.push(taken);

        let gradient = self.gradient?;
        let mut softmax = exponentials / sum;
        if smoothing != 0.0 {
            softmax = softmax - share;
        }
        let on_target = (ones * (smoothing - 1.0)).0;
        let by_logits = B::float_scatter(1, softmax.0, targets, on_target, IndexingUpdateOp::Add);
        Some(of_rows(Array::<B>(by_logits), true).cast(gradient).0)
    }

    fn loss(self) -> [FloatTensor<B>; 2] {
        let dtype = accumulate_in(self.like.dtype().into());
        let (device, one) = (self.like.device(), Shape::new([1]));
        let ones = || Array::<B>(B::float_ones(one.clone(), &device, dtype));
        if self.task.reduction == Reduction::None {
            let taken = self.taken.into_iter().map(|[losses, _]| losses.flat());
            let taken: Vec<_> = taken.collect();
            let losses = match taken.is_empty() {
                true => Array::zeros([0], &device, dtype),
                false => Array::cat(taken, 0),
            };
            return [losses.0, ones().0];
        }
        // Sum as a row: a sum over all elements may use atomics.
        let sum_of = |column: Array<B>| {
            let rows = column.shape()[0];
            column.reshape([1, rows]).sum_dim(1).reshape([1])
        };
        let sums = self.taken.into_iter().map(|taken| taken.map(sum_of));
        let sums = sums.reduce(|[losses, counted], [more, more_counted]| {
            [losses + more, counted + more_counted]
        });
        let zeros = || Array::zeros([1], &device, dtype);
        let [sum, counted] = sums.unwrap_or_else(|| [zeros(), zeros()]);
        let factor = match self.task.reduction {
            Reduction::Sum | Reduction::None => ones(),
            // If no target counts, the factor is 0.
            Reduction::Mean => {
                let bools = get_device_settings::<B>(&device).bool_dtype;
                let none = B::float_equal_elem(counted.0.clone(), 0.0.into(), bools);
                counted.at_least(1.0).recip().fill(none, 0.0)
            }
        };
        [(sum * &factor).0, factor.0]
    }
}
