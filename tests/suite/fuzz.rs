//! Random cases against f64: `BURN_SPARSE_FUZZ_CASES=2000 cargo test -p burn-blocksparse-tests --test suite -- fuzz:: --ignored --nocapture`.

use burn_blocksparse_tests::fuzz::attention::{
    fuzz, fuzz_of_the_day, half_precision_sees_a_small_bias,
};
use burn_blocksparse_tests::fuzz::decoding::pieces_are_rows_of_the_whole;
use burn_blocksparse_tests::fuzz::selection::{random_choices, some_random_choices};
use burn_blocksparse_tests::prelude::*;

/// The same 200 cases each time, and 100 of the day, whose seeds are printed.
#[test]
fn random_cases_of_the_day_equal_f64() {
    fuzz_of_the_day(&devices());
}

#[test]
#[ignore = "takes as long as it is asked to: see docs/dev/reliability.md"]
fn random_cases_equal_f64() {
    fuzz(&devices());
}

#[test]
fn half_precision_cases_see_a_small_bias() {
    devices().iter().for_each(half_precision_sees_a_small_bias);
}

/// `BURN_SPARSE_FUZZ_DECODING` cases, by default 40.
#[test]
fn random_pieces_are_rows_of_the_whole() {
    pieces_are_rows_of_the_whole(&devices());
}

#[test]
fn some_random_choices_equal_f64() {
    some_random_choices(&devices());
}

/// `BURN_SPARSE_FUZZ_SELECTIONS=1000 cargo test -p burn-blocksparse-tests --test suite -- random_choices --ignored --nocapture`
#[test]
#[ignore = "takes as long as it is asked to: see docs/dev/reliability.md"]
fn random_choices_equal_f64() {
    random_choices(&devices());
}
