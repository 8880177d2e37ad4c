//! Mainloops over lists on wgmma, for many heads. The heads that share a list fill one or two warpgroups of 64 rows, or its keys do.
//!
//! TMA cannot gather single rows on these devices, so warps copy them by cp.async to the addresses that TMA's 128-byte swizzle would use.
//!
//! ```text
//! choose    choice of the kernels of a call
//! tile      shape of a query's mainloop
//! steps     steps of a mainloop, and their copies
//! mainloop  a cube has a query, or a group of adjacent queries, and iterates over its list
//! block     a cube has a block and the queries that list it
//! spread    a cube has a query and writes a record of dK and dV per pair
//! ```

pub mod block;
mod choose;
pub mod mainloop;
pub mod spread;
mod steps;
mod tile;

pub use choose::{Warpgroups, filled, mainloop_line, neighbours, spread_line};
pub use spread::SpreadGroups;
pub use tile::WarpgroupTile;
