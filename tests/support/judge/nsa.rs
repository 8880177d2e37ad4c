//! Native sparse attention in plain f64 loops, from its definition (Yuan et al., 2025, §3).

use burn_sparse_select::Always;
use burn_sparse_select::nsa::{Nsa, NsaKeysValues, NsaOptions};

use crate::prelude::*;

/// Compressed, selected, window.
pub const BRANCHES: usize = 3;

#[derive(Clone, Copy, Debug)]
pub struct Case {
    pub name: &'static str,
    pub batch: usize,
    pub heads: [usize; 2],
    pub seq: [usize; 2],
    pub dims: [usize; 2],
    /// Block size and stride of compression.
    pub compressed: [usize; 2],
    pub selected: usize,
    pub keep: usize,
    /// Numbers of first and of nearest blocks.
    pub forced: [usize; 2],
    pub window: usize,
}

pub const CASE: Case = Case {
    name: "two heads of two",
    batch: 2,
    heads: [4, 2],
    seq: [96, 96],
    dims: [16, 8],
    compressed: [8, 4],
    selected: 8,
    keep: 5,
    forced: [1, 2],
    window: 20,
};

/// Settings that differ from [`CASE`].
pub const TABLE: &str = "
    two heads of two                                     |
    each head for itself, ragged                         | heads 2 2, seq 83 83
    one head of keys, ragged                             | heads 4 1, seq 71 71
    blocks that overlap much, the own block forced alone | seq 75 75, compressed 8 2, selected 16, keep 4, forced 0 1
    blocks that do not overlap, many forced              | seq 90 90, dims 8 16, compressed 4 4, keep 6, forced 2 3
    compressed blocks wider than those that are chosen   | seq 61 61, compressed 16 8, selected 8
    blocks of 64                                         | batch 1, seq 290 290, compressed 32 16, selected 64, keep 4, window 33
    fewer queries                                        | seq 37 90
    a query of many keys                                 | seq 1 77
    shorter than a compressed block                      | seq 7 7
    one compressed block                                 | seq 8 8
    one token                                            | seq 1 1
    no window, forced blocks only                        | seq 45 45, keep 3, window 0
    more than there are                                  | seq 50 50, keep 100, window 500
";

/// Returns the cases of a table.
pub fn cases(plain: Case, table: &'static str) -> Vec<Case> {
    let case = |[name, rest]: [&'static str; 2]| Case { name, ..plain }.with(rest);
    rows(table).into_iter().map(case).collect()
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
                "compressed" => self.compressed = all(numbers),
                "selected" => self.selected = one(numbers),
                "keep" => self.keep = one(numbers),
                "forced" => self.forced = all(numbers),
                "window" => self.window = one(numbers),
                _ => panic!("{}: {word} is nothing to set", self.name),
            }
        }
        self
    }

    pub fn options(&self) -> NsaOptions {
        let [first, local] = self.forced;
        NsaOptions::default()
            .block(self.compressed[0])
            .stride(self.compressed[1])
            .selected_block(self.selected)
            .keep(self.keep)
            .forced(Always { first, local })
            .window(self.window)
    }

    pub fn nsa(&self) -> Nsa {
        Nsa::new(self.options()).unwrap()
    }

    pub fn entries(&self) -> usize {
        let [block, stride] = self.compressed;
        let is_whole = |entry: &usize| entry * stride + block <= self.seq[1];
        (0..self.seq[1]).filter(is_whole).count()
    }

    pub fn blocks(&self) -> usize {
        self.seq[1].div_ceil(self.selected)
    }

    /// Returns the position of a query.
    fn position(&self, row: usize) -> usize {
        row + self.seq[1] - self.seq[0]
    }

    fn sees_entry(&self, row: usize, entry: usize) -> bool {
        let [block, stride] = self.compressed;
        entry * stride + block <= self.position(row) + 1
    }

    /// Returns the tokens that a compressed and a selected block share, in strides.
    pub fn overlap(&self, entry: usize, block: usize) -> f64 {
        let [width, stride] = self.compressed;
        let tokens = entry * stride..entry * stride + width;
        let shared = tokens.filter(|token| token / self.selected == block);
        shared.count() as f64 / stride as f64
    }

    fn sizes(&self, seq_kv: usize) -> Sizes {
        let heads = [self.batch, self.heads[0], self.heads[1]];
        Sizes::new(heads, [self.seq[0], seq_kv], self.dims)
    }

    /// Returns whether a query selects a block whatever its attention sum.
    fn is_forced(&self, row: usize, block: usize) -> bool {
        let own = self.position(row) / self.selected;
        let [first, local] = self.forced;
        block <= own && (block < first || own - block < local)
    }
}

