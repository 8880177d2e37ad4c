//! The backend trait of sums of weights.

use std::ops::Range;

use burn::backend::{Backend, backend_extension};

use crate::attention::reference;
use crate::base::values::{AccumulatedInputs, AccumulatedOutput, LayoutTensors};
use crate::options::AttentionOptions;

/// Sums of weights as a backend operation. Arguments are checked by the public function.
#[backend_extension(
    Flex: cfg(feature = "flex"),
    NdArray: cfg(feature = "ndarray"),
    Cube: cfg(feature = "cube"),
    Autodiff: cfg(feature = "autodiff"),
    Fusion: cfg(feature = "fusion"),
)]
pub trait AccumulatedAttentionOps: Backend {
    /// Sums over the columns and diagonals of the weights of `queries`.
    #[fusion(meta = meta::masses)]
    fn accumulated_attention(
        #[extension_type] inputs: AccumulatedInputs<Self>,
        #[extension_type] layout: LayoutTensors<Self>,
        options: AttentionOptions,
        queries: Range<usize>,
    ) -> AccumulatedOutput<Self> {
        reference::masses::<Self>(inputs, &layout, &options, queries)
    }
}

/// Output shapes and dtypes for fusion.
#[cfg(feature = "fusion")]
mod meta {
    use burn::backend::fusion::custom::TensorSpec;

    use super::*;
    use crate::base::values::{
        AccumulatedInputsMetadata, AccumulatedOutputMetadata, LayoutTensorsMetadata,
    };

    pub fn masses(
        inputs: &AccumulatedInputsMetadata,
        _layout: &LayoutTensorsMetadata,
        _options: &AttentionOptions,
        _queries: &Range<usize>,
    ) -> AccumulatedOutputMetadata {
        let [batch, heads, seq_q] = inputs.lse.shape.dims::<3>();
        let seq_kv = inputs.k.shape[2];
        let spec = |length: usize| TensorSpec::new([batch, heads, length].into(), inputs.lse.dtype);
        AccumulatedOutputMetadata {
            columns: spec(seq_kv),
            diagonals: spec(seq_q + seq_kv - 1),
        }
    }
}
