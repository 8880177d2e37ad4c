//! Random cases of attention: patterns, shapes, options and dtypes against f64. A seed is a case, and a failure prints its seed. Besides attention,
//! a case has another check ([`crate::fuzz::beside`]), with its own random numbers.

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};

use burn_blocksparse::layout::{DeviceLayoutOptions, PaddingMask};

use crate::attention::cases::Case;
use crate::attention::options::SHARED;
use crate::attention::plain::{assert_as_good_as_dense, run_dense};
use crate::fuzz::beside::more;
use crate::prelude::*;

/// Number of cases; `SEED` has the first seed, and the others follow.
const CASES: &str = "BURN_SPARSE_FUZZ_CASES";
pub const SEED: &str = "BURN_SPARSE_FUZZ_SEED";
/// Number of cases of the test that CI runs.
const CI_CASES: &str = "BURN_SPARSE_FUZZ_CI_CASES";
const DEFAULT_CASES: u64 = 300;

/// Results with simulated roundings.
const RESULTS: [&str; 4] = ["out", "dq", "dk", "dv"];

/// Runs `BURN_SPARSE_FUZZ_CASES` cases from `BURN_SPARSE_FUZZ_SEED` on; panics at the end if one failed.
pub fn fuzz(devices: &[Device]) {
    run_seeds(devices, number(SEED, 1), number(CASES, DEFAULT_CASES));
}

/// Runs 200 fixed cases, or `BURN_SPARSE_FUZZ_CI_CASES`, and half as many whose seeds follow from the date (UTC) unless `BURN_SPARSE_FUZZ_SEED` is
/// set.
pub fn fuzz_of_the_day(devices: &[Device]) {
    let count = number(CI_CASES, 200);
    run_seeds(devices, 1, count);
    let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    let days = since.expect("it is after 1970").as_secs() / 86_400;
    run_seeds(devices, number(SEED, 1_000_000 + 1000 * days), count / 2);
}

fn run_seeds(devices: &[Device], first: u64, count: u64) {
    let mut failed = Vec::new();
    for device in devices {
        failed.extend(failing_seeds(device, CASES, first, count, |seed, case| {
            let fuzz = Fuzz::new(seed, device);
            let attention = catch_unwind(AssertUnwindSafe(|| fuzz.check(device)));
            let part = ["the other check", "attention"][usize::from(attention.is_err())];
            *case = format!("{part}: {fuzz:?}");
            more(&fuzz, device);
            attention.unwrap_or_else(|error| resume_unwind(error));
        }));
        println!("{count} cases from seed {first} on {device:?}");
    }
    assert_none(&failed);
}

/// Returns the seeds whose check fails on a device. A check describes its case.
pub fn failing_seeds(
    device: &Device,
    cases: &str,
    first: u64,
    count: u64,
    mut check: impl FnMut(u64, &mut String),
) -> Vec<u64> {
    let fails = |seed: &u64| {
        let mut case = String::new();
        let result = catch_unwind(AssertUnwindSafe(|| check(*seed, &mut case)));
        if result.is_err() {
            eprintln!("{SEED}={seed} {cases}=1 on {device:?} failed: {case}\n");
        }
        result.is_err()
    };
    (first..first + count).filter(fails).collect()
}

pub fn assert_none(failed: &[u64]) {
    assert!(failed.is_empty(), "{} failed: {failed:?}", failed.len());
}

/// Reads a number from an environment variable.
pub fn number(name: &str, default: u64) -> u64 {
    match std::env::var(name) {
        Ok(text) => {
            (text.parse()).unwrap_or_else(|_| panic!("{name} must be a number, got {text}"))
        }
        Err(_) => default,
    }
}

#[derive(Debug)]
pub struct Fuzz {
    pub seed: u64,
    pub case: Case,
    pub dtype: DType,
    pub mode: WeightsMode,
    /// Padding per batch entry.
    restrictions: Option<Vec<PaddingMask>>,
    /// Whether the layout is serialized and parsed before use, so that it is computed by its own blocks.
    read: bool,
    pub extras: Extras,
    /// Whether half precision is compared with Burn's dense attention.
    dense: bool,
    /// Set if the pattern's blocks make a layout on the device.
    chosen: Option<Chosen>,
}

/// Blocks selected by a mask.
#[derive(Clone, Debug)]
struct Chosen {
    /// `[heads, q_blocks, kv_blocks]`
    blocks: Vec<bool>,
    dims: [usize; 3],
    causal: bool,
}

