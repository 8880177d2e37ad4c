//! The backend trait of tensors with fixed buffers.

use crate::base::prelude::*;

/// Writes of host values into a tensor's memory, as backend operations. [`StaticInput`](crate::graph::StaticInput) checks the arguments: the tensor is
/// one-dimensional, and the data has its length and dtype.
#[backend_extension(
    Flex: cfg(feature = "flex"),
    NdArray: cfg(feature = "ndarray"),
    Cube: cfg(feature = "cube"),
    Autodiff: cfg(feature = "autodiff"),
    Fusion: cfg(feature = "fusion"),
)]
pub trait StaticInputOps: Backend {
    /// Overwrites a float tensor. On devices that record, it writes into the same buffer, even if it is shared. Elsewhere it returns a new tensor.
    #[fusion(dtype = x, shape = x)]
    fn overwrite_float(x: FloatTensor<Self>, data: TensorData) -> FloatTensor<Self> {
        Self::float_from_data(data, &x.device())
    }

    /// Overwrites an integer tensor like [`overwrite_float`](Self::overwrite_float).
    #[fusion(dtype = x, shape = x)]
    fn overwrite_int(x: IntTensor<Self>, data: TensorData) -> IntTensor<Self> {
        Self::int_from_data(data, &x.device())
    }

    /// Overwrites the words of a [`SeedTable`](crate::graph::SeedTable) with this number like [`overwrite_float`](Self::overwrite_float). Later calls find the
    /// words by it.
    #[fusion(dtype = x, shape = x)]
    fn overwrite_seeds(x: IntTensor<Self>, data: TensorData, _table: u32) -> IntTensor<Self> {
        Self::int_from_data(data, &x.device())
    }
}

reference_backends!(StaticInputOps);
