//! Each row's largest score, an output that a call may ask for.

burn_blocksparse_tests::tests!(max_scores: max_scores_equal_f64, max_scores_in_half_precision, max_scores_change_nothing_else, max_scores_of_other_layouts, max_scores_of_disjoint_parts);
