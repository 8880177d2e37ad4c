//! The registry of checks: each is listed once, and the suite makes its tests from it.

use burn::tensor::Device;

/// A check over cases on some devices; it panics if it fails.
pub type Check = fn(&[Device]);

/// Lists checks by name and file.
macro_rules! table {
    ($($group:ident::$file:ident: $($check:ident),+;)+) => {
        &[$($((stringify!($check), crate::$group::$file::$check as Check),)+)+]
    };
}

macro_rules! registry {
    (
        [$($of_tests:tt)+] $($module:ident { $($group:ident::$file:ident: $($check:ident),+;)+ })+
        [$($of_others:tt)+] $($other_group:ident::$other_file:ident: $($other:ident),+;)+
        [$($of_named:tt)+] $($named:tt)+
    ) => {
        /// All checks, for runners other than `cargo test`.
        pub const CHECKS: &[(&str, Check)] = table! {
            $($($group::$file: $($check),+;)+)+
            $($other_group::$other_file: $($other),+;)+
        };

        /// Checks that run only if named: they need a large GPU, run as long as requested, have slow reference loops, or change the process.
        pub const NAMED: &[(&str, Check)] = table! { $($named)+ };

        /// Makes the tests of a module of the suite, on the devices of [`devices`](crate::devices::devices).
        #[macro_export]
        macro_rules! tests {
            $(($module) => {
                $($(
                    #[test]
                    fn $check() {
                        $crate::$group::$file::$check(&$crate::devices::devices());
                    }
                )+)+
            };)+
        }
    };
}