impl Chosen {
    fn new(layout: &BlockLayout, causal: bool) -> Self {
        let dims = [layout.heads(), layout.q_blocks(), layout.kv_blocks()];
        let mut blocks = vec![false; dims.iter().product()];
        for head in 0..dims[0] {
            for row in 0..dims[1] {
                for kept in layout.row(layout.pattern_of(0, head), row) {
                    blocks[(head * dims[1] + row) * dims[2] + kept.block as usize] = true;
                }
            }
        }
        Self {
            blocks,
            dims,
            causal,
        }
    }

    /// Returns the pattern of these blocks.
    fn pattern(&self, case: &Case) -> Pattern {
        let (chosen, block) = (self.clone(), case.block_size);
        let offset = case.seq_kv as i64 - case.seq_q as i64;
        Pattern::from_fn("chosen blocks", move |head, i, j| {
            let (row, col) = ((i - offset) as usize / block, j as usize / block);
            let [_, rows, cols] = chosen.dims;
            chosen.blocks[(head * rows + row) * cols + col] && (!chosen.causal || j <= i)
        })
    }

    fn layout(&self, case: &Case, device: &Device) -> DeviceLayout {
        let [heads, rows, cols] = self.dims;
        let mask = bools(&self.blocks, [1, heads, rows, cols], device);
        let options = DeviceLayoutOptions::new(*case.layout().shape()).causal(self.causal);
        DeviceLayout::from_block_mask(mask, options).unwrap()
    }
}

/// Further options. In half precision some cases have a single one, and some are compared with dense attention, which has none.
#[derive(Clone, Debug, Default)]
pub struct Extras {
    slopes: Option<Vec<f64>>,
    dropout: Option<Dropout>,
    /// Sharing of a bias.
    bias: Option<[bool; 3]>,
    /// Reach of the relative bias, and whether heads share it.
    relative: Option<(usize, bool)>,
    sinks: bool,
    /// Whether the loss depends on lse.
    grad_lse: bool,
}

impl Extras {
    fn new(rng: &mut impl Rng, heads: usize) -> Self {
        let mut slope = |_| rng.random_range(-0.1..0.5);
        let slopes: Vec<f64> = (0..heads).map(&mut slope).collect();
        Self {
            slopes: chance(rng, 4).then_some(slopes),
            dropout: chance(rng, 4)
                .then(|| Dropout::new(rng.random_range(0.0..0.9), rng.random::<u64>())),
            bias: chance(rng, 4).then(|| pick(rng, &SHARED)),
            sinks: chance(rng, 4),
            grad_lse: chance(rng, 2),
            relative: chance(rng, 4).then(|| (rng.random_range(0..250), chance(rng, 2))),
        }
    }

    pub fn without_dropout(&self) -> Self {
        Self {
            dropout: None,
            ..self.clone()
        }
    }

    /// Returns a single random option, independent of `self`.
    fn alone(self, rng: &mut impl Rng, heads: usize) -> Self {
        let mut nothing = Self::default();
        match rng.random_range(0..6) {
            0 => {
                let slopes = (0..heads).map(|_| rng.random_range(-0.1..0.5));
                nothing.slopes = Some(slopes.collect());
            }
            1 => {
                let probability = rng.random_range(0.0..0.9);
                nothing.dropout = Some(Dropout::new(probability, rng.random::<u64>()));
            }
            2 => nothing.bias = Some(pick(rng, &SHARED)),
            3 => nothing.relative = Some((rng.random_range(0..250), chance(rng, 2))),
            4 => nothing.sinks = true,
            _ => nothing.grad_lse = true,
        }
        nothing
    }

    /// Applies the options to a problem.
    pub fn apply(&self, seed: u64, mut problem: Problem) -> Problem {
        problem.slopes.clone_from(&self.slopes);
        problem.dropout = self.dropout;
        if let Some(shared) = self.bias {
            problem = problem.with_bias(seed, shared);
        }
        if let Some((reach, shared)) = self.relative {
            problem = problem.with_relative(seed, reach, shared);
        }
        if self.sinks {
            problem = problem.with_sinks(seed);
        }
        if self.grad_lse {
            problem = problem.with_grad_lse(seed);
        }
        problem
    }
}

