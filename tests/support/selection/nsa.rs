//! Native sparse attention, against plain f64 loops.

use crate::judge::golden::vals;
use crate::judge::nsa::{CASE, Inputs, Results, TABLE, Tensors, cases};
use crate::prelude::*;
use crate::selection::prefix::Prefix;

/// Returns the tolerance of attention sums against f64 for queries and keys of `dtype`.
fn attention_sum_tolerance(device: &Device, dtype: DType) -> f64 {
    match dtype {
        DType::F16 | DType::BF16 => half_tolerance(dtype),
        // f32 products are tf32 on tensor cores.
        _ => match product_tolerance(device, DType::F32, 1e-5) > 1e-5 {
            true => 5e-3,
            false => 1e-5,
        },
    }
}

/// Returns the blocks that queries selected on a device, `[batch · kv_heads · rows]`, and the number of lists that no rounding can change. Checks
/// that the selections follow the rule for the device's own attention sums, that these equal f64 within `tolerance`, and that selections that no
/// rounding can change equal f64.
pub fn check_choices(
    what: &str,
    inputs: &Inputs,
    expected: &[Vec<f64>],
    found: TensorData,
    picks: Option<&Tensor<4, Int>>,
    tolerance: f64,
) -> (Vec<Vec<usize>>, usize) {
    let flat = expected.concat();
    let sums = format!("{what}: attention sums");
    assert_close(&sums, found.clone(), &flat, tolerance);
    let found = to_f64(found);
    let found: Vec<Vec<f64>> = (found.chunks(inputs.case.blocks()))
        .map(<[f64]>::to_vec)
        .collect();
    let (own, _) = inputs.chosen(&found);
    let picks: Vec<Vec<usize>> = match picks {
        None => vec![Vec::new(); expected.len()],
        Some(blocks) => {
            let most = blocks.dims()[3];
            let picks = read_ints(blocks.clone());
            let row = |row: &[i32]| {
                let blocks = named(row);
                // Padding comes after all blocks.
                assert!(row[blocks.len()..].iter().all(|&b| b == -1), "{what}");
                blocks
            };
            picks.chunks(most).map(row).collect()
        }
    };
    assert_eq!(picks, own, "{what}");
    let (exact, gaps) = inputs.chosen(expected);
    let scale = largest(&flat).max(0.1);
    let mut clear = 0;
    for (at, gap) in gaps.iter().enumerate() {
        if *gap > 2.0 * scale * tolerance {
            assert_eq!(picks[at], exact[at], "{what}, list {at}");
            clear += 1;
        }
    }
    (picks, clear)
}

/// Returns the blocks that queries selected on a device, checked.
fn chosen(inputs: &Inputs, device: &Device, dtype: DType) -> Vec<Vec<usize>> {
    let (case, nsa) = (inputs.case, inputs.case.nsa());
    let what = format!("{}, {device:?}, {dtype:?}", case.name);
    let x = inputs.tensors(device, dtype);
    let keys_values = x.keys_values(&nsa);
    let found = nsa.block_importance(x.q.clone(), &keys_values).unwrap();
    let dims = [case.batch, case.heads[1], case.seq[0], case.blocks()];
    assert_eq!((found.dims(), found.dtype()), (dims, DType::F32), "{what}");
    let lists = nsa.query_lists(x.q, &keys_values).unwrap();
    let picks = lists.as_ref().map(|lists| &lists.blocks);
    let sums = inputs.attention_sums(&inputs.means(&inputs.keys[0], case.dims[0]));
    let tolerance = attention_sum_tolerance(device, dtype);
    check_choices(&what, inputs, &sums, found.into_data(), picks, tolerance).0
}

/// Returns whether no rounding can change the selection of each query, `[batch · heads · rows]`.
fn clear_choices(inputs: &Inputs, tolerance: f64) -> Vec<bool> {
    let ([heads, kv_heads], [rows, _]) = (inputs.case.heads, inputs.case.seq);
    let attention_sums = inputs.attention_sums(&inputs.means(&inputs.keys[0], inputs.case.dims[0]));
    let largest = largest(&attention_sums.concat()).max(0.1);
    let (_, gaps) = inputs.chosen(&attention_sums);
    let group = heads / kv_heads;
    let places = (0..inputs.case.batch * heads * rows).map(|at| {
        let (row, head) = (at % rows, at / rows);
        gaps[head / group * rows + row] > 2.0 * largest * tolerance
    });
    let clear: Vec<bool> = places.collect();
    let count = clear.iter().filter(|clear| **clear).count();
    assert!(count * 4 > clear.len(), "{count} of {}", clear.len());
    clear
}

