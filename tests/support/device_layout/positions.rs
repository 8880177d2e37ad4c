//! Layouts of places whose pairs follow from positions on the device, against f64: outputs, lse and gradients.

use burn_blocksparse::layout::{BlockMask, PaddingMask, PositionMask};
use rand::seq::SliceRandom;

use crate::device_layout::case::Case;
use crate::device_layout::within::check_counts;
use crate::prelude::*;

/// Chunks that see themselves and the one before, the first the last.
fn chunks(case: &Case, chunk: usize) -> BlockLayout {
    let (b, count) = (case.block_size, case.seq_q.div_ceil(chunk));
    let sees = |i: usize, j: usize| {
        let (own, other) = (i / chunk, j / chunk);
        own == other || (other + 1) % count == own
    };
    BlockLayout::from_block_fn("chunks", case.shape(), |_, q_block, kv_block| {
        let mask = BlockMask::from_fn(b, |r, c| sees(q_block * b + r, kv_block * b + c));
        (0..b * b)
            .any(|bit| mask.get(bit / b, bit % b))
            .then_some(mask)
    })
    .unwrap()
}

fn layouts() -> Vec<(Case, BlockLayout)> {
    let of = |case: Case, pattern: Pattern| {
        let layout = BlockLayout::new(&pattern, case.shape()).unwrap();
        (case, layout)
    };
    let around = |case: Case, chunk: usize| (case, chunks(&case, chunk));
    let padded = Case::new("padding, one order for all", 70, 70, 16).shared(true, false);
    let (_, whole) = of(padded, Pattern::dense());
    let real = [70, 37].map(|real| {
        let ends = |i: usize| i < real;
        PaddingMask::default()
            .queries((0..70).map(ends))
            .keys((0..70).map(ends))
    });
    let halves = Pattern::per_head([Pattern::local(30), Pattern::fixed(32, 4)]);
    vec![
        around(Case::new("chunks of a block", 96, 96, 16), 16),
        around(
            Case::new("chunks of parts of blocks", 90, 90, 32).heads(4, 2),
            24,
        ),
        around(Case::new("chunks of 64", 384, 384, 64).dim(64), 64),
        of(
            Case::new("heads that differ, fewer queries", 65, 131, 16).heads(2, 1),
            halves,
        ),
        of(
            Case::new("every place, blocks of 8", 50, 41, 8).shared(true, false),
            Pattern::dense(),
        ),
        of(
            Case::new("every place, blocks of 128", 300, 300, 128).dim(64),
            Pattern::dense(),
        ),
        (padded, whole.mask_padding(&real).unwrap()),
    ]
}

/// Numbers of a permutation, of which some are negative, or all of a head.
fn positions(groups: usize, length: usize, rng: &mut ChaCha8Rng) -> Vec<i32> {
    let mut all = Vec::new();
    for group in 0..groups {
        let mut order: Vec<i32> = (0..length as i32).map(|at| at / 2).collect();
        order.shuffle(rng);
        let none = [0.1, 0.1, 0.1, 1.0][(group + 1) % 4];
        all.extend(
            (order.into_iter()).map(|at| match rng.random::<f64>() < none {
                true => -1 - at,
                false => at,
            }),
        );
    }
    all
}

/// Every batch entry and head has positions of its own.
pub fn pairs_by_positions_equal_f64(devices: &[Device]) {
    check(&layouts(), devices, false);
}

/// On tensor cores, with blocks of all sizes.
pub fn pairs_by_positions_in_half_precision(devices: &[Device]) {
    let around = |case: Case, chunk: usize| (case, chunks(&case, chunk));
    let every = Case::new("every place, blocks of 128", 200, 300, 128).dim(128);
    let layout = BlockLayout::new(&Pattern::dense(), every.shape()).unwrap();
    let cases = [
        around(Case::new("chunks of 64", 384, 384, 64).dim(64), 64),
        around(
            Case::new("chunks of 64, blocks of 32", 250, 250, 32)
                .dim(64)
                .heads(4, 2),
            64,
        ),
        around(Case::new("chunks of 48", 200, 200, 16).dim(64), 48),
        around(Case::new("chunks of 128", 512, 512, 64).dim(128), 128),
        (every, layout),
    ];
    check(&cases, devices, true);
}

