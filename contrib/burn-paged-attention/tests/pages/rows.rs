//! Slots of single queries, against the pairs of the pattern.

use blocksparse::{LastUse, Pattern};
use burn_paged_attention::pages::{KvRetention, PagePool, PoolConfig, SequenceId, SlotKey, Step};
use proptest::prelude::*;

use crate::random_patterns::pattern;
use crate::tables::joined;

/// Returns the positions in a query's slots, through the table.
fn positions(pool: &PagePool, id: SequenceId, head: usize, query: usize) -> Vec<usize> {
    let page_size = pool.config().page_size();
    let row = pool.row_of_head(head);
    let tables = pool.tables(&[id]).unwrap();
    let entries = &tables.table[row * tables.max_pages..(row + 1) * tables.max_pages];
    let keys = pool.slot_keys(id, row).unwrap();
    let slots = pool.row_slots(id, head, query).unwrap();
    assert!(slots.is_sorted_by(|a, b| a < b), "{slots:?}");
    let found = slots.into_iter().map(|at| {
        let (page, slot) = (entries[at / page_size] as usize, at % page_size);
        let is_here = |key: &&SlotKey| (key.slot.page, key.slot.slot) == (page, slot);
        keys.iter().find(is_here).expect("a slot in use").position
    });
    let mut found: Vec<usize> = found.collect();
    found.sort_unstable();
    found
}

/// Returns whether a retention lets a query see a key, if the pattern does.
pub(crate) fn is_near(residency: KvRetention, key: usize, query: usize) -> bool {
    match residency {
        KvRetention::Window { window, sinks } => key < sinks || key + window > query,
        _ => true,
    }
}

