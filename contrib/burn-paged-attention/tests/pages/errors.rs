//! Errors of a pool of pages.

use blocksparse::Pattern;
use burn_paged_attention::pages::{CacheError, KvRetention, PagePool, PoolConfig, Step, Writes};
use proptest::prelude::*;

use crate::tables::{joined, small};

/// Calls end where the pattern allows a boundary.
#[test]
fn boundaries() {
    for pattern in [
        "causal",
        "dense&causal",
        "prefix:5",
        "chunked:4,1,0",
        "window:2",
        "documents:0,6",
    ] {
        let pattern: Pattern = pattern.parse().unwrap();
        let mut allowed = Vec::new();
        for t in 1..=16 {
            let (mut pool, id) = joined(small(16, 4, pattern.clone()), KvRetention::Reachable);
            match pool.append(id, t) {
                Ok(_) => allowed.push(t),
                Err(CacheError::Boundary { position, .. }) => {
                    assert_eq!((position, pool.len(id).unwrap()), (t, 0));
                    // The end of a sequence may be anywhere, but nothing can follow it.
                    pool.step(Step::decode(id, t).last()).unwrap();
                    pool.verify().unwrap();
                    let after = pool.append(id, 1);
                    assert!(matches!(after, Err(CacheError::Boundary { .. })));
                    pool.truncate(id, 0).unwrap();
                }
                Err(error) => panic!("{error}"),
            }
        }
        let expected = (1..=16).filter(|&t| pattern.allows_boundary(1, t));
        assert!(expected.eq(allowed), "{pattern}");
    }
}

#[test]
fn boundary_texts() {
    let append = |pattern: Pattern, tokens: usize| {
        let (mut pool, id) = joined(small(4, 4, pattern), KvRetention::All);
        pool.append(id, tokens)
    };
    refused! {
        append(Pattern::prefix_lm(5), 3) => "a cache cannot stop at position 3: queries before it attend to keys up to position 4; the next position to stop at is 5";
        append(Pattern::dense(), 3) => "a cache cannot stop at position 3: queries before it attend to keys without an end; this pattern has none: it is not causal";
    }
}

#[test]
fn errors_name_what_is_wrong() {
    let config = || PoolConfig::new(1);
    for size in [0, 1, 8, 24, 256] {
        refused! { PagePool::new(config().with_page_size(size)) => format!("page_size must be 16, 32, 64 or 128, got {size}"); }
    }
    let eight = config().with_pattern(Pattern::causal(), 8, 4);
    refused! {
        PagePool::new(PoolConfig::new(0)) => "pages must be at least 1, got 0";
        PagePool::new(config().with_small_pages().with_page_size(3)) => "page_size must be 16, 32, 64 or 128, got 3";
        PagePool::new(PoolConfig::new((1 << 26) + 1)) => "pages must be at most 67108864 of 32 slots, got 67108865";
        PagePool::new(config().with_pattern(Pattern::causal(), 6, 4)) => "heads must be a multiple of the 4 KV heads, got 6";
        PagePool::new(eight.with_table_rows(2)) => "table_rows must be 1 or the 4 KV heads, got 2";
        PagePool::new(config().with_pattern(Pattern::local(0), 1, 1)) => "pattern must be valid, got local(0)…";
    }

    let mut pool = PagePool::new(config().with_page_size(16)).unwrap();
    let window = |window, sinks| KvRetention::Window { window, sinks };
    refused! {
        pool.join(window(0, 4)) => "window must be at least 1, got 0";
        pool.join(window(4, usize::MAX)) => "sinks must be at most 2147483646…";
    }
    let id = pool.join(KvRetention::All).unwrap();
    let gone = pool.join(KvRetention::All).unwrap();
    pool.leave(gone).unwrap();
    let unknown = "sequence must be one that joined this pool and has not left it, got sequence 1";
    let twice = "sequences must be different ones, got sequence 0 twice";
    assert_eq!(pool.leave(gone), Err(CacheError::Unknown { id: gone }));
    let expected = Err(CacheError::Twice { id });
    assert_eq!(pool.steps(&[Step::decode(id, 1); 2]), expected);
    let expected = Err(CacheError::OutOfPages { asked: 2, free: 1 });
    assert_eq!(pool.append(id, 17), expected);
    assert!(pool.append(id, usize::MAX).is_err());
    refused! {
        pool.append(gone, 1) => unknown;
        pool.fork(gone) => unknown;
        pool.truncate(gone, 0) => unknown;
        pool.tables(&[id, gone]) => unknown;
        pool.tables(&[id, id]) => twice;
        pool.append(id, 17) => "the call needs 2 pages, 1 are free";
        pool.append(id, i32::MAX as usize) => "tokens must be at most 2147483646…";
        pool.truncate(id, 3) => "len must be at most the 0 tokens of sequence 0, got 3";
        pool.slot_keys(id, 1) => "row must be below the 1 table rows, got 1";
        pool.row_slots(id, 1, 0) => "head must be below the 1 heads, got 1";
    }
    assert_eq!(pool.free_pages(), 1);
    pool.verify().unwrap();
}

