//! Training loss of an index branch: the divergence of the softmax of its scores from the attention of the heads that share its selection.

use std::ops::Range;

use burn::tensor::{DType, Device, Int, Tensor};

use crate::dsa::{Dsa, DsaTarget};
use crate::msa::{Msa, MsaIndex};
use crate::selection::key_lists::TokenIndices;
use crate::selection::parts::{added, in_steps};
use crate::selection::query_lists::SelectedBlocks;
use burn_blocksparse::OpError;

/// Upper bound of the keys of lists in memory at a time: 1 GiB.
const LISTED: usize = 1 << 28;

/// Keys over which the loss compares scores, and the attention that it compares with.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub enum MsaTarget<'a> {
    /// All keys that a query sees, with dense attention: for a warm-up of the index branch.
    All,
    /// The keys of the selected blocks and the query's own, with the attention over them.
    Chosen {
        /// Result of [`Msa::choose`].
        lists: Option<&'a SelectedBlocks>,
        /// Lse that [`Msa::attention`] returned, `[batch, heads, seq_q]`.
        lse: &'a Tensor<3>,
    },
}

impl Msa {
    /// Computes the mean over queries and KV heads of `KL(t ‖ softmax s)`, where s are the scores of single keys, `q · k / √index_dim`, and t is the mean of
    /// the attention's weights over the query heads of the KV head, both over the keys of `over`. Differentiable in the index only; q and k are constants.
    ///
    /// Gradients are computed with the loss, as in [`Dsa::loss`]. No dense attention runs for selected keys. Lists of single keys are in memory for some
    /// queries at a time, up to 2²⁸ elements. A product that is exactly 0 has no gradient.
    ///
    /// # Shapes
    /// - `q`, `k`: those of the attention, `[batch, heads, seq_q, head_dim]` and `[batch, kv_heads, seq_kv, head_dim]`; `scale` is its scale, or 1/√head_dim
    /// - result: a single number, f32, or f64 for f64
    ///
    /// # Errors
    /// [`OpError`] if the shapes do not match the index, the lists or lse.
    pub fn loss(
        &self,
        index: &MsaIndex,
        [q, k]: [&Tensor<4>; 2],
        scale: Option<f64>,
        over: MsaTarget,
    ) -> Result<Tensor<1>, OpError> {
        crate::selection::check_shapes(q, k)?;
        let ([batch, heads, seq_q, head_dim], [_, groups, seq_kv, _]) = (q.dims(), k.dims());
        let [index_batch, index_heads, index_q, _] = index.q.dims();
        let whose = "the index's";
        OpError::expect_same("q's batch", index_batch, whose, batch)?;
        OpError::expect_same("k's heads", index_heads, whose, groups)?;
        OpError::expect_same("q's seq_q", index_q, whose, seq_q)?;
        OpError::expect_same("k's seq_kv", index.seq_kv(), whose, seq_kv)?;
        if let MsaTarget::Chosen { lists, lse } = over {
            let expected = [batch, heads, seq_q];
            OpError::expect_same("lse's shape", expected, "q's rows", lse.dims())?;
            if let Some(lists) = lists {
                let [list_batch, of_heads, queries, _] = lists.blocks.dims();
                let got = [list_batch, of_heads, queries];
                OpError::expect_same("lists' shape", [batch, groups, seq_q], whose, got)?;
                OpError::expect_same("lists' block", self.block, "that of msa", lists.block)?;
            }
        }
        let scale = scale.unwrap_or(1.0 / (head_dim.max(1) as f64).sqrt());
        let all = batch * groups;
        let sees_all = self.sees_all(seq_kv);
        let together = match over {
            MsaTarget::Chosen { .. } if !sees_all => {
                (LISTED / (all * self.keep * self.block)).clamp(1, seq_q)
            }
            _ => seq_q,
        };
        let by_groups = |x: &Tensor<4>, rows: Range<usize>| {
            let [_, heads, _, width] = x.dims();
            let x = x.clone().without_autodiff().slice_dim(2, rows.clone());
            x.reshape([all, heads / groups, rows.len(), width])
        };
        // The number of selected keys does not matter here.
        let dsa = Dsa::new(1)?.with_chunk_elements(self.numbers)?;
        let mut sum: Option<Tensor<1>> = None;
        for rows in in_steps(0..seq_q, together) {
            let end = rows.end + seq_kv - seq_q;
            let of_rows = index.of_rows(rows.clone()).of_groups()?;
            let pair = [&by_groups(q, rows.clone()), &by_groups(k, 0..end)];
            let lse = match over {
                MsaTarget::All => None,
                MsaTarget::Chosen { lse, .. } => {
                    let lse = lse.clone().without_autodiff().slice_dim(2, rows.clone());
                    Some(lse.reshape([all, heads / groups, rows.len()]))
                }
            };
            let keys = match over {
                MsaTarget::Chosen { lists, .. } if !sees_all => {
                    Some(self.keys(lists, [batch, groups], &rows, (end, &q.device()))?)
                }
                _ => None,
            };
            let over = keys.as_ref().map_or(DsaTarget::All, DsaTarget::Chosen);
            let loss = dsa.compared(&of_rows, pair, scale, over, lse);
            let loss = loss.mul_scalar(rows.len() as f64 / seq_q as f64);
            sum = Some(added(sum, loss));
        }
        Ok(sum.expect("there is a query"))
    }

    /// Returns the keys that queries attend to, in lists of `batch · groups` batch entries. The last query is at the position of key `end − 1`.
    fn keys(
        &self,
        lists: Option<&SelectedBlocks>,
        [batch, groups]: [usize; 2],
        rows: &Range<usize>,
        (end, device): (usize, &Device),
    ) -> Result<TokenIndices, OpError> {
        let (all, count) = (batch * groups, rows.len());
        let ints = (&device.clone().without_autodiff(), DType::I32);
        let positions = Tensor::<1, Int>::arange((end - count) as i64..end as i64, ints);
        let positions = positions.reshape([1, count, 1, 1]);
        let own = positions.clone().div_scalar(self.block as i32);
        let own = own.reshape([1, 1, count, 1]);
        let mut blocks = vec![own.expand([all, 1, count, 1])];
        if let Some(lists) = lists {
            let [.., most] = lists.blocks.dims();
            let chosen = lists.blocks.clone().slice_dim(2, rows.clone());
            blocks.push(chosen.reshape([all, 1, count, most]));
        }
        // Ascending order puts the query's own block last.
        let blocks = Tensor::cat(blocks, 3);
        let blocks = TokenIndices::new(blocks, end.div_ceil(self.block), false)?;
        let blocks = blocks.keys().clone();
        let [.., most] = blocks.dims();
        let dims = [all, count, most, self.block];
        let blocks = blocks.reshape([all, count, most, 1]).expand(dims);
        let within = Tensor::<1, Int>::arange(0..self.block as i64, ints);
        let within = within.reshape([1, 1, 1, self.block]).expand(dims);
        let keys = blocks.clone().mul_scalar(self.block as i32) + within;
        let later = keys.clone().greater(positions.expand(dims));
        let keys = keys.mask_fill(later.bool_or(blocks.lower_elem(0)), -1);
        let keys = keys.reshape([all, 1, count, most * self.block]);
        Ok(TokenIndices::of_unique(keys, end, true))
    }
}
