//! Random content-based selections: methods, rules, forced blocks, shapes, restricting patterns, padding and many kinds of inputs, against f64. A
//! seed is a case.

use burn_sparse_select::{
    Budget, Candidates, EstimateInputs, Selection, attention_selected_with_lse,
};

use crate::fuzz::attention::{SEED, assert_none, failing_seeds, number, pick};
use crate::judge::estimate::entry_of;
use crate::prelude::*;

/// Number of cases; `BURN_SPARSE_FUZZ_SEED` is the first seed.
const CASES: &str = "BURN_SPARSE_FUZZ_SELECTIONS";

/// Runs `BURN_SPARSE_FUZZ_SELECTIONS` cases from `BURN_SPARSE_FUZZ_SEED` on (300 from 1); panics at the end if one failed.
pub fn random_choices(devices: &[Device]) {
    run_seeds(devices, number(SEED, 1), number(CASES, 300));
}

/// Runs 60 fixed cases, or the requested number.
pub fn some_random_choices(devices: &[Device]) {
    run_seeds(devices, 1, number(CASES, 60));
}

fn run_seeds(devices: &[Device], first: u64, count: u64) {
    let mut failed = Vec::new();
    for device in devices {
        let mut seen = Seen::default();
        failed.extend(failing_seeds(device, CASES, first, count, |seed, case| {
            let fuzz = Fuzz::new(seed);
            *case = format!("{fuzz:?}");
            seen.add(fuzz.check(device));
        }));
        println!("{count} choices from seed {first} on {device:?}: {seen:?}");
        let unclear = seen.unclear * 50;
        assert!(unclear <= seen.rows.max(50), "too many near ties: {seen:?}");
    }
    assert_none(&failed);
}

/// Counts of comparisons.
#[derive(Debug, Default)]
struct Seen {
    /// Rows of blocks whose selection was compared.
    rows: usize,
    /// Those of them in which rounding decides.
    unclear: usize,
    /// Cases whose outputs and gradients were compared.
    attended: usize,
}

impl Seen {
    fn add(&mut self, other: Self) {
        self.rows += other.rows;
        self.unclear += other.unclear;
        self.attended += other.attended;
    }
}

/// Kind of queries and keys.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Inputs {
    /// Of many magnitudes.
    Any,
    /// Few integers, so that many scores are equal.
    Few,
    /// Some rows contain NaN and infinities.
    Odd,
}

#[derive(Debug)]
struct Fuzz {
    seed: u64,
    sizes: Sizes,
    selection: Selection,
    causal: bool,
    inputs: Inputs,
    pattern: Option<Pattern>,
    lengths: Option<Vec<usize>>,
    /// Scale of attention over the selection.
    scale: Option<f64>,
    softcap: Option<f64>,
}

/// Returns a rule's text.
fn keep(rng: &mut impl Rng) -> String {
    match rng.random_range(0..5) {
        0 | 1 => format!("k={}", rng.random_range(1..8)),
        2 => format!("ratio={:.3}", rng.random_range(0.05..1.0)),
        3 => format!("above={:.3}", rng.random_range(0.05..1.0)),
        _ => {
            let min = rng.random_range(0..3);
            let max = min + rng.random_range(1..6);
            let p = rng.random_range(0.2..1.0);
            match rng.random() {
                true => format!("p={p:.3},min={min},max={max}"),
                false => format!("p={p:.3}"),
            }
        }
    }
}

