//! MiniMax sparse attention in plain f64 loops, from its definition (MiniMax, 2026): block scores, selections, attention over them, and the loss of
//! the index branch.

use burn_sparse_select::msa::{Msa, MsaIndex};

use crate::prelude::*;

#[derive(Clone, Copy, Debug)]
pub struct Case {
    pub name: &'static str,
    pub batch: usize,
    pub heads: [usize; 2],
    pub seq: [usize; 2],
    pub dims: [usize; 2],
    pub index_dim: usize,
    pub block: usize,
    pub keep: usize,
}

const CASE: Case = Case {
    name: "",
    batch: 2,
    heads: [4, 2],
    seq: [90, 90],
    dims: [16, 8],
    index_dim: 6,
    block: 8,
    keep: 4,
};

/// Queries and keys, block size, number of blocks kept, and settings that differ from [`CASE`].
const TABLE: &str = "
    groups of two, ragged       | 90 90   | 8   | 4   |
    each head for itself        | 83 83   | 16  | 3   | heads 2 2
    one group of four           | 71 71   | 8   | 3   | heads 4 1
    fewer queries               | 37 150  | 16  | 4   |
    a query of many keys        | 1 77    | 8   | 4   |
    one query and key           | 1 1     | 8   | 2   |
    one block more than is kept | 33 33   | 8   | 4   | heads 4 4
    as many blocks as are kept  | 32 32   | 8   | 4   |
    more than there are         | 50 50   | 16  | 100 |
    the own block alone         | 70 70   | 16  | 1   |
    blocks of 128               | 400 400 | 128 | 2   | batch 1, heads 4 1, index 16
    blocks of 256               | 900 900 | 256 | 3   | batch 1, heads 2 1, dims 4 8
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
                "batch" => case.batch = one(numbers),
                "heads" => case.heads = all(numbers),
                "dims" => case.dims = all(numbers),
                "index" => case.index_dim = one(numbers),
                _ => panic!("{name}: {word} is nothing to set"),
            }
        }
        case
    };
    rows(TABLE).into_iter().map(case).collect()
}

impl Case {
    pub fn msa(&self) -> Msa {
        Msa::new(self.block, self.keep).unwrap()
    }

    pub fn position(&self, query: usize) -> usize {
        query + self.seq[1] - self.seq[0]
    }

    fn sizes(&self) -> Sizes {
        let [heads, kv_heads] = self.heads;
        Sizes::new([self.batch, heads, kv_heads], self.seq, self.dims)
    }
}

/// An index, `[batch][kv_heads][seq_q][index_dim]` and `[batch][seq_kv][index_dim]`.
#[derive(Clone, Debug)]
pub struct Index {
    pub case: Case,
    pub q: Vec<f64>,
    pub k: Vec<f64>,
}

impl Index {
    /// Returns the first index, from a seed on, rounded to a dtype, whose selection no rounding can change.
    pub fn clear(case: Case, seed: u64, dtype: DType, gap: f64) -> Self {
        let ([_, groups], [seq_q, seq_kv]) = (case.heads, case.seq);
        let (batch, index_dim) = (case.batch, case.index_dim);
        let index = |seed: u64| {
            let mut q = numbers(seed, batch * groups * seq_q * index_dim);
            let mut k = numbers(seed + 1000, batch * seq_kv * index_dim);
            round_to(&mut q, dtype);
            round_to(&mut k, dtype);
            Self { case, q, k }
        };
        let mut drawn = (seed..seed + 500).map(index);
        let is_clear = |index: &Self| index.rows().all(|row| index.choice(row).1 > gap);
        drawn.find(is_clear).expect("one of them has no near ties")
    }

    /// Lists batch entry, KV head and query of each list.
    pub fn rows(&self) -> impl Iterator<Item = [usize; 3]> {
        let (batch, [_, groups], [seq_q, _]) = (self.case.batch, self.case.heads, self.case.seq);
        let row = move |at| [at / seq_q / groups, at / seq_q % groups, at % seq_q];
        (0..batch * groups * seq_q).map(row)
    }

    fn places(&self, [batch, group, query]: [usize; 3], key: usize) -> [usize; 2] {
        let ([_, groups], [seq_q, seq_kv]) = (self.case.heads, self.case.seq);
        let index_dim = self.case.index_dim;
        let row = (batch * groups + group) * seq_q + query;
        [row * index_dim, (batch * seq_kv + key) * index_dim]
    }

    /// Returns the score of a query and a key.
    pub fn score(&self, row: [usize; 3], key: usize) -> f64 {
        let width = self.case.index_dim;
        let [q, k] = self.places(row, key);
        dot(&self.q[q..][..width], &self.k[k..][..width]) / (width as f64).sqrt()
    }

