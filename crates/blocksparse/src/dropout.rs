//! Dropout of attention weights: which pairs are kept is a function of a seed and the pair alone.

use crate::Seed;

/// Dropout of attention weights. A pair is retained with probability `1 − probability`, and its weight is divided by that.
///
/// The probability is rounded to a multiple of 2⁻¹⁶ ([`rounded`](Self::rounded)), and [`factor`](Self::factor) is that of the rounded one, so that expectations are
/// those without dropout.
///
/// Whether a pair is kept depends on the seed, its batch entry, head, query and key and on nothing else: it is the same in the backward
/// pass, on every device and kernel, and for every layout. Philox 4×32 with 7 rounds, the fewest with which it passes BigCrush (Salmon et al., "Parallel random
/// numbers: as easy as 1, 2, 3", 2011, table 2), makes 128 bits of the counter `(⌊key / 8⌋, head, query, batch)` under the seed as its key. They are
/// 16 bytes, and number `key mod 8` has bit `key mod 8` of each: that of byte `b` of word `w`, both counted from 0, in place `4 · b + w`. The pair is kept if the
/// number is below [`threshold`](Self::threshold).
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
    /// then the other methods take what is above it for the nearest number below 1, and everything else for 0.
    pub fn new(probability: f64, seed: impl Into<Seed>) -> Self {
        Self {
            probability,
            seed: seed.into(),
        }
    }

    /// Random words of 16 bits below it keep their pair: `(1 − probability) · 2¹⁶`, rounded. What is above 0 drops something and what is below 1 keeps
    /// something: it is at least 1, and at most 2¹⁶ − 1 but for a probability of 0.
    pub fn threshold(&self) -> u32 {
        if self.probability > 0.0 {
            let numbers = ((1.0 - self.probability) * f64::from(NUMBERS)).round() as u32;
            numbers.clamp(1, NUMBERS - 1)
        } else {
            NUMBERS
        }
    }

    /// The probability with which a weight is in fact dropped: the multiple of 2⁻¹⁶ next to [`probability`](Self::probability), but neither 0 nor 1 unless that is.
    pub fn rounded(&self) -> f64 {
        f64::from(NUMBERS - self.threshold()) / f64::from(NUMBERS)
    }

    /// Factor of the probabilities of retained pairs: `1 / (1 − rounded)`, so that the expectation of a weight is the weight.
    pub fn factor(&self) -> f64 {
        f64::from(NUMBERS) / f64::from(self.threshold())
    }

    /// Returns whether the weight of a query and a key, by their rows, is retained.
    pub fn keeps(&self, batch: usize, head: usize, query: usize, key: usize) -> bool {
        self.keeps_eight(batch, head, query, key / 8)[key % 8]
    }

    /// [`keeps`](Self::keeps) of the keys from `8 · eight` on.
    pub fn keeps_eight(&self, batch: usize, head: usize, query: usize, eight: usize) -> [bool; 8] {
        keeps_eight(
            self.seed,
            [eight, head, query, batch].map(|number| number as u32),
            self.threshold(),
        )
    }
}

/// Numbers that a pair's may be.
const NUMBERS: u32 = 1 << 16;

/// Which of a counter's eight numbers are below a threshold.
pub(crate) fn keeps_eight(seed: Seed, counter: [u32; 4], threshold: u32) -> [bool; 8] {
    let seed = seed.value();
    let key = [seed as u32, (seed >> 32) as u32];
    let dropped = above(philox_of(ROUNDS, counter, key), last_kept(threshold));
    std::array::from_fn(|number| dropped >> number & 1 == 0)
}

/// What the words of a counter are compared with: the greatest number that is kept, `threshold − 1`, for all eight numbers. Byte `b` of word `w` is 255
/// where its bit `4 · b + w` is 1, or else 0.
pub fn last_kept(threshold: u32) -> [u32; 4] {
    let last = threshold.max(1) - 1;
    // Bit 4 · b + w to bit 8 · b.
    let bits = |w: u32| (0..4).map(move |b| (last >> (4 * b + w) & 1) << (8 * b));
    [0, 1, 2, 3].map(|w| bits(w).sum::<u32>() * 255)
}

/// Which of eight numbers are above another, a bit for each: all at once, place by place. Kernels do the same.
fn above(words: [u32; 4], last: [u32; 4]) -> u32 {
    // Of each byte its four places, from the lowest on: where a higher one differs, it decides.
    let (mut above, mut differs) = (0, 0);
    for (word, last) in words.into_iter().zip(last) {
        above = (word & !last) | (above & !(word ^ last));
        differs |= word ^ last;
    }
    let halves = above | (above << 8 & !differs);
    let differs = differs | differs << 8;
    (halves | (halves << 16 & !differs)) >> 24
}

/// Multipliers of Philox 4×32.
pub const MULTIPLIERS: [u32; 2] = [0xD251_1F53, 0xCD9E_8D57];
/// Increment of its key per round.
pub const WEYL: [u32; 2] = [0x9E37_79B9, 0xBB67_AE85];
/// Its rounds in masks of dropout.
pub const ROUNDS: u32 = 7;

