//! Attention and its gradients in f64, pair by pair from a predicate: plain loops that share nothing
//! with the code under test.

use burn::tensor::{DType, TensorData};
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;

use crate::compare::to_f64;

#[derive(Clone, Copy, Debug)]
pub struct Sizes {
    pub batch: usize,
    pub heads: usize,
    pub kv_heads: usize,
    pub seq_q: usize,
    pub seq_kv: usize,
    pub head_dim: usize,
    pub value_dim: usize,
}

impl Sizes {
    pub fn q(&self) -> [usize; 4] {
        [self.batch, self.heads, self.seq_q, self.head_dim]
    }

    pub fn k(&self) -> [usize; 4] {
        [self.batch, self.kv_heads, self.seq_kv, self.head_dim]
    }

    pub fn v(&self) -> [usize; 4] {
        [self.batch, self.kv_heads, self.seq_kv, self.value_dim]
    }

    pub fn out(&self) -> [usize; 4] {
        [self.batch, self.heads, self.seq_q, self.value_dim]
    }
}

type Allowed = dyn Fn(usize, usize, usize, usize) -> bool;

/// Inputs, the gradient of the output, and who attends to whom: `allowed(batch, head, i, j)`.
pub struct Problem {
    pub sizes: Sizes,
    pub q: Vec<f64>,
    pub k: Vec<f64>,
    pub v: Vec<f64>,
    pub grad_out: Vec<f64>,
    allowed: Box<Allowed>,
    scale: f64,
    softcap: Option<f64>,
}

/// What attention returns, and the gradients of `sum(out · grad_out)`.
pub struct Answer {
    pub out: Vec<f64>,
    pub lse: Vec<f64>,
    /// `[batch, heads, seq_q, seq_kv]`
    pub weights: Vec<f64>,
    pub dq: Vec<f64>,
    pub dk: Vec<f64>,
    pub dv: Vec<f64>,
    /// The largest of the terms whose differences dq and dk are made of. A row with a single key has a gradient of 0, as the difference of
    /// two of these: what rounding leaves of it is relative to them.
    pub score_terms: f64,
}

impl Problem {
    pub fn random(
        sizes: Sizes,
        seed: u64,
        allowed: impl Fn(usize, usize, usize, usize) -> bool + 'static,
    ) -> Self {
        let mut rng = ChaCha8Rng::seed_from_u64(seed);
        let mut normal = |shape: [usize; 4]| -> Vec<f64> {
            // Sum of uniforms: near enough to normal, with a few scores above 1.
            (0..shape.iter().product::<usize>())
                .map(|_| (0..4).map(|_| rng.random::<f64>() - 0.5).sum::<f64>() * 1.7)
                .collect()
        };
        Self {
            q: normal(sizes.q()),
            k: normal(sizes.k()),
            v: normal(sizes.v()),
            grad_out: normal(sizes.out()),
            sizes,
            allowed: Box::new(allowed),
            scale: 1.0 / (sizes.head_dim as f64).sqrt(),
            softcap: None,
        }
    }

    pub fn options(mut self, scale: Option<f64>, softcap: Option<f64>) -> Self {
        self.scale = scale.unwrap_or(self.scale);
        self.softcap = softcap;
        self
    }

    /// Rounds every input, so that the answer is that of inputs a dtype can hold.
    pub fn round_to(&mut self, dtype: DType) {
        for values in [&mut self.q, &mut self.k, &mut self.v, &mut self.grad_out] {
            let data = TensorData::new(values.clone(), [values.len()]);
            *values = to_f64(data.convert_dtype(dtype));
        }
    }

    pub fn solve(&self) -> Answer {
        let s = self.sizes;
        let zeros = |shape: [usize; 4]| vec![0.0; shape.iter().product()];
        let mut answer = Answer {
            out: zeros(s.out()),
            lse: vec![f64::NEG_INFINITY; s.batch * s.heads * s.seq_q],
            weights: zeros([s.batch, s.heads, s.seq_q, s.seq_kv]),
            dq: zeros(s.q()),
            dk: zeros(s.k()),
            dv: zeros(s.v()),
            score_terms: 0.0,
        };
        for batch in 0..s.batch {
            for head in 0..s.heads {
                for i in 0..s.seq_q {
                    self.solve_row(batch, head, i, &mut answer);
                }
            }
        }
        answer
    }

    fn solve_row(&self, batch: usize, head: usize, i: usize, answer: &mut Answer) {
        let s = self.sizes;
        let row = (batch * s.heads + head) * s.seq_q + i;
        let kv_head = head / (s.heads / s.kv_heads);
        let kv_row = |j: usize| (batch * s.kv_heads + kv_head) * s.seq_kv + j;
        let q_range = row * s.head_dim..(row + 1) * s.head_dim;
        let out_range = row * s.value_dim..(row + 1) * s.value_dim;
        let k_range = |j: usize| kv_row(j) * s.head_dim..(kv_row(j) + 1) * s.head_dim;
        let v_range = |j: usize| kv_row(j) * s.value_dim..(kv_row(j) + 1) * s.value_dim;
        let dot = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(x, y)| x * y).sum::<f64>();

        let keys: Vec<usize> = (0..s.seq_kv)
            .filter(|&j| (self.allowed)(batch, head, i, j))
            .collect();
        if keys.is_empty() {
            return;
        }
        let q = &self.q[q_range.clone()];
        let raw: Vec<f64> = (keys.iter())
            .map(|&j| self.scale * dot(q, &self.k[k_range(j)]))
            .collect();
        let cap = |x: f64| self.softcap.map_or(x, |c| c * (x / c).tanh());
        let slope = |x: f64| self.softcap.map_or(1.0, |c| 1.0 - (x / c).tanh().powi(2));
        let max = raw
            .iter()
            .map(|&x| cap(x))
            .fold(f64::NEG_INFINITY, f64::max);
        let sum: f64 = raw.iter().map(|&x| (cap(x) - max).exp()).sum();
        let lse = max + sum.ln();
        answer.lse[row] = lse;

        let d_out = self.grad_out[out_range.clone()].to_vec();
        let p: Vec<f64> = raw.iter().map(|&x| (cap(x) - lse).exp()).collect();
        let dp: Vec<f64> = keys
            .iter()
            .map(|&j| dot(&d_out, &self.v[v_range(j)]))
            .collect();
        let delta = dot(&p, &dp);
        for (k, &j) in keys.iter().enumerate() {
            answer.weights[row * s.seq_kv + j] = p[k];
            for (out, v) in answer.out[out_range.clone()]
                .iter_mut()
                .zip(&self.v[v_range(j)])
            {
                *out += p[k] * v;
            }
            for (dv, d_out) in answer.dv[v_range(j)].iter_mut().zip(&d_out) {
                *dv += p[k] * d_out;
            }
            let ds = p[k] * (dp[k] - delta) * slope(raw[k]) * self.scale;
            let term = p[k] * dp[k].abs().max(delta.abs()) * slope(raw[k]) * self.scale.abs();
            for x in self.k[k_range(j)].iter().chain(q) {
                answer.score_terms = answer.score_terms.max(term * x.abs());
            }
            for (dq, key) in answer.dq[q_range.clone()]
                .iter_mut()
                .zip(&self.k[k_range(j)])
            {
                *dq += ds * key;
            }
            for (dk, q) in answer.dk[k_range(j)].iter_mut().zip(q) {
                *dk += ds * q;
            }
        }
    }
}
