//! The tests of page pools in one program.

#[macro_use]
#[path = "../../../../crates/blocksparse/tests/all/refused.rs"]
mod refused;

mod errors;
mod evicted_rows;
mod eviction;
mod known;
mod machine;
#[path = "../../../../crates/blocksparse/tests/all/random_patterns.rs"]
mod random_patterns;
mod rows;
mod tables;