/// Inputs of all branches, `[batch][heads][rows][width]`, and the gradient with respect to the output.
#[derive(Clone)]
pub struct Inputs {
    pub case: Case,
    pub q: Vec<f64>,
    /// Keys of tokens, of the compressed branch too.
    pub keys: [Vec<f64>; BRANCHES],
    pub values: [Vec<f64>; BRANCHES],
    /// `[batch][heads][rows][3]`.
    pub gates: Vec<f64>,
    pub grad_out: Vec<f64>,
}

/// Output and gradients, by name.
pub type Results = Vec<(String, Vec<f64>)>;

impl Inputs {
    pub fn random(case: Case, seed: u64, dtype: DType) -> Self {
        let [heads, kv_heads] = case.heads;
        let [seq_q, seq_kv] = case.seq;
        let [head_dim, value_dim] = case.dims;
        let mut seed = seed * 100;
        let mut draw = |heads: usize, rows: usize, width: usize| {
            seed += 1;
            let mut numbers = numbers(seed, case.batch * heads * rows * width);
            round_to(&mut numbers, dtype);
            numbers
        };
        Self {
            case,
            q: draw(heads, seq_q, head_dim),
            keys: std::array::from_fn(|_| draw(kv_heads, seq_kv, head_dim)),
            values: std::array::from_fn(|_| draw(kv_heads, seq_kv, value_dim)),
            gates: draw(heads, seq_q, BRANCHES),
            grad_out: draw(heads, seq_q, value_dim),
        }
    }

    /// Returns the means of blocks of tokens, `[batch · kv_heads][entries][width]`.
    pub fn means(&self, x: &[f64], width: usize) -> Vec<f64> {
        let ([block, stride], [_, seq]) = (self.case.compressed, self.case.seq);
        let mut means = Vec::new();
        for head in 0..self.case.batch * self.case.heads[1] {
            for entry in 0..self.case.entries() {
                for c in 0..width {
                    let of = |token: usize| x[(head * seq + token) * width + c];
                    let tokens = entry * stride..entry * stride + block;
                    means.push(tokens.map(of).sum::<f64>() / block as f64);
                }
            }
        }
        means
    }

    /// Returns the gradient with respect to tokens from that with respect to their blocks' means.
    fn by_tokens(&self, grad: &[f64], width: usize) -> Vec<f64> {
        let ([block, stride], [_, seq]) = (self.case.compressed, self.case.seq);
        let entries = self.case.entries();
        let heads = self.case.batch * self.case.heads[1];
        let mut tokens = vec![0.0; heads * seq * width];
        for (at, grad) in grad.iter().enumerate() {
            let (c, entry, head) = (at % width, at / width % entries, at / width / entries);
            for token in entry * stride..entry * stride + block {
                tokens[(head * seq + token) * width + c] += grad / block as f64;
            }
        }
        tokens
    }

    /// Returns the attention `p[batch][heads][rows][entries]` to compressed keys `[batch · kv_heads][entries][width]`.
    pub fn compressed_attention(&self, keys: &[f64]) -> Vec<f64> {
        let case = &self.case;
        let ([heads, kv_heads], [head_dim, _]) = (case.heads, case.dims);
        let (rows, entries) = (case.seq[0], case.entries());
        let mut p = vec![0.0; case.batch * heads * rows * entries];
        for (at, p) in p.chunks_mut(entries.max(1)).enumerate() {
            let (row, head) = (at % rows, at / rows);
            let list = head / heads * kv_heads + head % heads / (heads / kv_heads);
            let q = &self.q[at * head_dim..][..head_dim];
            let seen = (0..entries).take_while(|&entry| case.sees_entry(row, entry));
            let score = |entry: usize| {
                let k = &keys[(list * entries + entry) * head_dim..][..head_dim];
                dot(q, k) / (head_dim as f64).sqrt()
            };
            let weights = softmax(&seen.map(score).collect::<Vec<_>>());
            p[..weights.len()].copy_from_slice(&weights);
        }
        p
    }