impl Fuzz {
    /// Makes the case of a seed; its dtype is one of the device's.
    fn new(seed: u64, device: &Device) -> Self {
        let mut rng = seeded(seed);
        let rng = &mut rng;
        let kv_heads = pick(rng, &[1, 2, 3]);
        let heads = kv_heads * pick(rng, &[1, 1, 2, 4]);
        let seq_kv = length(rng);
        let seq_q = match rng.random_range(0..4) {
            0 => length(rng),
            _ => seq_kv,
        };
        // Few widths, mostly equal: a GPU compiles kernels for each.
        let head_dim = pick(rng, &[8, 16, 20, 32, 64, 64, 80, 128]);
        let value_dim = match rng.random_range(0..4) {
            0 => pick(rng, &[8, 16, 32, 40, 64]),
            _ => head_dim,
        };
        let pattern = pattern(rng, heads, seq_kv, 2);
        let case = Case {
            name: "fuzz",
            pattern,
            batch: pick(rng, &[1, 1, 2, 3]),
            heads,
            kv_heads,
            seq_q,
            seq_kv,
            block_size: pick(rng, &[8, 16, 32, 64, 128]),
            head_dim,
            value_dim,
            scale: chance(rng, 4).then(|| rng.random_range(-2.0..2.0) / (head_dim as f64).sqrt()),
            softcap: chance(rng, 4).then(|| rng.random_range(0.3..20.0)),
        };
        let restrictions = chance(rng, 4).then(|| {
            (0..case.batch)
                .map(|_| restriction(rng, seq_q, seq_kv))
                .collect()
        });
        let mode = match chance(rng, 3) {
            true => WeightsMode::Store,
            false => WeightsMode::Recompute,
        };
        let read = chance(rng, 8);
        let mut dtypes: Vec<DType> = exact_dtypes(device).iter().map(|(d, _)| *d).collect();
        dtypes.extend(half_dtypes(device));
        let dtype = pick(rng, &dtypes);
        let extras = Extras::new(rng, heads);
        let chosen = chance(rng, 6).then(|| Chosen::new(&case.layout(), chance(rng, 2)));
        // A separate generator, so that cases of old seeds stay the same.
        let other = &mut seeded(seed ^ 0xa10e);
        let half = matches!(dtype, DType::F16 | DType::BF16);
        let (extras, dense) = match other.random_range(0..4) {
            0 | 1 if half => (extras.alone(other, heads), false),
            2 if half => (Extras::default(), true),
            _ => (extras, false),
        };
        let fuzz = Self {
            seed,
            case,
            dtype,
            mode,
            restrictions,
            read,
            extras,
            dense,
            chosen,
        };
        match fuzz.chosen.clone() {
            Some(chosen) => fuzz.by_blocks(&chosen),
            None => fuzz,
        }
    }

    /// Replaces the pattern by the selected blocks, without the options that such a layout does not support.
    fn by_blocks(self, chosen: &Chosen) -> Self {
        Self {
            case: Case {
                pattern: chosen.pattern(&self.case),
                ..self.case
            },
            mode: WeightsMode::Recompute,
            restrictions: None,
            read: false,
            extras: Extras {
                relative: None,
                ..self.extras
            },
            ..self
        }
    }

    pub fn layout(&self) -> BlockLayout {
        let layout = self.case.layout();
        let layout = match &self.restrictions {
            Some(entries) => layout.mask_padding(entries).unwrap(),
            None => layout,
        };
        match self.read {
            true => serde_json::from_str(&serde_json::to_string(&layout).unwrap()).unwrap(),
            false => layout,
        }
    }

    pub fn problem(&self) -> Problem {
        let case = &self.case;
        let offset = case.seq_kv as i64 - case.seq_q as i64;
        let (pattern, restrictions) = (case.pattern.clone(), self.restrictions.clone());
        let problem = Problem::random(case.sizes(), self.seed, move |batch, head, i, j| {
            let kept = |list: &Option<Vec<bool>>, at: usize| list.as_ref().is_none_or(|l| l[at]);
            let takes_part = restrictions.as_ref().is_none_or(|entries| {
                kept(&entries[batch].queries, i) && kept(&entries[batch].keys, j)
            });
            takes_part && pattern.attends(head, i as i64 + offset, j as i64)
        });
        problem.options(case.scale, case.softcap)
    }

    fn check(&self, device: &Device) {
        let exact = exact_dtypes(device);
        let tolerance = exact.iter().find(|(dtype, _)| *dtype == self.dtype);
        match tolerance {
            Some(&(_, tolerance)) => self.check_extras(device, tolerance),
            None if self.dense => self.check_half(device),
            None => self.check_extras(device, half_tolerance(self.dtype)),
        }
    }

