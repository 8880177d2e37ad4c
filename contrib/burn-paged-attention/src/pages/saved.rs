//! Saving and loading of a sequence, to a file or another pool.

use std::ops::Range;

use serde::{Deserialize, Serialize};

use super::config::MOST_POSITIONS;
use super::pool::{PagePool, SequenceId};
use super::region::Region;
use super::sequence::{Row, Sequence};
use super::{CacheError, KvRetention};

const VERSION: u32 = 1;

/// A sequence of the block tables without its pages: the positions of its stored keys, in order. Keys and values are saved separately, in the same
/// order, which is that of [`PagePool::slot_keys`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SavedSequence {
    version: u32,
    /// Text of the pattern.
    pattern: String,
    heads: usize,
    kv_heads: usize,
    residency: KvRetention,
    next: usize,
    oldest: usize,
    rows: Vec<SavedRow>,
}

/// Positions of a table row's keys, as runs of first position and length.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct SavedRow {
    permanent: Vec<(usize, usize)>,
    timed: Vec<(usize, usize)>,
}

impl SavedSequence {
    /// Returns the tokens of the sequence.
    pub fn tokens(&self) -> usize {
        self.next
    }
}

impl PagePool {
    /// Saves a sequence's block table.
    ///
    /// # Errors
    /// [`CacheError::Unknown`]
    pub fn save(&self, id: SequenceId) -> Result<SavedSequence, CacheError> {
        let sequence = self.sequence(id)?;
        let runs = |region: &Region| region.runs().map(|run| (run.start, run.len())).collect();
        let row = |row: &Row| SavedRow {
            permanent: runs(&row.permanent),
            timed: runs(&row.timed),
        };
        Ok(SavedSequence {
            version: VERSION,
            pattern: self.config.pattern.to_string(),
            heads: self.config.heads,
            kv_heads: self.config.kv_heads,
            residency: sequence.residency,
            next: sequence.next,
            oldest: sequence.oldest,
            rows: sequence.rows.iter().map(row).collect(),
        })
    }

    /// Returns the number of keys that each table row of a saved sequence stores. Checks that the sequence fits this pool: the same layers, and runs
    /// of keys that ascend and belong to its tokens. Only [`Self::load`] checks them against the pattern.
    ///
    /// # Errors
    /// [`CacheError::Mismatch`] if the pattern, heads or table rows differ from the pool's; [`CacheError::Corrupt`].
    pub fn saved_keys(&self, saved: &SavedSequence) -> Result<Vec<usize>, CacheError> {
        CacheError::expect_same("version", VERSION, saved.version)?;
        CacheError::expect_same("pattern", &self.config.pattern, &saved.pattern)?;
        CacheError::expect_same("heads", self.config.heads, saved.heads)?;
        CacheError::expect_same("KV heads", self.config.kv_heads, saved.kv_heads)?;
        CacheError::expect_same("table rows", self.table_rows(), saved.rows.len())?;
        let residency = saved.residency;
        let corrupt = |error: CacheError| CacheError::corrupt(error.to_string());
        residency.validate().map_err(corrupt)?;
        self.check_evictable(residency).map_err(corrupt)?;
        if saved.next > MOST_POSITIONS {
            return Err(CacheError::corrupt(format!("{} tokens", saved.next)));
        }
        let keys = saved.rows.iter().map(|row| {
            let [permanent, timed] =
                [&row.permanent, &row.timed].map(|runs| count(runs, saved.next));
            Ok(permanent? + timed?)
        });
        keys.collect()
    }

    /// Adds a saved sequence, in pages of this pool, whose size may differ. Also returns, for each table row, the slots to write its keys and values
    /// to, as `page · page_size + slot`, in the order in which they were saved.
    ///
    /// Input is not trusted: the keys are compared with the pattern, in as many steps as the sequence has tokens.
    ///
    /// # Errors
    /// [`CacheError::Mismatch`] if the pattern, heads or table rows differ from the pool's; [`CacheError::OutOfPages`]; [`CacheError::Corrupt`].
    pub fn load(
        &mut self,
        saved: &SavedSequence,
    ) -> Result<(SequenceId, Vec<Vec<i32>>), CacheError> {
        self.saved_keys(saved)?;
        let page_size = self.config.page_size;
        let mut asked = 0usize;
        for row in &saved.rows {
            for runs in [&row.permanent, &row.timed] {
                asked += count(runs, saved.next)?.div_ceil(page_size);
            }
        }
        let free = self.unused;
        if asked > free {
            return Err(CacheError::OutOfPages { asked, free });
        }
        // Pages are taken once everything else is valid. Until then the entries are invalid.
        let region = |runs: &[(usize, usize)]| -> Region {
            let keys = runs.iter().map(|&(_, keys)| keys).sum::<usize>();
            let mut region = Region::default();
            region
                .pages
                .extend((0..keys.div_ceil(page_size)).map(|_| u32::MAX));
            for position in runs.iter().flat_map(|&(first, keys)| first..first + keys) {
                region.push(position, page_size);
            }
            region
        };
        let mut sequence = Sequence::new(saved.residency, 0);
        sequence.next = saved.next;
        sequence.oldest = saved.oldest;
        for row in &saved.rows {
            let mut row = Row {
                permanent: region(&row.permanent),
                timed: region(&row.timed),
                timed_entry: 0,
            };
            row.place();
            sequence.rows.push(row);
        }
        self.verify_sequence("the saved sequence", &sequence)?;

        let mut slots = Vec::with_capacity(sequence.rows.len());
        for row in &mut sequence.rows {
            let mut of_row = Vec::new();
            for region in [&mut row.permanent, &mut row.timed] {
                for page in &mut region.pages {
                    *page = self.take();
                }
                of_row.extend(region.slot_numbers(page_size));
            }
            slots.push(of_row);
        }
        Ok((self.enter(sequence), slots))
    }
}

/// Counts the keys of ranges of positions. Checks that they ascend and are below `tokens`.
fn count(runs: &[(usize, usize)], tokens: usize) -> Result<usize, CacheError> {
    let mut previous = 0;
    let mut count = 0;
    for &(first, keys) in runs {
        let run: Range<usize> = first..first.saturating_add(keys);
        if run.start < previous || run.is_empty() || run.end > tokens {
            let what = format!(
                "{keys} keys from position {first} on, after {previous}, of {tokens} tokens"
            );
            return Err(CacheError::corrupt(what));
        }
        previous = run.end;
        count += keys;
    }
    Ok(count)
}