fn check(cases: &[(Case, BlockLayout)], devices: &[Device], half: bool) {
    for (index, (case, layout)) in cases.iter().enumerate() {
        let rules = [
            PositionMask::Before,
            PositionMask::UpTo,
            PositionMask::Others,
        ];
        let rule = rules[index % 3];
        let seed = 9600 + index as u64;
        let mut rng = seeded(seed);
        let (batches, heads) = (case.patterns[0], case.heads);
        let sides = [case.seq_q, case.seq_kv];
        let [queries, mut keys] = sides.map(|length| positions(batches * heads, length, &mut rng));
        // Half of those that can have keys at the positions of their queries.
        let own = sides[0] == sides[1] && seed % 2 == 1;
        if own {
            keys.clone_from(&queries);
        }
        let entries = layout.batch().unwrap_or(1);
        let all = (0..entries).flat_map(|entry| (0..heads).map(move |head| (entry, head)));
        let dense: Vec<_> = all.map(|(e, h)| layout.to_dense_batch(e, h)).collect();
        let (of_queries, of_keys) = (queries.clone(), keys.clone());
        let mut problem = Problem::random(case.sizes(), seed, move |batch, head, i, j| {
            let group = batch.min(batches - 1) * heads + head;
            let query = of_queries[group * sides[0] + i];
            let key = of_keys[group * sides[1] + j];
            let by_positions = query >= 0
                && key >= 0
                && match rule {
                    PositionMask::Before => key < query,
                    PositionMask::UpTo => key <= query,
                    _ => key != query,
                };
            by_positions && dense[batch.min(entries - 1) * heads + head][i][j]
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
            let dtypes = match half {
                true => (half_dtypes(device).into_iter())
                    .map(|dtype| (dtype, half_tolerance(dtype)))
                    .collect(),
                false => exact_dtypes(device),
            };
            for (dtype, tolerance) in dtypes {
                // Numbers of 8 bits are numbers of all types.
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

/// Counts are those of the places, and what does not fit is said.
pub fn positions_are_checked(devices: &[Device]) {
    let (case, layout) = &layouts()[0];
    for device in devices {
        let of = |dims: [usize; 3]| Tensor::<3, Int>::zeros(dims, device);
        let make = |queries: [usize; 3], keys: [usize; 3]| {
            DeviceLayout::from_positions(layout, of(queries), of(keys), PositionMask::UpTo)
        };
        let chosen = make([2, 2, 96], [2, 2, 96]).unwrap();
        check_counts(case, &chosen);
        assert_eq!(chosen.density().unwrap().into_scalar::<f32>(), 1.0);
        for (queries, keys, argument) in [
            ([2, 1, 96], [2, 1, 96], "of_queries' heads"),
            ([2, 2, 95], [2, 2, 96], "of_queries' length"),
            ([2, 2, 96], [1, 2, 96], "of_keys' shape"),
            ([0, 2, 96], [0, 2, 96], "of_queries' batch"),
        ] {
            let error = make(queries, keys).unwrap_err().to_string();
            assert!(error.contains(argument), "{error}");
        }
        refused! { DeviceLayout::from_own_positions(layout, of([2, 2, 95]), PositionMask::Others) => "…positions' length…"; }
        let error = DeviceLayout::from_positions(
            &layout
                .mask_padding(
                    &[
                        PaddingMask::default(),
                        PaddingMask::default(),
                        PaddingMask::default(),
                    ]
                    .map(|x| x.queries((0..96).map(|_| true)).keys((0..96).map(|_| true))),
                )
                .unwrap(),
            of([2, 2, 96]),
            of([2, 2, 96]),
            PositionMask::Before,
        );
        refused! { error => "…batch…"; }
    }
}
