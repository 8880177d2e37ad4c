//! Mainloops over lists on wgmma, for many heads: one warpgroup of 64 rows or two are filled by the heads that share a list, or by its keys.
//!
//! TMA gathers no single rows on these devices, so warps copy them by cp.async, to where TMA's 128-byte swizzle would have put them.
//!
//! ```text
//! choose    which of them a call has
//! tile      the shape of a query's mainloop        steps     what it copies ahead
//! mainloop  a cube a query, or a group of neighbours: their list
//! block     a cube a block, and the queries that list it
//! spread    a cube a query: a record of dK and dV for each pair
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
