//! Two-stage selections of DeepSeek sparse attention, blocks first, against plain f64 loops.

use burn_sparse_select::dsa::{Dsa, DsaIndex, DsaLists};

use crate::judge::dsa::{Problem, dsa_of};
use crate::prelude::*;
use crate::selection::dsa::rows;

/// Externally computed values.
pub fn dsa_blocks_golden(_: &[Device]) {
    let problem = Problem::golden();
    let printed = [-0.4483, -0.1184, -0.1438];
    let scores = problem.block_scores(15, 4, DType::F64);
    assert_printed("blocks of row 15", &scores[1..], &printed);
    // Without blocks it would be 4 instead of 14; both keys have score 0.
    let (chosen, _) = problem.choice_in_blocks(15, [5, 0], [3, 4], DType::F64);
    assert_eq!(chosen, [0, 1, 2, 8, 14]);
}

/// Heads of the indexer and their width; queries and keys; numbers of kept keys and of near ones; number and size of blocks; scores in memory at a
/// time.
type Sizes = ([usize; 2], [usize; 2], [usize; 2], [usize; 2], usize);

/// Selections of any sizes equal f64 unless a rounding decides: batches, few queries and many, near keys that reach into earlier blocks, a partial
/// last block, and few scores in memory at a time.
pub fn dsa_choices_in_blocks_equal_f64(devices: &[Device]) {
    let sizes = [
        ([3, 6], [70, 70], [9, 0], [3, 8], 1 << 24),
        ([3, 8], [33, 90], [16, 12], [5, 8], 900),
        ([1, 5], [1, 77], [5, 1], [3, 5], 1 << 24),
        ([2, 16], [150, 1100], [100, 17], [5, 48], 20_000),
    ];
    for device in devices {
        for (seed, sizes) in (12_000..).zip(sizes) {
            let exact = exact_dtypes(device).into_iter().map(|(dtype, _)| dtype);
            for dtype in exact.chain(half_dtypes(device)) {
                compare(sizes, 2, device, dtype, seed);
            }
        }
    }
}

/// Like [`dsa_choices_in_blocks_equal_f64`], with so many queries that kernels process blocks one after the other, on devices that have them.
pub fn dsa_wide_choices_in_blocks_equal_f64(devices: &[Device]) {
    let sizes = [
        ([64, 128], [128, 520], [60, 1], [3, 128], 384 * 70),
        ([16, 128], [140, 300], [100, 0], [3, 64], 1 << 24),
        ([32, 128], [128, 1100], [40, 0], [3, 256], 1 << 24),
    ];
    for device in devices {
        for (number, sizes) in sizes.into_iter().enumerate() {
            // f64 loops take long: each size has one dtype, and one has a batch.
            let dtypes = half_dtypes(device).into_iter().skip(number % 2).take(1);
            for dtype in dtypes {
                let entries = if number == 1 { 2 } else { 1 };
                compare(sizes, entries, device, dtype, 12_050 + number as u64);
            }
        }
    }
}

/// Compares the selections of a batch with f64 loops; in half precision also those in fp8, with the device's fp8 rows.
fn compare(sizes: Sizes, entries: u64, device: &Device, dtype: DType, seed: u64) {
    let (of_index, seq, [keep, near], [blocks, block], numbers) = sizes;
    let dsa = dsa_of([keep, near], numbers);
    let dsa = dsa.with_blocks(blocks, block).unwrap();
    let shape = Problem::of([1, 1, 4], of_index, seq);
    let problem = |entry| shape.clone().filled(seed + 100 * entry).rounded(dtype);
    let mut problems: Vec<Problem> = (0..entries).map(problem).collect();
    let index = Problem::index_of(&problems, device, dtype);
    let what = format!("{device:?}, {dtype:?}, {of_index:?}, {seq:?}");
    let tolerance = 10.0 * product_tolerance(device, DType::F32, 2e-6);
    check(&what, &dsa, &index, &problems, dtype, tolerance);
    if of_index[1] % 8 == 0 && dtype.size() == 2 {
        let index = index.in_fp8().unwrap();
        for (part, x) in [(0, &index.q), (1, &index.k)] {
            let all = to_f64(x.clone().into_data());
            let rows = all.chunks(all.len() / problems.len());
            for (problem, rows) in problems.iter_mut().zip(rows) {
                problem.index[part] = rows.to_vec();
            }
        }
        let what = format!("{what}, in fp8");
        check(&what, &dsa, &index, &problems, dtype, tolerance);
    }
}

/// Panics if the selections of a batch are not those of its problems.
fn check(
    what: &str,
    dsa: &Dsa,
    index: &DsaIndex,
    problems: &[Problem],
    dtype: DType,
    tolerance: f64,
) {
    let [seq_q, seq_kv] = problems[0].seq;
    let lists = dsa.choose(index).unwrap();
    assert!(lists.is_causal() && lists.seq_kv() == seq_kv);
    let chosen = rows(&lists);
    assert_eq!(chosen.len(), problems.len() * seq_q);
    let mut compared = 0;
    for (at, chosen) in chosen.iter().enumerate() {
        let (problem, query) = (&problems[at / seq_q], at % seq_q);
        let of = ([dsa.keep(), dsa.near()], dsa.blocks().unwrap());
        let (expected, gap) = problem.choice_in_blocks(query, of.0, of.1, dtype);
        assert_eq!(chosen.len(), expected.len(), "{what}: {at}");
        if gap > 2.0 * tolerance {
            assert_eq!(*chosen, expected, "{what}: {at}");
            compared += 1;
        }
    }
    let is_rounded = tolerance > 1e-3;
    let all = chosen.len();
    assert!(is_rounded || compared * 2 >= all, "{what}: {compared}");
}

