//! Problems of queries that choose for themselves (MoBA), with the choice in plain f64 loops.

use burn_sparse_select::{Always, Selection, attention_selected_with_lse};

use crate::prelude::*;

/// A query's own block alone.
pub const OWN: Always = Always { first: 0, local: 1 };

/// The blocks that each query chooses between its forced ones, by falling score: `[batch · heads · seq_q]`; and the least difference of two scores that decides.
pub fn choices(
    problem: &Problem,
    block: usize,
    keep: usize,
    forced: Always,
) -> (Vec<Vec<usize>>, f64) {
    let s = problem.sizes;
    let count = keep.saturating_sub(forced.first.saturating_add(forced.local));
    let (mut chosen, mut least) = (Vec::new(), f64::INFINITY);
    for (batch, head) in (0..s.batch).flat_map(|batch| (0..s.heads).map(move |head| (batch, head)))
    {
        let kv_head = batch * s.kv_heads + head / (s.heads / s.kv_heads);
        let mean = |block_of: usize, c: usize| {
            let keys = block_of * block..(block_of + 1) * block;
            let sum: f64 = keys
                .map(|j| problem.k[(kv_head * s.seq_kv + j) * s.head_dim + c])
                .sum();
            sum / block as f64
        };
        let past_of_all = s.seq_kv / block;
        let means: Vec<Vec<f64>> = (0..past_of_all)
            .map(|block| (0..s.head_dim).map(|c| mean(block, c)).collect())
            .collect();
        for i in 0..s.seq_q {
            let row = (batch * s.heads + head) * s.seq_q + i;
            let q = &problem.q[row * s.head_dim..][..s.head_dim];
            let past = (i + s.seq_kv).saturating_sub(s.seq_q) / block;
            let nearest = (past + 1).saturating_sub(forced.local);
            let mut scores: Vec<(f64, usize)> = (forced.first.min(nearest)..nearest)
                .map(|block| (dot(q, &means[block]), block))
                .collect();
            scores.sort_by(|x, y| y.0.total_cmp(&x.0).then(x.1.cmp(&y.1)));
            for pair in scores.windows(2).take(count) {
                least = least.min(pair[0].0 - pair[1].0);
            }
            scores.truncate(count);
            chosen.push(scores.into_iter().map(|(_, block)| block).collect());
        }
    }
    (chosen, least)
}

/// The problem of attention over given choices and forced blocks.
fn over_choices(
    sizes: Sizes,
    seed: u64,
    (block, forced): (usize, Always),
    chosen: Vec<Vec<usize>>,
) -> Problem {
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

/// Queries and keys, the block, blocks that are kept, and what the cases have other than [`CASE`].
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
        let mut case = Case {
            name,
            seq: all(seq),
            block: one(block),
            keep: one(keep),
            ..CASE
        };
        for (word, numbers) in settings(rest) {
            match word {
                "heads" => case.heads = all(numbers),
                "forced" => [case.forced.first, case.forced.local] = all(numbers),
                "alone" => (case.batch, case.heads, case.dims) = (1, [1, 1], [4, 8]),
                _ => panic!("{name}: {word} is nothing to set"),
            }
        }
        case
    };
    rows(TABLE).into_iter().map(case).collect()
}

impl Case {
    pub fn sizes(&self) -> Sizes {
        Sizes::new(
            [self.batch, self.heads[0], self.heads[1]],
            [self.seq[0], self.seq[1]],
            [self.dims[0], self.dims[1]],
        )
    }

    pub fn selection(&self) -> Selection {
        let mut text = format!("moba:{},{}", self.block, self.keep);
        let named = [
            ("first", self.forced.first, OWN.first),
            ("local", self.forced.local, OWN.local),
        ];
        for (name, number, _) in named.iter().filter(|(_, number, own)| number != own) {
            text += &format!(",{name}={number}");
        }
        let selection: Selection = text.parse().unwrap();
        assert_eq!(selection.to_string(), text);
        selection
    }

    /// The first problem from a seed on whose choices do not hang on a rounding.
    pub fn problem(&self, seed: u64, dtype: DType) -> (Problem, Vec<Vec<usize>>) {
        for seed in seed.. {
            let mut drawn = Problem::random(self.sizes(), seed, |_, _, _, _| false);
            drawn.round_to(dtype);
            let (chosen, least) = choices(&drawn, self.block, self.keep, self.forced);
            if least > 4e-6 {
                let blocks = (self.block, self.forced);
                let problem = over_choices(self.sizes(), seed, blocks, chosen.clone());
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
