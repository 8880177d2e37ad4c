//! What the tensor-core tiers share on the host.

use cubecl::ir::{ElemType, FloatKind};

use super::call::{PartRequest, Request, TensorView};
use super::error::KernelError;
use crate::arch::ptx::Half;

/// Why a tier does not take a part: kernels count the elements of what they write, or vectors of them, in 32 bits.
pub const TOO_LARGE: &str = "an output has more elements than its kernels count in 32 bits";

/// Whether 32 bits count so many.
pub fn is_u32(count: usize) -> bool {
    u32::try_from(count).is_ok()
}

/// What a part asks for that none of these tiers does, whatever the tile.
pub fn check_options(request: &Request) -> Result<(), &'static str> {
    if request.store {
        return Err("weights are stored");
    }
    if !(request.positive_scale || request.score.softcap || request.score.biased()) {
        // The running maximum is of unscaled scores.
        return Err("the scale is not positive");
    }
    Ok(())
}

/// The half precision that a dtype is.
pub fn half_of(dtype: ElemType) -> Result<Half, &'static str> {
    match dtype {
        ElemType::Float(FloatKind::BF16) => Ok(Half::Bf16),
        ElemType::Float(FloatKind::F16) => Ok(Half::F16),
        _ => Err("the dtype is neither bf16 nor f16"),
    }
}

/// Whether a part may run on tensor cores at all.
pub fn check_limit(part: &PartRequest) -> Result<(), &'static str> {
    match part.limit.is_simt() {
        true => Err("BLOCKSPARSE_TIER says simt"),
        false => Ok(()),
    }
}

/// Checks that rows begin at multiples of 16 bytes, of which a tensor has `multiple` elements, and are contiguous.
pub fn check_rows(
    name: &'static str,
    tensor: &TensorView,
    multiple: usize,
) -> Result<(), KernelError> {
    let bytes = tensor.handle.offset_start.unwrap_or(0) as usize;
    let mut numbers = vec![bytes.div_ceil(16 / multiple)];
    let outer = tensor.shape.iter().zip(&tensor.strides).take(3);
    numbers.extend(
        outer
            .filter(|(length, _)| **length > 1)
            .map(|(_, stride)| *stride),
    );
    if let Some(&got) = numbers
        .iter()
        .find(|number| !number.is_multiple_of(multiple))
    {
        return Err(KernelError::Alignment {
            tensor: name,
            multiple,
            got,
        });
    }
    match tensor.strides[3] != 1 && tensor.shape[3] != 1 {
        false => Ok(()),
        true => Err(KernelError::Stride {
            tensor: name,
            stride: tensor.strides[3],
        }),
    }
}

/// Checks that a table of distances can be indexed: its kernels do it in signed 32 bits.
pub fn check_table(numbers: usize) -> Result<(), KernelError> {
    let what = "the numbers of a table of distances";
    KernelError::check(what, i32::MAX as u32, numbers)
}

/// Checks that the scale is positive, unless there is a softcap: the running maximum is of unscaled scores.
pub fn check_scale(scale: f64, softcap: Option<f64>) -> Result<(), KernelError> {
    match softcap.is_some() || (scale > 0.0 && scale.is_finite()) {
        true => Ok(()),
        false => Err(KernelError::Scale {
            scale: scale.to_string(),
        }),
    }
}

/// Factors of scores: to powers of two, and within the softcap's tanh.
pub fn scales(scale: f64, softcap: Option<f64>) -> (f64, f64) {
    let log2_e = std::f64::consts::LOG2_E;
    match softcap {
        Some(softcap) => (log2_e, 2.0 * log2_e * scale / softcap),
        None => (scale * log2_e, 0.0),
    }
}
