//! The op against f64 over the whole table: output, lse, weights and gradients.

burn_blocksparse_tests::tests!(attention: forward_and_gradients_equal_f64, lse_and_weights_equal_f64, half_precision_is_as_good_as_dense, equals_burns_own_attention, gradients_equal_finite_differences, strides_do_not_matter, same_input_same_bits, per_batch_layouts, tf32_only_where_asked_for, lse_merges_disjoint_parts);
