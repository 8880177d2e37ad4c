//! Random cases. A seed is a case, and a failure prints its seed.

pub mod attention;
pub mod beside;
pub mod decoding;
pub mod selection;
