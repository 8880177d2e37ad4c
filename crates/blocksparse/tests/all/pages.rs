//! The books of a pool of pages: published tables, word for word.

use blocksparse::Pattern;
use blocksparse::pages::{
    ALWAYS, CacheError, PageCopy, PagePool, PoolConfig, Residency, SequenceId, Slot, Step, Writes,
};
use rstest::rstest;

/// A pool of small pages.
pub(crate) fn small(pages: usize, page_size: usize, pattern: Pattern) -> PoolConfig {
    let config = PoolConfig::new(pages).with_small_pages();
    config.with_page_size(page_size).with_pattern(pattern, 1, 1)
}

/// The pages of a sequence's row and region, from its table: permanent, then timed.
fn pages_of(pool: &PagePool, id: SequenceId) -> [Vec<usize>; 2] {
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

/// Positions that a row of a sequence stores: of the permanent region, and of the timed one.
fn stored(pool: &PagePool, id: SequenceId, row: usize) -> [Vec<usize>; 2] {
    let keys = pool.slot_keys(id, row).unwrap();
    let permanent = pool.spans(&[id]).unwrap()[row * 4] as usize;
    let positions: Vec<usize> = keys.iter().map(|key| key.position).collect();
    [
        positions[..permanent].to_vec(),
        positions[permanent..].to_vec(),
    ]
}

/// One line of the table: tokens and pages of the sequences, references, free pages.
#[track_caller]
fn line(
    pool: &PagePool,
    sequences: &[(SequenceId, usize, &[usize])],
    refs: [usize; 8],
    free: &[usize],
) {
    for &(id, len, pages) in sequences {
        assert_eq!(pool.len(id).unwrap(), len, "{id}");
        assert_eq!(pages_of(pool, id), [pages.to_vec(), vec![]], "{id}");
    }
    assert_eq!(pool.sequences().count(), sequences.len());
    assert_eq!(
        [0, 1, 2, 3, 4, 5, 6, 7].map(|page| pool.references(page)),
        refs
    );
    let got: Vec<usize> = (0..8).filter(|&page| pool.references(page) == 0).collect();
    assert_eq!(got, free);
    assert_eq!(pool.free_pages(), free.len());
    pool.verify().unwrap();
}

#[test]
fn sharing_and_copy_on_write() {
    let mut pool = PagePool::new(small(8, 4, Pattern::causal())).unwrap();
    let a = pool.join(Residency::All).unwrap();
    let writes = pool.append(a, 10).unwrap();
    assert_eq!(writes.slots, (0..10).collect::<Vec<i32>>());
    assert_eq!(writes.last, [ALWAYS; 10]);
    assert_eq!(writes.slot(0, 9), Some(Slot { page: 2, slot: 1 }));
    line(
        &pool,
        &[(a, 10, &[0, 1, 2])],
        [1, 1, 1, 0, 0, 0, 0, 0],
        &[3, 4, 5, 6, 7],
    );

    let b = pool.fork(a).unwrap();
    let both: [(_, _, &[usize]); 2] = [(a, 10, &[0, 1, 2]), (b, 10, &[0, 1, 2])];
    line(&pool, &both, [2, 2, 2, 0, 0, 0, 0, 0], &[3, 4, 5, 6, 7]);

    let writes = pool.append(b, 1).unwrap();
    let copy = PageCopy {
        from: 2,
        to: 3,
        slots: 0..2,
    };
    assert_eq!(writes.copies, [copy]);
    assert_eq!(writes.slots, [3 * 4 + 2]);
    let changes: Vec<_> = writes
        .changes
        .iter()
        .map(|change| (change.entry, change.page))
        .collect();
    assert_eq!(changes, [(2, 3)]);
    let both: [(_, _, &[usize]); 2] = [(a, 10, &[0, 1, 2]), (b, 11, &[0, 1, 3])];
    line(&pool, &both, [2, 2, 1, 1, 0, 0, 0, 0], &[4, 5, 6, 7]);

    let writes = pool.append(a, 1).unwrap();
    assert_eq!((writes.copies.len(), writes.changes.len()), (0, 0));
    let both: [(_, _, &[usize]); 2] = [(a, 11, &[0, 1, 2]), (b, 11, &[0, 1, 3])];
    line(&pool, &both, [2, 2, 1, 1, 0, 0, 0, 0], &[4, 5, 6, 7]);

    let c = pool.join(Residency::All).unwrap();
    pool.append(c, 5).unwrap();
    let all: [(_, _, &[usize]); 3] = [(a, 11, &[0, 1, 2]), (b, 11, &[0, 1, 3]), (c, 5, &[4, 5])];
    line(&pool, &all, [2, 2, 1, 1, 1, 1, 0, 0], &[6, 7]);

    pool.leave(a).unwrap();
    let two: [(_, _, &[usize]); 2] = [(b, 11, &[0, 1, 3]), (c, 5, &[4, 5])];
    line(&pool, &two, [1, 1, 0, 1, 1, 1, 0, 0], &[2, 6, 7]);

    pool.append(c, 4).unwrap();
    let two: [(_, _, &[usize]); 2] = [(b, 11, &[0, 1, 3]), (c, 9, &[4, 5, 2])];
    line(&pool, &two, [1, 1, 1, 1, 1, 1, 0, 0], &[6, 7]);

    pool.truncate(b, 6).unwrap();
    let two: [(_, _, &[usize]); 2] = [(b, 6, &[0, 1]), (c, 9, &[4, 5, 2])];
    line(&pool, &two, [1, 1, 1, 0, 1, 1, 0, 0], &[3, 6, 7]);
}

/// Keys that are live before query t, through a pool: what is stored when the query's own key comes.
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
            let mut pool = PagePool::new(config.clone()).unwrap();
            let id = pool.join(Residency::Reachable).unwrap();
            for (t, expected) in [6, 8, 10, 12].into_iter().zip(expected) {
                while pool.len(id).unwrap() < t {
                    pool.append(id, step).unwrap();
                    pool.verify().unwrap();
                }
                assert_eq!(pool.usage(id).unwrap().live, expected.len());
                let mut other = pool.clone();
                other.append(id, 1).unwrap();
                let [mut keys, timed] = stored(&other, id, 0);
                keys.extend(timed);
                keys.sort_unstable();
                keys.retain(|&key| key != t);
                assert_eq!(keys, expected, "{pattern} at {t}, pages of {page_size}");
                // A prompt, of which only what is live at its end is written.
                let mut prompt = PagePool::new(config.clone()).unwrap();
                let id = prompt.join(Residency::Reachable).unwrap();
                prompt.step(Step::prefill(id, t)).unwrap();
                prompt.verify().unwrap();
                let [mut keys, timed] = stored(&prompt, id, 0);
                keys.extend(timed);
                keys.sort_unstable();
                assert_eq!(keys, expected, "{pattern}, prompt of {t}");
            }
        }
    }
}

