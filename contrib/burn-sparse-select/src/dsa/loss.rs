//! Training loss of an indexer: the divergence of the softmax of its scores from the attention.

use std::ops::Range;

use burn::tensor::{Bool, Tensor};

use crate::dsa::found::{DsaTarget, Found};
use crate::dsa::scores::{DsaIndex, Scores};
use crate::dsa::{Dsa, unlisted};
use crate::selection::estimator::EstimateGrid;
use crate::selection::parts::{NOTHING, added, hidden, in_steps};
use burn_blocksparse::OpError;

impl Dsa {
    /// Computes the mean over queries of `KL(t ‖ softmax x)`, where x are the indexer's scores and t is the mean over heads of dense attention's weights, both
    /// over the keys of `over`. Differentiable in the index only; q and k are constants.
    ///
    /// The gradient with respect to the scores, `softmax x − t`, is computed with the loss for some queries at a time, so at most 2²⁴ scores and as many
    /// weights are in memory; the backward pass only scales it. Kernels compute in f32 and compare only the selected keys, but dense attention runs once for
    /// its lse. Without kernels it costs the products of dense attention in either case.
    ///
    /// # Shapes
    /// - `q`, `k`: those of the attention, `[batch, heads, seq_q, head_dim]` and `[batch, kv_heads, seq_kv, head_dim]`; `scale` is its scale, or 1/√head_dim
    /// - result: a single number, f32, or f64 for f64
    ///
    /// # Errors
    /// [`OpError`] if the shapes do not match the index or the lists, or the index is [in fp8](DsaIndex::in_fp8), which has no gradient.
    pub fn loss(
        &self,
        index: &DsaIndex,
        [q, k]: [&Tensor<4>; 2],
        scale: Option<f64>,
        over: DsaTarget,
    ) -> Result<Tensor<1>, OpError> {
        crate::selection::check_shapes(q, k)?;
        blocksparse::ensure! { OpError; !index.is_in_fp8() => "index", "one that is not in fp8, which has no gradient", "one in fp8"; }
        let [batch, _, seq_q, head_dim] = q.dims();
        let [index_batch, _, index_q, _] = index.q.dims();
        OpError::expect_same("q's batch", index_batch, "the index's", batch)?;
        OpError::expect_same("q's seq_q", index_q, "the index's", seq_q)?;
        OpError::expect_same("k's seq_kv", index.seq_kv(), "the index's", k.dims()[2])?;
        if let DsaTarget::Chosen(lists) = over {
            let [list_batch, of_heads, queries, _] = lists.keys().dims();
            let got = [list_batch, of_heads, queries];
            OpError::expect_same("lists' shape", [batch, 1, seq_q], "the index's", got)?;
            let (expected, got) = (index.seq_kv(), lists.seq_kv());
            OpError::expect_same("lists' seq_kv", expected, "the index's", got)?;
        }
        let scale = scale.unwrap_or(1.0 / (head_dim.max(1) as f64).sqrt());
        Ok(self.compared(index, [q, k], scale, over, None))
    }

    /// Computes [`loss`](Self::loss) of checked arguments. `lse` is that of the target attention, if it is not dense attention.
    pub(crate) fn compared(
        &self,
        index: &DsaIndex,
        [q, k]: [&Tensor<4>; 2],
        scale: f64,
        over: DsaTarget,
        lse: Option<Tensor<3>>,
    ) -> Tensor<1> {
        #[cfg(feature = "cube")]
        {
            let (lse, numbers) = (lse.clone(), self.numbers);
            if let Some(found) = crate::dsa::kernels::loss(index, [q, k], scale, over, lse, numbers)
            {
                return found.in_graph_of(index);
            }
        }
        let found = self.reference(index, [q, k], scale, over, lse);
        found.in_graph_of(index)
    }

