//! What kernels do at certain shapes only.

burn_blocksparse_tests::tests!(tiles: shared_tiles_equal_f64, shared_tiles_of_other_kinds, long_tiles_equal_f64, narrower_values_equal_f64);