    fn check_extras(&self, device: &Device, tolerance: f64) {
        let mut problem = self.extras.apply(self.seed, self.problem());
        problem.round_to(self.dtype);
        let answer = problem.solve();
        let call = Call::new("", &problem, self.layout()).weights(self.mode);
        let results = match &self.chosen {
            Some(chosen) => {
                let layout = chosen.layout(&self.case, device);
                call.over(layout).run(device, self.dtype)
            }
            None => call.run(device, self.dtype),
        };
        let bounds = [Near::Terms(tolerance), Near::Rows(self.dtype)];
        answer.assert("", results, &bounds);
    }

    /// Compares like [`crate::attention::plain::half_precision_is_as_good_as_dense`].
    fn check_half(&self, device: &Device) {
        let (mut problem, layout) = (self.problem(), self.layout());
        problem.round_to(self.dtype);
        let device = device.clone().autodiff();
        let options = problem.asked().weights(self.mode);
        let got = match &self.chosen {
            Some(chosen) => {
                let layout = chosen.layout(&self.case, &device);
                run_with(&problem, &layout, options, &device, self.dtype)
            }
            None => run_with(&problem, &layout, options, &device, self.dtype),
        };
        let dense = run_dense(&self.case, &problem, &layout, &device, self.dtype);
        assert_as_good_as_dense("", &problem, got, Some(dense), self.dtype, true);
    }
}

/// The judge of random cases in half precision, without a kernel: simulated roundings pass it. A spurious bias of a few roundings fails it, wherever
/// it changes a weight, although the bound on whole tensors misses nearly all such changes.
pub fn half_precision_sees_a_small_bias(device: &Device) {
    let (mut cases, mut by_tensors) = (0, 0);
    for seed in 1..=120 {
        let fuzz = Fuzz::new(seed, device);
        let size = match fuzz.dtype {
            DType::F16 => 0.01,
            DType::BF16 => 0.06,
            _ => continue,
        };
        let problem_with = |bias: f64| {
            let mut problem = fuzz.extras.apply(seed, fuzz.problem());
            problem.add_alternating_bias(bias);
            problem.round_to(fuzz.dtype);
            problem
        };
        let (problem, wrong) = (problem_with(0.0), problem_with(size));
        let (exact, moved) = (problem.solve(), wrong.solve());
        let of_bounds = |got: &Answer| {
            RESULTS.map(|name| {
                let expected = exact.result(name);
                let values = got.result(name).values;
                worst_row(values, expected.values, expected.rows, fuzz.dtype).0
            })
        };
        let clean = of_bounds(&problem.solve_rounded(fuzz.dtype));
        assert!(clean.iter().all(|&part| part < 1.0), "{seed}: {clean:?}");
        // If each query has one key, or only keys with equal bias, nothing changes.
        let mut weights = exact.weights.iter().zip(&moved.weights);
        if !weights.any(|(p, moved)| *p > 1e-3 && (p - moved).abs() > 0.5 * size * p) {
            continue;
        }
        let got = wrong.solve_rounded(fuzz.dtype);
        let parts = of_bounds(&got);
        let is_right = parts.iter().any(|&part| part > 1.0);
        assert!(is_right, "{seed}: {parts:?} of the bounds, {fuzz:?}");
        cases += 1;
        by_tensors += usize::from(RESULTS.iter().any(|name| {
            let Expected { values, terms, .. } = exact.result(name);
            let (error, _) = error_relative_to(terms, got.result(name).values, values);
            error > half_tolerance(fuzz.dtype)
        }));
    }
    println!("{cases} cases, of which bounds on tensors see {by_tensors}");
    assert!(half_dtypes(device).is_empty() || cases > 50 && by_tensors < cases / 2);
}

pub fn pick<T: Copy>(rng: &mut impl Rng, from: &[T]) -> T {
    from[rng.random_range(0..from.len())]
}

/// Returns true one time in `n`.
pub fn chance(rng: &mut impl Rng, n: usize) -> bool {
    rng.random_range(0..n) == 0
}

/// Returns a length: mostly short; at a block boundary, next to one, or anywhere.
fn length(rng: &mut impl Rng) -> usize {
    let blocks = 8 * rng.random_range(1..25);
    match rng.random_range(0..5) {
        0 => blocks,
        1 => blocks + 1,
        2 => blocks - 1,
        3 => rng.random_range(1..10),
        _ => rng.random_range(1..220),
    }
}

