//! Layouts whose pairs are lists of single keys.

use blocksparse::{BlockLayout, BlockSource};
use burn::tensor::{Int, Tensor};

use super::{DeviceLayout, expect, repeated};
use crate::base::values::DynamicBlocks;
use crate::error::OpError;

impl DeviceLayout {
    /// The blocks of `places`, and of their pairs those that `keys` `[batch, lists, queries, most]` lists: of `seq_kv` keys, ascending, each once, and −1 after the last.
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
