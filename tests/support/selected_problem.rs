//! Problems of queries that choose for themselves (MoBA), with the choice in plain f64 loops.

use burn::tensor::{DType, Device, Tensor, TensorData};
use burn_blocksparse::AttentionOptions;
use burn_sparse_select::Always;
use burn_sparse_select::Selection;
use burn_sparse_select::attention_selected_with_lse;

use crate::attention::inputs;
use crate::reference::{Problem, Sizes};

/// A query's own block alone.
pub(crate) const OWN: Always = Always { first: 0, local: 1 };

/// The blocks that each query chooses between its forced ones, by falling score: `[batch · heads · seq_q]`; and the least difference of two scores that decides.
pub(crate) fn choices(
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
                .map(|block| {
                    let score = q.iter().zip(&means[block]).map(|(q, k)| q * k).sum();
                    (score, block)
                })
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
pub(crate) struct Case {
    pub(crate) name: &'static str,
    pub(crate) batch: usize,
    pub(crate) heads: [usize; 2],
    pub(crate) seq: [usize; 2],
    pub(crate) dims: [usize; 2],
    pub(crate) block: usize,
    pub(crate) keep: usize,
    pub(crate) forced: Always,
}

pub(crate) const CASE: Case = Case {
    name: "blocks of 16",
    batch: 2,
    heads: [2, 2],
    seq: [96, 96],
    dims: [16, 16],
    block: 16,
    keep: 3,
    forced: OWN,
};

pub(crate) fn cases() -> Vec<Case> {
    let case = |name: &'static str, seq: [usize; 2], block: usize, keep: usize| Case {
        name,
        seq,
        block,
        keep,
        ..CASE
    };
    let grouped = |heads: [usize; 2], case: Case| Case { heads, ..case };
    let alone = |case: Case| Case {
        batch: 1,
        heads: [1, 1],
        dims: [4, 8],
        ..case
    };
    let forced = |first, local, case: Case| Case {
        forced: Always { first, local },
        ..case
    };
    vec![
        CASE,
        grouped([4, 2], case("ragged, grouped heads", [83, 83], 8, 4)),
        grouped([6, 1], case("one head of keys", [75, 75], 32, 2)),
        case("shorter than a block", [21, 21], 32, 3),
        case("one query and key", [1, 1], 8, 2),
        case("a query of many keys", [1, 77], 8, 4),
        case("as long as a block", [32, 32], 32, 3),
        case("one key more than a block", [33, 33], 32, 3),
        case("more than there are", [70, 70], 16, 100),
        case("its own block only", [70, 70], 16, 1),
        grouped([4, 2], case("fewer queries", [37, 150], 16, 3)),
        case("more queries", [90, 41], 8, 3),
        case("blocks of 64", [300, 300], 64, 3),
        grouped([2, 1], case("blocks of 128", [400, 400], 128, 2)),
        alone(case("blocks of 256", [900, 900], 256, 3)),
        alone(case("blocks of 640, fewer queries", [300, 1500], 640, 3)),
        forced(
            1,
            2,
            case("the first and the one before", [130, 130], 16, 5),
        ),
        forced(
            2,
            1,
            grouped(
                [4, 2],
                case("two first ones, fewer queries", [37, 150], 16, 5),
            ),
        ),
        forced(0, 3, case("two before, ragged", [83, 83], 8, 5)),
        forced(1, 2, case("more queries, with a first", [90, 41], 8, 4)),
        forced(3, 2, case("forced ones only", [90, 90], 8, 4)),
        forced(usize::MAX, 1, case("all are forced", [50, 50], 8, 2)),
        forced(1, usize::MAX, case("all before are forced", [50, 50], 8, 2)),
        forced(
            1,
            2,
            alone(case("blocks of 256, forced", [1300, 1300], 256, 4)),
        ),
    ]
}

impl Case {
    pub(crate) fn sizes(&self) -> Sizes {
        Sizes {
            batch: self.batch,
            heads: self.heads[0],
            kv_heads: self.heads[1],
            seq_q: self.seq[0],
            seq_kv: self.seq[1],
            head_dim: self.dims[0],
            value_dim: self.dims[1],
        }
    }

    pub(crate) fn selection(&self) -> Selection {
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
    pub(crate) fn problem(&self, seed: u64, dtype: DType) -> (Problem, Vec<Vec<usize>>) {
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

/// Out, lse and the gradients of `sum(out · grad_out) + sum(lse · grad_lse)` by q, k and v.
pub(crate) fn differentiated(
    problem: &Problem,
    device: &Device,
    dtype: DType,
    attend: impl Fn(Tensor<4>, Tensor<4>, Tensor<4>) -> (Tensor<4>, Tensor<3>),
) -> [(&'static str, TensorData); 5] {
    let [q, k, v, grad_out] = inputs(problem, device, dtype);
    let [q, k, v] = [q, k, v].map(Tensor::require_grad);
    let (out, lse) = attend(q.clone(), k.clone(), v.clone());
    let grad_lse = TensorData::new(problem.grad_lse.clone(), lse.dims());
    let grad_lse = Tensor::<3>::from_data(grad_lse, (device, lse.dtype()));
    let loss = (lse.clone() * grad_lse).sum();
    let loss = loss.clone() + (out.clone() * grad_out).sum().cast(loss.dtype());
    let grads = loss.backward();
    let grad = |x: Tensor<4>| x.grad(&grads).unwrap().into_data();
    [
        ("out", out.into_data()),
        ("lse", lse.into_data()),
        ("dq", grad(q)),
        ("dk", grad(k)),
        ("dv", grad(v)),
    ]
}

pub(crate) fn selected(
    problem: &Problem,
    selection: &Selection,
    device: &Device,
    dtype: DType,
) -> [(&'static str, TensorData); 5] {
    differentiated(problem, device, dtype, |q, k, v| {
        attention_selected_with_lse(q, k, v, selection, AttentionOptions::default()).unwrap()
    })
}
