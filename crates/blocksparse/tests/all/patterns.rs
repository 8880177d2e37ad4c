//! Layouts of all patterns against their predicates, and the worked examples.

use std::ops::Range;

use blocksparse::{BlockLayout, BlockMask, LayoutShape, PaddingMask, Pattern};
use proptest::prelude::*;
use rstest::rstest;

use crate::random_patterns::{pattern, simple};

/// Asserts that a layout keeps exactly the pairs that [`Pattern::attends`] allows, for `heads`.
#[track_caller]
pub fn assert_keeps(layout: &BlockLayout, pattern: &Pattern, heads: Range<usize>) {
    let offset = layout.seq_kv() as i64 - layout.seq_q() as i64;
    for head in heads {
        for (i, row) in layout.to_dense(head).iter().enumerate() {
            for (j, &kept) in row.iter().enumerate() {
                let allowed = pattern.attends(head, i as i64 + offset, j as i64);
                assert_eq!(kept, allowed, "{pattern} head {head} ({i}, {j})");
            }
        }
    }
}

fn draw(dense: &[Vec<bool>]) -> Vec<String> {
    let mark = |on: &bool| if *on { '1' } else { '.' };
    dense
        .iter()
        .map(|row| row.iter().map(mark).collect())
        .collect()
}

/// The worked examples of the definitions, from the predicate and from a layout.
#[rstest]
#[case(Pattern::merged_strided(4), 0, &[
    "1...........", "11..........", "111.........", "1111........", "11111.......", ".11111......",
    "..11111.....", "...11111....", "1...11111...", ".1...11111..", "..1...11111.", "...1...11111",
])]
#[case(Pattern::strided(4), 0, &[
    "1.......", ".1......", "..1.....", "...1....", "1...1...", ".1...1..", "..1...1.", "...1...1",
])]
#[case(Pattern::fixed_heads(4, 1, 2), 0, &[
    "1.......", "11......", "111.....", "1111....", "...11...", "...111..", "...1111.", "...11111",
])]
#[case(Pattern::fixed_heads(4, 1, 2), 1, &[
    "1.......", "11......", "111.....", "1111....", "..1.1...", "..1.11..", "..1.111.", "..1.1111",
])]
#[case(Pattern::local(2), 0, &["1...", "11..", ".11.", "..11"])]
#[case(Pattern::prefix_lm(2), 0, &["11..", "11..", "111.", "1111"])]
#[case(Pattern::streaming(2, 1), 0, &["1....", "11...", "111..", "1.11.", "1..11"])]
#[case(Pattern::dilated_window(2, 2), 0, &[
    "1.1.1...", ".1.1.1..", "1.1.1.1.", ".1.1.1.1", "1.1.1.1.", ".1.1.1.1", "..1.1.1.", "...1.1.1",
])]
#[case(Pattern::longformer(1, 1, [0]), 0, &[
    "11111111", "111.....", "1111....", "1.111...", "1..111..", "1...111.", "1....111", "1.....11",
])]
#[case(bigbird_by_hand(), 0, &[
    "11111111", "111.1..1", "1111.1.1", "1.111.11", "11.111.1", "1.1.1111", "1..1.111", "11111111",
])]
#[case(Pattern::vertical_slash([0, 3], [0, 1, 4]), 0, &[
    "1.......", "11......", "111.....", "1.11....", "1..11...", "11.111..", "1.11.11.", "1..1..11",
])]
#[case(Pattern::chunked(3), 0, &["111..", "111..", "111..", "...11", "...11"])]
#[case(Pattern::chunked_window(2, 1, 0), 0, &["11....", "11....", "1111..", "1111..", "..1111", "..1111"])]
#[case(Pattern::documents([0, 2, 5]).and_causal(), 0, &["1.....", "11....", "..1...", "..11..", "..111.", ".....1"])]
#[case(Pattern::packed([0, 3], Pattern::fixed(2, 1)), 0, &[
    "1......", "11.....", ".11....", "...1...", "...11..", "....11.", "....111",
])]
#[case(Pattern::deepspeed_fixed(4, 1, 2, true), 0, &[
    "1111...1", "1111...1", "1111...1", "11111111", "...11111", "...11111", "...11111", "11111111",
])]
#[case(Pattern::deepspeed_fixed(4, 1, 2, false), 1, &[
    "1111..1.", "1111..1.", "1111..1.", "1111..1.", "..1.1111", "..1.1111", "..1.1111", "..1.1111",
])]
#[case(Pattern::deepspeed_variable(&[1, 2], 6, [5], false), 0, &[
    "1....1", ".11..1", ".11..1", "...111", "...111", ".....1",
])]
#[case(Pattern::global_keys([0, 2, 3]), 0, &["1.11.", "1.11.", "1.11.", "1.11.", "1.11."])]
#[case(Pattern::document_ids("aabbba".chars()).and_causal(), 0, &["1.....", "11....", "..1...", "..11..", "..111.", ".....1"])]
#[case(Pattern::deepspeed_variable(&[1, 2], 6, [5], true), 0, &[
    "1....1", ".11..1", ".11..1", "...111", "...111", "111111",
])]
fn worked_examples(#[case] pattern: Pattern, #[case] head: usize, #[case] rows: &[&str]) {
    let n = rows.len();
    let predicate: Vec<Vec<bool>> = (0..n)
        .map(|i| {
            (0..n)
                .map(|j| pattern.attends(head, i as i64, j as i64))
                .collect()
        })
        .collect();
    assert_eq!(draw(&predicate), rows);
    let layout = pattern.layout(2, n, 8).unwrap();
    assert_eq!(draw(&layout.to_dense(head)), rows);
}

