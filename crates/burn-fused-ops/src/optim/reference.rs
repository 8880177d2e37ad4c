//! Steps of optimizers in Burn primitives.

use burn::backend::tensor::{BoolTensor, FloatTensor};
use burn::backend::{Backend, TensorMetadata, get_device_settings};
use burn::tensor::{FloatDType, Shape, Slice, try_read_sync};

use crate::optim::partial_sums;
use crate::optim::values::{AdamWHyper, AdamWInputs, AdamWOutput, GradNorm, LIMIT, TensorList};

/// Numbers that are added by themselves before their sums are: a sum over a long vector loses digits.
const RUN: usize = 512;

/// Sums of squares too large for their dtype: those of numbers that are shrunk first are not, and no square that counts is 0 then.
#[derive(Clone, Copy)]
struct Large {
    /// What numbers are shrunk by.
    by: f64,
    /// Sums from here on are large.
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

    /// Where a sum of shrunk numbers says that the sum itself is large. NaN is not.
    fn is_sum<B: Backend>(self, shrunk: FloatTensor<B>) -> BoolTensor<B> {
        let bools = get_device_settings::<B>(&shrunk.device()).bool_dtype;
        let bound = self.sum * self.by * self.by;
        B::float_greater_equal_elem(shrunk, bound.into(), bools)
    }
}

/// The first partial sum of a tensor is the whole, and the others are 0. A [`Large`] one is negative, and of shrunk numbers. Where the host may look at
/// numbers, those are shrunk only if they have to be.
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
        let x = B::float_cast(flat::<B>(tensor), dtype);
        let sum = squares_of::<B>(x.clone());
        let may_be_large = !may_look || {
            let sum = try_read_sync(B::float_into_data(sum.clone()))
                .expect("a device that can be waited for")
                .expect("a tensor that can be read");
            sum.iter::<f64>().any(|sum| sum >= large.sum)
        };
        let sum = match may_be_large {
            false => sum,
            true => {
                let shrunk = squares_of::<B>(B::float_mul_scalar(x, large.by.into()));
                let is_large = large.is_sum::<B>(shrunk.clone());
                B::float_mask_where(sum, is_large, B::float_neg(shrunk))
            }
        };
        sums.push(sum);
        if slots > 1 {
            sums.push(B::float_zeros(Shape::new([slots - 1]), &device, dtype));
        }
    }
    match sums.is_empty() {
        true => partials,
        false => {
            let place = Slice::from(first..first + length);
            B::float_slice_assign(partials, &[place], B::float_cat(sums, 0))
        }
    }
}

