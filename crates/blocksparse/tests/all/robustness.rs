//! No input makes the crate panic: it gives a layout that matches the pattern, or an error.

use blocksparse::{BlockLayout, LastUse, LayoutShape, PaddingMask, Pattern};
use proptest::prelude::*;

use crate::parts::assert_parts_make_up;
use crate::patterns::assert_keeps;

/// Numbers that users get wrong: 0, small ones, and those at which arithmetic overflows.
fn number() -> impl Strategy<Value = usize> {
    prop_oneof![
        4 => 0usize..40,
        1 => Just(usize::MAX),
        1 => Just(usize::MAX / 2 + 1),
        1 => (0u32..64).prop_map(|bits| 1 << bits),
        1 => Just((1 << 40) + 1),
        1 => any::<usize>(),
    ]
}

fn numbers() -> impl Strategy<Value = Vec<usize>> {
    prop::collection::vec(number(), 0..5)
}

/// Every constructor of a pattern, and variants that bypass the constructors' normalization.
fn pattern() -> impl Strategy<Value = Pattern> {
    let n = number;
    let simple = prop_oneof![
        n().prop_map(Pattern::local),
        n().prop_map(Pattern::strided),
        n().prop_map(Pattern::merged_strided),
        (n(), n()).prop_map(|(a, b)| Pattern::fixed(a, b)),
        (n(), n(), n()).prop_map(|(a, b, c)| Pattern::fixed_heads(a, b, c)),
        n().prop_map(Pattern::prefix_lm),
        (n(), n()).prop_map(|(a, b)| Pattern::streaming(a, b)),
        n().prop_map(Pattern::window),
        (n(), n()).prop_map(|(a, b)| Pattern::dilated_window(a, b)),
        n().prop_map(Pattern::chunked),
        (n(), n(), n()).prop_map(|(a, b, c)| Pattern::chunked_window(a, b, c)),
        numbers().prop_map(Pattern::global),
        (n(), n(), numbers()).prop_map(|(a, b, list)| Pattern::longformer(a, b, list)),
        (n(), n(), n(), any::<u64>()).prop_map(|(a, b, c, seed)| Pattern::bigbird(a, b, c, seed)),
        (n(), n(), n(), any::<u64>())
            .prop_map(|(a, b, c, seed)| Pattern::random_blocks(a, b, c, seed)),
        (n(), n(), n(), any::<bool>())
            .prop_map(|(a, b, c, rows)| Pattern::deepspeed_fixed(a, b, c, rows)),
        (numbers(), 0usize..300, numbers(), any::<bool>()).prop_map(
            |(windows, seq, list, rows)| Pattern::deepspeed_variable(&windows, seq, list, rows)
        ),
        numbers().prop_map(Pattern::global_keys),
        numbers().prop_map(Pattern::document_ids),
        (numbers(), numbers()).prop_map(|(v, s)| Pattern::vertical_slash(v, s)),
        numbers().prop_map(Pattern::documents),
        (n(), n(), n()).prop_map(|(stride, columns, num_verts)| Pattern::Columns {
            stride,
            columns,
            num_verts
        }),
        (n(), n(), n()).prop_map(|(stride, rows, num_verts)| Pattern::Rows {
            stride,
            rows,
            num_verts
        }),
        prop::collection::vec((n(), n()), 0..4).prop_map(|ranges| Pattern::Global { ranges }),
        numbers().prop_map(|starts| Pattern::Documents { starts }),
        (numbers(), numbers())
            .prop_map(|(vertical, slash)| Pattern::VerticalSlash { vertical, slash }),
    ];
    simple.prop_recursive(2, 8, 3, |inner| {
        let list = || prop::collection::vec(inner.clone(), 0..3);
        prop_oneof![
            list().prop_map(Pattern::union),
            list().prop_map(Pattern::intersection),
            list().prop_map(Pattern::per_head),
            (numbers(), inner.clone()).prop_map(|(starts, p)| Pattern::packed(starts, p)),
        ]
    })
}

