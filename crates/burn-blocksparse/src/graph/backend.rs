//! Host writes into tensors of CubeCL devices.

use burn::tensor::TensorData;
use burn_cubecl::CubeBackend;
use burn_cubecl::tensor::CubeTensor;

use crate::graph::ops::StaticInputOps;

impl StaticInputOps for CubeBackend {
    fn overwrite_float(x: CubeTensor, data: TensorData) -> CubeTensor {
        write(x, data)
    }

    fn overwrite_int(x: CubeTensor, data: TensorData) -> CubeTensor {
        write(x, data)
    }

    fn overwrite_seeds(x: CubeTensor, data: TensorData, table: u32) -> CubeTensor {
        blocksparse_cubecl::seeds::register(table, x.handle.clone());
        write(x, data)
    }
}

/// Writes on the caller's stream, in the order of its launches.
fn write(x: CubeTensor, data: TensorData) -> CubeTensor {
    // A one-dimensional tensor has no gaps.
    let (bytes, shape, _) = data.into_parts();
    let length = x.meta.shape().num_elements();
    assert!(
        x.meta.shape().num_dims() == 1
            && shape.num_elements() == length
            && bytes.len() == length * x.dtype.size(),
        "{} bytes do not fit a tensor of {length} numbers",
        bytes.len()
    );
    if !bytes.is_empty() {
        x.client.write(&x.handle, bytes);
    }
    x
}
