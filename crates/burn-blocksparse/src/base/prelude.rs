//! Common imports of ops: Burn's tensors and backends, and shared code.

#[cfg(feature = "fusion")]
pub use burn::backend::fusion::custom::TensorSpec;
pub use burn::backend::tensor::{BoolTensor, FloatTensor, IntTensor};
pub use burn::backend::{Backend, Dispatch, TensorMetadata, backend_extension};
pub use burn::tensor::{DType, Device, FloatDType, Int, Shape, Slice, Tensor, TensorData};

pub use crate::base::array::{Array, matrix};
pub use crate::base::device::served;
pub use crate::base::dtype::{accumulate_in, sums_of};
pub use crate::base::op_plan::OpPlan;
pub use crate::base::values::{OptFloat, OptInt, ThreeFloats};
pub use crate::error::OpError;
pub use crate::{float_list, op_values, reference_backends};
