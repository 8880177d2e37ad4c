//! Optimizer steps in Burn primitives.

use burn::backend::get_device_settings;

use crate::optim::partial_sums;
use crate::optim::values::{AdamWHyper, AdamWInputs, AdamWOutput, GradNorm, LIMIT, TensorList};
use burn_blocksparse::internal::host;
use burn_blocksparse::internal::prelude::*;

/// Elements summed in a first step before their sums are added: a single sum over a long vector loses digits.
const RUN: usize = 512;

/// Detects sums of squares too large for their dtype. Sums of elements scaled down first do not overflow, and where they are used no square that matters
/// underflows to 0.
#[derive(Clone, Copy)]
struct Large {
    /// Factor that scales elements down.
    by: f64,
    /// Least sum that counts as large.
    sum: f64,
}

impl Large {
    fn of(dtype: FloatDType) -> Self {
        let [shrink, sum] = match dtype {
            FloatDType::F64 => [-768, 1023],
            _ => [-96, 127],
        };
        Self {
            by: 2f64.powi(shrink),
            sum: 2f64.powi(sum),
        }
    }

    /// Returns where a sum of scaled elements means that the plain sum is large. NaN is not large.
    fn is_sum<B: Backend>(self, shrunk: &Array<B>) -> BoolTensor<B> {
        let bools = get_device_settings::<B>(&shrunk.0.device()).bool_dtype;
        let bound = self.sum * self.by * self.by;
        B::float_greater_equal_elem(shrunk.0.clone(), bound.into(), bools)
    }
}

/// Writes the whole sum of a tensor to its first partial sum and 0 to the others. A [`Large`] sum is stored as the negative sum of scaled elements. If the
/// host may read values, elements are scaled only if necessary.
pub(crate) fn sum_of_squares<B: Backend>(
    tensors: TensorList<B>,
    partials: FloatTensor<B>,
    first: usize,
    may_look: bool,
) -> FloatTensor<B> {
    let (device, dtype) = (partials.device(), FloatDType::from(partials.dtype()));
    let large = Large::of(dtype);
    let mut sums = Vec::new();
    let mut length = 0;
    for tensor in tensors.into_vec() {
        let elements = tensor.shape().num_elements();
        let slots = partial_sums(elements);
        if slots == 0 {
            continue;
        }
        length += slots;
        let x = Array::<B>(tensor).flat().cast(dtype);
        let mut sum = squares_of(x.clone());
        let may_be_large = !may_look || {
            let sums = host::floats::<B, f64>(sum.0.clone());
            sums.iter().any(|sum| *sum >= large.sum)
        };
        if may_be_large {
            let shrunk = squares_of(x * large.by);
            let is_large = large.is_sum(&shrunk);
            sum = sum.replace(is_large, -shrunk);
        }
        sums.push(sum);
        if slots > 1 {
            sums.push(Array::zeros([slots - 1], &device, dtype));
        }
    }
    match sums.is_empty() {
        true => partials,
        false => {
            let place = Slice::from(first..first + length);
            B::float_slice_assign(partials, &[place], Array::cat(sums, 0).0)
        }
    }
}

/// Returns the sum of squares of a vector.
fn squares_of<B: Backend>(x: Array<B>) -> Array<B> {
    let elements = x.shape().num_elements();
    let squares = x.clone() * x;
    let (runs, rest) = (elements / RUN, elements % RUN);
    let mut parts = Vec::new();
    if runs > 0 {
        let rows = squares.clone().narrow(0, 0..runs * RUN);
        let rows = rows.reshape([runs, RUN]).sum_dim(1);
        parts.push(rows.flat().sum_dim(0));
    }
    if rest > 0 {
        parts.push(squares.narrow(0, runs * RUN..elements).sum_dim(0));
    }
    match parts.len() {
        1 => parts.remove(0),
        _ => Array::cat(parts, 0).sum_dim(0),
    }
}

