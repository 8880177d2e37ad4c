//! Operations on matrices of many rows: what a layer does beside its products. On any CubeCL runtime.
//!
//! Every matrix is contiguous, `[rows, width]`. Numbers are f32 (f64 for f64) between a kernel's loads and stores; an output has one writer and sums
//! have a fixed order, so the same input gives the same bits on a device.
//!
//! ```text
//! tile           how the units of a cube share rows, and sums along them
//! columns        sums over rows, in two steps
//! activation     a bias and an activation, and their gradients
//! dropout        dropout of numbers of rows, and the mask of it that kernels make
//! heads          rows of heads side by side as tensors by heads, and back
//! norm           a residual stream, what is added to it, and its norm; backward in norm_backward, shared in norm_shape
//! cross_entropy  the loss of rows of logits, and its gradient
//! gates          branches added, each times the gate of a row, and their gradients
//! embedding      the gradient of a table by the rows that were taken from it
//! beside         matrices side by side, in another type
//! indexed        indices of rows, and how units find which numbers of them name rows
//! gather         sums of rows by an index, and means
//! keyed          rows of queries, of keys made of them and of values, by an index
//! merged         a part of each row and others by an index, merged by their lse
//! hashes         the buckets of rows under rotations; how many of a cube each has in bucket_counts
//! order          numbers sorted by bucket, with planes in order_planes, what passes read and write in order_places, and the highest of columns; in
//!                order_tiles what is left if tiles of tokens have been counted
//! highest        the highest numbers of rows that a cube holds; their bound digit by digit in highest_digits
//! nearest        how similar rows are to the means of their heads, and the nearest
//! products       products of rows with columns, in registers
//! split          the same of rows in bf16 and columns in three parts, on tensor cores
//! blocks         means of blocks of rows, and how alike their rows are
//! only           lists that are wanted, where a number of each decides
//! typed          buffers with the type of their numbers
//! sample         tokens drawn from rows of logits
//! scaled         a tensor times numbers on the device
//! ```

#[doc(hidden)]
pub mod columns;
mod gather;
mod indexed;
mod keyed;
mod merged;
#[doc(hidden)]
pub mod norm_shape;
#[doc(hidden)]
pub mod typed;

pub use columns::{Window, accumulator_of, column_sums, window_sums};
pub use gather::{gather_rows, gather_scaled_rows, mean_rows};
pub use indexed::IndexedRows;
pub use keyed::{SMALLEST_SQUARE, keyed_rows, keyed_rows_backward, l2_normalize};
pub use merged::{MergedGradients, MergedParts, merge_rows, merge_rows_backward};
pub use typed::Typed;

pub use super::shared::curve::ActivationKind;
