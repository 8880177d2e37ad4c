//! Hashes and sorts of several rounds, and rows that are taken with their keys, against the host's and Burn's operations.

use burn_blocksparse::internal::{
    gather_qkv, gather_rows, runs_kernels, segment_mean, segment_sum,
};
use burn_sparse_select::internal::{ArgsortRounds, counting_argsort_rounds, lsh_argsort, lsh_hash};

use crate::prelude::*;

/// Each as a stable sort by itself, with places behind the last token, and in one pass and in several.
pub fn rounds_are_sorted_each_by_itself(devices: &[Device]) {
    for (lists, rounds, length, count, room) in [(3, 2, 70, 7, 80), (2, 3, 600, 700, 600)] {
        let mut rng = seeded(79);
        let buckets: Vec<i32> = (0..lists * rounds * length)
            .map(|_| rng.random_range(0..count))
            .collect();
        for device in devices {
            let given = ints(&buckets, [lists, rounds, length], device);
            let Some(sorted) =
                counting_argsort_rounds(given.clone(), count as usize, room).unwrap()
            else {
                assert!(!runs_kernels(device));
                continue;
            };
            let (tokens, places) = (read_ints(sorted.tokens), read_ints(sorted.places));
            let choices = read_ints(sorted.choices);
            for group in 0..lists * rounds {
                let (list, round) = (group / rounds, group % rounds);
                let buckets = &buckets[group * length..][..length];
                let mut expected: Vec<i32> = (0..length as i32).collect();
                expected.sort_by_key(|&token| buckets[token as usize]);
                for (at, &token) in expected.iter().enumerate() {
                    let place = places[(list * length + token as usize) * rounds + round];
                    assert_eq!(place as usize, round * room + at);
                    let choice = token * rounds as i32 + round as i32;
                    assert_eq!(choices[group * room + at], choice);
                }
                expected.resize(room, -1);
                assert_eq!(tokens[group * room..][..room], expected);
                let behind = &choices[group * room + length..(group + 1) * room];
                assert!(behind.iter().all(|&choice| choice < 0));
            }
            refused! { counting_argsort_rounds(given, count as usize, length - 1) => "…room…"; }
        }
    }
}

/// Of two products that are nearly the same either bucket is right.
pub fn rows_hash_to_their_largest_product(devices: &[Device]) {
    for (length, dim, rounds, half) in [
        (37, 16, 3, 5),
        (300, 24, 2, 70),
        (5, 7, 1, 1),
        (130, 300, 1, 9),
        (257, 200, 1, 65),
        (31, 256, 2, 8),
    ] {
        let [batch, heads] = [2, 2];
        let mut rng = seeded(80);
        let mut random = |count: usize| drawn(&mut rng, count, -1.0f32..1.0);
        let x = random(batch * heads * length * dim);
        let rotations = random(rounds * dim * half);
        for (device, dtype) in with_each(devices, &[DType::F32, DType::BF16]) {
            let rows = floats(&x, [batch, heads, length, dim], device).cast(dtype);
            let turned = floats(&rotations, [rounds, dim, half], device);
            let Some(buckets) = lsh_hash(rows.clone(), turned).unwrap() else {
                assert!(!runs_kernels(device));
                continue;
            };
            assert_eq!(buckets.dims(), [batch, heads, rounds, length]);
            let (buckets, rows) = (read_ints(buckets), to_f64(rows.into_data()));
            for (at, &bucket) in buckets.iter().enumerate() {
                let (list, round) = (at / length / rounds, at / length % rounds);
                let row = &rows[(list * length + at % length) * dim..][..dim];
                let product = |column: usize| -> f64 {
                    let number = |(n, x): (usize, &f64)| {
                        x * f64::from(rotations[(round * dim + n) * half + column])
                    };
                    row.iter().enumerate().map(number).sum()
                };
                let most = (0..half).map(|c| product(c).abs()).fold(0.0, f64::max);
                let bucket = bucket as usize;
                let got = match bucket < half {
                    true => product(bucket),
                    false => -product(bucket - half),
                };
                assert!(
                    got > most - 1e-4,
                    "{device:?}, {dtype:?}, {at}: {got}, {most}"
                );
            }
        }
    }
}

