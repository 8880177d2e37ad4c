//! Parts by residue class of layouts that are padded, stacked for a batch, or deserialized.

use blocksparse::{BlockLayout, PaddingMask, Pattern};
use rstest::rstest;
use serde_json::{Value, json};

/// Panics unless the parts contain each of the layout's pairs exactly once.
pub fn assert_parts_make_up(layout: &BlockLayout) {
    let parts = layout.parts().expect("cheaper by residue class");
    for batch in 0..layout.batch().unwrap_or(1) {
        for head in 0..layout.heads() {
            let whole = layout.to_dense_batch(batch, head);
            let mut seen = vec![vec![0; layout.seq_kv()]; layout.seq_q()];
            for part in parts {
                let position = |place| match part.residue {
                    None => place,
                    Some(residue) => residue.position(place),
                };
                for (u, row) in part.layout.to_dense_batch(batch, head).iter().enumerate() {
                    for (w, _) in row.iter().enumerate().filter(|(_, on)| **on) {
                        seen[position(u)][position(w)] += 1;
                    }
                }
            }
            for (i, row) in whole.iter().enumerate() {
                for (j, &allowed) in row.iter().enumerate() {
                    let what = format!("entry {batch}, head {head}, pair ({i}, {j})");
                    assert_eq!(seen[i][j], i32::from(allowed), "{what}");
                }
            }
        }
    }
}

/// Returns patterns that cost less by residue class, with lengths and block sizes.
fn strided() -> Vec<(Pattern, usize, usize)> {
    let (local, strided) = (Pattern::local, Pattern::strided);
    let merged = || Pattern::merged_strided(16);
    let capped = strided(16).and_causal();
    vec![
        (strided(7), 100, 8),
        (strided(16), 256, 32),
        (merged(), 250, 16),
        (merged().and_causal(), 250, 16),
        (Pattern::union([local(50), strided(16)]), 333, 8),
        (Pattern::union([strided(24), local(5)]), 600, 8),
        (Pattern::union([local(9), capped, local(30)]), 333, 8),
        (Pattern::per_head([local(20), strided(20)]), 301, 16),
        (
            Pattern::per_head([Pattern::union([merged()]), strided(16)]),
            250,
            16,
        ),
    ]
}

#[test]
fn padded_layouts_keep_their_parts() {
    for (pattern, n, block_size) in strided() {
        let layout = pattern.layout(2, n, block_size).unwrap();
        assert_parts_make_up(&layout);
        let ends = layout.with_key_padding(&[n, n / 2, n - 3]).unwrap();
        assert_parts_make_up(&ends);
        // Entries that lack some queries, some keys, all pairs of one class, and both of their ends.
        let entries = [
            PaddingMask::default(),
            PaddingMask::default().queries((0..n).map(|i| i % 5 != 2 && i < n - 9)),
            PaddingMask::default().keys((0..n).map(|j| j % 7 != 3)),
            PaddingMask::default()
                .queries((0..n).map(|i| (10..n - 20).contains(&i)))
                .keys((0..n).map(|j| (10..n - 20).contains(&j))),
        ];
        let restricted = layout.mask_padding(&entries).unwrap();
        let expected = layout.parts().unwrap().len();
        assert_eq!(restricted.parts().unwrap().len(), expected);
        assert_parts_make_up(&restricted);
        // Restricted once more.
        assert_parts_make_up(&restricted.mask_padding(&entries).unwrap());
    }
    // One key is one block of its class; without keys there are no parts.
    let layout = Pattern::merged_strided(16).layout(2, 250, 16).unwrap();
    assert_parts_make_up(&layout.with_key_padding(&[1]).unwrap());
    let nothing = PaddingMask::default().keys((0..250).map(|_| false));
    assert!(layout.mask_padding(&[nothing]).unwrap().parts().is_none());
}

