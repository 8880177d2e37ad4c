//! Slices of batch entries and heads. A grid has one dimension for each, and devices limit them, so larger calls are several launches.

use cubecl::prelude::*;

use super::shared::addressing::SliceLaunch;

/// Batch entries and heads of one launch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Slice {
    /// First batch entry.
    pub first_batch: usize,
    /// Number of batch entries.
    pub batches: usize,
    /// First head.
    pub first_head: usize,
    /// Number of heads.
    pub heads: usize,
    /// Numbers of batch entries and heads of the call.
    all: [usize; 2],
}

impl Slice {
    /// A slice of all batch entries and heads of a call.
    pub fn whole(batches: usize, heads: usize) -> Self {
        Self {
            first_batch: 0,
            batches,
            first_head: 0,
            heads,
            all: [batches, heads],
        }
    }

    /// Returns slices within which no two batch entries or heads share a bias of `shape`.
    pub fn sharing(
        [own_batches, own_heads, ..]: [usize; 4],
        batch: usize,
        heads: usize,
    ) -> Vec<Self> {
        let firsts = |own: usize, all: usize| if own == 1 { 0..all } else { 0..1 };
        firsts(own_batches, batch)
            .flat_map(|first_batch| {
                firsts(own_heads, heads).map(move |first_head| Self {
                    first_batch,
                    batches: own_batches,
                    first_head,
                    heads: own_heads,
                    all: [batch, heads],
                })
            })
            .collect()
    }

    /// Cuts the slice to the limits of the device.
    pub fn cut(self, client: &Client) -> Vec<Self> {
        let (_, heads, batches) = client.properties().hardware.max_cube_count;
        self.cut_to(batches as usize, heads as usize)
    }

    fn cut_to(self, most_batches: usize, most_heads: usize) -> Vec<Self> {
        let firsts = |first: usize, count: usize, most: usize| {
            (first..first + count)
                .step_by(most)
                .map(move |at| (at, most.min(first + count - at)))
        };
        firsts(self.first_batch, self.batches, most_batches)
            .flat_map(|(first_batch, batches)| {
                firsts(self.first_head, self.heads, most_heads).map(move |(first_head, heads)| {
                    Self {
                        first_batch,
                        batches,
                        first_head,
                        heads,
                        ..self
                    }
                })
            })
            .collect()
    }

    /// Returns the grid for `tiles` tiles per head.
    pub fn cubes(&self, tiles: usize) -> CubeCount {
        CubeCount::Static(tiles as u32, self.heads as u32, self.batches as u32)
    }

    /// Returns the grid with heads in the first dimension, so that cubes of all heads start in turn.
    pub fn cubes_in_turn(&self, tiles: usize) -> CubeCount {
        CubeCount::Static(self.heads as u32, tiles as u32, self.batches as u32)
    }

    /// Returns the kernel arguments.
    pub fn args(&self) -> SliceLaunch {
        let [batches, heads] = self.all;
        SliceLaunch::new(self.first_batch, self.first_head, batches, heads)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slices_make_up_the_whole() {
        let whole = Slice::whole(7, 5);
        assert_eq!(whole.cut_to(7, 5), [whole]);
        let slices = whole.cut_to(3, 2);
        let mut seen = [0; 7 * 5];
        for slice in &slices {
            assert!(slice.batches <= 3 && slice.heads <= 2);
            for batch in slice.first_batch..slice.first_batch + slice.batches {
                for head in slice.first_head..slice.first_head + slice.heads {
                    seen[batch * 5 + head] += 1;
                }
            }
        }
        assert!(seen.iter().all(|&times| times == 1), "{slices:?}");
        // A bias that all batch entries share needs a launch per entry.
        let sharing = Slice::sharing([1, 5, 4, 4], 7, 5);
        assert_eq!(sharing.len(), 7);
        assert!(
            sharing
                .iter()
                .all(|slice| slice.batches == 1 && slice.heads == 5)
        );
    }
}
