//! Random numbers of layouts. They come from Philox, so a seed gives the same layout on every machine.

use crate::dropout::philox;

/// Separates the draws of layouts from those of dropout with the same seed.
const STREAM: u32 = 0x7765_6967;

/// A stream of numbers from a seed.
pub(super) struct Draws {
    key: [u32; 2],
    count: u64,
    words: [u32; 4],
}

impl Draws {
    pub fn new(seed: u64) -> Self {
        Self {
            key: [seed as u32, (seed >> 32) as u32],
            count: 0,
            words: [0; 4],
        }
    }

    fn word(&mut self) -> u32 {
        let place = (self.count % 4) as usize;
        if place == 0 {
            let four = self.count / 4;
            self.words = philox([four as u32, (four >> 32) as u32, STREAM, 0], self.key);
        }
        self.count += 1;
        self.words[place]
    }

    /// Returns a uniform number below `count`. Words beyond the last multiple of `count` are drawn again.
    pub fn below(&mut self, count: usize) -> usize {
        let count = count as u64;
        let last = u64::MAX - u64::MAX % count;
        loop {
            let number = u64::from(self.word()) << 32 | u64::from(self.word());
            if number < last {
                return (number % count) as usize;
            }
        }
    }

    /// Returns true with this probability.
    pub fn happens(&mut self, probability: f64) -> bool {
        f64::from(self.word()) < probability * 2f64.powi(32)
    }

    /// Moves the first `count` items of a random permutation to the front (Fisher and Yates).
    pub fn shuffle<T>(&mut self, items: &mut [T], count: usize) {
        for place in 0..count.min(items.len().saturating_sub(1)) {
            let other = place + self.below(items.len() - place);
            items.swap(place, other);
        }
    }
}
