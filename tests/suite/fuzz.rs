//! Random cases against f64: `BURN_SPARSE_FUZZ_CASES=2000 cargo test -p burn-blocksparse-tests --test suite -- fuzz:: --ignored --nocapture`.

use burn_blocksparse_tests::devices::devices;
use burn_blocksparse_tests::fuzz::fuzz;

#[test]
#[ignore = "takes as long as it is asked to: see docs/reliability.md"]
fn random_cases_equal_f64() {
    fuzz(&devices());
}