fn selection(rng: &mut impl Rng, block: usize) -> Selection {
    let share = pick(rng, &["", ",share=sum", ",share=mean", ",share=max"]);
    let (first, local) = (rng.random_range(0..3), rng.random_range(0..4));
    let rule = keep(rng);
    let text = match rng.random_range(0..10) {
        0..3 => format!("topk:{block},{rule},{local},{first}{share}"),
        3 => {
            let stride = pick(rng, &[1, 2, 4, 8]);
            format!("xattention:{block},{stride},{rule},first={first},local={local}{share}")
        }
        4 => {
            let theta = rng.random_range(-1.0..1.0);
            format!("sparge:{block},{rule},{theta:.2},first={first},local={local}{share}")
        }
        5 => {
            let (gamma, least) = (rng.random_range(0.3..0.99), rng.random_range(0..40));
            match rng.random() {
                true => format!("flexprefill:{block},{gamma:.2}"),
                false => format!("flexprefill:{block},{gamma:.2},0.1,{least}"),
            }
        }
        6 => {
            let (v, s) = (rng.random_range(0..9), rng.random_range(1..9));
            format!("minference:{block},{v},{s},7,sinks={first},window=2{share}")
        }
        7 => {
            let (budget, local) = (block * rng.random_range(3..6), local.max(1));
            format!("quest:{block},{budget},first={first},local={local}{share}")
        }
        _ => {
            let (keep, local) = (rng.random_range(1..5), local.max(1));
            format!("moba:{block},{keep},first={first},local={local}{share}")
        }
    };
    text.parse()
        .unwrap_or_else(|error| panic!("{text}: {error}"))
}

impl Fuzz {
    fn new(seed: u64) -> Self {
        let rng = &mut seeded(seed ^ 0x5e1ec7);
        let block = pick(rng, &[8, 8, 16, 32]);
        let selection = selection(rng, block);
        let by_query = selection.estimator().grid().query_rows == 1;
        let longest = pick(rng, &[24, 90]);
        let seq_kv = 1 + rng.random_range(0..longest);
        let is_square = by_query || rng.random_range(0..4) > 0;
        let seq_q = match is_square {
            true => seq_kv,
            false => 1 + rng.random_range(0..90),
        };
        let kv_heads = rng.random_range(1..3);
        let [batch, group] = [(); 2].map(|()| rng.random_range(1..4));
        let dims = [pick(rng, &[4, 8, 16]), 8];
        let sizes = Sizes::new([batch, kv_heads * group, kv_heads], [seq_q, seq_kv], dims);
        let causal = selection.estimator().traits().causal_only || rng.random_range(0..3) > 0;
        let pattern = (!by_query && rng.random_range(0..3) == 0).then(|| {
            let any = [
                Pattern::local(1 + rng.random_range(0..seq_kv)),
                Pattern::fixed(16, 4),
                Pattern::packed([0, seq_kv / 3 + 1], Pattern::causal()),
                Pattern::per_head([Pattern::local(9), Pattern::causal()]),
                Pattern::window(11),
                Pattern::strided(7),
            ];
            let at = rng.random_range(0..any.len());
            any[at].clone()
        });
        // Patterns that differ by head need an even number of heads.
        let pattern = pattern.filter(|of| !of.is_by_head() || sizes.heads.is_multiple_of(2));
        let lengths = (!by_query && is_square && rng.random_range(0..3) == 0).then(|| {
            let mut length = || rng.random_range(0..seq_kv + 1);
            (0..sizes.batch).map(|_| length()).collect()
        });
        use Inputs::{Any, Few, Odd};
        let inputs = pick(rng, &[Any, Any, Any, Few, Odd]);
        Self {
            seed,
            sizes,
            selection,
            causal,
            inputs,
            pattern,
            lengths,
            scale: rng.random::<bool>().then(|| rng.random_range(0.1..0.5)),
            softcap: rng.random::<bool>().then(|| rng.random_range(1.0..5.0)),
        }
    }

    fn is_by_query(&self) -> bool {
        self.selection.estimator().grid().query_rows == 1
    }

    fn layout(&self) -> Option<BlockLayout> {
        let (s, block) = (self.sizes, self.selection.estimator().grid().block);
        let shape = LayoutShape::new(s.heads, [s.seq_q, s.seq_kv], block);
        let pattern = self.pattern.as_ref()?;
        Some(BlockLayout::new(pattern, shape).unwrap())
    }