/// The sum of the squares of a vector.
fn squares_of<B: Backend>(x: FloatTensor<B>) -> FloatTensor<B> {
    let elements = x.shape().num_elements();
    let squares = B::float_mul(x.clone(), x);
    let (runs, rest) = (elements / RUN, elements % RUN);
    let mut parts = Vec::new();
    if runs > 0 {
        let whole = narrow::<B>(squares.clone(), 0, runs * RUN);
        let rows = B::float_sum_dim(B::float_reshape(whole, Shape::new([runs, RUN])), 1);
        parts.push(B::float_sum_dim(flat::<B>(rows), 0));
    }
    if rest > 0 {
        parts.push(B::float_sum_dim(narrow::<B>(squares, runs * RUN, rest), 0));
    }
    match parts.len() {
        1 => parts.remove(0),
        _ => B::float_sum_dim(B::float_cat(parts, 0), 0),
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
    let plain = B::float_mask_fill(partials.clone(), is_shrunk.clone(), 0.0.into());
    // No dtype has the square of the factor for all of its numbers.
    let shrunk = B::float_mul_scalar(B::float_mul_scalar(plain.clone(), by.into()), by.into());
    let shrunk = B::float_mask_where(shrunk, is_shrunk, B::float_neg(partials));
    let [plain, shrunk] = [plain, shrunk].map(|sums| B::float_sum_dim(sums, 0));
    let is_large = large.is_sum::<B>(shrunk.clone());
    let [plain, shrunk] = [plain, shrunk].map(B::float_sqrt);
    let limit = narrow::<B>(control, LIMIT, 1);
    let factor = B::float_mask_where(
        B::float_div(limit.clone(), plain.clone()),
        is_large.clone(),
        B::float_mul_scalar(B::float_div(limit, shrunk.clone()), by.into()),
    );
    let norm = B::float_mul_scalar(shrunk, (1.0 / by).into());
    GradNorm {
        norm: B::float_mask_where(plain, is_large, norm),
        factor: B::float_clamp_max(factor, 1.0.into()),
    }
}

pub(crate) fn adamw<B: Backend>(
    inputs: AdamWInputs<B>,
    control: FloatTensor<B>,
    numbers: AdamWHyper,
) -> AdamWOutput<B> {
    let [beta_1, beta_2] = numbers.betas;
    let [rate, kept_1, kept_2] = [0, 1, 2].map(|at| narrow::<B>(control.clone(), at, 1));
    let decay = B::float_mul_scalar(rate.clone(), (-numbers.weight_decay).into());
    let decay = B::float_add_scalar(decay, 1.0.into());
    let factor = inputs.factor.into_option();
    let [parameters, gradients, first, second] = [
        inputs.parameters,
        inputs.gradients,
        inputs.first,
        inputs.second,
    ]
    .map(TensorList::into_vec);
    let mut output = [(); 3].map(|()| Vec::with_capacity(parameters.len()));
    let tensors = parameters
        .into_iter()
        .zip(gradients)
        .zip(first.into_iter().zip(second));
    for ((parameter, gradient), (first, second)) in tensors {
        let shape = parameter.shape();
        if shape.num_elements() == 0 {
            let made = [parameter, first, second];
            output.iter_mut().zip(made).for_each(|(to, x)| to.push(x));
            continue;
        }
        let dtypes = [&parameter, &first].map(|x| FloatDType::from(x.dtype()));
        let p = B::float_cast(flat::<B>(parameter), dtypes[1]);
        let mut g = B::float_cast(flat::<B>(gradient), dtypes[1]);
        if let Some(factor) = &factor {
            g = B::float_mul(g, factor.clone());
        }
        let m = B::float_add(
            B::float_mul_scalar(flat::<B>(first), beta_1.into()),
            B::float_mul_scalar(g.clone(), (1.0 - beta_1).into()),
        );
        let squares = B::float_mul(g.clone(), g);
        let v = B::float_add(
            B::float_mul_scalar(flat::<B>(second), beta_2.into()),
            B::float_mul_scalar(squares, (1.0 - beta_2).into()),
        );
        let root = B::float_sqrt(B::float_div(v.clone(), kept_2.clone()));
        let moved = B::float_div(
            B::float_div(m.clone(), kept_1.clone()),
            B::float_add_scalar(root, numbers.epsilon.into()),
        );
        let p = B::float_sub(
            B::float_mul(p, decay.clone()),
            B::float_mul(moved, rate.clone()),
        );
        let made = [B::float_cast(p, dtypes[0]), m, v];
        for (to, x) in output.iter_mut().zip(made) {
            to.push(B::float_reshape(x, shape.clone()));
        }
    }
    let [parameters, first, second] = output.map(TensorList::new);
    AdamWOutput {
        parameters,
        first,
        second,
    }
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
            output = B::float_slice_assign(output, &[place], flat::<B>(tensor));
        }
        first = end;
    }
    output
}

pub(crate) fn scale<B: Backend>(tensors: TensorList<B>, factor: FloatTensor<B>) -> TensorList<B> {
    let sums = FloatDType::from(factor.dtype());
    let tensors = tensors.into_vec().into_iter().map(|tensor| {
        let (shape, dtype) = (tensor.shape(), FloatDType::from(tensor.dtype()));
        if shape.num_elements() == 0 {
            return tensor;
        }
        let scaled = B::float_mul(B::float_cast(flat::<B>(tensor), sums), factor.clone());
        B::float_reshape(B::float_cast(scaled, dtype), shape)
    });
    TensorList::new(tensors.collect::<Vec<_>>())
}

fn flat<B: Backend>(tensor: FloatTensor<B>) -> FloatTensor<B> {
    let elements = tensor.shape().num_elements();
    B::float_reshape(tensor, Shape::new([elements]))
}

fn narrow<B: Backend>(tensor: FloatTensor<B>, first: usize, length: usize) -> FloatTensor<B> {
    B::float_slice(tensor, &[Slice::from(first..first + length)])
}
