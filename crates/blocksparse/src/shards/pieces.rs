//! Assigns blocks to devices.

use std::ops::Range;

/// Blocks cut into `devices · pieces` pieces of nearly equal length, dealt forth and back:
///
/// ```text
/// 3 devices, 2 pieces   |  0  |  1  |  2  |  2  |  1  |  0  |
/// ```
///
/// With one piece per device, shards are contiguous. With two, full causal attention costs all devices the same (zigzag).
#[derive(Clone, Copy, Debug)]
pub(super) struct Pieces {
    pub blocks: usize,
    pub devices: usize,
    pub pieces: usize,
}

impl Pieces {
    fn count(&self) -> usize {
        self.devices * self.pieces
    }

    fn start(&self, piece: usize) -> usize {
        piece * self.blocks / self.count()
    }

    /// Returns the device with index `at` in a round. Odd rounds run backwards.
    fn dealt(&self, round: usize, at: usize) -> usize {
        match round % 2 {
            0 => at,
            _ => self.devices - 1 - at,
        }
    }

    /// Returns the blocks of a device, ascending.
    pub fn of(&self, device: usize) -> Vec<Range<usize>> {
        let mut ranges: Vec<Range<usize>> = Vec::new();
        for round in 0..self.pieces {
            let piece = round * self.devices + self.dealt(round, device);
            let (start, end) = (self.start(piece), self.start(piece + 1));
            match ranges.last_mut() {
                Some(last) if last.end == start => last.end = end,
                _ => ranges.push(start..end),
            }
        }
        ranges
    }

    /// Returns the device that owns a block.
    pub fn owner(&self, block: usize) -> usize {
        let piece = ((block + 1) * self.count() - 1) / self.blocks;
        self.dealt(piece / self.devices, piece % self.devices)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_block_has_the_owner_that_lists_it() {
        for blocks in [6, 7, 64, 1001] {
            for devices in [1, 2, 3, 5] {
                for pieces in 1..=blocks / devices {
                    let dealt = Pieces {
                        blocks,
                        devices,
                        pieces,
                    };
                    let mut seen = vec![0; blocks];
                    for device in 0..devices {
                        for block in dealt.of(device).into_iter().flatten() {
                            assert_eq!(dealt.owner(block), device, "{dealt:?}, block {block}");
                            seen[block] += 1;
                        }
                    }
                    assert!(seen.iter().all(|&count| count == 1), "{dealt:?}");
                }
            }
        }
    }
}
