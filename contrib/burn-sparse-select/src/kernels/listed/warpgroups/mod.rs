//! Mainloops over lists on wgmma, for many heads. The heads that share a list fill one or two warpgroups of 64 rows, or its keys do.
//!
//! TMA cannot gather single rows on these devices, so warps copy them by cp.async to the addresses that TMA's 128-byte swizzle would use.
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