/// Blocks that only some of a row's queries see differ from adjacent ones that all of them see in part.
#[test]
fn zones_that_look_alike_are_not_joined() {
    let pattern = Pattern::intersection([Pattern::global(40..65), Pattern::fixed(2, 1)]);
    assert_keeps(&pattern.layout(1, 66, 8).unwrap(), &pattern, 0..1);
}

/// BigBird in blocks of one, with the random blocks of the worked example.
fn bigbird_by_hand() -> Pattern {
    let random = [(1, 4), (2, 5), (3, 6), (4, 1), (5, 2), (6, 3)];
    Pattern::union([
        Pattern::chunked_window(1, 1, 1),
        Pattern::global([0, 7]),
        Pattern::from_fn("random", move |_, i, j| random.contains(&(i, j))),
    ])
}

/// Rows have as many distinct random blocks as requested or available, none at an end or next to the row's own; heads, rows and seeds differ.
#[test]
fn bigbird_draws_blocks_over_the_whole_range() {
    let (block, blocks) = (8, 16);
    let rows = |count: usize, seed: u64, head: usize| -> Vec<Vec<usize>> {
        let pattern = Pattern::random_blocks(block, blocks, count, seed);
        let layout = pattern.layout(2, block * blocks, block).unwrap();
        let row = |row| layout.row(layout.pattern_of(0, head), row).into_iter();
        let of_row = |r| row(r).map(|entry| entry.block as usize).collect();
        (0..blocks).map(of_row).collect()
    };
    for count in [0, 1, 3, 11, 100] {
        for (row, drawn) in rows(count, 5, 0).iter().enumerate() {
            let allowed = (1..blocks - 1)
                .filter(|other| other.abs_diff(row) > 1)
                .count();
            let expected = if row == 0 || row == blocks - 1 {
                0
            } else {
                count.min(allowed)
            };
            assert_eq!(drawn.len(), expected, "row {row}");
            assert!(
                drawn
                    .iter()
                    .all(|&j| j > 0 && j < blocks - 1 && j.abs_diff(row) > 1)
            );
        }
    }
    assert_ne!(rows(3, 5, 0), rows(3, 5, 1));
    assert_ne!(rows(3, 5, 0), rows(3, 6, 0));
    assert_eq!(rows(3, 5, 0), rows(3, 5, 0));
    // Later blocks are drawn too, and every block occurs.
    let mut seen: Vec<usize> = (0..20).flat_map(|seed| rows(2, seed, 0).concat()).collect();
    seen.sort_unstable();
    seen.dedup();
    assert_eq!(seen, (1..blocks - 1).collect::<Vec<_>>());
    let whole = Pattern::bigbird(block, blocks, 3, 1)
        .layout(2, block * blocks, block)
        .unwrap();
    assert_eq!(whole.row(0, 0).len(), blocks);
    assert_eq!(whole.row(0, 7).len(), 3 + 2 + 3);
}

