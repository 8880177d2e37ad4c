//! Host code that the tensor-core tiers share.

use cubecl::ir::{ElemType, FloatKind};

use super::args::ScoreOptions;
use super::call::{PartRequest, Request, TensorView};
use super::error::KernelError;
use crate::arch::ptx::Half;

/// Refusal reason: kernels count output elements, or vectors of them, in 32 bits.
pub const TOO_LARGE: &str = "an output has more elements than its kernels count in 32 bits";

/// Whether `count` fits 32 bits.
pub fn is_u32(count: usize) -> bool {
    u32::try_from(count).is_ok()
}

/// Checks for options that no tensor-core tier supports, whatever the tile.
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

/// Returns the half-precision type of a dtype.
pub fn half_of(dtype: ElemType) -> Result<Half, &'static str> {
    match dtype {
        ElemType::Float(FloatKind::BF16) => Ok(Half::Bf16),
        ElemType::Float(FloatKind::F16) => Ok(Half::F16),
        _ => Err("the dtype is neither bf16 nor f16"),
    }
}

/// Returns the cheapest of tiles with costs.
pub fn cheapest<T>(tiles: impl Iterator<Item = (f64, T)>) -> Option<(f64, T)> {
    tiles.min_by(|(one, _), (other, _)| one.total_cmp(other))
}

/// Checks that the limit allows tensor cores.
pub fn check_limit(part: &PartRequest) -> Result<(), &'static str> {
    match part.limit.is_simt() {
        true => Err("BLOCKSPARSE_TIER says simt"),
        false => Ok(()),
    }
}

/// Checks that rows are contiguous and begin at multiples of 16 bytes, which are `multiple` elements.
pub fn check_rows(
    name: &'static str,
    tensor: &TensorView,
    multiple: usize,
) -> Result<(), KernelError> {
    let bytes = tensor.handle.offset_start.unwrap_or(0) as usize;
    let mut numbers = std::iter::once(bytes.div_ceil(16 / multiple)).chain(tensor.outer_strides());
    match numbers.find(|number| !number.is_multiple_of(multiple)) {
        None => tensor.check_rows(name),
        Some(got) => Err(KernelError::Alignment {
            tensor: name,
            multiple,
            got,
        }),
    }
}

/// Checks the properties of a call's scores that a plan does not know: the scale, and that the table of distances can be indexed in signed 32 bits.
pub fn check_score(options: &ScoreOptions) -> Result<(), KernelError> {
    let what = "the numbers of a table of distances";
    KernelError::check(what, i32::MAX as u32, options.table_len())?;
    match options.biased() {
        true => Ok(()),
        false => check_scale(options.scale, options.softcap),
    }
}

/// Checks that the scale is positive, unless there is a softcap. The running maximum is of unscaled scores.
pub fn check_scale(scale: f64, softcap: Option<f64>) -> Result<(), KernelError> {
    match softcap.is_some() || (scale > 0.0 && scale.is_finite()) {
        true => Ok(()),
        false => Err(KernelError::Scale {
            scale: scale.to_string(),
        }),
    }
}

/// Returns two factors of products: the one applied in the exponent (base 2), and the one applied before a softcap or a bias.
pub fn factors(options: &ScoreOptions) -> (f64, f64) {
    match options.biased() && options.softcap.is_none() {
        true => (std::f64::consts::LOG2_E, options.scale),
        false => scales(options.scale, options.softcap),
    }
}

/// Returns two factors of products: the one applied in the exponent (base 2), and the one inside the softcap's tanh.
pub fn scales(scale: f64, softcap: Option<f64>) -> (f64, f64) {
    let log2_e = std::f64::consts::LOG2_E;
    match softcap {
        Some(softcap) => (log2_e, 2.0 * log2_e * scale / softcap),
        None => (scale * log2_e, 0.0),
    }
}
