//! Rules of content-based selection on devices, against those on the host. Attention over a rule's selection reveals the kept blocks.

use burn_sparse_select::{Always, Budget, EstimateKind, Rule, ScoreGrid};

use crate::device_layout::case::{Case, cases, read};
use crate::prelude::*;

/// Kind of scores of a row.
#[derive(Clone, Copy, Debug)]
enum Scores {
    /// Of many magnitudes.
    Any,
    /// Few distinct numbers, so that many are equal.
    Few,
    /// Zeros of both signs, infinities, NaN and subnormals.
    Odd,
    /// All equal.
    Equal,
}

const SCORES: [Scores; 4] = [Scores::Any, Scores::Few, Scores::Odd, Scores::Equal];

impl Scores {
    fn row(self, kind: EstimateKind, blocks: usize, rng: &mut ChaCha8Rng) -> Vec<f32> {
        let one = rng.random_range(-1.0..1.0f32);
        let mut number = || match (self, kind) {
            (Scores::Any, EstimateKind::Probability) => rng.random::<f32>().powi(4),
            (Scores::Any, _) => rng.random_range(-4.0..4.0f32),
            (Scores::Few, _) => rng.random_range(0..4) as f32 / 4.0,
            (Scores::Odd, _) => ODD[rng.random_range(0..ODD.len())],
            (Scores::Equal, _) => one,
        };
        (0..blocks).map(|_| number()).collect()
    }
}

fn grid(case: &Case) -> ScoreGrid {
    ScoreGrid {
        query_rows: case.block_size,
        block: case.block_size,
        seq_q: case.seq_q,
        seq_kv: case.seq_kv,
        causal: case.causal,
    }
}

/// Returns the blocks that a rule keeps on the host, `[patterns · q_blocks][kv_blocks]`.
fn kept(case: &Case, rule: &Rule, scores: &[f32]) -> Vec<Vec<bool>> {
    let [_, _, q_blocks, kv_blocks] = case.dims();
    let rows = scores.chunks(kv_blocks).enumerate();
    let rows = rows.map(|(row, scores)| {
        let scores: Vec<f64> = scores.iter().map(|&score| score.into()).collect();
        rule.selects(&grid(case), row % q_blocks, &scores)
    });
    rows.collect()
}

/// Returns a rule whose share is so far from every row's sums that f32 sums decide alike.
fn clear(case: &Case, rule: Rule, scores: &[f32], rng: &mut ChaCha8Rng) -> Rule {
    let with = |share: f64| {
        let keep = match rule.keep {
            Budget::TopP { min, max, .. } => Budget::TopP { p: share, min, max },
            Budget::MinP(_) => Budget::MinP(share),
            keep => keep,
        };
        Rule { keep, ..rule }
    };
    let share = match rule.keep {
        Budget::TopP { p, .. } | Budget::MinP(p) if p < 1.0 => p,
        _ => return rule,
    };
    let shares = (0..200).map(|attempt| match attempt {
        0 => share,
        _ => rng.random_range(0.01..0.99),
    });
    let mut found = shares.filter(|share| {
        let near = [1.0 - 1e-5, 1.0, 1.0 + 1e-5].map(|near| share * near);
        let [low, here, high] = near.map(|share| kept(case, &with(share), scores));
        low == here && here == high
    });
    with(found.next().expect("a share away from all sums"))
}

