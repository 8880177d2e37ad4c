//! Code that all ops share.

pub mod arange;
pub mod array;
#[cfg(feature = "cube")]
pub mod cube;
#[cfg(feature = "autodiff")]
pub mod custom_gradient;
pub mod device;
pub mod dtype;
pub mod host;
mod macros;
pub mod op_plan;
#[cfg(feature = "autodiff")]
pub mod outputs;
pub mod prelude;
pub mod sums;
#[cfg(all(feature = "cube", feature = "fusion"))]
pub mod taken;
pub mod values;
