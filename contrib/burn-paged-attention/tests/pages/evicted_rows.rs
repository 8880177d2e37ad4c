//! Sequences with eviction: the block tables against lists of each slot's contents.

use std::collections::BTreeMap;

use blocksparse::Pattern;
use burn_paged_attention::pages::{CacheError, KvRetention, PagePool, PoolConfig, SequenceId};
use proptest::prelude::*;

use crate::tables::{joined, pages_of, small, stored};

/// Sequences, and the contents of the slots.
struct Machine {
    pool: PagePool,
    /// Keys of each row of a sequence, in order, and the least length that it can be rolled back to.
    models: BTreeMap<SequenceId, (Vec<Vec<u64>>, usize)>,
    memory: Vec<u64>,
    next_key: u64,
    rollback: usize,
}

impl Machine {
    fn new(pages: usize, rows: usize, rollback: usize) -> Self {
        let config = PoolConfig::new(pages).with_small_pages().with_page_size(4);
        let config = config.with_pattern(Pattern::causal(), rows, rows);
        let config = config.with_table_rows(rows).with_rollback(rollback);
        Self {
            pool: PagePool::new(config).unwrap(),
            models: BTreeMap::new(),
            memory: vec![0; pages * 4],
            next_key: 1,
            rollback,
        }
    }

    fn check(&self) {
        self.pool.verify().unwrap();
        for (&id, (rows, _)) in &self.models {
            let len = self.pool.len(id).unwrap();
            for (row, keys) in rows.iter().enumerate() {
                let slots = self.pool.slot_keys(id, row).unwrap();
                let got: Vec<u64> = (slots.iter())
                    .map(|key| self.memory[key.slot.page * 4 + key.slot.slot])
                    .collect();
                assert_eq!(&got, keys, "{id}, row {row}");
                let first = len - keys.len();
                assert!(slots.iter().map(|key| key.position).eq(first..len));
            }
        }
    }

    fn append(&mut self, id: SequenceId, tokens: usize) {
        let Ok(writes) = self.pool.append(id, tokens) else {
            return;
        };
        for copy in &writes.copies {
            for slot in copy.slots.clone() {
                self.memory[copy.to * 4 + slot] = self.memory[copy.from * 4 + slot];
            }
        }
        let (rows, _) = self.models.get_mut(&id).unwrap();
        for (row, keys) in rows.iter_mut().enumerate() {
            for token in 0..tokens {
                self.next_key += 1;
                let slot = writes.slot(row, token).unwrap();
                self.memory[slot.page * 4 + slot.slot] = self.next_key;
                keys.push(self.next_key);
            }
        }
    }

    /// Retains the keys selected by the bits of a number.
    fn retain(&mut self, id: SequenceId, bits: u64) {
        let (rows, _) = &self.models[&id];
        let oldest = self.pool.oldest(id).unwrap();
        let len = self.pool.len(id).unwrap();
        let tail = len - oldest.max(len.saturating_sub(self.rollback));
        let kept: Vec<Vec<u64>> = (rows.iter().enumerate())
            .map(|(row, keys)| {
                let stays =
                    |at: usize| at + tail >= keys.len() || bits >> ((at + row) % 64) & 1 == 1;
                let kept = (0..keys.len()).filter(|&at| stays(at));
                kept.map(|at| keys[at]).collect()
            })
            .collect();
        let counts: Vec<usize> = kept.iter().map(Vec::len).collect();
        let Ok(retained) = self.pool.retain(id, &counts) else {
            return;
        };
        for &page in &retained.freed {
            self.memory[page * 4..page * 4 + 4].fill(u64::MAX);
        }
        for (slots, kept) in retained.slots.iter().zip(&kept) {
            assert_eq!(slots.len(), kept.len());
            for (&slot, &key) in slots.iter().zip(kept) {
                self.memory[slot as usize] = key;
            }
        }
        self.models.insert(id, (kept, len - tail));
    }