/// Selections, the output of every branch, their sum and all gradients equal f64.
pub fn nsa_equals_f64(devices: &[Device]) {
    let (part, parts) = shard();
    let cases = cases(CASE, TABLE).into_iter().enumerate();
    for (index, case) in cases.filter(|(index, _)| index % parts == part) {
        let inputs = Inputs::random(case, 9000 + index as u64, DType::F32);
        let mut known = None;
        for (device, dtype, tolerance) in exact(devices) {
            check(&inputs, device, dtype, tolerance, &mut known);
        }
    }
}

/// Selections, and the results over them in f64.
type Solved = (Vec<Vec<usize>>, Results);

/// `known` caches the f64 results for the selections of an earlier device, since most devices select alike.
fn check(
    inputs: &Inputs,
    device: &Device,
    dtype: DType,
    tolerance: f64,
    known: &mut Option<Solved>,
) {
    let chosen = chosen(inputs, device, dtype);
    let (_, expected) = match known.take().filter(|(of, _)| *of == chosen) {
        Some(solved) => known.insert(solved),
        None => known.insert((chosen.clone(), inputs.solve(chosen))),
    };
    let x = inputs.tensors(&device.clone().autodiff(), dtype);
    let got = x.differentiated(&inputs.case.nsa());
    for ((name, got), (of, expected)) in got.into_iter().zip(&*expected) {
        assert_eq!(name, *of);
        let what = format!("{}, {device:?}, {dtype:?}: {name}", inputs.case.name);
        assert_close(&what, got, expected, tolerance);
    }
}

pub fn nsa_in_half_precision(devices: &[Device]) {
    let wide = CASE.with("dims 64 64");
    let wider = wide.with("batch 1, heads 8 2, seq 450 450, compressed 32 16, selected 64");
    for (index, case) in [wide, wider].into_iter().enumerate() {
        for (device, dtype) in halves(devices) {
            let inputs = Inputs::random(case, 9100 + index as u64, dtype);
            check(&inputs, device, dtype, half_tolerance(dtype), &mut None);
        }
    }
}

/// Later tokens change no earlier output, and queries alone see the same as among all.
pub fn nsa_is_prefix_stable(devices: &[Device]) {
    let case = CASE.with("seq 90 90");
    let nsa = case.nsa();
    let inputs = Inputs::random(case, 9300, DType::F32);
    for device in devices {
        let x = inputs.tensors(device, DType::F32);
        let tensors = |queries: &[Tensor<4>], keys: &[Tensor<4>]| Tensors {
            q: queries[0].clone(),
            keys: std::array::from_fn(|branch| keys[branch].clone()),
            values: std::array::from_fn(|branch| keys[3 + branch].clone()),
            gates: queries[1].clone(),
            grad_out: queries[0].clone(),
        };
        let clear = clear_choices(&inputs, attention_sum_tolerance(device, DType::F32));
        let prefix = Prefix {
            what: format!("{device:?}"),
            queries: vec![x.q, x.gates],
            keys: x.keys.into_iter().chain(x.values).collect(),
            attend: &|queries, keys| {
                let x = tensors(queries, keys);
                let keys_values = x.keys_values(&nsa);
                nsa.attention(x.q, keys_values, x.gates).unwrap()
            },
            choose: &|queries, keys| {
                let x = tensors(queries, keys);
                let keys_values = x.keys_values(&nsa);
                nsa.query_lists(x.q, &keys_values).unwrap().unwrap().blocks
            },
            is_clear: &|row| clear[row],
            within: 2e-6,
        };
        prefix.assert_stable();
    }
}

/// Equal calls give equal bits, and batch entries are independent.
pub fn nsa_gives_the_same_bits(devices: &[Device]) {
    let inputs = Inputs::random(CASE.with("batch 3"), 9400, DType::F32);
    let nsa = CASE.nsa();
    for device in devices {
        let device = device.clone().autodiff();
        let run = || inputs.tensors(&device, DType::F32).differentiated(&nsa);
        let (first, again) = (run(), run());
        for ((name, a), (_, b)) in first.iter().zip(&again) {
            assert_eq!(a.as_bytes(), b.as_bytes(), "{device:?}: {name}");
        }
        let x = inputs.tensors(&device, DType::F32);
        let entry = |x: &Tensor<4>| x.clone().narrow(0, 1, 1);
        let alone = Tensors {
            q: entry(&x.q),
            keys: x.keys.each_ref().map(entry),
            values: x.values.each_ref().map(entry),
            gates: entry(&x.gates),
            grad_out: entry(&x.grad_out),
        };
        let out = alone.differentiated(&nsa).into_iter();
        let (_, out) = out.into_iter().find(|(name, _)| name == "out").unwrap();
        let (_, all) = first.iter().find(|(name, _)| name == "out").unwrap();
        let all = to_f64(all.clone());
        let of_entry = all.len() / 3;
        assert_close("a batch entry", out, &all[of_entry..2 * of_entry], 1e-6);
    }
}

