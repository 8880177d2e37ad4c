//! Attention of single queries to lists of their own: blocks of keys, or single keys, that the heads of a group chose together.
//!
//! Where queries choose each for itself, two queries share keys only by chance, so that the rows of a matrix are the heads that share a query's list. Kernels
//! that need more rows pack queries by the block that they chose, write a part of the output for each choice, and merge them; these do not: a query walks
//! its list, with its heads as 16 rows or more, and carries on what attention to other keys left in the outputs.
//!
//! ```text
//! request    what a call asks for                         views    tensors as launches get them
//! plan       what a call runs, or why it does not         costs    what the ways of single keys should take
//! tile       the shape of a query's walk                  gather   rows and listed keys on their way to shared memory
//! forward    a cube a query: its list                     queries  the same for dQ
//! keys       a cube 64 keys: the queries that chose their block, for dK and dV
//! fold       sums of the parts of a block's list
//! spread     a cube a query of single keys: a record of dK and dV for each pair
//! records    sums of records by keys
//! launch     launches                                     spread_launch  those of records
//! tiles      lists of single keys as bits of all pairs, which the kernels of layouts take
//! ways       which way a pass over single keys goes
//! warpgroups walks of many heads, on wgmma
//! ```
//!
//! Every query sees all keys of its list that there are: lists are of blocks before its own, and what is causal is no matter here.

mod costs;
mod fold;
mod forward;
mod gather;
mod keys;
mod launch;
mod plan;
#[cfg(test)]
mod plan_tests;
mod queries;
mod records;
mod request;
mod spread;
mod spread_launch;
mod tile;
mod tiles;
mod views;
mod warpgroups;
mod ways;

pub use launch::{ListedLists, backward, forward};
pub use plan::ListedPlan;
pub use request::ListedRequest;
pub use tiles::ListedTiles;
pub use views::ListedGradients;
pub use ways::{KeyListPlan, Way};
