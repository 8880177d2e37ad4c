//! Lists of single keys that neighbouring queries share: the union of their lists, with a bit per query that has the key.
//!
//! ```text
//! bounds     index in every query's list at which each chunk of 2,048 keys begins, for up to 16 chunks at once
//! flags      one word per key of a chunk; queries set their bits one after the other
//! output     keys with a non-zero word, ascending, and the words; optionally one bit per key
//! ```
//!
//! A cube has a group of queries. Every element has one writer.

// Compile-time conditions stay separate from run-time ones.
#![allow(clippy::collapsible_if)]

use cubecl::prelude::*;
use cubecl::server::Handle;

use super::cubes;
use super::key_lists::{KEYS_OF_WORD, KeyListSizes, Queries};
use super::query_lists::{LIST_UNITS, check_units, within};
use crate::args::buffer;
use crate::error::KernelError;
use crate::shared::unit_sums::{UnitSums, before_and_all};

/// Keys with flags at a time, and keys per unit.
const CHUNK: usize = LIST_UNITS * OWN_FLAGS;
const OWN_FLAGS: usize = 8;

/// Chunks whose bounds are searched at once.
const SPAN: usize = 16;

/// Options of a union of neighbours' lists.
#[derive(Clone, Copy, Debug)]
pub struct Uniting {
    /// Queries per group, at most 32. The last group may have fewer.
    pub together: usize,
    /// Whether given lists are ascending, with −1 after the last key. Short ones need not be.
    pub ascending: bool,
    /// Whether to write bits too.
    pub with_bits: bool,
}

/// Union of neighbouring queries' lists.
#[derive(Clone, Debug)]
pub struct NeighbourLists {
    /// Keys, i32 `[lists, groups, most]`, ascending. Elements after the last key are arbitrary.
    pub keys: Handle,
    /// Queries of the group that have each key, one bit each: u32 of the same shape.
    pub masks: Handle,
    /// Number of keys, u32 `[lists, groups]`.
    pub counts: Handle,
    /// Keys of the union, one bit each, u32 `[lists, groups, seq_kv / 32]`, rounded up. Only if asked for.
    pub bits: Option<Handle>,
    /// Sizes of the lists, with groups as queries.
    pub sizes: KeyListSizes,
}

/// Returns the largest number of keys in the union of `together` queries' lists.
pub fn most_of_neighbours(sizes: &KeyListSizes, together: usize) -> usize {
    (sizes.most * together).min(sizes.seq_kv)
}

/// Unites the lists of some groups of neighbouring queries. `given` is i32 `[lists, seq_q, most]`, without duplicates in a list, negative for none.
///
/// # Errors
/// [`KernelError`] if the elements do not fit 32 bits, or the device's cubes are too small.
pub fn neighbour_lists(
    client: &Client,
    sizes: &KeyListSizes,
    given: &Handle,
    groups: Queries,
    of: Uniting,
) -> Result<NeighbourLists, KernelError> {
    check_units(client)?;
    let (together, ascending, with_bits) = (of.together, of.ascending, of.with_bits);
    let most = most_of_neighbours(sizes, together);
    let lengths = [groups.count, sizes.seq_kv];
    let made = KeyListSizes::new(sizes.lists, lengths, most);
    let rows = sizes.lists * groups.count;
    let in_lists = sizes.lists * sizes.seq_q * sizes.most;
    within("the keys of lists", in_lists)?;
    within("the keys of neighbours' lists", rows * most)?;
    let words = sizes.seq_kv.div_ceil(KEYS_OF_WORD);
    let in_bits = if with_bits { rows * words } else { 1 };
    within("the bits of neighbours' lists", in_bits)?;
    let empty = |len: usize| client.empty(len.max(1) * size_of::<u32>());
    let (keys, masks, counts) = (empty(rows * most), empty(rows * most), empty(rows));
    let bits = empty(in_bits);
    // SAFETY: a cube reads the lists of its group's queries, and writes the group's list, which is as long as the union can be, and its count and bits.
    // Cubes beyond the last group access nothing.
    unsafe {
        unite::launch_unchecked(
            client,
            cubes(client, rows),
            CubeDim::new_1d(LIST_UNITS as u32),
            AddressType::U32,
            buffer(given, in_lists),
            buffer(&keys, rows * most),
            buffer(&masks, rows * most),
            buffer(&counts, rows),
            buffer(&bits, in_bits),
            GroupsLaunch::new(
                rows,
                groups.count,
                groups.first,
                sizes.seq_q,
                sizes.seq_kv,
                sizes.most,
                most,
            ),
            together,
            ascending,
            with_bits,
            UnitSums::new(client.properties(), LIST_UNITS),
        );
    }
    Ok(NeighbourLists {
        keys,
        masks,
        counts,
        bits: with_bits.then_some(bits),
        sizes: made,
    })
}

/// Sizes of the groups of queries.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
struct Groups {
    /// Groups of all lists.
    count: usize,
    /// Groups per list, in this launch.
    groups: usize,
    /// First group.
    first: usize,
    queries: usize,
    keys: usize,
    /// Entries of a query's list.
    most: usize,
    /// Entries of a group's list.
    room: usize,
}

/// Returns the index of the first entry of a list that is at least `key`. Entries after the last key count as larger.
#[cube]
fn first_from(given: &[i32], own: usize, most: usize, key: i32) -> usize {
    let mut low = 0usize.runtime();
    let mut size = most;
    while size > 0usize {
        let half = size / 2;
        let its = given[own + low + half];
        let is_before = its >= 0i32 && its < key;
        low += select(is_before, half + 1, 0usize);
        size = select(is_before, size - half - 1, half);
    }
    low
}

