//! Dropout of attention weights. The mask is a function of a seed and the position of a pair alone.

use crate::Seed;

/// Dropout of attention weights. A pair is retained with probability `1 − probability`, and its weight is then divided by that probability.
///
/// The probability is rounded to a multiple of 2⁻¹⁶ ([`rounded`](Self::rounded)). [`factor`](Self::factor) uses the rounded value, so expectations are those
/// without dropout.
///
/// Whether a pair is retained depends on nothing but the seed and the pair's batch entry, head, query and key. The mask is therefore the same in the backward
/// pass, on every device, in every kernel and for every layout. Philox 4×32 with 7 rounds produces 128 bits for the counter `(⌊key / 8⌋, head, query, batch)`
/// with the seed as its key; 7 is the fewest rounds that pass BigCrush (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011, table 2). The 128
/// bits are 16 bytes. The 16-bit number of a key takes bit `key mod 8` of each byte; byte `b` of word `w`, both counted from 0, supplies bit `4 · b + w` of the
/// number. The pair is retained if the number is below [`threshold`](Self::threshold).
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
    /// Seed of the mask. Use another one in every training step.
    pub seed: Seed,
}

impl Dropout {
    /// Creates dropout with a probability and a seed.
    ///
    /// The range of the probability, `[0, 1)`, is not checked here. A call of attention with a probability outside of it is an error. Until then the other
    /// methods treat larger values as the largest number below 1, and all other invalid values as 0.
    pub fn new(probability: f64, seed: impl Into<Seed>) -> Self {
        Self {
            probability,
            seed: seed.into(),
        }
    }

    /// Returns the bound below which a pair's 16-bit number retains the pair: `(1 − probability) · 2¹⁶`, rounded. A probability above 0 always drops something
    /// and one below 1 always retains something: the bound is at least 1, and at most 2¹⁶ − 1 unless the probability is 0.
    pub fn threshold(&self) -> u32 {
        if self.probability > 0.0 {
            let numbers = ((1.0 - self.probability) * f64::from(NUMBERS)).round() as u32;
            numbers.clamp(1, NUMBERS - 1)
        } else {
            NUMBERS
        }
    }

    /// Returns the effective probability: [`probability`](Self::probability) rounded to a multiple of 2⁻¹⁶, but to 0 or 1 only if it is exactly that.
    pub fn rounded(&self) -> f64 {
        f64::from(NUMBERS - self.threshold()) / f64::from(NUMBERS)
    }

    /// Returns the factor of the weights of retained pairs: `1 / (1 − rounded)`, so that the expectation of a weight is the weight itself.
    pub fn factor(&self) -> f64 {
        f64::from(NUMBERS) / f64::from(self.threshold())
    }

    /// Returns whether the weight of a query row and a key row is retained.
    pub fn keeps(&self, batch: usize, head: usize, query: usize, key: usize) -> bool {
        self.keeps_eight(batch, head, query, key / 8)[key % 8]
    }

    /// Returns [`keeps`](Self::keeps) for eight keys, from key `8 · eight` on.
    pub fn keeps_eight(&self, batch: usize, head: usize, query: usize, eight: usize) -> [bool; 8] {
        keeps_eight(
            self.seed,
            [eight, head, query, batch].map(|number| number as u32),
            self.threshold(),
        )
    }
}

/// Number of values of a pair's 16-bit number.
const NUMBERS: u32 = 1 << 16;

/// Returns which of a counter's eight numbers are below a threshold.
pub(crate) fn keeps_eight(seed: Seed, counter: [u32; 4], threshold: u32) -> [bool; 8] {
    let seed = seed.value();
    let key = [seed as u32, (seed >> 32) as u32];
    let dropped = above(philox_of(ROUNDS, counter, key), last_kept(threshold));
    std::array::from_fn(|number| dropped >> number & 1 == 0)
}

/// Returns the words that a counter's words are compared with: the largest retained number, `threshold − 1`, in the bit order of the eight numbers. Byte `b` of
/// word `w` is 255 if bit `4 · b + w` of that number is 1, and 0 otherwise.
pub fn last_kept(threshold: u32) -> [u32; 4] {
    let last = threshold.max(1) - 1;
    // Moves bit 4 · b + w to bit 8 · b.
    let bits = |w: u32| (0..4).map(move |b| (last >> (4 * b + w) & 1) << (8 * b));
    [0, 1, 2, 3].map(|w| bits(w).sum::<u32>() * 255)
}

/// Returns a bit for each of eight numbers that is above another. All eight are compared at once, bit by bit, as kernels do.
fn above(words: [u32; 4], last: [u32; 4]) -> u32 {
    // The four bits of each byte are compared from the lowest on: a higher bit that differs decides.
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
/// Increments of the Philox key per round.
pub const WEYL: [u32; 2] = [0x9E37_79B9, 0xBB67_AE85];
/// Philox rounds of dropout masks.
pub const ROUNDS: u32 = 7;

/// Computes Philox 4×32 with 10 rounds (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011): four random words for a counter and a key. Dropout
/// masks use 7 rounds.
pub fn philox(counter: [u32; 4], key: [u32; 2]) -> [u32; 4] {
    philox_of(10, counter, key)
}

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

    /// Extracts the eight numbers of four words: number `j` takes bit `j` of each byte, and byte `b` of word `w` supplies its bit `4 · b + w`.
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

    /// Checks the mask against its definition.
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

    /// Checks the known answers of the authors' Random123.
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

    /// Checks numbers worked out by hand from the first known answer, whose words are `0x5f6fb709, 0x0d893f64, 0x4f121f81, 0x4f730a48`: bits 0 of their bytes,
    /// from the lowest byte on, are 1, 0, 1, 0; 1, 1, 1, 0; 1, 1, 0, 1; 1, 1, 1, 1, a nibble for each byte index.
    #[test]
    fn numbers_are_columns_of_bits() {
        let numbers = eight_numbers(philox_of(ROUNDS, [0; 4], [0; 2]));
        assert_eq!(numbers[0], 0b1111_1011_0111_0101);
    }

    /// The bitwise comparison of every number agrees with the comparison with the threshold.
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

    /// Probabilities are rounded to multiples of 2⁻¹⁶, with the matching factor, and never to 0 or 1.
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

    /// Asserts that the share of pairs with an event is within five standard deviations of the share for independent draws.
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

    /// Over 2¹⁶ pairs, two shares are within five standard deviations of those of independent draws: the share of retained pairs, and the share of pairs with
    /// the same outcome at another key (in the same counter or the next), query, head, batch entry or seed.
    #[test]
    fn pairs_are_kept_independently() {
        const QUERIES: usize = 128;
        const KEYS: usize = 512;
        // Larger than the number of keys by the greatest distance that is tested.
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
            // The pair with query and key exchanged.
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

    /// The number of retained pairs among the eight of a counter is binomially distributed: χ² of 2¹⁵ counters with 8 degrees of freedom is below 40, which
    /// chance exceeds three times in a million.
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
