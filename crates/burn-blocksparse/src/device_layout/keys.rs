//! Layouts whose pairs are given as lists of individual keys.

use blocksparse::{BlockLayout, BlockSource};
use burn::tensor::{Int, Tensor};

use super::{DeviceLayout, expect, repeated};
use crate::base::values::DynamicBlocks;
use crate::error::OpError;

impl DeviceLayout {
    /// Creates a layout of the blocks of `places` and, among their pairs, those in `keys` `[batch, lists, queries, most]`: indices into `seq_kv` keys,
    /// ascending, distinct, padded with −1.
    #[doc(hidden)]
    pub fn of_keys(
        places: &BlockLayout,
        keys: Tensor<4, Int>,
        seq_kv: usize,
    ) -> Result<Self, OpError> {
        let [batch, heads, queries, most] = keys.dims();
        blocksparse::ensure! {
            OpError;
            places.heads().is_multiple_of(heads) => "lists' heads", format!("a divisor of the {} heads of places", places.heads()), heads;
        }
        expect("lists' queries", places.seq_q(), queries)?;
        expect("lists' seq_kv", places.seq_kv(), seq_kv)?;
        let patterns = places.patterns_within([batch, heads])?;
        let name = format!("{}, of single keys that are listed", places.name());
        let keys = DynamicBlocks::Ints(repeated(keys, patterns).into_dispatch());
        Self::within(name, patterns, BlockSource::Keys { most }, places, keys)
    }
}