#[cube(launch_unchecked, address_type = "dynamic")]
fn unite(
    given: &[i32],
    keys: &mut [i32],
    masks: &mut [u32],
    counts: &mut [u32],
    bits: &mut [u32],
    of: Groups,
    #[comptime] together: usize,
    #[comptime] ascending: bool,
    #[comptime] with_bits: bool,
    #[comptime] sums: UnitSums,
) {
    let is_group = CUBE_POS < of.count;
    let at = CUBE_POS.min(of.count - 1);
    let first_query = (of.first + at % of.groups) * together;
    let first_row = at / of.groups * of.queries + first_query;
    let room = select(is_group, of.room, 0usize);
    let unit = UNIT_POS as usize;
    let mut flags = Shared::<[u32]>::new_slice(comptime!(CHUNK));
    let mut bounds = Shared::<[u32]>::new_slice(comptime!((SPAN + 1) * together));
    let mut eights = Shared::<[u32]>::new_slice(comptime!(LIST_UNITS));
    let mut partial = Shared::<[u32]>::new_slice(comptime!(sums.partial()));
    let words = of.keys.div_ceil(comptime!(KEYS_OF_WORD));
    let own_words = select(is_group, words, 0usize);
    let mut written = 0usize.runtime();
    for span in 0..of.keys.div_ceil(comptime!(SPAN * CHUNK)) {
        let mut search = unit;
        while search < comptime!((SPAN + 1) * together) {
            let query = search % together;
            let is_query = is_group && first_query + query < of.queries;
            let most = select(is_query, of.most, 0usize);
            let own = select(is_query, (first_row + query) * of.most, 0usize);
            let key = (span * comptime!(SPAN) + search / together) * comptime!(CHUNK);
            // If lists are unordered, all entries are read for each chunk.
            let mut bound = select(search / together == 0, 0usize, most);
            if comptime!(ascending) {
                bound = first_from(given, own, most, key as i32);
            }
            bounds[search] = bound as u32;
            search += comptime!(LIST_UNITS);
        }
        sync_cube();
        for chunk in 0..comptime!(SPAN) {
            let before = (span * comptime!(SPAN) + chunk) * comptime!(CHUNK);
            let word = before / comptime!(KEYS_OF_WORD) + unit;
            let first_bound = select(comptime!(ascending), chunk * together, 0usize);
            let mut longest = 0u32.runtime();
            #[unroll]
            for query in 0..together {
                let first = bounds[first_bound + query];
                longest = max(longest, bounds[first_bound + together + query] - first);
            }
            if longest > 0u32 && before < of.keys {
                #[unroll]
                for flag in 0..comptime!(OWN_FLAGS) {
                    flags[flag * comptime!(LIST_UNITS) + unit] = 0u32;
                }
                sync_cube();
                for round in 0..longest.div_ceil(comptime!(LIST_UNITS as u32)) {
                    let own = round as usize * comptime!(LIST_UNITS) + unit;
                    let mut read = Array::<i32>::new(together);
                    #[unroll]
                    for query in 0..together {
                        let entry = bounds[first_bound + query] as usize + own;
                        read[query] = -1i32;
                        if entry < bounds[first_bound + together + query] as usize {
                            let key = given[(first_row + query) * of.most + entry];
                            let at = key - before as i32;
                            let is_near = at >= 0i32 && at < comptime!(CHUNK as i32);
                            read[query] = select(is_near, at, -1i32);
                        }
                    }
                    // A query has a key once, so no two units set a flag of the same key.
                    #[unroll]
                    for query in 0..together {
                        if read[query] >= 0i32 {
                            flags[read[query] as usize] |= comptime!(1u32 << query);
                        }
                        sync_cube();
                    }
                }
                let mut own_bits = 0u32.runtime();
                #[unroll]
                for flag in 0..comptime!(OWN_FLAGS) {
                    let its = flags[unit * comptime!(OWN_FLAGS) + flag];
                    own_bits |= select(its != 0u32, comptime!(1u32 << flag), 0u32);
                }
                if comptime!(with_bits) {
                    eights[unit] = own_bits;
                }
                let count = own_bits.count_ones();
                let (place, all) = before_and_all(count, &mut partial, chunk, sums);
                if comptime!(with_bits) {
                    if unit < comptime!(CHUNK / KEYS_OF_WORD) && word < own_words {
                        let mut its = 0u32.runtime();
                        #[unroll]
                        for eight in 0..comptime!(KEYS_OF_WORD / OWN_FLAGS) {
                            let of_eight =
                                eights[unit * comptime!(KEYS_OF_WORD / OWN_FLAGS) + eight];
                            its |= of_eight << comptime!((eight * OWN_FLAGS) as u32);
                        }
                        bits[at * words + word] = its;
                    }
                }
                let mut place = written + place as usize;
                #[unroll]
                for flag in 0..comptime!(OWN_FLAGS) {
                    let own = unit * comptime!(OWN_FLAGS) + flag;
                    let its = flags[own];
                    if its != 0u32 && place < room {
                        keys[at * of.room + place] = (before + own) as i32;
                        masks[at * of.room + place] = its;
                        place += 1usize;
                    }
                }
                written += all as usize;
                sync_cube();
            } else if comptime!(with_bits) {
                // Chunks after the last key have no words in the row.
                if unit < comptime!(CHUNK / KEYS_OF_WORD) && word < own_words {
                    bits[at * words + word] = 0u32;
                }
            }
        }
        sync_cube();
    }
    if is_group && unit == 0 {
        counts[at] = written as u32;
    }
}
