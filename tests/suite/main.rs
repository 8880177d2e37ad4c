//! All tests in one program: every test program links all of Burn, some 80 MB, and 215 MB with wgpu.

#[cfg(any(feature = "wgpu", feature = "cuda"))]
mod accelerated;
mod arrows;
mod blocks;
mod burn_attention;
mod call;
mod compare;
#[cfg(any(feature = "wgpu", feature = "cuda"))]
mod compiled;
mod errors;
mod features;
mod fuzz;
mod graph;
mod kept;
mod layers;
mod model_layers;
mod nsa;
mod optim;
mod paged;
mod public_names;
mod selected;
mod selection;
mod sharded;
mod table;
mod top_k;
mod tuning;
mod vertical_slash;

/// Modules with only checks of the table.
macro_rules! modules_of_checks {
    ($($module:ident)+) => {
        $(mod $module {
            burn_blocksparse_tests::tests!($module);
        })+
    };
}

modules_of_checks! {
    activation attention attention_sums autodiff block_sparse device_layout embedding eviction gates gradients heads linear
    loss max_scores mlp norm options projection rope sampling sharing stream_dropout threshold tiles widths
}
