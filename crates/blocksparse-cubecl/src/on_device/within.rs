//! Layouts with blocks chosen from those of a host layout, whose masks they keep.
//!
//! The plan of the whole layout is made on the host and uploaded once, like any other. A plan of the chosen blocks has a subset of its entries, tile by
//! tile. If only some of a tile's block rows have chosen a block, the entry's mask is that of the whole plan in those rows. The table has each mask of the
//! whole plan for all block rows, and after them each mask for every other subset.

use std::convert::Infallible;
use std::sync::Arc;

use cubecl::prelude::*;
use cubecl::server::Handle;

use super::bits::AllowedLaunch;
use super::tables::{Heads, first_tile};
use super::words::{
    Counted, Cut, EMPTY, Entries, Extent, FULL, Places, filled, in_steps, place, subset,
};
use crate::device_key::{DeviceKey, device_key};
use crate::error::KernelError;
use crate::recording;
use blocksparse::BlockLayout;
use blocksparse::internal::Slots;
use blocksparse::plan::{TilePlan, Tiling};

/// Sizes of a whole layout's plan, which bound those of plans of its blocks.
#[derive(Clone, Copy, Debug)]
pub struct WholeSizes {
    /// Number of masks.
    pub masks: usize,
    /// Largest number of entries per pattern.
    pub entries: usize,
}

#[derive(Default)]
struct KnownSizes(Slots<Tiling, Option<WholeSizes>>);

impl WholeSizes {
    /// Returns the sizes of a layout's plan under a tiling. They are computed once.
    pub fn new(layout: &BlockLayout, tiling: Tiling) -> Self {
        let known = layout.attachment(KnownSizes::default);
        let made = known.0.get_or_try_make(tiling, || {
            let plan = TilePlan::new(layout, tiling);
            let at = plan.sections;
            let entries = plan.words[at.tiles..at.entries].chunks(3 * plan.tiles.max(1));
            let per_step = tiling.cols / plan.group;
            let of_pattern =
                entries.map(|tiles| tiles.chunks(3).map(|tile| tile[1] as usize).sum::<usize>());
            Ok::<_, Infallible>(Self {
                masks: (plan.words.len() - at.masks) / (tiling.rows * plan.mask_words),
                entries: of_pattern.max().unwrap_or(0) * per_step,
            })
        });
        made.unwrap_or_else(|never| match never {})
    }

    /// Returns the number of masks of the table, for tiles of `height` block rows.
    pub fn table(&self, height: usize) -> usize {
        self.masks * ((1 << height) - 1)
    }
}

/// Bits of a layout's blocks on a device.
#[derive(Clone)]
pub struct AllowedBits {
    /// See [`Allowed`](super::bits::Allowed).
    pub words: Handle,
    /// Number of words.
    pub len: usize,
    heads: usize,
    entries: usize,
}

#[derive(Default)]
struct KnownBits(Slots<DeviceKey, Option<Arc<AllowedBits>>>);

impl AllowedBits {
    /// Returns the bits of a layout. They are uploaded once.
    ///
    /// # Errors
    /// [`KernelError::Recording`] if they would be uploaded inside a recording.
    pub fn new(client: &Client, layout: &BlockLayout) -> Result<Arc<Self>, KernelError> {
        let known = layout.attachment(KnownBits::default);
        let make = || Self::uploaded(client, layout).map(Arc::new);
        known.0.get_or_try_make(device_key(client), make)
    }

    fn uploaded(client: &Client, layout: &BlockLayout) -> Result<Self, KernelError> {
        let (entries, heads) = (layout.batch().unwrap_or(1), layout.heads());
        let mut words = Vec::with_capacity(entries * heads);
        for (entry, head) in (0..entries).flat_map(|entry| (0..heads).map(move |h| (entry, h))) {
            words.push((layout.pattern_of(entry, head) * layout.q_blocks()) as u32);
        }
        let of_row = layout.kv_blocks().div_ceil(32);
        for pattern in 0..layout.num_patterns() {
            for q_block in 0..layout.q_blocks() {
                let first = words.len();
                words.resize(first + of_row, 0);
                for run in layout.row_runs(pattern, q_block) {
                    for block in run.blocks() {
                        words[first + block as usize / 32] |= 1 << (block % 32);
                    }
                }
            }
        }
        Ok(Self {
            words: recording::upload(client, &words, "the blocks of a layout")?,
            len: words.len(),
            heads,
            entries,
        })
    }

    /// Returns the kernel arguments, for a choice of `patterns` patterns per batch entry.
    pub fn launched(&self, patterns: usize) -> AllowedLaunch {
        AllowedLaunch::new(
            self.entries * self.heads,
            self.heads,
            self.entries - 1,
            patterns,
        )
    }
}

/// Offsets of a whole plan's sections.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub struct Whole {
    /// First tile record of each head.
    pub heads: usize,
    /// Tile records.
    pub tiles: usize,
    /// Entries.
    pub entries: usize,
    /// Masks.
    pub masks: usize,
    /// Number of masks.
    pub mask_count: u32,
    /// Last batch entry with heads of its own.
    pub last_entry: usize,
    /// Heads per batch entry.
    pub per_batch: usize,
    /// Patterns of the choice per batch entry.
    pub patterns: usize,
}

/// Returns the record in the whole plan of tile `at`, counted over all patterns.
#[cube]
fn record(whole: &[u32], at: usize, extent: &Extent, of: &Whole) -> usize {
    let pattern = at / extent.tiles;
    let entry = (pattern / of.patterns).min(of.last_entry);
    let head = entry * of.per_batch + pattern % of.patterns * (of.per_batch / of.patterns);
    of.tiles + (whole[of.heads + head] as usize + at % extent.tiles) * 3
}