pub(crate) fn shape() -> impl Strategy<Value = LayoutShape> {
    (1usize..150, 1usize..150, any::<bool>(), 0usize..5).prop_map(|(seq_q, other, square, b)| {
        let seq_kv = if square { seq_q } else { other };
        LayoutShape::new(4, [seq_q, seq_kv], blocksparse::BLOCK_SIZES[b])
    })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, failure_persistence: None, ..ProptestConfig::default() })]

    /// The main property: a layout keeps exactly what `attends` allows, for any pattern and sizes; columns are the transpose of rows; no kept block
    /// is empty; counts agree.
    #[test]
    fn layout_equals_predicate((pattern, shape) in (pattern(), shape())) {
        let layout = BlockLayout::new(&pattern, shape).unwrap();
        let offset = shape.seq_kv as i64 - shape.seq_q as i64;
        assert_keeps(&layout, &pattern, 0..shape.heads);
        let mut pairs = 0;
        for head in 0..shape.heads {
            for (i, row) in layout.to_dense(head).iter().enumerate() {
                pairs += row.iter().filter(|&&kept| kept).count() as u64;
                let last = row.iter().rposition(|&kept| kept).map_or(i64::MIN, |j| j as i64);
                prop_assert!(!pattern.is_causal() || last <= i as i64 + offset, "{} {}", pattern, i);
            }
        }
        prop_assert_eq!(layout.allowed_pairs(), pairs);
        for p in 0..layout.num_patterns() {
            let mut transposed = vec![Vec::new(); layout.kv_blocks()];
            for q_block in 0..layout.q_blocks() {
                let row = layout.row(p, q_block);
                prop_assert!(row.windows(2).all(|w| w[0].block < w[1].block));
                let offsets = layout.row_offsets(p);
                prop_assert_eq!(row.len(), offsets[q_block + 1] - offsets[q_block]);
                for entry in row {
                    prop_assert!(!layout.masks()[entry.mask as usize].is_empty());
                    transposed[entry.block as usize].push((q_block as u32, entry.mask));
                }
            }
            for (kv_block, expected) in transposed.iter().enumerate() {
                let column = layout.column(p, kv_block);
                let column: Vec<_> = column.iter().map(|e| (e.block, e.mask)).collect();
                prop_assert_eq!(&column, expected);
            }
        }
    }

    /// Padding masks keep exactly the pairs of real positions, in every batch entry; the result serializes.
    #[test]
    fn restrictions((pattern, shape, seeds) in (pattern(), shape(), prop::collection::vec(any::<(u64, u64)>(), 1..4))) {
        let layout = BlockLayout::new(&pattern, shape).unwrap();
        // Runs of real positions, of 0 to 31 each; a seed that is 0 in its lowest bits means all.
        let list = |seed: u64, len: usize| -> Option<Vec<bool>> {
            let cuts: Vec<usize> = (0..6).map(|k| (seed >> (5 * k) & 31) as usize).collect();
            let flips = cuts.iter().enumerate().flat_map(|(k, &n)| vec![k % 2 == 0; n]);
            (!seed.is_multiple_of(4)).then(|| flips.chain(std::iter::repeat(seed & 1 << 40 != 0)).take(len).collect())
        };
        let entries: Vec<PaddingMask> = seeds.iter().map(|&(q, k)| {
            let mut entry = PaddingMask::default();
            (entry.queries, entry.keys) = (list(q, shape.seq_q), list(k, shape.seq_kv));
            entry
        }).collect();
        let restricted = layout.mask_padding(&entries).unwrap();
        let part = |list: &Option<Vec<bool>>, at: usize| list.as_ref().is_none_or(|list| list[at]);
        for (batch, entry) in entries.iter().enumerate() {
            for head in 0..shape.heads {
                let (whole, got) = (layout.to_dense(head), restricted.to_dense_batch(batch, head));
                for i in 0..shape.seq_q {
                    for j in 0..shape.seq_kv {
                        let expected = whole[i][j] && part(&entry.queries, i) && part(&entry.keys, j);
                        prop_assert_eq!(got[i][j], expected, "{} entry {} ({}, {})", pattern, batch, i, j);
                    }
                }
            }
        }
        let text = serde_json::to_string(&restricted).unwrap();
        prop_assert_eq!(serde_json::from_str::<BlockLayout>(&text).unwrap(), restricted);
    }

    #[test]
    fn algebra((a, b, shape) in (simple(), simple(), shape())) {
        let layout = |p: &Pattern| BlockLayout::new(p, shape).unwrap();
        let both = [a.clone(), b.clone()];
        let swapped = [b.clone(), a.clone()];
        prop_assert_eq!(layout(&Pattern::union(both.clone())), layout(&Pattern::union(swapped.clone())));
        prop_assert_eq!(layout(&Pattern::intersection(both.clone())), layout(&Pattern::intersection(swapped)));
        prop_assert_eq!(layout(&Pattern::union([a.clone(), a.clone()])), layout(&a));
        prop_assert_eq!(layout(&Pattern::intersection([a.clone(), Pattern::dense()])), layout(&a));
        let absorbed = Pattern::union([a.clone(), Pattern::intersection(both)]);
        prop_assert_eq!(layout(&absorbed), layout(&a));
    }

    /// serde round trip, and the same layout from a block callback.
    #[test]
    fn round_trips((pattern, shape) in (pattern(), shape())) {
        let layout = BlockLayout::new(&pattern, shape).unwrap();
        let text = serde_json::to_string(&layout).unwrap();
        let back: BlockLayout = serde_json::from_str(&text).unwrap();
        prop_assert_eq!(&back, &layout);
        prop_assert_eq!(back.name(), layout.name());
        let dense: Vec<_> = (0..shape.heads).map(|head| layout.to_dense(head)).collect();
        let b = shape.block_size;
        let rebuilt = BlockLayout::from_block_fn("again", shape, |head, q_block, kv_block| {
            Some(BlockMask::from_fn(b, |r, c| {
                let row = dense[head].get(q_block * b + r);
                row.is_some_and(|row| row.get(kv_block * b + c) == Some(&true))
            }))
        });
        prop_assert_eq!(rebuilt.unwrap(), layout);
    }
}

