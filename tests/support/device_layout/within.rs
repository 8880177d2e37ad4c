//! Layouts whose blocks are chosen on the device from those of a layout on the host, against f64: outputs, gradients and counts.

use burn_blocksparse::layout::PaddingMask;
use burn_sparse_select::{Always, Budget, EstimateKind, Rule};

use crate::device_layout::case::Case;
use crate::device_layout::chosen::layout_of;
use crate::prelude::*;

/// Layouts that cut: windows, stripes, documents, heads that differ, padding, and rows and blocks without anything.
fn cuts() -> Vec<(Case, BlockLayout)> {
    let of = |case: Case, pattern: Pattern| {
        let layout = BlockLayout::new(&pattern, case.shape()).unwrap();
        (case, layout)
    };
    let halves = Pattern::per_head([Pattern::local(30), Pattern::fixed(32, 4)]);
    let packed = Pattern::packed([0, 21, 50, 51], Pattern::causal());
    let padded = |case: Case, pattern: Pattern, real: [usize; 2]| {
        let (case, layout) = of(case, pattern);
        let entry = |real: usize| {
            let queries = (0..case.seq_q).map(move |i| i < real);
            let keys = (0..case.seq_kv).map(move |j| j < real);
            PaddingMask::default().queries(queries).keys(keys)
        };
        (case, layout.mask_padding(&real.map(entry)).unwrap())
    };
    vec![
        of(
            Case::new("a window, grouped heads", 70, 70, 16).heads(4, 2),
            Pattern::local(40),
        ),
        of(
            Case::new("stripes, one choice for all", 100, 100, 32).shared(true, true),
            Pattern::fixed(64, 8),
        ),
        of(
            Case::new("heads that differ, one choice", 90, 90, 8).shared(true, true),
            halves.clone(),
        ),
        of(
            Case::new("heads that differ", 65, 131, 16).heads(2, 1),
            halves,
        ),
        of(Case::new("documents", 80, 80, 8), packed),
        of(
            Case::new("keys on both sides, fewer queries", 30, 61, 8),
            Pattern::window(13),
        ),
        padded(
            Case::new("padding", 70, 70, 16),
            Pattern::causal(),
            [70, 37],
        ),
        padded(
            Case::new("padding, one choice for all", 64, 64, 8).shared(true, true),
            Pattern::dense(),
            [9, 0],
        ),
        of(
            Case::new("blocks of 64", 200, 200, 64).dim(64),
            Pattern::local(100),
        ),
        of(
            Case::new("blocks of 128, stripes", 300, 300, 128).dim(64),
            Pattern::strided(60),
        ),
    ]
}

/// The problem in which the chosen blocks of a layout have its pairs.
fn problem(case: &Case, layout: &BlockLayout, seed: u64, mask: Vec<bool>) -> Problem {
    let case = *case;
    let entries = layout.batch().unwrap_or(1);
    let all = (0..entries).flat_map(|entry| (0..case.heads).map(move |head| (entry, head)));
    let dense: Vec<_> = all.map(|(e, h)| layout.to_dense_batch(e, h)).collect();
    Problem::random(case.sizes(), seed, move |batch, head, i, j| {
        let [batches, patterns, q_blocks, kv_blocks] = case.dims();
        let pattern = batch.min(batches - 1) * patterns + head / (case.heads / patterns);
        let row = pattern * q_blocks + i / case.block_size;
        mask[row * kv_blocks + j / case.block_size]
            && dense[batch.min(entries - 1) * case.heads + head][i][j]
    })
    .with_grad_lse(seed)
}

/// Masks and indices.
pub fn blocks_within_a_layout_equal_f64(devices: &[Device]) {
    for (index, (case, layout)) in cuts().iter().enumerate() {
        let seed = 9700 + index as u64;
        let mask = case.mask(&mut seeded(seed));
        let problem = problem(case, layout, seed, mask.clone());
        for device in devices {
            let chosen = match index % 2 {
                0 => layout_of(case, &mask, device),
                _ => of_indices(case, &mask, device),
            };
            let chosen = chosen.masked_by(layout).unwrap();
            check_counts(case, &chosen);
            Call::new(case.name, &problem, chosen).check(device);
        }
    }
}

