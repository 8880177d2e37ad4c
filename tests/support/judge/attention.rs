//! Attention and its gradients in f64, pair by pair from a predicate, in plain loops that share nothing with the code under test.

use crate::judge::rounding::Spread;
use crate::prelude::*;

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
    /// Makes sizes from batch, heads and KV heads; queries and keys; widths of keys and values.
    pub const fn new(
        [batch, heads, kv_heads]: [usize; 3],
        [seq_q, seq_kv]: [usize; 2],
        [head_dim, value_dim]: [usize; 2],
    ) -> Self {
        Self {
            batch,
            heads,
            kv_heads,
            seq_q,
            seq_kv,
            head_dim,
            value_dim,
        }
    }

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

/// Inputs, the gradients with respect to output and lse (0 by default), and the predicate of attended pairs: `allowed(batch, head, i, j)`.
pub struct Problem {
    pub sizes: Sizes,
    pub q: Vec<f64>,
    pub k: Vec<f64>,
    pub v: Vec<f64>,
    pub grad_out: Vec<f64>,
    /// `[batch, heads, seq_q]`
    pub grad_lse: Vec<f64>,
    allowed: Box<Allowed>,
    scale: f64,
    softcap: Option<f64>,
    /// `[heads]`: sink logits, with value 0.
    pub sinks: Option<Vec<f64>>,
    /// `[heads]`: ALiBi slopes.
    pub slopes: Option<Vec<f64>>,
    pub dropout: Option<Dropout>,
    /// Added to the scores.
    pub bias: Option<Bias>,
    /// Relative bias, added to the scores: `[heads or 1, 2 · reach + 1]`.
    pub relative: Option<Relative>,
    /// Softmax threshold of the call. Not computed here: checks bound the effect of skipped blocks.
    pub threshold: Option<f64>,
}

/// Relative bias.
pub struct Relative {
    pub shape: [usize; 2],
    pub values: Vec<f64>,
}

impl Relative {
    /// Returns the index for a key `ahead` of its query.
    fn place(&self, head: usize, ahead: i64) -> usize {
        let [heads, width] = self.shape;
        let reach = (width / 2) as i64;
        head.min(heads - 1) * width + (ahead.clamp(-reach, reach) + reach) as usize
    }
}

/// A bias `[batch or 1, heads or 1, seq_q or 1, seq_kv]`.
pub struct Bias {
    pub shape: [usize; 4],
    pub values: Vec<f64>,
}

impl Bias {
    fn place(&self, batch: usize, head: usize, i: usize, j: usize) -> usize {
        let [batches, heads, queries, keys] = self.shape;
        let row = batch.min(batches - 1) * heads + head.min(heads - 1);
        (row * queries + i.min(queries - 1)) * keys + j
    }
}

/// Outputs, and the gradients of `sum(out · grad_out) + sum(lse · grad_lse)`.
pub struct Answer {
    pub out: Vec<f64>,
    pub lse: Vec<f64>,
    /// `[batch, heads, seq_q]`: largest score of each row, without the sink.
    pub max_scores: Vec<f64>,
    /// `[batch, heads, seq_q, seq_kv]`
    pub weights: Vec<f64>,
    pub dq: Vec<f64>,
    pub dk: Vec<f64>,
    pub dv: Vec<f64>,
    /// With respect to the sinks, `[heads]`.
    pub dsinks: Vec<f64>,
    /// With respect to the bias.
    pub dbias: Vec<f64>,
    /// With respect to the relative bias.
    pub drelative: Vec<f64>,
    /// The largest of the terms whose differences are dq and dk. A row with a single key has gradient 0, the difference of two of these, so its
    /// rounding error is relative to them.
    pub score_terms: f64,
    /// Likewise for dbias; for the sinks their sum.
    pub bias_terms: f64,
    pub sink_terms: f64,
    pub relative_terms: f64,
    /// Parts of the rows of out, dq, dk and dv, and of the elements of dbias, drelative and dsinks.
    pub spreads: Spreads,
}

