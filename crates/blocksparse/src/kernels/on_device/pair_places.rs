//! Where records of pairs lie: those of a key are neighbours, in the order of queries.
//!
//! ```text
//! bits      lists of some queries    -> a bit for each query and key
//! turned    these                    -> the same by keys
//! totals    bits by keys             -> pairs of each 256 keys
//! firsts    both                     -> the pairs before each word of a key's bits
//! ```
//!
//! So the place of a pair is that of its word, and the bits before its own.

use cubecl::prelude::*;
use cubecl::server::Handle;

use super::bits::turn_pairs;
use super::cubes;
use super::key_lists::{KeyListSizes, Queries, row_bits};
use super::query_lists::within;
use crate::kernels::args::buffer;
use crate::kernels::error::KernelError;

/// Keys of a cube, and its units.
const KEYS: usize = 256;

/// Which keys some queries listed, by keys.
#[derive(Clone, Debug)]
pub struct PairPlaces {
    /// A bit for each query, u32 `[lists, seq_kv, words]`.
    pub bits: Handle,
    /// Pairs of the list before those of each word, and behind the last word those up to its end: u32 `[lists, seq_kv, words + 1]`.
    pub firsts: Handle,
    /// Words of a key.
    pub words: usize,
}

/// The pairs of some queries of [`unique_keys`](super::unique_keys)'s lists.
///
/// # Errors
/// [`KernelError`] if the numbers are more than 32 bits count, or the device's cubes are too small.
pub fn pair_places(
    client: &Client,
    sizes: &KeyListSizes,
    unique: &Handle,
    queries: Queries,
) -> Result<PairPlaces, KernelError> {
    let (lists, keys) = (sizes.lists, sizes.seq_kv);
    let words = queries.count.div_ceil(32);
    within("the places of pairs", lists * keys * (words + 1))?;
    let by_rows = row_bits(client, sizes, unique, queries)?;
    let bits = turn_pairs(client, &by_rows, lists, [queries.count, keys]);
    let of_keys = keys.div_ceil(KEYS);
    let made = |len: usize| client.empty(len * size_of::<u32>());
    let (totals, firsts) = (made(lists * of_keys), made(lists * keys * (words + 1)));
    let shape = || ByKeysLaunch::new(lists, keys, of_keys, words);
    let dim = CubeDim::new_1d(KEYS as u32);
    // SAFETY: a cube has 256 keys of a list, of which it reads the words and writes the total and the words' firsts, as far as there are any; cubes beyond the
    // last list write nothing.
    unsafe {
        totals_of::launch_unchecked(
            client,
            cubes(client, lists * of_keys),
            dim,
            AddressType::U32,
            buffer(&bits, lists * keys * words),
            buffer(&totals, lists * of_keys),
            shape(),
        );
        firsts_of::launch_unchecked(
            client,
            cubes(client, lists * of_keys),
            dim,
            AddressType::U32,
            buffer(&bits, lists * keys * words),
            buffer(&totals, lists * of_keys),
            buffer(&firsts, lists * keys * (words + 1)),
            shape(),
        );
    }
    Ok(PairPlaces {
        bits,
        firsts,
        words,
    })
}

/// Bits by keys.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
struct ByKeys {
    lists: usize,
    /// Keys of a list.
    keys: usize,
    /// Cubes of a list.
    cubes: usize,
    /// Words of a key.
    words: usize,
}

/// Pairs of the unit's key, 0 where there is none.
#[cube]
fn count_of(bits: &[i32], row: usize, is_key: bool, of: &ByKeys) -> u32 {
    let mut count = 0u32.runtime();
    let words = select(is_key, of.words, 0usize);
    for word in 0..words {
        count += (bits[row * of.words + word] as u32).count_ones();
    }
    count
}

#[cube(launch_unchecked, address_type = "dynamic")]
fn totals_of(bits: &[i32], totals: &mut [u32], of: ByKeys) {
    let unit = UNIT_POS as usize;
    let at = CUBE_POS.min(of.lists * of.cubes - 1);
    let key = at % of.cubes * comptime!(KEYS) + unit;
    let row = at / of.cubes * of.keys + key;
    let mut counts = Shared::<[u32]>::new_slice(comptime!(KEYS));
    counts[unit] = count_of(bits, row, key < of.keys, &of);
    sync_cube();
    if unit == 0 && CUBE_POS < of.lists * of.cubes {
        let mut total = 0u32.runtime();
        for other in 0..comptime!(KEYS) {
            total += counts[other];
        }
        totals[at] = total;
    }
}

#[cube(launch_unchecked, address_type = "dynamic")]
fn firsts_of(bits: &[i32], totals: &[u32], firsts: &mut [u32], of: ByKeys) {
    let unit = UNIT_POS as usize;
    let at = CUBE_POS.min(of.lists * of.cubes - 1);
    let is_one = CUBE_POS < of.lists * of.cubes;
    let key = at % of.cubes * comptime!(KEYS) + unit;
    let row = at / of.cubes * of.keys + key;
    let mut counts = Shared::<[u32]>::new_slice(comptime!(KEYS));
    let mut befores = Shared::<[u32]>::new_slice(comptime!(KEYS));
    counts[unit] = count_of(bits, row, key < of.keys, &of);
    let mut before = 0u32.runtime();
    let mut cube = unit;
    while cube < at % of.cubes {
        before += totals[at / of.cubes * of.cubes + cube];
        cube += comptime!(KEYS);
    }
    befores[unit] = before;
    sync_cube();
    let mut place = 0u32.runtime();
    for other in 0..comptime!(KEYS) {
        place += befores[other];
        place += select(other < unit, counts[other], 0u32);
    }
    if is_one && key < of.keys {
        for word in 0..of.words {
            firsts[row * (of.words + 1) + word] = place;
            place += (bits[row * of.words + word] as u32).count_ones();
        }
        firsts[row * (of.words + 1) + of.words] = place;
    }
}