fn of_indices(case: &Case, mask: &[bool], device: &Device) -> DeviceLayout {
    let [batch, heads, q_blocks, kv_blocks] = case.dims();
    let mut indices = vec![-1i32; mask.len()];
    for (at, _) in mask.iter().enumerate().filter(|(_, kept)| **kept) {
        indices[at] = (at % kv_blocks) as i32;
    }
    let indices = TensorData::new(indices, case.dims());
    let indices = Tensor::<4, Int>::from_data(indices, device);
    let counts = Tensor::<3, Int>::full([batch, heads, q_blocks], kv_blocks as i32, device);
    DeviceLayout::from_block_indices(indices, counts, case.options()).unwrap()
}

/// The counts of rows, and the density, are those of the host.
pub fn check_counts(case: &Case, chosen: &DeviceLayout) {
    let host = chosen.to_host().unwrap();
    let counts = chosen.counts().unwrap();
    let [batch, patterns, q_blocks] = counts.dims();
    let counts = read_ints(counts);
    for (row, &count) in counts.iter().enumerate() {
        let (pattern, q_block) = (row / q_blocks, row % q_blocks);
        let head = pattern % patterns * (case.heads / patterns);
        let blocks = host.row(host.pattern_of(pattern / patterns, head), q_block);
        assert_eq!(count as usize, blocks.len(), "{}, row {row}", case.name);
    }
    assert_eq!(counts.len(), batch * patterns * q_blocks);
    let density = chosen.density().unwrap().into_scalar::<f32>();
    let all: i32 = counts.iter().sum();
    assert!(density <= 1.0 + 1e-6, "{}: {density}", case.name);
    assert_eq!(density == 0.0, all == 0, "{}", case.name);
}

/// Rules see a layout's blocks alone. The host has the choice from the same scores; attention shows that of the device.
pub fn rules_within_a_layout(devices: &[Device]) {
    let keeps = [
        Budget::TopK(2),
        Budget::Ratio(0.4),
        Budget::TopP {
            p: 0.6137,
            min: 1,
            max: 5,
        },
        Budget::MinP(0.5137),
    ];
    let forced = [(0, 0), (1, 1), (2, 3), (0, 2)];
    for (index, (case, layout)) in cuts().iter().enumerate() {
        let mut rng = seeded(9800 + index as u64);
        for (turn, kind) in [EstimateKind::Probability, EstimateKind::Logit]
            .into_iter()
            .enumerate()
        {
            let (first, local) = forced[(index + turn) % 4];
            let rule = Rule {
                kind,
                keep: keeps[(index + 3 * turn) % 4],
                forced: Always { first, local },
            };
            // Few numbers, of which no sum is near a share that a rule asks for; some are no numbers.
            let scores: Vec<f32> = (0..case.dims().iter().product())
                .map(|_| match rng.random_range(0..12) {
                    0 => f32::NAN,
                    _ => rng.random_range(0..19) as f32 / 7.3,
                })
                .collect();
            let problem = problem(case, layout, 9900 + index as u64, vec![true; scores.len()]);
            for device in devices {
                let scores = floats(&scores, case.dims(), device);
                let chosen = DeviceLayout::from_scores(scores, rule, case.options());
                let chosen = chosen.unwrap().masked_by(layout).unwrap();
                check_counts(case, &chosen);
                let host = chosen.to_host().unwrap();
                let [q, k, v, _] = inputs(&problem, device, DType::F32);
                let options = AttentionOptions::default();
                let (out, lse) = attend_with_lse([&q, &k, &v], &chosen, &options);
                let (expected, of_host) = attend_with_lse([&q, &k, &v], &host, &options);
                let what = format!("{}, {rule:?}, {device:?}", case.name);
                assert_close(&what, out.into_data(), &to_f64(expected.into_data()), 1e-5);
                let finite = |lse: Tensor<3>| lse.clamp_min(-1e4).into_data();
                assert_close(&what, finite(lse), &to_f64(finite(of_host)), 1e-5);
            }
        }
    }
}

/// The same bits, twenty times, of a choice within a layout.
pub fn layouts_within_give_the_same_bits(devices: &[Device]) {
    let (case, layout) = &cuts()[0];
    let mut rng = seeded(9999);
    let mask = case.mask(&mut rng);
    let problem = problem(case, layout, 9999, mask.clone());
    for device in with(devices, DType::F32) {
        let run = || {
            let chosen = layout_of(case, &mask, device).masked_by(layout).unwrap();
            Call::new("", &problem, chosen).run(device, DType::F32)
        };
        let first = run();
        for _ in 1..20 {
            assert_same_bits(&format!("{device:?}"), &first, &run());
        }
    }
}