/// Philox 4×32 with 10 rounds (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011): four random words of a counter under a key. Masks of dropout
/// have 7 rounds.
pub fn philox(counter: [u32; 4], key: [u32; 2]) -> [u32; 4] {
    philox_of(10, counter, key)
}

/// Philox 4×32 with any number of rounds.
fn philox_of(rounds: u32, mut c: [u32; 4], mut key: [u32; 2]) -> [u32; 4] {
    let wide = |a: u32, b: u32| {
        let product = u64::from(a) * u64::from(b);
        ((product >> 32) as u32, product as u32)
    };
    for _ in 0..rounds {
        let (high0, low0) = wide(MULTIPLIERS[0], c[0]);
        let (high1, low1) = wide(MULTIPLIERS[1], c[2]);
        c = [high1 ^ c[1] ^ key[0], low1, high0 ^ c[3] ^ key[1], low0];
        key = [key[0].wrapping_add(WEYL[0]), key[1].wrapping_add(WEYL[1])];
    }
    c
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// Eight numbers of four words: number `j` has bit `j` of each byte, that of byte `b` of word `w` in place `4 · b + w`.
    fn eight_numbers(words: [u32; 4]) -> [u16; 8] {
        let mut numbers = [0; 8];
        for (w, word) in words.into_iter().enumerate() {
            for (b, byte) in word.to_le_bytes().into_iter().enumerate() {
                for (j, number) in numbers.iter_mut().enumerate() {
                    *number |= u16::from(byte >> j & 1) << (4 * b + w);
                }
            }
        }
        numbers
    }

    /// A pair by its definition.
    #[test]
    fn pairs_are_kept_by_their_numbers() {
        let dropout = Dropout::new(0.37, 3 + (5 << 33));
        for [batch, head, query, key] in [[0, 0, 0, 0], [1, 2, 3, 4], [7, 0, 1 << 20, 1_000_003]] {
            let counter = [key / 8, head, query, batch].map(|number| number as u32);
            let words = philox_of(7, counter, [3, 10]);
            let number = u32::from(eight_numbers(words)[key % 8]);
            let kept = number < dropout.threshold();
            assert_eq!(dropout.keeps(batch, head, query, key), kept);
        }
    }

    /// The known answers of the authors' Random123.
    #[test]
    fn philox_gives_the_known_answers() {
        let pi = (
            [0x243f_6a88, 0x85a3_08d3, 0x1319_8a2e, 0x0370_7344],
            [0xa409_3822, 0x299f_31d0],
        );
        let [zeros, ones] = [0, u32::MAX].map(|word| ([word; 4], [word; 2]));
        let answers = [
            [0x5f6f_b709, 0x0d89_3f64, 0x4f12_1f81, 0x4f73_0a48],
            [0x5207_ddc2, 0x4516_5e59, 0x4d8e_e751, 0x8c52_f662],
            [0x4dfc_caba, 0x190a_87f0, 0xc473_62ba, 0xb6b5_242a],
        ];
        let of_ten = [
            [0x6627_e8d5, 0xe169_c58d, 0xbc57_ac4c, 0x9b00_dbd8],
            [0x408f_276d, 0x41c8_3b0e, 0xa20b_c7c6, 0x6d54_51fd],
            [0xd16c_fe09, 0x94fd_cceb, 0x5001_e420, 0x2412_6ea1],
        ];
        for (at, (counter, key)) in [zeros, ones, pi].into_iter().enumerate() {
            assert_eq!(philox_of(7, counter, key), answers[at], "{at}");
            assert_eq!(philox_of(10, counter, key), of_ten[at], "{at}");
            assert_eq!(philox(counter, key), of_ten[at], "{at}");
        }
    }

    /// Worked out by hand from the first known answer, whose words are `0x5f6fb709, 0x0d893f64, 0x4f121f81, 0x4f730a48`: bits 0 of their bytes from the lowest
    /// one on are 1, 0, 1, 0; 1, 1, 1, 0; 1, 1, 0, 1; 1, 1, 1, 1, a nibble for each byte.
    #[test]
    fn numbers_are_columns_of_bits() {
        let numbers = eight_numbers(philox_of(ROUNDS, [0; 4], [0; 2]));
        assert_eq!(numbers[0], 0b1111_1011_0111_0101);
    }

    /// The comparison place by place says of every number what the threshold says.
    #[test]
    fn bits_of_the_threshold_compare_as_numbers_do() {
        for threshold in [1, 2, 255, 256, 6_554, 32_768, 58_982, 65_535, 65_536] {
            let last = last_kept(threshold);
            assert_eq!(u32::from(eight_numbers(last)[3]), threshold - 1);
            for first in (0..1u32 << 16).step_by(8) {
                let mut words = [0; 4];
                for j in 0..8 {
                    for place in 0..16 {
                        let bit = (first + j) >> place & 1;
                        words[place % 4] |= bit << (8 * (place / 4) as u32 + j);
                    }
                }
                let dropped = above(words, last);
                for (j, number) in (first..first + 8).enumerate() {
                    let kept = dropped >> j & 1 == 0;
                    assert_eq!(kept, number < threshold, "{threshold}, {number}");
                }
            }
        }
    }

    /// Rounded to a multiple of 2⁻¹⁶, with the factor of that; never to 0 or 1.
    #[test]
    fn probabilities_are_rounded() {
        let unit = 1.0 / 65_536.0;
        for (probability, rounded) in [
            (0.0, 0.0),
            (1e-300, unit),
            (0.4 * unit, unit),
            (1.6 * unit, 2.0 * unit),
            (0.1, 6_554.0 * unit),
            (0.5, 0.5),
            (1.0 - 0.4 * unit, 1.0 - unit),
            (1.0 - f64::EPSILON, 1.0 - unit),
        ] {
            let dropout = Dropout::new(probability, 3);
            assert_eq!(dropout.rounded(), rounded, "{probability}");
            assert_eq!(dropout.factor(), 1.0 / (1.0 - rounded), "{probability}");
            if probability == 0.0 {
                assert!((0..1_000).all(|key| dropout.keeps(0, 0, 0, key)));
            }
        }
    }

    /// Asserts that the share of pairs with an event is within five standard deviations of what independent draws give.
    #[track_caller]
    pub fn assert_share(
        [rows, columns]: [usize; 2],
        event: &dyn Fn(usize, usize) -> bool,
        expected: f64,
        what: &str,
    ) {
        let pairs = (0..rows).flat_map(|i| (0..columns).map(move |j| (i, j)));
        let count = pairs.filter(|&(i, j)| event(i, j)).count();
        let all = (rows * columns) as f64;
        let share = count as f64 / all;
        let deviation = (expected * (1.0 - expected) / all).sqrt();
        assert!(
            (share - expected).abs() < 5.0 * deviation,
            "{what}: {share}, not {expected}"
        );
    }

    /// Over 2¹⁶ pairs, the share that is kept, and that is kept or dropped alike with another key (in its counter or the next), query, head, batch entry or seed,
    /// is within five standard deviations of what independent draws give.
    #[test]
    fn pairs_are_kept_independently() {
        const QUERIES: usize = 128;
        const KEYS: usize = 512;
        // More than these by the greatest distance.
        const PITCH: usize = KEYS + 64;
        for probability in [0.1, 0.5, 0.9, 0.003] {
            let dropout = Dropout::new(probability, 11);
            let keep = 1.0 - dropout.rounded();
            let alike = keep * keep + (1.0 - keep) * (1.0 - keep);
            let mask = |dropout: Dropout, batch, head| -> Vec<bool> {
                let eights = (0..KEYS).flat_map(|query| (0..PITCH / 8).map(move |k| (query, k)));
                let kept = eights.map(|(query, k)| dropout.keeps_eight(batch, head, query, k));
                kept.flatten().collect()
            };
            let near = |what: &str, event: &dyn Fn(usize, usize) -> bool, expected: f64| {
                assert_share([QUERIES, KEYS], event, expected, what);
            };
            let kept = mask(dropout, 1, 2);
            let kept = |i: usize, j: usize| kept[i * PITCH + j];
            near("kept", &kept, keep);
            for key in [1, 2, 3, 4, 5, 6, 7, 8, 64] {
                near("key", &|i, j| kept(i, j) == kept(i, j + key), alike);
            }
            for query in [1, 2, 8, 256] {
                near("query", &|i, j| kept(i, j) == kept(i + query, j), alike);
            }
            // A pair, and that of the query and key of the other's places.
            near("mirrored", &|i, j| kept(i, j) == kept(j, i + 128), alike);
            for (what, dropout, batch, head) in [
                ("head", dropout, 1, 3),
                ("batch entry", dropout, 0, 2),
                ("seed", Dropout::new(probability, 12), 1, 2),
                ("seed", Dropout::new(probability, 11 + (1 << 40)), 1, 2),
            ] {
                let other = mask(dropout, batch, head);
                near(what, &|i, j| kept(i, j) == other[i * PITCH + j], alike);
            }
        }
    }

    /// How many of the eight of a counter are kept has the binomial distribution: χ² of 2¹⁵ counters with 8 degrees of freedom is below 40, which chance
    /// exceeds three times in a million.
    #[test]
    fn eights_are_binomial() {
        for (probability, seed) in [(0.5, 5), (0.5, 6), (0.3, 7)] {
            let dropout = Dropout::new(probability, seed);
            let drop = dropout.rounded();
            let mut counts = [0u32; 9];
            for counter in 0..1 << 15 {
                let eight = dropout.keeps_eight(0, 0, counter / 256, counter % 256);
                counts[eight.into_iter().filter(|&kept| kept).count()] += 1;
            }
            let mut ways = 1.0;
            let mut chi = 0.0;
            for (kept, &count) in counts.iter().enumerate() {
                let share = ways * (1.0 - drop).powi(kept as i32) * drop.powi(8 - kept as i32);
                let expected = share * f64::from(1 << 15);
                chi += (f64::from(count) - expected).powi(2) / expected;
                ways *= (8 - kept) as f64 / (kept + 1) as f64;
            }
            assert!(chi < 40.0, "{probability}, {seed}: {chi}, {counts:?}");
        }
    }
}
