//! Rows that means attract, against f64 on the host.

use burn_blocksparse::internal::runs_kernels;
use burn_sparse_select::internal::{TopKPerCentroid, topk_per_centroid};

use crate::prelude::*;

/// What a similarity may be off, of means that are no longer than 4.
const OFF: f64 = 6e-5;

/// Rows, and means of each head.
#[derive(Clone, Copy, Debug)]
struct Sizes {
    batch: usize,
    heads: usize,
    length: usize,
    width: usize,
    means: usize,
    most: usize,
}

const fn sizes(
    [batch, heads]: [usize; 2],
    [length, width]: [usize; 2],
    [means, most]: [usize; 2],
) -> Sizes {
    Sizes {
        batch,
        heads,
        length,
        width,
        means,
        most,
    }
}

/// Vectors of four numbers, two and one; several tiles of rows, of means and of numbers; all rows and one; rows that tensor cores take, and others.
const CASES: [Sizes; 7] = [
    sizes([2, 2], [70, 16], [5, 9]),
    sizes([2, 1], [150, 36], [70, 33]),
    sizes([1, 2], [129, 7], [3, 129]),
    sizes([1, 1], [2100, 64], [4, 128]),
    sizes([1, 3], [64, 66], [64, 1]),
    sizes([1, 2], [200, 200], [9, 20]),
    sizes([2, 1], [300, 40], [130, 30]),
];

/// Lists are of the most similar rows, but for those that differ by less than what similarities are off; a mean that stands twice is nearest once.
pub fn attracted_rows_equal_f64(devices: &[Device]) {
    for case in CASES {
        let mut rng = seeded(8300 + case.length as u64);
        let mut random = |count: usize| drawn(&mut rng, count, -1.0f32..1.0);
        let Sizes {
            batch,
            heads,
            length,
            width,
            means: count,
            ..
        } = case;
        let mut x = random(batch * heads * length * width);
        // A row of zeros, and a long one.
        x[width..2 * width].fill(0.0);
        x[2 * width..3 * width].iter_mut().for_each(|x| *x *= 1e3);
        let mut means = random(heads * count * width);
        means.iter_mut().for_each(|x| *x *= 0.4);
        let (first, second) = means.split_at_mut(width);
        second[..width].copy_from_slice(first);
        for (device, dtype) in with_each(devices, &[DType::F32, DType::BF16]) {
            let rows = floats(&x, [batch, heads, length, width], device).cast(dtype);
            let given = floats(&means, [heads, count, width], device);
            let Some(found) = topk_per_centroid(rows.clone(), given, case.most).unwrap() else {
                assert!(!runs_kernels(device));
                continue;
            };
            let (what, rows) = (
                format!("{case:?}, {device:?}, {dtype:?}"),
                to_f64(rows.into_data()),
            );
            check(&what, case, found, &rows, &means);
        }
    }
}

fn check(what: &str, of: Sizes, found: TopKPerCentroid, rows: &[f64], means: &[f32]) {
    let (lists, places) = (read_ints(found.rows), read_ints(found.places));
    let nearest = read_ints(found.nearest);
    for list in 0..of.batch * of.heads {
        let head = list % of.heads;
        let rows = &rows[list * of.length * of.width..][..of.length * of.width];
        let similarity = |mean: usize, row: usize| -> f64 {
            let row = &rows[row * of.width..][..of.width];
            let mean = &means[(head * of.means + mean) * of.width..][..of.width];
            let product: f64 = row.iter().zip(mean).map(|(x, &m)| x * f64::from(m)).sum();
            product / dot(row, row).max(1e-24).sqrt()
        };
        for mean in 0..of.means {
            let own = &lists[(list * of.means + mean) * of.most..][..of.most];
            assert!(own.is_sorted_by(|a, b| a < b), "{what}, {mean}: {own:?}");
            let places = &places[(list * of.means + mean) * of.length..][..of.length];
            for (row, &place) in places.iter().enumerate() {
                let expected = own.binary_search(&(row as i32)).ok();
                let expected = expected.map_or(-1, |at| (mean * of.most + at) as i32);
                assert_eq!(place, expected, "{what}, {mean}, {row}");
            }
            let of_rows = |is_listed: bool| {
                let rows = (0..of.length).filter(move |&row| (places[row] >= 0) == is_listed);
                rows.map(|row| similarity(mean, row))
            };
            let lowest = of_rows(true).fold(f64::MAX, f64::min);
            let highest = of_rows(false).fold(f64::MIN, f64::max);
            assert!(
                lowest > highest - OFF,
                "{what}, {mean}: {lowest}, {highest}"
            );
        }
        for row in 0..of.length {
            let got = nearest[list * of.length + row] as usize;
            assert_eq!(got / of.means, head, "{what}, {row}");
            let all = (0..of.means).map(|mean| similarity(mean, row));
            let highest = all.fold(f64::MIN, f64::max);
            let got = got % of.means;
            assert!(similarity(got, row) > highest - OFF, "{what}, {row}: {got}");
            assert!(head > 0 || got != 1, "{what}, {row}: the second of two");
        }
    }
}

/// Of rows that stand several times the earlier ones, NaN last.
pub fn attracted_rows_of_equal_similarities(devices: &[Device]) {
    let [length, width, copies] = [330, 20, 11];
    let mut rng = seeded(8400);
    let few = drawn(&mut rng, copies * width, -1.0f32..1.0);
    let mut x: Vec<f32> = (0..length * width)
        .map(|at| few[at % (copies * width)])
        .collect();
    x[5 * width] = f32::NAN;
    let mean = drawn(&mut rng, width, -1.0f32..1.0);
    let similarity = |row: usize| -> f64 {
        let row = &x[row * width..][..width];
        let square: f64 = row.iter().map(|&x| f64::from(x).powi(2)).sum();
        let products = row
            .iter()
            .zip(&mean)
            .map(|(&x, &m)| f64::from(x) * f64::from(m));
        products.sum::<f64>() / square.sqrt()
    };
    let number = |row: usize| match row {
        5 => f64::NEG_INFINITY,
        // The same for all copies.
        _ => similarity(row % copies + copies),
    };
    let mut order: Vec<usize> = (0..length).collect();
    order.sort_by(|&a, &b| number(b).total_cmp(&number(a)).then(a.cmp(&b)));
    for most in [1, 17, 31, 45, 329, 330] {
        let mut expected: Vec<i32> = order[..most].iter().map(|&row| row as i32).collect();
        expected.sort_unstable();
        for device in with(devices, DType::F32) {
            let rows = floats(&x, [1, 1, length, width], device);
            let means = floats(&mean, [1, 1, width], device);
            let Some(found) = topk_per_centroid(rows, means, most).unwrap() else {
                assert!(!runs_kernels(device));
                continue;
            };
            assert_eq!(read_ints(found.rows), expected, "{device:?}, {most}");
        }
    }
}

/// What does not fit is an error that says so.
pub fn attracted_rows_errors(devices: &[Device]) {
    for device in with(devices, DType::F32) {
        let rows = || Tensor::<4>::zeros([1, 2, 8, 4], device);
        for (means, most, word) in [
            ([2, 3, 5], 1, "means"),
            ([1, 3, 4], 1, "means"),
            ([2, 3, 4], 0, "most"),
            ([2, 3, 4], 9, "most"),
        ] {
            let error = topk_per_centroid(rows(), Tensor::zeros(means, device), most).unwrap_err();
            assert!(error.to_string().contains(word), "{error}");
        }
    }
}
