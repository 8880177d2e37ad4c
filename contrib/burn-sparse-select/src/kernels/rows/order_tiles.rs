//! The second half of a sort by bucket whose first half knows of each tile of tokens how many it has of each bucket, and of each token how many of its bucket
//! are before it in its tile: so a cube has a tile, and not a whole list.
//!
//! A cube adds up the counts of all tiles of its list, those before its own apart, and then of lower buckets; so a token's place is that of its bucket, behind
//! those of tiles before and those of its own tile before it.

use cubecl::prelude::*;
use cubecl::server::Handle;

use crate::kernels::rows::order_places::{Sizes, SizesLaunch, fill, put};
use blocksparse_cubecl::args::{address_of, buffer, spread};
use blocksparse_cubecl::error::KernelError;
use blocksparse_cubecl::rows::norm_shape::check_buffers;
use blocksparse_cubecl::shared::unit_sums::{UnitSums, before_and_all};

/// Tokens of a tile, and units of a cube.
pub(crate) const TILE: usize = 128;
/// Buckets, at most, and counts of a list that each cube reads: of more the cubes that have whole lists take less time.
pub(crate) const MOST_BUCKETS: usize = 512;
const MOST_COUNTS: usize = 1 << 15;
/// Counts that are loaded together.
const UNROLLED: usize = 16;

/// A sort of lists of one length.
#[derive(Clone, Copy, Debug)]
pub(crate) struct TiledSort {
    length: usize,
    buckets: usize,
    tiles: usize,
}

impl TiledSort {
    /// `None` of too many buckets and tiles.
    pub fn new(length: usize, buckets: usize) -> Option<Self> {
        let tiles = length.div_ceil(TILE);
        let fits = buckets <= MOST_BUCKETS && tiles * buckets <= MOST_COUNTS;
        fits.then_some(Self {
            length,
            buckets,
            tiles,
        })
    }

    /// Counts of so many groups, `[groups, tiles, buckets]`.
    pub fn counts(&self, groups: usize) -> usize {
        groups * self.tiles * self.buckets
    }

    /// Tokens, places and choices as of [`counting_argsort_rounds`](crate::kernels::rows::order::counting_argsort_rounds). `codes` `[lists, rounds, length]` are `bucket · TILE` and the number in the
    /// tile's bucket.
    ///
    /// # Errors
    /// [`KernelError`] if there are more numbers than kernels index.
    pub fn put(
        &self,
        client: &Client,
        [lists, rounds]: [usize; 2],
        room: usize,
        [codes, counts]: [&Handle; 2],
        [tokens, places, choices]: [&Handle; 3],
    ) -> Result<(), KernelError> {
        let groups = lists * rounds;
        let (all, rooms) = (groups * self.length, groups * room);
        // Places are counted in 32 bits.
        KernelError::check_u32("the numbers of a sort", 2 * all.max(rooms))?;
        check_buffers(client, 5)?;
        let most = all.max(rooms).max(self.counts(groups));
        // SAFETY: a unit reads codes and counts of its group and writes the place of its token, which is below the length, and what fills up.
        unsafe {
            place::launch_unchecked(
                client,
                spread(client, (groups * self.tiles) as u64)?,
                CubeDim::new_1d(TILE as u32),
                address_of(client, most)?,
                buffer(codes, all),
                buffer(counts, self.counts(groups)),
                buffer(tokens, rooms),
                buffer(places, all),
                buffer(choices, rooms),
                SizesLaunch::new(groups, self.length, rounds, room, self.buckets as u32, 0),
                self.tiles,
                UnitSums::new(client.properties(), TILE),
            );
        }
        Ok(())
    }
}

#[cube(launch_unchecked, address_type = "dynamic")]
fn place(
    codes: &[u32],
    counts: &[u32],
    tokens: &mut [i32],
    places: &mut [i32],
    choices: &mut [i32],
    sizes: Sizes,
    tiles: usize,
    #[comptime] sums: UnitSums,
) {
    let mut totals = Shared::<[u32]>::new_slice(MOST_BUCKETS);
    let mut starts = Shared::<[u32]>::new_slice(MOST_BUCKETS);
    let mut partial = Shared::<[u32]>::new_slice(comptime!(sums.partial()));
    // Cubes beyond the last make it again.
    let cube = CUBE_POS.min(sizes.groups * tiles - 1);
    let group = cube / tiles;
    let tile = cube % tiles;
    let unit = UNIT_POS as usize;
    let buckets = sizes.count as usize;
    let mut bucket = unit;
    while bucket < buckets {
        let first = group * tiles * buckets + bucket;
        let mut total = 0u32.runtime();
        let mut before = 0u32.runtime();
        let mut other = 0usize.runtime();
        // Several loads are on their way at a time.
        while other < tiles {
            #[unroll]
            for i in 0..UNROLLED {
                let at = other + i;
                let count = counts[first + at.min(tiles - 1) * buckets];
                total += select(at < tiles, count, 0u32);
                before += select(at < tile, count, 0u32);
            }
            other += UNROLLED;
        }
        totals[bucket] = total;
        starts[bucket] = before;
        bucket += TILE;
    }
    sync_cube();
    // A unit has some neighbouring buckets.
    let own = buckets.div_ceil(TILE);
    let first = (unit * own).min(buckets);
    let end = (first + own).min(buckets);
    let mut total = 0u32.runtime();
    for bucket in first..end {
        total += totals[bucket];
    }
    let (before, _) = before_and_all(total, &mut partial, 0usize.runtime(), sums);
    let mut start = before;
    for bucket in first..end {
        starts[bucket] += start;
        start += totals[bucket];
    }
    sync_cube();
    let token = tile * TILE + unit;
    if token < sizes.length {
        let code = codes[group * sizes.length + token];
        let bucket = code / comptime!(TILE as u32);
        let place = starts[bucket as usize] + code % comptime!(TILE as u32);
        put(tokens, places, choices, group, token, place, &sizes);
    }
    if tile == tiles - 1 {
        fill(tokens, choices, group, TILE, &sizes);
    }
}
