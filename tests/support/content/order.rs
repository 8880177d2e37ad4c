//! Sorts by bucket, the highest numbers and products of rows, and sums at places, against the host's.

use burn_blocksparse::internal::{gather_rows, segment_sum};
use burn_sparse_select::internal::{row_products, sort_by_bucket, topk_rows};

use crate::prelude::*;

/// Those of a stable sort: random buckets, one bucket, rising and falling ones, and more than are sorted at once.
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

/// Of rows with ties, and with what is no number; of short rows, of as many numbers as cubes hold, and of more. A row has numbers of all sizes.
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

/// Where the `most` highest numbers are, by a sort, ascending.
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

/// Factors that differ in the 18th bit of their numbers have products in that order, whatever Burn's products round to.
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
            assert!(
                error < 1e-6,
                "{device:?}, {dtype:?}, {at}: {got}, {expected}"
            );
        }
    }
}

/// The one is the gradient of the other.
pub fn sums_at_places_are_gradients_of_rows(devices: &[Device]) {
    let [batch, heads, rows, most, dim] = [2, 2, 13, 3, 8];
    let places = rows * most;
    let mut rng = seeded(78);
    // Every third place names no row.
    let index: Vec<i32> = (0..batch * heads * places)
        .map(|at| match at % 3 {
            0 => -1,
            _ => (at * 7 % rows) as i32,
        })
        .collect();
    let mut users = vec![-1; batch * heads * rows * places];
    for (at, &row) in index.iter().enumerate().filter(|(_, row)| **row >= 0) {
        let list = &mut users[(at / places * rows + row as usize) * places..][..places];
        list[at % places] = (at % places) as i32;
    }
    let mut random = |count: usize| drawn(&mut rng, count, -1.0f32..1.0);
    let (x, y) = (
        random(batch * heads * places * dim),
        random(batch * heads * rows * dim),
    );
    for device in devices {
        let device = device.clone().autodiff();
        let float =
            |x: &[f32], rows: usize| floats(x, [batch, heads, rows, dim], &device).require_grad();
        let (x, y) = (float(&x, places), float(&y, rows));
        let index = ints(&index, [batch, heads, places], &device);
        let users = ints(&users, [batch, heads, rows, places], &device);
        let taken = gather_rows(y.clone(), index.clone(), users.clone()).unwrap();
        let sums = segment_sum(x.clone(), index, users).unwrap();
        let by_y = y.grad(&(taken.clone() * x.clone().detach()).sum().backward());
        let by_x = x.grad(&(sums.clone() * y.detach()).sum().backward());
        for (got, expected) in [(by_y, sums), (by_x, taken)] {
            let expected = to_f64(expected.into_data());
            let got = to_f64(got.unwrap().into_data());
            assert!(expected.iter().any(|x| x.abs() > 0.1));
            assert!(got.iter().zip(&expected).all(|(a, b)| (a - b).abs() < 1e-6));
        }
        let error = segment_sum(
            Tensor::zeros([batch, heads, places + 1, dim], &device),
            Tensor::zeros([batch, heads, places], &device),
            Tensor::zeros([batch, heads, rows, 1], &device),
        );
        assert!(error.unwrap_err().to_string().contains("x's places"));
    }
}
