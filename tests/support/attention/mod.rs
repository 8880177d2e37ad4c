//! Attention over host layouts.

pub mod attention_sums;
pub mod autodiff;
pub mod bias_gradient;
pub mod cases;
pub mod gradients;
pub mod kept;
pub mod max_scores;
pub mod narrow_blocks;
pub mod operators;
pub mod options;
pub mod plain;
pub mod run;
pub mod sharing;
pub mod threshold;
pub mod tiles;
pub mod widths;
