//! Attention of single queries to their own lists of key blocks or single keys, which the heads of a group share.
//!
//! Where queries select separately, two queries share keys only by chance, so the rows of a matrix are the heads that share a query's list. Kernels that need
//! more rows pack queries by the selected block, write a part of the output per selection, and merge the parts. These kernels do not: a query reads its list,
//! with its heads as 16 or more rows, and continues the attention to other keys that the outputs hold.
//!
//! ```text
//! request    what a call asks for, which are taken, and what backward passes know of each row
//! plan       which way each pass goes                     costs    what the ways should take
//! mainloops  what mainloops run                           tile     the shape of a query's mainloop, and its rows
//! lists      of queries, or unions of neighbours' lists   launch   launches
//! views      tensors as launches get them
//! gather     rows and listed keys on their way to shared memory
//! mainloop   a cube a query: its list, forward and for dQ
//! keys       a cube 64 keys of a block: the queries that chose it, for dK and dV, and sums of the parts of a block's list
//! spread     a cube a query of single keys: a record of dK and dV for each pair
//! records    sums of records by keys
//! spread_launch  launches of these
//! by_block   launches over blocks, each with the queries that list it; merge adds up what they give a row
//! warpgroups mainloops of many heads, or of neighbouring queries together, on wgmma
//! tiles      lists of single keys as bits of all pairs, which the kernels of layouts take
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
