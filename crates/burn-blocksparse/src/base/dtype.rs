//! Which dtype a call computes in.

use burn::tensor::FloatDType;

/// The dtype of sums: f32, or f64 for f64 inputs.
pub fn accumulate_in(dtype: FloatDType) -> FloatDType {
    match dtype {
        FloatDType::F64 => FloatDType::F64,
        _ => FloatDType::F32,
    }
}
