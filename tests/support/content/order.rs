//! Sort by bucket, top-k of rows, products of rows, and segment sums, against the host.

use burn_blocksparse::internal::{gather_rows, segment_sum};
use burn_sparse_select::internal::{row_products, sort_by_bucket, topk_rows};

use crate::prelude::*;
use crate::training::case::{Case, Tensors};

/// Equal to a stable sort: random buckets, one bucket, ascending and descending ones, and more than are sorted at once.
pub fn buckets_are_sorted_as_by_the_host(devices: &[Device]) {
    let cases = [
        (1, 1, 1),
        (3, 700, 7),
        (2, 256, 64),
        (2, 1000, 1),
        (1, 5000, 128),
        (2, 600, 1025),
        (1, 900, 12_000),
    ];
    for (groups, length, count) in cases {
        let mut rng = seeded(length as u64);
        for kind in 0..3 {
            let bucket = |at: usize, rng: &mut ChaCha8Rng| match kind {
                0 => rng.random_range(0..count),
                1 => at * count / length,
                _ => (length - 1 - at) * count / length,
            };
            let buckets: Vec<i32> = (0..groups * length)
                .map(|i| bucket(i % length, &mut rng) as i32)
                .collect();
            for device in devices {
                let given = ints(&buckets, [1, groups, length], device);
                let room = length + kind * 9;
                let sorted = sort_by_bucket(given.clone(), count, room).unwrap();
                let [tokens, places] = sorted.map(read_ints);
                for group in 0..groups {
                    let buckets = &buckets[group * length..][..length];
                    let mut expected: Vec<i32> = (0..length as i32).collect();
                    expected.sort_by_key(|&token| buckets[token as usize]);
                    let mut inverse = vec![0; length];
                    (0..length).for_each(|at| inverse[expected[at] as usize] = at as i32);
                    expected.resize(room, -1);
                    let (tokens, places) = (
                        &tokens[group * room..][..room],
                        &places[group * length..][..length],
                    );
                    assert_eq!(tokens, expected, "{length}, {count}, {kind}");
                    assert_eq!(places, inverse, "{length}, {count}, {kind}");
                }
                refused! { sort_by_bucket(given, count, length - 1) => "…room…"; }
            }
        }
    }
}

/// Rows with ties and NaN; short rows, rows that fill a cube, and longer ones. A row has elements of all magnitudes.
pub fn highest_in_rows_are_those_of_a_sort(devices: &[Device]) {
    for ([groups, rows, columns], most) in [
        ([3, 4, 300], vec![1, 64, 65, 299, 300]),
        ([1, 3, 31], vec![1, 30, 31]),
        ([1, 3, 2048], vec![1, 64, 65, 2047]),
        ([1, 2, 5000], vec![1, 77, 4999]),
        ([1, 1, 33_000], vec![130]),
    ] {
        let mut rng = seeded(77);
        let mut given: Vec<f32> = (0..groups * rows * columns)
            .map(|_| rng.random_range(0..500) as f32 / 250.0 - 1.0)
            .collect();
        if rows > 1 {
            given[..columns].fill(0.25);
            for at in [columns, columns + 9, 2 * columns - 1] {
                given[at] = f32::NAN;
            }
            for x in &mut given[(rows - 1) * columns..rows * columns] {
                *x = f32::from_bits(rng.random());
            }
            given[rows * columns - 1] = f32::INFINITY;
            given[rows * columns - 2] = f32::NEG_INFINITY;
        }
        for (most, device) in most.into_iter().flat_map(|most| {
            let of = move |device| (most, device);
            devices.iter().map(of)
        }) {
            let x = floats(&given, [groups, rows, columns], device);
            let found = topk_rows(x, most).unwrap();
            let (lists, places) = (read_ints(found.columns), read_ints(found.places));
            for (row, numbers) in given.chunks(columns).enumerate() {
                let order = highest_of(numbers, most);
                let list = &lists[row * most..][..most];
                assert_eq!(list, order, "{columns}, {most}, {row}");
                let (group, row) = (row / rows, row % rows);
                for column in 0..columns as i32 {
                    let place = order.binary_search(&column).ok();
                    let expected = place.map_or(-1, |place| (row * most + place) as i32);
                    let got = places[(group * rows + row) * columns + column as usize];
                    assert_eq!(got, expected, "{columns}, {most}, {row}, {column}");
                }
            }
        }
    }
}

