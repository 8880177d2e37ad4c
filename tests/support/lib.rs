//! Code shared by the tests: tables of cases, references in f64, the comparator, devices, and the checks themselves.
#![allow(deprecated)] // Burn deprecates its NdArray backend; we serve it while it exists.

pub mod attention;
mod checks;
pub mod content;
pub mod device_layout;
pub mod devices;
pub mod fuzz;
pub mod gate;
pub mod graph;
pub mod judge;
pub mod paged;
pub mod prelude;
#[path = "../../crates/blocksparse/tests/all/refused.rs"]
pub mod refused;
pub mod rows;
pub mod selection;
pub mod shard;
pub mod training;

pub use checks::{CHECKS, Check, NAMED};
