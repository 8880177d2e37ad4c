//! The tests of the books of pages in one program.

mod errors;
mod evicted_rows;
mod eviction;
mod known;
mod machine;
#[path = "../../../../crates/blocksparse/tests/all/random_patterns.rs"]
mod random_patterns;
mod rows;
mod tables;