#[test]
fn stacked_layouts_keep_their_parts() {
    let layouts = [
        Pattern::merged_strided(16),
        Pattern::strided(16),
        Pattern::local(40),
        Pattern::merged_strided(24),
    ]
    .map(|pattern| pattern.layout(2, 250, 8).unwrap());
    let stacked = BlockLayout::stack_batch(&layouts[..3]).unwrap();
    assert_eq!(stacked.parts().unwrap().len(), 2);
    assert_parts_make_up(&stacked);
    // Two strides need two listings.
    let stacked = BlockLayout::stack_batch(&layouts).unwrap();
    assert_eq!(stacked.parts().unwrap().len(), 3);
    assert_parts_make_up(&stacked);
    assert_parts_make_up(&stacked.with_key_padding(&[250, 200, 100, 249]).unwrap());
    assert!(
        BlockLayout::stack_batch(&layouts[2..3])
            .unwrap()
            .parts()
            .is_none()
    );
}

#[test]
fn layouts_that_are_read_keep_their_parts() {
    for (pattern, n, block_size) in strided() {
        let layout = pattern.layout(2, n, block_size).unwrap();
        let padded = layout.with_key_padding(&[n, n / 2]).unwrap();
        for layout in [layout, padded] {
            let text = serde_json::to_string(&layout).unwrap();
            let read: BlockLayout = serde_json::from_str(&text).unwrap();
            assert_eq!(read, layout);
            assert_eq!(read.parts().unwrap().len(), layout.parts().unwrap().len());
            assert_parts_make_up(&read);
        }
    }
    // Layouts serialized before parts existed have none.
    let layout = Pattern::merged_strided(16).layout(1, 250, 16).unwrap();
    let mut data = serde_json::to_value(&layout).unwrap();
    data.as_object_mut().unwrap().remove("parts");
    let read: BlockLayout = serde_json::from_value(data).unwrap();
    assert_eq!(read, layout);
    assert!(read.parts().is_none());
}

/// Single changes to the parts: deserialization fails.
#[rstest]
#[case("/parts/1/residue", json!(null), "part 1: must be of the layout's sizes")]
#[case("/parts/1/residue/0", json!(8), "part 1: must be of the layout's sizes")]
#[case("/parts/1/residue/1", json!(0), "part 1: must be of the layout's sizes")]
#[case("/parts/0/residue", json!([16, 16]), "part 0: must be of the layout's sizes")]
#[case("/parts/0/layout/batch", json!(1), "part 0: must be of the layout's sizes")]
#[case("/parts/1/layout/patterns/0/runs/0/start", json!(1), "parts must have the layout's pairs, each once")]
#[case("/parts/1/layout/patterns/0/runs/0/mask", json!(0), "parts must have the layout's pairs, each once")]
#[case("/parts/0/layout/patterns/0/runs/0/mask", json!(2), "parts must have the layout's pairs, each once")]
#[case("/parts/0/layout/parts", json!([]), "")]
fn corrupt_parts(#[case] place: &str, #[case] value: Value, #[case] message: &str) {
    let layout = Pattern::merged_strided(16).layout(2, 250, 16).unwrap();
    let mut data = serde_json::to_value(&layout).unwrap();
    *data.pointer_mut(place).expect(place) = value;
    match serde_json::from_value::<BlockLayout>(data) {
        Ok(read) => assert!(message.is_empty() && read == layout, "{place}"),
        Err(error) => {
            let error = error.to_string();
            let is_right = !message.is_empty() && error.contains(message);
            assert!(is_right, "{place}: {error}");
        }
    }
}

/// Parts that contain a pair twice, or lack one.
#[test]
fn parts_of_other_pairs() {
    let data =
        |pattern: Pattern| serde_json::to_value(pattern.layout(1, 250, 16).unwrap()).unwrap();
    let [narrow, wide] = [5, 40].map(|window| {
        data(Pattern::union([
            Pattern::local(window),
            Pattern::strided(16),
        ]))
    });
    for (mut data, parts) in [(narrow.clone(), &wide), (wide.clone(), &narrow)] {
        data["parts"] = parts["parts"].clone();
        refused! { serde_json::from_value::<BlockLayout>(data) => "…each once…"; }
    }
    // One part twice.
    let mut data = narrow;
    let twice: Vec<Value> = [0, 1, 0].map(|part| data["parts"][part].clone()).into();
    data["parts"] = twice.into();
    refused! { serde_json::from_value::<BlockLayout>(data) => "…each once…"; }
}
