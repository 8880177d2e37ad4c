//! The backend operation of queries that list what they see: single keys, or blocks of keys beside a layout.

pub mod backend;
pub mod ops;
