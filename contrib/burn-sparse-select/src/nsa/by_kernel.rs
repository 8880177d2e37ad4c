//! Attention sums by a kernel, and selection by them without storing them.

use std::ops::Range;

use crate::kernels::selection::{CompressedPlan, CompressedShape};
use burn::backend::Dispatch;
use burn::backend::cubecl::dtype_to_elem_type;
use burn::tensor::{Int, Tensor};

use crate::nsa::attention_sums::AttentionSums;
use crate::selection::estimate_ops::{CompressedCall, EstimateOps};
use crate::selection::query_lists::ListSizes;
use burn_blocksparse::internal::device::cube;
use burn_blocksparse::internal::op_plan::OpDevice;

impl AttentionSums<'_> {
    /// Returns the kernel's plan on a device, or the reason why it does not run.
    pub(crate) fn plan_on(&self, device: &OpDevice) -> Result<CompressedPlan, &'static str> {
        if self.nsa.is_general {
            return Err("it was asked to be made as elsewhere");
        }
        if self.compressed.is_none() {
            return Err("there are no compressed blocks");
        }
        let dtype = dtype_to_elem_type(self.q.dtype());
        CompressedPlan::new(&device.client(), dtype, self.shape())
    }

    /// Returns the kernel's plan, if it runs.
    fn plan(&self) -> Option<CompressedPlan> {
        let device = cube::of(&self.q.device())?;
        match burn_blocksparse::internal::cube::uses_reference() {
            true => None,
            false => self.plan_on(&device).ok(),
        }
    }

    fn shape(&self) -> CompressedShape {
        let [batch, heads, seq_q, width] = self.q.dims();
        let options = self.nsa.options();
        CompressedShape {
            batch,
            heads: [heads, self.kv_heads],
            seq: [seq_q, self.first + seq_q],
            width,
            blocks: [options.block, options.stride, options.selected_block],
        }
    }

    fn call(&self, rows: Range<usize>, most: usize) -> CompressedCall {
        let forced = self.nsa.options().forced;
        CompressedCall {
            shape: self.shape(),
            scale: self.scale,
            rows,
            forced,
            most,
        }
    }

    /// Computes the sums of a range of rows, if the kernel runs: `[batch, kv_heads, rows, blocks]`, f32.
    pub(crate) fn by_kernel(&self, rows: Range<usize>) -> Option<Tensor<4>> {
        self.plan()?;
        let (k, lse) = self.compressed.clone()?;
        Some(Tensor::from_dispatch(
            <Dispatch as EstimateOps>::compressed_attention_sums(
                self.q.clone().into_dispatch(),
                k.into_dispatch(),
                lse.into_dispatch(),
                self.call(rows, 0),
            ),
        ))
    }

    /// Returns the blocks that queries select in addition to the forced ones, if the kernel serves this many: `[batch, kv_heads, seq_q, most]`.
    pub(crate) fn choice(&self, sizes: &ListSizes) -> Option<Tensor<4, Int>> {
        self.plan()?.chooses(sizes.most()).then_some(())?;
        let (k, lse) = self.compressed.clone()?;
        let rows = 0..self.q.dims()[2];
        Some(Tensor::from_dispatch(
            <Dispatch as EstimateOps>::compressed_choice(
                self.q.clone().into_dispatch(),
                k.into_dispatch(),
                lse.into_dispatch(),
                self.call(rows, sizes.most()),
            ),
        ))
    }
}
