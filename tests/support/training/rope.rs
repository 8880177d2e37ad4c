//! Rotary position embedding and its gradient, against loops in f64.

use burn::tensor::FloatDType;
use burn_fused_ops::{RopePositions, rope, rope_pair};

use crate::prelude::*;

struct Problem {
    shape: [usize; 4],
    context: usize,
    x: Vec<f64>,
    grad: Vec<f64>,
    /// Cosine and sine of each position and pair.
    table: Vec<[f64; 2]>,
    /// The position of each row, and the first where they follow each other.
    places: Vec<usize>,
    first: Option<usize>,
}

impl Problem {
    fn new(seed: u64, shape: [usize; 4], first: Option<usize>) -> Self {
        let [batch, heads, seq, width] = shape;
        let context = 3 * seq + 5;
        let angles = numbers(seed, context * width / 2);
        let mut rng = seeded(seed + 1);
        Self {
            shape,
            context,
            x: numbers(seed + 2, batch * heads * seq * width),
            grad: numbers(seed + 3, batch * heads * seq * width),
            table: angles
                .iter()
                .map(|angle| [angle.cos(), angle.sin()])
                .collect(),
            places: (0..batch * seq)
                .map(|row| match first {
                    Some(first) => first + row % seq,
                    None => rng.random_range(0..context),
                })
                .collect(),
            first,
        }
    }

    fn round(&mut self, dtype: DType, table: DType) {
        round_to(&mut self.x, dtype);
        round_to(&mut self.grad, dtype);
        let mut flat = self.table.concat();
        round_to(&mut flat, table);
        self.table = flat.chunks(2).map(|pair| [pair[0], pair[1]]).collect();
    }

    /// Of `values`, by angles times `sign`.
    fn turned(&self, values: &[f64], sign: f64) -> Vec<f64> {
        let [_, heads, seq, width] = self.shape;
        let pair = |index: usize, at: usize| {
            let (row, channel) = (index / width, index % width);
            let place = self.places[row / seq / heads * seq + row % seq];
            let [cosine, sine] = self.table[place * width / 2 + channel / 2];
            let start = row * width + channel / 2 * 2;
            let (a, b) = (values[start], values[start + 1]);
            match at {
                0 => a * cosine - b * sign * sine,
                _ => b * cosine + a * sign * sine,
            }
        };
        (0..values.len())
            .map(|index| pair(index, index % 2))
            .collect()
    }

    fn check(&self, device: &Device, [dtype, table, out]: [DType; 3], back: bool, tolerance: f64) {
        let [batch, _, seq, width] = self.shape;
        let rows = self
            .table
            .iter()
            .flat_map(|[cosine, sine]| [*cosine, *sine, *cosine, *sine]);
        let rows: Vec<f64> = rows.collect();
        for device in tracked(device) {
            let table = tensor::<3>(&rows, [self.context, width, 2], &device, table);
            let x = tensor::<4>(&self.x, self.shape, &device, dtype).require_grad();
            let positions = match self.first {
                Some(first) => RopePositions::From(first),
                None => {
                    let places: Vec<i32> = self.places.iter().map(|at| *at as i32).collect();
                    let places = TensorData::new(places, [batch * seq]);
                    RopePositions::Of(Box::new(Tensor::from_data(places, &device)))
                }
            };
            let dtype_out = FloatDType::from(out);
            let y = rope(x.clone(), table.clone(), positions.clone(), dtype_out, back).unwrap();
            // Beside queries with other heads, to the last bit.
            let others = Tensor::cat(vec![x.clone(), x.clone()], 1);
            let both = rope_pair(others, x.clone(), table, positions, dtype_out, back).unwrap();
            let [others, again] = both.map(read);
            assert!(again.as_bytes() == read(y.clone()).as_bytes());
            let twice = Tensor::cat(vec![y.clone(), y.clone()], 1);
            assert!(others.as_bytes() == read(twice).as_bytes());
            assert_eq!(y.dtype(), out);
            let grad = tensor::<4>(&self.grad, self.shape, &device, out);
            let grads = (y.clone() * grad).sum().backward();
            let by_x = x.grad(&grads).unwrap();
            assert_eq!(by_x.dtype(), dtype);
            let sign = if back { -1.0 } else { 1.0 };
            let what = format!(
                "{device:?}, {dtype:?} to {out:?}, {:?}, back {back}",
                self.shape
            );
            assert_close(&what, read(y), &self.turned(&self.x, sign), tolerance);
            let expected = self.turned(&self.grad, -sign);
            assert_close(&format!("{what}, by x"), read(by_x), &expected, tolerance);
        }
    }
}

/// Few heads and many, a width that no load of 16 bytes divides, more rows than a launch's units take one by one.
fn problems() -> Vec<Problem> {
    vec![
        Problem::new(800, [1, 1, 1, 2], Some(0)),
        Problem::new(810, [2, 3, 7, 10], Some(4)),
        Problem::new(820, [3, 5, 1, 64], None),
        Problem::new(830, [2, 9, 600, 64], None),
        Problem::new(840, [1, 32, 513, 128], Some(1000)),
        Problem::new(850, [2, 2, 5, 14], None),
    ]
}

pub fn rope_equals_f64(devices: &[Device]) {
    for mut problem in problems() {
        for (device, dtype, tolerance) in exact(devices) {
            problem.round(dtype, dtype);
            for back in [false, true] {
                problem.check(device, [dtype; 3], back, tolerance);
            }
        }
    }
}

/// The table stays f32, and results are rounded once.
pub fn rope_in_half_precision(devices: &[Device]) {
    for mut problem in problems() {
        for (device, half) in halves(devices) {
            problem.round(half, DType::F32);
            problem.check(device, [half, DType::F32, half], false, unit(half));
            problem.check(device, [half, DType::F32, DType::F32], true, unit(half));
        }
    }
}