/// A million positions: 134 million blocks per head, in little memory.
#[test]
fn a_million_positions() {
    let layout = Pattern::fixed(128, 32).layout(8, 1 << 20, 32).unwrap();
    let windows = (1u64 << 20) / 128;
    // Per window of four block rows: 1 + 2 + 3 + 4 own blocks, and one of each earlier window.
    let per_head = windows * 10 + 4 * (windows * (windows - 1) / 2);
    assert_eq!(layout.blocks() as u64, 8 * per_head);
    assert_eq!(layout.num_patterns(), 1);
    assert_eq!(layout.masks().len(), 2, "full and the causal diagonal");
    assert!(
        layout.host_bytes() < 8 << 20,
        "{} bytes",
        layout.host_bytes()
    );
    // A summary column is seen by its own window's rows and by every later row.
    assert_eq!(layout.column_runs(0, 3).len(), 2);
    assert_eq!(layout.column(0, 3).len(), (1 << 20) / 32 - 3);
}

/// Padding and packing also cost only the kept blocks: neither visits pairs or expands runs.
#[test]
fn a_million_positions_padded_and_packed() {
    let n = 1 << 20;
    let layout = Pattern::fixed(128, 32).layout(8, n, 32).unwrap();
    let padded = layout.with_key_padding(&[n, n - 77, 1000]).unwrap();
    assert!(padded.host_bytes() < 24 << 20, "{}", padded.host_bytes());
    // No query sees a key beyond the padding.
    assert!(padded.column_runs(padded.pattern_of(2, 0), 32).is_empty());
    let starts = (0..64).map(|k| k * (n / 64) + k % 5);
    let packed = Pattern::packed(starts, Pattern::fixed(128, 32))
        .layout(8, n, 32)
        .unwrap();
    assert!(packed.host_bytes() < 24 << 20, "{}", packed.host_bytes());
}

#[test]
fn lengths_that_do_not_fit() {
    let layout = Pattern::causal().layout(2, 20, 8).unwrap();
    refused! {
        layout.with_key_padding(&[20, 21]) => "lengths must be at most 20, seq_kv, got 21";
        layout.mask_padding(&[]) => "entries must be at least one, got 0";
    }
    let short = PaddingMask::default().queries([true; 19]);
    refused! { layout.mask_padding(&[short]) => "queries must be 20 long, seq_q, got 19"; }
    let two = BlockLayout::stack_batch(&[layout.clone(), layout]).unwrap();
    refused! { two.with_key_padding(&[3]) => "entries must be 2, one for each batch entry of the layout, got 1"; }
}

#[test]
fn pictures_are_written() {
    let folder = tempfile::tempdir().unwrap();
    let layout = Pattern::fixed_heads(16, 4, 4).layout(4, 64, 8).unwrap();
    let (png, svg) = (folder.path().join("p.png"), folder.path().join("p.svg"));
    layout.save_png(&png).unwrap();
    layout.save_svg(&svg).unwrap();
    assert!(std::fs::read(&png).unwrap().starts_with(b"\x89PNG"));
    let svg = std::fs::read_to_string(&svg).unwrap();
    assert!(svg.contains("<rect") && svg.contains("key position"));
    refused! { layout.save_png(folder.path().join("no/such/folder.png")) => "…folder.png…"; }
}

#[test]
fn text_drawing() {
    let layout = Pattern::causal().layout(2, 32, 8).unwrap();
    let text = layout.to_string();
    let is_right = text.starts_with("causal: 2 heads, 32 × 32 positions in blocks of 8\n");
    assert!(is_right, "{text}");
    assert!(text.ends_with("+...\n#+..\n##+.\n###+\n"), "{text}");
}
