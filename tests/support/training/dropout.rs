//! Dropout of a tensor, against what the host says is kept.

use burn_fused_ops::{ElementDropout, dropout};

use crate::prelude::*;

/// Dropout and its gradient, of all widths and dtypes.
pub fn stream_dropout_equals_f64(devices: &[Device]) {
    let whole = ElementDropout::new(0.4, 17 + (3 << 32), 9);
    let sizes = [[1, 1], [7, 3], [300, 34], [20, 136], [0, 4], [5, 0]];
    // The rows of the last one begin again at 0.
    let masks = [
        whole,
        whole.with_first_row(1000),
        whole.with_first_row(u32::MAX - 9),
    ];
    let cases = (masks.into_iter()).flat_map(|mask| sizes.map(|size| (mask, size)));
    for (mask, [rows, width]) in cases {
        // Numbers that every dtype has.
        let numbers = |factor: usize| -> Vec<f64> {
            let number = |at: usize| (at * factor % 31) as f64 / 16.0 - 1.0;
            (0..rows * width).map(number).collect()
        };
        let [numbers, by_kept] = [7, 11].map(numbers);
        let expected = |numbers: &[f64]| -> Vec<f64> {
            let factor = |at: usize| match mask.keeps(at / width, at % width) {
                true => mask.factor(),
                false => 0.0,
            };
            (numbers.iter().enumerate())
                .map(|(at, x)| factor(at) * x)
                .collect()
        };
        for plain in devices {
            let exact = exact_dtypes(plain).into_iter();
            let half = half_dtypes(plain).into_iter().map(|dtype| (dtype, 4e-3));
            for (dtype, tolerance) in exact.chain(half) {
                let device = plain.clone().autodiff();
                let tensor = |numbers: &[f64]| tensor(numbers, [1, rows, width], &device, dtype);
                let x = tensor(&numbers).require_grad();
                let kept = dropout(x.clone(), &mask).unwrap();
                let grads = (kept.clone() * tensor(&by_kept)).sum().backward();
                let what = format!("dropout of {rows}, {width}, {device:?}, {dtype:?}");
                let kept = kept.inner().into_data();
                assert_close(&what, kept, &expected(&numbers), tolerance);
                let grad = x.grad(&grads).unwrap().into_data();
                assert_close(&what, grad, &expected(&by_kept), tolerance);
            }
        }
    }
}

/// Strides change nothing, nothing is dropped with a probability of 0, and the plan says what runs.
pub fn stream_dropout_of_views(devices: &[Device]) {
    let mask = ElementDropout::new(0.4, 5, 1);
    for device in devices {
        let x = Tensor::<2>::ones([12, 20], device);
        let view = Tensor::<2>::ones([20, 12], device).swap_dims(0, 1);
        let [kept, again] =
            [x.clone(), view].map(|x| to_f64(dropout(x, &mask).unwrap().into_data()));
        assert_eq!(kept, again);
        let all = dropout(x.clone(), &ElementDropout::new(0.0, 5, 1)).unwrap();
        assert_eq!(all.sum().into_scalar::<f32>(), 240.0);
        let plan = burn_fused_ops::explain::dropout(&x, &mask).unwrap();
        let words = if plan.is_kernels() {
            "vectors of"
        } else {
            "primitives"
        };
        assert!(plan.to_string().contains(words), "{plan}");
    }
}
