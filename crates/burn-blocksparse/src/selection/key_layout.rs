//! Layouts whose pairs are lists of single keys.

use std::sync::Arc;

use blocksparse::{BlockLayout, BlockSource, DeviceChoice};

use crate::device_layout::{Chooser, DeviceLayout, expect, repeated};
use crate::error::OpError;
use crate::selection::key_lists::TokenIndices;

impl DeviceLayout {
    /// The blocks of `places`, which is on the host, and of their pairs those in the lists: single keys, as each query chose them. Every option of attention
    /// works with it, such as biases, softcaps and dropout.
    ///
    /// Tiles of neighbouring queries walk all blocks of `places`, whatever is listed: that is fast where queries list a good part of what they see, and takes a bit
    /// for each pair of its blocks, in the tiles of a launch. [`token_sparse_attention`](crate::selection::token_sparse_attention) goes either this way or by the lists
    /// alone, without options. Take one layout of places for all calls.
    ///
    /// ```
    /// use burn::tensor::{Device, Distribution, Int, Tensor};
    /// use burn_blocksparse::{DeviceLayout, Pattern, SparseAttentionCall};
    /// use burn_blocksparse::selection::SelectedBlocks;
    ///
    /// let device = Device::flex();
    /// let x = Tensor::<4>::random([1, 2, 64, 16], Distribution::Default, &device);
    /// // Every query lists itself and the first key.
    /// let lists = (0..64).flat_map(|query| [query, 0]);
    /// let keys = Tensor::<1, Int>::from_data(lists.collect::<Vec<i32>>().as_slice(), &device);
    /// let lists = SelectedBlocks::of_keys(keys.reshape([1, 1, 64, 2]), 64)?;
    /// let places = Pattern::causal().layout(2, 64, 16)?;
    /// let layout = DeviceLayout::from_keys(&places, &lists)?;
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
    pub fn from_keys(places: &BlockLayout, lists: &TokenIndices) -> Result<Self, OpError> {
        let keys = lists.keys().clone();
        let [batch, heads, queries, most] = keys.dims();
        if !places.heads().is_multiple_of(heads) {
            let expected = format!("a divisor of the {} heads of places", places.heads());
            return Err(OpError::argument("lists' heads", expected, heads));
        }
        expect("lists' queries", places.seq_q(), queries)?;
        expect("lists' seq_kv", places.seq_kv(), lists.seq_kv())?;
        let patterns = places.patterns_within([batch, heads])?;
        let choice = DeviceChoice {
            patterns,
            causal: false,
            by: BlockSource::Keys { most },
        };
        let keys = match patterns[0] == batch {
            true => keys,
            false => keys.expand([patterns[0], heads, queries, most]),
        };
        let name = format!("{}, of single keys that are listed", places.name());
        Ok(Self {
            frame: BlockLayout::on_device_within(name, choice, places)?,
            causal: false,
            chooser: Chooser::Keys(repeated(keys, patterns)),
            host: Arc::default(),
        })
    }
}
