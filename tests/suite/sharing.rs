//! Layouts that threads share.

burn_blocksparse_tests::tests!(sharing: threads_share_a_new_layout, threads_share_a_new_device_layout, a_layout_outlives_tensors_and_threads, calls_at_once_give_the_same_bits);
