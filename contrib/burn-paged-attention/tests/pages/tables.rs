//! Block tables of a page pool: worked examples, and memory.

use blocksparse::{LastUse, Pattern};
use burn_paged_attention::pages::{
    ALWAYS, CacheError, KvRetention, PageCopy, PagePool, PoolConfig, SequenceId, Slot, Step,
    TableChange,
};
use rstest::rstest;

/// Makes a pool of small pages.
pub(crate) fn small(pages: usize, page_size: usize, pattern: Pattern) -> PoolConfig {
    let config = PoolConfig::new(pages).with_small_pages();
    config.with_page_size(page_size).with_pattern(pattern, 1, 1)
}

/// Makes a pool with a sequence.
pub(crate) fn joined(config: PoolConfig, retention: KvRetention) -> (PagePool, SequenceId) {
    let mut pool = PagePool::new(config).unwrap();
    let id = pool.join(retention).unwrap();
    (pool, id)
}

/// Returns the pages of a sequence's row, from its table: permanent, then timed.
pub(crate) fn pages_of(pool: &PagePool, id: SequenceId) -> [Vec<usize>; 2] {
    let tables = pool.tables(&[id]).unwrap();
    let p = pool.config().page_size();
    let [permanent, entry, start, slots] = [0, 1, 2, 3].map(|at| tables.spans[at] as usize);
    let pages = |first: usize, filled: usize| {
        let entries = &tables.table[first..first + filled.div_ceil(p)];
        entries.iter().map(|&page| page as usize).collect()
    };
    [
        pages(0, permanent),
        pages(entry, if slots == 0 { 0 } else { start + slots }),
    ]
}

/// Returns the positions that a row of a sequence stores: in the permanent region, and in the timed one.
pub(crate) fn stored(pool: &PagePool, id: SequenceId, row: usize) -> [Vec<usize>; 2] {
    let keys = pool.slot_keys(id, row).unwrap();
    let permanent = pool.spans(&[id]).unwrap()[row * 4] as usize;
    let positions: Vec<usize> = keys.iter().map(|key| key.position).collect();
    [
        positions[..permanent].to_vec(),
        positions[permanent..].to_vec(),
    ]
}

/// Checks one line of the worked example: tokens and pages of the sequences, and references of the eight pages.
#[track_caller]
fn line(pool: &PagePool, sequences: &[(SequenceId, usize, &[usize])]) {
    for &(id, len, pages) in sequences {
        assert_eq!(pool.len(id).unwrap(), len, "{id}");
        assert_eq!(pages_of(pool, id), [pages.to_vec(), vec![]], "{id}");
    }
    assert_eq!(pool.sequences().count(), sequences.len());
    let mut free = 0;
    for page in 0..8 {
        let holders = sequences.iter().filter(|(_, _, of)| of.contains(&page));
        let holders = holders.count();
        assert_eq!(pool.references(page), holders, "page {page}");
        free += usize::from(holders == 0);
    }
    assert_eq!(pool.free_pages(), free);
    pool.verify().unwrap();
}

#[test]
fn sharing_and_copy_on_write() {
    let (mut pool, a) = joined(small(8, 4, Pattern::causal()), KvRetention::All);
    let writes = pool.append(a, 10).unwrap();
    assert_eq!(writes.slots, (0..10).collect::<Vec<i32>>());
    assert_eq!(writes.last, [ALWAYS; 10]);
    assert_eq!(writes.slot(0, 9), Some(Slot { page: 2, slot: 1 }));
    line(&pool, &[(a, 10, &[0, 1, 2])]);

    let b = pool.fork(a).unwrap();
    line(&pool, &[(a, 10, &[0, 1, 2]), (b, 10, &[0, 1, 2])]);

    let writes = pool.append(b, 1).unwrap();
    let copy = PageCopy {
        from: 2,
        to: 3,
        slots: 0..2,
    };
    assert_eq!(writes.copies, [copy]);
    assert_eq!(writes.slots, [3 * 4 + 2]);
    let mut changes = writes.changes.iter();
    let is_right = |change: &TableChange| (change.entry, change.page) == (2, 3);
    assert!(changes.len() == 1 && changes.all(is_right));
    line(&pool, &[(a, 10, &[0, 1, 2]), (b, 11, &[0, 1, 3])]);

    let writes = pool.append(a, 1).unwrap();
    assert_eq!((writes.copies.len(), writes.changes.len()), (0, 0));
    line(&pool, &[(a, 11, &[0, 1, 2]), (b, 11, &[0, 1, 3])]);

    let c = pool.join(KvRetention::All).unwrap();
    pool.append(c, 5).unwrap();
    line(
        &pool,
        &[(a, 11, &[0, 1, 2]), (b, 11, &[0, 1, 3]), (c, 5, &[4, 5])],
    );

    pool.leave(a).unwrap();
    line(&pool, &[(b, 11, &[0, 1, 3]), (c, 5, &[4, 5])]);

    pool.append(c, 4).unwrap();
    line(&pool, &[(b, 11, &[0, 1, 3]), (c, 9, &[4, 5, 2])]);

    pool.truncate(b, 6).unwrap();
    line(&pool, &[(b, 6, &[0, 1]), (c, 9, &[4, 5, 2])]);
}