/// If queries select all blocks, or see no more than they select, only keys are selected; ties go to the earlier block and the earlier key.
pub fn dsa_blocks_of_all_keys(devices: &[Device]) {
    let problem = Problem::random(12_100, [60, 90]);
    let dsa = Dsa::new(8).unwrap().with_near(2).unwrap();
    for (device, dtype, _) in exact(devices) {
        let index = problem.index(device, dtype);
        let all = dsa.choose(&index).unwrap().keys().to_data();
        for (blocks, block) in [(12, 8), (6, 16), (3, 30), (usize::MAX, 1)] {
            let found = dsa.with_blocks(blocks, block).unwrap().choose(&index);
            assert_eq!(found.unwrap().keys().to_data(), all, "{device:?}, {block}");
        }
        let few = rows(&dsa.with_blocks(5, 16).unwrap().choose(&index).unwrap());
        for (query, few) in few.iter().enumerate().take(80 - 30) {
            assert_eq!(*few, problem.choice(query, 8, 2).0, "{device:?}, {query}");
        }
        let mut equal = problem.clone();
        equal.index[2].fill(0.0);
        let in_blocks = dsa.with_blocks(4, 5).unwrap();
        let found = rows(&in_blocks.choose(&equal.index(device, dtype)).unwrap());
        assert_eq!(found[59], [0, 1, 2, 3, 4, 5, 88, 89], "{device:?}");
    }
}

/// Among listed keys: queries of sequences of unequal lengths select as each does alone.
pub fn dsa_in_blocks_of_lists(devices: &[Device]) {
    let (lengths, listed, width) = ([61, 9, 40, 1, 80], 80, 6);
    let problems = (0..).zip(lengths).map(|(seed, length)| {
        Problem::of([1, 1, 4], [3, width], [1, length]).filled(12_300 + seed)
    });
    let problems: Vec<Problem> = problems.collect();
    let dsa = Dsa::new(8).unwrap().with_near(1).unwrap();
    let dsa = dsa.with_blocks(3, 8).unwrap();
    let of = |part| Problem::parts(&problems, part);
    // The keys of each sequence follow those of the one before, in reverse order.
    let (mut slots, mut ends) = (Vec::new(), Vec::new());
    let mut end = 0;
    for length in lengths {
        end += length;
        slots.extend((0..listed as i32).map(|at| match (at as usize) < length {
            true => end as i32 - 1 - at,
            false => -1,
        }));
        ends.push(end);
    }
    let mut keys = of(1);
    for (&end, length) in ends.iter().zip(lengths) {
        let own = &mut keys[(end - length) * width..end * width];
        let turned: Vec<f64> = own.chunks(width).rev().flatten().copied().collect();
        own.copy_from_slice(&turned);
    }
    let count = lengths.len();
    for (device, dtype, _) in exact(devices) {
        let index = DsaLists {
            q: tensor(&of(0), [1, count, 3, width], device, dtype).squeeze_dim(0),
            weights: tensor(&of(2), [1, count, 3], device, dtype).squeeze_dim(0),
            keys: tensor(&keys, [1, 1, keys.len() / width, width], device, dtype)
                .reshape([-1, width as i32]),
            slots: ints(&slots, [count, listed], device),
            seen: ints(&lengths.map(|length| length as i32), [count], device),
        };
        let places = read_ints(dsa.choose_in_lists(&index).unwrap());
        let mut compared = 0;
        for (query, places) in places.chunks(8).enumerate() {
            let (expected, gap) = problems[query].choice_in_blocks(0, [8, 1], [3, 8], dtype);
            if gap > 1e-4 {
                assert_eq!(named(places), expected, "{device:?}, {query}");
                compared += 1;
            }
        }
        assert!(compared > 3, "{compared}");
    }
}

/// Errors for wrong numbers.
pub fn dsa_in_blocks_errors(_: &[Device]) {
    let dsa = Dsa::new(20).unwrap().with_near(9).unwrap();
    let blocks = dsa.with_blocks(4, 8).unwrap();
    assert_eq!(blocks.blocks(), Some([4, 8]));
    refused! {
        dsa.with_blocks(8, 0) => "…block must be at least 1…";
        dsa.with_blocks(2, 8) => "…blocks must be at least 3, the first,…";
        dsa.with_blocks(4, 4) => "…blocks must be at least 5, the first,…";
        Dsa::new(1).unwrap().with_blocks(1, 8) => "…blocks must be at least 2, the first,…";
        blocks.with_near(18) => "…blocks must be at least 5, the first,…";
    }
}