const GOLDEN: &str = "batch 1, heads 2 1, seq 16 16, dims 4 4, compressed 4 2, selected 4, keep 3, forced 1 1, window 3";

/// The definition's example in f64: two query heads on one KV head.
pub fn nsa_golden(_: &[Device]) {
    let [q, k, v] = [(0, 2), (1, 1), (2, 1)].map(|(of, heads)| vals(of, heads, 16));
    let inputs = Inputs {
        case: CASE.with(GOLDEN),
        gates: [0.5, 0.25, 0.75].repeat(2 * 16),
        grad_out: vec![1.0; q.len()],
        q,
        keys: std::array::from_fn(|_| k.clone()),
        values: std::array::from_fn(|_| v.clone()),
    };
    let cases = [
        ((32, 16, 64), 1, 3..8, vec![1.0, 2.0, 2.0, 2.0, 1.0]),
        ((4, 2, 4), 1, 1..4, vec![1.0, 2.0, 1.0]),
    ];
    for ((block, stride, selected), of, entries, expected) in cases {
        let mut case = CASE;
        (case.compressed, case.selected) = ([block, stride], selected);
        let got: Vec<f64> = entries.clone().map(|i| case.overlap(i, of)).collect();
        assert_eq!(got, expected);
        let others = (0..20).filter(|i| !entries.contains(i));
        assert!(others.map(|i| case.overlap(i, of)).all(|x| x == 0.0));
    }
    let keys = inputs.means(&inputs.keys[0], 4);
    let p = inputs.compressed_attention(&keys);
    let attention_sums = inputs.attention_sums(&keys);
    let (chosen, _) = inputs.chosen(&attention_sums);
    for (position, seen) in [(2, 0), (3, 1), (7, 3), (15, 7)] {
        let row = &p[position * 7..][..7];
        assert_eq!(row.iter().filter(|p| **p > 0.0).count(), seen);
    }
    let row = |head: usize, position: usize| &p[(head * 16 + position) * 7..][..7];
    assert_printed("p 7, h0", &row(0, 7)[..3], &[0.3164, 0.3915, 0.2921]);
    assert_printed("p 7, h1", &row(1, 7)[..3], &[0.2771, 0.2608, 0.4622]);
    let h0 = [0.1232, 0.1635, 0.1717, 0.1785, 0.1469, 0.1196, 0.0965];
    assert_printed("p 15, h0", row(0, 15), &h0);
    let h1 = [0.1529, 0.1290, 0.1253, 0.1224, 0.1376, 0.1556, 0.1771];
    assert_printed("p 15, h1", row(1, 15), &h1);
    let of_7 = [1.8392, 2.1608];
    let of_15 = [0.8448, 1.1875, 1.1452, 0.8224];
    assert_printed("attention sums of 7", &attention_sums[7][..2], &of_7);
    assert_printed("attention sums of 15", &attention_sums[15], &of_15);
    // Besides the first block and its own.
    assert_eq!(chosen[15], [1]);
    let printed = [
        [
            [-0.1631, -0.2091, 0.1039, -0.2857],
            [-0.1011, -0.1213, 0.2874, -0.0320],
            [-0.1234, 0.3874, -0.3235, -1.0344],
            [-0.1994, 0.1556, -0.1188, -0.9266],
        ],
        [
            [-0.2352, -0.1490, 0.0397, -0.3247],
            [-0.1626, -0.2709, 0.1761, -0.1028],
            [-0.0615, 0.1751, -0.4031, -0.9813],
            [-0.2044, -0.0109, -0.2384, -0.9240],
        ],
    ];
    let solved = inputs.solve(chosen);
    let names = ["branch 0", "branch 1", "branch 2", "out"];
    for (branch, name) in names.iter().enumerate() {
        let (_, got) = solved.iter().find(|(of, _)| of == name).unwrap();
        for (head, printed) in printed.iter().enumerate() {
            let last = (head * 16 + 15) * 4;
            assert_printed(name, &got[last..][..4], &printed[branch]);
        }
    }
}
