//! The backend trait of rotary position embedding.

use burn::backend::tensor::FloatTensor;
use burn::backend::{Backend, backend_extension};

use crate::rope::reference;
use crate::rope::values::{RopeCall, RopeInputs, RopePair, TurnedPair};
use burn_blocksparse::reference_backends;

/// Rotary position embedding as a backend operation. Arguments are checked by the public function.
#[backend_extension(
    Flex: cfg(feature = "flex"),
    NdArray: cfg(feature = "ndarray"),
    Cube: cfg(feature = "cube"),
    Autodiff: cfg(feature = "autodiff"),
    Fusion: cfg(feature = "fusion"),
)]
pub trait RopeOps: Backend {
    /// x, turned, in the call's dtype.
    #[fusion(dtype = call.dtype.into(), shape = inputs.x.shape.clone())]
    fn rope(#[extension_type] inputs: RopeInputs<Self>, call: RopeCall) -> FloatTensor<Self> {
        reference::rope::<Self>(inputs, call)
    }

    /// Both, turned, in the call's dtype.
    #[fusion(meta = meta::pair)]
    fn rope_pair(#[extension_type] pair: RopePair<Self>, call: RopeCall) -> TurnedPair<Self> {
        one_by_one::<Self>(pair, call)
    }
}

reference_backends!(RopeOps);

/// A pair in two steps.
pub(crate) fn one_by_one<B: RopeOps>(pair: RopePair<B>, call: RopeCall) -> TurnedPair<B> {
    let RopePair {
        query,
        key,
        table,
        places,
    } = pair;
    let [query, key] = [query, key].map(|x| {
        let (table, places) = (table.clone(), places.clone());
        B::rope(RopeInputs { x, table, places }, call)
    });
    TurnedPair { query, key }
}

/// Output shapes and dtypes for fusion.
#[cfg(feature = "fusion")]
mod meta {
    use burn::backend::fusion::custom::TensorSpec;

    use super::*;
    use crate::rope::values::{RopePairMetadata, TurnedPairMetadata};

    pub fn pair(pair: &RopePairMetadata, call: &RopeCall) -> TurnedPairMetadata {
        let like = |x: &TensorSpec| TensorSpec::new(x.shape.clone(), call.dtype.into());
        TurnedPairMetadata {
            query: like(&pair.query),
            key: like(&pair.key),
        }
    }
}