/// Returns the mask of an entry of which only a subset of block rows is chosen.
#[cube]
#[allow(clippy::collapsible_if)] // Compile-time conditions stay separate from run-time ones.
fn mask_of(id: u32, subset: u32, of: &Whole, #[comptime] cut: Cut) -> u32 {
    let all = comptime!((1u32 << cut.height()) - 1);
    let mut result = id;
    if comptime!(cut.height() > 1) {
        if subset != all {
            result = of.mask_count + id * (all - 1u32) + subset.max(1u32) - 1u32;
        }
    }
    select(subset == 0u32 || id == EMPTY, EMPTY, result)
}

/// Returns the mask, in tile `at`, of the entry at word `entry` of the whole plan.
#[cube]
fn left(
    bits: &[u32],
    whole: &[u32],
    entry: usize,
    at: usize,
    extent: &Extent,
    of: &Whole,
    #[comptime] cut: Cut,
) -> u32 {
    let place = place(at, extent, cut);
    let block = whole[entry] as usize / comptime!(cut.parts());
    let (word, bit) = (block / 32, (block % 32) as u32);
    let chosen = match comptime!(cut.height() > 1) {
        true => subset(bits, place.line, word, bit, place.end, extent, cut),
        false => (bits[place.line * extent.words + word] >> bit) & 1u32,
    };
    mask_of(whole[entry + 1], chosen, of, cut)
}

/// Returns the number of steps of tile `at`.
#[cube]
fn counted(
    bits: &[u32],
    whole: &[u32],
    at: usize,
    extent: &Extent,
    of: &Whole,
    #[comptime] cut: Cut,
) -> Counted {
    let record = record(whole, at, extent, of);
    let first = of.entries + whole[record] as usize * 2;
    let all = whole[record + 1] as usize * comptime!(cut.per_step);
    let mut masked = 0u32;
    let mut full = 0u32;
    for entry in 0..all {
        let id = left(bits, whole, first + entry * 2, at, extent, of, cut);
        if id == FULL {
            full += 1u32;
        } else if id != EMPTY {
            masked += 1u32;
        }
    }
    in_steps(&Entries { masked, full }, cut)
}

/// Counts the entries of each tile into its record, like [`words::count`](super::words::count).
#[cube(launch_unchecked, address_type = "dynamic")]
pub fn count(
    bits: &[u32],
    whole: &[u32],
    plan: &mut [u32],
    extent: Extent,
    places: Places,
    of: Whole,
    tiles: usize,
    #[comptime] cut: Cut,
) {
    let at = ABSOLUTE_POS;
    if at < tiles {
        let counted = counted(bits, whole, at, &extent, &of, cut);
        let record = places.tiles + at * 3;
        plan[record] = 0u32;
        plan[record + 1] = counted.steps;
        plan[record + 2] = counted.masked;
    }
}

/// Makes the entries of each tile, in the order of [`words::listed`](super::words::listed).
#[cube(launch_unchecked, address_type = "dynamic")]
pub fn entries(
    bits: &[u32],
    whole: &[u32],
    plan: &mut [u32],
    extent: Extent,
    places: Places,
    of: Whole,
    tiles: usize,
    #[comptime] cut: Cut,
) {
    let at = ABSOLUTE_POS;
    if at < tiles {
        let own = places.tiles + at * 3;
        let mut front = places.entries + plan[own] as usize * 2;
        let mut back = front + plan[own + 1] as usize * comptime!(cut.per_step * 2);
        let record = record(whole, at, &extent, &of);
        let first = of.entries + whole[record] as usize * 2;
        let all = whole[record + 1] as usize * comptime!(cut.per_step);
        for i in 0..all {
            let entry = first + i * 2;
            let id = left(bits, whole, entry, at, &extent, &of, cut);
            if id == FULL {
                back -= 2;
                plan[back] = whole[entry];
                plan[back + 1] = FULL;
            } else if id != EMPTY {
                plan[front] = whole[entry];
                plan[front + 1] = id;
                front += 2;
            }
        }
        filled(plan, front, back);
    }
}

/// Makes the words of the masks, and after them the words of the heads.
#[cube(launch_unchecked, address_type = "dynamic")]
#[allow(clippy::collapsible_if)] // Compile-time conditions stay separate from run-time ones.
pub fn tables(
    whole: &[u32],
    plan: &mut [u32],
    extent: Extent,
    places: Places,
    heads: Heads,
    of: Whole,
    mask_words: usize,
    #[comptime] cut: Cut,
) {
    let at = ABSOLUTE_POS;
    let of_mask = comptime!(cut.rows * cut.mask_words());
    if at < mask_words {
        let id = (at / of_mask) as u32;
        let mut base = id;
        let mut is_kept = true;
        if comptime!(cut.height() > 1) {
            if id >= of.mask_count {
                let others = comptime!((1u32 << cut.height()) - 2);
                let behind = id - of.mask_count;
                base = behind / others;
                let subset = behind % others + 1u32;
                let row = at / comptime!(cut.mask_words()) % comptime!(cut.rows);
                is_kept = (subset >> (row / comptime!(cut.block)) as u32) & 1u32 == 1u32;
            }
        }
        let word = whole[of.masks + base as usize * of_mask + at % of_mask];
        plan[places.masks + at] = select(is_kept, word, 0u32);
    } else if at < mask_words + heads.all {
        let head = at - mask_words;
        plan[places.heads + head] = first_tile(head, &extent, &heads);
    }
}
