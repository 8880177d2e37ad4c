//! Rows split into heads and joined, against loops over all indices.

use burn_fused_ops::{join_heads, split_heads};

use crate::prelude::*;
use crate::training::case::*;

/// Heads and their widths.
type Parts<'a> = &'a [(usize, usize)];

fn width_of(parts: Parts<'_>) -> usize {
    parts.iter().map(|(heads, dim)| heads * dim).sum()
}

/// Calls `visit` with the part, the index in the part and the index in x of each element.
fn each_place(
    [batch, seq]: [usize; 2],
    parts: Parts<'_>,
    mut visit: impl FnMut(usize, usize, usize),
) {
    let width = width_of(parts);
    let mut start = 0;
    for (part, &(heads, dim)) in parts.iter().enumerate() {
        for at in 0..batch * heads * seq * dim {
            let (entry, head) = (at / dim / seq / heads, at / dim / seq % heads);
            let row = entry * seq + at / dim % seq;
            visit(part, at, row * width + start + head * dim + at % dim);
        }
        start += heads * dim;
    }
}

/// Makes a case of parts of x, of which some may be unused.
fn case<'a>(rows: [usize; 2], parts: Parts<'a>, bias: bool, unused: &[usize]) -> Case<'a> {
    let [batch, seq] = rows;
    let width = width_of(parts);
    let call = move |x: &mut Tensors| {
        let (x, bias) = (x.take(), bias.then(|| x.take()));
        let parts = split_heads(x, bias, parts).unwrap();
        parts.into_iter().map(Made::from).collect()
    };
    let judge = move |x: &[Vec<f64>], grads: &[Vec<f64>]| {
        let mut results: Vec<Vec<f64>> = grads.iter().map(|by| vec![0.0; by.len()]).collect();
        let (mut dx, mut by_bias) = (vec![0.0; x[0].len()], vec![0.0; width]);
        each_place(rows, parts, |part, at, place| {
            let bias = x.get(1).map_or(0.0, |bias| bias[place % width]);
            results[part][at] = x[0][place] + bias;
            dx[place] = grads[part][at];
            by_bias[place % width] += dx[place];
        });
        results.push(dx);
        results.extend(bias.then_some(by_bias));
        results
    };
    let what = format!("{batch} × {seq}, {parts:?}, unused {unused:?}");
    let case = Case::new(what, call, judge)
        .input("x", 0, &[batch, seq, width], 41)
        .input_if(bias, "bias", 1, &[width], 42);
    (parts.iter().enumerate()).fold(case, |case, (part, &(heads, dim))| {
        let shape = [batch, heads, seq, dim];
        let grad = (!unused.contains(&part)).then_some(43 + part as u64);
        case.result(&format!("part {part}"), 0, &shape, grad)
    })
}

/// Compares. Moved elements are not rounded: the gradient with respect to x, and parts without a bias.
fn check(case: &Case<'_>, device: &Device, dtypes: [DType; 2], parts: usize, tolerance: f64) {
    let compared = case.compared(device, &dtypes);
    let bias = compared.len() > parts + 1;
    for (index, (what, got, expected)) in compared.into_iter().enumerate() {
        let moved = index == parts || (index < parts && !bias);
        let tolerance = if moved { 0.0 } else { tolerance };
        assert_close(&what, got, &expected, tolerance);
    }
}

/// One part to three, of different numbers of heads and widths; empty parts.
const PARTS: [&[(usize, usize)]; 9] = [
    &[(1, 1)],
    &[(5, 3)],
    &[(4, 16), (2, 16), (2, 16)],
    &[(2, 48), (1, 64), (3, 3)],
    &[(3, 3), (8, 64)],
    &[(8, 64)],
    &[(2, 16), (0, 16), (1, 48)],
    &[(4, 0), (2, 8)],
    &[(3, 16), (3, 16), (3, 16)],
];

/// Batches and sequences.
const ROWS: [[usize; 2]; 9] = [
    [1, 1],
    [2, 7],
    [3, 100],
    [300, 1],
    [1, 130],
    [2, 33],
    [2, 5],
    [3, 9],
    [1, 1000],
];