/// Of rows of ones, whose columns differ in the 18th bit of their numbers, the largest; of rows that are no numbers the first.
pub fn rows_hash_by_the_last_bits(devices: &[Device]) {
    let ([length, dim], half) = ([40, 64], 16);
    // Not in the order of columns.
    let number = |column: usize| 1.3 + ((column * 7 + 3) % half) as f32 * (2.0f32).powi(-18);
    let rotations: Vec<f32> = (0..dim * half).map(|at| number(at % half)).collect();
    let largest = (0..half).max_by(|&a, &b| number(a).total_cmp(&number(b)));
    let largest = largest.unwrap() as i32;
    let mut x = vec![1.0; length * dim];
    x[5 * dim..6 * dim].fill(-1.0);
    x[7 * dim + 3] = f32::NAN;
    for (device, dtype) in with_each(devices, &[DType::F32, DType::F16, DType::BF16]) {
        let rows = floats(&x, [1, 1, length, dim], device).cast(dtype);
        let turned = floats(&rotations, [1, dim, half], device);
        let Some(buckets) = lsh_hash(rows, turned).unwrap() else {
            assert!(!runs_kernels(device));
            continue;
        };
        for (row, bucket) in read_ints(buckets).into_iter().enumerate() {
            let expected = match row {
                5 => largest + half as i32,
                7 => 0,
                _ => largest,
            };
            assert_eq!(bucket, expected, "{device:?}, {dtype:?}, {row}");
        }
    }
}

/// As a hash and a sort after it, with places behind the last row: in one tile of rows and in several, of one tile of columns and of several, and of more
/// buckets than tiles count.
pub fn sorted_hashes_are_hashes_sorted(devices: &[Device]) {
    for ([length, dim], [rounds, half], room) in [
        ([37, 16], [3, 5], 40),
        ([300, 24], [2, 70], 300),
        ([129, 7], [1, 1], 130),
        ([140, 300], [1, 300], 160),
        ([1000, 64], [1, 256], 1000),
    ] {
        let [batch, heads] = [2, 2];
        let mut rng = seeded(82);
        let mut random = |count: usize| drawn(&mut rng, count, -1.0f32..1.0);
        let mut x = random(batch * heads * length * dim);
        // Rows that are the same, and one of zeros.
        let (first, others) = x.split_at_mut(dim);
        (others.chunks_mut(dim).step_by(3)).for_each(|row| row.copy_from_slice(first));
        others[dim..2 * dim].fill(0.0);
        let rotations = random(rounds * dim * half);
        for (device, dtype) in with_each(devices, &[DType::F32, DType::BF16]) {
            let rows = floats(&x, [batch, heads, length, dim], device).cast(dtype);
            let turned = floats(&rotations, [rounds, dim, half], device);
            let Some(sorted) = lsh_argsort(rows.clone(), turned.clone(), room).unwrap() else {
                assert!(!runs_kernels(device));
                continue;
            };
            let buckets = lsh_hash(rows.clone(), turned.clone()).unwrap().unwrap();
            let buckets = buckets.reshape([batch * heads, rounds, length]);
            let expected = counting_argsort_rounds(buckets, 2 * half, room)
                .unwrap()
                .unwrap();
            let all = |x: ArgsortRounds| [x.tokens, x.places, x.choices].map(read_ints);
            assert_eq!(all(sorted), all(expected), "{length}, {half}, {dtype:?}");
            refused! { lsh_argsort(rows, turned, length - 1) => "…room…"; }
        }
    }
}

/// Permutations of the rows, with places that have none; a row of zeros stays one. Rows have two users, and a few among many.
pub fn keyed_rows_equal_burns_operations(devices: &[Device]) {
    check_keyed_rows(devices, [16, 24], 2, &[(0, 5), (1, 8)]);
    let few = [(0, 5), (9, 8), (31, 2), (32, 4), (69, 10)];
    check_keyed_rows(devices, [64, 48], 70, &few);
}

