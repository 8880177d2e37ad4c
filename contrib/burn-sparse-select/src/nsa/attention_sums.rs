//! Attention that key blocks receive via compressed blocks, by which queries select.

use std::ops::Range;

use burn::tensor::{Bool, DType, Device, Int, Tensor};

use crate::nsa::Nsa;
use crate::selection::parts::{NUMBERS, in_steps, joined, padded};
use crate::selection::products;
use crate::selection::query_lists::{ListSizes, SelectedBlocks};
use burn_blocksparse::OpError;
use burn_blocksparse::internal::op_plan::OpPlan;

/// Typical overlap of adjacent queries' lists in a trained model: .85 to .91 in the four layers of a small one (docs/dev/selection-measurements.md).
const OVERLAP: f64 = 0.85;

/// `Σ over the group's heads h and compressed i of exp(scale · q_h · k_i − lse_h) · overlap(i, J)` of every block J, without autodiff.
pub(crate) struct AttentionSums<'a> {
    pub(crate) nsa: &'a Nsa,
    pub(crate) q: Tensor<4>,
    /// Keys of compressed blocks, and lse over those that a query sees. `None` if there are none.
    pub(crate) compressed: Option<(Tensor<4>, Tensor<3>)>,
    pub(crate) kv_heads: usize,
    /// Position of the first query.
    pub(crate) first: usize,
    /// Number of key blocks.
    pub(crate) blocks: usize,
    pub(crate) scale: f64,
}

impl<'a> AttentionSums<'a> {
    /// Creates the sums from queries and from keys and values of compressed blocks with the lse of the queries' attention to them. `k` are the keys to select
    /// from.
    pub fn new(
        nsa: &'a Nsa,
        q: &Tensor<4>,
        k: &Tensor<4>,
        compressed: Option<([Tensor<4>; 2], Tensor<3>)>,
    ) -> Self {
        let ([_, _, seq_q, dim], [_, kv_heads, seq_kv, _]) = (q.dims(), k.dims());
        let options = nsa.options();
        Self {
            nsa,
            q: q.clone().without_autodiff(),
            compressed: compressed
                .map(|([k, _], lse)| (k.without_autodiff(), lse.without_autodiff())),
            kv_heads,
            first: seq_kv - seq_q,
            blocks: seq_kv.div_ceil(options.selected_block),
            scale: options.scale.unwrap_or(1.0 / (dim as f64).sqrt()),
        }
    }

    /// Computes the sums of a range of query rows: `[batch, kv_heads, rows, blocks]`, f32. Rows are processed in slabs, so that no intermediate tensor has more
    /// than [`NUMBERS`] elements; a single row may exceed it.
    pub fn of_rows(&self, rows: Range<usize>) -> Result<Tensor<4>, OpError> {
        #[cfg(feature = "cube")]
        if let Some(attention_sums) = self.by_kernel(rows.clone()) {
            return Ok(attention_sums);
        }
        let [batch, heads, ..] = self.q.dims();
        let step = (NUMBERS / (batch * heads * self.seen(rows.end).max(1))).max(1);
        let mut slabs = Vec::new();
        for rows in in_steps(rows, step) {
            slabs.push(
                match self.compressed.as_ref().filter(|_| self.seen(rows.end) > 0) {
                    None => self.nothing(rows.len(), self.blocks),
                    Some((k, lse)) => self.slab(rows, k, lse),
                },
            );
        }
        Ok(joined(slabs, 2))
    }

    /// Returns the plan of the attention sums.
    #[cfg_attr(not(feature = "cube"), allow(unused_variables))]
    pub fn op_plan(&self) -> OpPlan {
        burn_blocksparse::op_plan!(&self.q.device(), |device| {
            self.plan_on(device).map(|plan| plan.to_string())
        })
    }

    /// Returns the blocks that queries select in addition to the forced ones, and the queries of each block.
    pub fn lists(&self, sizes: &ListSizes) -> Result<SelectedBlocks, OpError> {
        #[cfg(feature = "cube")]
        if let Some(blocks) = self.choice(sizes) {
            return SelectedBlocks::of_choices(blocks, sizes).with_group_reuse(OVERLAP);
        }
        let [batch, ..] = self.q.dims();
        let together = sizes.rows_at_a_time(batch * self.kv_heads);
        SelectedBlocks::new(|rows| self.of_rows(rows), together, sizes)?.with_group_reuse(OVERLAP)
    }

    /// Returns the sums of queries that see no compressed block: zeros.
    pub(crate) fn nothing(&self, rows: usize, blocks: usize) -> Tensor<4> {
        let [batch, ..] = self.q.dims();
        let dims = [batch, self.kv_heads, rows, blocks];
        Tensor::zeros(dims, (&self.q.device(), DType::F32))
    }

    /// Returns the number of compressed blocks that start in a key block, and that cover a token.
    pub(crate) fn strides(&self) -> [usize; 2] {
        let options = self.nsa.options();
        [options.selected_block, options.block].map(|block| block / options.stride)
    }

    /// Returns the number of compressed blocks that the query before row `end` sees.
    pub(crate) fn seen(&self, end: usize) -> usize {
        self.nsa.entries(end + self.first)
    }

    fn slab(&self, rows: Range<usize>, k: &Tensor<4>, lse: &Tensor<3>) -> Tensor<4> {
        let [batch, heads, ..] = self.q.dims();
        let (seen, count, device) = (self.seen(rows.end), rows.len(), self.q.device());
        let q = self.q.clone().slice_dim(2, rows.clone()).cast(DType::F32);
        let k = k.clone().slice_dim(2, 0..seen).cast(DType::F32);
        let group = heads / self.kv_heads;
        let scores = products(q * self.scale, k, group);
        let lse = lse.clone().slice_dim(2, rows.clone()).cast(DType::F32);
        let p = (scores - lse.unsqueeze_dim(3)).exp();
        // A row that sees nothing has lse −∞.
        let hidden = self
            .hidden(rows, seen, &device)
            .reshape([1, 1, count, seen]);
        let p = p.mask_fill(hidden.expand([batch, heads, count, seen]), 0.0);
        let p = p.reshape([batch * self.kv_heads, group, count, seen]);
        let p = p.sum_dim(1).reshape([batch, self.kv_heads, count, seen]);
        // A compressed block distributes its weight evenly over the strides of tokens that it covers.
        let [strides, covered] = self.strides();
        let cells = self.blocks * strides;
        let shifted = (0..covered).map(|shift| padded(p.clone(), 3, [shift, cells - seen - shift]));
        let of_cells = shifted
            .reduce(|a, b| a + b)
            .expect("a block has a stride at least");
        let parts = [batch * self.kv_heads, count, self.blocks, strides];
        let dims = [batch, self.kv_heads, count, self.blocks];
        of_cells.reshape(parts).sum_dim(3).reshape(dims)
    }

    /// Returns true where a query does not see a compressed block: `[rows, seen]`.
    fn hidden(&self, rows: Range<usize>, seen: usize, device: &Device) -> Tensor<2, Bool> {
        let dims = [rows.len(), seen];
        let [start, end] = [rows.start, rows.end].map(|row| (row + self.first) as i64);
        let positions = Tensor::<1, Int>::arange(start..end, (device, DType::I32));
        let last = Tensor::<1, Int>::arange(0..seen as i64, (device, DType::I32));
        let options = self.nsa.options();
        let last = last.mul_scalar(options.stride as i32);
        let last = last.add_scalar(options.block as i32 - 1);
        let last = last.reshape([1, seen]).expand(dims);
        last.greater(positions.reshape([dims[0], 1]).expand(dims))
    }
}
