//! The loss and its gradients, chunk by chunk of positions, in pieces that backends make differently.

use std::ops::Range;

use burn::backend::tensor::{BoolTensor, FloatTensor, IntTensor};
use burn::backend::{Backend, TensorMetadata, get_device_settings};
use burn::tensor::{DType, FloatDType, IndexingUpdateOp, Shape, Slice};

use super::values::Reduction;
use super::values::{LossDtypes, LossGrads, LossInputs, LossOutput, LossSaved, LossTask};
use crate::dtype::accumulate_in;
use crate::linear::products::{
    Primitives, Products, input_gradient, outputs, rounded, weight_gradient,
};

/// How the losses of positions are made and added.
pub(crate) trait Losses<B: Backend>: Sized {
    /// What products are made of.
    type Products: Products<B>;

    /// Those of `targets`, for logits of a vocabulary in the dtype of sums; their gradient by the logits is in `gradient`, if it is wanted.
    fn new(
        x: &FloatTensor<B>,
        targets: IntTensor<B>,
        vocab: usize,
        gradient: Option<FloatDType>,
        task: LossTask,
    ) -> Self;

    /// Takes the logits of some positions, which come in order; their gradient, if it is wanted.
    fn take(&mut self, logits: FloatTensor<B>, positions: Range<usize>) -> Option<FloatTensor<B>>;

    /// The loss, and what the sum of the losses was multiplied by: `[1]` each.
    fn loss(self) -> [FloatTensor<B>; 2];
}