    /// Returns the attention sums for block selection, `[batch · kv_heads · rows][blocks]`, from compressed keys.
    pub fn attention_sums(&self, keys: &[f64]) -> Vec<Vec<f64>> {
        let case = &self.case;
        let ([heads, kv_heads], rows, entries) = (case.heads, case.seq[0], case.entries());
        let group = heads / kv_heads;
        let p = self.compressed_attention(keys);
        let shares = |entry: usize| -> Vec<(usize, f64)> {
            let shares = (0..case.blocks()).map(|block| (block, case.overlap(entry, block)));
            shares.filter(|(_, share)| *share > 0.0).collect()
        };
        let shares: Vec<_> = (0..entries).map(shares).collect();
        let lists = (0..case.batch * kv_heads * rows).map(|at| {
            let (row, kv_head) = (at % rows, at / rows);
            let mut sums = vec![0.0; case.blocks()];
            for head in kv_head * group..(kv_head + 1) * group {
                let p = &p[(head * rows + row) * entries..][..entries];
                for (p, shares) in p.iter().zip(&shares) {
                    shares
                        .iter()
                        .for_each(|&(block, share)| sums[block] += p * share);
                }
            }
            sums
        });
        lists.collect()
    }

    /// Returns the blocks that queries select besides the forced ones, by descending attention sum, `[batch · kv_heads · rows]`; and the gap between
    /// the last selected block and the next.
    pub fn chosen(&self, attention_sums: &[Vec<f64>]) -> (Vec<Vec<usize>>, Vec<f64>) {
        let case = &self.case;
        let rows = case.seq[0];
        let lists = attention_sums.iter().enumerate();
        let lists = lists.map(|(at, attention_sums)| {
            let row = at % rows;
            let visible = case.position(row) / case.selected + 1;
            let (forced, rest): (Vec<usize>, Vec<usize>) =
                (0..visible).partition(|&block| case.is_forced(row, block));
            let mut rest = by_falling_score(rest, |block| attention_sums[block]);
            let count = case.keep.saturating_sub(forced.len()).min(rest.len());
            let falls = rest.windows(2).take(count).map(|pair| {
                // Zeros are exact.
                match attention_sums[pair[0]] == 0.0 {
                    true => f64::INFINITY,
                    false => attention_sums[pair[0]] - attention_sums[pair[1]],
                }
            });
            let gap = falls.fold(f64::INFINITY, f64::min);
            rest.truncate(count);
            (rest, gap)
        });
        lists.unzip()
    }

    /// Returns each branch's attention as a problem; `chosen` are blocks besides the forced ones.
    fn problems(&self, chosen: Vec<Vec<usize>>) -> [Problem; BRANCHES] {
        let case = self.case;
        let [head_dim, value_dim] = case.dims;
        let ([heads, kv_heads], rows) = (case.heads, case.seq[0]);
        let entries = Problem::random(case.sizes(case.entries()), 0, move |_, _, i, entry| {
            case.sees_entry(i, entry)
        });
        let blocks = Problem::random(case.sizes(case.seq[1]), 0, move |batch, head, i, j| {
            let list = (batch * kv_heads + head / (heads / kv_heads)) * rows + i;
            let block = j / case.selected;
            let is_kept = case.is_forced(i, block) || chosen[list].contains(&block);
            j <= case.position(i) && is_kept
        });
        let window = Problem::random(case.sizes(case.seq[1]), 0, move |_, _, i, j| {
            let position = case.position(i);
            j <= position && position - j < case.window
        });
        let mut problems = [entries, blocks, window];
        for (branch, problem) in problems.iter_mut().enumerate() {
            let of = |x: &[f64], width: usize| match branch {
                0 => self.means(x, width),
                _ => x.to_vec(),
            };
            problem.q = self.q.clone();
            problem.k = of(&self.keys[branch], head_dim);
            problem.v = of(&self.values[branch], value_dim);
            let grads = self.grad_out.iter().enumerate();
            let grads = grads.map(|(at, grad)| grad * self.gate(at / value_dim, branch));
            problem.grad_out = grads.collect();
        }
        problems
    }

    fn gate(&self, row: usize, branch: usize) -> f64 {
        self.gates[row * BRANCHES + branch]
    }