/// The parts and the gradients with respect to x and the bias, with all parts used and all but one.
pub fn heads_equal_f64(devices: &[Device]) {
    let qkv = [(4, 16), (2, 16), (2, 16)];
    let mut cases: Vec<([usize; 2], Parts<'_>, bool, Vec<usize>)> = vec![
        // The last alone.
        ([2, 9], &qkv, true, vec![0, 1]),
        // No rows: sums are 0.
        ([0, 5], &qkv, true, vec![]),
        ([2, 0], &qkv[..1], true, vec![]),
        // Several steps of a cube along the rows, across batch entries.
        ([3, 1100], &[(13, 77)], true, vec![]),
    ];
    for (parts, rows) in PARTS.into_iter().zip(ROWS) {
        for bias in [false, true] {
            cases.push((rows, parts, bias, vec![]));
            if parts.len() > 1 {
                let unused = (rows[1] + usize::from(bias)) % parts.len();
                cases.push((rows, parts, bias, vec![unused]));
            }
        }
    }
    for (rows, parts, bias, unused) in cases {
        let case = case(rows, parts, bias, &unused);
        for (device, dtype, tolerance) in exact(devices) {
            check(&case, device, [dtype; 2], parts.len(), tolerance);
        }
    }
}

/// Half precision, and a bias of another dtype than x.
pub fn heads_in_half_precision(devices: &[Device]) {
    let three: Parts<'_> = &[(2, 48), (1, 64), (3, 3)];
    for (device, half) in halves(devices) {
        for dtypes in [[half; 2], [half, DType::F32], [DType::F32, half]] {
            for parts in [three, &[(4, 16)]] {
                let case = case([2, 40], parts, true, &[]);
                check(&case, device, dtypes, parts.len(), unit(half));
            }
        }
    }
    for device in with(devices, DType::F64) {
        for dtypes in [[DType::F64, DType::F32], [DType::F32, DType::F64]] {
            check(&case([2, 40], three, true, &[]), device, dtypes, 3, 1e-5);
        }
    }
}

/// Joining is the inverse of splitting, and its gradient is a split.
pub fn joined_heads_equal_f64(devices: &[Device]) {
    for (parts, rows) in PARTS.into_iter().zip(ROWS) {
        let ([batch, seq], [(heads, dim)]) = (rows, [parts[0]]);
        let (joined, split) = ([batch, seq, heads * dim], [batch, heads, seq, dim]);
        let call = |x: &mut Tensors| {
            let x = x.take();
            let joined = join_heads(x.clone()).unwrap();
            // Split after join is the identity.
            let back = split_heads(joined.clone(), None, &parts[..1]).unwrap();
            read(back[0].clone()).assert_eq(&read(x), true);
            vec![joined.into()]
        };
        let judge = |x: &[Vec<f64>], grads: &[Vec<f64>]| {
            let mut all = vec![vec![0.0; x[0].len()]; 2];
            each_place(rows, &parts[..1], |_, at, place| {
                all[0][place] = x[0][at];
                all[1][at] = grads[0][place];
            });
            all
        };
        let case = Case::new(format!("joined, {rows:?}, {:?}", parts[0]), call, judge)
            .input("x", 0, &split, 43)
            .result("joined", 0, &joined, 41);
        let exact = exact(devices).map(|(device, dtype, _)| (device, dtype));
        for (device, dtype) in exact.chain(halves(devices)) {
            case.check_in(device, dtype, 0.0);
        }
        case.gives_the_same_bits(devices, 0.0);
    }
}

/// Equal bits whatever the strides, and frozen inputs.
pub fn heads_bits_and_constants(devices: &[Device]) {
    let parts = [(2, 48), (1, 64), (3, 4)];
    case([6, 50], &parts, true, &[]).gives_the_same_bits(devices, 0.0);
    case([2, 9], &[(2, 3), (1, 4)], true, &[]).has_constants(devices, 0.0);
}

/// Plans describe in words what will run.
pub fn heads_plans(devices: &[Device]) {
    for device in devices {
        let x = Tensor::<3>::zeros([2, 10, 128], device);
        let bias = Tensor::<1>::zeros([128], device);
        let parts = [(4, 16), (2, 16), (2, 16)];
        for (bias, parts) in [(Some(&bias), &parts[..]), (None, &[(8, 16)])] {
            let plan = burn_fused_ops::explain::split_heads(&x, bias, parts);
            assert_plan(&plan.unwrap(), device);
        }
    }
}
