//! Tests that depend on the numbers that are drawn. All of them hold [`common::seed`]'s guard while they draw, so they are in
//! a process of their own: those of `layers` draw from the same generator without it.

#[path = "../common/mod.rs"]
mod common;
#[macro_use]
#[path = "../../../blocksparse/tests/all/refused.rs"]
mod refused;

mod block_attention;
mod gradients;
mod init;
mod precision;
