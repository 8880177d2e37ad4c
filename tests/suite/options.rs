//! What a call may ask for besides attention itself: every output and every gradient against f64.

burn_blocksparse_tests::tests!(bias_gradient: bias_gradients_in_half_precision, bias_gradients_with_options, bias_gradients_per_batch);
burn_blocksparse_tests::tests!(options: lse_gradients_equal_f64, lse_alone_equals_f64, sinks_equal_f64, weights_with_options_equal_f64, weights_with_sinks_per_batch, alibi_equals_f64, dropout_equals_f64, bias_equals_f64, relative_bias_equals_f64, options_work_together, options_give_the_same_bits, options_in_half_precision, relative_bias_in_half_precision, dropout_follows_its_seed);