fn position() -> impl Strategy<Value = i64> {
    prop_oneof![4 => -90i64..90, 1 => any::<i64>(), 1 => prop::sample::select(vec![i64::MIN, i64::MAX])]
}

/// Small or invalid shapes: a valid layout of 2³⁰ positions would really be built.
fn shape() -> impl Strategy<Value = LayoutShape> {
    let length = || prop_oneof![6 => 0usize..90, 1 => Just(usize::MAX), 1 => Just((1 << 30) + 1)];
    let heads = prop_oneof![6 => 0usize..7, 1 => Just(usize::MAX)];
    let block_size =
        prop_oneof![4 => prop::sample::select(blocksparse::BLOCK_SIZES.to_vec()), 1 => number()];
    (heads, length(), length(), block_size).prop_map(|(heads, seq_q, seq_kv, block_size)| {
        LayoutShape::new(heads, [seq_q, seq_kv], block_size)
    })
}

/// Asserts that kept pairs match the positions of each row, and are inside the layout.
fn assert_sound(layout: &BlockLayout) {
    let (q_blocks, kv_blocks) = (layout.q_blocks(), layout.kv_blocks());
    for pattern in 0..layout.num_patterns() {
        for q_block in 0..q_blocks {
            let row = layout.row(pattern, q_block);
            assert!(row.windows(2).all(|pair| pair[0].block < pair[1].block));
            assert!(row.iter().all(|entry| (entry.block as usize) < kv_blocks));
            assert!(
                row.iter()
                    .all(|entry| (entry.mask as usize) < layout.masks().len())
            );
        }
        let columns: usize = (0..kv_blocks)
            .map(|k| layout.column(pattern, k).len())
            .sum();
        assert_eq!(columns, layout.pattern_blocks(pattern));
    }
    let pairs: usize = (0..layout.batch().unwrap_or(1))
        .flat_map(|batch| (0..layout.heads()).map(move |head| (batch, head)))
        .flat_map(|(batch, head)| layout.to_dense_batch(batch, head).into_iter().flatten())
        .filter(|on| *on)
        .count();
    assert_eq!(pairs as u64, layout.allowed_pairs());
}

fn cases(cases: u32) -> ProptestConfig {
    ProptestConfig {
        cases,
        failure_persistence: None,
        ..ProptestConfig::default()
    }
}

proptest! {
    #![proptest_config(cases(3000))]

    #[test]
    fn arguments_of_any_size((pattern, shape, head, i, j) in (pattern(), shape(), number(), position(), position())) {
        pattern.is_causal();
        pattern.attends(head, i, j);
        match BlockLayout::new(&pattern, shape) {
            Ok(layout) => {
                prop_assert!(pattern.validate(shape.heads).is_ok());
                assert_keeps(&layout, &pattern, shape.heads - 1..shape.heads);
            }
            Err(error) => prop_assert!(error.to_string().contains(" must be "), "{}", error),
        }
    }

    #[test]
    fn restrictions_of_any_length((seq, lists, lengths) in (1usize..40, prop::collection::vec((0usize..42, 0usize..42), 0..4), numbers())) {
        let layout = Pattern::fixed(8, 2).layout(2, seq, 8).unwrap();
        let fits = lists.iter().all(|&(q, k)| q == seq && k == seq) && !lists.is_empty();
        let entries: Vec<PaddingMask> = lists.iter()
            .map(|&(q, k)| PaddingMask::default().queries(vec![true; q]).keys(vec![true; k]))
            .collect();
        prop_assert_eq!(layout.mask_padding(&entries).is_ok(), fits);
        let fits = lengths.iter().all(|&length| length <= seq) && !lengths.is_empty();
        prop_assert_eq!(layout.with_key_padding(&lengths).is_ok(), fits);
    }
}