    /// Returns the branches, the output, and the gradients of `sum(out · grad_out)` with respect to all inputs.
    pub fn solve(&self, chosen: Vec<Vec<usize>>) -> Results {
        let [head_dim, value_dim] = self.case.dims;
        let answers = self.problems(chosen).map(|problem| problem.solve());
        let mut out = vec![0.0; self.grad_out.len()];
        let mut dq = vec![0.0; self.q.len()];
        let mut dgates = vec![0.0; self.gates.len()];
        let mut results = Vec::new();
        for (branch, answer) in answers.iter().enumerate() {
            for (at, value) in answer.out.iter().enumerate() {
                let row = at / value_dim;
                out[at] += value * self.gate(row, branch);
                dgates[row * BRANCHES + branch] += value * self.grad_out[at];
            }
            dq.iter_mut().zip(&answer.dq).for_each(|(sum, x)| *sum += x);
            let of = |grad: &[f64], width: usize| match branch {
                0 => self.by_tokens(grad, width),
                _ => grad.to_vec(),
            };
            results.push((format!("branch {branch}"), answer.out.clone()));
            results.push((format!("dk of branch {branch}"), of(&answer.dk, head_dim)));
            results.push((format!("dv of branch {branch}"), of(&answer.dv, value_dim)));
        }
        results.push(("out".to_owned(), out));
        results.push(("dq".to_owned(), dq));
        results.push(("dgates".to_owned(), dgates));
        results
    }

    /// Makes the tensors: queries, keys and values of each branch's tokens, gates, and the gradient with respect to the output.
    pub fn tensors(&self, device: &Device, dtype: DType) -> Tensors {
        let case = &self.case;
        let [heads, kv_heads] = case.heads;
        let [seq_q, seq_kv] = case.seq;
        let [head_dim, value_dim] = case.dims;
        let of = |x: &[f64], heads: usize, rows: usize, width: usize| {
            tensor(x, [case.batch, heads, rows, width], device, dtype)
        };
        let each = |x: &[Vec<f64>; BRANCHES], width: usize| {
            x.each_ref().map(|x| of(x, kv_heads, seq_kv, width))
        };
        Tensors {
            q: of(&self.q, heads, seq_q, head_dim),
            keys: each(&self.keys, head_dim),
            values: each(&self.values, value_dim),
            gates: of(&self.gates, heads, seq_q, BRANCHES),
            grad_out: of(&self.grad_out, heads, seq_q, value_dim),
        }
    }
}

pub struct Tensors {
    pub q: Tensor<4>,
    pub keys: [Tensor<4>; BRANCHES],
    pub values: [Tensor<4>; BRANCHES],
    pub gates: Tensor<4>,
    pub grad_out: Tensor<4>,
}

impl Tensors {
    pub fn require_grad(self) -> Self {
        Self {
            q: self.q.require_grad(),
            keys: self.keys.map(Tensor::require_grad),
            values: self.values.map(Tensor::require_grad),
            gates: self.gates.require_grad(),
            grad_out: self.grad_out,
        }
    }

    /// Makes the keys and values of the branches; those of the first are compressed by means.
    pub fn keys_values(&self, nsa: &Nsa) -> NsaKeysValues {
        let [k, selected_k, window_k] = self.keys.clone();
        let [v, selected_v, window_v] = self.values.clone();
        let (k, v) = (nsa.means(k).unwrap(), nsa.means(v).unwrap());
        NsaKeysValues {
            compressed: k.zip(v).map(|(k, v)| [k, v]),
            selected: [selected_k, selected_v],
            window: [window_k, window_v],
        }
    }

    /// Returns the results of [`Inputs::solve`] as a device computes them.
    pub fn differentiated(self, nsa: &Nsa) -> Vec<(String, TensorData)> {
        let x = self.require_grad();
        let branches = nsa.branches(x.q.clone(), x.keys_values(nsa)).unwrap();
        let outputs = [
            branches.compressed.clone(),
            Some(branches.selected.clone()),
            branches.window.clone(),
        ];
        let out = branches.gated(x.gates.clone()).unwrap();
        let grads = (out.clone() * x.grad_out.clone()).sum().backward();
        let grad = |x: &Tensor<4>| {
            let grad = x.grad(&grads);
            grad.unwrap_or_else(|| x.clone().inner().zeros_like())
                .into_data()
        };
        let mut results = Vec::new();
        for (branch, seen) in outputs.into_iter().enumerate() {
            let seen = seen.unwrap_or_else(|| out.zeros_like());
            results.push((format!("branch {branch}"), seen.into_data()));
            results.push((format!("dk of branch {branch}"), grad(&x.keys[branch])));
            results.push((format!("dv of branch {branch}"), grad(&x.values[branch])));
        }
        results.push(("out".to_owned(), out.into_data()));
        results.push(("dq".to_owned(), grad(&x.q)));
        results.push(("dgates".to_owned(), grad(&x.gates)));
        results
    }
}
