//! Paged attention, page selection and eviction.

pub mod choice;
pub mod eviction;
pub mod plain;
pub mod quantised;
