//! The backend trait of tensors that keep their buffers.

use crate::base::prelude::*;

/// Writes values of the host into a tensor's memory, as backend operations. Arguments are checked by [`StaticInput`](crate::graph::StaticInput): data of the tensor's length and
/// dtype, and a tensor of one dimension.
#[backend_extension(
    Flex: cfg(feature = "flex"),
    NdArray: cfg(feature = "ndarray"),
    Cube: cfg(feature = "cube"),
    Autodiff: cfg(feature = "autodiff"),
    Fusion: cfg(feature = "fusion"),
)]
pub trait StaticInputOps: Backend {
    /// Where devices record, into the same buffer, whoever else holds it; elsewhere another tensor.
    #[fusion(dtype = x, shape = x)]
    fn overwrite_float(x: FloatTensor<Self>, data: TensorData) -> FloatTensor<Self> {
        Self::float_from_data(data, &x.device())
    }

    /// As [`overwrite_float`](Self::overwrite_float).
    #[fusion(dtype = x, shape = x)]
    fn overwrite_int(x: IntTensor<Self>, data: TensorData) -> IntTensor<Self> {
        Self::int_from_data(data, &x.device())
    }

    /// As [`overwrite_float`](Self::overwrite_float), of the words of a [`SeedTable`](crate::graph::SeedTable) with this number, which calls find there from then on.
    #[fusion(dtype = x, shape = x)]
    fn overwrite_seeds(x: IntTensor<Self>, data: TensorData, _table: u32) -> IntTensor<Self> {
        Self::int_from_data(data, &x.device())
    }
}

reference_backends!(StaticInputOps);
