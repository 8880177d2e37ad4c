//! Operations on matrices of many rows: the work of a layer besides its products. On any CubeCL runtime.
//!
//! Every matrix is contiguous, `[rows, width]`. Kernels compute in f32 (f64 for f64) between loads and stores. Each output has one writer and sums have a
//! fixed order, so the same input gives the same bits on a device.
//!
//! ```text
//! columns     sums over rows, in two steps
//! indexed     indices of rows
//! gather      sums of rows selected by an index
//! merged      merges of each row's own part with selected rows, by their lse
//! norm_shape  distribution of rows over the units of a cube
//! typed       buffers with element types
//! ```

#[doc(hidden)]
pub mod columns;
mod gather;
mod indexed;
mod merged;
#[doc(hidden)]
pub mod norm_shape;
#[doc(hidden)]
pub mod typed;

pub use columns::{Window, accumulator_of, column_sums, window_sums};
pub use gather::gather_rows;
pub use indexed::IndexedRows;
pub use merged::{MergedGradients, MergedParts, merge_rows, merge_rows_backward};
pub use typed::Typed;

pub use super::shared::curve::ActivationKind;
