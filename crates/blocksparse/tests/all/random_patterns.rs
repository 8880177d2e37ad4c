//! Random patterns of every kind, and their combinations.

use blocksparse::Pattern;
use proptest::prelude::*;

pub fn simple() -> impl Strategy<Value = Pattern> {
    prop_oneof![
        Just(Pattern::dense()),
        Just(Pattern::causal()),
        (1usize..90).prop_map(Pattern::local),
        (1usize..90).prop_map(Pattern::strided),
        (1usize..40).prop_map(Pattern::merged_strided),
        (0usize..90).prop_map(Pattern::prefix_lm),
        (1usize..60, 0usize..40).prop_map(|(window, sink)| Pattern::streaming(window, sink)),
        (1usize..8, 1usize..12, 1usize..4)
            .prop_map(|(groups, columns, verts)| {
                let verts = verts.min(groups);
                Pattern::fixed_heads(
                    groups * columns,
                    columns,
                    [1, 2, 4][verts - 1].min(groups).max(1),
                )
            })
            .prop_filter("heads divide", |p| p.validate(4).is_ok()),
        (0usize..40, 1usize..9).prop_map(|(reach, d)| Pattern::dilated_window(reach, d)),
        (1usize..40, 0usize..3, 0usize..3)
            .prop_map(|(size, before, after)| Pattern::chunked_window(size, before, after)),
        prop::collection::vec(0usize..150, 0..30).prop_map(Pattern::global),
        (0usize..60, 1usize..60).prop_map(|(first, width)| Pattern::global(first..first + width)),
        prop::collection::vec(0usize..90, 0..5).prop_map(Pattern::global_keys),
        (1usize..6, 1usize..12, 1usize..4, any::<bool>()).prop_map(
            |(groups, columns, verts, horizontal)| {
                Pattern::deepspeed_fixed(groups * columns, columns, verts.min(groups), horizontal)
            }
        ),
        (
            prop::collection::vec(0usize..150, 0..9),
            prop::collection::vec(0usize..150, 0..40)
        )
            .prop_map(|(vertical, slash)| Pattern::vertical_slash(vertical, slash)),
        prop::collection::vec(0usize..150, 0..9).prop_map(Pattern::documents),
        (1usize..40, 1usize..20, 0usize..5, any::<u64>())
            .prop_map(|(block, blocks, count, seed)| Pattern::bigbird(block, blocks, count, seed)),
        (1i64..9, 1i64..9).prop_map(|(a, c)| {
            Pattern::from_fn("cells", move |head, i, j| {
                (i.div_euclid(a) + j.div_euclid(c) + head as i64) % 3 == 0
            })
        }),
    ]
}

pub fn pattern() -> impl Strategy<Value = Pattern> {
    simple().prop_recursive(3, 12, 3, |inner| {
        prop_oneof![
            prop::collection::vec(inner.clone(), 1..4).prop_map(Pattern::union),
            prop::collection::vec(inner.clone(), 1..4).prop_map(Pattern::intersection),
            prop::collection::vec(inner.clone(), 1..3).prop_map(Pattern::per_head),
            inner.clone().prop_map(Pattern::and_causal),
            (prop::collection::vec(0usize..150, 0..6), inner)
                .prop_map(|(starts, inner)| Pattern::packed(starts, inner)),
        ]
    })
}