/// Parts of each row of a tensor, in order.
#[derive(Default)]
pub struct Spreads {
    pub out: Vec<Spread>,
    pub dq: Vec<Spread>,
    pub dk: Vec<Spread>,
    pub dv: Vec<Spread>,
    pub dbias: Vec<Spread>,
    pub drelative: Vec<Spread>,
    pub dsinks: Vec<Spread>,
}

/// Adds parts from one row of queries, whose errors are correlated, to the spreads of elements.
fn add_squares(spreads: &mut [Spread], parts: Vec<(usize, [f64; 3])>) {
    let mut sums: std::collections::BTreeMap<usize, [f64; 3]> = Default::default();
    for (place, part) in parts {
        let sums = sums.entry(place).or_default();
        sums.iter_mut().zip(part).for_each(|(sum, x)| *sum += x);
    }
    for (place, [terms, delta, factors]) in sums {
        spreads[place].terms += terms * terms;
        spreads[place].delta += delta * delta;
        spreads[place].factors += factors * factors;
    }
}

/// A result: its values, the terms whose differences the largest of them are, and the parts of its rows, which lse, largest scores and weights lack.
pub struct Expected<'a> {
    pub values: &'a [f64],
    pub terms: f64,
    pub rows: &'a [Spread],
}

impl Answer {
    pub fn result(&self, name: &str) -> Expected<'_> {
        let spreads = &self.spreads;
        let (values, terms, rows): (&[f64], f64, &[Spread]) = match name {
            "out" => (&self.out, 0.0, &spreads.out),
            "lse" => (&self.lse, 0.0, &[]),
            "max_scores" => (&self.max_scores, 0.0, &[]),
            "weights" => (&self.weights, 0.0, &[]),
            "dq" => (&self.dq, self.score_terms, &spreads.dq),
            "dk" => (&self.dk, self.score_terms, &spreads.dk),
            "dv" => (&self.dv, 0.0, &spreads.dv),
            "dsinks" => (&self.dsinks, self.sink_terms, &spreads.dsinks),
            "dbias" => (&self.dbias, self.bias_terms, &spreads.dbias),
            "drelative" => (&self.drelative, self.relative_terms, &spreads.drelative),
            _ => panic!("{name} is no result"),
        };
        Expected {
            values,
            terms,
            rows,
        }
    }
}

/// Kind of error bound.
#[derive(Clone, Copy, Debug)]
pub enum Near {
    /// On a tensor, relative to its largest value.
    Tensor(f64),
    /// On a tensor, relative also to the terms whose differences its largest values are.
    Terms(f64),
    /// On each row, from the roundings to a dtype.
    Rows(DType),
}

impl Answer {
    /// Panics if a result violates one of the bounds.
    pub fn assert(
        &self,
        what: &str,
        results: impl IntoIterator<Item = (&'static str, TensorData)>,
        bounds: &[Near],
    ) {
        for (name, got) in results {
            let (what, expected) = (format!("{what}: {name}"), self.result(name));
            for bound in bounds {
                let (got, values) = (got.clone(), expected.values);
                match *bound {
                    Near::Tensor(tolerance) => assert_close(&what, got, values, tolerance),
                    Near::Terms(tolerance) => {
                        assert_close_to(expected.terms, &what, got, values, tolerance);
                    }
                    Near::Rows(dtype) => assert_rows(&what, got, &expected, dtype),
                }
            }
        }
    }
}

impl Problem {
    pub fn random(
        sizes: Sizes,
        seed: u64,
        allowed: impl Fn(usize, usize, usize, usize) -> bool + 'static,
    ) -> Self {
        let mut rng = seeded(seed);
        // A sum of uniforms is close enough to normal, with a few scores above 1.
        let mut number = |_| (0..4).map(|_| rng.random::<f64>() - 0.5).sum::<f64>() * 1.7;
        let mut normal = |shape: [usize; 4]| -> Vec<f64> {
            (0..shape.iter().product()).map(&mut number).collect()
        };
        Self {
            q: normal(sizes.q()),
            k: normal(sizes.k()),
            v: normal(sizes.v()),
            grad_out: normal(sizes.out()),
            grad_lse: vec![0.0; sizes.batch * sizes.heads * sizes.seq_q],
            sizes,
            allowed: Box::new(allowed),
            scale: 1.0 / (sizes.head_dim as f64).sqrt(),
            softcap: None,
            sinks: None,
            slopes: None,
            dropout: None,
            bias: None,
            relative: None,
            threshold: None,
        }
    }

