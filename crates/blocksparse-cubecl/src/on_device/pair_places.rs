//! Locations of records of pairs: records of a key are consecutive, in the order of queries.
//!
//! ```text
//! bits      lists of some queries    -> one bit per query and key
//! turned    bits                     -> their transpose, rows of keys
//! totals    transposed bits          -> number of pairs per 256 keys
//! firsts    transposed bits, totals  -> number of pairs before each word of a key's bits
//! ```
//!
//! The place of a pair is that of its word, plus the number of lower bits set in the word.

use cubecl::prelude::*;
use cubecl::server::Handle;

use super::bits::turn_pairs;
use super::cubes;
use super::key_lists::{KeyListSizes, Queries, row_bits};
use super::query_lists::within;
use crate::args::buffer;
use crate::error::KernelError;

/// Keys per cube, and its units.
const KEYS: usize = 256;

/// Queries that have each key.
#[derive(Clone, Debug)]
pub struct BitsOfKeys {
    /// One bit per query, u32 `[lists, seq_kv, words]`.
    pub bits: Handle,
    /// Words per key.
    pub words: usize,
}

impl BitsOfKeys {
    /// Transposes bits by queries, u32 `[lists, seq_q, seq_kv / 32]`, rounded up.
    pub fn new(client: &Client, by_rows: &Handle, lists: usize, lengths: [usize; 2]) -> Self {
        Self {
            bits: turn_pairs(client, by_rows, lists, lengths),
            words: lengths[0].div_ceil(32),
        }
    }
}

/// Places of the pairs of some queries.
#[derive(Clone, Debug)]
pub struct PairPlaces {
    /// Bits of these queries, and of others.
    pub bits: BitsOfKeys,
    /// First word of a key that belongs to these queries.
    pub first_word: usize,
    /// Number of the list's pairs before each word, and after the last word of a key those up to its end: u32 `[lists, seq_kv, words + 1]`.
    pub firsts: Handle,
    /// Words per key that belong to these queries.
    pub words: usize,
}

/// Returns the places of the pairs of some queries of [`unique_keys`](super::unique_keys)'s lists.
///
/// # Errors
/// [`KernelError`] if the elements do not fit 32 bits, or the device's cubes are too small.
pub fn pair_places(
    client: &Client,
    sizes: &KeyListSizes,
    unique: &Handle,
    queries: Queries,
) -> Result<PairPlaces, KernelError> {
    let (lists, lengths) = (sizes.lists, [queries.count, sizes.seq_kv]);
    let by_rows = row_bits(client, sizes, unique, queries)?;
    let bits = BitsOfKeys::new(client, &by_rows, lists, lengths);
    let all = Queries {
        first: 0,
        count: queries.count,
    };
    places_of(client, [lists, sizes.seq_kv], bits, all)
}

/// Returns the places of the pairs of some queries, for these numbers of lists and keys. The index of the first query must be a multiple of 32.
///
/// # Errors
/// Those of [`pair_places`].
pub fn places_of(
    client: &Client,
    [lists, keys]: [usize; 2],
    bits: BitsOfKeys,
    queries: Queries,
) -> Result<PairPlaces, KernelError> {
    let (first_word, words) = (queries.first / 32, queries.count.div_ceil(32));
    within("the places of pairs", lists * keys * (words + 1))?;
    let in_bits = lists * keys * bits.words;
    let of_keys = keys.div_ceil(KEYS);
    let made = |len: usize| client.empty(len * size_of::<u32>());
    let (totals, firsts) = (made(lists * of_keys), made(lists * keys * (words + 1)));
    let shape = || ByKeysLaunch::new(lists, keys, of_keys, words, first_word, bits.words);
    let dim = CubeDim::new_1d(KEYS as u32);
    // SAFETY: a cube has 256 keys of a list. It reads the existing words of those, and writes their total and the words' firsts. Cubes beyond the last list
    // write nothing.
    unsafe {
        totals_of::launch_unchecked(
            client,
            cubes(client, lists * of_keys),
            dim,
            AddressType::U32,
            buffer(&bits.bits, in_bits),
            buffer(&totals, lists * of_keys),
            shape(),
        );
        firsts_of::launch_unchecked(
            client,
            cubes(client, lists * of_keys),
            dim,
            AddressType::U32,
            buffer(&bits.bits, in_bits),
            buffer(&totals, lists * of_keys),
            buffer(&firsts, lists * keys * (words + 1)),
            shape(),
        );
    }
    Ok(PairPlaces {
        bits,
        first_word,
        firsts,
        words,
    })
}

/// Sizes of bits by keys.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
struct ByKeys {
    lists: usize,
    /// Keys per list.
    keys: usize,
    /// Cubes per list.
    cubes: usize,
    /// Words per key that are counted.
    words: usize,
    /// First counted word, and the number of all words per key.
    first_word: usize,
    all_words: usize,
}

/// Returns the number of pairs of the unit's key, 0 if there is no key.
#[cube]
fn count_of(bits: &[i32], row: usize, is_key: bool, of: &ByKeys) -> u32 {
    let mut count = 0u32.runtime();
    let words = select(is_key, of.words, 0usize);
    for word in 0..words {
        count += (bits[row * of.all_words + of.first_word + word] as u32).count_ones();
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
            place += (bits[row * of.all_words + of.first_word + word] as u32).count_ones();
        }
        firsts[row * (of.words + 1) + of.words] = place;
    }
}