    fn truncate(&mut self, id: SequenceId, len: usize) {
        let before = self.pool.len(id).unwrap();
        let (rows, oldest) = self.models.get_mut(&id).unwrap();
        let result = self.pool.truncate(id, len);
        if len > before {
            assert!(result.is_err());
        } else if len < *oldest {
            let oldest = *oldest;
            assert_eq!(result, Err(CacheError::Gone { asked: len, oldest }));
        } else {
            result.unwrap();
            for keys in rows {
                keys.truncate(keys.len() - (before - len));
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]
    #[test]
    fn random_calls(
        rows in 1usize..4,
        rollback in 0usize..3,
        calls in prop::collection::vec((0usize..6, 0usize..8, 0usize..30, any::<u64>()), 1..60),
    ) {
        let mut machine = Machine::new(24, rows, rollback);
        for (call, at, number, bits) in calls {
            let ids: Vec<SequenceId> = machine.pool.sequences().collect();
            let id = ids.get(at % ids.len().max(1)).copied();
            match (call, id) {
                (0, Some(id)) if bits % 2 == 0 && ids.len() < 5 => {
                    let fork = machine.pool.fork(id).unwrap();
                    let model = machine.models[&id].clone();
                    machine.models.insert(fork, model);
                }
                (0, _) => {
                    let id = machine.pool.join(KvRetention::Evict).unwrap();
                    machine.models.insert(id, (vec![Vec::new(); rows], 0));
                }
                (1, Some(id)) => machine.truncate(id, number),
                (2, Some(id)) => machine.retain(id, bits),
                (3, Some(id)) if bits % 4 == 0 => {
                    machine.pool.leave(id).unwrap();
                    machine.models.remove(&id);
                }
                (_, Some(id)) => machine.append(id, number % 9),
                _ => {}
            }
            machine.check();
        }
    }
}

#[test]
fn kept_keys_come_to_the_front() {
    let (mut pool, id) = joined(small(8, 4, Pattern::causal()), KvRetention::Evict);
    pool.append(id, 10).unwrap();
    let fork = pool.fork(id).unwrap();
    // The fork keeps the pages: the five keys go to fresh ones.
    let retained = pool.retain(id, &[5]).unwrap();
    assert_eq!(retained.slots, [[12, 13, 14, 15, 16]]);
    assert_eq!(retained.freed, [0usize; 0]);
    pool.verify().unwrap();
    assert_eq!(stored(&pool, id, 0), [vec![5, 6, 7, 8, 9], vec![]]);
    assert_eq!(stored(&pool, fork, 0)[0].len(), 10);
    assert_eq!(pool.usage(id).unwrap().live, 5);
    // Its own pages are rewritten in place.
    let retained = pool.retain(fork, &[3]).unwrap();
    let expected = (vec![vec![0, 1, 2]], vec![1, 2]);
    assert_eq!((retained.slots, retained.freed), expected);
    assert_eq!(pages_of(&pool, fork), [vec![0], vec![]]);
    pool.append(fork, 2).unwrap();
    assert_eq!(stored(&pool, fork, 0), [vec![7, 8, 9, 10, 11], vec![]]);
    pool.truncate(fork, 10).unwrap();
    pool.verify().unwrap();
    let [asked, oldest] = [9, 10];
    assert_eq!(
        pool.truncate(fork, 9),
        Err(CacheError::Gone { asked, oldest })
    );
    // All queries see the retained keys.
    assert!(pool.single_sees_all(KvRetention::Evict));
    assert_eq!(pool.row_slots(fork, 0, 10).unwrap(), [0, 1, 2]);
    // Saved and loaded.
    let saved = pool.save(fork).unwrap();
    pool.load(&saved).unwrap();
    pool.verify().unwrap();
}

#[test]
fn errors() {
    let (mut pool, all) = joined(small(4, 4, Pattern::causal()), KvRetention::All);
    let id = pool.join(KvRetention::Evict).unwrap();
    pool.append(id, 9).unwrap();
    let before = pool.clone();
    refused! {
        pool.retain(all, &[0]) => "residency must be that of a sequence whose keys are evicted, got All of sequence 0";
        pool.retain(id, &[1, 1]) => "counts must be one for each of the 1 table rows, got 2";
        pool.retain(id, &[10]) => "counts must be from 0 to the 9 keys of the row, got 10";
    }
    pool.leave(all).unwrap();
    let unknown = CacheError::Unknown { id: all };
    assert_eq!(pool.retain(all, &[0]), Err(unknown));
    let fork = pool.fork(id).unwrap();
    assert_eq!(
        pool.retain(fork, &[8]),
        Err(CacheError::OutOfPages { asked: 2, free: 1 })
    );
    assert_eq!(stored(&pool, id, 0), stored(&before, id, 0));
    pool.verify().unwrap();
    for pattern in ["local:4", "strided:4", "dense", "fixed:4,1"] {
        let pattern: Pattern = pattern.parse().unwrap();
        let mut pool = PagePool::new(small(4, 4, pattern.clone())).unwrap();
        refused! { pool.join(KvRetention::Evict) => format!("pattern must be the dense causal pattern in every head where a cache evicts keys by attention, got {pattern}"); }
    }
    // Keys that can be rolled back must stay.
    let config = small(4, 4, Pattern::causal()).with_rollback(3);
    let (mut pool, id) = joined(config, KvRetention::Evict);
    pool.append(id, 9).unwrap();
    assert!(pool.retain(id, &[2]).is_err());
    pool.retain(id, &[4]).unwrap();
    pool.truncate(id, 6).unwrap();
    pool.verify().unwrap();
    assert_eq!(stored(&pool, id, 0), [vec![5], vec![]]);
}

/// Known contents of an evicted sequence's pages are forgotten.
#[test]
fn prefixes() {
    let config = small(8, 4, Pattern::causal()).with_prefix_reuse(1);
    let mut pool = PagePool::new(config).unwrap();
    let tokens: Vec<u32> = (0..9).collect();
    let id = pool.join(KvRetention::Evict).unwrap();
    pool.append(id, 9).unwrap();
    pool.remember(id, &tokens).unwrap();
    assert_eq!(pool.known_prefix(KvRetention::Evict, &tokens).unwrap(), 8);
    pool.retain(id, &[5]).unwrap();
    pool.verify().unwrap();
    assert_eq!(pool.known_prefix(KvRetention::Evict, &tokens).unwrap(), 0);
    pool.remember(id, &tokens).unwrap();
    pool.verify().unwrap();
    assert_eq!(pool.known_prefix(KvRetention::Evict, &tokens).unwrap(), 0);
}

/// The first row needs a page in place of one shared with a fork, and the only free one comes from the second row.
#[test]
fn rows_take_what_other_rows_let_go() {
    let mut machine = Machine::new(4, 2, 0);
    let id = machine.pool.join(KvRetention::Evict).unwrap();
    machine.pool.append(id, 4).unwrap();
    let fork = machine.pool.fork(id).unwrap();
    machine.pool.append(id, 4).unwrap();
    assert_eq!(machine.pool.free_pages(), 0);
    machine.pool.retain(id, &[7, 0]).unwrap();
    machine.pool.verify().unwrap();
    let stored = |id: SequenceId| [0, 1].map(|row| machine.pool.slot_keys(id, row).unwrap().len());
    assert_eq!((stored(id), stored(fork)), ([7, 0], [4, 4]));
}