    pub fn options(mut self, scale: Option<f64>, softcap: Option<f64>) -> Self {
        self.scale = scale.unwrap_or(self.scale);
        self.softcap = softcap;
        self
    }

    /// Sets a random gradient with respect to lse.
    pub fn with_grad_lse(mut self, seed: u64) -> Self {
        let mut rng = seeded(seed);
        let grads = self.grad_lse.iter_mut();
        grads.for_each(|grad| *grad = 2.0 * rng.random::<f64>() - 1.0);
        self
    }

    /// Sets random sink logits.
    pub fn with_sinks(mut self, seed: u64) -> Self {
        let mut rng = seeded(seed);
        let heads = 0..self.sizes.heads;
        self.sinks = Some(heads.map(|_| 4.0 * rng.random::<f64>() - 2.0).collect());
        self
    }

    /// Adds `size` to the bias of every other pair and subtracts it from the rest.
    pub fn add_alternating_bias(&mut self, size: f64) {
        let s = self.sizes;
        let bias = self.bias.get_or_insert_with(|| {
            let shape = [1, 1, s.seq_q, s.seq_kv];
            let values = vec![0.0; s.seq_q * s.seq_kv];
            Bias { shape, values }
        });
        for (place, value) in bias.values.iter_mut().enumerate() {
            *value += if place % 2 == 0 { size } else { -size };
        }
    }

    /// Sets ALiBi slopes.
    pub fn with_slopes(mut self, slopes: Vec<f64>) -> Self {
        self.slopes = Some(slopes);
        self
    }

    /// Sets dropout of the weights.
    pub fn with_dropout(mut self, dropout: Dropout) -> Self {
        self.dropout = Some(dropout);
        self
    }

    /// Sets a random bias; `shared` tells whether batch entries, heads and queries share it.
    pub fn with_bias(mut self, seed: u64, shared: [bool; 3]) -> Self {
        let mut rng = seeded(seed);
        let s = self.sizes;
        let mut shape = [s.batch, s.heads, s.seq_q, s.seq_kv];
        for (length, shared) in shape.iter_mut().zip(shared) {
            *length = if shared { 1 } else { *length };
        }
        let values = (0..shape.iter().product::<usize>()).map(|_| 3.0 * rng.random::<f64>() - 1.5);
        let values = values.collect();
        self.bias = Some(Bias { shape, values });
        self
    }

    /// Sets random relative biases up to distance `reach`, which heads may share.
    pub fn with_relative(mut self, seed: u64, reach: usize, shared: bool) -> Self {
        let mut rng = seeded(seed ^ 0x7ab1e);
        let shape = [if shared { 1 } else { self.sizes.heads }, 2 * reach + 1];
        let values = (0..shape[0] * shape[1]).map(|_| 2.0 * rng.random::<f64>() - 1.0);
        let values = values.collect();
        self.relative = Some(Relative { shape, values });
        self
    }

    /// Returns the options of the call.
    pub fn asked(&self) -> AttentionOptions {
        let usual = 1.0 / (self.sizes.head_dim as f64).sqrt();
        let mut options = AttentionOptions::default();
        options.scale = (self.scale != usual).then_some(self.scale);
        options.softcap = self.softcap;
        options.alibi = self.slopes.clone().map(Into::into);
        options.dropout = self.dropout;
        options.softmax_threshold = self.threshold;
        options
    }

    /// Rounds every input to a dtype, so that the answer is that of representable inputs.
    pub fn round_to(&mut self, dtype: DType) {
        let inputs = [&mut self.q, &mut self.k, &mut self.v, &mut self.grad_out].into_iter();
        let bias = self.bias.as_mut().map(|bias| &mut bias.values);
        let table = self.relative.as_mut().map(|table| &mut table.values);
        let all = inputs.chain(&mut self.sinks).chain(bias).chain(table);
        all.for_each(|values| round_to(values, dtype));
    }

