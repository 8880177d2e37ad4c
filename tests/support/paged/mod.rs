//! Attention over pages, and what stays in them.

pub mod choice;
pub mod eviction;
pub mod plain;
pub mod quantised;