/// Returns all positions of the first row.
fn all_stored(pool: &PagePool, id: SequenceId) -> Vec<usize> {
    let mut keys = stored(pool, id, 0).concat();
    keys.sort_unstable();
    keys
}

/// Keys that are live before query t: those stored when the query's own key comes.
#[rstest]
#[case("local:4", 1, [&[3, 4, 5][..], &[5, 6, 7], &[7, 8, 9], &[9, 10, 11]])]
#[case("strided:4", 1, [&[0, 1, 2, 3, 4, 5][..], &[0, 1, 2, 3, 4, 5, 6, 7], &[0, 1, 2, 3, 4, 5, 6, 7, 8, 9], &[0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11]])]
#[case("fixed:4,1", 1, [&[3, 4, 5][..], &[3, 7], &[3, 7, 8, 9], &[3, 7, 11]])]
#[case("fixed:4,1,2", 2, [&[2, 3, 4, 5][..], &[2, 3, 6, 7], &[2, 3, 6, 7, 8, 9], &[2, 3, 6, 7, 10, 11]])]
#[case("streaming:3,2", 1, [&[0, 1, 4, 5][..], &[0, 1, 6, 7], &[0, 1, 8, 9], &[0, 1, 10, 11]])]
#[case("documents:0,5,9&causal", 1, [&[5][..], &[5, 6, 7], &[9], &[9, 10, 11]])]
#[case("documents:0,5,9&local:4", 1, [&[5][..], &[5, 6, 7], &[9], &[9, 10, 11]])]
#[case("vertical:0,3+slash:0,1,4", 1, [&[0, 2, 3, 4, 5][..], &[0, 3, 4, 5, 6, 7], &[0, 3, 6, 7, 8, 9], &[0, 3, 8, 9, 10, 11]])]
#[case("chunked:4,1,0&causal", 1, [&[0, 1, 2, 3, 4, 5][..], &[4, 5, 6, 7], &[4, 5, 6, 7, 8, 9], &[8, 9, 10, 11]])]
fn live_keys(#[case] pattern: &str, #[case] heads: usize, #[case] expected: [&[usize]; 4]) {
    let pattern: Pattern = pattern.parse().unwrap();
    for page_size in [1, 2, 4, 16] {
        let config = small(64, page_size, pattern.clone()).with_pattern(pattern.clone(), heads, 1);
        for step in [1, 2] {
            let (mut pool, id) = joined(config.clone(), KvRetention::Reachable);
            for (t, expected) in [6, 8, 10, 12].into_iter().zip(expected) {
                while pool.len(id).unwrap() < t {
                    pool.append(id, step).unwrap();
                    pool.verify().unwrap();
                }
                assert_eq!(pool.usage(id).unwrap().live, expected.len());
                let mut other = pool.clone();
                other.append(id, 1).unwrap();
                let mut keys = all_stored(&other, id);
                keys.retain(|&key| key != t);
                assert_eq!(keys, expected, "{pattern} at {t}, pages of {page_size}");
                // A prompt, of which only the keys live at its end are written.
                let (mut prompt, id) = joined(config.clone(), KvRetention::Reachable);
                prompt.step(Step::prefill(id, t)).unwrap();
                prompt.verify().unwrap();
                let what = format!("{pattern}, prompt of {t}");
                assert_eq!(all_stored(&prompt, id), expected, "{what}");
            }
        }
    }
}

