//! Reach of rows and columns, against the pairs themselves.

use blocksparse::{LastUse, Pattern};
use rstest::rstest;

/// Range of tested queries and keys, and lengths of the sequences that stand for endless ones.
const ASKED: i64 = 40;
const SHORT: i64 = 96;
const LONG: i64 = 192;

/// Returns single patterns of every kind, for which endless sequences have exact answers.
fn singles() -> Vec<Pattern> {
    vec![
        Pattern::dense(),
        Pattern::causal(),
        Pattern::local(4),
        Pattern::local(1),
        Pattern::strided(4),
        Pattern::fixed(4, 1),
        Pattern::fixed(6, 2),
        Pattern::fixed_heads(6, 2, 3),
        Pattern::prefix_lm(5),
        Pattern::streaming(3, 2),
        Pattern::window(2),
        Pattern::dilated_window(3, 2),
        Pattern::chunked(4),
        Pattern::chunked_window(4, 1, 0),
        Pattern::chunked_window(5, 1, 2),
        Pattern::global([3, 4, 9]),
        Pattern::global([]),
        Pattern::global_keys([3, 4, 9]),
        Pattern::global_keys([]),
        Pattern::Columns {
            stride: 6,
            columns: 2,
            num_verts: 3,
        },
        Pattern::Rows {
            stride: 6,
            rows: 2,
            num_verts: 3,
        },
        Pattern::vertical_slash([0, 3], [0, 1, 4]),
        Pattern::vertical_slash([], [2]),
        Pattern::vertical_slash([5], []),
        Pattern::documents([0, 5, 9]),
        Pattern::documents([0, 7, 20, 41]),
        Pattern::packed([0, 5, 9], Pattern::fixed(4, 1)),
        Pattern::packed([3, 11], Pattern::window(2)),
        Pattern::packed([0, 6, 30], Pattern::prefix_lm(3)),
        Pattern::random_blocks(4, 9, 2, 7),
    ]
}

fn unions() -> Vec<Pattern> {
    vec![
        Pattern::merged_strided(4),
        Pattern::longformer(2, 1, [0, 6]),
        Pattern::bigbird(4, 9, 1, 3),
        Pattern::deepspeed_fixed(6, 2, 3, true),
        Pattern::deepspeed_variable(&[4, 6], 60, [1], false),
        Pattern::per_head([Pattern::local(3), Pattern::chunked(4), Pattern::dense()]),
        Pattern::union([
            Pattern::causal(),
            Pattern::intersection([Pattern::global([0]), Pattern::window(3)]),
        ]),
    ]
}

/// Returns patterns whose answer may be later than necessary.
fn intersections() -> Vec<Pattern> {
    vec![
        Pattern::documents([0, 5, 9]).and_causal(),
        Pattern::intersection([Pattern::documents([0, 5, 9]), Pattern::local(4)]),
        Pattern::chunked_window(4, 1, 0).and_causal(),
        Pattern::intersection([Pattern::strided(3), Pattern::chunked(6)]),
        Pattern::intersection([Pattern::window(4), Pattern::dilated_window(3, 2)]),
        Pattern::from_fn("all", |_, _, _| true).and_causal(),
        Pattern::from_fn("odd", |_, i, j| (i + j) % 2 == 1),
    ]
}

/// Returns the last position below `end` for which a predicate holds.
fn last(end: i64, mut holds: impl FnMut(i64) -> bool) -> Option<i64> {
    (0..end).rev().find(|&position| holds(position))
}

/// Compares with the pairs of a short and of a long sequence: an equal last query in both is the last one; a different one means that there is
/// always a later one.
fn compare(
    pattern: &Pattern,
    got: LastUse,
    exact: bool,
    short: Option<i64>,
    long: Option<i64>,
    what: &str,
) {
    let expected = match (short, long) {
        (None, None) => LastUse::Never,
        (Some(short), Some(long)) if short == long => LastUse::At(long),
        (_, Some(_)) => LastUse::Always,
        (Some(_), None) => panic!("{pattern}, {what}: fewer pairs in a longer sequence"),
    };
    match exact {
        true => assert_eq!(got, expected, "{pattern}, {what}"),
        false => assert!(got >= expected, "{pattern}, {what}: {got:?} < {expected:?}"),
    }
}

#[test]
fn horizons_and_last_queries_are_those_of_the_pairs() {
    let all = [
        (singles(), true),
        (unions(), true),
        (intersections(), false),
    ];
    for (patterns, exact) in all {
        for pattern in patterns {
            for head in 0..3 {
                for at in 0..ASKED {
                    let row = |end| last(end, |j| pattern.attends(head, at, j));
                    let what = format!("head {head}, horizon of {at}");
                    let got = pattern.horizon(head, at);
                    compare(&pattern, got, exact, row(SHORT), row(LONG), &what);
                    let column = |end| last(end, |i| pattern.attends(head, i, at));
                    let what = format!("head {head}, last query of {at}");
                    let got = pattern.last_query(head, at);
                    compare(&pattern, got, exact, column(SHORT), column(LONG), &what);
                }
            }
        }
    }
}

