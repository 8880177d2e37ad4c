//! Tensor maps (`cuTensorMapEncodeTiled`).

use super::{Answer, INVALID_VALUE, NOT_SUPPORTED, SUCCESS};
use crate::machine::{Swizzle, TENSOR_MAP_BYTES, TensorMap};

/// `CUtensorMapDataType`: bytes per element.
const ELEMENTS: [usize; 13] = [1, 2, 4, 4, 8, 8, 2, 4, 8, 2, 4, 4, 4];
/// `CUtensorMapSwizzle`: bytes per row.
const SWIZZLES: [u64; 4] = [16, 32, 64, 128];
/// Maximum number of elements of a box per dimension.
const BOX: u32 = 256;

/// # Safety
///
/// `map` has 128 bytes that can be written, and the lists have one entry per dimension of the tensor, `strides` one
/// fewer.
#[unsafe(no_mangle)]
unsafe extern "C" fn cuTensorMapEncodeTiled(
    map: *mut [u8; TENSOR_MAP_BYTES],
    kind: u32,
    rank: u32,
    address: u64,
    sizes: *const u64,
    strides: *const u64,
    window: *const u32,
    steps: *const u32,
    interleave: u32,
    swizzle: u32,
    _promotion: u32,
    outside: u32,
) -> Answer {
    let rank = rank as usize;
    if !(1..=5).contains(&rank) || kind as usize >= ELEMENTS.len() {
        return INVALID_VALUE;
    }
    // SAFETY: guaranteed by the caller.
    let (sizes, strides, window, steps) = unsafe {
        (
            std::slice::from_raw_parts(sizes, rank),
            std::slice::from_raw_parts(strides, rank - 1),
            std::slice::from_raw_parts(window, rank),
            std::slice::from_raw_parts(steps, rank),
        )
    };
    let element_bytes = ELEMENTS[kind as usize];
    if interleave != 0 || steps.iter().any(|&step| step != 1) || swizzle as usize >= SWIZZLES.len()
    {
        return NOT_SUPPORTED;
    }
    let row = u64::from(window[0]) * element_bytes as u64;
    let swizzle = Swizzle::of_bytes(SWIZZLES[swizzle as usize]);
    let fits = match swizzle {
        Swizzle::None => true,
        Swizzle::Rows(bytes) => row <= bytes,
    };
    let legal = address.is_multiple_of(16)
        && strides
            .iter()
            .all(|&stride| stride.is_multiple_of(16) && stride < 1 << 40)
        && sizes.iter().all(|&size| size > 0 && size <= 1 << 32)
        && window.iter().all(|&count| (1..=BOX).contains(&count))
        && row.is_multiple_of(16)
        && fits;
    if !legal {
        return INVALID_VALUE;
    }
    let encoded = TensorMap {
        address,
        element_bytes,
        sizes: sizes.to_vec(),
        strides: std::iter::once(element_bytes as u64)
            .chain(strides.iter().copied())
            .collect(),
        window: window.iter().map(|&count| count.into()).collect(),
        swizzle,
        nan_outside: outside != 0,
    };
    // SAFETY: guaranteed by the caller.
    unsafe { map.write(encoded.bytes()) };
    SUCCESS
}