    /// Returns queries or keys that are exact in f32.
    fn numbers(&self, seed: u64, heads: usize, seq: usize) -> Vec<f64> {
        let mut rng = seeded(seed);
        let dim = self.sizes.head_dim;
        let mut numbers = Vec::with_capacity(self.sizes.batch * heads * seq * dim);
        for _ in 0..self.sizes.batch * heads * seq {
            let is_odd = self.inputs == Inputs::Odd && rng.random_range(0..6) == 0;
            for _ in 0..dim {
                numbers.push(match self.inputs {
                    Inputs::Few => f64::from(rng.random_range(-1..2)),
                    _ if is_odd => {
                        f64::from(pick(&mut rng, &[f32::NAN, f32::INFINITY, -1e38, 1.0]))
                    }
                    _ => f64::from(rng.random_range(-2.0..2.0f32)),
                });
            }
        }
        numbers
    }

    /// Returns the judge's selection for each batch entry, with queries and keys multiplied by numbers near 1.
    fn judged(
        &self,
        q: &[f64],
        k: &[f64],
        layout: Option<&BlockLayout>,
        shake: u64,
    ) -> Vec<BlockLayout> {
        let s = self.sizes;
        let mut rng = seeded(shake);
        let mut shaken = |x: &[f64]| -> Vec<f64> {
            let factor = |x: &f64| match shake {
                0 => *x,
                _ => x * (1.0 + 3e-6 * rng.random_range(-1.0..1.0)),
            };
            x.iter().map(factor).collect()
        };
        let (q, k) = (shaken(q), shaken(k));
        let entry = |entry: usize| {
            let scale = 1.0 / (s.head_dim as f64).sqrt();
            let call = entry_of(s, entry, [&q, &k], scale, self.causal);
            let mut within = Candidates::default();
            (within.layout, within.lengths) = (layout, self.lengths.as_deref());
            match self.is_by_query() {
                true => self.selection.choose_reference(&call),
                false => self.selection.choose_reference_within(&call, within, entry),
            }
            .unwrap()
        };
        (0..s.batch).map(entry).collect()
    }

    fn check(&self, device: &Device) -> Seen {
        let s = self.sizes;
        let q = self.numbers(self.seed * 2, s.heads, s.seq_q);
        let k = self.numbers(self.seed * 2 + 1, s.kv_heads, s.seq_kv);
        let tensor = |x: &[f64], dims: [usize; 4]| tensor(x, dims, device, DType::F32);
        let call = EstimateInputs::new(tensor(&q, s.q()), tensor(&k, s.k())).causal(self.causal);
        let layout = self.layout();
        if self.is_by_query() {
            return self.check_by_query(device, q, k);
        }
        let mut within = Candidates::default();
        (within.layout, within.lengths) = (layout.as_ref(), self.lengths.as_deref());
        let chosen = self.selection.choose_among(&call, within).unwrap();
        let host = chosen.layout.to_host().unwrap();
        if self.inputs == Inputs::Odd {
            self.check_legal(&call, within, &host);
            return Seen::default();
        }
        let judged = self.judged(&q, &k, layout.as_ref(), 0);
        let mut seen = Seen::default();
        // Selections for inputs that differ by a rounding, made on demand.
        let mut others: Vec<Vec<BlockLayout>> = Vec::new();
        for (entry, head, row) in self.rows(&host) {
            seen.rows += 1;
            let got = blocks(&host, entry, head, row);
            let of = |judged: &[BlockLayout]| blocks(&judged[entry], 0, head, row);
            if got == of(&judged) {
                continue;
            }
            if others.is_empty() {
                let shaken = (1..9).map(|shake| self.judged(&q, &k, layout.as_ref(), shake));
                others = shaken.collect();
            }
            let is_unclear = others.iter().any(|other| of(other) != of(&judged));
            let (what, expected) = (format!("{entry}, {head}, {row}"), of(&judged));
            assert!(is_unclear, "{what}: {got:?}, expected {expected:?}");
            seen.unclear += 1;
        }
        if self.seed.is_multiple_of(4) {
            self.check_attention(device, q, k, &host, |qkv, options| {
                attend_with_lse(qkv.each_ref(), &chosen.layout, &options)
            });
            seen.attended += 1;
        }
        seen
    }

