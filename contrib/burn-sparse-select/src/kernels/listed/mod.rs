//! Attention of single queries to their own lists of key blocks or single keys, which the heads of a group share.
//!
//! Where queries select separately, two queries share keys only by chance, so the rows of a matrix are the heads that share a query's list. Kernels that need
//! more rows pack queries by the selected block, write a part of the output per selection, and merge the parts. These kernels do not: a query reads its list,
//! with its heads as 16 or more rows, and continues the attention to other keys that the outputs hold.
//!
//! ```text
//! request        sizes and options of a call, which calls are served, and lse and delta of each row
//! plan           strategy of each pass
//! costs          estimated time of each strategy
//! mainloops      kernels and tiles of a call
//! tile           shape of a query's mainloop, and its rows
//! lists          lists of a launch: of one query each, or unions of adjacent queries' lists
//! launch         launches of mainloops
//! views          tensors as kernel arguments
//! gather         copies of rows and listed keys to shared memory
//! mainloop       forward and dQ: a cube has a query and iterates over its list
//! keys           dK and dV: a cube has 64 keys of a block and iterates over the queries that list it; sums of parts
//! spread         dK and dV of single keys: a cube has a query and writes a record per pair
//! spread_launch  launches of spread and records
//! records        sums of records by key
//! by_block       launches by blocks, each with the queries that list it
//! merge          sums of the parts of a row
//! warpgroups     mainloops on wgmma, for many heads or groups of adjacent queries
//! tiles          lists of single keys as bit masks of all pairs, for the kernels of layouts
//! ```
//!
//! Every query sees all existing keys of its list. Lists contain blocks before the query's own, so causality does not matter here.

mod by_block;
mod costs;
mod gather;
mod keys;
mod launch;
mod lists;
mod mainloop;
mod mainloops;
mod merge;
mod plan;
#[cfg(test)]
mod plan_tests;
mod records;
mod request;
mod spread;
mod spread_launch;
mod tile;
mod tiles;
mod views;
mod warpgroups;

pub use by_block::{ByBlock, backward_by_block, forward_by_block};
pub use launch::{backward, forward};
pub use lists::{ListedLists, PlacedLists};
pub use mainloops::Mainloops;
pub use plan::{ListedPass, ListedPlan};
pub use request::ListedRequest;
pub use tiles::ListedTiles;
pub use views::ListedGradients;