/// Heads that retain different columns have separate table rows.
#[test]
fn rows_of_heads_that_differ() {
    let pattern = Pattern::fixed_heads(4, 1, 2);
    let config = small(64, 4, pattern.clone()).with_pattern(pattern.clone(), 4, 4);
    let mut pool = PagePool::new(config.clone()).unwrap();
    assert_eq!(pool.table_rows(), 4);
    let id = pool.join(KvRetention::Reachable).unwrap();
    pool.step(Step::prefill(id, 10)).unwrap();
    assert_eq!(stored(&pool, id, 0), [vec![3, 7], vec![8, 9]]);
    assert_eq!(stored(&pool, id, 1), [vec![2, 6], vec![8, 9]]);
    pool.verify().unwrap();
    // One row for all, on request.
    let (mut pool, id) = joined(config.with_table_rows(1), KvRetention::Reachable);
    pool.step(Step::prefill(id, 10)).unwrap();
    assert_eq!(stored(&pool, id, 0), [vec![2, 3, 6, 7], vec![8, 9]]);
    // Two heads of a group of two share what either retains.
    let config = small(64, 4, pattern.clone()).with_pattern(pattern, 4, 2);
    let pool = PagePool::new(config).unwrap();
    assert_eq!((pool.table_rows(), pool.row_is_live()), (1, false));
    let alike = small(64, 4, Pattern::fixed(4, 1)).with_pattern(Pattern::fixed(4, 1), 4, 2);
    let pool = PagePool::new(alike).unwrap();
    assert_eq!((pool.table_rows(), pool.row_is_live()), (1, true));
}

/// Retained keys for a rollback of 2: streaming(3, 2) before query 10 retains the keys live at 8, and the later ones.
#[test]
fn rollback() {
    let config = small(16, 4, Pattern::streaming(3, 2)).with_rollback(2);
    let (mut pool, id) = joined(config, KvRetention::Reachable);
    let mut at_ten = None;
    for t in 1..=11 {
        pool.append(id, 1).unwrap();
        if t == 10 {
            at_ten = Some(pool.clone());
        }
    }
    assert_eq!(stored(&pool, id, 0), [vec![0, 1], vec![6, 7, 8, 9, 10]]);
    assert_eq!(pool.oldest(id).unwrap(), 8);
    refused! { pool.truncate(id, 7) => "cannot go back to 7 tokens: keys are gone, the least is 8; a pool with a longer rollback keeps more"; }
    let mut fewer = at_ten.unwrap();
    fewer.rollback(id, 2).unwrap();
    assert_eq!(stored(&fewer, id, 0), [vec![0, 1], vec![5, 6, 7]]);
    pool.rollback(id, 3).unwrap();
    assert_eq!(stored(&pool, id, 0), [vec![0, 1], vec![6, 7]]);
    pool.verify().unwrap();
    // The following tokens behave as if there had been no others.
    pool.append(id, 2).unwrap();
    assert_eq!(stored(&pool, id, 0), [vec![0, 1], vec![6, 7, 8, 9]]);
    let [asked, oldest] = [7, 8];
    assert_eq!(
        pool.rollback(id, 3),
        Err(CacheError::Gone { asked, oldest })
    );
    refused! { pool.rollback(id, 11) => "tokens must be at most the 10 tokens of sequence 0, got 11"; }
    pool.verify().unwrap();
}

/// Chunks of any length across page boundaries, with and without a rollback, against the keys that a plain list would retain.
#[test]
fn windows_in_chunks_of_any_length() {
    for (window, sinks, page_size) in [(4, 2, 2), (7, 3, 4), (1, 0, 1), (16, 1, 8), (5, 5, 16)] {
        for chunk in 1..=window + 1 {
            for back in [0, 3] {
                let config = small(64, page_size, Pattern::causal()).with_rollback(back);
                let (mut pool, id) = joined(config, KvRetention::Window { window, sinks });
                for step in 0..30 {
                    let t = pool.len(id).unwrap();
                    pool.append(id, chunk).unwrap();
                    pool.verify().unwrap();
                    let oldest = t.saturating_sub(back).max(pool.oldest(id).unwrap());
                    let kept = |&j: &usize| j >= sinks && j + window > oldest;
                    let expected: Vec<usize> = (0..t + chunk).filter(kept).collect();
                    assert_eq!(stored(&pool, id, 0)[1], expected);
                    let usage = pool.usage(id).unwrap();
                    // Part of a page at the end of each region, and at the beginning of the timed one.
                    let parts = if sinks == 0 { 2 } else { 3 };
                    assert!(usage.slots < usage.live + parts * page_size + back + chunk);
                    if step % 3 == 2 {
                        pool.rollback(id, back.min(chunk)).unwrap();
                        pool.verify().unwrap();
                    }
                }
            }
        }
    }
}

