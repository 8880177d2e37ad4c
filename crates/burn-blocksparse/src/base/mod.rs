//! What all ops share.

#[cfg(feature = "cube")]
pub mod cube;
pub mod device;
pub mod dtype;
pub mod kernels_run;
pub mod op_plan;
#[cfg(feature = "autodiff")]
pub mod outputs;
pub mod sums;
pub mod values;
