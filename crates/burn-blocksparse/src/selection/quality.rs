//! How well a choice serves: what it keeps of the attention, beside the best that as many blocks could.

use blocksparse::{EstimateKind, Keep, Rule};
use burn::tensor::activation::softmax;
use burn::tensor::{DType, Tensor};

use super::estimator::ScoreCall;
use super::mean::products;
use super::{Selection, check_call};
use crate::error::OpError;

/// What a choice keeps of a head's attention: means over rows of queries, batch entries together.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub struct SelectionQuality {
    /// The share of the attention that the chosen blocks have.
    pub recall: f64,
    /// The share that 99 of 100 rows have at least.
    pub first_percentile: f64,
    /// The share that the same number of blocks of each row would have if they were the best ones, the forced ones among them.
    pub oracle: f64,
    /// Chosen blocks, as a share of those that are visible.
    pub density: f64,
}

impl SelectionQuality {
    /// Recall as a share of the best that as many blocks can have.
    pub fn ratio(&self) -> f64 {
        self.recall / self.oracle
    }
}

/// Numbers of a slab of probabilities.
const SLAB: usize = 1 << 23;

impl Selection {
    /// How well the choice serves, of each head. The attention is computed in full, a slab at a time, and read back: for reports.
    ///
    /// # Errors
    /// As [`choose`](Self::choose), and if the device gives nothing back.
    pub fn quality(&self, call: &ScoreCall) -> Result<Vec<SelectionQuality>, OpError> {
        self.check()?;
        check_call(call)?;
        let call = ScoreCall {
            q: call.q.clone().without_autodiff(),
            k: call.k.clone().without_autodiff(),
            ..*call
        };
        let grid = call.grid(self.estimator.grid());
        let (rows, blocks) = (grid.rows(), grid.blocks());
        let [batch, heads, ..] = call.q.dims();
        let rule = self.rule();
        let mut of_heads = vec![Rows::default(); heads];
        let slab = (SLAB / (batch * heads * grid.query_rows * grid.seq_kv)).clamp(1, rows.max(1));
        for first in (0..rows).step_by(slab) {
            let end = (first + slab).min(rows);
            let scores = self.estimator.scores(&call, first..end)?;
            let scores = self.sharing.reduce(scores, call.group());
            let of_scores = scores.dims()[1];
            let scores = read(scores)?;
            let masses = read(self.masses(&call, first, end))?;
            for (entry_head, head) in (0..batch).flat_map(|_| 0..heads).enumerate() {
                let entry = entry_head / heads;
                for row in first..end {
                    let at = |head: usize, of: usize| {
                        ((entry * of + head) * (end - first) + row - first) * blocks
                    };
                    let shared = head / (heads / of_scores);
                    let scores = &scores[at(shared, of_scores)..][..blocks];
                    let masses = &masses[at(head, heads)..][..blocks];
                    let kept = rule.kept(&grid, row, scores);
                    let visible = (0..blocks).filter(|&block| grid.is_visible(row, block));
                    let visible = visible.count();
                    let count = kept.iter().filter(|&&kept| kept).count();
                    let best = Rule {
                        kind: EstimateKind::Mass,
                        keep: Keep::TopK(count.max(1)),
                        ..rule
                    };
                    let share = |kept: &[bool]| -> f64 {
                        let pairs = kept.iter().zip(masses);
                        pairs.filter(|(kept, _)| **kept).map(|(_, mass)| mass).sum()
                    };
                    let of = &mut of_heads[head];
                    of.recall.push(share(&kept));
                    of.oracle += match count {
                        0 => 0.0,
                        _ => share(&best.kept(&grid, row, masses)),
                    };
                    of.kept += count;
                    of.visible += visible;
                }
            }
        }
        Ok(of_heads.into_iter().map(Rows::finish).collect())
    }

    /// The attention that blocks of keys get of rows of queries, each row 1 in all: `[batch, heads, rows, blocks]`.
    fn masses(&self, call: &ScoreCall, first: usize, end: usize) -> Tensor<4> {
        let grid = call.grid(self.estimator.grid());
        let (from, to) = (
            first * grid.query_rows,
            (end * grid.query_rows).min(grid.seq_q),
        );
        let [batch, heads, ..] = call.q.dims();
        let device = call.q.device();
        let q = call.q.clone().slice_dim(2, from..to).cast(DType::F32);
        let k = call.k.clone().cast(DType::F32);
        let scores = products(q * call.scale, k, call.group());
        let scores = match call.causal {
            false => scores,
            true => {
                let offset = grid.seq_kv as i64 - grid.seq_q as i64 + from as i64;
                let shape = [to - from, grid.seq_kv];
                let later = Tensor::<2, burn::tensor::Bool>::tril_mask(shape, offset, &device);
                let later = later.reshape([1, 1, shape[0], shape[1]]);
                scores.mask_fill(later.expand([batch, heads, shape[0], shape[1]]), -1e30)
            }
        };
        let p = softmax(scores, 3);
        let padded = grid.blocks() * grid.block;
        let p = pad(p, 3, padded);
        let dims = [batch * heads, to - from, grid.blocks(), grid.block];
        let p = p.reshape(dims).sum_dim(3);
        let p = p.reshape([batch, heads, to - from, grid.blocks()]);
        // The last row may have fewer queries.
        let rows = end - first;
        let p = pad(p, 2, rows * grid.query_rows);
        let dims = [batch * heads, rows, grid.query_rows, grid.blocks()];
        let p = p.reshape(dims).sum_dim(2);
        let p = p.reshape([batch, heads, rows, grid.blocks()]);
        let last = grid.seq_q - (rows - 1) * grid.query_rows - from;
        match last < grid.query_rows && to == grid.seq_q {
            false => p / grid.query_rows as f64,
            true => {
                let whole = p.clone().slice_dim(2, 0..rows - 1) / grid.query_rows as f64;
                let rest = p.slice_dim(2, rows - 1..rows) / last as f64;
                match rows {
                    1 => rest,
                    _ => Tensor::cat(vec![whole, rest], 2),
                }
            }
        }
    }
}

/// What is counted of a head.
#[derive(Clone, Debug, Default)]
struct Rows {
    recall: Vec<f64>,
    oracle: f64,
    kept: usize,
    visible: usize,
}

impl Rows {
    fn finish(mut self) -> SelectionQuality {
        let rows = self.recall.len().max(1) as f64;
        self.recall.sort_by(f64::total_cmp);
        SelectionQuality {
            recall: self.recall.iter().sum::<f64>() / rows,
            first_percentile: self
                .recall
                .get(self.recall.len() / 100)
                .copied()
                .unwrap_or(0.0),
            oracle: self.oracle / rows,
            density: self.kept as f64 / self.visible.max(1) as f64,
        }
    }
}

/// Zeros behind a dimension, up to a length.
fn pad(x: Tensor<4>, dim: usize, to: usize) -> Tensor<4> {
    let mut dims = x.dims();
    let missing = to - dims[dim];
    if missing == 0 {
        return x;
    }
    dims[dim] = missing;
    let zeros = Tensor::zeros(dims, (&x.device(), x.dtype()));
    Tensor::cat(vec![x, zeros], dim)
}

fn read(tensor: Tensor<4>) -> Result<Vec<f64>, OpError> {
    let data = tensor.try_into_data().map_err(OpError::read)?;
    data.convert::<f64>().to_vec().map_err(OpError::read)
}