    pub fn solve(&self) -> Answer {
        self.solve_in(None)
    }

    /// Solves with the roundings of tensor-core kernels: p and ds are rounded before the second products, delta uses the rounded output, and every
    /// result is rounded when it is written. Sums are f64.
    pub fn solve_rounded(&self, dtype: DType) -> Answer {
        let mut answer = self.solve_in(Some(dtype));
        let Answer {
            out, dq, dk, dv, ..
        } = &mut answer;
        for values in [out, dq, dk, dv] {
            round_to(values, dtype);
        }
        answer
    }

    fn solve_in(&self, rounding: Option<DType>) -> Answer {
        let s = self.sizes;
        let rows = |shape: [usize; 4]| vec![Spread::default(); shape[..3].iter().product()];
        let numbers = |count: usize| vec![Spread::default(); count];
        let zeros = |shape: [usize; 4]| vec![0.0; shape.iter().product()];
        let of_bias = self.bias.as_ref().map_or(0, |bias| bias.values.len());
        let of_table = self.relative.as_ref().map_or(0, |table| table.values.len());
        let mut answer = Answer {
            out: zeros(s.out()),
            lse: vec![f64::NEG_INFINITY; s.batch * s.heads * s.seq_q],
            max_scores: vec![f64::NEG_INFINITY; s.batch * s.heads * s.seq_q],
            weights: zeros([s.batch, s.heads, s.seq_q, s.seq_kv]),
            dq: zeros(s.q()),
            dk: zeros(s.k()),
            dv: zeros(s.v()),
            dsinks: vec![0.0; s.heads],
            dbias: vec![0.0; of_bias],
            drelative: vec![0.0; of_table],
            score_terms: 0.0,
            relative_terms: 0.0,
            bias_terms: 0.0,
            sink_terms: 0.0,
            spreads: Spreads {
                out: rows(s.out()),
                dq: rows(s.q()),
                dk: rows(s.k()),
                dv: rows(s.v()),
                dbias: numbers(of_bias),
                drelative: numbers(of_table),
                dsinks: numbers(s.heads),
            },
        };
        let mut terms = answer.drelative.clone();
        for row in 0..s.batch * s.heads * s.seq_q {
            self.solve_row(row, rounding, &mut answer, &mut terms);
        }
        answer.relative_terms = terms.into_iter().fold(0.0, f64::max);
        answer
    }

