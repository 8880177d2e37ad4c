//! Dropout of attention weights: which pairs are kept is a function of a seed and the pair alone.

use crate::Seed;

/// Dropout of attention weights. A pair is kept with probability `1 − probability`, and its weight is divided by that.
///
/// Whether a pair is kept depends on the seed, its batch entry, head, query and key and on nothing else: it is the same in the backward
/// pass, on every device and kernel, and for every layout. Word `key mod 4` of Philox 4×32 with 10 rounds (Salmon et al., "Parallel random
/// numbers: as easy as 1, 2, 3", 2011), of counter `(query, ⌊key / 4⌋, head, batch)` under the seed as its key, is below
/// [`threshold`](Self::threshold).
///
/// ```
/// use blocksparse::Dropout;
///
/// let dropout = Dropout::new(0.25, 7);
/// let kept = (0..10_000).filter(|&key| dropout.keeps(0, 0, 3, key)).count();
/// assert!(kept.abs_diff(7_500) < 200);
/// ```
#[derive(Clone, Copy, Debug, PartialEq)]
#[must_use]
pub struct Dropout {
    /// Probability that a weight is dropped, in `[0, 1)`.
    pub probability: f64,
    /// Seed of the mask. Training takes another in every step.
    pub seed: Seed,
}

impl Dropout {
    /// Dropout with a probability and a seed.
    ///
    /// The range of the probability, `[0, 1)`, is not checked here but when attention is called with it, which is an error outside of it. Until
    /// then [`threshold`](Self::threshold) and [`factor`](Self::factor) are what their formulas give.
    pub fn new(probability: f64, seed: impl Into<Seed>) -> Self {
        Self {
            probability,
            seed: seed.into(),
        }
    }

    /// Words below it keep their pair: `(1 − probability) · 2³²`, rounded.
    pub fn threshold(&self) -> u32 {
        ((1.0 - self.probability) * 2f64.powi(32)).round() as u32
    }

    /// What weights of kept pairs are multiplied by: `1 / (1 − probability)`.
    pub fn factor(&self) -> f64 {
        1.0 / (1.0 - self.probability)
    }

    /// Whether the weight of a query and a key, by their rows, is kept.
    pub fn keeps(&self, batch: usize, head: usize, query: usize, key: usize) -> bool {
        self.keeps_four(batch, head, query, key / 4)[key % 4]
    }

    /// [`keeps`](Self::keeps) of the keys from `4 · four` on.
    pub fn keeps_four(&self, batch: usize, head: usize, query: usize, four: usize) -> [bool; 4] {
        let counter = [query, four, head, batch].map(|number| number as u32);
        let seed = self.seed.value();
        let key = [seed as u32, (seed >> 32) as u32];
        philox(counter, key).map(|word| word < self.threshold())
    }
}

/// Multipliers of Philox 4×32.
pub(crate) const MULTIPLIERS: [u32; 2] = [0xD251_1F53, 0xCD9E_8D57];
/// What its key grows by in each round.
pub(crate) const WEYL: [u32; 2] = [0x9E37_79B9, 0xBB67_AE85];
/// Its rounds.
pub(crate) const ROUNDS: u32 = 10;

/// Philox 4×32 with 10 rounds (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011): four random words of a counter under a key.
pub fn philox(mut c: [u32; 4], mut key: [u32; 2]) -> [u32; 4] {
    let wide = |a: u32, b: u32| {
        let product = u64::from(a) * u64::from(b);
        ((product >> 32) as u32, product as u32)
    };
    for _ in 0..ROUNDS {
        let (high0, low0) = wide(MULTIPLIERS[0], c[0]);
        let (high1, low1) = wide(MULTIPLIERS[1], c[2]);
        c = [high1 ^ c[1] ^ key[0], low1, high0 ^ c[3] ^ key[1], low0];
        key = [key[0].wrapping_add(WEYL[0]), key[1].wrapping_add(WEYL[1])];
    }
    c
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The known answers of the authors' Random123.
    #[test]
    fn philox_gives_the_known_answers() {
        assert_eq!(
            philox([0; 4], [0; 2]),
            [0x6627_e8d5, 0xe169_c58d, 0xbc57_ac4c, 0x9b00_dbd8]
        );
        assert_eq!(
            philox([u32::MAX; 4], [u32::MAX; 2]),
            [0x408f_276d, 0x41c8_3b0e, 0xa20b_c7c6, 0x6d54_51fd]
        );
        assert_eq!(
            philox(
                [0x243f_6a88, 0x85a3_08d3, 0x1319_8a2e, 0x0370_7344],
                [0xa409_3822, 0x299f_31d0]
            ),
            [0xd16c_fe09, 0x94fd_cceb, 0x5001_e420, 0x2412_6ea1]
        );
    }

    /// Over 2¹⁷ pairs, the share that is kept, and that is kept or dropped alike with a neighbour, another head, batch entry or
    /// seed, is within five standard deviations of what independent draws give.
    #[test]
    fn pairs_are_kept_independently() {
        let near = |share: f64, expected: f64| {
            let deviation = (expected * (1.0 - expected) / (1 << 17) as f64).sqrt();
            assert!(
                (share - expected).abs() < 5.0 * deviation,
                "{share}, not {expected}"
            );
        };
        for probability in [0.1, 0.5, 0.9] {
            let keep = 1.0 - probability;
            let dropout = Dropout::new(probability, 11);
            let other = Dropout::new(probability, 11 + (1 << 40));
            let share = |event: &dyn Fn(usize, usize) -> bool| {
                let pairs = (0..256).flat_map(|i| (0..512).map(move |j| (i, j)));
                pairs.filter(|&(i, j)| event(i, j)).count() as f64 / (1 << 17) as f64
            };
            let kept = |i, j| dropout.keeps(1, 2, i, j);
            near(share(&kept), keep);
            let alike = keep * keep + probability * probability;
            near(share(&|i, j| kept(i, j) == kept(i, j + 1)), alike);
            near(share(&|i, j| kept(i, j) == kept(i + 1, j)), alike);
            near(
                share(&|i, j| kept(i, j) == dropout.keeps(1, 3, i, j)),
                alike,
            );
            near(
                share(&|i, j| kept(i, j) == dropout.keeps(0, 2, i, j)),
                alike,
            );
            near(share(&|i, j| kept(i, j) == other.keeps(1, 2, i, j)), alike);
        }
    }
}
