//! Host writes into tensors under autodiff.

use crate::base::custom_gradient::*;
use crate::base::prelude::*;
use crate::graph::ops::StaticInputOps;

/// Tensors written by the host have no history.
impl<B: StaticInputOps, C: CheckpointStrategy> StaticInputOps for Autodiff<B, C> {
    fn overwrite_float(x: FloatTensor<Self>, data: TensorData) -> FloatTensor<Self> {
        let written = B::overwrite_float(x.into_primitive(), data);
        <Self as AutodiffBackend>::from_inner(written)
    }

    fn overwrite_int(x: IntTensor<Self>, data: TensorData) -> IntTensor<Self> {
        B::overwrite_int(x, data)
    }

    fn overwrite_seeds(x: IntTensor<Self>, data: TensorData, table: u32) -> IntTensor<Self> {
        B::overwrite_seeds(x, data, table)
    }
}