/// Memory of long sequences, one token at a time.
#[rstest]
#[case("causal", [12_287, 1_048_575])]
#[case("strided:128", [12_287, 1_048_575])]
#[case("fixed:128,32", [3_167, 262_239])]
#[case("local:128", [127, 127])]
#[case("local:256", [255, 255])]
#[case("streaming:4096,64", [4_159, 4_159])]
#[case("streaming:1024,4", [1_027, 1_027])]
fn sizes(#[case] pattern: &str, #[case] live: [usize; 2]) {
    let pattern: Pattern = pattern.parse().unwrap();
    let config = PoolConfig::new(1 << 15)
        .with_page_size(64)
        .with_pattern(pattern.clone(), 8, 8);
    let mut pool = PagePool::new(config).unwrap();
    assert_eq!(pool.table_rows(), 1);
    let id = pool.join(KvRetention::Reachable).unwrap();
    let mut changes = 0;
    for (live, t) in live.into_iter().zip([12_287, 1_048_575]) {
        while pool.len(id).unwrap() < t {
            // Single tokens only near the tested positions.
            let is_far = t - pool.len(id).unwrap() > 12_287;
            let tokens = if is_far { 7 } else { 1 };
            changes += pool.append(id, tokens).unwrap().changes.len();
        }
        let usage = pool.usage(id).unwrap();
        assert_eq!(usage.live, live, "{pattern} at {t}");
        assert!(usage.slots <= usage.live + 2 * 64 + 1);
        assert_eq!(usage.live_bytes(2048), usage.live * 2048);
        assert_eq!(usage.bytes(2048), usage.slots * 2048);
        let tables = pool.tables(&[id]).unwrap();
        assert!(tables.max_pages <= (4 * usage.pages).next_power_of_two());
        // A page causes a constant number of changes.
        let is_right = changes <= 4 * (t / 64 + 1) + 16;
        assert!(is_right, "{pattern}: {changes} changes up to {t}");
    }
}

/// The slots are the keys live at the earliest rollback, those that the rollback and a call add, and a part of a page at each end of the timed
/// region and at the end of the permanent one. Every step can be rolled back.
#[test]
fn slots_of_patterns() {
    for (pattern, parts) in [
        (Pattern::causal(), 1),
        (Pattern::strided(5), 1),
        (Pattern::local(37), 2),
        (Pattern::chunked_window(12, 1, 0).and_causal(), 2),
        (Pattern::documents([0, 31, 99]).and_causal(), 3),
        (Pattern::fixed(20, 4), 3),
        (Pattern::streaming(40, 3), 3),
        (Pattern::vertical_slash([0, 30], [0, 1, 9]), 3),
        (Pattern::merged_strided(4), 1),
        (Pattern::longformer(9, 1, [0, 6]).and_causal(), 3),
    ] {
        for (page_size, step, rollback) in [(16, 1, 0), (4, 3, 0), (8, 5, 4), (16, 2, 7)] {
            let config = small(64, page_size, pattern.clone()).with_rollback(rollback);
            let (mut pool, id) = joined(config, KvRetention::Reachable);
            for _ in 0..200 / step {
                let before = pool.len(id).unwrap();
                let live_before = pool.usage(id).unwrap().live;
                pool.append(id, step).unwrap();
                let usage = pool.usage(id).unwrap();
                let back = before.saturating_sub(rollback);
                let is_live =
                    |&j: &usize| pattern.last_query(0, j as i64) >= LastUse::At(back as i64);
                let live = (0..back).filter(is_live).count();
                let most = live + rollback + step + parts * page_size;
                assert!(usage.slots < most, "{pattern}: {usage:?} at {before}");
                pool.truncate(id, before).unwrap();
                assert_eq!(pool.usage(id).unwrap().live, live_before);
                pool.append(id, step).unwrap();
            }
        }
    }
}

/// A large pool costs only the used part of it, and its last page works like the first.
#[test]
fn large_pools() {
    let (mut pool, id) = joined(PoolConfig::new(1 << 26), KvRetention::All);
    pool.append(id, 1000).unwrap();
    assert_eq!(pool.free_pages(), (1 << 26) - 32);
    assert_eq!(pool.usage(id).unwrap().slots, 1024);
    assert_eq!(pool.references(1 << 40), 0);
}