fn restriction(rng: &mut impl Rng, seq_q: usize, seq_kv: usize) -> PaddingMask {
    let mut list = |seq: usize| -> Vec<bool> {
        let (a, b) = (rng.random_range(0..=seq), rng.random_range(0..=seq));
        let kind = rng.random_range(0..4);
        (0..seq)
            .map(|at| match kind {
                0 => at < a,
                1 => at >= a,
                2 => at < a || at >= b,
                _ => (at * 7 + a) % 3 > 0,
            })
            .collect()
    };
    let (queries, keys) = (list(seq_q), list(seq_kv));
    let restriction = PaddingMask::default();
    match rng.random_range(0..3) {
        0 => restriction.keys(keys),
        1 => restriction.queries(queries),
        _ => restriction.keys(keys).queries(queries),
    }
}

/// Returns a pattern that is valid for `heads` heads, nested up to `depth`.
pub fn pattern(rng: &mut impl Rng, heads: usize, seq: usize, depth: usize) -> Pattern {
    loop {
        let pattern = any_pattern(rng, heads, seq, depth);
        if pattern.validate(heads).is_ok() {
            return pattern;
        }
    }
}

fn any_pattern(rng: &mut impl Rng, heads: usize, seq: usize, depth: usize) -> Pattern {
    let up_to = |rng: &mut _, n: usize| -> usize { RngExt::random_range(rng, 1..=n.max(1)) };
    let kinds = if depth == 0 { 18 } else { 23 };
    match rng.random_range(0..kinds) {
        0 => Pattern::dense(),
        1 => Pattern::causal(),
        2 => Pattern::local(up_to(rng, seq)),
        3 => Pattern::strided(up_to(rng, 40)),
        4 => Pattern::merged_strided(up_to(rng, 40)),
        5 | 6 => {
            let columns = up_to(rng, 12);
            let groups = up_to(rng, 6);
            Pattern::fixed_heads(columns * groups, columns, up_to(rng, groups))
        }
        7 => Pattern::prefix_lm(rng.random_range(0..=seq)),
        8 => Pattern::streaming(up_to(rng, 60), rng.random_range(0..20)),
        9 => Pattern::dilated_window(rng.random_range(0..30), up_to(rng, 8)),
        10 => {
            let size = up_to(rng, 50);
            Pattern::chunked_window(size, rng.random_range(0..3), rng.random_range(0..3))
        }
        11 => {
            let window = rng.random_range(0..20);
            Pattern::longformer(window, up_to(rng, 3), positions(rng, seq, 5))
        }
        12 => {
            let block = up_to(rng, 32);
            let random = rng.random_range(0..4);
            Pattern::bigbird(block, seq.div_ceil(block), random, rng.random())
        }
        13 => {
            let columns = up_to(rng, 12);
            let groups = up_to(rng, 5);
            let verts = up_to(rng, groups);
            Pattern::deepspeed_fixed(columns * groups, columns, verts, chance(rng, 2))
        }
        14 => {
            let windows = [up_to(rng, 20), up_to(rng, 50)];
            Pattern::deepspeed_variable(&windows, seq, positions(rng, seq, 4), chance(rng, 2))
        }
        15 => Pattern::vertical_slash(positions(rng, seq, 8), positions(rng, seq, 12)),
        16 => Pattern::documents(positions(rng, seq, 6)),
        17 => {
            let (a, b, m) = (up_to(rng, 9), up_to(rng, 9), up_to(rng, 4) as i64 + 1);
            let of = move |p: i64, n: usize| p.div_euclid(n as i64);
            Pattern::from_fn(format!("cells({a}, {b}, {m})"), move |head, i, j| {
                (of(i, a) + of(j, b) + head as i64) % m == 0
            })
        }
        18 => Pattern::union(parts(rng, heads, seq, depth, 3)),
        19 => Pattern::intersection(parts(rng, heads, seq, depth, 3)),
        20 => Pattern::per_head(parts(rng, heads, seq, depth, heads)),
        21 => pattern(rng, heads, seq, depth - 1).and_causal(),
        _ => Pattern::packed(positions(rng, seq, 5), pattern(rng, heads, seq, depth - 1)),
    }
}

fn parts(rng: &mut impl Rng, heads: usize, seq: usize, depth: usize, most: usize) -> Vec<Pattern> {
    let count = rng.random_range(1..=most);
    (0..count)
        .map(|_| pattern(rng, heads, seq, depth - 1))
        .collect()
}

fn positions(rng: &mut impl Rng, seq: usize, most: usize) -> Vec<usize> {
    let count = rng.random_range(0..=most);
    (0..count).map(|_| rng.random_range(0..seq)).collect()
}
