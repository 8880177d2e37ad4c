//! Layouts whose pairs are lists of single keys.

use blocksparse::BlockLayout;

use crate::selection::key_lists::TokenIndices;
use burn_blocksparse::{DeviceLayout, OpError};

impl TokenIndices {
    /// The layout of these lists: the blocks of `places`, which is on the host, and of their pairs those in the lists, single keys, as each query chose them. Every option of attention
    /// works with it, such as biases, softcaps and dropout.
    ///
    /// Tiles of adjacent queries see all blocks of `places`, whatever is listed: that is fast where queries list a good part of what they see, and takes a bit
    /// for each pair of its blocks, in the tiles of a launch. [`token_sparse_attention`](crate::selection::token_sparse_attention) goes either this way or by the lists
    /// alone, without options. Take one layout of places for all calls.
    ///
    /// ```
    /// use burn::tensor::{Device, Distribution, Int, Tensor};
    /// use burn_blocksparse::{Pattern, SparseAttentionCall};
    /// use burn_sparse_select::SelectedBlocks;
    ///
    /// let device = Device::flex();
    /// let x = Tensor::<4>::random([1, 2, 64, 16], Distribution::Default, &device);
    /// // Every query lists itself and the first key.
    /// let lists = (0..64).flat_map(|query| [query, 0]);
    /// let keys = Tensor::<1, Int>::from_data(lists.collect::<Vec<i32>>().as_slice(), &device);
    /// let lists = SelectedBlocks::of_keys(keys.reshape([1, 1, 64, 2]), 64)?;
    /// let places = Pattern::causal().layout(2, 64, 16)?;
    /// let layout = lists.layout(&places)?;
    /// let dense = layout.to_host()?.to_dense(0);
    /// assert!(dense[9][0] && dense[9][9] && !dense[9][5]);
    /// let call = SparseAttentionCall::new(x.clone(), x.clone(), x, &layout).softcap(20.0);
    /// let out = call.run()?.out;
    /// assert_eq!(out.dims(), [1, 2, 64, 16]);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// [`OpError`] if the lists do not fit the layout, the batch of the layout is another one, or it is itself made on a device.
    pub fn layout(&self, places: &BlockLayout) -> Result<DeviceLayout, OpError> {
        DeviceLayout::of_keys(places, self.keys().clone(), self.seq_kv())
    }
}
