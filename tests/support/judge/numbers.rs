//! Random numbers from seeds, and conversion to tensors and back.

use rand::distr::uniform::SampleUniform;

use crate::prelude::*;

/// Returns the generator of a seed.
pub fn seeded(seed: u64) -> ChaCha8Rng {
    ChaCha8Rng::seed_from_u64(seed)
}

/// Returns `count` numbers from −1 to 1.
pub fn numbers(seed: u64, count: usize) -> Vec<f64> {
    uniform(&mut seeded(seed), count, 1.0)
}

/// Returns `count` numbers from −`size` to `size`.
pub fn uniform(rng: &mut ChaCha8Rng, count: usize, size: f64) -> Vec<f64> {
    let number = |_| size * (rng.random::<f64>() * 2.0 - 1.0);
    (0..count).map(number).collect()
}

/// Returns `count` numbers of a range.
pub fn drawn<T>(rng: &mut ChaCha8Rng, count: usize, range: std::ops::Range<T>) -> Vec<T>
where
    T: SampleUniform + PartialOrd + Clone,
{
    (0..count)
        .map(|_| rng.random_range(range.clone()))
        .collect()
}

/// Scores that rules and orders may handle wrongly: ties, zeros of both signs, subnormal, infinite and NaN ones.
#[rustfmt::skip]
pub const ODD: [f32; 12] = [
    0.0, -0.0, 1.0, 1.0, -2.5, 1e-30, 1e-40, f32::MAX, f32::INFINITY, f32::NEG_INFINITY, f32::NAN, -f32::NAN,
];

/// Rounds numbers to a dtype and back.
pub fn round_to(values: &mut Vec<f64>, dtype: DType) {
    let count = values.len();
    let data = TensorData::new(std::mem::take(values), [count]);
    *values = to_f64(data.convert_dtype(dtype));
}

pub fn tensor<const D: usize>(
    values: &[f64],
    shape: [usize; D],
    device: &Device,
    dtype: DType,
) -> Tensor<D> {
    Tensor::from_data(TensorData::new(values.to_vec(), shape), (device, dtype))
}

/// Makes a tensor in f32.
pub fn floats<const D: usize>(values: &[f32], shape: [usize; D], device: &Device) -> Tensor<D> {
    let data = TensorData::new(values.to_vec(), shape);
    Tensor::from_data(data, (device, DType::F32))
}

pub fn ints<const D: usize>(values: &[i32], shape: [usize; D], device: &Device) -> Tensor<D, Int> {
    let data = TensorData::new(values.to_vec(), shape);
    Tensor::from_data(data, (device, DType::I32))
}

/// Makes a tensor in the device's default integer dtype.
pub fn ints_of<const D: usize>(
    values: &[i32],
    shape: [usize; D],
    device: &Device,
) -> Tensor<D, Int> {
    Tensor::from_data(TensorData::new(values.to_vec(), shape), device)
}

pub fn bools<const D: usize>(
    values: &[bool],
    shape: [usize; D],
    device: &Device,
) -> Tensor<D, Bool> {
    Tensor::from_data(TensorData::new(values.to_vec(), shape), device)
}

/// Reads an integer tensor as i32.
pub fn read_ints<const D: usize>(x: Tensor<D, Int>) -> Vec<i32> {
    read(x).iter().collect()
}

/// Returns the nonnegative entries of a list.
pub fn named(list: &[i32]) -> Vec<usize> {
    let places = list.iter().filter_map(|&place| usize::try_from(place).ok());
    places.collect()
}

/// Returns the same tensor with dimensions `a` and `b` swapped in memory, without a copy before.
pub fn stored_swapped<const D: usize>(x: &Tensor<D>, a: usize, b: usize) -> Tensor<D> {
    let stored = x.clone().swap_dims(a, b).into_data();
    Tensor::<D>::from_data(stored, (&x.device(), x.dtype())).swap_dims(a, b)
}

pub fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(x, y)| x * y).sum()
}

/// Adds `factor` times some numbers.
pub fn add(sums: &mut [f64], factor: f64, values: &[f64]) {
    for (sum, x) in sums.iter_mut().zip(values) {
        *sum += factor * x;
    }
}

/// Returns the largest absolute value.
pub fn largest(values: &[f64]) -> f64 {
    values.iter().fold(0.0, |most, x| most.max(x.abs()))
}

/// Returns the softmax of scores; empty for no scores.
pub fn softmax(scores: &[f64]) -> Vec<f64> {
    let top = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let weights: Vec<f64> = scores.iter().map(|score| (score - top).exp()).collect();
    let total: f64 = weights.iter().sum();
    weights.into_iter().map(|weight| weight / total).collect()
}

/// Returns `KL(wanted ‖ softmax scores)`, and its gradient with respect to the scores.
pub fn divergence(wanted: &[f64], scores: &[f64]) -> (f64, Vec<f64>) {
    let pairs = wanted.iter().zip(softmax(scores));
    let term = |(&t, x): (&f64, f64)| if t == 0.0 { 0.0 } else { t * (t / x).ln() };
    let by_scores = pairs.clone().map(|(t, x)| x - t).collect();
    (pairs.map(term).sum(), by_scores)
}

/// Sorts indices by descending score; ties go to the earlier.
pub fn by_falling_score(
    places: impl IntoIterator<Item = usize>,
    score: impl Fn(usize) -> f64,
) -> Vec<usize> {
    let mut order: Vec<usize> = places.into_iter().collect();
    order.sort_by(|&a, &b| score(b).total_cmp(&score(a)).then(a.cmp(&b)));
    order
}

/// Multiplies `[m, k] · [k, n]`, with elements `lhs(row, k)` and `rhs(k, column)`.
pub fn product(
    [m, k, n]: [usize; 3],
    lhs: impl Fn(usize, usize) -> f64,
    rhs: impl Fn(usize, usize) -> f64,
) -> Vec<f64> {
    let mut out = vec![0.0; m * n];
    for row in 0..m {
        for at in 0..k {
            let factor = lhs(row, at);
            for column in 0..n {
                out[row * n + column] += factor * rhs(at, column);
            }
        }
    }
    out
}
