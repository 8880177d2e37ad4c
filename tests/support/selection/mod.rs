//! Attention with content-based selection of keys.

pub mod choices;
pub mod dsa;
pub mod dsa_blocks;
pub mod dsa_fp8;
pub mod dsa_pages;
pub mod goldens;
pub mod lists;
pub mod long;
pub mod moba;
pub mod moba_lists;
pub mod msa;
pub mod nsa;
pub mod nsa_choice;
pub mod prefix;
pub mod rules;
pub mod runs;
