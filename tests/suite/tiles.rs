//! What kernels do at certain shapes only.

burn_blocksparse_tests::tests!(tiles: shared_tiles_equal_f64, shared_tiles_of_other_kinds, narrower_values_equal_f64);
