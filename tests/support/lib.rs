//! What the tests share: the table of cases, the f64 reference, the comparator and the devices.
#![allow(deprecated)] // Burn deprecates its NdArray backend; we serve it while it exists.

pub mod activation;
pub mod attention;
pub mod autodiff;
pub mod block_sparse;
pub mod blocks;
mod blocks_dense;
pub mod cases;
pub mod compare;
pub mod device_layout;
mod device_layout_case;
pub mod device_layout_within;
pub mod devices;
pub mod embedding;
pub mod eviction;
pub mod fuzz;
pub mod fuzz_decoding;
pub mod fuzz_more;
mod golden;
pub mod gradients;
pub mod graph;
pub mod graph_decoding;
pub mod graph_training;
pub mod heads;
pub mod kept;
pub mod linear;
pub mod loss;
pub mod masses;
pub mod max_scores;
pub mod mlp;
pub mod norm;
mod norm_problem;
pub mod nsa;
mod nsa_problem;
pub mod optim;
pub mod options;
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
pub mod widths;

use burn::tensor::Device;

/// A check over the table of cases on some devices; it panics if it fails.
pub type Check = fn(&[Device]);

/// Every check, for runners other than `cargo test`.
pub const CHECKS: &[(&str, Check)] = &[
    (
        "forward_and_gradients_equal_f64",
        attention::forward_and_gradients_equal_f64,
    ),
    (
        "lse_and_weights_equal_f64",
        attention::lse_and_weights_equal_f64,
    ),
    ("lse_gradients_equal_f64", options::lse_gradients_equal_f64),
    ("lse_alone_equals_f64", options::lse_alone_equals_f64),
    ("sinks_equal_f64", options::sinks_equal_f64),
    (
        "weights_with_options_equal_f64",
        options::weights_with_options_equal_f64,
    ),
    (
        "weights_with_sinks_per_batch",
        options::weights_with_sinks_per_batch,
    ),
    ("alibi_equals_f64", options::alibi_equals_f64),
    ("dropout_equals_f64", options::dropout_equals_f64),
    ("bias_equals_f64", options::bias_equals_f64),
    (
        "relative_bias_equals_f64",
        options::relative_bias_equals_f64,
    ),
    ("options_work_together", options::options_work_together),
    (
        "options_give_the_same_bits",
        options::options_give_the_same_bits,
    ),
    (
        "options_in_half_precision",
        options::options_in_half_precision,
    ),
    (
        "relative_bias_in_half_precision",
        options::relative_bias_in_half_precision,
    ),
    (
        "dropout_follows_its_seed",
        options::dropout_follows_its_seed,
    ),
    ("masses_equal_f64", masses::masses_equal_f64),
    ("masses_of_long_lines", masses::masses_of_long_lines),
    (
        "masses_give_the_same_bits",
        masses::masses_give_the_same_bits,
    ),
    ("max_scores_equal_f64", max_scores::max_scores_equal_f64),
    (
        "max_scores_in_half_precision",
        max_scores::max_scores_in_half_precision,
    ),
    (
        "max_scores_change_nothing_else",
        max_scores::max_scores_change_nothing_else,
    ),
    (
        "max_scores_of_other_layouts",
        max_scores::max_scores_of_other_layouts,
    ),
    (
        "max_scores_of_disjoint_parts",
        max_scores::max_scores_of_disjoint_parts,
    ),
    (
        "fixed_tensors_are_overwritten",
        graph::fixed_tensors_are_overwritten,
    ),
    (
        "replayed_runs_equal_plain_runs",
        graph::replayed_runs_equal_plain_runs,
    ),
    (
        "recordings_refuse_what_would_be_frozen",
        graph_training::recordings_refuse_what_would_be_frozen,
    ),
    (
        "device_seeds_give_the_masks_of_their_numbers",
        graph_training::device_seeds_give_the_masks_of_their_numbers,
    ),
    (
        "replayed_decoding_equals_plain_decoding",
        graph_decoding::replayed_decoding_equals_plain_decoding,
    ),
    (
        "replayed_decoding_survives_errors",
        graph_decoding::replayed_decoding_survives_errors,
    ),
    (
        "replayed_decoding_chooses_pages",
        graph_decoding::replayed_decoding_chooses_pages,
    ),
    (
        "decoding_reserves_nothing_more",
        graph_decoding::decoding_reserves_nothing_more,
    ),
    (
        "replayed_training_equals_plain_training",
        graph_training::replayed_training_equals_plain_training,
    ),
    (
        "given_attention_gives_the_same_bits",
        kept::given_attention_gives_the_same_bits,
    ),
    (
        "given_attention_of_other_kinds",
        kept::given_attention_of_other_kinds,
    ),
    (
        "given_attention_is_not_computed",
        kept::given_attention_is_not_computed,
    ),
    (
        "gradients_equal_the_backward_pass",
        gradients::gradients_equal_the_backward_pass,
    ),
    (
        "hessian_vector_products_equal_differences",
        gradients::hessian_vector_products_equal_differences,
    ),
    (
        "gradients_are_differentiated_by_every_input",
        gradients::gradients_are_differentiated_by_every_input,
    ),
    (
        "gradients_on_kernels_are_refused",
        gradients::gradients_on_kernels_are_refused,
    ),
    (
        "half_precision_is_as_good_as_dense",
        attention::half_precision_is_as_good_as_dense,
    ),
    (
        "equals_burns_own_attention",
        attention::equals_burns_own_attention,
    ),
    (
        "gradients_equal_finite_differences",
        attention::gradients_equal_finite_differences,
    ),
    ("strides_do_not_matter", attention::strides_do_not_matter),
    ("same_input_same_bits", attention::same_input_same_bits),
    ("per_batch_layouts", attention::per_batch_layouts),
    ("every_width_equals_f64", widths::every_width_equals_f64),
    (
        "strided_layouts_of_other_kinds",
        widths::strided_layouts_of_other_kinds,
    ),
    (
        "tf32_only_where_asked_for",
        attention::tf32_only_where_asked_for,
    ),
    (
        "lse_merges_disjoint_parts",
        attention::lse_merges_disjoint_parts,
    ),
    (
        "gradient_checkpointing_gives_the_same_gradients",
        autodiff::gradient_checkpointing_gives_the_same_gradients,
    ),
    (
        "constants_get_no_gradient",
        autodiff::constants_get_no_gradient,
    ),
    (
        "out_and_lse_are_differentiated_together",
        autodiff::out_and_lse_are_differentiated_together,
    ),
    (
        "bias_with_and_without_gradient",
        autodiff::bias_with_and_without_gradient,
    ),
    (
        "one_tensor_as_query_key_and_value",
        autodiff::one_tensor_as_query_key_and_value,
    ),
    (
        "recompute_and_store_agree",
        autodiff::recompute_and_store_agree,
    ),
    (
        "operators_equal_dense_f64",
        blocks::operators_equal_dense_f64,
    ),
    (
        "operators_on_per_batch_layouts",
        blocks::operators_on_per_batch_layouts,
    ),
    (
        "operators_compose_to_attention",
        blocks::operators_compose_to_attention,
    ),
    (
        "operators_in_several_chunks",
        blocks::operators_in_several_chunks,
    ),
    ("products_are_adjoint", blocks::products_are_adjoint),
    ("softmax_of_large_values", blocks::softmax_of_large_values),
    (
        "functions_leave_masked_pairs_alone",
        blocks::functions_leave_masked_pairs_alone,
    ),
    (
        "operators_are_deterministic",
        blocks::operators_are_deterministic,
    ),
    (
        "device_masks_equal_f64",
        device_layout::device_masks_equal_f64,
    ),
    (
        "device_indices_equal_f64",
        device_layout::device_indices_equal_f64,
    ),
    (
        "device_top_k_equals_host_top_k",
        device_layout::device_top_k_equals_host_top_k,
    ),
    (
        "device_scores_of_all_kinds",
        device_layout::device_scores_of_all_kinds,
    ),
    (
        "device_layouts_with_all_options",
        device_layout::device_layouts_with_all_options,
    ),
    (
        "device_layouts_are_used_again",
        device_layout::device_layouts_are_used_again,
    ),
    (
        "device_layouts_in_half_precision",
        device_layout::device_layouts_in_half_precision,
    ),
    (
        "device_layouts_with_relative_bias",
        device_layout::device_layouts_with_relative_bias,
    ),
    ("device_layout_errors", device_layout::device_layout_errors),
    ("selection_goldens", selection_goldens::selection_goldens),
    (
        "choices_equal_those_of_loops",
        selection::choices_equal_those_of_loops,
    ),
    (
        "choices_of_what_is_no_number",
        selection::choices_of_what_is_no_number,
    ),
    (
        "methods_of_earlier_keys_say_so",
        selection::methods_of_earlier_keys_say_so,
    ),
    (
        "rules_keep_the_same_on_devices",
        selection_rules::rules_keep_the_same_on_devices,
    ),
    ("residual_norm_equals_f64", norm::residual_norm_equals_f64),
    (
        "residual_norm_without_rows",
        norm::residual_norm_without_rows,
    ),
    (
        "residual_norm_in_half_precision",
        norm::residual_norm_in_half_precision,
    ),
    (
        "residual_norm_gives_the_same_bits",
        norm::residual_norm_gives_the_same_bits,
    ),
    ("residual_norm_constants", norm::residual_norm_constants),
    ("residual_norms_in_a_chain", norm::residual_norms_in_a_chain),
    ("residual_norm_plans", norm::residual_norm_plans),
    ("mlp_equals_its_parts", mlp::mlp_equals_its_parts),
    ("mlp_constants", mlp::mlp_constants),
    ("mlp_equals_f64", mlp::mlp_equals_f64),
    ("projections_to_heads", projection::projections_to_heads),
    ("projections_from_heads", projection::projections_from_heads),
    ("projections_constants", projection::projections_constants),
    ("projections_plans", projection::projections_plans),
    (
        "block_sparse_products_equal_f64",
        block_sparse::block_sparse_products_equal_f64,
    ),
    (
        "block_sparse_products_in_half_precision",
        block_sparse::block_sparse_products_in_half_precision,
    ),
    (
        "block_sparse_products_of_any_strides",
        block_sparse::block_sparse_products_of_any_strides,
    ),
    (
        "block_sparse_products_differentiate_what_is_tracked",
        block_sparse::block_sparse_products_differentiate_what_is_tracked,
    ),
    (
        "dense_layouts_equal_linear",
        block_sparse::dense_layouts_equal_linear,
    ),
    ("products_equal_f64", linear::products_equal_f64),
    (
        "products_in_half_precision",
        linear::products_in_half_precision,
    ),
    ("products_of_any_strides", linear::products_of_any_strides),
    (
        "products_differentiate_what_is_tracked",
        linear::products_differentiate_what_is_tracked,
    ),
    ("cross_entropy_equals_f64", loss::cross_entropy_equals_f64),
    (
        "cross_entropy_of_large_logits",
        loss::cross_entropy_of_large_logits,
    ),
    (
        "cross_entropy_in_half_precision",
        loss::cross_entropy_in_half_precision,
    ),
    (
        "cross_entropy_differentiates_what_is_tracked",
        loss::cross_entropy_differentiates_what_is_tracked,
    ),
    (
        "cross_entropy_of_targets_out_of_range",
        loss::cross_entropy_of_targets_out_of_range,
    ),
    (
        "stream_dropout_equals_f64",
        stream_dropout::stream_dropout_equals_f64,
    ),
    (
        "stream_dropout_of_views",
        stream_dropout::stream_dropout_of_views,
    ),
    ("adamw_equals_f64", optim::adamw_equals_f64),
    ("adamw_in_half_precision", optim::adamw_in_half_precision),
    (
        "adamw_gives_the_same_bits",
        optim::adamw_gives_the_same_bits,
    ),
    ("clones_keep_their_values", optim::clones_keep_their_values),
    ("records_are_burns", optim::records_are_burns),
    (
        "parameters_keep_their_autodiff_state",
        optim::parameters_keep_their_autodiff_state,
    ),
    ("clipping_equals_f64", optim::clipping_equals_f64),
    ("steps_without_gradients", optim::steps_without_gradients),
    ("optimizer_plans_print", optim::optimizer_plans_print),
    (
        "bias_activation_equals_f64",
        activation::bias_activation_equals_f64,
    ),
    (
        "bias_activation_in_half_precision",
        activation::bias_activation_in_half_precision,
    ),
    (
        "bias_activation_of_large_values",
        activation::bias_activation_of_large_values,
    ),
    (
        "bias_activation_gives_the_same_bits",
        activation::bias_activation_gives_the_same_bits,
    ),
    (
        "bias_activation_keeps_its_inputs",
        activation::bias_activation_keeps_its_inputs,
    ),
    (
        "bias_activation_constants",
        activation::bias_activation_constants,
    ),
    ("bias_activation_plans", activation::bias_activation_plans),
    ("heads_equal_f64", heads::heads_equal_f64),
    ("heads_in_half_precision", heads::heads_in_half_precision),
    ("joined_heads_equal_f64", heads::joined_heads_equal_f64),
    ("heads_give_the_same_bits", heads::heads_give_the_same_bits),
    ("heads_constants", heads::heads_constants),
    (
        "heads_are_differentiated_together",
        heads::heads_are_differentiated_together,
    ),
    ("heads_plans", heads::heads_plans),
    (
        "sampled_tokens_are_those_of_a_sort",
        sampling::sampled_tokens_are_those_of_a_sort,
    ),
    (
        "sampled_tokens_follow_the_probabilities",
        sampling::sampled_tokens_follow_the_probabilities,
    ),
    (
        "selected_attention_equals_f64",
        selected::selected_attention_equals_f64,
    ),
    (
        "selected_attention_in_half_precision",
        selected::selected_attention_in_half_precision,
    ),
    (
        "selected_attention_equals_its_layout",
        selected::selected_attention_equals_its_layout,
    ),
    (
        "selected_attention_of_query_blocks",
        selected::selected_attention_of_query_blocks,
    ),
    (
        "selected_gradients_equal_finite_differences",
        selected::selected_gradients_equal_finite_differences,
    ),
    (
        "selected_attention_is_prefix_stable",
        selected::selected_attention_is_prefix_stable,
    ),
    (
        "selected_attention_of_a_permuted_batch",
        selected::selected_attention_of_a_permuted_batch,
    ),
    (
        "chosen_blocks_of_any_scores",
        selected_lists::chosen_blocks_of_any_scores,
    ),
    (
        "chosen_blocks_in_several_slabs",
        selected_lists::chosen_blocks_in_several_slabs,
    ),
    ("moba_golden", selected_lists::moba_golden),
    (
        "moba_on_planted_structure",
        selected_planted::moba_on_planted_structure,
    ),
    (
        "quest_on_planted_structure",
        selected_planted::quest_on_planted_structure,
    ),
    ("rows_at_equals_f64", selected_lists::rows_at_equals_f64),
    ("nsa_equals_f64", nsa::nsa_equals_f64),
    ("nsa_in_half_precision", nsa::nsa_in_half_precision),
    (
        "nsa_gradients_equal_finite_differences",
        nsa::nsa_gradients_equal_finite_differences,
    ),
    ("nsa_is_prefix_stable", nsa::nsa_is_prefix_stable),
    ("nsa_gives_the_same_bits", nsa::nsa_gives_the_same_bits),
    ("nsa_golden", nsa::nsa_golden),
    ("some_random_choices", selection_fuzz::some_random_choices),
    (
        "choices_give_the_same_bits",
        selection_runs::choices_give_the_same_bits,
    ),
    ("choices_are_replayed", selection_runs::choices_are_replayed),
    (
        "outputs_are_bounded_by_recall",
        selection_runs::outputs_are_bounded_by_recall,
    ),
    ("rules_are_nested", selection_runs::rules_are_nested),
    (
        "blocks_within_a_layout_equal_f64",
        device_layout_within::blocks_within_a_layout_equal_f64,
    ),
    (
        "rules_within_a_layout",
        device_layout_within::rules_within_a_layout,
    ),
    (
        "layouts_within_give_the_same_bits",
        device_layout_within::layouts_within_give_the_same_bits,
    ),
    ("embedding_equals_f64", embedding::embedding_equals_f64),
    (
        "embedding_in_half_precision",
        embedding::embedding_in_half_precision,
    ),
    (
        "embedding_gives_the_same_bits",
        embedding::embedding_gives_the_same_bits,
    ),
    (
        "embedding_backward_equals_f64",
        embedding::embedding_backward_equals_f64,
    ),
    (
        "embedding_of_a_frozen_table",
        embedding::embedding_of_a_frozen_table,
    ),
    ("embedding_plans", embedding::embedding_plans),
    (
        "paged_attention_equals_f64",
        paged::paged_attention_equals_f64,
    ),
    (
        "paged_attention_in_half_precision",
        paged::paged_attention_in_half_precision,
    ),
    (
        "paged_attention_gives_the_same_bits",
        paged::paged_attention_gives_the_same_bits,
    ),
    (
        "paged_attention_with_fixed_split",
        paged::paged_attention_with_fixed_split,
    ),
    ("paged_attention_golden", paged::paged_attention_golden),
    (
        "paged_attention_of_nothing",
        paged::paged_attention_of_nothing,
    ),
    (
        "paged_attention_leaves_the_graph",
        paged::paged_attention_leaves_the_graph,
    ),
    ("paged_attention_plans", paged::paged_attention_plans),
    ("appended_rows", paged::appended_rows),
    (
        "chosen_pages_equal_f64",
        page_choice::chosen_pages_equal_f64,
    ),
    ("picks_of_any_scores", page_choice::picks_of_any_scores),
    ("quantised_rows", paged_quantised::quantised_rows),
    (
        "quantised_rows_golden",
        paged_quantised::quantised_rows_golden,
    ),
    (
        "quantised_rows_that_are_not_finite",
        paged_quantised::quantised_rows_that_are_not_finite,
    ),
    (
        "quantised_attention_equals_f64",
        paged_quantised::quantised_attention_equals_f64,
    ),
    (
        "quantised_attention_in_half_precision",
        paged_quantised::quantised_attention_in_half_precision,
    ),
    (
        "quantised_scores_are_bounded",
        paged_quantised::quantised_scores_are_bounded,
    ),
    (
        "quantised_plans_name_the_store",
        paged_quantised::quantised_plans_name_the_store,
    ),
    (
        "queries_see_the_keys_that_stay",
        eviction::queries_see_the_keys_that_stay,
    ),
    (
        "sums_of_attention_are_the_same_by_both_roads",
        eviction::sums_of_attention_are_the_same_by_both_roads,
    ),
    (
        "threads_share_a_new_layout",
        sharing::threads_share_a_new_layout,
    ),
    (
        "threads_share_a_new_device_layout",
        sharing::threads_share_a_new_device_layout,
    ),
    (
        "a_layout_outlives_tensors_and_threads",
        sharing::a_layout_outlives_tensors_and_threads,
    ),
];

/// Checks that run only if they are named: one that needs a large GPU, one that takes as long as it is asked to, and
/// those whose loops take long.
pub const NAMED: &[(&str, Check)] = &[
    (
        "more_than_2_31_elements",
        attention::more_than_2_31_elements,
    ),
    (
        "more_batch_entries_and_heads_than_a_grid",
        widths::more_batch_entries_and_heads_than_a_grid,
    ),
    ("far_strides", widths::far_strides),
    ("fuzz", fuzz::fuzz),
    (
        "pieces_are_rows_of_the_whole",
        fuzz_decoding::pieces_are_rows_of_the_whole,
    ),
    (
        "long_calls_choose_as_loops",
        selection_long::long_calls_choose_as_loops,
    ),
    (
        "long_gates_choose_as_loops",
        selection_long::long_gates_choose_as_loops,
    ),
    ("random_choices", selection_fuzz::random_choices),
];

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
