//! What the tests share: the table of cases, the f64 reference, the comparator and the devices.
#![allow(deprecated)] // Burn deprecates its NdArray backend; we serve it while it exists.

pub mod activation;
pub mod attention;
pub mod attracted;
pub mod autodiff;
pub mod bias_gradient;
pub mod block_sparse;
pub mod blocks;
mod blocks_dense;
pub mod cases;
mod checks;
pub mod clusters;
pub mod compare;
pub mod content;
pub mod device_layout;
mod device_layout_case;
pub mod device_layout_positions;
pub mod device_layout_within;
pub mod devices;
pub mod dsa;
pub mod dsa_fp8;
pub mod dsa_pages;
mod dsa_problem;
pub mod embedding;
pub mod eviction;
pub mod fuzz;
pub mod fuzz_decoding;
pub mod fuzz_more;
pub mod gate;
pub mod gates;
mod golden;
pub mod gradients;
pub mod graph;
pub mod graph_decoding;
pub mod graph_training;
pub mod heads;
pub mod kept;
pub mod key_lists;
pub mod linear;
pub mod listed;
pub mod loss;
pub mod masses;
pub mod max_scores;
pub mod mlp;
pub mod narrow_blocks;
pub mod norm;
mod norm_problem;
pub mod nsa;
pub mod nsa_choice;
mod nsa_problem;
pub mod optim;
pub mod options;
pub mod order;
pub mod order_rounds;
pub mod packed;
pub mod page_choice;
pub mod paged;
mod paged_problem;
pub mod paged_quantised;
pub mod planted;
pub mod projection;
pub mod reference;
pub mod rounding;
pub mod sampling;
pub mod selected;
pub mod selected_lists;
pub mod selected_planted;
mod selected_problem;
pub mod selection;
pub mod selection_dense;
pub mod selection_fuzz;
pub mod selection_goldens;
pub mod selection_long;
pub mod selection_rules;
pub mod selection_runs;
pub mod sharing;
pub mod stream_dropout;
pub mod tiles;
pub mod widths;

pub use checks::{CHECKS, Check, NAMED};

/// Makes tests of checks, on the devices of [`devices::devices`].
#[macro_export]
macro_rules! tests {
    ($module:ident: $($check:ident),*) => {
        $(
            #[test]
            fn $check() {
                assert!($crate::CHECKS.iter().any(|(name, _)| *name == stringify!($check)));
                $crate::$module::$check(&$crate::devices::devices());
            }
        )*
    };
}
