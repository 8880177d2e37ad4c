//! Lists of single keys per query: removal of duplicates, and conversion to bits.
//!
//! ```text
//! unique     given lists     -> the keys that a query may attend to, each once, ascending, then −1
//! bits       unique lists    -> one bit per query and key
//! ```
//!
//! Every element has one writer, so the same lists give the same places.

use cubecl::prelude::*;
use cubecl::server::Handle;

use super::query_lists::{LIST_UNITS, check_units, within};
use super::{UNITS, cubes, units};
use crate::args::buffer;
use crate::error::KernelError;

/// Keys per word of bits.
pub const KEYS_OF_WORD: usize = 32;

/// Words per unit in the sort of a list, and entries in shared memory at a time.
const OWN_WORDS: usize = 8;
const ENTRIES: usize = 512;

/// Largest length of a list that one unit sorts.
const FEW: usize = 32;

/// Sizes of the lists of single keys of a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct KeyListSizes {
    /// Number of batch entries times heads with lists.
    pub lists: usize,
    /// Queries per batch entry and head.
    pub seq_q: usize,
    /// Number of keys.
    pub seq_kv: usize,
    /// Entries per query's list.
    pub most: usize,
}

impl KeyListSizes {
    /// Sizes of `lists` lists per query, with the numbers of queries and keys and the entries per query.
    pub fn new(lists: usize, [seq_q, seq_kv]: [usize; 2], most: usize) -> Self {
        Self {
            lists,
            seq_q,
            seq_kv,
            most,
        }
    }

    fn elements(&self) -> usize {
        self.lists * self.seq_q * self.most
    }

    fn words(&self) -> usize {
        self.seq_kv.div_ceil(KEYS_OF_WORD)
    }

    /// Number of elements of the lists, or words of their bits if those are more.
    pub fn largest(&self) -> usize {
        self.lists * self.seq_q * self.most.max(self.words())
    }
}

/// Removes duplicates from `given`, i32 `[lists, seq_q, most]`: keys in any order, negative for none. `unique` gets each existing key once, in ascending
/// order, then −1. With `causal`, a query has no keys after its own position. The last query is aligned to the last key.
///
/// # Errors
/// [`KernelError`] if the elements do not fit 32 bits, or the device's cubes are too small.
pub fn unique_keys(
    client: &Client,
    sizes: &KeyListSizes,
    given: &Handle,
    causal: bool,
    unique: &Handle,
) -> Result<(), KernelError> {
    check_units(client)?;
    within("the keys of lists", sizes.elements())?;
    let rows = sizes.lists * sizes.seq_q;
    let of = RowsOfKeysLaunch::new(rows, sizes.seq_q, sizes.seq_kv, sizes.most);
    let (given, unique) = (
        buffer(given, sizes.elements()),
        buffer(unique, sizes.elements()),
    );
    let (address, causal) = (AddressType::U32, u32::from(causal));
    // SAFETY: a unit, or a cube, reads and writes the list of its row. Those beyond the last row do nothing.
    unsafe {
        if sizes.most <= FEW {
            let (count, dim) = (units(client, rows), CubeDim::new_1d(UNITS));
            few::launch_unchecked(client, count, dim, address, given, unique, of, causal);
        } else {
            let (count, dim) = (cubes(client, rows), CubeDim::new_1d(LIST_UNITS as u32));
            unique::launch_unchecked(client, count, dim, address, given, unique, of, causal);
        }
    }
    Ok(())
}

/// Consecutive queries of every list.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Queries {
    /// First query.
    pub first: usize,
    /// Number of queries.
    pub count: usize,
}

/// Returns the keys of each query of [`unique_keys`]'s lists, one bit each: u32 `[lists, seq_q, seq_kv / 32]`, rounded up.
///
/// # Errors
/// Those of [`unique_keys`].
pub fn pair_bits(
    client: &Client,
    sizes: &KeyListSizes,
    unique: &Handle,
) -> Result<Handle, KernelError> {
    let all = Queries {
        first: 0,
        count: sizes.seq_q,
    };
    row_bits(client, sizes, unique, all)
}

