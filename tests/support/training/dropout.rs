//! Dropout of a tensor, against the mask on the host.

use burn_fused_ops::{ElementDropout, dropout};

use crate::prelude::*;
use crate::training::case::*;

/// Dropout and its gradient, for all widths and dtypes.
pub fn stream_dropout_equals_f64(devices: &[Device]) {
    let whole = ElementDropout::new(0.4, 17 + (3 << 32), 9);
    let sizes = [[1, 1], [7, 3], [300, 34], [20, 136], [0, 4], [5, 0]];
    // The row index of the last one wraps to 0.
    let masks = [
        whole,
        whole.with_first_row(1000),
        whole.with_first_row(u32::MAX - 9),
    ];
    let cases = (masks.into_iter()).flat_map(|mask| sizes.map(|size| (mask, size)));
    for (mask, [rows, width]) in cases {
        // Values that are exact in every dtype.
        let numbers = |factor: usize| -> Vec<f64> {
            let number = |at: usize| (at * factor % 31) as f64 / 16.0 - 1.0;
            (0..rows * width).map(number).collect()
        };
        let call = |x: &mut Tensors| vec![dropout(x.take::<3>(), &mask).unwrap().into()];
        let judge = |x: &[Vec<f64>], grads: &[Vec<f64>]| {
            let kept = |(at, x): (usize, &f64)| match mask.keeps(at / width, at % width) {
                true => mask.factor() * x,
                false => 0.0,
            };
            let of = [&x[0], &grads[0]].into_iter();
            of.map(|x| x.iter().enumerate().map(kept).collect())
                .collect()
        };
        let case = Case::new(format!("dropout of {rows}, {width}"), call, judge)
            .input("x", 0, &[1, rows, width], numbers(7))
            .result("kept", 0, &[1, rows, width], numbers(11));
        let half = halves(devices).map(|(device, dtype)| (device, dtype, 4e-3));
        for (device, dtype, tolerance) in exact(devices).chain(half) {
            case.check_in(device, dtype, tolerance);
        }
        case.gives_the_same_bits(devices, 0.0);
    }
}

/// Nothing is dropped with probability 0, and the plan tells what runs.
pub fn stream_dropout_of_views(devices: &[Device]) {
    let mask = ElementDropout::new(0.4, 5, 1);
    for device in devices {
        let x = Tensor::<2>::ones([12, 20], device);
        let all = dropout(x.clone(), &ElementDropout::new(0.0, 5, 1)).unwrap();
        assert_eq!(all.sum().into_scalar::<f32>(), 240.0);
        let plan = burn_fused_ops::explain::dropout(&x, &mask).unwrap();
        let words = ["primitives", "vectors of"][usize::from(plan.is_kernels())];
        assert!(plan.to_string().contains(words), "{plan}");
    }
}
