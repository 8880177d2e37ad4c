//! Pools that evict keys.

burn_blocksparse_tests::tests!(
    eviction: queries_see_the_keys_that_stay, sums_of_attention_are_the_same_by_both_roads,
        sequences_of_a_batch_get_what_they_get_alone
);
