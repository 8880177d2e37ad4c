//! Layouts whose blocks are selected on the device among those of a host layout, against f64: outputs, gradients and counts.

use burn_blocksparse::layout::PaddingMask;
use burn_sparse_select::{Always, Budget, EstimateKind, Rule};

use crate::device_layout::case::{Case, read};
use crate::device_layout::chosen::layout_of;
use crate::prelude::*;

fn of(case: Case, pattern: Pattern) -> (Case, BlockLayout) {
    (case, BlockLayout::new(&pattern, case.shape()).unwrap())
}

/// Pads the batch entries to these numbers of real queries and keys.
fn padded(case: Case, pattern: Pattern, real: [usize; 2]) -> (Case, BlockLayout) {
    let (case, layout) = of(case, pattern);
    let entry = |real: usize| {
        let queries = (0..case.seq_q).map(move |i| i < real);
        let keys = (0..case.seq_kv).map(move |j| j < real);
        PaddingMask::default().queries(queries).keys(keys)
    };
    (case, layout.mask_padding(&real.map(entry)).unwrap())
}

/// Restricting layouts: windows, stripes, documents, different heads, padding, and empty rows and blocks. Sizes, further settings, the pattern, and
/// the numbers of real queries and keys of each batch entry.
const CUTS: &str = "
    a window, grouped heads           | 70 70 16    | heads 4 2    | local:40                     |
    stripes, one choice for all       | 100 100 32  | patterns 1 1 | fixed:64,8                   |
    heads that differ, one choice     | 90 90 8     | patterns 1 1 | local:30 / fixed:32,4        |
    heads that differ                 | 65 131 16   | heads 2 1    | local:30 / fixed:32,4        |
    documents                         | 80 80 8     |              | packed:0,21,50,51(causal)    |
    keys on both sides, fewer queries | 30 61 8     |              | window:13                    |
    padding                           | 70 70 16    |              | causal                       | 70 37
    padding, one choice for all       | 64 64 8     | patterns 1 1 | dense                        | 9 0
    blocks of 64                      | 200 200 64  | dim 64       | local:100                    |
    blocks of 128, stripes            | 300 300 128 | dim 64       | strided:60                   |
";

/// Returns the cases and layouts of a table.
pub fn layouts(table: &'static str) -> Vec<(Case, BlockLayout)> {
    let layout = |[name, sizes, rest, pattern, real]: [&'static str; 5]| {
        let (case, pattern) = (read([name, sizes, rest]), pattern.parse().unwrap());
        match real {
            "" => of(case, pattern),
            real => padded(case, pattern, all(real)),
        }
    };
    rows(table).into_iter().map(layout).collect()
}

/// Makes the problem of the layout's pairs in the selected blocks.
fn problem(case: &Case, layout: &BlockLayout, seed: u64, mask: Vec<bool>) -> Problem {
    let (case, allows) = (*case, pairs_of(layout));
    Problem::random(case.sizes(), seed, move |batch, head, i, j| {
        let [batches, patterns, q_blocks, kv_blocks] = case.dims();
        let pattern = batch.min(batches - 1) * patterns + head / (case.heads / patterns);
        let row = pattern * q_blocks + i / case.block_size;
        mask[row * kv_blocks + j / case.block_size] && allows(batch, head, i, j)
    })
    .with_grad_lse(seed)
}

/// Layouts from masks and from indices.
pub fn blocks_within_a_layout_equal_f64(devices: &[Device]) {
    for (index, (case, layout)) in layouts(CUTS).iter().enumerate() {
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
    let indices = ints_of(&indices, case.dims(), device);
    let counts = Tensor::<3, Int>::full([batch, heads, q_blocks], kv_blocks as i32, device);
    DeviceLayout::from_block_indices(indices, counts, case.options()).unwrap()
}

/// Checks that the counts of rows and the density equal the host's.
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

/// Rules see only a layout's blocks. The host selects by the same scores; attention reveals the device's selection.
pub fn rules_within_a_layout(devices: &[Device]) {
    let (p, min, max) = (0.6137, 1, 5);
    let share = Budget::TopP { p, min, max };
    let keeps = [
        Budget::TopK(2),
        Budget::Ratio(0.4),
        share,
        Budget::MinP(0.5137),
    ];
    let forced = [(0, 0), (1, 1), (2, 3), (0, 2)];
    for (index, (case, layout)) in layouts(CUTS).iter().enumerate() {
        let mut rng = seeded(9800 + index as u64);
        let kinds = [EstimateKind::Probability, EstimateKind::Logit];
        for (turn, kind) in kinds.into_iter().enumerate() {
            let (first, local) = forced[(index + turn) % 4];
            let rule = Rule {
                kind,
                keep: keeps[(index + 3 * turn) % 4],
                forced: Always { first, local },
            };
            // Few distinct numbers, so that no sum is near a share of a rule; some are NaN.
            let mut score = |_| match rng.random_range(0..12) {
                0 => f32::NAN,
                _ => rng.random_range(0..19) as f32 / 7.3,
            };
            let scores = (0..case.dims().iter().product()).map(&mut score);
            let scores: Vec<f32> = scores.collect();
            let problem = problem(case, layout, 9900 + index as u64, vec![true; scores.len()]);
            for device in devices {
                let scores = floats(&scores, case.dims(), device);
                let chosen = DeviceLayout::from_scores(scores, rule, case.options());
                let chosen = chosen.unwrap().masked_by(layout).unwrap();
                check_counts(case, &chosen);
                let host = chosen.to_host().unwrap();
                let [q, k, v, _] = inputs(&problem, device, DType::F32);
                let options = AttentionOptions::default();
                let got = outputs(attend_with_lse([&q, &k, &v], &chosen, &options));
                let expected = outputs(attend_with_lse([&q, &k, &v], &host, &options));
                let what = format!("{}, {rule:?}, {device:?}", case.name);
                assert_alike(&what, got, expected, 1e-5);
            }
        }
    }
}

/// Twenty selections within a layout give equal bits.
pub fn layouts_within_give_the_same_bits(devices: &[Device]) {
    let (case, layout) = &layouts(CUTS)[0];
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
