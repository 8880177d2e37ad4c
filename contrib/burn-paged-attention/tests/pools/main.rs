//! Models and layers on a pool: pieces give the results of whole calls.

#[path = "../../../../crates/burn-sparse-transformer/tests/common/mod.rs"]
mod common;
#[macro_use]
#[path = "../../../../crates/blocksparse/tests/all/refused.rs"]
mod refused;

mod any_model;
mod choice_loops;
mod eviction;
mod eviction_going_on;
mod generate;
mod pool;
mod pool_choice;
mod pool_kept;
mod pool_nsa;
mod pool_prompts;
mod pool_quantised;
mod pool_shared;
mod prelude;
mod texts;
