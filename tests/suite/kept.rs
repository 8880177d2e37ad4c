//! Attention with results that another pass kept.

burn_blocksparse_tests::tests!(kept: given_attention_gives_the_same_bits, given_attention_of_other_kinds, given_attention_is_not_computed);