/// The time to find a query's slots does not depend on the sequence's length.
#[test]
fn long_sequences() {
    let n = 1 << 20;
    let slots = |pattern: Pattern| {
        let config = PoolConfig::new(n / 64).with_page_size(64);
        let config = config.with_pattern(pattern, 8, 8).with_table_rows(1);
        let (mut pool, id) = joined(config, KvRetention::All);
        pool.step(Step::prefill(id, n)).unwrap();
        pool.row_slots(id, 3, n - 1).unwrap()
    };
    let strided: Vec<usize> = (127..n).step_by(128).collect();
    assert_eq!(slots(Pattern::strided(128)), strided);
    assert_eq!(slots(Pattern::merged_strided(128)).len(), 8_191 + 128);
    let slashes = Pattern::vertical_slash([0, 3, 4], [0, 1, 2, 1000]);
    assert_eq!(slots(slashes), [0, 3, 4, n - 1001, n - 3, n - 2, n - 1]);
    let fixed = slots(Pattern::fixed_heads(128, 8, 8));
    assert_eq!(fixed.len(), 8_191 * 8 + 128);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, failure_persistence: None, ..ProptestConfig::default() })]

    /// Every query from the oldest on reads exactly the pattern's keys, with any page size.
    #[test]
    fn rows_are_those_of_the_pairs(
        pattern in pattern(),
        causal in any::<bool>(),
        groups in prop::sample::select(vec![[1usize, 1], [4, 2], [3, 3], [6, 1]]),
        page_size in prop::sample::select(vec![1, 4, 16]),
        residency in prop::sample::select(vec![
            KvRetention::All,
            KvRetention::Reachable,
            KvRetention::Window { window: 5, sinks: 3 },
        ]),
        chunks in prop::collection::vec(0usize..12, 1..6),
    ) {
        let [heads, kv_heads] = groups;
        let pattern = if causal { pattern.and_causal() } else { pattern };
        prop_assume!(pattern.validate(heads).is_ok());
        let config = PoolConfig::new(1 << 10).with_small_pages().with_page_size(page_size);
        let config = config.with_pattern(pattern.clone(), heads, kv_heads).with_rollback(2);
        let (mut pool, id) = joined(config, residency);
        for chunk in chunks {
            let before = pool.len(id).unwrap();
            if pool.append(id, chunk).is_err() && pool.step(Step::decode(id, chunk).last()).is_err() {
                break;
            }
            pool.verify().unwrap();
            let next = pool.len(id).unwrap();
            for query in pool.oldest(id).unwrap().min(before)..=next {
                for head in 0..heads {
                    let is_seen = |&j: &usize| {
                        is_near(residency, j, query) && pattern.attends(head, query as i64, j as i64)
                    };
                    let expected: Vec<usize> = (0..next).filter(is_seen).collect();
                    let got = positions(&pool, id, head, query);
                    if query >= pool.oldest(id).unwrap() {
                        prop_assert_eq!(&got, &expected, "{} head {}, query {}", pattern, head, query);
                    }
                }
            }
            // If visibility depends only on positions and last queries, these suffice.
            if pool.row_is_live() {
                for row in 0..pool.table_rows() {
                    let head = row * (heads / pool.table_rows());
                    for key in pool.slot_keys(id, row).unwrap() {
                        for query in 0..next {
                            let sees = key.position <= query && query as i64 <= i64::from(key.last);
                            let is_near = is_near(residency, key.position, query);
                            let attends = pattern.attends(head, query as i64, key.position as i64);
                            prop_assert_eq!(sees, attends && is_near, "{} at {}, {:?}", pattern, query, key);
                        }
                    }
                }
            }
        }
    }

    /// If a pool says so, a single query sees every slot of its sequence.
    #[test]
    fn single_queries_see_all_slots(
        pattern in pattern(),
        groups in prop::sample::select(vec![[1usize, 1], [4, 2], [3, 3], [6, 1]]),
        rollback in prop::sample::select(vec![0usize, 0, 3]),
        residency in prop::sample::select(vec![
            KvRetention::All,
            KvRetention::Reachable,
            KvRetention::Reachable,
            KvRetention::Window { window: 5, sinks: 3 },
        ]),
        chunks in prop::collection::vec(prop::sample::select(vec![1usize, 1, 1, 2, 7, 12]), 1..30),
    ) {
        let [heads, kv_heads] = groups;
        let pattern = pattern.and_causal();
        // Most patterns are invalid for these heads, so `prop_assume` would reject too many.
        if pattern.validate(heads).is_err() {
            return Ok(());
        }
        let config = PoolConfig::new(1 << 10).with_small_pages().with_page_size(4);
        let config = config.with_pattern(pattern.clone(), heads, kv_heads).with_rollback(rollback);
        let mut pool = PagePool::new(config).unwrap();
        if !pool.single_sees_all(residency) {
            return Ok(());
        }
        let id = pool.join(residency).unwrap();
        for chunk in chunks {
            pool.append(id, chunk).unwrap();
            if chunk > 1 {
                continue;
            }
            let query = pool.len(id).unwrap() - 1;
            for head in 0..heads {
                for key in pool.slot_keys(id, pool.row_of_head(head)).unwrap() {
                    let sees = pattern.attends(head, query as i64, key.position as i64)
                        && query as i64 <= i64::from(key.last);
                    prop_assert!(sees, "{} head {} at {}, {:?}", pattern, head, query, key);
                }
            }
        }
    }

    /// If a pattern says so, exactly the live keys are seen.
    #[test]
    fn live_rows(pattern in pattern(), causal in any::<bool>()) {
        let pattern = if causal { pattern.and_causal() } else { pattern };
        prop_assume!(pattern.validate(6).is_ok());
        for head in (0..6).filter(|&head| pattern.row_is_live(head)) {
            for i in 0..70i64 {
                for j in 0..70i64 {
                    let is_live = pattern.last_query(head, j) >= LastUse::At(i);
                    prop_assert_eq!(pattern.attends(head, i, j), j <= i && is_live, "{} at ({}, {})", pattern, i, j);
                }
            }
        }
    }
}
