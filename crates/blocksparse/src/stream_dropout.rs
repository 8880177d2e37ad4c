//! Dropout of the elements of a matrix. The mask is a function of a seed, a site and the position of an element alone.

use crate::Seed;
use crate::dropout::keeps_eight;

/// Fourth word of the generator's counter. For attention weights that word is the batch entry, which is smaller.
pub const STREAM: u32 = u32::MAX;

/// Dropout of the elements of a tensor, such as the output of a layer before it is added to a residual stream. An element is retained with probability
/// `1 − probability` and is then divided by that probability.
///
/// A tensor `[.., width]` is treated as a matrix whose rows run over all dimensions but the last. Whether an element is retained depends only on the seed, the
/// site, its row and its column, so the mask is the same in the backward pass and on every device. The probability is rounded, and 16-bit numbers are drawn, as
/// in [`Dropout`](crate::Dropout). Number `column mod 8` of the counter `(⌊column / 8⌋, site, row mod 2³², 2³² − 1)`, with the seed as the key, is compared
/// with [`threshold`](Self::threshold): below it, the element is retained. [`Dropout`](crate::Dropout) of attention weights has a batch entry as the fourth
/// word, so the same seed gives other numbers there.
///
/// ```
/// use blocksparse::ElementDropout;
///
/// let dropout = ElementDropout::new(0.25, 7, 0);
/// let kept = (0..10_000).filter(|&column| dropout.keeps(3, column)).count();
/// assert!(kept.abs_diff(7_500) < 200);
/// ```
#[derive(Clone, Copy, Debug, PartialEq)]
#[must_use]
pub struct ElementDropout {
    /// Probability that an element is dropped, in `[0, 1)`.
    pub probability: f64,
    /// Seed of the mask. Use another one in every training step.
    pub seed: Seed,
    /// Index of this dropout in the model. With distinct indices all dropouts can share a seed.
    pub site: u32,
    /// Index of the first row. The rows of a matrix from this row on have the same mask as within the whole matrix.
    pub first_row: u32,
}

impl ElementDropout {
    /// Creates dropout with a probability, a seed and a site. Calls that use it check that the probability is in `[0, 1)`.
    pub fn new(probability: f64, seed: impl Into<Seed>, site: u32) -> Self {
        Self {
            probability,
            seed: seed.into(),
            site,
            first_row: 0,
        }
    }

    /// Returns dropout for a part of a matrix: the rows from `first_row` on (mod 2³²).
    ///
    /// ```
    /// use blocksparse::ElementDropout;
    ///
    /// let whole = ElementDropout::new(0.5, 7, 0);
    /// let part = whole.with_first_row(10);
    /// assert_eq!(part.mask(2, 8), whole.mask(12, 8)[10 * 8..]);
    /// ```
    pub fn with_first_row(self, first_row: u32) -> Self {
        Self { first_row, ..self }
    }

    /// Returns the bound below which an element's 16-bit number retains the element: that of a [`Dropout`](crate::Dropout) with this probability.
    pub fn threshold(&self) -> u32 {
        self.of_weights().threshold()
    }

    /// Returns the factor of retained elements: that of a [`Dropout`](crate::Dropout) with this probability.
    pub fn factor(&self) -> f64 {
        self.of_weights().factor()
    }

    fn of_weights(&self) -> crate::Dropout {
        crate::Dropout::new(self.probability, self.seed)
    }

    /// Returns whether the element in a row and column is retained.
    pub fn keeps(&self, row: usize, column: usize) -> bool {
        self.keeps_eight(row, column / 8, self.threshold())[column % 8]
    }

    /// Returns the mask of a matrix, row by row: 1 for retained elements, otherwise 0.
    pub fn mask(&self, rows: usize, width: usize) -> Vec<f32> {
        let threshold = self.threshold();
        let now = Self::new(self.probability, self.seed.value(), self.site)
            .with_first_row(self.first_row);
        let mut mask = vec![0.0; rows * width];
        for (row, numbers) in mask.chunks_exact_mut(width.max(1)).enumerate() {
            for (eight, numbers) in numbers.chunks_mut(8).enumerate() {
                let kept = now.keeps_eight(row, eight, threshold);
                for (number, kept) in numbers.iter_mut().zip(kept) {
                    *number = f32::from(u8::from(kept));
                }
            }
        }
        mask
    }

    fn keeps_eight(&self, row: usize, eight: usize, threshold: u32) -> [bool; 8] {
        let row = self.first_row.wrapping_add(row as u32);
        let counter = [eight as u32, self.site, row, STREAM];
        keeps_eight(self.seed, counter, threshold)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Dropout;
    use crate::dropout::tests::assert_share;

    #[test]
    fn a_mask_is_what_keeps_says() {
        let dropout = ElementDropout::new(0.3, 5 + (9 << 40), 3);
        let mask = dropout.mask(7, 13);
        for (index, kept) in mask.into_iter().enumerate() {
            let expected = dropout.keeps(index / 13, index % 13);
            assert_eq!(kept, f32::from(u8::from(expected)), "{index}");
        }
        assert!(dropout.mask(0, 3).is_empty() && dropout.mask(3, 0).is_empty());
    }

    /// Over 2¹⁷ elements, two shares are within five standard deviations of those of independent draws: the share of retained elements, and the share of
    /// elements with the same outcome as an adjacent element, another site or seed, or the attention weight with the same counter.
    #[test]
    fn numbers_are_kept_independently() {
        let dropout = ElementDropout::new(0.3, 11, 2);
        let (site, seed) = (
            ElementDropout::new(0.3, 11, 3),
            ElementDropout::new(0.3, 12, 2),
        );
        let attention = Dropout::new(0.3, 11);
        let near = |event: &dyn Fn(usize, usize) -> bool, expected: f64| {
            assert_share([256, 512], event, expected, "numbers");
        };
        let alike = 0.7 * 0.7 + 0.3 * 0.3;
        let kept = |row, column| dropout.keeps(row, column);
        near(&kept, 0.7);
        near(&|i, j| kept(i, j) == kept(i, j + 1), alike);
        near(&|i, j| kept(i, j) == kept(i + 1, j), alike);
        near(&|i, j| kept(i, j) == site.keeps(i, j), alike);
        near(&|i, j| kept(i, j) == seed.keeps(i, j), alike);
        near(&|i, j| kept(i, j) == attention.keeps(0, 2, i, j), alike);
    }
}
