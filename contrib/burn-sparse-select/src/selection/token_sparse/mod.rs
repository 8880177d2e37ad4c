//! Backend operation of attention over index lists: single keys, or blocks of keys in addition to a layout.

pub mod backend;
pub mod ops;
