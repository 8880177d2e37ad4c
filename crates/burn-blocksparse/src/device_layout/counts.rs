//! How many blocks a layout has that is made on a device.

use crate::base::device::runs_kernels;
use crate::base::prelude::*;
use crate::device_layout::DeviceLayout;
use crate::device_layout::ops::DeviceLayoutOps;
use crate::upload::layout_tensors;

impl DeviceLayout {
    /// Returns the number of blocks of each row of blocks: i32 `[batch or 1, patterns, q_blocks]`, on the device, without autodiff. `patterns` are the heads that have
    /// blocks of their own, a divisor of all, of which as many adjacent ones share one. Nothing is read back where kernels run. By positions or lists of keys
    /// the blocks are all those of the places.
    ///
    /// # Errors
    /// [`OpError`] if the tensor that chooses cannot be read, where no kernels run.
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
        // By positions and lists of keys the blocks are those of the places, whether or not a pair of them is seen.
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

    /// Chosen blocks as a share of those that are visible, over all rows: `[1]` in f32, on the device. Nothing is read back where kernels run.
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
        // A sum over rows, then over the rest: one long sum is one cube's.
        let counts = counts.float().cast(DType::F32).sum_dim(2).sum();
        Ok(counts.div_scalar(visible.max(1) as f32))
    }
}
