//! Attention sums by attention to compressed blocks, with their overlaps in the place of values.
//!
//! ```text
//! Σ_i p[h, i] · overlap(i, J) = out_h[J] · exp(lse_h of the keys that overlap − lse_h),   out = softmax(scale · q · k_i) · overlap(i, J)
//! ```
//!
//! of so many blocks J at a time as values may be wide: their keys are neighbours, and few.

use std::ops::Range;

use blocksparse::LayoutShape;
use burn::tensor::{DType, Device, Int, Tensor};

use crate::nsa::attention_sums::AttentionSums;
use crate::nsa::{NsaOptions, block_for, layout};
use crate::selection::parts::joined;
use burn_blocksparse::{OpError, SparseAttentionCall};

/// Blocks whose attention sums are computed together, at most.
const WIDTH: usize = 128;

impl AttentionSums<'_> {
    /// Blocks whose attention sums are computed together.
    pub(crate) fn width(&self) -> usize {
        self.blocks.min(WIDTH)
    }

    /// Of some rows: `[batch, kv_heads, rows, blocks]`, f32.
    pub(crate) fn by_attention(
        &self,
        rows: Range<usize>,
        k: &Tensor<4>,
        lse: &Tensor<3>,
    ) -> Result<Tensor<4>, OpError> {
        let [batch, heads, ..] = self.q.dims();
        let ([strides, covered], width, count) = (self.strides(), self.width(), rows.len());
        let seen = self.seen(rows.end);
        let q = self.q.clone().slice_dim(2, rows.clone());
        let lse = lse.clone().slice_dim(2, rows.clone());
        let overlaps = self
            .overlaps
            .get_or_init(|| self.overlaps(&q.device(), q.dtype()));
        let mut parts = Vec::new();
        for first in (0..self.blocks).step_by(width) {
            let blocks = (self.blocks - first).min(width);
            // The first that overlaps begins before the block.
            let before = (first * strides).min(covered - 1);
            let (from, to) = (
                first * strides - before,
                seen.min((first + blocks) * strides),
            );
            if from >= to {
                parts.push(self.nothing(count, self.blocks - first));
                break;
            }
            let at = covered - 1 - before;
            let values = overlaps.clone().slice_dim(2, at..at + to - from);
            let values = values.slice_dim(3, 0..blocks);
            let values = values.expand([batch, self.kv_heads, to - from, blocks]);
            let shape = LayoutShape::new(heads, [count, to - from], block_for(to - from));
            let layout = self.layout(shape, rows.start, from)?;
            let k = k.clone().slice_dim(2, from..to);
            let options = self.nsa.attention_options();
            let (out, own) = SparseAttentionCall::new(q.clone(), k, values, &layout)
                .options(options)
                .run_with_lse()?;
            // Rows that see none of these keys may see none at all.
            let none = own.clone().equal_elem(f32::NEG_INFINITY);
            let share = (own - lse.clone()).exp().mask_fill(none, 0.0);
            let attention_sums = out.cast(DType::F32) * share.unsqueeze_dim(3);
            let group = heads / self.kv_heads;
            let attention_sums =
                attention_sums.reshape([batch * self.kv_heads, group, count, blocks]);
            parts.push(
                attention_sums
                    .sum_dim(1)
                    .reshape([batch, self.kv_heads, count, blocks]),
            );
        }
        Ok(joined(parts, 3))
    }

    /// The layout of rows from one on over compressed blocks from one on.
    fn layout(
        &self,
        shape: LayoutShape,
        row: usize,
        entry: usize,
    ) -> Result<blocksparse::BlockLayout, OpError> {
        let NsaOptions { block, stride, .. } = *self.nsa.options();
        let position = (row + self.first) as i64 - (entry * stride) as i64;
        // All that see every block are one.
        let all = ((shape.seq_kv - 1) * stride + block) as i64 - 1;
        let position = position.min(all);
        let seen = format!("blocks of {block} every {stride} from position {position}");
        let make = || layout::of_entries(&seen, shape, [block, stride], position);
        self.nsa.layouts.get(seen.clone(), shape, make)
    }

    /// The overlaps of `width` blocks with those that are compressed, from the first that reaches into one of them: `[1, 1, compressed, width]`.
    fn overlaps(&self, device: &Device, dtype: DType) -> Tensor<4> {
        let ([strides, covered], width) = (self.strides(), self.width());
        let dims = [covered - 1 + width * strides, width];
        let counted =
            |count: usize| Tensor::<1, Int>::arange(0..count as i64, (device, DType::I32));
        // Strides that lie before the first block, rounded up to whole blocks.
        let ahead = (covered - 1).div_ceil(strides);
        let block = counted(width).add_scalar(ahead as i32);
        let block = block.reshape([1, width]).expand(dims);
        let shares = (0..covered).map(|shift| {
            let stride =
                counted(dims[0]).add_scalar((ahead * strides + shift + 1 - covered) as i32);
            let its = stride.div_scalar(strides as i32);
            let its = its.reshape([dims[0], 1]).expand(dims);
            its.equal(block.clone()).float().cast(dtype)
        });
        let sum = shares
            .reduce(|a, b| a + b)
            .expect("a block has a stride at least");
        sum.reshape([1, 1, dims[0], dims[1]])
    }
}