/// Heads that keep different columns have a table row each.
#[test]
fn rows_of_heads_that_differ() {
    let pattern = Pattern::fixed_heads(4, 1, 2);
    let config = small(64, 4, pattern.clone()).with_pattern(pattern.clone(), 4, 4);
    let mut pool = PagePool::new(config.clone()).unwrap();
    assert_eq!(pool.table_rows(), 4);
    let id = pool.join(Residency::Reachable).unwrap();
    pool.step(Step::prefill(id, 10)).unwrap();
    assert_eq!(stored(&pool, id, 0), [vec![3, 7], vec![8, 9]]);
    assert_eq!(stored(&pool, id, 1), [vec![2, 6], vec![8, 9]]);
    pool.verify().unwrap();
    // One row for all, where it is asked for.
    let mut pool = PagePool::new(config.with_table_rows(1)).unwrap();
    let id = pool.join(Residency::Reachable).unwrap();
    pool.step(Step::prefill(id, 10)).unwrap();
    assert_eq!(stored(&pool, id, 0), [vec![2, 3, 6, 7], vec![8, 9]]);
    // Two heads of a group of two share what either keeps.
    let config = small(64, 4, pattern.clone()).with_pattern(pattern, 4, 2);
    let pool = PagePool::new(config).unwrap();
    assert_eq!((pool.table_rows(), pool.row_is_live()), (1, false));
    let alike = small(64, 4, Pattern::fixed(4, 1)).with_pattern(Pattern::fixed(4, 1), 4, 2);
    let pool = PagePool::new(alike).unwrap();
    assert_eq!((pool.table_rows(), pool.row_is_live()), (1, true));
}

/// fixed(4, 1) at t = 10 with pages of 4: permanent page [3 7 · ·], timed page [8 9 · ·].
#[test]
fn pages_of_regions() {
    let mut pool = PagePool::new(small(8, 4, Pattern::fixed(4, 1))).unwrap();
    let id = pool.join(Residency::Reachable).unwrap();
    for _ in 0..10 {
        pool.append(id, 1).unwrap();
        pool.verify().unwrap();
    }
    assert_eq!(stored(&pool, id, 0), [vec![3, 7], vec![8, 9]]);
    let spans = pool.spans(&[id]).unwrap();
    assert_eq!((spans[0], &spans[2..]), (2, &[0, 2][..]));
    assert_eq!(pool.usage(id).unwrap().pages, 2);
}

