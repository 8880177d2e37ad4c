//! Tests that depend on random numbers. All hold the guard of [`common::seed`] while they draw. They have their own process, because the tests of
//! `layers` use the generator without the guard.

#[path = "../common/mod.rs"]
mod common;
#[macro_use]
#[path = "../../../blocksparse/tests/all/refused.rs"]
mod refused;

mod block_attention;
mod gradients;
mod init;
mod precision;