/// Attends with queries of zeros: a query's output is the mean of the values that it sees, and its lse the logarithm of their number.
fn check(case: &Case, rule: Rule, scores: &[f32], device: &Device, rng: &mut ChaCha8Rng) {
    let [batches, heads, q_blocks, _] = case.dims();
    let rows = kept(case, &rule, scores);
    let sizes = case.sizes();
    let value = |_| rng.random_range(-1.0..1.0f32).into();
    let v: Vec<f64> = (0..sizes.v().iter().product()).map(value).collect();
    let offset = case.seq_kv as i64 - case.seq_q as i64;
    let (mut out, mut lse) = (Vec::new(), Vec::new());
    for (entry, head, i) in (0..case.batch).flat_map(|entry| {
        (0..case.heads).flat_map(move |head| (0..case.seq_q).map(move |i| (entry, head, i)))
    }) {
        let pattern = entry.min(batches - 1) * heads + head / (case.heads / heads);
        let row = &rows[pattern * q_blocks + i / case.block_size];
        let end = match case.causal {
            true => (i as i64 + offset + 1).clamp(0, case.seq_kv as i64) as usize,
            false => case.seq_kv,
        };
        let seen = (0..end).filter(|j| row[j / case.block_size]);
        let first = (entry * case.kv_heads + head / (case.heads / case.kv_heads)) * case.seq_kv;
        let mut mean = vec![0.0; case.head_dim];
        let mut count = 0.0;
        for j in seen {
            let values = &v[(first + j) * case.head_dim..][..case.head_dim];
            let sums = mean.iter_mut().zip(values);
            sums.for_each(|(sum, value)| *sum += value);
            count += 1.0f64;
        }
        out.extend(mean.iter().map(|sum| sum / count.max(1.0)));
        lse.push(count.ln());
    }
    let scores = floats(scores, case.dims(), device);
    let layout = DeviceLayout::from_scores(scores, rule, case.options()).unwrap();
    let q = Tensor::zeros(sizes.q(), (device, DType::F32));
    let k = Tensor::zeros(sizes.k(), (device, DType::F32));
    let v = tensor(&v, sizes.v(), device, DType::F32);
    let got = attend_with_lse([&q, &k, &v], &layout, &AttentionOptions::default());
    let what = format!("{}, {rule:?}, {device:?}", case.name);
    assert_close(&format!("{what}: lse"), got.1.into_data(), &lse, 1e-6);
    assert_close(&format!("{what}: out"), got.0.into_data(), &out, 1e-5);
}

/// Returns a rule of each kind, with random numbers.
fn rules(case: &Case, rng: &mut ChaCha8Rng) -> Vec<Rule> {
    let [_, _, _, blocks] = case.dims();
    let share = rng.random_range(0.05..0.98);
    let [few, more] = [0, 1].map(|least| rng.random_range(least..blocks + 2));
    let keeps = [
        Budget::TopK(more),
        Budget::Ratio(rng.random_range(0.01..1.0)),
        Budget::top_p(share),
        Budget::TopP {
            p: share,
            min: few.min(more),
            max: more.max(few),
        },
        Budget::MinP(share),
        [
            Budget::TopK(usize::MAX),
            Budget::Ratio(1.0),
            Budget::top_p(1.0),
            Budget::MinP(1.0),
        ][rng.random_range(0..4)],
    ];
    let mut rule = |keep| Rule {
        kind: [EstimateKind::Probability, EstimateKind::Logit][rng.random_range(0..2)],
        keep,
        forced: Always {
            first: [0, 0, 1, 2, usize::MAX][rng.random_range(0..5)].min(blocks / 2),
            local: [0, 1, 1, 2, 3, usize::MAX][rng.random_range(0..6)],
        },
    };
    keeps.map(&mut rule).to_vec()
}

/// Rows of more blocks than a word has bits, and of more words than a cube has units.
const LONG: &str = "
    several units            | 20 1300 8 | patterns 1 1
    blocks of half the heads | 40 600 8  | heads 4 1, patterns 2 2
    more words than units    | 3 70003 8 | patterns 1 1, dim 8
";

/// Rows with all kinds of scores, all rules, any forced blocks.
pub fn rules_keep_the_same_on_devices(devices: &[Device]) {
    let mut ran = 0;
    let long = rows(LONG).into_iter().map(read);
    for (index, case) in cases().into_iter().chain(long).enumerate() {
        let case = &case;
        let mut rng = seeded(9700 + index as u64);
        for rule in rules(case, &mut rng) {
            let [batch, heads, q_blocks, kv_blocks] = case.dims();
            let row = |_| {
                let scores = SCORES[rng.random_range(0..SCORES.len())];
                scores.row(rule.kind, kv_blocks, &mut rng)
            };
            let scores: Vec<f32> = (0..batch * heads * q_blocks).flat_map(row).collect();
            let rule = clear(case, rule, &scores, &mut rng);
            for device in devices {
                check(case, rule, &scores, device, &mut rng);
                ran += 1;
            }
        }
    }
    assert_ran("rules_keep_the_same_on_devices", ran);
}
