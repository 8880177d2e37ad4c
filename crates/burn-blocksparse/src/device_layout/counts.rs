//! Numbers of blocks of a device layout.

use crate::base::device::runs_kernels;
use crate::base::prelude::*;
use crate::device_layout::DeviceLayout;
use crate::device_layout::ops::DeviceLayoutOps;
use crate::upload::layout_tensors;

impl DeviceLayout {
    /// Returns the number of blocks in each block row: i32 `[batch or 1, patterns, q_blocks]`, on the device, without autodiff. `patterns` is the number of
    /// groups of adjacent heads with their own blocks, a divisor of the heads. Nothing is read back if kernels run. For layouts by positions or lists of keys
    /// all blocks of `places` are counted.
    ///
    /// # Errors
    /// [`OpError`] if no kernels run and the tensor that chooses cannot be read.
    pub fn counts(&self) -> Result<Tensor<3, Int>, OpError> {
        let device = self.device();
        let [batch, patterns] = self.choice().patterns;
        let q_blocks = self.frame.q_blocks();
        let has_all = self.choice().by.has_all_blocks();
        if runs_kernels(&device) && !has_all {
            let mut tensors = layout_tensors(&self.frame, &device, true)?;
            tensors.choice = self.chooser();
            let counts = <Dispatch as DeviceLayoutOps>::count_blocks(tensors);
            return Ok(Tensor::from_dispatch(counts));
        }
        // By positions and lists of keys the blocks are those of `places`, whether or not any of their pairs is visible.
        let host = match self.frame.within() {
            Some(places) if has_all => places.clone(),
            _ => self.to_host()?,
        };
        let group = host.heads() / patterns;
        let last = host.batch().unwrap_or(1) - 1;
        let mut counts = Vec::with_capacity(batch * patterns * q_blocks);
        for (entry, head) in (0..batch).flat_map(|entry| (0..patterns).map(move |p| (entry, p))) {
            let offsets = host.row_offsets(host.pattern_of(entry.min(last), head * group));
            counts.extend(offsets.windows(2).map(|row| (row[1] - row[0]) as i32));
        }
        let counts = TensorData::new(counts, [batch, patterns, q_blocks]);
        Ok(Tensor::from_data(counts, (&device, DType::I32)))
    }

    /// Returns the share of visible blocks that are chosen, over all rows: `[1]` in f32, on the device. Nothing is read back if kernels run.
    ///
    /// # Errors
    /// As [`Self::counts`].
    pub fn density(&self) -> Result<Tensor<1>, OpError> {
        let counts = self.counts()?;
        let [batch, patterns, q_blocks] = counts.dims();
        let visible: usize = match self.frame.within() {
            Some(within) => {
                let group = within.heads() / patterns;
                let entries = (0..batch).flat_map(|entry| (0..patterns).map(move |p| (entry, p)));
                let last = within.batch().unwrap_or(1) - 1;
                let blocks = entries.map(|(entry, p)| {
                    within.pattern_blocks(within.pattern_of(entry.min(last), p * group))
                });
                blocks.sum()
            }
            None => {
                let grid = crate::choice::grid(self.shape(), self.causal);
                let of_row = |row| {
                    (0..grid.blocks())
                        .filter(|&b| grid.is_visible(row, b))
                        .count()
                };
                batch * patterns * (0..q_blocks).map(of_row).sum::<usize>()
            }
        };
        // Sums over rows first: one long sum would run in a single cube.
        let counts = counts.float().cast(DType::F32).sum_dim(2).sum();
        Ok(counts.div_scalar(visible.max(1) as f32))
    }
}
