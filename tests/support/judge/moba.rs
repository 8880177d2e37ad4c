//! Problems with selection per query (MoBA), with the selection in plain f64 loops.

use burn_sparse_select::{Always, Selection, attention_selected_with_lse};

use crate::prelude::*;

/// Forces a query's own block alone.
pub const OWN: Always = Always { first: 0, local: 1 };

/// Returns the blocks that each query selects besides its forced ones, by descending score, `[batch · heads · seq_q]`; and the least score gap that
/// decides.
pub fn choices(problem: &Problem, of: &Case) -> (Vec<Vec<usize>>, f64) {
    let (s, (block, keep, forced)) = (problem.sizes, (of.block, of.keep, of.forced));
    let count = keep.saturating_sub(forced.first.saturating_add(forced.local));
    let (mut chosen, mut least) = (Vec::new(), f64::INFINITY);
    for (batch, head) in (0..s.batch * s.heads).map(|at| (at / s.heads, at % s.heads)) {
        let kv_head = batch * s.kv_heads + head / (s.heads / s.kv_heads);
        let keys = &problem.k[kv_head * s.seq_kv * s.head_dim..][..s.seq_kv * s.head_dim];
        let means = keys.chunks_exact(block * s.head_dim).map(|keys| {
            let mut mean = vec![0.0; s.head_dim];
            let keys = keys.chunks(s.head_dim);
            keys.for_each(|key| add(&mut mean, 1.0 / block as f64, key));
            mean
        });
        let means: Vec<Vec<f64>> = means.collect();
        for i in 0..s.seq_q {
            let row = (batch * s.heads + head) * s.seq_q + i;
            let q = &problem.q[row * s.head_dim..][..s.head_dim];
            let past = (i + s.seq_kv).saturating_sub(s.seq_q) / block;
            let nearest = (past + 1).saturating_sub(forced.local);
            let score = |block: usize| dot(q, &means[block]);
            let mut blocks = by_falling_score(forced.first.min(nearest)..nearest, score);
            for pair in blocks.windows(2).take(count) {
                least = least.min(score(pair[0]) - score(pair[1]));
            }
            blocks.truncate(count);
            chosen.push(blocks);
        }
    }
    (chosen, least)
}

/// Makes the problem of attention over given selections and forced blocks.
fn over_choices(case: &Case, seed: u64, chosen: Vec<Vec<usize>>) -> Problem {
    let (sizes, block, forced) = (case.sizes(), case.block, case.forced);
    Problem::random(sizes, seed, move |batch, head, i, j| {
        let row = (batch * sizes.heads + head) * sizes.seq_q + i;
        let position = (i + sizes.seq_kv) as i64 - sizes.seq_q as i64;
        if j as i64 > position {
            return false;
        }
        let (own, of_key) = (position as usize / block, j / block);
        let is_forced = of_key < forced.first || own - of_key < forced.local;
        is_forced || chosen[row].contains(&of_key)
    })
}

#[derive(Clone, Copy)]
pub struct Case {
    pub name: &'static str,
    pub batch: usize,
    pub heads: [usize; 2],
    pub seq: [usize; 2],
    pub dims: [usize; 2],
    pub block: usize,
    pub keep: usize,
    pub forced: Always,
}

pub const CASE: Case = Case {
    name: "blocks of 16",
    batch: 2,
    heads: [2, 2],
    seq: [96, 96],
    dims: [16, 16],
    block: 16,
    keep: 3,
    forced: OWN,
};

