//! Kernels of rows that choices by content are made of: hashes, orders, the highest of rows, means of blocks, gated sums.

pub(crate) mod blocks;
pub(crate) mod bucket_counts;
pub(crate) mod gates;
pub(crate) mod hashes;
pub(crate) mod highest;
pub(crate) mod highest_digits;
pub(crate) mod nearest;
pub(crate) mod only;
pub(crate) mod order;
pub(crate) mod order_places;
pub(crate) mod order_planes;
pub(crate) mod order_tiles;
pub(crate) mod products;
pub(crate) mod split;
pub(crate) mod topk_pages;
pub(crate) mod whole;

pub use blocks::{Blocked, RowBlocks, block_means, block_means_of_two};
pub use gates::{GatedBackward, gated_sum, gated_sum_backward, gated_text};
pub use hashes::{HashedRows, lsh_argsort, lsh_hash, sorts_hashes};
pub use highest::{highest_flags_of_rows, highest_of_rows, holds_rows, words_of_flags};
pub use nearest::{RowsOfMeans, compare_with_means};
pub use order::{Rounds, argmax_rows, counting_argsort_rounds};
pub use topk_pages::{HighestShape, check_highest_pages, topk_pages, topk_rows};