/// A step without tokens changes no tensors.
#[test]
fn no_tokens() {
    let (mut pool, id) = joined(small(2, 4, Pattern::local(3)), KvRetention::Reachable);
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

/// Every pool size is too small for something: the call fails, and nothing has changed.
#[test]
fn out_of_pages_at_every_point() {
    let pattern = Pattern::fixed_heads(6, 1, 2);
    for pages in 1..40 {
        let config = small(pages, 2, pattern.clone()).with_pattern(pattern.clone(), 4, 2);
        let config = config.with_table_rows(2).with_rollback(1);
        let (mut pool, a) = joined(config, KvRetention::Reachable);
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

fn number() -> impl Strategy<Value = usize> {
    prop_oneof![
        4 => 0usize..40,
        1 => Just(usize::MAX),
        1 => (0u32..64).prop_map(|bits| 1 << bits),
        1 => Just(i32::MAX as usize),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 1000, failure_persistence: None, ..ProptestConfig::default() })]

    /// Numbers of any size give an error or work; nothing panics, and nothing of such size is allocated.
    #[test]
    fn arguments_of_any_size(
        (pages, page_size, heads, kv_heads) in (number(), number(), number(), number()),
        rows in prop::option::of(number()),
        (rollback, window, sinks) in (number(), number(), number()),
        residency in 0usize..3,
        pattern in prop_oneof![
            Just(Pattern::causal()),
            number().prop_map(Pattern::local),
            (number(), number()).prop_map(|(stride, columns)| Pattern::fixed(stride, columns)),
            (number(), number()).prop_map(|(window, sink)| Pattern::streaming(window, sink)),
        ],
        calls in prop::collection::vec((0usize..8, number()), 0..8),
    ) {
        // Thousands of table rows would really be allocated.
        prop_assume!(heads <= 64 || !heads.is_multiple_of(kv_heads.max(1)) || kv_heads == 0);
        let page_size = if page_size % 3 == 0 { page_size } else { 16 };
        let config = PoolConfig::new(pages).with_page_size(page_size).with_rollback(rollback);
        let config = config.with_pattern(pattern, heads, kv_heads).with_prefix_reuse(1);
        let config = match rows {
            Some(rows) => config.with_table_rows(rows),
            None => config,
        };
        let Ok(mut pool) = PagePool::new(config) else { return Ok(()) };
        let residency = [KvRetention::All, KvRetention::Reachable, KvRetention::Window { window, sinks }][residency];
        let Ok(id) = pool.join(residency) else { return Ok(()) };
        for (call, n) in calls {
            // A step allocates a list of as many slots.
            let step = if n > 1 << 12 && n < 1 << 31 { 5 } else { n };
            let _ = match call {
                0 => pool.append(id, step).err(),
                1 => pool.step(Step::prefill(id, step)).err(),
                2 => pool.step(Step::decode(id, step).last()).err(),
                3 => pool.truncate(id, n).err(),
                4 => pool.rollback(id, n).err(),
                5 => pool.row_slots(id, n % 70, n).err(),
                6 => pool.slot_keys(id, n).err(),
                _ => pool.join_with_prefix(residency, &[1; 40], n).err(),
            };
            pool.verify().unwrap();
        }
        prop_assert!(pool.usage(id).is_ok() && pool.tables(&[id]).is_ok());
    }
}

/// Pools are `Send` and `Sync`.
#[test]
fn pools_are_sent() {
    fn sent<T: Send + Sync>() {}
    sent::<PagePool>();
}
