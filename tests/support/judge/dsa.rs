//! DeepSeek sparse attention in plain f64 loops: scores, selections, losses and their gradients.

use std::slice::from_ref;

use burn_sparse_select::dsa::{Dsa, DsaIndex};

use crate::judge::golden::{val, vals};
use crate::prelude::*;

/// Makes an op that keeps `keep` keys, of them `near` nearest ones, with `numbers` scores in memory at a time.
pub fn dsa_of([keep, near]: [usize; 2], numbers: usize) -> Dsa {
    let dsa = Dsa::new(keep).unwrap().with_near(near).unwrap();
    dsa.with_chunk_elements(numbers).unwrap()
}

/// An index, and the attention that it serves; one batch entry.
#[derive(Clone)]
pub struct Problem {
    pub index_heads: usize,
    pub index_dim: usize,
    pub heads: usize,
    pub kv_heads: usize,
    pub head_dim: usize,
    pub seq: [usize; 2],
    /// `[index_heads][seq_q][index_dim]`, `[seq_kv][index_dim]` and `[index_heads][seq_q]`.
    pub index: [Vec<f64>; 3],
    /// `[heads][seq_q][head_dim]` and `[kv_heads][seq_kv][head_dim]`.
    pub q: Vec<f64>,
    pub k: Vec<f64>,
}

impl Problem {
    /// Makes a problem from heads, KV heads and their width, and the indexer's heads and width; tensors are empty.
    pub fn of(
        [heads, kv_heads, head_dim]: [usize; 3],
        [index_heads, index_dim]: [usize; 2],
        seq: [usize; 2],
    ) -> Self {
        Self {
            index_heads,
            index_dim,
            heads,
            kv_heads,
            head_dim,
            seq,
            index: [const { Vec::new() }; 3],
            q: Vec::new(),
            k: Vec::new(),
        }
    }

    pub fn filled(self, seed: u64) -> Self {
        let mut rng = seeded(seed);
        let [seq_q, seq_kv] = self.seq;
        // f32 values, so that all devices get the same.
        let mut random = |count: usize| -> Vec<f64> {
            let numbers = drawn(&mut rng, count, -1.5f32..1.5);
            numbers.into_iter().map(f64::from).collect()
        };
        let (heads, width) = (self.index_heads, self.index_dim);
        let counts = [heads * seq_q * width, seq_kv * width, heads * seq_q];
        Self {
            index: counts.map(&mut random),
            q: random(self.heads * seq_q * self.head_dim),
            k: random(self.kv_heads * seq_kv * self.head_dim),
            ..self
        }
    }

    pub fn random(seed: u64, seq: [usize; 2]) -> Self {
        Self::of([4, 2, 5], [3, 6], seq).filled(seed)
    }

    /// Rounds the tensors to a dtype.
    pub fn rounded(&self, dtype: DType) -> Self {
        let round = |x: &Vec<f64>| {
            let mut rounded = x.clone();
            round_to(&mut rounded, dtype);
            rounded
        };
        Self {
            index: self.index.each_ref().map(round),
            q: round(&self.q),
            k: round(&self.k),
            ..self.clone()
        }
    }

    pub fn golden() -> Self {
        let weights = (0..2).flat_map(|head| (0..16).map(move |i| val(5, head, i, 0)));
        Self {
            index: [vals(3, 2, 16), vals(4, 1, 16), weights.collect()],
            q: vals(0, 2, 16),
            k: vals(1, 1, 16),
            ..Self::of([2, 1, 4], [2, 4], [16, 16])
        }
    }

    /// Returns the problem of the last query.
    pub fn last_query(&self) -> Self {
        let last = |x: &[f64], width: usize| -> Vec<f64> {
            let heads = x.chunks(self.seq[0] * width);
            let rows = heads.flat_map(|rows| &rows[rows.len() - width..]);
            rows.copied().collect()
        };
        let [q, k, weights] = &self.index;
        Self {
            seq: [1, self.seq[1]],
            index: [last(q, self.index_dim), k.clone(), last(weights, 1)],
            q: last(&self.q, self.head_dim),
            ..self.clone()
        }
    }

    pub fn position(&self, query: usize) -> usize {
        query + self.seq[1] - self.seq[0]
    }

