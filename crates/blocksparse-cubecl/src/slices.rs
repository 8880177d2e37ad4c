//! Batch entries and heads of a launch. A grid has one dimension for each, and devices bound them: more are launched one after the other.

use cubecl::prelude::*;

use super::shared::addressing::SliceLaunch;

/// Batch entries and heads of one launch, of all those of a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Slice {
    /// The first batch entry,
    pub first_batch: usize,
    /// and how many.
    pub batches: usize,
    /// The first head,
    pub first_head: usize,
    /// and how many.
    pub heads: usize,
    /// Batch entries and heads of the call.
    all: [usize; 2],
}

impl Slice {
    /// All batch entries and heads of a call.
    pub fn whole(batches: usize, heads: usize) -> Self {
        Self {
            first_batch: 0,
            batches,
            first_head: 0,
            heads,
            all: [batches, heads],
        }
    }

    /// Launches in each of which no two batch entries or heads share a bias of `shape`.
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

    /// In launches that the device takes.
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

    /// The launch's grid, with so many tiles of a head.
    pub fn cubes(&self, tiles: usize) -> CubeCount {
        CubeCount::Static(tiles as u32, self.heads as u32, self.batches as u32)
    }

    /// The same with the heads first, so that cubes of all heads begin in turn.
    pub fn cubes_in_turn(&self, tiles: usize) -> CubeCount {
        CubeCount::Static(self.heads as u32, tiles as u32, self.batches as u32)
    }

    /// What kernels get.
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
        // A bias that all batch entries share has a launch for each.
        let sharing = Slice::sharing([1, 5, 4, 4], 7, 5);
        assert_eq!(sharing.len(), 7);
        assert!(
            sharing
                .iter()
                .all(|slice| slice.batches == 1 && slice.heads == 5)
        );
    }
}
