//! Where dropout has its seeds from.

use std::collections::HashMap;
use std::sync::{PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

/// Seeds that a table holds.
pub(crate) const SLOTS: usize = 1024;

/// The seed of a dropout: a number, or a place in a table whose numbers change between replays of a recorded computation.
///
/// ```
/// use blocksparse::{Seed, SeedTable};
///
/// let table = SeedTable::new(7);
/// let (number, place) = (Seed::from(7), table.seed());
/// assert_eq!(place.derive(3).value(), number.derive(3).value());
/// table.set(8);
/// assert_eq!(place.derive(3).value(), Seed::from(8).derive(3).value());
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Seed {
    /// A number, which is frozen where a computation is recorded.
    Value(u64),
    /// A place in a [`SeedTable`].
    Place(SeedPlace),
}

/// A place in a [`SeedTable`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SeedPlace {
    table: u32,
    slot: u32,
}

impl SeedPlace {
    /// The number of the table.
    pub fn table(&self) -> u32 {
        self.table
    }

    /// The place: words `2 · slot` (lower) and `2 · slot + 1` (upper half) of [`SeedTable::words`].
    pub fn slot(&self) -> u32 {
        self.slot
    }
}

impl From<u64> for Seed {
    fn from(seed: u64) -> Self {
        Self::Value(seed)
    }
}

impl Seed {
    /// The seed of part `index` of what has this seed: one step of SplitMix64 (Steele et al., 2014), so that neighbouring seeds and parts share no masks. Of a
    /// place in a table it is another place, which follows what is written there.
    ///
    /// # Panics
    /// If more than 1,023 places are derived in a table.
    pub fn derive(self, index: u64) -> Self {
        match self {
            Self::Value(seed) => Self::Value(hash(seed, index)),
            Self::Place(place) => {
                let mut tables = write();
                let table = &mut tables[place.table as usize];
                let slot = table.derive(place.slot, index);
                Self::Place(SeedPlace { slot, ..place })
            }
        }
    }

    /// The number that it is now.
    pub fn value(self) -> u64 {
        match self {
            Self::Value(seed) => seed,
            Self::Place(place) => read()[place.table as usize].values[place.slot as usize],
        }
    }
}

/// One step of SplitMix64 over a seed and an index.
fn hash(seed: u64, index: u64) -> u64 {
    let mix = |z: u64| {
        let z = z.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    };
    mix(mix(seed) ^ index)
}

/// A seed that is set again for every step, and those that were derived of it. It lives as long as the process: what was recorded may read it at any time.
#[derive(Debug)]
pub struct SeedTable(u32);

impl SeedTable {
    /// With a seed, of which nothing is derived yet.
    pub fn new(seed: u64) -> Self {
        let mut tables = write();
        tables.push(Table {
            values: vec![seed],
            ..Table::default()
        });
        Self(tables.len() as u32 - 1)
    }

    /// The number of the table.
    pub fn number(&self) -> u32 {
        self.0
    }

    /// The seed that is set.
    pub fn seed(&self) -> Seed {
        Seed::Place(SeedPlace {
            table: self.0,
            slot: 0,
        })
    }

    /// Sets the seed, and with it all that were derived of it.
    pub fn set(&self, seed: u64) {
        write()[self.0 as usize].set(seed);
    }

    /// How many places there are.
    pub fn places(&self) -> usize {
        read()[self.0 as usize].values.len()
    }

    /// The words of all places, lower halves first, as devices hold them: always as many.
    pub fn words(&self) -> Vec<i32> {
        let tables = read();
        let values = tables[self.0 as usize].values.iter();
        let mut words: Vec<i32> = values
            .flat_map(|&value| [value as u32 as i32, (value >> 32) as u32 as i32])
            .collect();
        words.resize(2 * SLOTS, 0);
        words
    }
}

#[derive(Debug, Default)]
struct Table {
    values: Vec<u64>,
    /// Of each place but the first: the place it was derived of, and its index there.
    origins: Vec<(u32, u64)>,
    known: HashMap<(u32, u64), u32>,
}

impl Table {
    fn derive(&mut self, slot: u32, index: u64) -> u32 {
        if let Some(&known) = self.known.get(&(slot, index)) {
            return known;
        }
        let made = self.values.len();
        assert!(
            made < SLOTS,
            "a recorded step derives at most {} seeds: derive the same ones in every step",
            SLOTS - 1
        );
        self.values.push(hash(self.values[slot as usize], index));
        self.origins.push((slot, index));
        self.known.insert((slot, index), made as u32);
        made as u32
    }

    fn set(&mut self, seed: u64) {
        self.values[0] = seed;
        // A place comes after the one it was derived of.
        for (at, &(slot, index)) in self.origins.iter().enumerate() {
            self.values[at + 1] = hash(self.values[slot as usize], index);
        }
    }
}

static TABLES: RwLock<Vec<Table>> = RwLock::new(Vec::new());

fn read() -> RwLockReadGuard<'static, Vec<Table>> {
    TABLES.read().unwrap_or_else(PoisonError::into_inner)
}

fn write() -> RwLockWriteGuard<'static, Vec<Table>> {
    TABLES.write().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_follow_the_seed_as_numbers_do() {
        let table = SeedTable::new(1);
        let of = |seed: Seed| [seed, seed.derive(0), seed.derive(5).derive(u64::MAX)];
        let places = of(table.seed());
        for seed in [1, 2, u64::MAX] {
            table.set(seed);
            assert_eq!(places.map(Seed::value), of(seed.into()).map(Seed::value));
        }
        // The root, two of it, and one of these.
        assert_eq!((places, table.places()), (of(table.seed()), 4));
        let words = table.words();
        let Seed::Place(last) = places[2] else {
            panic!("a place")
        };
        let [low, high] = [0, 1].map(|i| words[2 * last.slot() as usize + i] as u32);
        let value = u64::from(low) + (u64::from(high) << 32);
        assert_eq!((value, words.len()), (places[2].value(), 2 * SLOTS));
    }

    #[test]
    fn neighbouring_seeds_and_indices_hash_apart() {
        let hashes: std::collections::HashSet<u64> = (0..64)
            .flat_map(|seed| (0..64).map(move |index| hash(seed, index)))
            .collect();
        assert_eq!(hashes.len(), 64 * 64);
    }
}
