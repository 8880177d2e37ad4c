//! Pages that are known by their tokens, and saved sequences.

use blocksparse::Pattern;
use burn_paged_attention::pages::{
    CacheError, KvRetention, PagePool, PoolConfig, SequenceId, Step,
};
use rstest::rstest;
use serde_json::json;

use crate::tables::{joined, pages_of, small, stored};

/// Makes a pool with prefix reuse.
fn knowing(pages: usize, mask: u64) -> PagePool {
    let config = small(pages, 4, Pattern::causal()).with_prefix_reuse(7);
    PagePool::new(config.with_hash_mask(mask)).unwrap()
}

/// Returns the known prefix of a text.
fn prefix(pool: &PagePool, tokens: &[u32]) -> usize {
    pool.known_prefix(KvRetention::Reachable, tokens).unwrap()
}

/// Reads a prompt, and returns its sequence and the known prefix.
fn read(pool: &mut PagePool, prompt: &[u32]) -> (SequenceId, usize) {
    let reachable = KvRetention::Reachable;
    let (id, known) = pool
        .join_with_prefix(reachable, prompt, usize::MAX)
        .unwrap();
    pool.append(id, prompt.len() - known).unwrap();
    pool.remember(id, prompt).unwrap();
    pool.verify().unwrap();
    (id, known)
}

/// Full pages of a prompt are found again, except that of its last token; also if all hashes collide.
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
    // The last token has to be computed.
    assert_eq!(prefix(&pool, &prompt[..8]), 4);
    assert_eq!(prefix(&pool, &prompt[..9]), 8);
    assert_eq!(prefix(&pool, &prompt[..4]), 0);
    assert_eq!(prefix(&pool, &[]), 0);
    // The second page's tokens after another first page are another page.
    let other: Vec<u32> = [9, 9, 9, 9].into_iter().chain(4..10).collect();
    assert_eq!(prefix(&pool, &other), 0);
    let (c, known) = read(&mut pool, &other);
    assert_eq!(known, 0);
    assert_eq!(prefix(&pool, &other), 8);
    assert_eq!(pool.known_prefix(KvRetention::All, &prompt).unwrap(), 0);
    // After all sequences have left, their full pages are both known and free.
    pool.leave(a).unwrap();
    pool.leave(c).unwrap();
    assert_eq!((pool.free_pages(), pool.idle_pages()), (8, 4));
    pool.verify().unwrap();
    let (d, known) = pool
        .join_with_prefix(KvRetention::Reachable, &prompt, 5)
        .unwrap();
    assert_eq!((known, pages_of(&pool, d)), (4, [vec![0], vec![]]));
    pool.verify().unwrap();
}

/// Known pages are taken if no others are free: least recently used first, and of those used together the end of a chain first.
#[test]
fn known_pages_are_forgotten() {
    let mut pool = knowing(6, u64::MAX);
    let prompts: [Vec<u32>; 2] = [(0..9).collect(), (50..59).collect()];
    let known = |pool: &PagePool| [0, 1].map(|at| prefix(pool, &prompts[at]));
    let ids = [0, 1].map(|at| read(&mut pool, &prompts[at]).0);
    pool.leave(ids[1]).unwrap();
    pool.leave(ids[0]).unwrap();
    assert_eq!((known(&pool), pool.idle_pages()), ([8, 8], 4));
    let id = pool.join(KvRetention::Reachable).unwrap();
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
    let expected = Err(CacheError::OutOfPages { asked: 1, free: 0 });
    assert_eq!(pool.append(id, 1), expected);
}