/// Returns the indices of the `most` highest elements, by a sort, ascending.
fn highest_of(numbers: &[f32], most: usize) -> Vec<i32> {
    let number = |at: usize| match numbers[at].is_nan() {
        true => f32::NEG_INFINITY,
        false => numbers[at],
    };
    let mut order: Vec<usize> = (0..numbers.len()).collect();
    order.sort_by(|&a, &b| number(b).total_cmp(&number(a)).then(a.cmp(&b)));
    let mut first: Vec<i32> = order[..most].iter().map(|&at| at as i32).collect();
    first.sort_unstable();
    first
}

/// Factors that differ in the 18th bit have products in that order, whatever the rounding of Burn's matmuls.
pub fn products_of_rows_are_not_rounded(devices: &[Device]) {
    let [heads, rows, columns, width] = [2, 5, 40, 36];
    let number = |at: usize| 1.3 + (at * 7 % columns) as f32 * (2.0f32).powi(-18);
    let a: Vec<f32> = (0..heads * rows * width)
        .map(|at| 1.0 + (at / width) as f32)
        .collect();
    let b: Vec<f32> = (0..heads * columns * width)
        .map(|at| number(at / width % columns))
        .collect();
    for (device, dtype) in with_each(devices, &[DType::F32, DType::F64]) {
        let a = floats(&a, [1, heads, rows, width], device).cast(dtype);
        let b = floats(&b, [1, heads, columns, width], device).cast(dtype);
        let got = to_f64(row_products(a, b).into_data());
        assert_eq!(got.len(), heads * rows * columns);
        for (at, got) in got.into_iter().enumerate() {
            let row = 1.0 + (at / columns) as f64;
            let expected = width as f64 * row * f64::from(number(at % columns));
            let error = (got - expected).abs() / expected;
            let is_right = error < 1e-6;
            assert!(is_right, "{device:?}, {dtype:?}, {at}: {got}, {expected}");
        }
    }
}

/// Gather of rows by an index, with unused rows and negative indices, and segment sums: each is the gradient of the other.
pub fn sums_at_places_are_gradients_of_rows(devices: &[Device]) {
    let [batch, heads, rows, dim, most, places] = [2, 3, 11, 5, 3, 40];
    let lists = batch * heads;
    let mut rng = seeded(8800);
    let mut index = vec![-1i32; lists * places];
    let mut users = vec![-1i32; lists * rows * most];
    for (slot, user) in users.iter_mut().enumerate() {
        let place = rng.random_range(0..places);
        let row = &mut index[slot / (rows * most) * places + place];
        if *row < 0 && rng.random::<f64>() < 0.7 {
            *row = (slot / most % rows) as i32;
            *user = place as i32;
        }
    }
    let moved = |x: &[f64], count: usize, back: bool| {
        let mut out = vec![0.0; lists * count * dim];
        for (place, row) in index.iter().enumerate().filter(|(_, row)| **row >= 0) {
            let row = place / places * rows + *row as usize;
            let (from, to) = if back { (place, row) } else { (row, place) };
            for c in 0..dim {
                out[to * dim + c] += x[from * dim + c];
            }
        }
        out
    };
    for back in [false, true] {
        let (from, to) = if back { (places, rows) } else { (rows, places) };
        let call = |x: &mut Tensors| {
            let x = x.take();
            let index = ints_of(&index, [batch, heads, places], &x.device());
            let users = ints_of(&users, [batch, heads, rows, most], &x.device());
            let made = match back {
                true => segment_sum(x, index, users),
                false => gather_rows(x, index, users),
            };
            vec![made.unwrap().into()]
        };
        let judge = |x: &[Vec<f64>], grads: &[Vec<f64>]| {
            vec![moved(&x[0], to, back), moved(&grads[0], from, !back)]
        };
        let case = Case::new(format!("to {to} rows"), call, judge)
            .input("x", 0, &[batch, heads, from, dim], 8801)
            .result("out", 0, &[batch, heads, to, dim], 8802);
        for (device, dtype, tolerance) in exact(devices) {
            case.check_in(device, dtype, tolerance);
        }
    }
    for device in devices {
        let error = segment_sum(
            Tensor::zeros([batch, heads, places + 1, dim], device),
            Tensor::zeros([batch, heads, places], device),
            Tensor::zeros([batch, heads, rows, 1], device),
        );
        assert!(error.unwrap_err().to_string().contains("x's places"));
    }
}