pub(crate) fn clip_factor<B: Backend>(
    partials: FloatTensor<B>,
    control: FloatTensor<B>,
) -> GradNorm<B> {
    let large = Large::of(partials.dtype().into());
    let by = large.by;
    let bools = get_device_settings::<B>(&partials.device()).bool_dtype;
    let is_shrunk = B::float_lower_elem(partials.clone(), 0.0.into(), bools);
    let partials = Array::<B>(partials);
    let plain = partials.clone().fill(is_shrunk.clone(), 0.0);
    // The square of the scale underflows in the dtype: multiply twice.
    let shrunk = (plain.clone() * by * by).replace(is_shrunk, -partials);
    let [plain, shrunk] = [plain, shrunk].map(|sums| sums.sum_dim(0));
    let is_large = large.is_sum(&shrunk);
    let [plain, shrunk] = [plain, shrunk].map(Array::sqrt);
    let limit = Array::<B>(control).narrow(0, LIMIT..LIMIT + 1);
    let factor = (limit.clone() / &plain).replace(is_large.clone(), limit / &shrunk * by);
    GradNorm {
        norm: plain.replace(is_large, shrunk * (1.0 / by)).0,
        factor: B::float_clamp_max(factor.0, 1.0.into()),
    }
}

pub(crate) fn adamw<B: Backend>(
    inputs: AdamWInputs<B>,
    control: FloatTensor<B>,
    numbers: AdamWHyper,
) -> AdamWOutput<B> {
    let [beta_1, beta_2] = numbers.betas;
    let control = Array::<B>(control);
    let [rate, kept_1, kept_2] = [0, 1, 2].map(|at| control.clone().narrow(0, at..at + 1));
    let decay = rate.clone() * -numbers.weight_decay + 1.0;
    let ([parameters, gradients, first, second], factor) = inputs.into_lists();
    let factor = factor.into_option().map(Array::<B>);
    let mut output = [(); 3].map(|()| Vec::with_capacity(parameters.len()));
    let tensors = (parameters.into_iter().zip(gradients)).zip(first.into_iter().zip(second));
    for ((parameter, gradient), (first, second)) in tensors {
        let shape = parameter.shape();
        if shape.num_elements() == 0 {
            let made = [parameter, first, second];
            output.iter_mut().zip(made).for_each(|(to, x)| to.push(x));
            continue;
        }
        let dtypes = [&parameter, &first].map(|x| FloatDType::from(x.dtype()));
        let [p, g, m, v] =
            [parameter, gradient, first, second].map(|x| Array::<B>(x).flat().cast(dtypes[1]));
        let g = match &factor {
            Some(factor) => g * factor,
            None => g,
        };
        let m = m * beta_1 + g.clone() * (1.0 - beta_1);
        let v = v * beta_2 + g.clone() * g * (1.0 - beta_2);
        let root = (v.clone() / &kept_2).sqrt() + numbers.epsilon;
        let moved = m.clone() / &kept_1 / root;
        let p = p * &decay - moved * &rate;
        for (to, x) in output.iter_mut().zip([p.cast(dtypes[0]), m, v]) {
            to.push(x.reshape(shape.clone()).0);
        }
    }
    AdamWOutput::of_lists(output)
}

pub(crate) fn concat<B: Backend>(
    tensors: TensorList<B>,
    mut output: FloatTensor<B>,
    mut first: usize,
) -> FloatTensor<B> {
    for tensor in tensors.into_vec() {
        let end = first + tensor.shape().num_elements();
        if end > first {
            let place = Slice::from(first..end);
            output = B::float_slice_assign(output, &[place], Array::<B>(tensor).flat().0);
        }
        first = end;
    }
    output
}

pub(crate) fn scale<B: Backend>(tensors: TensorList<B>, factor: FloatTensor<B>) -> TensorList<B> {
    let factor = Array::<B>(factor);
    let tensors = tensors.into_vec().into_iter().map(|tensor| {
        let tensor = Array::<B>(tensor);
        let (shape, dtype) = (tensor.shape(), tensor.dtype());
        if shape.num_elements() == 0 {
            return tensor.0;
        }
        let scaled = tensor.flat().cast(factor.dtype()) * &factor;
        scaled.cast(dtype).reshape(shape).0
    });
    TensorList::new(tensors.collect::<Vec<_>>())
}
