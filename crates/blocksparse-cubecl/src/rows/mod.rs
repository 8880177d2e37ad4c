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

mod activation;
mod beside;
mod blocks;
mod bucket_counts;
mod columns;
mod cross_entropy;
mod dropout;
mod embedding;
mod gates;
mod gather;
mod hashes;
mod heads;
mod highest;
mod highest_digits;
mod indexed;
mod keyed;
mod merged;
mod nearest;
mod norm;
mod norm_backward;
mod norm_shape;
pub(super) mod only;
mod order;
mod order_places;
mod order_planes;
mod order_tiles;
mod products;
mod sample;
mod scaled;
mod split;
mod typed;
mod whole;

pub use activation::{
    ActivationBackward, activation_text, bias_activation, bias_activation_backward,
};
pub use beside::{rounded_beside, side_by_side};
pub use blocks::{Blocked, RowBlocks, block_means, block_means_of_two};
pub(super) use blocks::{block_means_and_likeness, block_means_of_lists};
pub(super) use columns::accumulator_of;
pub use columns::{Window, column_sums, window_sums};
pub use cross_entropy::{
    CrossEntropyKind, CrossEntropyRows, cross_entropy_loss, cross_entropy_plan, cross_entropy_rows,
};
pub use dropout::{stream_dropout, stream_dropout_text};
pub use embedding::{EmbeddingKind, embedding_table_gradient, embedding_text};
pub use gates::{GatedBackward, gated_sum, gated_sum_backward, gated_text};
pub use gather::{gather_rows, gather_scaled_rows, mean_rows};
pub use hashes::{HashedRows, lsh_argsort, lsh_hash, sorts_hashes};
pub use heads::{HeadsPart, heads_text, join_heads, split_heads};
pub use highest::{highest_flags_of_rows, highest_of_rows, holds_rows, words_of_flags};
pub use indexed::IndexedRows;
pub(super) use keyed::SMALLEST_SQUARE;
pub use keyed::{keyed_rows, keyed_rows_backward, l2_normalize};
pub use merged::{MergedGradients, MergedParts, merge_rows, merge_rows_backward};
pub use nearest::{RowsOfMeans, compare_with_means};
pub use norm::{NormBranch, NormOf, add_norm};
pub use norm_backward::{
    NormBackward, NormGrad, RowSums, StreamGrad, residual_norm_backward, residual_norm_text,
};
pub use order::{Rounds, argmax_rows, counting_argsort_rounds};
pub use sample::{SampleKind, sample_rows, sample_text};
pub use scaled::scaled;
pub use typed::Typed;
pub(super) use whole::whole_means;

pub use super::shared::curve::ActivationKind;
