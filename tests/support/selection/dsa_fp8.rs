//! An indexer's queries and keys in fp8: rotated and rounded rows, and selections by them.

use burn_sparse_select::dsa::{Dsa, DsaIndex, DsaTarget, HadamardFp8};

use crate::judge::dsa::{Problem, dsa_of};
use crate::prelude::*;
use crate::selection::dsa::{assert_choices, rows};

/// Rows equal the host's bit for bit, scores equal f64 on these rows, selections follow the scores, and all are close to the unrounded ones.
pub fn dsa_in_fp8(devices: &[Device]) {
    // Heads of the indexer and their width; queries and keys; numbers of kept keys and of near ones; scores in memory at a time.
    let sizes = [
        ([3, 8], [70, 70], [9, 4], 900),
        ([5, 64], [30, 90], [40, 0], 1 << 20),
        ([64, 128], [65, 530], [290, 9], 530 * 40),
        ([8, 128], [40, 300], [64, 0], 1 << 20),
        ([2, 256], [20, 61], [33, 1], 1 << 20),
    ];
    for device in devices {
        // fp8 tensor cores sum with fewer digits.
        let tensor_cores = is_cuda(device);
        for (number, (of_index, seq, [keep, near], numbers)) in (0..).zip(sizes) {
            // Each size has one half-precision dtype.
            let halves = half_dtypes(device).into_iter().enumerate();
            let half = halves.filter(|(at, _)| number % 2 == *at);
            let exact = exact_dtypes(device).into_iter().map(|(dtype, _)| dtype);
            for dtype in exact.chain(half.map(|(_, dtype)| dtype)) {
                let what = format!("{device:?}, {dtype:?}, {of_index:?}, {seq:?}");
                let problem = Problem::of([4, 2, 5], of_index, seq).filled(11_900 + number as u64);
                let problem = problem.rounded(dtype);
                let index = problem.index(device, dtype).in_fp8().unwrap();
                assert!(index.is_in_fp8());
                assert_eq!([index.q.dtype(), index.k.dtype()], [dtype; 2]);
                let mut expected = problem.clone();
                for (part, tensor, of) in [
                    (0, &index.q, HadamardFp8::Queries),
                    (1, &index.k, HadamardFp8::Keys),
                ] {
                    let numbers = problem.index[part].iter().map(|&x| x as f32);
                    let mut numbers: Vec<f32> = numbers.collect();
                    of.round(&mut numbers, of_index[1]);
                    expected.index[part] = numbers.into_iter().map(f64::from).collect();
                    let found = to_f64(tensor.clone().into_data());
                    assert_eq!(found, expected.index[part], "{what}, {of:?}");
                }
                // Rounding is idempotent.
                let again = index.clone().in_fp8().unwrap();
                assert_eq!(again.q.to_data(), index.q.to_data());

                let dsa = dsa_of([keep, near], numbers);
                let scores = to_f64(dsa.scores(&index).into_data());
                let lists = dsa.choose(&index).unwrap();
                let tolerance = match tensor_cores {
                    true => 4e-3,
                    false => 10.0 * product_tolerance(device, dtype, 2e-6),
                };
                let (mut same, mut all) = (0, 0);
                let chosen = rows(&lists);
                let of = (&problem, &expected);
                assert_choices(&what, of, &scores, &chosen, [keep, near], tolerance);
                for (query, chosen) in chosen.iter().enumerate() {
                    let (exact, _) = problem.choice(query, keep, near);
                    all += exact.len();
                    same += chosen.iter().filter(|key| exact.contains(key)).count();
                }
                let share = same as f64 / all as f64;
                assert!(share > 0.9, "{what}: {share} of the keys");
            }
        }
    }
}

/// Rows with one large element, zero, infinite or NaN rows.
pub fn dsa_in_fp8_of_any_rows(devices: &[Device]) {
    let (rows, width) = (40, 32);
    let mut problem = Problem::of([1, 1, 4], [1, width], [rows, rows]).filled(11_990);
    for (at, number) in problem.index[1].iter_mut().enumerate() {
        let (row, column) = (at / width, at % width);
        let special = match (row, column) {
            (3, 7) => 3e30,
            (4, 31) => f64::INFINITY,
            (5, 0) => f64::NAN,
            (6, _) => 0.0,
            (7, _) => *number * 1e-30,
            (8, _) => -448.0,
            _ => *number,
        };
        *number = f64::from(special as f32);
    }
    let mut numbers: Vec<f32> = problem.index[1].iter().map(|&x| x as f32).collect();
    HadamardFp8::Keys.round(&mut numbers, width);
    for device in devices {
        let index = problem.index(device, DType::F32).in_fp8().unwrap();
        let found: Vec<f32> = read(index.k.clone()).iter().collect();
        for (row, (found, expected)) in found.chunks(width).zip(numbers.chunks(width)).enumerate() {
            let is_same = |(a, b): (&f32, &f32)| a == b || a.is_nan() && b.is_nan();
            let same = found.iter().zip(expected).all(is_same);
            assert!(same, "{device:?}, {row}: {found:?}, {expected:?}");
        }
        // There is a selection all the same.
        let lists = Dsa::new(30).unwrap().choose(&index).unwrap();
        assert_eq!(lists.keys().dims(), [1, 1, rows, 30]);
    }
}

/// On an autodiff device the fp8 index is a constant. Errors for unsupported inputs.
pub fn dsa_in_fp8_errors(devices: &[Device]) {
    let dsa = Dsa::new(4).unwrap();
    for device in devices {
        let device = device.clone().autodiff();
        let zeros = |shape: [usize; 4]| Tensor::<4>::zeros(shape, (&device, DType::F32));
        let index = |width| {
            let weights = Tensor::<3>::zeros([1, 2, 8], (&device, DType::F32));
            let (q, k) = (zeros([1, 2, 8, width]), zeros([1, 1, 8, width]));
            DsaIndex::new(q.require_grad(), k, weights).unwrap()
        };
        for width in [4, 6, 24, 512] {
            let expected = format!(
                "index q's index_dim must be a power of two from 8 to 256, for fp8, got {width}"
            );
            refused! { index(width).in_fp8() => expected; }
        }
        let rounded = index(16).in_fp8().unwrap();
        assert!(rounded.q.is_autodiff() && !rounded.q.is_require_grad());
        let (q, k) = (zeros([1, 2, 8, 4]), zeros([1, 1, 8, 4]));
        let error = dsa.loss(&rounded, [&q, &k], None, DsaTarget::All);
        refused! { error => "index must be one that is not in fp8, which has no gradient, got one in fp8"; }
        let other = rounded.with_keys(zeros([1, 1, 20, 16])).unwrap();
        assert!(other.is_in_fp8());
        let lists = dsa.choose(&other).unwrap();
        assert_eq!(lists.seq_kv(), 20);
        let wide = zeros([1, 1, 20, 8]);
        refused! { other.with_keys(wide) => "…index k's index_dim…"; }
    }
}
