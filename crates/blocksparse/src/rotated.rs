//! FP8 rows of an indexer on the host: rotated by a Hadamard matrix and rounded to E4M3, with a power-of-two scale per row.
//!
//! The rotation spreads large elements of a row over all of its elements, so rounding loses less (Ashkboos et al., QuaRot, 2024, §3; DeepSeek-V3.2-Exp's
//! indexer). Products of rotated queries and rotated keys equal those of the original rows.

use crate::Quantization;

/// Smallest and largest width of rotated rows. Widths are powers of two.
pub const HADAMARD_WIDTHS: [usize; 2] = [8, 256];

/// Role of rotated rows in a product. The unnormalised Hadamard matrix scales a product of two rotated rows by their width, a power of two. Queries
/// and keys each compensate half of its exponent.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum HadamardFp8 {
    /// An indexer's queries.
    Queries,
    /// An indexer's keys.
    Keys,
}

impl HadamardFp8 {
    /// Returns whether rows of this width can be rotated.
    pub fn takes(width: usize) -> bool {
        let [least, most] = HADAMARD_WIDTHS;
        width.is_power_of_two() && (least..=most).contains(&width)
    }

    /// Returns the factor that is applied to rotated rows of a width.
    pub fn factor(self, width: usize) -> f32 {
        let digits = width.ilog2() as i32;
        let own = match self {
            Self::Queries => (digits + 1) / 2,
            Self::Keys => digits / 2,
        };
        (-own as f32).exp2()
    }

    /// Rotates and rounds contiguous rows of a [supported](Self::takes) width, as `kernels::indexer::round_rows` does, bit for bit.
    pub fn round(self, rows: &mut [f32], width: usize) {
        let factor = self.factor(width);
        for row in rows.chunks_exact_mut(width) {
            rotate(row);
            row.iter_mut().for_each(|x| *x *= factor);
            round(row);
        }
    }
}

/// Multiplies by the Hadamard matrix in Sylvester's order, without normalisation.
fn rotate(row: &mut [f32]) {
    let mut distance = 1;
    while distance < row.len() {
        for pair in row.chunks_exact_mut(2 * distance) {
            let (low, high) = pair.split_at_mut(distance);
            for (a, b) in low.iter_mut().zip(high) {
                (*a, *b) = (*a + *b, *a - *b);
            }
        }
        distance *= 2;
    }
}

/// Rounds to E4M3 times the power of two that scales the largest element to between 224 and 448, the maximum of E4M3. A row with a non-finite element becomes
/// NaN.
fn round(row: &mut [f32]) {
    let magnitudes = row.iter().map(|x| x.to_bits() & 0x7fff_ffff);
    let largest = magnitudes.max().unwrap_or(0);
    if !f32::from_bits(largest).is_finite() {
        row.fill(f32::NAN);
        return;
    }
    // 448 is 1.75 · 2⁸.
    let above = u32::from(largest & 0x7f_ffff > 0x60_0000);
    // The scale is at least the smallest normal power of f32.
    let exponent = ((largest >> 23) + above).max(9) - 8;
    let [scale, inverse] = [exponent, 254 - exponent].map(|bits| f32::from_bits(bits << 23));
    let e4m3 = Quantization::Fp8E4m3;
    for x in row {
        *x = e4m3.decode(e4m3.encode(*x * inverse)) * scale;
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn rotations_keep_products() {
        let of = |seed: usize| (0..64).map(move |i| ((i * 37 + seed * 101) % 29) as f32 - 14.0);
        let (mut a, mut b) = (of(1).collect::<Vec<f32>>(), of(2).collect::<Vec<f32>>());
        let product = |a: &[f32], b: &[f32]| -> f32 { a.iter().zip(b).map(|(x, y)| x * y).sum() };
        let expected = product(&a, &b);
        // Integers, so nothing is rounded.
        rotate(&mut a);
        rotate(&mut b);
        let factor = HadamardFp8::Queries.factor(64) * HadamardFp8::Keys.factor(64);
        assert_eq!(product(&a, &b) * factor, expected);
        // The second row of Sylvester's matrix negates every second element.
        let mut one = [0.0, 0.0, 1.0, 0.0];
        rotate(&mut one);
        assert_eq!(one, [1.0, 1.0, -1.0, -1.0]);
    }

    proptest! {
        #[test]
        fn rows_keep_four_digits(
            row in proptest::collection::vec(-1e6f32..1e6, 32),
            power in -60i32..60,
        ) {
            let mut rounded: Vec<f32> = row.iter().map(|x| x * (power as f32).exp2()).collect();
            let before = rounded.clone();
            let largest = before.iter().fold(0.0f32, |most, x| most.max(x.abs()));
            round(&mut rounded);
            for (x, y) in rounded.iter().zip(before) {
                // Half of the last of four bits, or half of the smallest step at the scale of the largest element.
                let most = (y.abs() / 16.0).max(largest / 224.0 / 1024.0);
                prop_assert!((x - y).abs() <= most, "{} for {}", x, y);
            }
            let again = rounded.clone();
            round(&mut rounded);
            prop_assert_eq!(rounded, again);
        }
    }

    #[test]
    fn zeros_stay_and_what_is_no_number_is_told() {
        let mut row = [0.0f32; 16];
        HadamardFp8::Keys.round(&mut row, 16);
        assert_eq!(row, [0.0; 16]);
        row[3] = f32::NAN;
        HadamardFp8::Keys.round(&mut row, 16);
        assert!(row.iter().all(|x| x.is_nan()));
    }
}
