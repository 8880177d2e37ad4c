//! The cross entropy of a product with targets.

use burn_fused_ops::{CrossEntropyOptions, linear_cross_entropy};
use rstest::rstest;

use burn_blocksparse_tests::prelude::*;

burn_blocksparse_tests::tests!(loss);

#[rstest]
#[case([5, 9], [2, 3], 0.0, "weight's width must be 4, x's last dimension, got 5")]
#[case([4, 9], [3, 2], 0.0, "targets' shape must be [2, 3] or [6], x's positions, got [3, 2]")]
#[case([4, 0], [2, 3], 0.0, "weight's vocab must be at least 1, got 0")]
#[case([4, 9], [2, 3], 1.0, "options.label_smoothing must be at least 0 and less than 1, got 1")]
#[case([4, 9], [2, 3], f64::NAN, "options.label_smoothing must be at least 0 and less than 1, got NaN")]
fn errors(
    #[case] weight: [usize; 2],
    #[case] targets: [usize; 2],
    #[case] smoothing: f64,
    #[case] message: &str,
) {
    for device in devices() {
        let x = Tensor::<3>::zeros([2, 3, 4], (&device, DType::F32));
        let weight = Tensor::<2>::zeros(weight, (&device, DType::F32));
        let targets = Tensor::<2, Int>::zeros(targets, &device);
        let options = CrossEntropyOptions::default().label_smoothing(smoothing);
        refused! {
            options.explain(&x, &weight, &targets) => message;
            linear_cross_entropy(x, weight, targets, &options) => message;
        }
    }
}

#[rstest]
#[case([0, 9, 1], None, "targets must be at least 0 and less than 9, weight's vocab, got 9")]
#[case([-1, 0, 1], None, "targets must be at least 0 and less than 9, weight's vocab, got -1")]
#[case([-1, -2, 1], Some(-1), "targets must be at least 0 and less than 9, weight's vocab, got -2")]
fn targets_out_of_range(
    #[case] targets: [i32; 3],
    #[case] ignored: Option<i64>,
    #[case] message: &str,
) {
    for device in devices() {
        let x = Tensor::<2>::zeros([3, 4], (&device, DType::F32));
        let weight = Tensor::<2>::zeros([4, 9], (&device, DType::F32));
        let targets = Tensor::<1, Int>::from_data(targets, &device);
        let mut options = CrossEntropyOptions::default();
        options.ignore_index = ignored;
        refused! { linear_cross_entropy(x, weight, targets, &options) => message; }
    }
}

#[test]
fn plans_say_what_runs() {
    for device in devices() {
        let x = Tensor::<2>::zeros([3, 4], (&device, DType::F32));
        let weight = Tensor::<2>::zeros([4, 9], (&device, DType::F32));
        let targets = Tensor::<1, Int>::zeros([3], &device);
        let options = CrossEntropyOptions::default();
        let plan = options.explain(&x, &weight, &targets).unwrap();
        let text = plan.to_string();
        match plan.is_kernels() {
            true => assert!(text.contains("1 chunks of 3 positions"), "{text}"),
            false => assert!(text.starts_with("Burn's primitives on"), "{text}"),
        }
    }
}
