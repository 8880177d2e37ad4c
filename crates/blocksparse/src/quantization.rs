//! Keys and values in eight bits: the exact definition that kernels and references share.

use std::fmt;

/// Storage of a row in eight bits per element, with one f32 scale `σ` for the row.
///
/// ```text
/// Int8       σ = amax / 127    n = x / σ to the nearest integer, ties to even, within ±127     x̂ = n · σ
/// Fp8E4m3    σ = amax / 448    the nearest e4m3 to x / σ, ties to even, within ±448            x̂ = e · σ
/// ```
///
/// `amax` is the largest finite `|x|` of the row in f32. `σ` is 1 if `amax` is below 2⁻¹⁰⁰ (including rows of zeros). If the largest code times `σ` would
/// overflow, `σ` is rounded down, so that finite elements stay finite. `±∞` becomes the largest value that the row can represent. A NaN makes `σ`, and so the
/// whole row, NaN. The NaN of e4m3 is never stored.
///
/// A word holds four elements, the first in its lowest bits.
///
/// ```
/// use blocksparse::Quantization;
///
/// let (words, scale) = Quantization::Int8.quantize(&[1.0, -2.0, 0.25, 0.0]);
/// assert_eq!(words, [i32::from_le_bytes([64, 129, 16, 0])]);
/// let numbers = Quantization::Int8.dequantize(&words, scale);
/// assert!((numbers[0] - 1.0).abs() <= scale / 2.0);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Quantization {
    /// Integers from −127 to 127.
    Int8,
    /// Floats of one sign bit, four of exponent and three of mantissa, without infinities (OCP FP8, E4M3).
    Fp8E4m3,
}

/// Bound of `amax` below which a row has the scale 1.
pub const SMALLEST: f32 = f32::from_bits((127 - 100) << 23);
/// The NaN of e4m3.
const NAN: u8 = 0x7f;
/// The largest value of e4m3, 448.
const LARGEST: u32 = 0x7e;

impl Quantization {
    /// Returns the largest value of a code, before it is multiplied by the scale.
    pub fn largest(self) -> f32 {
        match self {
            Self::Int8 => 127.0,
            Self::Fp8E4m3 => 448.0,
        }
    }

    /// Returns the scale of a row.
    pub fn scale(self, row: &[f32]) -> f32 {
        if row.iter().any(|x| x.is_nan()) {
            return f32::NAN;
        }
        let finite = row.iter().filter(|x| x.is_finite());
        let amax = finite.fold(0f32, |most, x| most.max(x.abs()));
        match amax < SMALLEST {
            true => 1.0,
            false => (amax / self.largest()).min(self.largest_scale()),
        }
    }

    /// Returns the largest scale whose product with the largest code is finite.
    #[doc(hidden)]
    pub fn largest_scale(self) -> f32 {
        let scale = f32::MAX / self.largest();
        match (scale * self.largest()).is_finite() {
            true => scale,
            false => scale.next_down(),
        }
    }

    /// Encodes an element that is already divided by its row's scale. NaN becomes 0.
    pub fn encode(self, x: f32) -> u8 {
        if x.is_nan() {
            return 0;
        }
        let x = x.clamp(-self.largest(), self.largest());
        match self {
            Self::Int8 => x.round_ties_even() as i8 as u8,
            Self::Fp8E4m3 => {
                let size = x.abs();
                let code = match size < 0.015_625 {
                    // Subnormal numbers have steps of 2⁻⁹.
                    true => (size * 512.0).round_ties_even() as u32,
                    false => {
                        let bits = size.to_bits();
                        let up = 0x7_ffff + (bits >> 20 & 1);
                        (((bits + up) >> 20) - (120 << 3)).min(LARGEST)
                    }
                };
                code as u8 | u8::from(x.is_sign_negative()) << 7
            }
        }
    }

    /// Decodes an element, not yet multiplied by its row's scale.
    pub fn decode(self, code: u8) -> f32 {
        match self {
            Self::Int8 => f32::from(code as i8),
            Self::Fp8E4m3 => {
                let [exponent, mantissa] = [code >> 3 & 15, code & 7].map(f32::from);
                let size = match code & 0x7f {
                    NAN => f32::NAN,
                    0..8 => mantissa / 512.0,
                    _ => (1.0 + mantissa / 8.0) * (exponent - 7.0).exp2(),
                };
                if code & 0x80 == 0 { size } else { -size }
            }
        }
    }