/// A page whose tokens change is forgotten; a shared one is copied, and stays known.
#[test]
fn known_pages_that_are_written() {
    let mut pool = knowing(8, u64::MAX);
    let prompt: Vec<u32> = (0..9).collect();
    let (a, _) = read(&mut pool, &prompt);
    let b = pool.fork(a).unwrap();
    pool.truncate(b, 6).unwrap();
    assert_eq!(pool.append(b, 1).unwrap().copies.len(), 1);
    pool.verify().unwrap();
    assert_eq!(prefix(&pool, &prompt), 8);
    pool.truncate(a, 6).unwrap();
    assert_eq!(prefix(&pool, &prompt), 8);
    assert!(pool.append(a, 1).unwrap().copies.is_empty());
    assert_eq!(prefix(&pool, &prompt), 4);
    pool.verify().unwrap();
    pool.append(a, 2).unwrap();
    let other = [0, 1, 2, 3, 4, 5, 60, 70, 80];
    pool.remember(a, &other).unwrap();
    assert_eq!(prefix(&pool, &other), 8);
    pool.verify().unwrap();
    refused! { pool.remember(a, &[0; 10]) => "tokens must be at most the 9 tokens of sequence 0, got 10"; }
    let (mut plain, id) = joined(small(2, 4, Pattern::causal()), KvRetention::All);
    refused! { plain.remember(id, &[]) => "config must be one with prefix reuse, got one without it"; }
}

/// Pages of a window are known as long as none of their keys is dead; pages of heads with different lifetimes are not.
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
        let id = pool.join(KvRetention::Reachable).unwrap();
        for _ in 0..10 {
            // Patterns without boundaries in between get all tokens at once.
            if pool.append(id, 2).is_err() {
                pool.step(Step::decode(id, 20).last()).unwrap();
                break;
            }
        }
        let len = pool.len(id).unwrap();
        pool.remember(id, &prompt[..len]).unwrap();
        assert_eq!(prefix(&pool, &prompt), expected, "{pattern}");
        pool.verify().unwrap();
        let (again, known) = pool
            .join_with_prefix(KvRetention::Reachable, &prompt, usize::MAX)
            .unwrap();
        assert_eq!(pool.len(again).unwrap(), known);
        pool.verify().unwrap();
    }
}

/// A saved sequence is loaded into pages of another size; sequences of another pool and altered ones are refused.
#[test]
fn saved_sequences() {
    let pattern = Pattern::fixed(4, 1);
    let (mut pool, id) = joined(small(16, 4, pattern.clone()), KvRetention::Reachable);
    for _ in 0..10 {
        pool.append(id, 1).unwrap();
    }
    let saved = pool.save(id).unwrap();
    assert_eq!((saved.tokens(), pool.saved_keys(&saved)), (10, Ok(vec![4])));
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
    let full = CacheError::OutOfPages { asked: 2, free: 1 };
    assert_eq!(error(small(1, 4, pattern.clone())), full);
    let wrong = error(small(8, 4, Pattern::local(3)));
    assert_eq!(wrong, mismatch("pattern", "local(3)", "fixed(4, 1)"));
    refused! { Err::<(), _>(wrong) => "pattern of the saved sequence must be local(3), got fixed(4, 1)"; }
    let two = small(8, 4, pattern.clone()).with_pattern(pattern.clone(), 2, 2);
    assert_eq!(error(two.clone()), mismatch("heads", "2", "1"));

    let json = serde_json::to_value(&saved).unwrap();
    let load = |pool: &PagePool, path: &str, value: serde_json::Value| {
        let mut altered = json.clone();
        *altered.pointer_mut(path).unwrap() = value;
        let mut pool = pool.clone();
        let before = pool.free_pages();
        let altered = serde_json::from_value(altered).unwrap();
        let error = pool.load(&altered).unwrap_err();
        assert_eq!(pool.free_pages(), before);
        pool.verify().unwrap();
        error
    };
    let large = usize::MAX;
    let version = load(&pool, "/version", 2.into());
    assert_eq!(version, mismatch("version", "1", "2"));
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
        ("/rows/0/timed", json!([])),
        ("/residency", "all".into()),
        ("/residency", json!({"window": {"window": 0, "sinks": 1}})),
    ] {
        let error = load(&pool, path, value.clone());
        let is_right = matches!(error, CacheError::Corrupt { .. });
        assert!(is_right, "{path} = {value}: {error}");
    }
    let rows = load(&pool, "/rows", json!([]));
    assert_eq!(rows, mismatch("table rows", "1", "0"));
}