/// Queries and keys, block size, number of blocks kept, and settings that differ from [`CASE`].
const TABLE: &str = "
    blocks of 16                  | 96 96     | 16  | 3   |
    ragged, grouped heads         | 83 83     | 8   | 4   | heads 4 2
    one head of keys              | 75 75     | 32  | 2   | heads 6 1
    shorter than a block          | 21 21     | 32  | 3   |
    one query and key             | 1 1       | 8   | 2   |
    a query of many keys          | 1 77      | 8   | 4   |
    as long as a block            | 32 32     | 32  | 3   |
    one key more than a block     | 33 33     | 32  | 3   |
    more than there are           | 70 70     | 16  | 100 |
    its own block only            | 70 70     | 16  | 1   |
    fewer queries                 | 37 150    | 16  | 3   | heads 4 2
    more queries                  | 90 41     | 8   | 3   |
    blocks of 64                  | 300 300   | 64  | 3   |
    blocks of 128                 | 400 400   | 128 | 2   | heads 2 1
    blocks of 256                 | 900 900   | 256 | 3   | alone
    blocks of 640, fewer queries  | 300 1500  | 640 | 3   | alone
    the first and the one before  | 130 130   | 16  | 5   | forced 1 2
    two first ones, fewer queries | 37 150    | 16  | 5   | heads 4 2, forced 2 1
    two before, ragged            | 83 83     | 8   | 5   | forced 0 3
    more queries, with a first    | 90 41     | 8   | 4   | forced 1 2
    forced ones only              | 90 90     | 8   | 4   | forced 3 2
    all are forced                | 50 50     | 8   | 2   | forced 18446744073709551615 1
    all before are forced         | 50 50     | 8   | 2   | forced 1 18446744073709551615
    blocks of 256, forced         | 1300 1300 | 256 | 4   | alone, forced 1 2
";

pub fn cases() -> Vec<Case> {
    let case = |[name, seq, block, keep, rest]: [&'static str; 5]| {
        let mut case = Case { name, ..CASE };
        (case.seq, case.block, case.keep) = (all(seq), one(block), one(keep));
        case.with(rest)
    };
    rows(TABLE).into_iter().map(case).collect()
}

impl Case {
    /// Applies settings to the case.
    pub fn with(mut self, rest: &'static str) -> Self {
        for (word, numbers) in settings(rest) {
            match word {
                "batch" => self.batch = one(numbers),
                "heads" => self.heads = all(numbers),
                "seq" => self.seq = all(numbers),
                "dims" => self.dims = all(numbers),
                "block" => self.block = one(numbers),
                "keep" => self.keep = one(numbers),
                "forced" => [self.forced.first, self.forced.local] = all(numbers),
                "alone" => (self.batch, self.heads, self.dims) = (1, [1, 1], [4, 8]),
                _ => panic!("{}: {word} is nothing to set", self.name),
            }
        }
        self
    }

    pub fn sizes(&self) -> Sizes {
        let [heads, kv_heads] = self.heads;
        Sizes::new([self.batch, heads, kv_heads], self.seq, self.dims)
    }

    pub fn selection(&self) -> Selection {
        let mut text = format!("moba:{},{}", self.block, self.keep);
        let Always { first, local } = self.forced;
        let named = [("first", first, OWN.first), ("local", local, OWN.local)];
        for (name, number, _) in named.iter().filter(|(_, number, own)| number != own) {
            text += &format!(",{name}={number}");
        }
        let selection: Selection = text.parse().unwrap();
        assert_eq!(selection.to_string(), text);
        selection
    }

    /// Returns the first problem, from a seed on, whose selection no rounding can change.
    pub fn problem(&self, seed: u64, dtype: DType) -> (Problem, Vec<Vec<usize>>) {
        for seed in seed.. {
            let mut drawn = Problem::random(self.sizes(), seed, |_, _, _, _| false);
            drawn.round_to(dtype);
            let (chosen, least) = choices(&drawn, self);
            if least > 4e-6 {
                let problem = over_choices(self, seed, chosen.clone());
                let mut problem = problem.with_grad_lse(seed);
                problem.round_to(dtype);
                return (problem, chosen);
            }
        }
        unreachable!("there are more seeds")
    }
}

pub fn selected(
    problem: &Problem,
    selection: &Selection,
    device: &Device,
    dtype: DType,
) -> Results {
    differentiated(problem, device, dtype, |q, k, v| {
        attention_selected_with_lse(q, k, v, selection, AttentionOptions::default()).unwrap()
    })
}