/// Returns serialized layouts of several kinds.
fn texts() -> Vec<String> {
    let layouts = [
        Pattern::causal().layout(2, 37, 8).unwrap(),
        Pattern::strided(24).layout(1, 100, 8).unwrap(),
        Pattern::fixed_heads(16, 4, 2).layout(4, 64, 16).unwrap(),
        Pattern::longformer(3, 2, [0, 17]).layout(1, 50, 8).unwrap(),
        Pattern::merged_strided(7)
            .layout(2, 41, 8)
            .unwrap()
            .with_key_padding(&[41, 13])
            .unwrap(),
    ];
    let texts = layouts.iter().map(serde_json::to_string);
    texts.collect::<Result<_, _>>().unwrap()
}

/// Asserts that deserialization fails, or gives a consistent layout.
fn assert_refused_or_sound(bytes: &[u8]) {
    if let Ok(layout) = serde_json::from_slice::<BlockLayout>(bytes) {
        // A changed name or mask is harmless; sizes may not grow beyond what was serialized.
        assert!(layout.seq_q() <= 1 << 12 && layout.seq_kv() <= 1 << 30);
        if layout.seq_kv() <= 1 << 12 {
            assert_sound(&layout);
            if layout.parts().is_some() {
                assert_parts_make_up(&layout);
            }
        }
    }
}

/// Replaces the number that begins at the `which`-th digit after a non-digit.
fn replace_number(text: &str, which: usize, by: &str) -> String {
    let bytes = text.as_bytes();
    let is_start = |at: &usize| bytes[*at].is_ascii_digit() && !bytes[at - 1].is_ascii_digit();
    let starts: Vec<usize> = (1..bytes.len()).filter(is_start).collect();
    let start = starts[which % starts.len()];
    let len = bytes[start..]
        .iter()
        .take_while(|b| b.is_ascii_digit())
        .count();
    format!("{}{by}{}", &text[..start], &text[start + len..])
}

proptest! {
    #![proptest_config(cases(4000))]

    #[test]
    fn corrupted_bytes(which in 0usize..5, changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..4), cut in prop::option::of(any::<prop::sample::Index>())) {
        let mut bytes = texts()[which].clone().into_bytes();
        for (at, byte) in changes {
            let at = at.index(bytes.len());
            bytes[at] = byte;
        }
        if let Some(cut) = cut {
            bytes.truncate(cut.index(bytes.len()));
        }
        assert_refused_or_sound(&bytes);
    }

    #[test]
    fn corrupted_numbers(which in 0usize..5, changes in prop::collection::vec((any::<usize>(), prop_oneof![0u64..80, Just(u64::MAX), Just(1 << 32), Just((1 << 32) - 1), Just(1 << 30), any::<u64>()]), 1..4)) {
        let mut text = texts()[which].clone();
        for (at, number) in changes {
            text = replace_number(&text, at, &number.to_string());
        }
        assert_refused_or_sound(text.as_bytes());
    }
}

/// A file of a few hundred bytes may claim a billion positions with runs over all of them: it is accepted or refused without visiting each.
#[test]
fn claims_are_not_expanded() {
    let runs = |list: &str| {
        format!(
            r#"{{"version":1,"name":"claim","shape":{{"heads":1,"seq_q":8,"seq_kv":1073741824,"block_size":8}},
            "batch":null,"head_patterns":[0],"patterns":[{{"run_offsets":[0,{}],"runs":[{list}]}}],"masks":[]}}"#,
            list.matches("start").count()
        )
    };
    let run = |start: u32, stride: u32, count: u32| {
        format!(r#"{{"start":{start},"stride":{stride},"count":{count},"mask":0}}"#)
    };
    let read = |list: String| serde_json::from_str::<BlockLayout>(&runs(&list));
    let all = 1 << 27;
    assert_eq!(read(run(0, 1, all)).unwrap().blocks(), 1 << 27);
    let even_and_odd = format!("{},{}", run(0, 2, all / 2), run(1, 2, all / 2));
    assert_eq!(read(even_and_odd).unwrap().blocks(), 1 << 27);
    // 2 mod 6 meets 5 mod 15 in block 20 and 5 mod 9 in block 14, and never 4 mod 15.
    let meet = format!("{},{}", run(2, 6, all / 6), run(5, 15, all / 15));
    assert!(read(meet).is_err_and(|error| error.to_string().contains("key block 20 occurs twice")));
    let apart = format!("{},{}", run(2, 6, all / 6), run(4, 15, all / 15));
    assert!(read(apart).is_ok());
    let meet = format!("{},{}", run(2, 6, all / 6), run(5, 9, all / 9));
    assert!(read(meet).is_err_and(|error| error.to_string().contains("key block 14 occurs twice")));
}

