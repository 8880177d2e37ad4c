//! The backend trait of keys that cross: a step of autodiff whose gradients go back to where the keys came from.

use std::sync::Arc;

use burn::backend::tensor::FloatTensor;
use burn::backend::{Backend, ExtensionType, backend_extension};

use crate::sharded::ShardEnd;
use crate::{float_list, reference_backends};

/// Keys and values.
#[derive(ExtensionType, Clone, Debug)]
#[extension_type(fusion: cfg(feature = "fusion"))]
#[non_exhaustive]
pub struct KeysAndValues<B: Backend> {
    /// `[batch, kv_heads, seq_kv, head_dim]`.
    pub k: FloatTensor<B>,
    /// `[batch, kv_heads, seq_kv, value_dim]`.
    pub v: FloatTensor<B>,
}

float_list!(KeysAndValues, 2: k v;);

/// Keys with those of other devices as backend operations.
#[backend_extension(
    Flex: cfg(feature = "flex"),
    NdArray: cfg(feature = "ndarray"),
    Cube: cfg(feature = "cube"),
    Autodiff: cfg(feature = "autodiff"),
    Fusion: cfg(feature = "fusion"),
)]
pub trait ShardOps: Backend {
    /// `all`, which begins with `own` and ends with what call `call` received: constants, until gradients by them go to `own` and to other devices.
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
}

reference_backends!(ShardOps);

#[cfg(feature = "cube")]
impl ShardOps for burn_cubecl::CubeBackend {}