    /// Computes [`compared`](Self::compared) in Burn's operations.
    fn reference(
        &self,
        index: &DsaIndex,
        [q, k]: [&Tensor<4>; 2],
        scale: f64,
        over: DsaTarget,
        lse: Option<Tensor<3>>,
    ) -> Found {
        let [batch, _, seq_q, _] = q.dims();
        let scores = Scores::new(&index.clone().without_autodiff(), self.numbers);
        let dtype = scores.q.dtype();
        let target = Target {
            q: q.clone().without_autodiff().cast(dtype),
            k: k.clone().without_autodiff().cast(dtype),
            scale,
            over,
            lse: lse.map(|lse| lse.cast(dtype)),
        };
        let widest = scores.heads().max(target.q.dims()[1]);
        let mut sum = None;
        let mut found = Gradients::default();
        for rows in scores.slabs(widest) {
            let loss = found.add(&scores, &target, rows);
            sum = Some(added(sum, loss));
        }
        let queries = (batch * seq_q) as f64;
        let value = sum.expect("there is a query").div_scalar(queries);
        found.of_mean(value, scores.scale, queries)
    }
}

/// Attention that the scores should match.
struct Target<'a> {
    q: Tensor<4>,
    k: Tensor<4>,
    scale: f64,
    over: DsaTarget<'a>,
    /// Lse of attention over the compared keys, if the target is not dense attention.
    lse: Option<Tensor<3>>,
}

impl Target<'_> {
    /// Returns true for keys after a query's position: `[batch, rows, seq_kv]`.
    fn later(&self, rows: &Range<usize>) -> Tensor<3, Bool> {
        let ([batch, _, seq_q, _], seq_kv) = (self.q.dims(), self.k.dims()[2]);
        let grid = EstimateGrid::by_query(1).of([seq_q, seq_kv], true);
        let dims = [batch, rows.len(), seq_kv];
        hidden(&grid, rows.clone(), dims, &self.q.device())
    }

    /// Returns true for keys that are not compared. `later` marks the keys that queries do not see: `[batch, rows, seq_kv]`.
    fn hidden(&self, rows: &Range<usize>, later: Tensor<3, Bool>) -> Tensor<3, Bool> {
        let (batch, seq_kv) = (self.q.dims()[0], self.k.dims()[2]);
        match self.over {
            DsaTarget::All => later,
            DsaTarget::Chosen(lists) => {
                let keys = lists.keys().clone().slice_dim(2, rows.clone());
                let most = keys.dims()[3];
                unlisted(keys.reshape([batch, rows.len(), most]), seq_kv)
            }
        }
    }

    /// Computes the mean attention weights over heads: `[batch, rows, seq_kv]`. Weights of keys that are not compared are unspecified.
    fn weights(
        &self,
        rows: &Range<usize>,
        later: &Tensor<3, Bool>,
        heads_at_a_time: usize,
    ) -> Tensor<3> {
        let [batch, heads, _, width] = self.q.dims();
        let [_, kv_heads, seq_kv, _] = self.k.dims();
        let group = heads / kv_heads;
        let mut sum: Option<Tensor<3>> = None;
        for kv_head in 0..kv_heads {
            let k = self
                .k
                .clone()
                .slice_dim(1, kv_head..kv_head + 1)
                .swap_dims(2, 3);
            for own in in_steps(kv_head * group..(kv_head + 1) * group, heads_at_a_time) {
                let count = own.len();
                let q = self.q.clone().slice_dim(1, own.clone());
                let q = q.slice_dim(2, rows.clone());
                let q = q.mul_scalar(self.scale);
                let q = q.reshape([batch, 1, count * rows.len(), width]);
                let scores = q.matmul(k.clone());
                let dims = [batch, count, rows.len(), seq_kv];
                let scores = scores.reshape(dims);
                let weights = match &self.lse {
                    None => {
                        let later = later.clone().unsqueeze_dim::<4>(1).expand(dims);
                        softmax_over(scores, later).0
                    }
                    Some(lse) => {
                        let lse = lse.clone().slice_dim(1, own).slice_dim(2, rows.clone());
                        (scores - lse.unsqueeze_dim(3)).exp()
                    }
                };
                let weights = weights.sum_dim(1).squeeze_dim(1);
                sum = Some(added(sum, weights));
            }
        }
        sum.expect("there is a head").div_scalar(heads as f64)
    }
}

