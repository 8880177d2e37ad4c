//! Direct exchange between CubeCL devices.

use burn::backend::ops::{FloatTensorOps, IntTensorOps};
use burn::tensor::{DType, IndexingUpdateOp, Shape, TensorData};
use burn_cubecl::ops::numeric;
use cubecl::device::DeviceId;
use cubecl::ir::{ElemType, UIntKind};
use cubecl::server::ReduceOperation;

use crate::base::cube::*;
use crate::sharded::ops::ShardOps;

impl ShardOps for CubeBackend {
    /// Uses CubeCL's sum over two devices. CubeCL's own copies between devices do not wait for users of the memory (docs/dev/log.md), but sums are ordered on
    /// both sides. Integer sums are exact, so the other device's words are the sum minus the own words. Each device sends as much as the longer of both lists.
    fn swapped(own: CubeTensor, peer: u16) -> CubeTensor {
        let (dtype, shape) = (own.dtype, own.meta.shape().clone());
        let own = as_words(into_contiguous(own), DType::U32);
        let sum = own.copy();
        let device = own.device.to_id();
        let devices = vec![
            device,
            DeviceId {
                index_id: peer,
                ..device
            },
        ];
        let word = ElemType::UInt(UIntKind::U32);
        let mut client = sum.client.clone();
        // In place, on the stream of the surrounding work.
        let (from, to) = (sum.handle.clone(), sum.handle.clone());
        client.all_reduce(from, to, word, devices, ReduceOperation::Sum);
        client.sync_collective();
        let theirs = numeric::sub(sum, own);
        let CubeTensor {
            client,
            device,
            handle,
            ..
        } = theirs;
        CubeTensor::new_contiguous(client, device, shape, handle, dtype)
    }

    /// Adds all blocks in one operation; `float_select_assign` adds one after another.
    fn with_added(x: CubeTensor, blocks: CubeTensor, numbers: Vec<i32>) -> CubeTensor {
        let shape = x.meta.shape().clone();
        let [batch, count, width] = shape.dims();
        let all: Vec<i32> = (0..batch)
            .flat_map(|entry| {
                numbers
                    .iter()
                    .map(move |number| (entry * count) as i32 + number)
            })
            .collect();
        let length = all.len();
        let index = Self::int_from_data(TensorData::new(all, [length, 1]), &x.device);
        let x = Self::float_reshape(x, Shape::new([batch * count, width]));
        let blocks = Self::float_reshape(blocks, Shape::new([length, width]));
        let sum = Self::float_scatter_nd(x, index, blocks, IndexingUpdateOp::Add);
        Self::float_reshape(sum, shape)
    }
}

/// Reinterprets a contiguous tensor `[n]` as elements of another dtype.
fn as_words(x: CubeTensor, dtype: DType) -> CubeTensor {
    let words = x.meta.shape().num_elements() * x.dtype.size() / dtype.size();
    CubeTensor::new_contiguous(x.client, x.device, Shape::new([words]), x.handle, dtype)
}
