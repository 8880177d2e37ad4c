//! One program for all of it: every test program links all of Burn, some 80 MB, and 215 MB with wgpu.

#[cfg(any(feature = "wgpu", feature = "cuda"))]
mod accelerated;
mod activation;
mod arrows;
mod attention_sums;
mod block_sparse;
mod blocks;
mod burn_attention;
mod call;
mod compare;
#[cfg(any(feature = "wgpu", feature = "cuda"))]
mod compiled;
mod embedding;
mod errors;
mod features;
mod fuzz;
mod gates;
mod graph;
mod heads;
mod kept;
mod layers;
mod linear;
mod loss;
mod mlp;
mod model_layers;
mod norm;
mod nsa;
mod optim;
mod paged;
mod projection;
mod public_names;
mod rope;
mod sampling;
mod selected;
mod selection;
mod selection_planted;
mod sharded;
mod stream_dropout;
mod table;
mod top_k;
mod tuning;
mod vertical_slash;

/// Modules of nothing but checks of the table.
macro_rules! modules_of_checks {
    ($($module:ident)+) => {
        $(mod $module {
            burn_blocksparse_tests::tests!($module);
        })+
    };
}

modules_of_checks!(attention autodiff device_layout eviction gradients max_scores options sharing threshold tiles widths);
