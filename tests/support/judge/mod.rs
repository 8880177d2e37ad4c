//! Expected results: plain loops in f64, externally computed values, and tolerances.

pub mod attention;
pub mod compare;
pub mod dsa;
pub mod estimate;
pub mod golden;
pub mod moba;
pub mod msa;
pub mod nsa;
pub mod numbers;
pub mod operators;
pub mod packed;
pub mod paged;
pub mod recall;
pub mod rounding;
