//! What the tensor-core tiers share on the host.

use cubecl::ir::{ElemType, FloatKind};

use super::args::ScoreOptions;
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

/// Of tiles with what they cost the one that costs least.
pub fn cheapest<T>(tiles: impl Iterator<Item = (f64, T)>) -> Option<(f64, T)> {
    tiles.min_by(|(one, _), (other, _)| one.total_cmp(other))
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

/// Checks what a plan cannot know of a call's scores: that a table of distances can be indexed, which kernels do in signed 32 bits, and the scale.
pub fn check_score(options: &ScoreOptions) -> Result<(), KernelError> {
    let what = "the numbers of a table of distances";
    KernelError::check(what, i32::MAX as u32, options.table_len())?;
    match options.biased() {
        true => Ok(()),
        false => check_scale(options.scale, options.softcap),
    }
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

/// Factors of scores: to powers of two, and of products before that, where scores are softcapped or biased.
pub fn factors(options: &ScoreOptions) -> (f64, f64) {
    match options.biased() && options.softcap.is_none() {
        true => (std::f64::consts::LOG2_E, options.scale),
        false => scales(options.scale, options.softcap),
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