    /// Solves a row. `relative_terms` receives the absolute terms of the gradient with respect to the relative bias.
    fn solve_row(
        &self,
        row: usize,
        rounding: Option<DType>,
        answer: &mut Answer,
        relative_terms: &mut [f64],
    ) {
        let s = self.sizes;
        let (head, i) = (row / s.seq_q, row % s.seq_q);
        let (batch, head) = (head / s.heads, head % s.heads);
        let kv_head = head / (s.heads / s.kv_heads);
        let kv_row = |j: usize| (batch * s.kv_heads + kv_head) * s.seq_kv + j;
        let q_range = row * s.head_dim..(row + 1) * s.head_dim;
        let out_range = row * s.value_dim..(row + 1) * s.value_dim;
        let k_range = |j: usize| kv_row(j) * s.head_dim..(kv_row(j) + 1) * s.head_dim;
        let v_range = |j: usize| kv_row(j) * s.value_dim..(kv_row(j) + 1) * s.value_dim;

        let keys = (0..s.seq_kv).filter(|&j| (self.allowed)(batch, head, i, j));
        let keys: Vec<usize> = keys.collect();
        let sink = self.sinks.as_ref().map(|sinks| sinks[head]);
        if keys.is_empty() {
            if let Some(sink) = sink {
                answer.lse[row] = sink;
                answer.dsinks[head] += self.grad_lse[row];
            }
            return;
        }
        let q = &self.q[q_range.clone()];
        let raw: Vec<f64> = (keys.iter())
            .map(|&j| self.scale * dot(q, &self.k[k_range(j)]))
            .collect();
        let cap = |x: f64| self.softcap.map_or(x, |c| c * (x / c).tanh());
        let slope = |x: f64| self.softcap.map_or(1.0, |c| 1.0 - (x / c).tanh().powi(2));
        // Queries are aligned with the last keys.
        let distance = |j: usize| (i as f64 + s.seq_kv as f64 - s.seq_q as f64 - j as f64).abs();
        let given = |j: usize| {
            let bias = self.bias.as_ref();
            bias.map_or(0.0, |bias| bias.values[bias.place(batch, head, i, j)])
        };
        let ahead = |j: usize| (j + s.seq_q) as i64 - (i + s.seq_kv) as i64;
        let of_distance = |j: usize| {
            let table = self.relative.as_ref();
            table.map_or(0.0, |table| table.values[table.place(head, ahead(j))])
        };
        let linear =
            |j: usize| (self.slopes.as_ref()).map_or(0.0, |slopes| -slopes[head] * distance(j));
        let biased: Vec<f64> = (raw.iter().zip(&keys))
            .map(|(&x, &j)| cap(x) + linear(j) + given(j) + of_distance(j))
            .collect();
        answer.max_scores[row] = biased.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let scores = biased.iter().copied().chain(sink);
        let max = scores.clone().fold(f64::NEG_INFINITY, f64::max);
        let sum: f64 = scores.map(|x| (x - max).exp()).sum();
        let lse = max + sum.ln();
        answer.lse[row] = lse;

        let d_out = self.grad_out[out_range.clone()].to_vec();
        let p: Vec<f64> = biased.iter().map(|x| (x - lse).exp()).collect();
        let factors: Vec<f64> = (keys.iter())
            .map(|&j| match self.dropout {
                Some(dropout) if !dropout.keeps(batch, head, i, j) => 0.0,
                Some(dropout) => 1.0 / (1.0 - dropout.rounded()),
                None => 1.0,
            })
            .collect();
        let dp: Vec<f64> = (keys.iter().zip(&factors))
            .map(|(&j, factor)| factor * dot(&d_out, &self.v[v_range(j)]))
            .collect();
        // Operands of the second products and of delta.
        let round = |mut values: Vec<f64>| {
            if let Some(dtype) = rounding {
                round_to(&mut values, dtype);
            }
            values
        };
        let dropped = p.iter().zip(&factors).map(|(p, factor)| p * factor);
        for (&p, &j) in round(dropped.collect()).iter().zip(&keys) {
            add(&mut answer.out[out_range.clone()], p, &self.v[v_range(j)]);
            add(&mut answer.dv[v_range(j)], p, &d_out);
        }
        let out = answer.out[out_range.clone()].to_vec();
        // Equals the sum over dO · out, with fewer terms.
        let delta = match rounding {
            Some(_) => dot(&d_out, &round(out.clone())),
            None => dot(&p, &dp),
        };
        let by_score: Vec<f64> = (p.iter().zip(&dp))
            .map(|(p, dp)| p * (dp - delta + self.grad_lse[row]))
            .collect();
        let ds = by_score.iter().zip(&raw).map(|(ds, &x)| ds * slope(x));
        let ds = round(ds.collect());
        // Change of delta by a relative error of 1 in each element of out and in each weight that it sums.
        let of_numbers = d_out.iter().zip(&out);
        let of_weights = p.iter().zip(&dp);
        let of_delta = of_numbers.chain(of_weights).map(|(x, y)| (x * y).powi(2));
        let of_delta = of_delta.sum::<f64>().sqrt();
        // Kernels add sinks to attention without them, whose delta is larger by this factor, and cancels.
        let share: f64 = if sink.is_some() { p.iter().sum() } else { 1.0 };
        let of_delta_alone = of_delta / share.max(1e-30);
        let square = |x: &[f64]| dot(x, x);
        let (mut of_bias, mut of_table) = (Vec::new(), Vec::new());
        let mut by_delta = vec![0.0; s.head_dim];
        if let Some(sink) = sink {
            let weight = (sink - lse).exp();
            answer.dsinks[head] += weight * (self.grad_lse[row] - delta);
            let largest = largest(&dp).max(self.grad_lse[row].abs());
            answer.sink_terms += weight * largest;
            let spread = &mut answer.spreads.dsinks[head];
            spread.terms += (weight * largest).powi(2);
            spread.delta += (weight * of_delta).powi(2);
        }
        for (k, &j) in keys.iter().enumerate() {
            answer.weights[row * s.seq_kv + j] = p[k];
            let by_score = by_score[k];
            if let Some(bias) = &self.bias {
                answer.dbias[bias.place(batch, head, i, j)] += by_score;
            }
            let rest = (delta - self.grad_lse[row]).abs();
            let term = p[k] * dp[k].abs().max(rest);
            answer.bias_terms = answer.bias_terms.max(term);
            if let Some(table) = &self.relative {
                let place = table.place(head, ahead(j));
                answer.drelative[place] += by_score;
                relative_terms[place] += term;
            }
            let spreads = &mut answer.spreads;
            let (key, value) = (&self.k[k_range(j)], &self.v[v_range(j)]);
            let weight = (p[k] * factors[k]).powi(2);
            for (spread, factor) in [
                (&mut spreads.out[row], square(value)),
                (&mut spreads.dv[kv_row(j)], square(&d_out)),
            ] {
                spread.rounded += weight * factor;
                spread.terms += weight * factor;
                // Kernels multiply by the dropout factor after the product, which magnifies the underflow of small weights.
                spread.factors += factor * factors[k].powi(2);
            }
            let through = slope(raw[k]) * self.scale;
            // dO · v, delta and the gradient with respect to lse are terms of ds; the first two are sums themselves.
            let products = d_out.iter().zip(value);
            let products: f64 = products.map(|(x, y)| (x * y * factors[k]).powi(2)).sum();
            let parts = dp[k].abs() + delta.abs() / share.max(1e-30) + self.grad_lse[row].abs();
            let sizes = parts + products.sqrt() + of_delta_alone;
            let of_ds = p[k] * sizes;
            // A softcap's derivative is itself a difference, 1 − tanh².
            let before = self.softcap.map_or(through, |_| self.scale);
            // With sinks dO is scaled by the row's share and rounded again.
            let of_d_out = if sink.is_some() { products } else { 0.0 };
            let of_half = p[k] * (of_delta_alone.powi(2) + of_d_out).sqrt();
            if let Some(table) = &self.relative {
                of_table.push((table.place(head, ahead(j)), [of_ds, of_half, sizes]));
            }
            if let Some(bias) = &self.bias {
                of_bias.push((bias.place(batch, head, i, j), [of_ds, of_half, sizes]));
            }
            let rounded = (ds[k] * self.scale).powi(2) + (p[k] * through).powi(2) * of_d_out;
            let (query_spread, key_spread) = (&mut spreads.dq[row], &mut spreads.dk[kv_row(j)]);
            query_spread.rounded += rounded * square(key);
            query_spread.terms += (of_ds * before).powi(2) * square(key);
            key_spread.rounded += rounded * square(q);
            key_spread.terms += (of_ds * before).powi(2) * square(q);
            query_spread.factors += (before * sizes.max(1.0)).powi(2) * square(key);
            key_spread.factors += (before * sizes.max(1.0)).powi(2) * square(q);
            key_spread.delta += (p[k] * through * of_delta_alone).powi(2) * square(q);
            add(&mut by_delta, p[k] * through * of_delta_alone, key);
            let ds = ds[k] * self.scale;
            let term = term * slope(raw[k]) * self.scale.abs();
            for x in self.k[k_range(j)].iter().chain(q) {
                answer.score_terms = answer.score_terms.max(term * x.abs());
            }
            add(&mut answer.dq[q_range.clone()], ds, key);
            add(&mut answer.dk[k_range(j)], ds, q);
        }
        answer.spreads.dq[row].delta += square(&by_delta);
        add_squares(&mut answer.spreads.dbias, of_bias);
        add_squares(&mut answer.spreads.drelative, of_table);
    }
}