    /// Returns the scores of a query.
    pub fn scores(&self, query: usize) -> Vec<f64> {
        let keys = self.index[1].chunks(self.index_dim);
        keys.map(|key| self.score(query, key)).collect()
    }

    /// Returns the score of a query and a key.
    fn score(&self, query: usize, key: &[f64]) -> f64 {
        let ([q, _, weights], width) = (&self.index, self.index_dim);
        let scale = 1.0 / ((self.index_heads * width) as f64).sqrt();
        let of_head = |head: usize| {
            let row = head * self.seq[0] + query;
            weights[row] * dot(&q[row * width..][..width], key).max(0.0)
        };
        scale * (0..self.index_heads).map(of_head).sum::<f64>()
    }

    /// Returns the scores of blocks, by the means of their keys in a dtype.
    pub fn block_scores(&self, query: usize, block: usize, dtype: DType) -> Vec<f64> {
        let score = |keys: &[f64]| {
            let rows = keys.chunks(self.index_dim);
            let mut mean = vec![0.0; self.index_dim];
            let count = rows.len() as f64;
            rows.for_each(|row| add(&mut mean, 1.0, row));
            mean.iter_mut().for_each(|sum| *sum /= count);
            round_to(&mut mean, dtype);
            self.score(query, &mean)
        };
        let blocks = self.index[1].chunks(block * self.index_dim);
        blocks.map(score).collect()
    }

    /// Returns the keys that a query selects in two stages, and the least gap of the last selected block and key to the next.
    pub fn choice_in_blocks(
        &self,
        query: usize,
        [keep, near]: [usize; 2],
        [blocks, block]: [usize; 2],
        dtype: DType,
    ) -> (Vec<usize>, f64) {
        let position = self.position(query);
        let own = position / block;
        let local = match near {
            0 | 1 => 1,
            _ => 1 + (near - 1).div_ceil(block),
        };
        let scores = self.block_scores(query, block, dtype);
        let number = |at: usize| match at == 0 || at + local > own {
            true => f64::INFINITY,
            false => scores[at],
        };
        let order = by_falling_score(0..=own, number);
        let (taken, rest) = order.split_at(blocks.min(order.len()));
        let of_blocks = match rest.first() {
            Some(&next) => number(taken[blocks - 1]) - number(next),
            None => f64::INFINITY,
        };
        let keys = (0..=position).filter(|key| taken.contains(&(key / block)));
        let scores = self.scores(query);
        let (chosen, of_keys) = self.choice_among(keys, &scores, query, [keep, near]);
        (chosen, of_blocks.min(of_keys))
    }

    /// Returns the keys that a query selects by scores, and the gap of the last one to the next.
    pub fn choice_by(&self, scores: &[f64], query: usize, keeps: [usize; 2]) -> (Vec<usize>, f64) {
        self.choice_among(0..=self.position(query), scores, query, keeps)
    }

    fn choice_among(
        &self,
        keys: impl Iterator<Item = usize>,
        scores: &[f64],
        query: usize,
        [keep, near]: [usize; 2],
    ) -> (Vec<usize>, f64) {
        let position = self.position(query);
        let is_near = |key: usize| key + near > position;
        let number = |key: usize| match is_near(key) {
            true => f64::INFINITY,
            false => scores[key],
        };
        let order = by_falling_score(keys, number);
        let kept = keep.min(order.len());
        let gap = match order.get(kept) {
            Some(&next) => number(order[kept - 1]) - number(next),
            None => f64::INFINITY,
        };
        let mut chosen = order[..kept].to_vec();
        chosen.sort_unstable();
        (chosen, gap)
    }

    pub fn choice(&self, query: usize, keep: usize, near: usize) -> (Vec<usize>, f64) {
        self.choice_by(&self.scores(query), query, [keep, near])
    }