registry! {
    [tests of the suite, by its modules]
    activation {
        training::activation: bias_activation_equals_f64, bias_activation_in_half_precision, bias_activation_of_large_values,
            bias_activation_bits_and_constants, bias_activation_of_slices, bias_activation_plans;
    }
    attention {
        attention::plain: forward_and_gradients_equal_f64, lse_and_weights_equal_f64, half_precision_is_as_good_as_dense,
            strides_do_not_matter, same_input_same_bits, per_batch_layouts, tf32_only_where_asked_for, fp8_only_where_asked_for, lse_merges_disjoint_parts;
    }
    autodiff {
        attention::autodiff: gradient_checkpointing_gives_the_same_gradients, constants_get_no_gradient,
            out_and_lse_are_differentiated_together, one_tensor_as_query_key_and_value;
    }
    block_sparse {
        training::block_sparse: block_sparse_products_equal_f64, block_sparse_products_in_half_precision,
            block_sparse_products_bits_and_constants, dense_layouts_equal_linear;
    }
    blocks {
        attention::operators: operators_equal_dense_f64, operators_on_per_batch_layouts, operators_compose_to_attention,
            operators_in_several_chunks, softmax_of_large_values, functions_leave_masked_pairs_alone,
            operators_are_deterministic;
    }
    device_layout {
        device_layout::chosen: device_masks_equal_f64, device_indices_equal_f64, device_top_k_equals_host_top_k, device_scores_of_all_kinds,
            device_layouts_with_all_options, device_layouts_are_used_again, device_layouts_in_half_precision,
            device_layouts_with_relative_bias, device_layout_errors;
        device_layout::within: blocks_within_a_layout_equal_f64, rules_within_a_layout, layouts_within_give_the_same_bits;
        device_layout::positions: pairs_by_positions_equal_f64, pairs_by_positions_in_half_precision, positions_are_checked;
    }
    embedding {
        training::embedding: embedding_equals_f64, embedding_in_half_precision, embedding_gives_the_same_bits,
            embedding_backward_equals_f64, embedding_of_a_frozen_table, embedding_plans;
    }
    eviction {
        paged::eviction: queries_see_the_keys_that_stay, sums_of_attention_are_the_same_by_both_roads,
            sequences_of_a_batch_get_what_they_get_alone;
    }
    gates {
        training::gates: gated_sums_equal_f64, gated_sums_in_half_precision, gated_sums_bits_and_constants, gated_sums_keep_their_gradients;
    }
    gradients {
        attention::gradients: gradients_equal_the_backward_pass, hessian_vector_products_equal_differences,
            gradients_are_differentiated_by_every_input, gradients_on_kernels_are_refused;
    }
    graph {
        graph::runs: fixed_tensors_are_overwritten, replayed_runs_equal_plain_runs;
        graph::training: recordings_refuse_what_would_be_frozen, device_seeds_give_the_masks_of_their_numbers,
            replayed_training_equals_plain_training, replayed_training_chooses_as_plain_training, replayed_steps_count_for_each_parameter;
        graph::decoding: replayed_decoding_equals_plain_decoding, replayed_decoding_survives_errors, replayed_decoding_chooses_pages,
            replayed_decoding_chooses_keys, replayed_decoding_sees_three_branches, replayed_decoding_evicts,
            replayed_decoding_checks_drafts, replayed_decoding_shares_prefixes, replayed_decoding_says_what_runs_one_by_one;
    }
    heads {
        training::heads: heads_equal_f64, heads_in_half_precision, joined_heads_equal_f64, heads_bits_and_constants,
            heads_plans;
    }
    kept {
        attention::kept: given_attention_gives_the_same_bits, given_attention_of_other_kinds, given_attention_is_not_computed;
    }
    linear {
        training::linear: products_equal_f64, products_in_half_precision, products_bits_and_constants;
        training::few_rows: few_rows_equal_f64, few_rows_by_heads_equal_f64,
            few_rows_with_a_gate_equal_f64;
    }
    loss {
        training::loss: cross_entropy_equals_f64, cross_entropy_of_large_logits, cross_entropy_in_half_precision,
            cross_entropy_of_positions_by_any_gradients, cross_entropy_differentiates_what_is_tracked,
            cross_entropy_of_targets_out_of_range;
    }
    attention_sums {
        attention::attention_sums: attention_sums_equal_f64, attention_sums_of_long_lines, attention_sums_give_the_same_bits;
    }
    max_scores {
        attention::max_scores: max_scores_equal_f64, max_scores_in_half_precision, max_scores_change_nothing_else,
            max_scores_of_other_layouts, max_scores_of_disjoint_parts;
    }
    threshold {
        attention::threshold: far_tiles_are_skipped, far_tiles_are_skipped_with_options, far_tiles_are_skipped_on_device,
            far_tiles_are_skipped_in_wide_heads, thresholds_equal_f64, skipped_weights_are_bounded, thresholds_see_no_later_tile,
            plans_say_what_skips;
    }
    mlp {
        training::mlp: mlp_equals_its_parts, mlp_constants, mlp_equals_f64;
    }
    model_layers {
        content::order: buckets_are_sorted_as_by_the_host, highest_in_rows_are_those_of_a_sort, products_of_rows_are_not_rounded, sums_at_places_are_gradients_of_rows;
        content::dense: hashes_equal_dense_attention, clusters_equal_dense_attention;
    }
    norm {
        training::norm: residual_norm_equals_f64, residual_norm_without_rows, residual_norm_in_half_precision,
            residual_norm_bits_and_constants, residual_norms_in_a_chain, residual_norm_plans;
    }
    nsa {
        selection::nsa: nsa_equals_f64, nsa_in_half_precision, nsa_is_prefix_stable, nsa_gives_the_same_bits, nsa_golden;
        selection::nsa_choice: nsa_choices_equal_f64, queries_at_any_positions_equal_the_whole;
    }
    optim {
        training::optim: adamw_equals_f64, adamw_in_half_precision, adamw_gives_the_same_bits, clones_keep_their_values, records_are_burns,
            parameters_keep_their_autodiff_state, clipping_equals_f64, concat_is_exact, clipping_of_large_gradients, steps_without_gradients,
            optimizer_plans_print;
    }
    options {
        attention::options: lse_gradients_equal_f64, lse_alone_equals_f64, sinks_equal_f64, weights_with_options_equal_f64,
            weights_with_sinks_per_batch, alibi_equals_f64, dropout_equals_f64, bias_equals_f64, relative_bias_equals_f64,
            options_work_together, options_give_the_same_bits, options_in_half_precision, relative_bias_in_half_precision,
            dropout_follows_its_seed;
        attention::bias_gradient: bias_gradients_in_half_precision, bias_gradients_with_options, bias_gradients_per_batch;
    }
    paged {
        paged::plain: paged_attention_equals_f64, paged_attention_in_half_precision, paged_attention_gives_the_same_bits,
            paged_attention_with_fixed_split, paged_attention_golden, paged_attention_of_nothing, paged_attention_leaves_the_graph,
            paged_attention_plans, appended_rows;
        paged::choice: chosen_pages_equal_f64, chosen_quantised_pages_equal_f64, picks_of_any_scores;
        paged::quantised: quantised_rows, quantised_rows_golden, quantised_rows_that_are_not_finite, quantised_attention_equals_f64,
            quantised_attention_in_half_precision, quantised_plans_name_the_store;
    }
    projection {
        training::projection: projections_to_heads, projections_from_heads, projections_constants, projections_plans;
    }
    rope {
        training::rope: rope_equals_f64, rope_in_half_precision;
    }
    sampling {
        graph::sampling: sampled_tokens_are_those_of_a_sort, sampled_tokens_follow_the_probabilities;
    }
    selected {
        selection::moba: selected_attention_equals_f64, selected_attention_in_half_precision,
            selected_attention_of_query_blocks, selected_attention_is_prefix_stable,
            selected_attention_of_a_permuted_batch;
        selection::moba_lists: chosen_blocks_of_any_scores, chosen_blocks_in_several_slabs, moba_golden;
        selection::lists: attention_with_lists_equals_f64, attention_with_lists_in_half_precision,
            attention_with_lists_gives_the_same_bits, attention_with_lists_plans, attention_with_lists_errors;
        selection::lists: key_lists_are_unique, key_lists_overlap, attention_with_keys_equals_f64,
            attention_with_keys_in_half_precision, attention_with_keys_of_other_widths, attention_with_keys_of_many_heads,
            attention_with_keys_gives_the_same_bits, attention_with_keys_plans,
            attention_with_keys_errors, layouts_of_keys_equal_f64;
        selection::dsa: dsa_golden, dsa_choices_equal_f64, dsa_choices_of_equal_scores, dsa_is_prefix_stable,
            dsa_gradients_equal_f64, dsa_in_half_precision, dsa_errors;
        selection::dsa_blocks: dsa_blocks_golden, dsa_choices_in_blocks_equal_f64, dsa_wide_choices_in_blocks_equal_f64,
            dsa_blocks_of_all_keys, dsa_in_blocks_of_lists, dsa_in_blocks_errors;
        selection::dsa_fp8: dsa_in_fp8, dsa_in_fp8_of_any_rows, dsa_in_fp8_errors;
        selection::dsa_pages: dsa_chooses_in_pages, dsa_attends_in_pages, dsa_in_pages_errors;
        selection::msa: msa_choices_equal_f64, msa_equals_f64, msa_in_half_precision, msa_losses_equal_f64,
            msa_is_prefix_stable, msa_chooses_in_pages, msa_errors;
    }
    selection {
        selection::goldens: selection_goldens;
        selection::choices: choices_equal_those_of_loops, choices_of_what_is_no_number, methods_of_earlier_keys_say_so;
        selection::rules: rules_keep_the_same_on_devices;
        selection::long: heads_of_many_blocks_choose_as_loops;
        selection::runs: choices_give_the_same_bits, choices_are_replayed, outputs_are_bounded_by_recall, rules_are_nested;
    }
    sharing {
        attention::sharing: threads_share_a_new_layout, threads_share_a_new_device_layout, a_layout_outlives_tensors_and_threads,
            calls_at_once_give_the_same_bits;
    }
    stream_dropout {
        training::dropout: stream_dropout_equals_f64, stream_dropout_of_views;
    }
    tiles {
        attention::tiles: shared_tiles_equal_f64, shared_tiles_of_other_kinds, long_tiles_equal_f64, narrower_values_equal_f64;
    }
    widths {
        attention::widths: every_width_equals_f64, strided_layouts_of_other_kinds;
    }
    [checks that the suite runs in a way of its own]
    graph::decoding: decoding_reserves_nothing_more;
    fuzz::selection: some_random_choices;
    [checks that run only if they are named: large, as long as they are asked to be, or the first of a process]
    attention::plain: more_than_2_31_elements;
    training::gates: gated_sums_of_more_than_2_31_elements;
    training::linear: accelerated_matmuls_equal_f64;
    attention::widths: more_batch_entries_and_heads_than_a_grid, far_strides;
    attention::narrow_blocks: narrow_blocks_in_half_precision, narrow_blocks_with_options;
    fuzz::attention: fuzz;
    fuzz::decoding: pieces_are_rows_of_the_whole;
    selection::long: long_calls_choose_as_loops, gates_choose_as_loops;
    selection::choices: antidiagonals_in_half_precision_equal_those_of_loops, lines_in_half_precision_equal_those_of_loops;
    fuzz::selection: random_choices;
}