    /// Returns the words and the scale of a row. If the row's length is not a multiple of four, it is padded with zeros.
    pub fn quantize(self, row: &[f32]) -> (Vec<i32>, f32) {
        let scale = self.scale(row);
        let words = row.chunks(4).map(|four| {
            let mut bytes = [0; 4];
            for (byte, x) in bytes.iter_mut().zip(four) {
                *byte = self.encode(x / scale);
            }
            i32::from_le_bytes(bytes)
        });
        (words.collect(), scale)
    }

    /// Returns the elements that [`quantize`](Self::quantize) stored.
    pub fn dequantize(self, words: &[i32], scale: f32) -> Vec<f32> {
        let bytes = words.iter().flat_map(|word| word.to_le_bytes());
        bytes.map(|byte| self.decode(byte) * scale).collect()
    }
}

impl fmt::Display for Quantization {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Int8 => "int8",
            Self::Fp8E4m3 => "fp8 e4m3",
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_code_is_the_nearest_to_itself_and_halves_go_to_even() {
        for kind in [Quantization::Int8, Quantization::Fp8E4m3] {
            for code in 0..=255u8 {
                let x = kind.decode(code);
                // −128 is never a result.
                if x.is_finite() && x.abs() <= kind.largest() {
                    assert_eq!(kind.encode(x), code, "{kind} {code}");
                } else if x.is_nan() {
                    assert_eq!(kind.encode(x), 0);
                }
            }
        }
        let fp8 = Quantization::Fp8E4m3;
        let positive: Vec<f32> = (0..=0x7e).map(|code| fp8.decode(code)).collect();
        assert_eq!(
            (positive[1], positive[8], positive[0x7e]),
            (1.0 / 512.0, 1.0 / 64.0, 448.0)
        );
        for (code, pair) in positive.windows(2).enumerate() {
            let middle = (pair[0] + pair[1]) / 2.0;
            let even = (code + code % 2) as u8;
            assert_eq!(fp8.encode(middle), even);
            assert_eq!(fp8.encode(middle.next_down()), code as u8);
            assert_eq!(fp8.encode(-middle.next_up()), (code as u8 + 1) | 0x80);
        }
        assert_eq!(fp8.encode(1e9), 0x7e);
        assert_eq!(Quantization::Int8.encode(2.5), 2);
        assert_eq!(Quantization::Int8.encode(-3.5) as i8, -4);
    }

    #[test]
    fn rows_that_are_not_finite() {
        for kind in [Quantization::Int8, Quantization::Fp8E4m3] {
            let (words, scale) = kind.quantize(&[0.0; 4]);
            assert_eq!((words, scale), (vec![0], 1.0));
            let (words, scale) = kind.quantize(&[f32::INFINITY, f32::NEG_INFINITY, 2.0, -1e-45]);
            let got = kind.dequantize(&words, scale);
            assert_eq!([got[0], got[1], got[2]], [2.0, -2.0, 2.0]);
            let (words, scale) = kind.quantize(&[f32::NAN, 1.0, 0.0, 0.0]);
            let got = kind.dequantize(&words, scale);
            assert!(got.iter().all(|x| x.is_nan()));
        }
    }

    /// Rows near the largest float are restored within their error bound, and a restored row is stored unchanged.
    #[test]
    fn rows_next_to_infinity() {
        for kind in [Quantization::Int8, Quantization::Fp8E4m3] {
            let least = (kind.largest_scale() * kind.largest()).to_bits() - 200;
            for bits in least..=f32::MAX.to_bits() {
                let x = f32::from_bits(bits);
                let row = [x, -x, x / 3.0, f32::INFINITY];
                let (words, scale) = kind.quantize(&row);
                let got = kind.dequantize(&words, scale);
                for (got, x) in got.iter().zip([x, -x, x / 3.0, x]) {
                    let most = match kind {
                        Quantization::Int8 => scale / 2.0,
                        Quantization::Fp8E4m3 => x.abs() / 16.0,
                    };
                    assert!((got - x).abs() <= most, "{kind} {x:e} {got:e}");
                }
                assert_eq!(kind.quantize(&got), (words, scale), "{kind} {x:e}");
                // The scale is rounded down only where the usual one overflows.
                let ordinary = x / kind.largest();
                assert_eq!(scale == ordinary, (ordinary * kind.largest()).is_finite());
            }
        }
    }
}