/// Positions that are taken at a time.
pub(crate) fn chunk_rows(positions: usize, vocab: usize, chunk_elements: usize) -> usize {
    let rows = (chunk_elements / vocab.max(1)).max(1);
    let rows = match rows {
        // Whole groups of the weight's gradient, and rows that begin where a buffer may.
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
    let LossInputs { x, weight, targets } = inputs;
    let dtype = FloatDType::from(x.dtype());
    let sums = accumulate_in(dtype);
    let [positions, width] = x.shape().dims();
    let vocab = weight.shape()[1];
    let weight = rounded::<B>(weight, dtype);
    let gradient = (task.by_x || task.by_weight).then_some(dtype);
    let mut losses = L::new(&x, targets, vocab, gradient, task);
    let mut by_x = Vec::new();
    let mut by_weight: Option<FloatTensor<B>> = None;
    let chunk = chunk_rows(positions, vocab, task.chunk_elements);
    for start in (0..positions).step_by(chunk) {
        let taken = start..(start + chunk).min(positions);
        let rows = match taken.len() == positions {
            true => x.clone(),
            false => B::float_slice(x.clone(), &[Slice::from(taken.clone()), Slice::full()]),
        };
        let logits = outputs::<B, L::Products>(rows.clone(), weight.clone(), sums);
        let Some(gradient) = losses.take(logits, taken) else {
            continue;
        };
        if task.by_x {
            let weight = weight.clone();
            by_x.push(input_gradient::<B, L::Products>(
                gradient.clone(),
                weight,
                dtype,
            ));
        }
        if task.by_weight {
            let made = weight_gradient::<B, L::Products>(rows, gradient);
            by_weight = Some(match by_weight {
                Some(sum) => B::float_add(sum, made),
                None => made,
            });
        }
    }
    let zeros = |shape: [usize; 2], dtype| B::float_zeros(Shape::new(shape), &x.device(), dtype);
    let by_x = match by_x.len() {
        0 => zeros([positions, width], dtype),
        1 => by_x.remove(0),
        _ => B::float_cat(by_x, 0),
    };
    let by_weight = by_weight.unwrap_or_else(|| match task.by_weight {
        true => zeros([width, vocab], sums),
        false => zeros([0, 0], sums),
    });
    let [loss, factor] = losses.loss();
    LossOutput {
        loss,
        factor,
        x: task.by_x.then_some(by_x).into(),
        weight: task.by_weight.then_some(by_weight).into(),
    }
}

/// The gradients of the sum times what the sum was multiplied by and the gradient by the loss.
pub(crate) fn backward<B: Backend>(saved: LossSaved<B>, dtypes: LossDtypes) -> LossGrads<B> {
    let LossSaved {
        factor,
        grad,
        x,
        weight,
    } = saved;
    let sums = FloatDType::from(factor.dtype());
    let factor = B::float_reshape(B::float_mul(factor, grad), Shape::new([1, 1]));
    let scaled = |tensor: FloatTensor<B>, dtype| {
        let product = B::float_mul(rounded::<B>(tensor, sums), factor.clone());
        rounded::<B>(product, dtype)
    };
    LossGrads {
        x: x.into_option().map(|x| scaled(x, dtypes.x)).into(),
        weight: weight
            .into_option()
            .map(|w| scaled(w, dtypes.weight))
            .into(),
    }
}

/// The ignored target, if the dtype of targets has it.
pub(crate) fn ignored_in(dtype: DType, ignore_index: Option<i64>) -> Option<i64> {
    ignore_index.filter(|ignored| dtype != DType::I32 || i32::try_from(*ignored).is_ok())
}

/// In Burn's own operations.
pub(crate) struct PrimitiveLosses<B: Backend> {
    like: FloatTensor<B>,
    targets: IntTensor<B>,
    vocab: usize,
    gradient: Option<FloatDType>,
    task: LossTask,
    /// Of the positions that were taken, `[rows, 1]` each: losses, and whether they count.
    taken: Vec<[FloatTensor<B>; 2]>,
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
        let dtype = FloatDType::from(logits.dtype());
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
        let of_rows = |tensor: FloatTensor<B>, nan: bool| {
            let shape = tensor.shape();
            let spread = |mask: &BoolTensor<B>| B::bool_expand(mask.clone(), shape.clone());
            let tensor = match nan {
                true => B::float_mask_fill(tensor, spread(&out_of_range), f64::NAN.into()),
                false => tensor,
            };
            match &ignored {
                Some(ignored) => B::float_mask_fill(tensor, spread(ignored), 0.0.into()),
                None => tensor,
            }
        };

        let smoothing = self.task.smoothing;
        let logits = B::float_sub(logits.clone(), B::float_max_dim(logits, 1));
        let exponentials = B::float_exp(logits.clone());
        let sum = B::float_sum_dim(exponentials.clone(), 1);
        let chosen = B::float_gather(1, logits.clone(), targets.clone());
        let mut expected = B::float_mul_scalar(chosen, (1.0 - smoothing).into());
        if smoothing != 0.0 {
            let all = B::float_sum_dim(logits, 1);
            let all = B::float_mul_scalar(all, (smoothing / self.vocab as f64).into());
            expected = B::float_add(expected, all);
        }
        let losses = B::float_sub(B::float_log(sum.clone()), expected);
        let device = losses.device();
        let ones = B::float_ones(Shape::new([rows, 1]), &device, dtype);
        self.taken
            .push([of_rows(losses, true), of_rows(ones.clone(), false)]);

        let gradient = self.gradient?;
        let mut softmax = B::float_div(exponentials, sum);
        if smoothing != 0.0 {
            let share = smoothing / self.vocab as f64;
            softmax = B::float_sub_scalar(softmax, share.into());
        }
        let on_target = B::float_mul_scalar(ones, (smoothing - 1.0).into());
        let by_logits = B::float_scatter(1, softmax, targets, on_target, IndexingUpdateOp::Add);
        Some(rounded::<B>(of_rows(by_logits, true), gradient))
    }

    fn loss(self) -> [FloatTensor<B>; 2] {
        let dtype = accumulate_in(self.like.dtype().into());
        let (device, one) = (self.like.device(), Shape::new([1]));
        let sums = self
            .taken
            .into_iter()
            .fold(None, |sums: Option<[FloatTensor<B>; 2]>, taken| {
                // As a row: a sum of all may add with atomics.
                let taken = taken.map(|column| {
                    let row = Shape::new([1, column.shape()[0]]);
                    let sum = B::float_sum_dim(B::float_reshape(column, row), 1);
                    B::float_reshape(sum, one.clone())
                });
                match sums {
                    None => Some(taken),
                    Some([losses, counted]) => {
                        let [more, more_counted] = taken;
                        Some([
                            B::float_add(losses, more),
                            B::float_add(counted, more_counted),
                        ])
                    }
                }
            });
        let zeros = || B::float_zeros(one.clone(), &device, dtype);
        let [sum, counted] = sums.unwrap_or_else(|| [zeros(), zeros()]);
        let factor = match self.task.reduction {
            Reduction::Sum => B::float_ones(one.clone(), &device, dtype),
            // Without targets that count the sum is 0.
            Reduction::Mean => {
                let bools = get_device_settings::<B>(&device).bool_dtype;
                let none = B::float_equal_elem(counted.clone(), 0.0.into(), bools);
                let factor = B::float_recip(B::float_clamp_min(counted, 1.0.into()));
                B::float_mask_fill(factor, none, 0.0.into())
            }
        };
        [B::float_mul(sum, factor.clone()), factor]
    }
}
