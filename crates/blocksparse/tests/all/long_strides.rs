//! The cost of a stride depends on the pairs in the sequence, not on its length: otherwise these tests would take hours.

use blocksparse::{BlockLayout, LayoutShape, Pattern};
use rstest::rstest;

use crate::patterns::assert_keeps;

const LONGEST: usize = 1 << 40;

/// Returns patterns with a stride (or a repeating window) of this length, in every possible place.
fn patterns(stride: usize) -> Vec<Pattern> {
    let strided = || Pattern::strided(stride);
    let even = stride & !1;
    let with_text = [
        format!("strided:{stride}"),
        format!("merged-strided:{stride} & causal"),
        format!("local:3 + strided:{stride} / causal"),
        format!("packed:0,30(strided:{stride})"),
    ];
    let mut patterns: Vec<Pattern> = (with_text.iter())
        .map(|text| text.parse().unwrap())
        .collect();
    patterns.extend([
        strided(),
        strided().and_causal(),
        Pattern::merged_strided(stride),
        Pattern::merged_strided(stride).and_causal(),
        Pattern::union([Pattern::local(5), Pattern::union([strided()])]),
        Pattern::union([Pattern::local(5), strided().and_causal()]),
        Pattern::intersection([Pattern::fixed(8, 2), strided()]),
        Pattern::per_head([strided(), Pattern::local(20)]),
        Pattern::per_head([Pattern::merged_strided(stride), strided()]),
        Pattern::packed([0, 11], Pattern::merged_strided(stride)),
        Pattern::dilated_window(1, stride),
        Pattern::longformer(1, stride, [3]),
        Pattern::fixed(stride, 1),
        Pattern::fixed_heads(even, even / 2, 2),
        Pattern::deepspeed_fixed(stride, 3, 2, true),
        Pattern::deepspeed_fixed(stride, stride / 2, 2, false),
        Pattern::chunked_window(stride, 1, 0),
        Pattern::union([strided(), Pattern::fixed(even - 2, 2)]),
    ]);
    patterns
}

#[rstest]
fn time_does_not_follow_the_stride(
    #[values(63, 64, 65, 100, 4097, 10_000_000, LONGEST)] stride: usize,
    #[values([64, 64], [1, 64], [100, 37], [300, 300])] lengths: [usize; 2],
    #[values(8, 32, 128)] block_size: usize,
) {
    let shape = LayoutShape::new(2, lengths, block_size);
    for pattern in patterns(stride) {
        let layout = BlockLayout::new(&pattern, shape).unwrap();
        assert!(layout.host_bytes() < 1 << 17, "{pattern}");
        for part in layout.parts().unwrap_or_default() {
            assert!(part.layout.host_bytes() < 1 << 17, "{pattern}");
        }
        assert_keeps(&layout, &pattern, 0..2);
    }
}

/// Over a million positions, a stride longer than the sequence costs a few blocks per row, not a visit of every block.
#[rstest]
#[case(Pattern::strided(LONGEST))]
#[case(Pattern::strided((1 << 19) + 1))]
#[case(Pattern::merged_strided(LONGEST - 1))]
#[case(Pattern::fixed(1 << 40, 1 << 20))]
#[case(Pattern::fixed(3 << 19, 3))]
#[case(Pattern::deepspeed_fixed((1 << 20) + 1, 3, 2, false))]
#[case(Pattern::dilated_window(2, (1 << 19) + 3))]
fn time_follows_the_kept_blocks(#[case] pattern: Pattern) {
    // Local windows of the whole sequence keep half of all blocks, as one run per row.
    let layout = pattern.layout(2, 1 << 20, 32).unwrap();
    assert!(layout.host_bytes() < 32 << 20, "{pattern}");
}

/// Common multiples of such periods overflow 64 bits: heads are then compared instead.
#[test]
fn periods_whose_common_multiple_overflows() {
    let [a, b] = [999_999_999_989, 999_999_999_961];
    let of = |verts: usize| format!("deepspeed-fixed:1000000000000,1,{verts}");
    let pattern: Pattern = format!("{}+{}", of(a), of(b)).parse().unwrap();
    let layout = pattern.layout(4, 64, 8).unwrap();
    assert_keeps(&layout, &pattern, 0..4);
    let in_turn = Pattern::per_head([pattern.clone(), pattern]);
    assert!(in_turn.layout(4, 64, 8).is_ok());
}