    /// Returns the target: dense attention restricted to a query's keys and normalized.
    pub fn wanted(&self, query: usize, scale: f64, keys: &[usize]) -> Vec<f64> {
        let mut dense = vec![0.0; self.position(query) + 1];
        for head in 0..self.heads {
            let kv_head = head / (self.heads / self.kv_heads);
            let width = self.head_dim;
            let q = &self.q[(head * self.seq[0] + query) * width..][..width];
            let k = |key: usize| &self.k[(kv_head * self.seq[1] + key) * width..][..width];
            let score = |key: usize| dot(q, k(key)) * scale;
            let weights = softmax(&(0..dense.len()).map(score).collect::<Vec<_>>());
            add(&mut dense, 1.0 / self.heads as f64, &weights);
        }
        // Attention to later keys is 0; lists may contain them.
        let dense = |key: usize| dense.get(key).copied().unwrap_or(0.0);
        let total: f64 = keys.iter().map(|&key| dense(key)).sum();
        let total = total.max(1e-30);
        keys.iter().map(|&key| dense(key) / total).collect()
    }

    /// Returns the mean of `KL(t ‖ softmax x)` over the queries, and its gradients with respect to the index.
    pub fn loss(&self, scale: f64, keys: impl Fn(usize) -> Vec<usize>) -> (f64, [Vec<f64>; 3]) {
        let ([q, k, weights], width) = (&self.index, self.index_dim);
        let mut loss = 0.0;
        let mut grads = self.index.each_ref().map(|x| vec![0.0; x.len()]);
        let count = self.seq[0] as f64;
        let factor = 1.0 / ((self.index_heads * width) as f64).sqrt() / count;
        for query in 0..self.seq[0] {
            let keys = keys(query);
            let scores = self.scores(query);
            let scores: Vec<f64> = keys.iter().map(|&key| scores[key]).collect();
            let (own, by_scores) = divergence(&self.wanted(query, scale, &keys), &scores);
            loss += own / count;
            for (&key, by_score) in keys.iter().zip(by_scores) {
                let by_score = by_score * factor;
                for head in 0..self.index_heads {
                    let row = head * self.seq[0] + query;
                    let (of_q, of_k) = (row * width, key * width);
                    let (q, k) = (&q[of_q..][..width], &k[of_k..][..width]);
                    let product = dot(q, k);
                    if product > 0.0 {
                        grads[2][row] += by_score * product;
                        add(&mut grads[0][of_q..][..width], by_score * weights[row], k);
                        add(&mut grads[1][of_k..][..width], by_score * weights[row], q);
                    }
                }
            }
        }
        (loss, grads)
    }

    /// Concatenates one index tensor of all problems.
    pub fn parts(problems: &[Self], part: usize) -> Vec<f64> {
        let parts = problems.iter().flat_map(|problem| &problem.index[part]);
        parts.copied().collect()
    }

    /// Stacks the indices of problems of one size into a batch.
    pub fn index_of(problems: &[Self], device: &Device, dtype: DType) -> DsaIndex {
        let (batch, first) = (problems.len(), &problems[0]);
        let (heads, width, [seq_q, seq_kv]) = (first.index_heads, first.index_dim, first.seq);
        let [q, k, weights] = [0, 1, 2].map(|part| Self::parts(problems, part));
        let q = tensor(&q, [batch, heads, seq_q, width], device, dtype);
        let k = tensor(&k, [batch, 1, seq_kv, width], device, dtype);
        let weights = tensor(&weights, [batch, heads, seq_q], device, dtype);
        DsaIndex::new(q, k, weights).unwrap()
    }

    pub fn index(&self, device: &Device, dtype: DType) -> DsaIndex {
        Self::index_of(from_ref(self), device, dtype)
    }

    /// Stacks the queries and keys of problems of one size into a batch.
    pub fn queries_and_keys_of(problems: &[Self], device: &Device, dtype: DType) -> [Tensor<4>; 2] {
        let (batch, of) = (problems.len(), &problems[0]);
        let all = |part: fn(&Self) -> &[f64]| problems.iter().flat_map(part).copied().collect();
        let [q, k]: [Vec<f64>; 2] = [all(|x| &x.q), all(|x| &x.k)];
        let [seq_q, seq_kv] = of.seq;
        [
            tensor(&q, [batch, of.heads, seq_q, of.head_dim], device, dtype),
            tensor(&k, [batch, of.kv_heads, seq_kv, of.head_dim], device, dtype),
        ]
    }

    pub fn queries_and_keys(&self, device: &Device, dtype: DType) -> [Tensor<4>; 2] {
        Self::queries_and_keys_of(from_ref(self), device, dtype)
    }
}
