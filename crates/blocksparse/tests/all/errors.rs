//! Every inconsistency is an error that names it.

use blocksparse::{BlockLayout, BlockMask, LayoutShape, Pattern};
use rstest::rstest;
use serde_json::{Value, json};

#[test]
fn bad_arguments() {
    refused! {
        Pattern::causal().layout(8, 64, 24) => "block_size must be 8, 16, 32, 64 or 128, got 24";
        Pattern::causal().layout(8, 64, 0) => "block_size must be 8, 16, 32, 64 or 128, got 0";
        Pattern::causal().layout(0, 64, 8) => "heads must be between 1 and 65536, got 0";
        Pattern::causal().layout(8, 0, 8) => "seq_q must be between 1 and 1073741824, got 0";
        Pattern::causal().layout(8, usize::MAX, 8) => "seq_q must be between 1 and 1073741824, got 18446744073709551615";
        Pattern::local(0).layout(8, 64, 8) => "local(0): window must be between 1 and 1099511627776, got 0";
        Pattern::local(usize::MAX).layout(8, 64, 8) => "local(18446744073709551615): window must be between 1 and 1099511627776, got 18446744073709551615";
        Pattern::strided(0).layout(8, 64, 8) => "strided(0): stride must be between 1 and 1099511627776, got 0";
        Pattern::fixed(128, 48).layout(8, 256, 8) => "fixed(128, 48): stride must be a multiple of columns = 48, got 128";
        Pattern::fixed(0, 4).layout(8, 256, 8) => "fixed(0, 4): stride must be between 1 and 1099511627776, got 0";
        Pattern::fixed_heads(8, 4, 3).layout(6, 64, 8) => "fixed(8, 4, num_verts = 3): columns must be at most stride = 8, got 3 groups of 4";
        Pattern::fixed_heads(16, 4, 4).layout(6, 64, 8) => "fixed(16, 4, num_verts = 4): heads must be a multiple of num_verts = 4, got 6";
        Pattern::per_head([Pattern::dense(), Pattern::causal()]).layout(3, 64, 8) => "per_head(dense, causal): heads must be a multiple of the 2 patterns, got 3";
        Pattern::dilated_window(3, 0).layout(3, 64, 8) => "window(3, dilation = 0): dilation must be between 1 and 1099511627776, got 0";
        Pattern::chunked(0).layout(3, 64, 8) => "chunked(0): size must be between 1 and 1099511627776, got 0";
        Pattern::chunked_window(1 << 20, 1 << 30, 0).layout(3, 64, 8) => "chunked(1048576, before = 1073741824, after = 0): before · size must be between 0 and 1099511627776, got 1125899906842624";
        Pattern::Global { ranges: vec![(4, 9), (8, 12)] }.layout(3, 64, 8) => "global(4..9, 8..12): ranges must be ascending and disjoint, got 8..12";
        Pattern::Global { ranges: vec![(4, 4)] }.layout(3, 64, 8) => "global(4..4): ranges must be ascending and disjoint, got 4..4";
        Pattern::deepspeed_fixed(8, 3, 3, true).layout(3, 64, 8) => "columns(8, 3, num_verts = 3): columns must be at most stride = 8, got 3 groups of 3";
        Pattern::GlobalKeys { ranges: vec![(4, 9), (8, 12)] }.layout(3, 64, 8) => "global_keys(4..9, 8..12): ranges must be ascending and disjoint, got 8..12";
        Pattern::deepspeed_variable(&[8, 0], 64, [1], true).layout(3, 64, 8) => "documents(0, 8, 8): starts must be ascending, got 8 before 8";
        Pattern::deepspeed_variable(&[], 64, [1], true).layout(3, 64, 8) => "documents(0, 0): starts must be ascending, got 0 before 0";
        Pattern::Documents { starts: vec![0, 7, 7] }.layout(3, 64, 8) => "documents(0, 7, 7): starts must be ascending, got 7 before 7";
        Pattern::VerticalSlash { vertical: vec![], slash: vec![2, 1] }.layout(3, 64, 8) => "vertical_slash([], [2, 1]): slash must be ascending, got 2 before 1";
        Pattern::vertical_slash([usize::MAX], []).layout(3, 64, 8) => "vertical_slash([18446744073709551615], []): vertical must be between 0 and 1099511627776, got 18446744073709551615";
        Pattern::random_blocks(0, 4, 1, 0).layout(3, 64, 8) => "random_blocks(0, 4, 1, seed = 0): block must be between 1 and 1099511627776, got 0";
        Pattern::random_blocks(8, 1 << 30, 1 << 40, 0).layout(3, 64, 8) => "random_blocks(8, 1073741824, 1099511627776, seed = 0): count must be at most 4096, got 1099511627776";
        Pattern::Global { ranges: vec![(5, 2)] }.layout(3, 64, 8) => "global(5..2): ranges must be ascending and disjoint, got 5..2";
        Pattern::union([]).layout(3, 64, 8) => "union(): the number of parts must be between 1 and 1099511627776, got 0";
        Pattern::union([Pattern::causal(), Pattern::local(0)]).layout(3, 64, 8) => "local(0): window must be between 1 and 1099511627776, got 0";
    }
}

