//! Rotary position embedding and its gradient, against f64 loops.

use burn::tensor::FloatDType;
use burn_fused_ops::{RopePositions, rope, rope_pair};

use crate::prelude::*;
use crate::training::case::*;

/// A seed, the shape of x, and the first position if positions are consecutive.
type Rows = (u64, [usize; 4], Option<usize>);

/// Rotates values by angles times `sign`, from cosine and sine of each position and pair, and the position of each row.
fn turned(
    values: &[f64],
    [_, heads, seq, width]: [usize; 4],
    table: &[[f64; 2]],
    places: &[usize],
    sign: f64,
) -> Vec<f64> {
    let pair = |index: usize| {
        let (row, channel) = (index / width, index % width);
        let place = places[row / seq / heads * seq + row % seq];
        let [cosine, sine] = table[place * width / 2 + channel / 2];
        let start = row * width + channel / 2 * 2;
        let (a, b) = (values[start], values[start + 1]);
        match index % 2 {
            0 => a * cosine - b * sign * sine,
            _ => b * cosine + a * sign * sine,
        }
    };
    (0..values.len()).map(pair).collect()
}

/// Makes a case, with dtypes of x and the result; the table has its own.
fn case((seed, shape, first): Rows, of_table: DType, back: bool) -> Case<'static> {
    let [batch, _, seq, width] = shape;
    let context = 3 * seq + 5;
    let angles = numbers(seed, context * width / 2).into_iter();
    let mut table: Vec<f64> = angles
        .flat_map(|angle| [angle.cos(), angle.sin()])
        .collect();
    round_to(&mut table, of_table);
    let table: Vec<[f64; 2]> = table.as_chunks().0.to_vec();
    let mut rng = seeded(seed + 1);
    let places: Vec<usize> = (0..batch * seq)
        .map(|row| match first {
            Some(first) => first + row % seq,
            None => rng.random_range(0..context),
        })
        .collect();
    let rows: Vec<f64> = table.iter().flat_map(|of| [*of, *of]).flatten().collect();
    let of_call = places.clone();
    let call = move |x: &mut Tensors| {
        let (x, out) = (x.take::<4>(), FloatDType::from(x.dtypes[1]));
        let table = tensor::<3>(&rows, [context, width, 2], &x.device(), of_table);
        let positions = match first {
            Some(first) => RopePositions::From(first),
            None => {
                let places: Vec<i32> = of_call.iter().map(|at| *at as i32).collect();
                RopePositions::Of(Box::new(ints_of(&places, [batch * seq], &x.device())))
            }
        };
        let y = rope(x.clone(), table.clone(), positions.clone(), out, back).unwrap();
        // Equal bits if rotated together with queries of another number of heads.
        let others = Tensor::cat(vec![x.clone(), x.clone()], 1);
        let both = rope_pair(others, x, table, positions, out, back).unwrap();
        let [others, again] = both.map(read);
        assert!(again.as_bytes() == read(y.clone()).as_bytes());
        let twice = Tensor::cat(vec![y.clone(), y.clone()], 1);
        assert!(others.as_bytes() == read(twice).as_bytes());
        vec![y.into()]
    };
    let sign = if back { -1.0 } else { 1.0 };
    let judge = move |x: &[Vec<f64>], grads: &[Vec<f64>]| {
        let turned = |values: &[f64], sign| turned(values, shape, &table, &places, sign);
        vec![turned(&x[0], sign), turned(&grads[0], -sign)]
    };
    Case::new(format!("{shape:?}, back {back}"), call, judge)
        .input("x", 0, &shape, seed + 2)
        .result("y", 1, &shape, seed + 3)
}

/// Few heads and many, a width that is no multiple of 16 bytes, more rows than a launch has units.
const CALLS: [Rows; 6] = [
    (800, [1, 1, 1, 2], Some(0)),
    (810, [2, 3, 7, 10], Some(4)),
    (820, [3, 5, 1, 64], None),
    (830, [2, 9, 600, 64], None),
    (840, [1, 32, 513, 128], Some(1000)),
    (850, [2, 2, 5, 14], None),
];

pub fn rope_equals_f64(devices: &[Device]) {
    for rows in CALLS {
        for back in [false, true] {
            for (device, dtype, tolerance) in exact(devices) {
                case(rows, dtype, back).check_in(device, dtype, tolerance);
            }
        }
    }
    let (seed, shape, first) = CALLS[1];
    case((seed, shape, first), DType::F32, false).gives_the_same_bits(devices, 1e-6);
}

/// The table stays f32, and results are rounded once.
pub fn rope_in_half_precision(devices: &[Device]) {
    for rows in CALLS {
        for (device, half) in halves(devices) {
            for (out, back) in [(half, false), (DType::F32, true)] {
                let case = case(rows, DType::F32, back).rounded(half);
                case.check(device, &[half, out], |_| unit(half));
            }
        }
    }
}
