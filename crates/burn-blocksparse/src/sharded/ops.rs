//! The backend trait of shared sequences: an autodiff step whose gradients return to the owners of keys and values, and direct exchange between devices.

use std::sync::Arc;

use burn::tensor::IndexingUpdateOp;

use crate::base::prelude::*;
use crate::sharded::ShardEnd;

op_values! {
    /// Keys and values.
    pub struct KeysAndValues {
        /// `[batch, kv_heads, seq_kv, head_dim]`.
        pub k: FloatTensor,
        /// `[batch, kv_heads, seq_kv, value_dim]`.
        pub v: FloatTensor,
    }
}

float_list!(KeysAndValues, 2: k v;);

/// Exchange of keys and values as backend operations.
#[backend_extension(
    Flex: cfg(feature = "flex"),
    NdArray: cfg(feature = "ndarray"),
    Cube: cfg(feature = "cube"),
    Autodiff: cfg(feature = "autodiff"),
    Fusion: cfg(feature = "fusion"),
)]
pub trait ShardOps: Backend {
    /// Returns `all`, which starts with `own` and ends with the blocks that call `call` received. In the backward pass its gradients go to `own` and to other
    /// devices.
    #[fusion(default)]
    fn with_received(
        #[extension_type] own: KeysAndValues<Self>,
        #[extension_type] all: KeysAndValues<Self>,
        end: Arc<ShardEnd>,
        call: u64,
    ) -> KeysAndValues<Self> {
        let _ = (own, end, call);
        all
    }

    /// Exchanges `own`, `[n]` elements of whole words, with the device with index `peer` and returns its elements. Both devices must call this. Only for CUDA
    /// devices with NCCL.
    #[fusion(dtype = own, shape = own)]
    fn swapped(own: FloatTensor<Self>, peer: u16) -> FloatTensor<Self> {
        panic!("{:?} swaps nothing with device {peer}", own.device());
    }

    /// Adds `blocks` `[batch, numbers.len(), width]` to the blocks of `x` `[batch, n, width]` with these numbers, which must be distinct.
    #[fusion(dtype = x, shape = x)]
    fn with_added(
        x: FloatTensor<Self>,
        blocks: FloatTensor<Self>,
        numbers: Vec<i32>,
    ) -> FloatTensor<Self> {
        let length = numbers.len();
        let index = Self::int_from_data(TensorData::new(numbers, [length]), &x.device());
        Self::float_select_assign(x, 1, index, blocks, IndexingUpdateOp::Add)
    }
}

reference_backends!(ShardOps);
