//! What the tensor-core tiers share on the host.

use cubecl::server::Handle;

use super::{KernelError, Sizes, TensorView};

/// `BLOCKSPARSE_TIER=simt` or `mma` leaves faster tiers out, `hopper-forward` the hopper tier's backward pass, and `hopper-walks` its
/// fused one.
pub fn tier_limit() -> Option<String> {
    std::env::var("BLOCKSPARSE_TIER").ok()
}

/// Where one walk of the backward pass reads and writes.
pub struct WalkOperands<'a> {
    /// Of the tile's own rows: q and dO, or k and v.
    pub a: [&'a TensorView; 2],
    /// Of the gathered rows: k and v, or q and dO.
    pub b: [&'a TensorView; 2],
    /// `[batch · heads, pitch, 2]`, f32: `lse · log2 e` and delta of the query at each place.
    pub stats: &'a Handle,
    /// Places of a head in the stats; for TMA a multiple of 2.
    pub pitch: usize,
    /// dQ, or dK and dV.
    pub out: &'a Handle,
    /// Elements before dV.
    pub second: usize,
}

impl<'a> WalkOperands<'a> {
    /// The inputs, as errors name them.
    pub fn named(&self) -> [(&'static str, &'a TensorView); 4] {
        let ([a1, a2], [b1, b2]) = (self.a, self.b);
        [
            ("q or k", a1),
            ("v or grad_out", a2),
            ("k or q", b1),
            ("grad_out or v", b2),
        ]
    }
}

/// What a call asks for that none of these tiers does, whatever the tile.
pub fn check_options(sizes: &Sizes) -> Result<(), &'static str> {
    if sizes.store {
        return Err("weights are stored");
    }
    let biased = sizes.alibi || sizes.bias || sizes.relative;
    if !(sizes.positive_scale || sizes.softcap || biased) {
        // The running maximum is of unscaled scores.
        return Err("the scale is not positive");
    }
    Ok(())
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
