//! How the op sits in Burn's autodiff: checkpointing, partial tracking, memory of what is kept.

burn_blocksparse_tests::tests!(autodiff: gradient_checkpointing_gives_the_same_gradients, constants_get_no_gradient, out_and_lse_are_differentiated_together, bias_with_and_without_gradient, one_tensor_as_query_key_and_value, recompute_and_store_agree);