/// What is kept for a rollback of 2: streaming(3, 2) before query 10 keeps what is live at 8, and what came after.
#[test]
fn rollback() {
    let config = small(16, 4, Pattern::streaming(3, 2)).with_rollback(2);
    let mut pool = PagePool::new(config).unwrap();
    let id = pool.join(Residency::Reachable).unwrap();
    let mut at_ten = None;
    for t in 1..=11 {
        pool.append(id, 1).unwrap();
        if t == 10 {
            at_ten = Some(pool.clone());
        }
    }
    assert_eq!(stored(&pool, id, 0), [vec![0, 1], vec![6, 7, 8, 9, 10]]);
    assert_eq!(pool.oldest(id).unwrap(), 8);
    let error = pool.truncate(id, 7).unwrap_err();
    assert_eq!(
        error,
        CacheError::Gone {
            asked: 7,
            oldest: 8
        }
    );
    assert_eq!(
        error.to_string(),
        "cannot go back to 7 tokens: keys are gone, the least is 8; a pool with a longer rollback keeps more"
    );
    let mut fewer = at_ten.unwrap();
    fewer.rollback(id, 2).unwrap();
    assert_eq!(stored(&fewer, id, 0), [vec![0, 1], vec![5, 6, 7]]);
    pool.rollback(id, 3).unwrap();
    assert_eq!(stored(&pool, id, 0), [vec![0, 1], vec![6, 7]]);
    pool.verify().unwrap();
    // What comes then is as if there had been no other tokens.
    pool.append(id, 2).unwrap();
    assert_eq!(stored(&pool, id, 0), [vec![0, 1], vec![6, 7, 8, 9]]);
    assert_eq!(
        pool.rollback(id, 3),
        Err(CacheError::Gone {
            asked: 7,
            oldest: 8
        })
    );
    let error = pool.rollback(id, 11).unwrap_err();
    assert_eq!(
        error.to_string(),
        "tokens must be at most the 10 tokens of sequence 0, got 11"
    );
    pool.verify().unwrap();
}

/// Two sinks and a window of four, pages of two.
///
/// In a ring of four slots the key at `j` is in slot `2 + (j − 2) mod 4`, so that after 7 tokens it has `6 3 4 5`, after 9 `6 7 8 5` and after 12
/// `10 11 8 9`. Here the same keys are in the order in which they came, in a list of pages whose first one is given back when both of its keys are dead:
/// up to one page more, but whoever walks the slots needs no modulo, and pages of any list can be shared.
#[test]
fn sinks_and_a_window() {
    let config = small(8, 2, Pattern::causal());
    let mut pool = PagePool::new(config).unwrap();
    let id = pool
        .join(Residency::Window {
            window: 4,
            sinks: 2,
        })
        .unwrap();
    let expected: [(usize, &[usize], i32); 4] = [
        (5, &[2, 3, 4], 0),
        (7, &[3, 4, 5, 6], 1),
        (9, &[5, 6, 7, 8], 1),
        (12, &[8, 9, 10, 11], 0),
    ];
    for (t, timed, start) in expected {
        while pool.len(id).unwrap() < t {
            pool.append(id, 1).unwrap();
            pool.verify().unwrap();
        }
        assert_eq!(
            stored(&pool, id, 0),
            [vec![0, 1], timed.to_vec()],
            "after {t}"
        );
        let spans = pool.spans(&[id]).unwrap();
        assert_eq!(
            (spans[0], spans[2], spans[3]),
            (2, start, timed.len() as i32)
        );
        assert!(pool.usage(id).unwrap().pages <= 4);
    }
}