/// Parts of the notation and fragments of them, in any order.
fn notation() -> impl Strategy<Value = String> {
    let names = Pattern::NOTATION.iter().map(|form| form.split(':').next());
    let names: Vec<&str> = names.map(Option::unwrap_or_default).collect();
    let scrap = prop_oneof![
        3 => (prop::sample::select(names), numbers()).prop_map(|(name, list)| {
            let list: Vec<String> = list.iter().map(usize::to_string).collect();
            format!("{name}:{}", list.join(","))
        }),
        3 => prop::sample::select(vec!["+", "&", "/", "(", ")", "causal", ",horizontal", " "])
            .prop_map(str::to_owned),
        1 => "\\PC{0,3}",
    ];
    prop::collection::vec(scrap, 0..8).prop_map(|scraps| scraps.concat())
}

proptest! {
    #![proptest_config(cases(3000))]

    #[test]
    fn any_text((text, shape) in (notation(), shape())) {
        match text.parse::<Pattern>() {
            Ok(pattern) => drop(BlockLayout::new(&pattern, shape)),
            Err(error) => prop_assert!(error.to_string().contains("as a pattern: expected"), "{}", error),
        }
    }
}

/// Returns whether pairs may be tested one by one: with thousands of random blocks each test would draw them all.
fn is_cheap(pattern: &Pattern) -> bool {
    match pattern {
        Pattern::RandomBlocks { blocks, count, .. } => *blocks.min(count) <= 32,
        Pattern::Packed { pattern, .. } => is_cheap(pattern),
        Pattern::Union(parts) | Pattern::Intersection(parts) | Pattern::PerHead(parts) => {
            parts.iter().all(is_cheap)
        }
        _ => true,
    }
}

proptest! {
    #![proptest_config(cases(1500))]

    /// Answers for an endless sequence hold for the pairs of a short one, for any pattern.
    #[test]
    fn reach_of_any_pattern((pattern, heads, t, far) in (pattern(), 1usize..4, 0usize..50, number())) {
        let head = heads - 1;
        let position = i64::try_from(far).unwrap_or(i64::MAX);
        pattern.horizon(head, position);
        pattern.last_query(head, position);
        pattern.allows_boundary(heads, far);
        pattern.next_boundary(heads, t);
        if pattern.validate(heads).is_err() || !is_cheap(&pattern) {
            return Ok(());
        }
        for i in 0..50i64 {
            for j in 0..50i64 {
                if pattern.attends(head, i, j) {
                    prop_assert!(pattern.horizon(head, i) >= LastUse::At(j), "{} {} {}", pattern, i, j);
                    prop_assert!(pattern.last_query(head, j) >= LastUse::At(i), "{} {} {}", pattern, i, j);
                }
            }
        }
        if pattern.allows_boundary(heads, t) {
            let crosses = |i, j| (0..heads).any(|head| pattern.attends(head, i, j));
            let t = t as i64;
            prop_assert!(!(0..t).any(|i| (t..60).any(|j| crosses(i, j))), "{} at {}", pattern, t);
        }
        if let Some(next) = pattern.next_boundary(heads, t) {
            prop_assert!(next > t && pattern.allows_boundary(heads, next), "{} {}", pattern, next);
        }
    }
}