    /// Returns the highest score of a block's keys.
    pub fn block_score(&self, row: [usize; 3], block: usize) -> f64 {
        let keys = block * self.case.block..((block + 1) * self.case.block).min(self.case.seq[1]);
        keys.fold(f64::NEG_INFINITY, |most, key| {
            most.max(self.score(row, key))
        })
    }

    /// Returns the blocks that a query keeps, its own included, ascending; and the gap of the last selected block to the next.
    pub fn choice(&self, row: [usize; 3]) -> (Vec<usize>, f64) {
        let own = self.case.position(row[2]) / self.case.block;
        let scores: Vec<f64> = (0..own).map(|block| self.block_score(row, block)).collect();
        let order = by_falling_score(0..own, |block| scores[block]);
        let count = (self.case.keep - 1).min(own);
        let gap = match (count, order.get(count)) {
            (1.., Some(&next)) => scores[order[count - 1]] - scores[next],
            _ => f64::INFINITY,
        };
        let mut kept = order[..count].to_vec();
        kept.push(own);
        kept.sort_unstable();
        (kept, gap)
    }

    /// Returns the keys that a query attends to.
    pub fn keys(&self, row: [usize; 3]) -> Vec<usize> {
        let (blocks, _) = self.choice(row);
        let seen = 0..=self.case.position(row[2]);
        let seen = seen.filter(|key| blocks.contains(&(key / self.case.block)));
        seen.collect()
    }

    pub fn tensors(&self, device: &Device, dtype: DType) -> MsaIndex {
        let ([_, groups], [seq_q, seq_kv]) = (self.case.heads, self.case.seq);
        let (batch, index_dim) = (self.case.batch, self.case.index_dim);
        let q = tensor(&self.q, [batch, groups, seq_q, index_dim], device, dtype);
        let k = tensor(&self.k, [batch, 1, seq_kv, index_dim], device, dtype);
        MsaIndex::new(q, k).unwrap()
    }

    /// Makes the problem of attention over the selection.
    pub fn problem(&self, seed: u64, dtype: DType) -> Problem {
        let (index, case) = (self.clone(), self.case);
        let group = case.heads[0] / case.heads[1];
        let lists: Vec<_> = index.rows().map(|row| index.keys(row)).collect();
        let problem = Problem::random(case.sizes(), seed, move |batch, head, i, j| {
            let list = (batch * case.heads[1] + head / group) * case.seq[0] + i;
            lists[list].binary_search(&j).is_ok()
        });
        let mut problem = problem.with_grad_lse(seed);
        problem.round_to(dtype);
        problem
    }

    /// Returns the loss of the index branch, over the selected keys or all, and its gradients with respect to its queries and keys.
    pub fn loss(&self, problem: &Problem, scale: f64, all: bool) -> (f64, [Vec<f64>; 2]) {
        let case = self.case;
        let ([heads, groups], [seq_q, seq_kv], [width, _]) = (case.heads, case.seq, case.dims);
        let count = (case.batch * groups * seq_q) as f64;
        let mut loss = 0.0;
        let mut grads = [&self.q, &self.k].map(|x| vec![0.0; x.len()]);
        for row in self.rows() {
            let [batch, group, query] = row;
            let keys: Vec<usize> = match all {
                true => (0..=case.position(query)).collect(),
                false => self.keys(row),
            };
            let mut wanted = vec![0.0; keys.len()];
            for head in group * (heads / groups)..(group + 1) * (heads / groups) {
                let q = &problem.q[((batch * heads + head) * seq_q + query) * width..][..width];
                let score = |&key: &usize| {
                    let k = ((batch * groups + group) * seq_kv + key) * width;
                    dot(q, &problem.k[k..][..width]) * scale
                };
                let weights = softmax(&keys.iter().map(score).collect::<Vec<_>>());
                add(&mut wanted, 1.0 / (heads / groups) as f64, &weights);
            }
            let scores: Vec<f64> = keys.iter().map(|&key| self.score(row, key)).collect();
            let (divergence, by_scores) = divergence(&wanted, &scores);
            loss += divergence / count;
            for (&key, by_score) in keys.iter().zip(by_scores) {
                let by_score = by_score / count / (case.index_dim as f64).sqrt();
                let [q, k] = self.places(row, key);
                let width = case.index_dim;
                add(&mut grads[0][q..][..width], by_score, &self.k[k..][..width]);
                add(&mut grads[1][k..][..width], by_score, &self.q[q..][..width]);
            }
        }
        (loss, grads)
    }
}