/// Computes the softmax over keys that are not hidden, and its logarithm, which is finite but unspecified for hidden keys.
fn softmax_over<const D: usize>(
    scores: Tensor<D>,
    hidden: Tensor<D, Bool>,
) -> (Tensor<D>, Tensor<D>) {
    let scores = scores.mask_fill(hidden.clone(), NOTHING);
    let less = scores.clone() - scores.max_dim(D - 1);
    let weights = less.clone().exp().mask_fill(hidden, 0.0);
    // Avoids division by zero for a query without keys.
    let total = weights.clone().sum_dim(D - 1).clamp_min(1e-30);
    (weights / total.clone(), less - total.log())
}

/// Gradients of the accumulated loss, for weights that include the scale: with respect to q and weights in parts of rows, and with respect to k.
#[derive(Default)]
struct Gradients {
    q: Vec<Tensor<4>>,
    weights: Vec<Tensor<4>>,
    k: Option<Tensor<4>>,
}

impl Gradients {
    /// Accumulates the gradients of a range of queries, and returns the sum of their losses.
    fn add(&mut self, scores: &Scores, target: &Target, rows: Range<usize>) -> Tensor<1> {
        let later = target.later(&rows);
        let at_a_time = scores.heads_at_a_time(rows.len());
        let wanted = target.weights(&rows, &later, at_a_time);
        let hidden = target.hidden(&rows, later);
        let wanted = wanted.mask_fill(hidden.clone(), 0.0);
        let wanted = wanted.clone() / wanted.sum_dim(2).clamp_min(1e-30);
        let (found, log) = softmax_over(scores.of_rows(rows.clone()), hidden);
        let log_wanted = wanted.clone().clamp_min(1e-30).log();
        // A sum over all dimensions may be a kernel with atomics.
        let loss = wanted.clone() * (log_wanted - log);
        let loss = loss.sum_dim(2).sum_dim(1).sum_dim(0).reshape([1]);
        let by_score: Tensor<4> = (found - wanted).unsqueeze_dim(1);
        let [batch, _, _, width] = scores.q.dims();
        let (mut by_q, mut by_weights) = (Vec::new(), Vec::new());
        for heads in scores.parts(rows.len()) {
            let (q, weights) = scores.part(&heads, &rows);
            let products = scores.products(q.clone());
            by_weights.push((products.clone() * by_score.clone()).sum_dim(3));
            let is_zero = products.lower_equal_elem(0.0);
            let by_product = (by_score.clone() * weights).mask_fill(is_zero, 0.0);
            let count = heads.len() * rows.len();
            let by_product = by_product.reshape([batch, 1, count, scores.seq_kv()]);
            let own = by_product.clone().matmul(scores.k.clone());
            by_q.push(own.reshape([batch, heads.len(), rows.len(), width]));
            let by_k = by_product
                .swap_dims(2, 3)
                .matmul(q.reshape([batch, 1, count, width]));
            self.k = Some(added(self.k.take(), by_k));
        }
        self.q.push(Tensor::cat(by_q, 1));
        self.weights.push(Tensor::cat(by_weights, 1));
        loss
    }

    /// Returns the loss with the gradients of the mean over `queries` queries, with respect to weights without the scale.
    fn of_mean(self, loss: Tensor<1>, scale: f64, queries: f64) -> Found {
        let k = self.k.expect("there is a head");
        let (q, weights) = (Tensor::cat(self.q, 2), Tensor::cat(self.weights, 2));
        Found {
            loss,
            q: q.div_scalar(queries),
            k: k.div_scalar(queries),
            weights: weights.mul_scalar(scale / queries).squeeze_dim(3),
        }
    }
}
