//! Dtypes of computations.

use burn::tensor::{DType, FloatDType};

/// Returns the dtype of sums: f32, or f64 for f64 inputs.
pub fn accumulate_in(dtype: FloatDType) -> FloatDType {
    match dtype {
        FloatDType::F64 => FloatDType::F64,
        _ => FloatDType::F32,
    }
}

/// Returns [`accumulate_in`] for a tensor's dtype.
pub fn sums_of(dtype: DType) -> DType {
    accumulate_in(dtype.into()).into()
}
