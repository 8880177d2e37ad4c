//! The backend trait of heads.

use burn::backend::{Backend, backend_extension};

use crate::heads::reference;
use crate::heads::values::{HeadParts, JoinCall, Joined, SplitInputs};
use burn_blocksparse::internal::values::ThreeFloats;

/// Splitting rows into heads and joining them as backend operations. Arguments are checked by the public functions.
#[backend_extension(
    Flex: cfg(feature = "flex"),
    NdArray: cfg(feature = "ndarray"),
    Cube: cfg(feature = "cube"),
    Autodiff: cfg(feature = "autodiff"),
    Fusion: cfg(feature = "fusion"),
)]
pub trait HeadOps: Backend {
    /// Rows plus a bias, as tensors by heads.
    #[fusion(meta = meta::split)]
    fn split_heads(
        #[extension_type] inputs: SplitInputs<Self>,
        parts: HeadParts,
    ) -> ThreeFloats<Self> {
        reference::split::<Self>(inputs, parts)
    }

    /// Tensors by heads as rows, and the sums over all rows. At least one of the tensors has to be there.
    #[fusion(meta = meta::join)]
    fn join_heads(#[extension_type] tensors: ThreeFloats<Self>, call: JoinCall) -> Joined<Self> {
        reference::join::<Self>(tensors, &call)
    }
}

/// Output shapes and dtypes for fusion.
#[cfg(feature = "fusion")]
mod meta {
    use burn::backend::fusion::custom::TensorSpec;

    use super::*;
    use crate::heads::values::{JoinedMetadata, SplitInputsMetadata};
    use burn_blocksparse::internal::values::{OptFloatMetadata, ThreeFloatsMetadata};

    pub fn split(inputs: &SplitInputsMetadata, parts: &HeadParts) -> ThreeFloatsMetadata {
        let [batch, seq, _] = inputs.x.shape.dims::<3>();
        let [first, second, third] = parts.map(|part| match part {
            Some((heads, dim)) => OptFloatMetadata::Some(TensorSpec::new(
                [batch, heads, seq, dim].into(),
                inputs.x.dtype,
            )),
            None => OptFloatMetadata::None,
        });
        ThreeFloatsMetadata {
            first,
            second,
            third,
        }
    }

    pub fn join(_tensors: &ThreeFloatsMetadata, call: &JoinCall) -> JoinedMetadata {
        let [batch, seq] = call.rows;
        let width = call.width();
        JoinedMetadata {
            x: TensorSpec::new([batch, seq, width].into(), call.dtype.into()),
            bias: match call.bias {
                Some(dtype) => {
                    OptFloatMetadata::Some(TensorSpec::new([width].into(), dtype.into()))
                }
                None => OptFloatMetadata::None,
            },
        }
    }
}
