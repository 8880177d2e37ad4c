//! Dropout of the numbers of a matrix: which are kept is a function of a seed, a site and the place alone.

use crate::Seed;
use crate::dropout::philox;

/// The generator's fourth word. Attention weights have their batch entry there, which is below it.
pub(crate) const STREAM: u32 = u32::MAX;

/// Dropout of the numbers of a tensor, such as what a layer adds to a residual stream. A number is kept with probability `1 − probability`, and
/// divided by that.
///
/// A tensor `[.., width]` is a matrix: a number is at a column of a row, and rows count through all dimensions but the last. Whether it is kept
/// depends on the seed, the site, its row and its column and on nothing else: it is the same in the backward pass and on every
/// device. Word `column mod 4` of Philox 4×32 with 10 rounds (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011), of counter
/// `(row mod 2³², ⌊column / 4⌋, site, 2³² − 1)` under the seed as its key, is below [`threshold`](Self::threshold). [`Dropout`](crate::Dropout) of
/// attention weights has a batch entry for the fourth number, so the same seed gives other words there.
///
/// ```
/// use blocksparse::StreamDropout;
///
/// let dropout = StreamDropout::new(0.25, 7, 0);
/// let kept = (0..10_000).filter(|&column| dropout.keeps(3, column)).count();
/// assert!(kept.abs_diff(7_500) < 200);
/// ```
#[derive(Clone, Copy, Debug, PartialEq)]
#[must_use]
pub struct StreamDropout {
    /// Probability that a number is dropped, in `[0, 1)`.
    pub probability: f64,
    /// Seed of the mask. Training takes another in every step.
    pub seed: Seed,
    /// Which of a model's dropouts this is: each has a number of its own, so that they share a seed.
    pub site: u32,
    /// What rows are counted from: a part of a matrix, from this row on, keeps what the whole matrix keeps there.
    pub first_row: u32,
}

impl StreamDropout {
    /// Dropout with a probability, a seed and a site. Calls check that the probability is in `[0, 1)`.
    pub fn new(probability: f64, seed: impl Into<Seed>, site: u32) -> Self {
        Self {
            probability,
            seed: seed.into(),
            site,
            first_row: 0,
        }
    }

    /// Of the rows from `first_row` on (mod 2³²) of a matrix, in place of a whole one.
    ///
    /// ```
    /// use blocksparse::StreamDropout;
    ///
    /// let whole = StreamDropout::new(0.5, 7, 0);
    /// let part = whole.with_first_row(10);
    /// assert_eq!(part.mask(2, 8), whole.mask(12, 8)[10 * 8..]);
    /// ```
    pub fn with_first_row(self, first_row: u32) -> Self {
        Self { first_row, ..self }
    }

    /// Words below it keep their number: `(1 − probability) · 2³²`, rounded.
    pub fn threshold(&self) -> u32 {
        crate::Dropout::new(self.probability, self.seed).threshold()
    }

    /// What numbers that are kept are multiplied by: `1 / (1 − probability)`.
    pub fn factor(&self) -> f64 {
        1.0 / (1.0 - self.probability)
    }

    /// Whether the number at a column of a row is kept.
    pub fn keeps(&self, row: usize, column: usize) -> bool {
        self.words(row, column / 4)[column % 4] < self.threshold()
    }

    /// The mask of a matrix, row by row: 1 where a number is kept, or else 0.
    pub fn mask(&self, rows: usize, width: usize) -> Vec<f32> {
        let threshold = self.threshold();
        let now = Self::new(self.probability, self.seed.value(), self.site)
            .with_first_row(self.first_row);
        let mut mask = vec![0.0; rows * width];
        for (row, numbers) in mask.chunks_exact_mut(width.max(1)).enumerate() {
            for (four, numbers) in numbers.chunks_mut(4).enumerate() {
                let words = now.words(row, four);
                for (number, word) in numbers.iter_mut().zip(words) {
                    *number = f32::from(u8::from(word < threshold));
                }
            }
        }
        mask
    }

    fn words(&self, row: usize, four: usize) -> [u32; 4] {
        let seed = self.seed.value();
        let key = [seed as u32, (seed >> 32) as u32];
        let row = self.first_row.wrapping_add(row as u32);
        philox([row, four as u32, self.site, STREAM], key)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Dropout;

    #[test]
    fn a_mask_is_what_keeps_says() {
        let dropout = StreamDropout::new(0.3, 5 + (9 << 40), 3);
        let mask = dropout.mask(7, 13);
        for (index, kept) in mask.into_iter().enumerate() {
            let expected = dropout.keeps(index / 13, index % 13);
            assert_eq!(kept, f32::from(u8::from(expected)), "{index}");
        }
        assert!(dropout.mask(0, 3).is_empty() && dropout.mask(3, 0).is_empty());
    }

    /// Over 2¹⁷ numbers, the share that is kept, and that is kept or dropped alike with a neighbour, another site or seed, or the attention weight of the
    /// same numbers, is within five standard deviations of what independent draws give.
    #[test]
    fn numbers_are_kept_independently() {
        let dropout = StreamDropout::new(0.3, 11, 2);
        let (site, seed) = (
            StreamDropout::new(0.3, 11, 3),
            StreamDropout::new(0.3, 12, 2),
        );
        let attention = Dropout::new(0.3, 11);
        let near = |event: &dyn Fn(usize, usize) -> bool, expected: f64| {
            let places = (0..256).flat_map(|row| (0..512).map(move |column| (row, column)));
            let count = places.filter(|&(row, column)| event(row, column)).count();
            let share = count as f64 / (1 << 17) as f64;
            let deviation = (expected * (1.0 - expected) / (1 << 17) as f64).sqrt();
            assert!(
                (share - expected).abs() < 5.0 * deviation,
                "{share}, not {expected}"
            );
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
