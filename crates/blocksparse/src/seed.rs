//! Seeds of dropout.

use std::any::Any;
use std::collections::{BTreeMap, HashMap, VecDeque};
use std::sync::{Arc, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

use crate::arith::split_mix;

/// Number of seeds in a table.
pub const SLOTS: usize = 1024;
/// Number of dropped tables whose values are still known, because a backward pass may run after its seed was dropped.
const KNOWN_GONE: usize = 1024;

/// The seed of a dropout: a number, or a slot in a table whose values change between replays of a recorded computation.
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
    /// A number. It is constant in a recorded computation.
    Value(u64),
    /// A slot in a [`SeedTable`].
    Place(SeedPlace),
}

/// A slot in a [`SeedTable`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SeedPlace {
    table: u32,
    slot: u32,
}

impl SeedPlace {
    /// Returns the number of the table.
    pub fn table(&self) -> u32 {
        self.table
    }

    /// Returns the slot. Its words are `2 · slot` (lower half) and `2 · slot + 1` (upper half) of [`SeedTable::words`].
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
    /// Returns the seed of part `index`: one step of SplitMix64 (Steele et al., 2014), so that adjacent seeds and parts share no masks. A slot of a
    /// table gives another slot, which changes with the first. A slot of a dropped table gives a number.
    ///
    /// # Panics
    /// If more than 1,023 slots are derived in a table, or as [`value`](Self::value).
    pub fn derive(self, index: u64) -> Self {
        let Self::Place(place) = self else {
            return Self::Value(hash(self.value(), index));
        };
        if let Some(table) = write().live.get_mut(&place.table) {
            let slot = table.derive(place.slot, index);
            return Self::Place(SeedPlace { slot, ..place });
        }
        Self::Value(hash(self.value(), index))
    }

    /// Returns the current number. For a dropped table it is the last number.
    ///
    /// # Panics
    /// If the seed's table was dropped and 1,024 other tables were dropped since.
    pub fn value(self) -> u64 {
        match self {
            Self::Value(seed) => seed,
            Self::Place(place) => {
                let value = read().value(place);
                value.expect("the table of a seed was dropped, and 1,024 more since then")
            }
        }
    }
}

/// Hashes a seed and an index with SplitMix64.
fn hash(seed: u64, index: u64) -> u64 {
    split_mix(split_mix(seed) ^ index)
}

/// A seed that is set anew for every step, and the seeds derived from it. Slots of a dropped table keep their last values.
#[derive(Debug)]
pub struct SeedTable(u32);

impl SeedTable {
    /// Creates a table with a seed and no derived seeds.
    pub fn new(seed: u64) -> Self {
        let mut tables = write();
        let number = tables.next;
        tables.next = number.checked_add(1).expect("fewer tables than 2³²");
        let table = Table {
            values: vec![seed],
            ..Table::default()
        };
        tables.live.insert(number, table);
        Self(number)
    }

    /// Returns the number of the table.
    pub fn number(&self) -> u32 {
        self.0
    }

    /// Returns the seed of the table itself.
    pub fn seed(&self) -> Seed {
        Seed::Place(SeedPlace {
            table: self.0,
            slot: 0,
        })
    }

    /// Sets the seed, and with it all derived seeds.
    pub fn set(&self, seed: u64) {
        let mut tables = write();
        let table = tables.live.get_mut(&self.0);
        table.expect("it lives").set(seed);
    }

    /// Returns the number of used slots.
    pub fn places(&self) -> usize {
        read().live[&self.0].values.len()
    }

    /// Returns the words of all slots, lower halves first, as devices store them. Their number is constant.
    pub fn words(&self) -> Vec<i32> {
        let tables = read();
        let values = tables.live[&self.0].values.iter();
        let mut words: Vec<i32> = values
            .flat_map(|&value| [value as u32 as i32, (value >> 32) as u32 as i32])
            .collect();
        words.resize(2 * SLOTS, 0);
        words
    }
}

impl Drop for SeedTable {
    fn drop(&mut self) {
        let gone = write().forget(self.0);
        // Device memory is released without a lock.
        drop(gone);
    }
}

