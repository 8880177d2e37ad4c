//! The comparator and its bounds: they catch errors, are valid, and are tight.

use std::panic::{AssertUnwindSafe, catch_unwind};

use burn_blocksparse_tests::attention::cases::cases;
use burn_blocksparse_tests::prelude::*;

const HALF: [DType; 2] = [DType::F16, DType::BF16];
const SEQ: usize = 256;
const SIZES: Sizes = Sizes::new([1, 2, 2], [SEQ, SEQ], [64, 64]);

/// Makes causal attention in which queries from `end` on do not see the keys from `end` on.
fn causal(dtype: DType, end: usize) -> Problem {
    let pattern = Pattern::causal();
    let mut problem = Problem::random(SIZES, 1, move |_, head, i, j| {
        pattern.attends(head, i as i64, j as i64) && (j < end || i < end)
    });
    problem.round_to(dtype);
    problem
}

fn values<'a>(answer: &'a Answer, name: &str) -> &'a [f64] {
    answer.result(name).values
}

/// Checks that `got` passes the bound on whole tensors and fails the bound on rows.
fn is_caught(name: &str, got: &[f64], expected: &Answer, dtype: DType) {
    let (of_tensor, _) = relative_error(got, values(expected, name));
    let is_right = of_tensor <= half_tolerance(dtype);
    assert!(is_right, "{name}, {dtype:?}: {of_tensor}");
    let rows = expected.result(name).rows;
    let (part, _) = worst_row(got, values(expected, name), rows, dtype);
    assert!(part > 1.0, "{name}, {dtype:?}: {part}");
    let data = TensorData::new(got.to_vec(), [1, 2, SEQ, 64]);
    let caught = catch_unwind(AssertUnwindSafe(|| {
        assert_rows(name, data, &expected.result(name), dtype);
    }));
    let message = *caught.unwrap_err().downcast::<String>().unwrap();
    assert!(message.contains("the row at [0, "), "{message}");
}

/// The gradient with respect to the last key comes from one query of 256, and is correspondingly small.
#[test]
fn a_wrong_late_row_is_caught() {
    for dtype in HALF {
        let problem = causal(dtype, SEQ);
        let (exact, mut got) = (problem.solve(), problem.solve_rounded(dtype));
        for name in ["dk", "dv"] {
            let rows = exact.result(name).rows;
            let clean = worst_row(values(&got, name), values(&exact, name), rows, dtype);
            assert!(clean.0 < 1.0, "{name}, {dtype:?}: {clean:?}");
        }
        let last = (SEQ - 1) * 64..SEQ * 64;
        got.dk[last.clone()].fill(0.0);
        got.dv[last].iter_mut().for_each(|x| *x *= 0.9);
        is_caught("dk", &got.dk, &exact, dtype);
        is_caught("dv", &got.dv, &exact, dtype);
    }
}

/// The last queries without the last keys, like a tile that a loop forgets: 4 keys in bf16, one in f16.
#[test]
fn a_dropped_last_tile_is_caught() {
    for dtype in HALF {
        let exact = causal(dtype, SEQ).solve();
        let end = SEQ - if dtype == DType::F16 { 1 } else { 4 };
        let pattern = Pattern::causal();
        let mut problem = Problem::random(SIZES, 1, move |_, head, i, j| {
            pattern.attends(head, i as i64, j as i64) && (i < end || j < end)
        });
        problem.round_to(dtype);
        let got = problem.solve_rounded(dtype);
        let (of_tensor, _) = relative_error(&got.out, &exact.out);
        let (part, row) = worst_row(&got.out, &exact.out, exact.result("out").rows, dtype);
        assert!(of_tensor <= half_tolerance(dtype), "{dtype:?}: {of_tensor}");
        assert!(part > 1.0 && row % SEQ >= end, "{dtype:?}: {part} at {row}");
    }
}

/// NaN, and rows that must be 0.
#[test]
fn nothing_that_is_not_finite_passes() {
    let problem = causal(DType::F32, SEQ);
    let (exact, mut got) = (problem.solve(), problem.solve());
    got.out[70] = f64::NAN;
    let (part, row) = worst_row(&got.out, &exact.out, exact.result("out").rows, DType::F32);
    assert_eq!((part, row), (f64::INFINITY, 1));
    let nothing = Problem::random(SIZES, 1, |_, _, i, j| j <= i && i != 5).solve();
    let mut got = nothing.out.clone();
    got[5 * 64] = 1e-12;
    let rows = nothing.result("out").rows;
    let (part, row) = worst_row(&got, &nothing.out, rows, DType::BF16);
    assert_eq!((part, row), (f64::INFINITY, 5));
}

/// Roundings simulated in f64, on the whole table: all errors are within the bound, with a margin for other orders of sums, and no row's bound is
/// far off.
#[test]
fn simulated_roundings_stay_within_the_bound() {
    for dtype in HALF {
        let mut worst = [0.0f64; 4];
        for (index, case) in cases().iter().enumerate() {
            for seed in [0, 500] {
                let mut problem = case.problem(2000 + seed + index as u64).with_grad_lse(seed);
                problem.round_to(dtype);
                let (exact, got) = (problem.solve(), problem.solve_rounded(dtype));
                for (name, worst) in ["out", "dq", "dk", "dv"].iter().zip(&mut worst) {
                    let rows = exact.result(name).rows;
                    let (part, row) =
                        worst_row(values(&got, name), values(&exact, name), rows, dtype);
                    assert!(
                        part < 0.7,
                        "{}, {name}, {dtype:?}: {part} in row {row}",
                        case.name
                    );
                    *worst = worst.max(part);
                }
            }
        }
        println!("{dtype:?}: out, dq, dk and dv are at most {worst:.2?} of their bounds");
        assert!(worst.iter().all(|&part| part > 0.3), "{dtype:?}: {worst:?}");
    }
}
