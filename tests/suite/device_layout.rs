//! Layouts that are made on the device, against f64.

burn_blocksparse_tests::tests!(device_layout: device_masks_equal_f64, device_indices_equal_f64, device_top_k_equals_host_top_k, device_scores_of_all_kinds, device_layouts_with_all_options, device_layouts_are_used_again, device_layouts_in_half_precision, device_layouts_with_relative_bias, device_layout_errors);

burn_blocksparse_tests::tests!(device_layout_within: blocks_within_a_layout_equal_f64, rules_within_a_layout, layouts_within_give_the_same_bits);

burn_blocksparse_tests::tests!(device_layout_positions: pairs_by_positions_equal_f64, pairs_by_positions_in_half_precision, positions_are_checked);
