//! Products of few rows, as in decoding. They are bound by reading the weights, which are read once, in place, with or without gaps between rows. Up to three
//! weights share a launch.
//!
//! ```text
//! call     what a product is made of
//! units    the kernel without tensor cores, for up to 8 rows
//! warps    the kernel on mma.sync, in half precision, for up to 16 rows, or 32 of several weights
//! plan     which of them: or why neither
//! ```

mod call;
mod plan;
mod units;
mod warps;

pub use call::{FewRows, FewRowsRequest, FewRowsWeight, MOST_WEIGHTS};
pub use plan::{FewRowsPlan, MOST_ROWS};
