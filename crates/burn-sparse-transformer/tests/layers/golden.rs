//! The golden input: small values that are exact in any dtype, for externally computed results; and plain f64 arithmetic on rows.

use burn::module::ModuleMapper;

use crate::common::*;

/// Returns a multiple of 1/8: for queries (0), keys (1), values (2) and more.
pub fn val(of: usize, head: usize, i: usize, c: usize) -> f64 {
    let sum = 131 * of + 61 * head + 31 * i + 17 * c + 5 * i * c + 7 * i * i;
    ((sum % 23) as f64 - 11.0) / 8.0
}

/// Returns `val` of a head, as rows of four.
pub fn vals(of: usize, rows: usize) -> Vec<Vec<f64>> {
    let row = |i| (0..4).map(|c| val(of, 0, i, c)).collect();
    (0..rows).map(row).collect()
}

/// Returns numbers without an obvious order, from −1 to 1.
pub fn scattered(count: usize, seed: usize) -> Vec<f64> {
    let mut state = (seed as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    let mut next = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005);
        state = state.wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) as f64 / (1u64 << 30) as f64 - 1.0
    };
    (0..count).map(|_| next()).collect()
}

// The CPU backends, whose default integer dtypes differ.
pub(crate) use crate::common::devices;

pub fn tensor<const D: usize>(
    numbers: &[f64],
    shape: [usize; D],
    device: &Device,
    dtype: DType,
) -> Tensor<D> {
    let data = TensorData::new(numbers.to_vec(), shape).convert_dtype(dtype);
    Tensor::from_data(data, (device, dtype))
}

/// Fills every parameter with fixed numbers.
pub fn filled<M: Module>(module: M) -> M {
    struct Fill(usize);
    impl ModuleMapper for Fill {
        fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
            self.0 += 1;
            param.map(|old| {
                let count = old.shape().num_elements();
                let new = scattered(count, self.0);
                let new: Tensor<D> = tensor(&new, old.dims(), &old.device(), old.dtype());
                (new * 0.5).detach().set_require_grad(old.is_require_grad())
            })
        }
    }
    module.map(&mut Fill(0))
}

pub fn numbers<const D: usize>(x: Tensor<D>) -> Vec<f64> {
    let data = x.into_data().convert_dtype(DType::F64);
    data.try_into_vec().unwrap()
}

pub fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

pub fn unit(x: &[f64]) -> Vec<f64> {
    let length = dot(x, x).sqrt();
    x.iter().map(|x| x / length).collect()
}

/// Computes softmax attention of one query from pairs of score and value; returns out and lse.
pub fn attend(seen: &[(f64, &[f64])]) -> (Vec<f64>, f64) {
    let max = seen
        .iter()
        .fold(f64::MIN, |max, (score, _)| max.max(*score));
    let weights: Vec<f64> = seen.iter().map(|(score, _)| (score - max).exp()).collect();
    let sum: f64 = weights.iter().sum();
    let mut out = vec![0.0; seen[0].1.len()];
    for (weight, (_, value)) in weights.iter().zip(seen) {
        for (out, value) in out.iter_mut().zip(*value) {
            *out += weight / sum * value;
        }
    }
    (out, max + sum.ln())
}

/// Asserts equality up to `tolerance`.
pub fn assert_near(what: &str, got: &[f64], expected: &[f64], tolerance: f64) {
    assert_eq!(got.len(), expected.len(), "{what}");
    for (at, (got, expected)) in got.iter().zip(expected).enumerate() {
        let near = (got - expected).abs() <= tolerance;
        assert!(near, "{what}, number {at}: {got}, not {expected}");
    }
}

/// Returns the gradient with respect to each element of `x`, by finite differences.
pub fn differences(x: &[f64], mut of: impl FnMut(&[f64]) -> f64) -> Vec<f64> {
    const STEP: f64 = 1e-6;
    let mut x = x.to_vec();
    let mut gradient = Vec::with_capacity(x.len());
    for at in 0..x.len() {
        let own = x[at];
        x[at] = own + STEP;
        let above = of(&x);
        x[at] = own - STEP;
        let below = of(&x);
        x[at] = own;
        gradient.push((above - below) / (2.0 * STEP));
    }
    gradient
}