#[test]
fn masks_of_another_block_size() {
    let shape = LayoutShape::square(1, 32, 16);
    // 15 × 15 bits take as many words as 16 × 16.
    for other in [0, 1, 8, 15, 17, 32] {
        let mask = BlockMask::from_fn(other, |_, _| true);
        let layout = BlockLayout::from_block_fn("bad", shape, |_, _, _| Some(mask.clone()));
        refused! { layout => format!("the block size of the mask returned by the callback must be 16, the layout's, got {other}"); }
    }
}

#[test]
fn blocks_of_a_row_that_are_not_ascending_or_not_there() {
    let shape = LayoutShape::square(1, 64, 16);
    let full = || BlockMask::corner(16, 16, 16);
    for (blocks, got) in [(vec![0, 4], 4), (vec![2, 1], 1), (vec![1, 1], 1)] {
        let row = |_, _| blocks.iter().map(|&block| (block, full())).collect();
        let error = BlockLayout::from_row_fn("bad", shape, row).unwrap_err();
        let expected = format!(
            "a block of a row returned by the callback must be ascending, below 4, got {got}"
        );
        assert_eq!(error.to_string(), expected);
    }
    let diagonal = BlockLayout::from_row_fn("mine", shape, |_, row| vec![(row, full())]).unwrap();
    assert_eq!(diagonal, Pattern::chunked(16).layout(1, 64, 16).unwrap());
}

#[test]
fn callbacks_do_not_serialize_but_their_layouts_do() {
    let pattern = Pattern::from_fn("mine", |_, i, j| i == j);
    assert!(serde_json::to_string(&pattern).is_err());
    let layout = pattern.layout(1, 20, 8).unwrap();
    let text = serde_json::to_string(&layout).unwrap();
    assert_eq!(serde_json::from_str::<BlockLayout>(&text).unwrap(), layout);
}

/// Single changes to a valid layout: deserialization fails and says why.
#[rstest]
#[case("/version", json!(2), "version must be 1")]
#[case("/shape/block_size", json!(12), "block_size must be")]
#[case("/shape/heads", json!(3), "head_patterns must have one entry per head")]
#[case("/shape/seq_q", json!(400), "run_offsets must rise")]
#[case("/batch", json!(0), "head_patterns must have one entry per head")]
#[case("/head_patterns/1", json!(5), "head_patterns must be below the 1 patterns, got 5")]
#[case("/patterns/0/run_offsets/1", json!(9), "run_offsets must rise")]
#[case("/patterns/0/runs/1/start", json!(40), "must stay below the 5 key blocks")]
#[case("/patterns/0/runs/1/count", json!(0), "with positive stride and count")]
#[case("/patterns/0/runs/1/count", json!(4_000_000_000u32), "must stay below the 5 key blocks")]
#[case("/patterns/0/runs/2/start", json!(0), "key block 0 occurs twice")]
#[case("/patterns/0/runs/1/mask", json!(17), "mask must be below")]
#[case("/patterns/0/runs/8/mask", json!(0), "allows pairs beyond seq_q or seq_kv")]
#[case("/masks/0", json!(0), "mask 1 must be neither empty nor full")]
#[case("/masks/0", json!(u64::MAX), "mask 1 must be neither empty nor full")]
fn corrupt_data(#[case] place: &str, #[case] value: Value, #[case] message: &str) {
    let layout = Pattern::causal().layout(2, 37, 8).unwrap();
    let mut data = serde_json::to_value(&layout).unwrap();
    *data.pointer_mut(place).expect(place) = value;
    let error = serde_json::from_value::<BlockLayout>(data)
        .unwrap_err()
        .to_string();
    assert!(error.contains(message), "{place}: {error}");
}
