//! Layouts over places whose pairs follow from positions on the device, against f64: outputs, lse and gradients.

use burn_blocksparse::layout::{BlockMask, PaddingMask, PositionMask};
use rand::seq::SliceRandom;

use crate::device_layout::case::{Case, read};
use crate::device_layout::within::{check_counts, layouts};
use crate::prelude::*;

/// Returns the layout of chunks that see themselves and the one before; the first sees the last.
fn chunks(case: &Case, chunk: usize) -> BlockLayout {
    let (b, count) = (case.block_size, case.seq_q.div_ceil(chunk));
    let sees = |i: usize, j: usize| {
        let (own, other) = (i / chunk, j / chunk);
        own == other || (other + 1) % count == own
    };
    BlockLayout::from_block_fn("chunks", case.shape(), |_, q_block, kv_block| {
        let mask = BlockMask::from_fn(b, |r, c| sees(q_block * b + r, kv_block * b + c));
        let has_one = (0..b * b).any(|bit| mask.get(bit / b, bit % b));
        has_one.then_some(mask)
    })
    .unwrap()
}

/// Sizes, further settings, and chunk size.
const CHUNKS: &str = "
    chunks of a block         | 96 96 16   |           | 16
    chunks of parts of blocks | 90 90 32   | heads 4 2 | 24
    chunks of 64              | 384 384 64 | dim 64    | 64
";

/// Cases for tensor cores, which support some of them.
const WIDE: &str = "
    chunks of 64                  | 384 384 64 | dim 64            | 64
    chunks of 64, blocks of 32    | 250 250 32 | dim 64, heads 4 2 | 64
    chunks of 48                  | 200 200 16 | dim 64            | 48
    chunks of 128                 | 512 512 64 | dim 128           | 128
";

/// Like the cases of [`within`](crate::device_layout::within).
const OTHERS: &str = "
    heads that differ, fewer queries | 65 131 16   | heads 2 1    | local:30 / fixed:32,4 |
    every place, blocks of 8         | 50 41 8     | patterns 1 2 | dense                 |
    every place, blocks of 128       | 300 300 128 | dim 64       | dense                 |
    padding, one order for all       | 70 70 16    | patterns 1 2 | dense                 | 70 37
";

const EVERY: &str = "every place, blocks of 128 | 200 300 128 | dim 128 | dense |";

fn cases(of_chunks: &'static str, others: &'static str) -> Vec<(Case, BlockLayout)> {
    let around = |[name, sizes, rest, chunk]: [&'static str; 4]| {
        let case = read([name, sizes, rest]);
        (case, chunks(&case, one(chunk)))
    };
    let around = rows(of_chunks).into_iter().map(around);
    around.chain(layouts(others)).collect()
}

/// Returns permuted positions, some of which are negative; in some heads all are.
fn positions(groups: usize, length: usize, rng: &mut ChaCha8Rng) -> Vec<i32> {
    let mut all = Vec::new();
    for group in 0..groups {
        let mut order: Vec<i32> = (0..length as i32).map(|at| at / 2).collect();
        order.shuffle(rng);
        let none = [0.1, 0.1, 0.1, 1.0][(group + 1) % 4];
        let mut place = |at: i32| match rng.random::<f64>() < none {
            true => -1 - at,
            false => at,
        };
        all.extend(order.into_iter().map(&mut place));
    }
    all
}

/// Every batch entry and head has different positions.
pub fn pairs_by_positions_equal_f64(devices: &[Device]) {
    check(&cases(CHUNKS, OTHERS), devices, false);
}

/// On tensor cores, with blocks of all sizes.
pub fn pairs_by_positions_in_half_precision(devices: &[Device]) {
    check(&cases(WIDE, EVERY), devices, true);
}

fn check(cases: &[(Case, BlockLayout)], devices: &[Device], half: bool) {
    for (index, (case, layout)) in cases.iter().enumerate() {
        use PositionMask::{Before, Others, UpTo};
        let rule = [Before, UpTo, Others][index % 3];
        let seed = 9600 + index as u64;
        let mut rng = seeded(seed);
        let (batches, heads) = (case.patterns[0], case.heads);
        let sides = [case.seq_q, case.seq_kv];
        let [queries, mut keys] = sides.map(|length| positions(batches * heads, length, &mut rng));
        // Half of the cases that allow it have keys at the positions of their queries.
        let own = sides[0] == sides[1] && seed % 2 == 1;
        if own {
            keys.clone_from(&queries);
        }
        let allows = pairs_of(layout);
        let (of_queries, of_keys) = (queries.clone(), keys.clone());
        let mut problem = Problem::random(case.sizes(), seed, move |batch, head, i, j| {
            let group = batch.min(batches - 1) * heads + head;
            let query = of_queries[group * sides[0] + i];
            let key = of_keys[group * sides[1] + j];
            let by_positions = query >= 0
                && key >= 0
                && match rule {
                    Before => key < query,
                    UpTo => key <= query,
                    _ => key != query,
                };
            by_positions && allows(batch, head, i, j)
        })
        .with_grad_lse(seed);
        for device in devices {
            let tensor = |x: &[i32], length: usize| ints_of(x, [batches, heads, length], device);
            let [queries, keys] = [tensor(&queries, sides[0]), tensor(&keys, sides[1])];
            let chosen = match own {
                true => DeviceLayout::from_own_positions(layout, queries, rule),
                false => DeviceLayout::from_positions(layout, queries, keys, rule),
            };
            let chosen = chosen.unwrap();
            let bounds = if half { half_bounds } else { exact_dtypes };
            for (dtype, tolerance) in bounds(device) {
                // bf16 values are exact in both half-precision dtypes.
                if half {
                    problem.round_to(DType::BF16);
                }
                let what = format!("{}, {rule:?}", case.name);
                let call = Call::new(what, &problem, chosen.clone());
                call.check_dtype(device, dtype, tolerance);
            }
        }
    }
}

/// Counts match the pairs, and arguments that do not match are errors.
pub fn positions_are_checked(devices: &[Device]) {
    let (case, layout) = &cases(CHUNKS, OTHERS)[0];
    for device in devices {
        let of = |dims: [usize; 3]| Tensor::<3, Int>::zeros(dims, device);
        let make = |queries: [usize; 3], keys: [usize; 3]| {
            DeviceLayout::from_positions(layout, of(queries), of(keys), PositionMask::UpTo)
        };
        let chosen = make([2, 2, 96], [2, 2, 96]).unwrap();
        check_counts(case, &chosen);
        assert_eq!(chosen.density().unwrap().into_scalar::<f32>(), 1.0);
        let every = || (0..96).map(|_| true);
        let entries = [(); 3].map(|()| PaddingMask::default().queries(every()).keys(every()));
        let padded = layout.mask_padding(&entries).unwrap();
        let [a, b] = [(); 2].map(|()| of([2, 2, 96]));
        refused! {
            make([2, 1, 96], [2, 1, 96]) => "…of_queries' heads…";
            make([2, 2, 95], [2, 2, 96]) => "…of_queries' length…";
            make([2, 2, 96], [1, 2, 96]) => "…of_keys' shape…";
            make([0, 2, 96], [0, 2, 96]) => "…of_queries' batch…";
            DeviceLayout::from_own_positions(layout, of([2, 2, 95]), PositionMask::Others) => "…positions' length…";
            DeviceLayout::from_positions(&padded, a, b, PositionMask::Before) => "…batch…";
        }
    }
}