/// Like [`pair_bits`], for some queries.
pub(super) fn row_bits(
    client: &Client,
    sizes: &KeyListSizes,
    unique: &Handle,
    queries: Queries,
) -> Result<Handle, KernelError> {
    check_units(client)?;
    within("the keys of lists", sizes.elements())?;
    let (words, rows) = (sizes.words(), sizes.lists * queries.count);
    within("the bits of lists", rows * words)?;
    let made = client.empty((rows * words).max(1) * size_of::<u32>());
    // SAFETY: a cube reads the list of its row and writes its bits. Cubes beyond the last row access nothing.
    unsafe {
        bits::launch_unchecked(
            client,
            cubes(client, rows),
            CubeDim::new_1d(LIST_UNITS as u32),
            AddressType::U32,
            buffer(unique, sizes.elements()),
            buffer(&made, rows * words),
            RowsOfKeysLaunch::new(rows, queries.count, sizes.seq_kv, sizes.most),
            words,
            queries.first,
            sizes.seq_q,
        );
    }
    Ok(made)
}

/// Sizes of the rows of lists.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
struct RowsOfKeys {
    /// Rows of all lists.
    count: usize,
    /// Rows per list.
    queries: usize,
    keys: usize,
    most: usize,
}

/// Returns how many keys the query of a row may attend to: those up to its own position if `causal`.
#[cube]
fn seen_by(row: usize, of: &RowsOfKeys, causal: u32) -> i32 {
    let mut seen = of.keys as i32;
    if causal != 0u32 {
        let position = (row % of.queries) as i32 + of.keys as i32 - of.queries as i32;
        seen = min(seen, max(position + 1i32, 0i32));
    }
    seen
}

/// Removes duplicates from short lists. A unit has a row, and reads all of its entries for each output.
#[cube(launch_unchecked, address_type = "dynamic")]
fn few(given: &[i32], unique: &mut [i32], of: RowsOfKeys, causal: u32) {
    let row = ABSOLUTE_POS;
    if row < of.count {
        let own = row * of.most;
        let seen = seen_by(row, &of, causal);
        let mut last = (-1i32).runtime();
        for place in 0..of.most {
            let mut next = seen;
            for entry in 0..of.most {
                let key = given[own + entry];
                next = select(key > last, min(key, next), next);
            }
            unique[own + place] = select(next < seen, next, -1i32);
            last = next;
        }
    }
}