/// A boundary is allowed if no earlier query sees a later key.
#[test]
fn boundaries_are_those_of_the_pairs() {
    let all = [
        (singles(), true),
        (unions(), true),
        (intersections(), false),
    ];
    for (patterns, exact) in all {
        for pattern in patterns {
            let is_free = |t: i64| {
                let crosses = |i, j| (0..3).any(|head| pattern.attends(head, i, j));
                !(0..t).any(|i| (t..LONG).any(|j| crosses(i, j)))
            };
            let allowed: Vec<bool> = (0..=ASKED)
                .map(|t| pattern.allows_boundary(3, t as usize))
                .collect();
            for (t, allowed) in allowed.iter().enumerate() {
                match exact {
                    true => assert_eq!(*allowed, is_free(t as i64), "{pattern} at {t}"),
                    false => assert!(!allowed || is_free(t as i64), "{pattern} at {t}"),
                }
            }
            for t in 0..ASKED as usize {
                let expected = (t + 1..=ASKED as usize).find(|&t| allowed[t]);
                let got = pattern.next_boundary(3, t);
                match expected {
                    Some(expected) => assert_eq!(got, Some(expected), "{pattern} after {t}"),
                    None => assert!(
                        got.is_none_or(|got| got > ASKED as usize),
                        "{pattern} after {t}"
                    ),
                }
            }
        }
    }
}

/// The published table of allowed positions in 1..=16.
#[rstest]
#[case("causal", &(1..=16).collect::<Vec<_>>())]
#[case("dense&causal", &(1..=16).collect::<Vec<_>>())]
#[case("prefix:5", &(5..=16).collect::<Vec<_>>())]
#[case("chunked:4,1,0", &[4, 8, 12, 16])]
#[case("window:2", &[])]
#[case("documents:0,6", &[6])]
fn allowed_positions(#[case] pattern: &str, #[case] expected: &[usize]) {
    let pattern: Pattern = pattern.parse().unwrap();
    let got: Vec<usize> = (1..=16)
        .filter(|t| pattern.allows_boundary(1, *t))
        .collect();
    assert_eq!(got, expected);
    assert!(pattern.allows_boundary(1, 0));
}

/// A query that also sees later keys moves the first boundary.
#[test]
fn a_callback_in_a_causal_pattern_has_boundaries() {
    let early = Pattern::intersection([
        Pattern::from_fn("0 sees 1..3", |_, i, j| i == 0 && j <= 3),
        Pattern::prefix_lm(4),
    ]);
    let pattern = Pattern::union([Pattern::causal(), early]);
    let got: Vec<usize> = (1..=16)
        .filter(|t| pattern.allows_boundary(1, *t))
        .collect();
    assert_eq!(got, (4..=16).collect::<Vec<_>>());
    let callback = Pattern::from_fn("anything", |_, i, j| j <= i);
    assert_eq!(callback.next_boundary(1, 3), None);
    assert!(callback.and_causal().allows_boundary(1, 3));
}

/// The worked example: keys before query t that it or a later one sees.
#[rstest]
#[case("local:4", 0, [&[3, 4, 5][..], &[5, 6, 7], &[7, 8, 9], &[9, 10, 11]])]
#[case("fixed:4,1", 0, [&[3, 4, 5][..], &[3, 7], &[3, 7, 8, 9], &[3, 7, 11]])]
#[case("fixed:4,1,2", 1, [&[2, 4, 5][..], &[2, 6], &[2, 6, 8, 9], &[2, 6, 10]])]
#[case("streaming:3,2", 0, [&[0, 1, 4, 5][..], &[0, 1, 6, 7], &[0, 1, 8, 9], &[0, 1, 10, 11]])]
#[case("documents:0,5,9&causal", 0, [&[5][..], &[5, 6, 7], &[9], &[9, 10, 11]])]
#[case("documents:0,5,9&local:4", 0, [&[5][..], &[5, 6, 7], &[9], &[9, 10, 11]])]
#[case("vertical:0,3+slash:0,1,4", 0, [&[0, 2, 3, 4, 5][..], &[0, 3, 4, 5, 6, 7], &[0, 3, 6, 7, 8, 9], &[0, 3, 8, 9, 10, 11]])]
#[case("chunked:4,1,0&causal", 0, [&[0, 1, 2, 3, 4, 5][..], &[4, 5, 6, 7], &[4, 5, 6, 7, 8, 9], &[8, 9, 10, 11]])]
fn live_keys(#[case] pattern: &str, #[case] head: usize, #[case] expected: [&[i64]; 4]) {
    let pattern: Pattern = pattern.parse().unwrap();
    for (t, expected) in [6, 8, 10, 12].into_iter().zip(expected) {
        let live = |j: &i64| pattern.last_query(head, *j) >= LastUse::At(t);
        let got: Vec<i64> = (0..t).filter(live).collect();
        assert_eq!(got, expected, "{pattern} at {t}");
    }
}

/// The cost does not depend on the size of parameters.
#[test]
fn long_strides_are_as_fast() {
    let huge = usize::MAX / 4;
    for pattern in [
        Pattern::window(huge),
        Pattern::chunked_window(huge, 1, 1),
        Pattern::Rows {
            stride: 1 << 40,
            rows: 1,
            num_verts: 1,
        },
        Pattern::prefix_lm(huge),
        Pattern::packed([0, 1 << 40], Pattern::window(huge)),
    ] {
        let _ = (pattern.horizon(0, 5), pattern.last_query(0, 5));
        let _ = (pattern.allows_boundary(8, 77), pattern.next_boundary(8, 77));
    }
}

/// Rows without random blocks are not visited, however many there are.
#[test]
fn rows_without_random_blocks_are_not_counted() {
    let pattern = Pattern::random_blocks(16, (1 << 40) + 1, 0, 7);
    assert_eq!(pattern.last_query(0, 100), LastUse::Never);
    assert!(pattern.allows_boundary(1, 1 << 50));
}
