//! Number formats of a device, and random numbers.

use clap::ValueEnum;
use cubecl::ir::{ElemType, FloatKind};
use half::{bf16, f16};
use rand::{Rng, RngExt};
use rand_chacha::ChaCha8Rng;

pub const F32: ElemType = ElemType::Float(FloatKind::F32);
pub const F16: ElemType = ElemType::Float(FloatKind::F16);
pub const BF16: ElemType = ElemType::Float(FloatKind::BF16);

/// Value of `--dtype`.
#[derive(Clone, Copy, Debug, PartialEq, ValueEnum)]
pub enum Dtype {
    F32,
    F16,
    Bf16,
}

impl Dtype {
    pub fn element(self) -> ElemType {
        match self {
            Dtype::F32 => F32,
            Dtype::F16 => F16,
            Dtype::Bf16 => BF16,
        }
    }
}

/// Returns bf16 or f16.
pub fn half(is_bf16: bool) -> ElemType {
    if is_bf16 { BF16 } else { F16 }
}

/// Returns the relative rounding error of a type. For f32 it is 0, since the error of sums is larger.
pub fn rounding_of(element: ElemType) -> f64 {
    match element {
        BF16 => 2f64.powi(-8),
        F16 => 2f64.powi(-11),
        _ => 0.0,
    }
}

pub fn rounded(x: f32, element: ElemType) -> f32 {
    match element {
        BF16 => bf16::from_f32(x).to_f32(),
        F16 => f16::from_f32(x).to_f32(),
        _ => x,
    }
}

pub fn encoded(numbers: &[f32], element: ElemType) -> Vec<u8> {
    let numbers = numbers.iter().copied();
    match element {
        BF16 => (numbers.flat_map(|x| bf16::from_f32(x).to_le_bytes())).collect(),
        F16 => (numbers.flat_map(|x| f16::from_f32(x).to_le_bytes())).collect(),
        _ => numbers.flat_map(f32::to_le_bytes).collect(),
    }
}

pub fn decoded<T: From<f32>>(bytes: &[u8], element: ElemType) -> Vec<T> {
    let halves = || bytes.as_chunks().0.iter();
    match element {
        BF16 => halves()
            .map(|x| bf16::from_le_bytes(*x).to_f32().into())
            .collect(),
        F16 => halves()
            .map(|x| f16::from_le_bytes(*x).to_f32().into())
            .collect(),
        _ => (bytes.as_chunks().0.iter())
            .map(|x| f32::from_le_bytes(*x).into())
            .collect(),
    }
}

/// Draws numbers between `-most` and `most`, rounded to the type.
pub fn uniform(count: usize, most: f32, element: ElemType, rng: &mut ChaCha8Rng) -> Vec<f32> {
    repeated(count, || rounded(rng.random_range(-most..most), element))
}

/// Draws approximately normal numbers.
pub fn nearly_normal(count: usize, rng: &mut ChaCha8Rng) -> Vec<f32> {
    repeated(count, || {
        let bits = rng.next_u64();
        let sum: u64 = (0..4).map(|part| (bits >> (16 * part)) & 0xffff).sum();
        (sum as f32 / 65536.0 - 2.0) * 1.732
    })
}

/// Draws at most a million distinct numbers and repeats them with shifts. Drawing all of them would take longer than the kernels, and only power draw depends
/// on it.
fn repeated(count: usize, mut draw: impl FnMut() -> f32) -> Vec<f32> {
    let distinct: Vec<f32> = (0..count.min(1 << 20)).map(|_| draw()).collect();
    (0..count)
        .map(|at| distinct[(at + at / distinct.len() * 7919) % distinct.len()])
        .collect()
}