/// All tables of the process, by number.
struct Tables {
    next: u32,
    live: BTreeMap<u32, Table>,
    /// Numbers and last values of dropped tables, the latest last.
    gone: VecDeque<(u32, Box<[u64]>)>,
}

impl Tables {
    fn value(&self, place: SeedPlace) -> Option<u64> {
        let values = match self.live.get(&place.table) {
            Some(table) => &table.values[..],
            None => {
                let mut gone = self.gone.iter();
                &gone.find(|(number, _)| *number == place.table)?.1
            }
        };
        values.get(place.slot as usize).copied()
    }

    fn forget(&mut self, number: u32) -> Option<Table> {
        let mut table = self.live.remove(&number)?;
        let values = std::mem::take(&mut table.values);
        self.gone.push_back((number, values.into_boxed_slice()));
        if self.gone.len() > KNOWN_GONE {
            self.gone.pop_front();
        }
        Some(table)
    }
}

/// Attaches a table's device copy to the table and replaces the previous one. It is released with the table. For a dropped table nothing is attached.
pub fn keep_on_device(table: u32, words: Arc<dyn Any + Send + Sync>) {
    let before = match write().live.get_mut(&table) {
        Some(table) => table.on_device.replace(words),
        None => Some(words),
    };
    drop(before);
}

/// Source from which kernels read a slot.
pub enum Read {
    /// The device copy of the table, if there is one.
    OnDevice(Option<Arc<dyn Any + Send + Sync>>),
    /// The last number of a dropped table.
    Number(u64),
}

/// Returns the source from which kernels read a slot.
///
/// # Panics
/// As [`Seed::value`].
pub fn read_place(place: SeedPlace) -> Read {
    if let Some(table) = read().live.get(&place.table) {
        return Read::OnDevice(table.on_device.clone());
    }
    Read::Number(Seed::Place(place).value())
}

#[derive(Debug, Default)]
struct Table {
    /// The device copy that kernels read.
    on_device: Option<Arc<dyn Any + Send + Sync>>,
    values: Vec<u64>,
    /// Parent slot and index of each slot but the first.
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
        // A slot comes after its parent.
        for (at, &(slot, index)) in self.origins.iter().enumerate() {
            self.values[at + 1] = hash(self.values[slot as usize], index);
        }
    }
}

static TABLES: RwLock<Tables> = RwLock::new(Tables {
    next: 0,
    live: BTreeMap::new(),
    gone: VecDeque::new(),
});

fn read() -> RwLockReadGuard<'static, Tables> {
    TABLES.read().unwrap_or_else(PoisonError::into_inner)
}

fn write() -> RwLockWriteGuard<'static, Tables> {
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
        // The root, two children of it, and one grandchild.
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
    fn tables_that_are_dropped_leave_little_behind() {
        let on_device = Arc::new(());
        let table = SeedTable::new(3);
        let places = [table.seed(), table.seed().derive(1)];
        let number = table.number();
        write().live.get_mut(&number).unwrap().on_device = Some(on_device.clone());
        drop(table);
        // The device copy is released, and the slots keep their values.
        assert_eq!(Arc::strong_count(&on_device), 1);
        let numbers = [3.into(), Seed::from(3).derive(1)];
        assert_eq!(places.map(Seed::value), numbers.map(Seed::value));
        assert_eq!(places[1].derive(5), numbers[1].derive(5));
        // One table for each of many epochs.
        let made: Vec<u32> = (0..3 * KNOWN_GONE)
            .map(|seed| {
                let table = SeedTable::new(seed as u64);
                table.seed().derive(0);
                table.number()
            })
            .collect();
        let tables = read();
        assert!(made.iter().all(|number| !tables.live.contains_key(number)));
        assert!(tables.gone.len() <= KNOWN_GONE);
        drop(tables);
        let old = std::panic::catch_unwind(|| places[0].value());
        assert!(old.is_err());
    }

    #[test]
    fn neighbouring_seeds_and_indices_hash_apart() {
        let hashes: std::collections::HashSet<u64> = (0..64)
            .flat_map(|seed| (0..64).map(move |index| hash(seed, index)))
            .collect();
        assert_eq!(hashes.len(), 64 * 64);
    }
}
