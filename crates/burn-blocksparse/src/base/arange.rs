//! Integer ranges.

use burn::tensor::{DType, Device, Int, Tensor};

/// Returns the integers from 0 to `count`, i32. With fusion, Burn's `arange` is a prefix sum, in which a GPU reads all preceding elements for each one. Long
/// ranges are therefore built from short ones.
pub fn arange(count: usize, device: &Device) -> Tensor<1, Int> {
    const SHORT: usize = 512;
    if count <= SHORT {
        return Tensor::arange(0..count as i64, (device, DType::I32));
    }
    let parts = count.div_ceil(SHORT);
    let dims = [parts, SHORT];
    let high = arange(parts, device).mul_scalar(SHORT as i32);
    let low = arange(SHORT, device);
    let all = high.reshape([parts, 1]).expand(dims) + low.reshape([1, SHORT]).expand(dims);
    all.reshape([parts * SHORT]).slice_dim(0, 0..count)
}
