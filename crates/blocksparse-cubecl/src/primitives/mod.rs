//! Searches and sums that kernels of several crates use.

pub mod radix_select;