/// Chunks of any length over the pages' ends, with and without a rollback, against the keys that a plain list would keep.
#[test]
fn windows_in_chunks_of_any_length() {
    for (window, sinks, page_size) in [(4, 2, 2), (7, 3, 4), (1, 0, 1), (16, 1, 8), (5, 5, 16)] {
        for chunk in 1..=window + 1 {
            for back in [0, 3] {
                let config = small(64, page_size, Pattern::causal()).with_rollback(back);
                let mut pool = PagePool::new(config).unwrap();
                let id = pool.join(Residency::Window { window, sinks }).unwrap();
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

/// Live keys and slots of the published table, one token at a time. A position takes 2,048 bytes in a layer, and there are 30.
#[rstest]
#[case("causal", [12_287, 1_048_575], [12_288, 1_048_576], [0.755, 64.42])]
#[case("strided:128", [12_287, 1_048_575], [12_288, 1_048_576], [0.755, 64.42])]
#[case("fixed:128,32", [3_167, 262_239], [3_200, 262_272], [0.195, 16.11])]
#[case("local:128", [127, 127], [192, 192], [0.0078, 0.0078])]
#[case("local:256", [255, 255], [320, 320], [0.016, 0.016])]
#[case("streaming:4096,64", [4_159, 4_159], [4_224, 4_224], [0.256, 0.256])]
#[case("streaming:1024,4", [1_027, 1_027], [1_152, 1_152], [0.063, 0.063])]
fn sizes(
    #[case] pattern: &str,
    #[case] live: [usize; 2],
    #[case] slots: [usize; 2],
    #[case] gigabytes: [f64; 2],
) {
    const BYTES: usize = 2_048 * 30;
    let pattern: Pattern = pattern.parse().unwrap();
    let config = PoolConfig::new(1 << 15)
        .with_page_size(64)
        .with_pattern(pattern.clone(), 8, 8);
    let mut pool = PagePool::new(config).unwrap();
    assert_eq!(pool.table_rows(), 1);
    let id = pool.join(Residency::Reachable).unwrap();
    let mut changes = 0;
    for (at, t) in [12_287, 1_048_575].into_iter().enumerate() {
        while pool.len(id).unwrap() < t {
            changes += pool.append(id, 1).unwrap().changes.len();
        }
        let usage = pool.usage(id).unwrap();
        assert_eq!(usage.live, live[at], "{pattern} at {t}");
        assert!(
            usage.slots <= slots[at],
            "{pattern} at {t}: {}",
            usage.slots
        );
        assert!(usage.slots <= usage.live + 2 * 64 + 1);
        let got = usage.live_bytes(BYTES) as f64 / 1e9;
        let digits: f64 = if gigabytes[at] < 0.01 { 1e-4 } else { 1e-3 };
        assert!(
            (got - gigabytes[at]).abs() < digits.max(gigabytes[at] * 1e-3),
            "{got}"
        );
        assert_eq!(usage.bytes(BYTES), usage.slots * BYTES);
        let tables = pool.tables(&[id]).unwrap();
        assert!(tables.max_pages <= (4 * usage.pages).next_power_of_two());
        // A page is named by a constant number of changes.
        assert!(
            changes <= 4 * (t / 64 + 1) + 16,
            "{pattern}: {changes} changes up to {t}"
        );
    }
}

/// fixed(128, 32) in pages of 64, exactly.
#[test]
fn slots_of_fixed() {
    let pattern = Pattern::fixed(128, 32);
    let config = PoolConfig::new(4_200)
        .with_page_size(64)
        .with_pattern(pattern, 8, 8);
    for (t, permanent, slots) in [(12_287, 3_071, 3_200), (1_048_575, 262_143, 262_272)] {
        let mut pool = PagePool::new(config.clone()).unwrap();
        let id = pool.join(Residency::Reachable).unwrap();
        while pool.len(id).unwrap() < t {
            let chunk = 125.min(t - pool.len(id).unwrap());
            pool.append(id, chunk).unwrap();
        }
        // The last steps one by one: what a step of many tokens holds on to goes with the next.
        pool.append(id, 1).unwrap();
        pool.truncate(id, t).unwrap();
        assert_eq!(pool.usage(id).unwrap().slots, slots);
        let spans = pool.spans(&[id]).unwrap();
        assert_eq!((spans[0], spans[3]), (permanent, 96));
    }
}

#[rstest]
#[case("causal", &(1..=16).collect::<Vec<_>>())]
#[case("dense&causal", &(1..=16).collect::<Vec<_>>())]
#[case("prefix:5", &(5..=16).collect::<Vec<_>>())]
#[case("chunked:4,1,0", &[4, 8, 12, 16])]
#[case("window:2", &[])]
#[case("documents:0,6", &[6])]
fn boundaries(#[case] pattern: &str, #[case] expected: &[usize]) {
    let pattern: Pattern = pattern.parse().unwrap();
    let mut allowed = Vec::new();
    for t in 1..=16 {
        let mut pool = PagePool::new(small(16, 4, pattern.clone())).unwrap();
        let id = pool.join(Residency::Reachable).unwrap();
        match pool.append(id, t) {
            Ok(_) => allowed.push(t),
            Err(CacheError::Boundary { position, .. }) => {
                assert_eq!((position, pool.len(id).unwrap()), (t, 0));
                // The end of a sequence may be anywhere, but nothing comes after it.
                pool.step(Step::decode(id, t).last()).unwrap();
                pool.verify().unwrap();
                assert!(matches!(
                    pool.append(id, 1),
                    Err(CacheError::Boundary { .. })
                ));
                pool.truncate(id, 0).unwrap();
            }
            Err(error) => panic!("{error}"),
        }
    }
    assert_eq!(allowed, expected, "{pattern}");
}

#[test]
fn boundary_texts() {
    let text = |pattern: Pattern, tokens: usize| {
        let mut pool = PagePool::new(small(4, 4, pattern)).unwrap();
        let id = pool.join(Residency::All).unwrap();
        pool.append(id, tokens).unwrap_err().to_string()
    };
    assert_eq!(
        text(Pattern::prefix_lm(5), 3),
        "a cache cannot stop at position 3: queries before it attend to keys up to position 4; the next position to stop at is 5"
    );
    assert_eq!(
        text(Pattern::dense(), 3),
        "a cache cannot stop at position 3: queries before it attend to keys without an end; this pattern has no position to stop at: it is not causal"
    );
}

#[test]
fn errors_name_what_is_wrong() {
    let text = |config: PoolConfig| PagePool::new(config).unwrap_err().to_string();
    assert_eq!(text(PoolConfig::new(0)), "pages must be at least 1, got 0");
    let config = PoolConfig::new(1);
    for size in [0, 1, 8, 24, 256] {
        let expected = format!("page_size must be 16, 32, 64 or 128, got {size}");
        assert_eq!(text(config.clone().with_page_size(size)), expected);
    }
    assert_eq!(
        text(config.clone().with_small_pages().with_page_size(3)),
        "page_size must be 16, 32, 64 or 128, got 3"
    );
    assert_eq!(
        text(PoolConfig::new((1 << 26) + 1)),
        "pages must be at most 67108864 of 32 slots, got 67108865"
    );
    assert_eq!(
        text(config.clone().with_pattern(Pattern::causal(), 6, 4)),
        "heads must be a multiple of the 4 KV heads, got 6"
    );
    assert_eq!(
        text(
            config
                .clone()
                .with_pattern(Pattern::causal(), 8, 4)
                .with_table_rows(2)
        ),
        "table_rows must be 1 or the 4 KV heads, got 2"
    );
    let invalid = config.clone().with_pattern(Pattern::local(0), 1, 1);
    assert!(text(invalid).starts_with("pattern must be valid, got local(0)"));

    let mut pool = PagePool::new(config.with_page_size(16)).unwrap();
    let window = |window, sinks| Residency::Window { window, sinks };
    let error = pool.join(window(0, 4)).unwrap_err();
    assert_eq!(error.to_string(), "window must be at least 1, got 0");
    let error = pool.join(window(4, usize::MAX)).unwrap_err();
    assert!(
        error
            .to_string()
            .starts_with("sinks must be at most 2147483646")
    );
    let id = pool.join(Residency::All).unwrap();
    let gone = pool.join(Residency::All).unwrap();
    pool.leave(gone).unwrap();
    let unknown = CacheError::Unknown { id: gone };
    assert_eq!(pool.append(gone, 1), Err(unknown.clone()));
    assert_eq!(pool.leave(gone), Err(unknown.clone()));
    assert_eq!(pool.fork(gone), Err(unknown.clone()));
    assert_eq!(pool.truncate(gone, 0), Err(unknown.clone()));
    assert_eq!(pool.tables(&[id, gone]), Err(unknown.clone()));
    assert_eq!(
        unknown.to_string(),
        "sequence must be one that joined this pool and has not left it, got sequence 1"
    );
    let twice = CacheError::Twice { id };
    assert_eq!(pool.append_each(&[id, id], 1), Err(twice.clone()));
    assert_eq!(pool.tables(&[id, id]), Err(twice.clone()));
    assert_eq!(
        twice.to_string(),
        "sequences must be different ones, got sequence 0 twice"
    );
    assert_eq!(
        pool.append(id, 17),
        Err(CacheError::OutOfPages { asked: 2, free: 1 })
    );
    assert_eq!(
        CacheError::OutOfPages { asked: 2, free: 1 }.to_string(),
        "the call needs 2 pages, 1 are free"
    );
    let most = i32::MAX as usize;
    let error = pool.append(id, most).unwrap_err().to_string();
    assert!(
        error.starts_with("tokens must be at most 2147483646"),
        "{error}"
    );
    assert!(pool.append(id, usize::MAX).is_err());
    let error = pool.truncate(id, 3).unwrap_err().to_string();
    assert_eq!(
        error,
        "len must be at most the 0 tokens of sequence 0, got 3"
    );
    let error = pool.slot_keys(id, 1).unwrap_err().to_string();
    assert_eq!(error, "row must be below the 1 table rows, got 1");
    let error = pool.row_plan(id, 1, 0).unwrap_err().to_string();
    assert_eq!(error, "head must be below the 1 heads, got 1");
    assert_eq!(pool.free_pages(), 1);
    pool.verify().unwrap();
}

/// Nothing is asked of the tensors for no tokens.
#[test]
fn no_tokens() {
    let mut pool = PagePool::new(small(2, 4, Pattern::local(3))).unwrap();
    let id = pool.join(Residency::Reachable).unwrap();
    let writes: Writes = pool.append(id, 0).unwrap();
    assert!(writes.slots.is_empty() && writes.copies.is_empty() && writes.changes.is_empty());
    let tables = pool.tables(&[id]).unwrap();
    assert_eq!((tables.table, tables.spans), (vec![-1], vec![0, 0, 0, 0]));
    assert_eq!(pool.tables(&[]).unwrap().rows, 0);
    pool.append(id, 4).unwrap();
    let before = pool.tables(&[id]).unwrap();
    pool.append(id, 0).unwrap();
    assert_eq!(pool.tables(&[id]).unwrap(), before);
    pool.verify().unwrap();
}

/// Each pool size is too small for something: it says so, and nothing has changed.
#[test]
fn out_of_pages_at_every_point() {
    let pattern = Pattern::fixed_heads(6, 1, 2);
    for pages in 1..40 {
        let config = small(pages, 2, pattern.clone()).with_pattern(pattern.clone(), 4, 2);
        let config = config.with_table_rows(2).with_rollback(1);
        let mut pool = PagePool::new(config).unwrap();
        let a = pool.join(Residency::Reachable).unwrap();
        let mut ids = vec![a];
        for step in 0..20 {
            if step == 5 || step == 9 {
                ids.push(pool.fork(a).unwrap());
            }
            let steps: Vec<Step> = ids
                .iter()
                .map(|&id| Step::decode(id, 1 + step % 3))
                .collect();
            let needed = pool.pages_needed(&steps).unwrap();
            let before = (pool.tables(&ids).unwrap(), pool.free_pages());
            match pool.steps(&steps) {
                Ok(_) => {
                    assert!(needed.0 <= needed.1);
                    assert_eq!(pool.free_pages(), needed.1 - needed.0);
                }
                Err(error) => {
                    let (asked, free) = needed;
                    assert_eq!(error, CacheError::OutOfPages { asked, free });
                    assert!(asked > free);
                    assert_eq!((pool.tables(&ids).unwrap(), pool.free_pages()), before);
                    break;
                }
            }
            pool.verify().unwrap();
        }
        pool.verify().unwrap();
    }
}

/// A pool that knows pages by their tokens.
fn knowing(pages: usize, mask: u64) -> PagePool {
    let config = small(pages, 4, Pattern::causal()).with_prefix_reuse(7);
    PagePool::new(config.with_hash_mask(mask)).unwrap()
}

/// A sequence that has a prompt.
fn read(pool: &mut PagePool, prompt: &[u32]) -> (SequenceId, usize) {
    let (id, known) = pool
        .join_with_prefix(Residency::Reachable, prompt, usize::MAX)
        .unwrap();
    pool.append(id, prompt.len() - known).unwrap();
    pool.remember(id, prompt).unwrap();
    pool.verify().unwrap();
    (id, known)
}

/// Full pages of a prompt are found again, but not the one of its last token; also when their hashes are all the same.
#[rstest]
#[case(u64::MAX)]
#[case(0)]
fn known_prefixes(#[case] mask: u64) {
    let mut pool = knowing(8, mask);
    let prompt: Vec<u32> = (0..10).collect();
    let (a, known) = read(&mut pool, &prompt);
    assert_eq!(known, 0);
    let (b, known) = read(&mut pool, &prompt);
    assert_eq!((known, pages_of(&pool, b)), (8, [vec![0, 1, 3], vec![]]));
    pool.leave(b).unwrap();
    // The last token's row has to be computed.
    let prefix =
        |pool: &PagePool, tokens: &[u32]| pool.known_prefix(Residency::Reachable, tokens).unwrap();
    assert_eq!(prefix(&pool, &prompt[..8]), 4);
    assert_eq!(prefix(&pool, &prompt[..9]), 8);
    assert_eq!(prefix(&pool, &prompt[..4]), 0);
    assert_eq!(prefix(&pool, &[]), 0);
    // Tokens of the second page after another first one are another page.
    let other: Vec<u32> = [9, 9, 9, 9].into_iter().chain(4..10).collect();
    assert_eq!(prefix(&pool, &other), 0);
    let (c, known) = read(&mut pool, &other);
    assert_eq!(known, 0);
    assert_eq!(prefix(&pool, &other), 8);
    assert_eq!(pool.known_prefix(Residency::All, &prompt).unwrap(), 0);
    // After all have left their full pages are known, and free nevertheless.
    pool.leave(a).unwrap();
    pool.leave(c).unwrap();
    assert_eq!((pool.free_pages(), pool.idle_pages()), (8, 4));
    pool.verify().unwrap();
    let (d, known) = pool
        .join_with_prefix(Residency::Reachable, &prompt, 5)
        .unwrap();
    assert_eq!((known, pages_of(&pool, d)), (4, [vec![0], vec![]]));
    pool.verify().unwrap();
}

/// Known pages are taken when no others are free: those used longest ago first, of those used together the last of a chain first.
#[test]
fn known_pages_are_forgotten() {
    let mut pool = knowing(6, u64::MAX);
    let prompts: [Vec<u32>; 2] = [(0..9).collect(), (50..59).collect()];
    let known = |pool: &PagePool| {
        let known = |prompt: &Vec<u32>| pool.known_prefix(Residency::Reachable, prompt).unwrap();
        [known(&prompts[0]), known(&prompts[1])]
    };
    let ids = [0, 1].map(|at| read(&mut pool, &prompts[at]).0);
    pool.leave(ids[1]).unwrap();
    pool.leave(ids[0]).unwrap();
    assert_eq!((known(&pool), pool.idle_pages()), ([8, 8], 4));
    let id = pool.join(Residency::Reachable).unwrap();
    for (tokens, left) in [
        (8, [8, 8]),
        (4, [8, 4]),
        (4, [8, 0]),
        (4, [4, 0]),
        (4, [0, 0]),
    ] {
        pool.append(id, tokens).unwrap();
        assert_eq!(known(&pool), left);
        pool.verify().unwrap();
    }
    assert_eq!(
        pool.append(id, 1),
        Err(CacheError::OutOfPages { asked: 1, free: 0 })
    );
}

/// A page whose tokens change is not known any more; one that others hold is, and is copied.
#[test]
fn known_pages_that_are_written() {
    let mut pool = knowing(8, u64::MAX);
    let prompt: Vec<u32> = (0..9).collect();
    let (a, _) = read(&mut pool, &prompt);
    let b = pool.fork(a).unwrap();
    pool.truncate(b, 6).unwrap();
    assert_eq!(pool.append(b, 1).unwrap().copies.len(), 1);
    pool.verify().unwrap();
    assert_eq!(pool.known_prefix(Residency::Reachable, &prompt).unwrap(), 8);
    pool.truncate(a, 6).unwrap();
    assert_eq!(pool.known_prefix(Residency::Reachable, &prompt).unwrap(), 8);
    assert!(pool.append(a, 1).unwrap().copies.is_empty());
    assert_eq!(pool.known_prefix(Residency::Reachable, &prompt).unwrap(), 4);
    pool.verify().unwrap();
    pool.append(a, 2).unwrap();
    let other = [0, 1, 2, 3, 4, 5, 60, 70, 80];
    pool.remember(a, &other).unwrap();
    assert_eq!(pool.known_prefix(Residency::Reachable, &other).unwrap(), 8);
    pool.verify().unwrap();
    let error = pool.remember(a, &[0; 10]).unwrap_err().to_string();
    assert_eq!(
        error,
        "tokens must be at most the 9 tokens of sequence 0, got 10"
    );
    let mut plain = PagePool::new(small(2, 4, Pattern::causal())).unwrap();
    let id = plain.join(Residency::All).unwrap();
    let error = plain.remember(id, &[]).unwrap_err().to_string();
    assert_eq!(
        error,
        "config must be one with prefix reuse, got one without it"
    );
}

/// Pages of a window are known as long as none of their keys is dead; those of heads with different lifetimes are not.
#[test]
fn known_pages_of_patterns() {
    for (pattern, expected) in [
        (Pattern::local(30), 16),
        (Pattern::local(9), 0),
        (Pattern::fixed(4, 1), 0),
        (Pattern::strided(4), 16),
        (Pattern::chunked(8), 16),
        (Pattern::prefix_lm(5), 16),
        (Pattern::prefix_lm(18), 0),
    ] {
        let config = small(32, 4, pattern.clone()).with_prefix_reuse(7);
        let mut pool = PagePool::new(config).unwrap();
        let prompt: Vec<u32> = (0..20).collect();
        let id = pool.join(Residency::Reachable).unwrap();
        for _ in 0..10 {
            // What cannot stop in between comes at once.
            if pool.append(id, 2).is_err() {
                pool.step(Step::decode(id, 20).last()).unwrap();
                break;
            }
        }
        let len = pool.len(id).unwrap();
        pool.remember(id, &prompt[..len]).unwrap();
        let known = pool.known_prefix(Residency::Reachable, &prompt).unwrap();
        assert_eq!(known, expected, "{pattern}");
        pool.verify().unwrap();
        let (joined, known) = pool
            .join_with_prefix(Residency::Reachable, &prompt, usize::MAX)
            .unwrap();
        assert_eq!(pool.len(joined).unwrap(), known);
        pool.verify().unwrap();
    }
}

/// A saved sequence is loaded into pages of another size; what is of another pool or altered is not.
#[test]
fn saved_sequences() {
    let pattern = Pattern::fixed(4, 1);
    let mut pool = PagePool::new(small(16, 4, pattern.clone())).unwrap();
    let id = pool.join(Residency::Reachable).unwrap();
    for _ in 0..10 {
        pool.append(id, 1).unwrap();
    }
    let saved = pool.save(id).unwrap();
    assert_eq!((saved.tokens(), saved.keys()), (10, vec![4]));
    let mut other = PagePool::new(small(16, 1, pattern.clone())).unwrap();
    let (loaded, slots) = other.load(&saved).unwrap();
    other.verify().unwrap();
    assert_eq!(slots, [[0, 1, 2, 3]]);
    assert_eq!(stored(&other, loaded, 0), [vec![3, 7], vec![8, 9]]);
    assert_eq!(other.oldest(loaded), pool.oldest(id));
    assert_eq!(other.append(loaded, 1).unwrap().first, 10);
    other.verify().unwrap();

    let error = |config: PoolConfig| PagePool::new(config).unwrap().load(&saved).unwrap_err();
    let mismatch = |what, expected: &str, got: &str| CacheError::Mismatch {
        what,
        expected: expected.into(),
        got: got.into(),
    };
    assert_eq!(
        error(small(1, 4, pattern.clone())),
        CacheError::OutOfPages { asked: 2, free: 1 }
    );
    let wrong = error(small(8, 4, Pattern::local(3)));
    assert_eq!(wrong, mismatch("pattern", "local(3)", "fixed(4, 1)"));
    assert_eq!(
        wrong.to_string(),
        "pattern of the saved sequence must be local(3), got fixed(4, 1)"
    );
    let two = small(8, 4, pattern.clone()).with_pattern(pattern.clone(), 2, 2);
    assert_eq!(error(two.clone()), mismatch("heads", "2", "1"));

    let json = serde_json::to_value(&saved).unwrap();
    let load = |pool: &PagePool, path: &str, value: serde_json::Value| {
        let mut altered = json.clone();
        *altered.pointer_mut(path).unwrap() = value;
        let mut pool = pool.clone();
        let before = pool.free_pages();
        let error = pool
            .load(&serde_json::from_value(altered).unwrap())
            .unwrap_err();
        assert_eq!(pool.free_pages(), before);
        pool.verify().unwrap();
        error
    };
    let large = usize::MAX;
    assert_eq!(
        load(&pool, "/version", 2.into()),
        mismatch("version", "1", "2")
    );
    for (path, value) in [
        ("/next", 9.into()),
        ("/next", 11.into()),
        ("/next", large.into()),
        ("/oldest", 11.into()),
        ("/oldest", 5.into()),
        ("/rows/0/permanent/0/0", 2.into()),
        ("/rows/0/permanent/0/1", 0.into()),
        ("/rows/0/permanent/1/0", 3.into()),
        ("/rows/0/permanent/1/1", 2.into()),
        ("/rows/0/permanent/1/1", large.into()),
        ("/rows/0/timed/0/0", 7.into()),
        ("/rows/0/timed/0/1", 1.into()),
        ("/rows/0/timed/0/1", 3.into()),
        ("/rows/0/timed/0/0", large.into()),
        ("/rows/0/timed", serde_json::json!([])),
        ("/residency", "all".into()),
        (
            "/residency",
            serde_json::json!({"window": {"window": 0, "sinks": 1}}),
        ),
    ] {
        let error = load(&pool, path, value.clone());
        assert!(
            matches!(error, CacheError::Corrupt { .. }),
            "{path} = {value}: {error}"
        );
    }
    assert_eq!(
        load(&pool, "/rows", serde_json::json!([])),
        mismatch("table rows", "1", "0")
    );
}

/// A large pool costs what is used of it, and its last page is as good as the first.
#[test]
fn large_pools() {
    let mut pool = PagePool::new(PoolConfig::new(1 << 26)).unwrap();
    let id = pool.join(Residency::All).unwrap();
    pool.append(id, 1000).unwrap();
    assert_eq!(pool.free_pages(), (1 << 26) - 32);
    assert_eq!(pool.usage(id).unwrap().slots, 1024);
    assert_eq!(pool.references(1 << 40), 0);
}
