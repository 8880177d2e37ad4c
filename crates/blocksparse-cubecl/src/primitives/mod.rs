//! Searches and sums that kernels of several crates are made of.

pub mod radix_select;