/// Rows have `most` users or fewer: in each round one at a place of its own, of rows that are so many apart.
fn check_keyed_rows(
    devices: &[Device],
    [dim, value_dim]: [usize; 2],
    most: usize,
    rounds: &[(usize, usize)],
) {
    let [batch, heads, rows] = [2, 2, 21];
    let places = rounds.len() * (rows + 1) + 1;
    // What is more than a few is as sorting clusters leaves it.
    let turned = most > 2;
    let mut rng = seeded(81);
    let mut index = vec![-1; batch * heads * places];
    let mut users = vec![-1; batch * heads * rows * most];
    for list in 0..batch * heads {
        for (round, &(number, step)) in rounds.iter().enumerate() {
            // Some rows have more users than others.
            for row in (0..rows).filter(|row| round < 2 || row % (round + 1) == 0) {
                let place = round * (rows + 1) + row * step % rows;
                index[list * places + place] = row as i32;
                let at = match turned {
                    true => (list * most + number) * rows + row,
                    false => (list * rows + row) * most + number,
                };
                users[at] = place as i32;
            }
        }
    }
    let mut random = |count: usize| drawn(&mut rng, count, -1.0f32..1.0);
    let groups = batch * heads;
    let mut x = random(groups * rows * dim);
    x[dim..2 * dim].fill(0.0);
    let value = random(groups * rows * value_dim);
    let by = [dim, dim, value_dim].map(|width| random(groups * places * width));
    let by_means = random(groups * rows * value_dim);
    for device in devices {
        let device = device.clone().autodiff();
        let index = ints(&index, [batch, heads, places], &device);
        let users = match turned {
            true => ints(&users, [batch, heads, most, rows], &device).swap_dims(2, 3),
            false => ints(&users, [batch, heads, rows, most], &device),
        };
        let run = |at_once: bool| {
            let x = floats(&x, [batch, heads, rows, dim], &device).require_grad();
            let value = floats(&value, [batch, heads, rows, value_dim], &device).require_grad();
            let at = |x: &Tensor<4>| gather_rows(x.clone(), index.clone(), users.clone()).unwrap();
            let taken = match at_once {
                true => {
                    let given = (index.clone(), users.clone());
                    gather_qkv(x.clone(), value.clone(), given.0, given.1).unwrap()
                }
                false => {
                    let query = at(&x);
                    let square = query.clone().powi_scalar(2).sum_dim(3).clamp_min(1e-24);
                    [query.clone(), query / square.sqrt(), at(&value)]
                }
            };
            let given = (taken[2].clone(), index.clone(), users.clone());
            let means = match at_once {
                true => segment_mean(given.0, given.1, given.2).unwrap(),
                false => {
                    let counts = users.clone().greater_equal_elem(0).int().sum_dim(3);
                    let counts = counts.clamp_min(1).float();
                    segment_sum(given.0, given.1, given.2).unwrap() / counts
                }
            };
            let dims = taken.each_ref().map(|x| x.dims());
            let mut loss =
                (means.clone() * floats(&by_means, [batch, heads, rows, value_dim], &device)).sum();
            for ((x, by), dims) in taken.iter().zip(&by).zip(dims) {
                loss = loss + (x.clone() * floats(by, dims, &device)).sum();
            }
            let grads = loss.backward();
            let [query, key, values] = taken.map(|x| x.into_data());
            let by = |x: &Tensor<4>| x.grad(&grads).unwrap().into_data();
            [query, key, values, means.into_data(), by(&x), by(&value)]
        };
        let names = ["query", "key", "value", "means", "by x", "by value"];
        for ((name, got), expected) in names.into_iter().zip(run(true)).zip(run(false)) {
            // What a row of zeros has is as large as 10¹².
            let scale = if name == "by x" { 1e-12 } else { 1.0 };
            let scaled = |x: TensorData| -> Vec<f64> {
                to_f64(x)
                    .into_iter()
                    .map(|x| if x.abs() > 1e6 { x * scale } else { x })
                    .collect()
            };
            let what = format!("{device:?}, {name}");
            let got = scaled(got);
            let count = got.len();
            let got = TensorData::new(got, [count]);
            assert_close(&what, got, &scaled(expected), 2e-5);
        }
        let wrong = Tensor::zeros([batch, heads, rows + 1, dim], &device);
        let x = Tensor::zeros([batch, heads, rows, dim], &device);
        refused! { gather_qkv(x, wrong, index, users) => "…value's rows…"; }
    }
}