    fn rows(&self, host: &BlockLayout) -> Vec<(usize, usize, usize)> {
        let (heads, rows) = (self.sizes.heads, host.q_blocks());
        let place = |at| (at / rows / heads, at / rows % heads, at % rows);
        (0..self.sizes.batch * heads * rows).map(place).collect()
    }

    /// Checks that the selection from NaN inputs is allowed, and repeatable.
    fn check_legal(&self, call: &EstimateInputs, within: Candidates, host: &BlockLayout) {
        let again = self.selection.choose_among(call, within).unwrap();
        assert!(again.layout.to_host().unwrap() == *host);
        let everything = self.selection.clone().with_budget(Budget::Ratio(1.0));
        let Ok(all) = everything.choose_among(call, within) else {
            return;
        };
        let all = all.layout.to_host().unwrap();
        for (entry, head, row) in self.rows(host) {
            let [got, all] = [host, &all].map(|of| blocks(of, entry, head, row));
            let is_part = got.iter().all(|block| all.contains(block));
            assert!(is_part, "{got:?} of {all:?}");
        }
    }

    /// Checks outputs and gradients over the pairs of a layout, in f64.
    fn check_attention(
        &self,
        device: &Device,
        q: Vec<f64>,
        k: Vec<f64>,
        host: &BlockLayout,
        attend: impl Fn([Tensor<4>; 3], AttentionOptions) -> (Tensor<4>, Tensor<3>),
    ) {
        let s = self.sizes;
        let mut problem = Problem::random(s, self.seed, pairs_of(host));
        (problem.q, problem.k) = (q, k);
        let problem = problem.options(self.scale, self.softcap);
        let mut problem = problem.with_grad_lse(self.seed);
        problem.round_to(DType::F32);
        let attend = |q, k, v| attend([q, k, v], problem.asked());
        let answer = problem.solve();
        let device = device.clone().autodiff();
        for (name, got) in differentiated(&problem, &device, DType::F32, attend) {
            let expected = answer.result(name);
            let (error, at) = error_relative_to(expected.terms, &to_f64(got), expected.values);
            assert!(error < 3e-5, "{name}: {error:e} at {at}");
        }
    }

    /// Checks selection per query: outputs reveal it.
    fn check_by_query(&self, device: &Device, q: Vec<f64>, k: Vec<f64>) -> Seen {
        if self.inputs == Inputs::Odd {
            return Seen::default();
        }
        let judged = self.judged(&q, &k, None, 0);
        let unclear = (1..9).any(|shake| self.judged(&q, &k, None, shake) != judged);
        let rows = self.sizes.batch * self.sizes.heads * self.sizes.seq_q;
        let seen = |unclear, attended| Seen {
            rows,
            unclear,
            attended,
        };
        if unclear {
            return seen(1, 0);
        }
        let layout = BlockLayout::stack_batch(&judged).unwrap();
        self.check_attention(device, q, k, &layout, |[q, k, v], options| {
            attention_selected_with_lse(q, k, v, &self.selection, options).unwrap()
        });
        seen(0, 1)
    }
}

fn blocks(layout: &BlockLayout, entry: usize, head: usize, row: usize) -> Vec<u32> {
    let entry = entry.min(layout.batch().unwrap_or(1) - 1);
    let row = layout.row(layout.pattern_of(entry, head), row);
    row.into_iter().map(|block| block.block).collect()
}
