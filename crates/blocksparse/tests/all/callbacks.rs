//! Callbacks are called for the pairs of a layout only.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};

use blocksparse::{BlockLayout, LayoutShape, Pattern};
use rstest::rstest;

use crate::patterns::assert_keeps;

type Asked = Arc<Mutex<HashMap<(usize, i64, i64), usize>>>;

/// A callback that records its calls.
fn noting(asked: &Asked) -> Pattern {
    let asked = asked.clone();
    Pattern::from_fn("noting", move |head, i, j| {
        *asked.lock().unwrap().entry((head, i, j)).or_default() += 1;
        (i + j) % 3 != head as i64
    })
}

/// Query row `r` is at position `r + seq_kv − seq_q`: with more queries than keys the first ones are before position 0.
#[rstest]
#[case([100, 100], 64)]
#[case([64, 64], 64)]
#[case([5, 100], 64)]
#[case([9, 30], 8)]
#[case([100, 37], 32)]
#[case([1, 1], 128)]
fn every_pair_is_asked_for_once(#[case] lengths: [usize; 2], #[case] block_size: usize) {
    let [seq_q, seq_kv] = lengths;
    let shape = LayoutShape::new(2, lengths, block_size);
    let asked = Asked::default();
    let layout = BlockLayout::new(&noting(&asked), shape).unwrap();
    // Printing, serialization, padding and packing make no further calls.
    let _ = layout.to_string();
    let _ = serde_json::to_string(&layout).unwrap();
    let _ = layout.with_key_padding(&[seq_kv / 2, seq_kv]).unwrap();
    let _ = layout.pack_heads(1);
    let _ = layout.column(0, 0);
    let offset = seq_kv as i64 - seq_q as i64;
    let queries = offset..seq_kv as i64;
    let asked = asked.lock().unwrap();
    assert_eq!(asked.len(), 2 * seq_q * seq_kv);
    for (&(head, i, j), &times) in &*asked {
        let is_right = head < 2 && queries.contains(&i) && (0..seq_kv as i64).contains(&j);
        assert!(is_right, "head {head}, ({i}, {j})");
        assert_eq!(times, 1, "head {head}, ({i}, {j})");
    }
}

/// A callback that indexes a list by position.
#[rstest]
#[case::alone(|own: Pattern| own)]
#[case::causal(Pattern::and_causal)]
#[case::union(|own| Pattern::union([Pattern::local(3), own]))]
#[case::documents(|own| Pattern::intersection([Pattern::documents([0, 33, 90]), own]))]
#[case::heads(|own| Pattern::per_head([Pattern::strided(7), own]))]
#[case::packed(|own| Pattern::packed([0, 33, 90], own))]
#[case::nested(|own| Pattern::packed([5, 70], Pattern::union([own, Pattern::fixed(8, 2)])))]
fn lists_are_never_left(#[case] within: fn(Pattern) -> Pattern) {
    let n = 100;
    let document: Vec<usize> = (0..n).map(|position| position / 30).collect();
    let own = Pattern::from_fn("documents of a list", move |_, i, j| {
        document[i as usize] == document[j as usize]
    });
    let pattern = within(own);
    for block_size in blocksparse::BLOCK_SIZES {
        let layout = pattern.layout(2, n, block_size).unwrap();
        assert_keeps(&layout, &pattern, 1..2);
    }
}

#[test]
fn block_callbacks_are_asked_for_the_blocks_that_there_are() {
    let shape = LayoutShape::new(2, [100, 70], 32);
    let mut asked = Vec::new();
    let layout = BlockLayout::from_block_fn("noting", shape, |head, q_block, kv_block| {
        asked.push((head, q_block, kv_block));
        None
    });
    assert_eq!(layout.unwrap().blocks(), 0);
    let blocks = (0..2).flat_map(|head| (0..4).map(move |q| (head, q)));
    let expected: Vec<_> = blocks
        .flat_map(|(head, q)| (0..3).map(move |k| (head, q, k)))
        .collect();
    assert_eq!(asked, expected);
}