/// Removes duplicates from long lists. A cube has a row, and a unit has consecutive words of its bits and reads all entries for them.
#[cube(launch_unchecked, address_type = "dynamic")]
fn unique(given: &[i32], unique: &mut [i32], of: RowsOfKeys, causal: u32) {
    // Every unit of a cube reaches every barrier. A cube beyond the last row has no entries.
    let is_row = CUBE_POS < of.count;
    let row = CUBE_POS.min(of.count - 1);
    let most = select(is_row, of.most, 0usize);
    let own = row * of.most;
    let unit = UNIT_POS as usize;
    let seen = seen_by(row, &of, causal);
    let mut entries = Shared::<[i32]>::new_slice(comptime!(ENTRIES));
    let mut bits = Shared::<[u32]>::new_slice(comptime!(LIST_UNITS * OWN_WORDS));
    let mut totals = Shared::<[u32]>::new_slice(comptime!(LIST_UNITS));
    let chunk = comptime!(LIST_UNITS * OWN_WORDS * KEYS_OF_WORD);
    let first_word = unit * comptime!(OWN_WORDS);
    let mut written = 0usize.runtime();
    for part in 0..of.keys.div_ceil(chunk) {
        for word in 0..comptime!(OWN_WORDS) {
            bits[first_word + word] = 0u32;
        }
        let before = (part * chunk) as i32;
        for step in 0..most.div_ceil(comptime!(ENTRIES)) {
            let mut at = unit;
            while at < comptime!(ENTRIES) {
                let entry = step * comptime!(ENTRIES) + at;
                entries[at] = -1i32;
                if entry < most {
                    let key = given[own + entry];
                    // Keys of other parts are below 0, or beyond the last unit's words.
                    entries[at] = select(key < seen, key - before, -1i32);
                }
                at += comptime!(LIST_UNITS);
            }
            sync_cube();
            for at in 0..(most - step * comptime!(ENTRIES)).min(comptime!(ENTRIES)) {
                let key = entries[at];
                if key >= 0i32 && key as usize / comptime!(OWN_WORDS * KEYS_OF_WORD) == unit {
                    let word = key as usize / comptime!(KEYS_OF_WORD);
                    bits[word] |= 1u32 << (key as u32 % comptime!(KEYS_OF_WORD as u32));
                }
            }
            sync_cube();
        }
        let mut count = 0u32.runtime();
        for word in 0..comptime!(OWN_WORDS) {
            count += bits[first_word + word].count_ones();
        }
        totals[unit] = count;
        sync_cube();
        let mut place = written as u32;
        let mut all = 0u32.runtime();
        for other in 0..comptime!(LIST_UNITS) {
            let total = totals[other];
            place += select(other < unit, total, 0u32);
            all += total;
        }
        let mut place = place as usize;
        for word in 0..comptime!(OWN_WORDS) {
            let its = bits[first_word + word];
            if its != 0u32 {
                let first = before + ((first_word + word) * comptime!(KEYS_OF_WORD)) as i32;
                for bit in 0..comptime!(KEYS_OF_WORD as u32) {
                    if (its >> bit) & 1u32 != 0u32 && place < most {
                        unique[own + place] = first + bit as i32;
                        place += 1usize;
                    }
                }
            }
        }
        written += all as usize;
        sync_cube();
    }
    let mut at = written + unit;
    while at < most {
        unique[own + at] = -1i32;
        at += comptime!(LIST_UNITS);
    }
}

/// Converts lists to `bits` `[rows, words]`, for the queries from `first` on of the `all` queries of a list. A cube has a row. The unit with the first key
/// of a word writes it.
#[cube(launch_unchecked, address_type = "dynamic")]
fn bits(unique: &[i32], bits: &mut [u32], of: RowsOfKeys, words: usize, first: usize, all: usize) {
    let is_row = CUBE_POS < of.count;
    let row = CUBE_POS.min(of.count - 1);
    let listed = row / of.queries * all + first + row % of.queries;
    let (most, room) = (
        select(is_row, of.most, 0usize),
        select(is_row, words, 0usize),
    );
    let (own, own_bits) = (listed * of.most, row * words);
    let mut word = UNIT_POS as usize;
    while word < room {
        bits[own_bits + word] = 0u32;
        word += comptime!(LIST_UNITS);
    }
    sync_storage();
    let mut entry = UNIT_POS as usize;
    while entry < most {
        let key = unique[own + entry];
        let word = key / comptime!(KEYS_OF_WORD as i32);
        let mut is_first = key >= 0i32 && (word as usize) < words;
        if is_first && entry > 0 {
            is_first = unique[own + entry - 1] / comptime!(KEYS_OF_WORD as i32) != word;
        }
        if is_first {
            let mut its = 0u32.runtime();
            let mut at = entry;
            let mut key = key;
            while key >= 0i32 && key / comptime!(KEYS_OF_WORD as i32) == word {
                its |= 1u32 << (key as u32 % comptime!(KEYS_OF_WORD as u32));
                at += 1;
                key = -1i32;
                if at < most {
                    key = unique[own + at];
                }
            }
            bits[own_bits + word as usize] = its;
        }
        entry += comptime!(LIST_UNITS);
    }
}
