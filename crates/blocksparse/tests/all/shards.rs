//! Shards of a sequence, against the dense mask.

use std::collections::BTreeSet;

use blocksparse::{BlockLayout, BlockMask, LayoutShape, Pattern, ShardPlan};
use rstest::rstest;

fn patterns() -> Vec<Pattern> {
    vec![
        Pattern::local(40),
        Pattern::streaming(40, 10),
        Pattern::fixed(32, 8),
        Pattern::fixed_heads(32, 8, 4),
        Pattern::merged_strided(24),
        Pattern::per_head([Pattern::local(30), Pattern::strided(16)]),
        Pattern::longformer(20, 1, [0, 1, 100]),
        Pattern::documents([0, 50, 51, 130, 200]).and_causal(),
        Pattern::packed([0, 90, 170], Pattern::fixed(32, 8)),
        Pattern::bigbird(16, 16, 2, 7),
        Pattern::causal(),
        Pattern::dense(),
    ]
}

/// Returns the whole-sequence block of each block of a device's keys, from the plan's lists alone.
fn blocks_of_keys(plan: &ShardPlan, device: usize, kv_head: usize) -> Vec<usize> {
    let b = plan.layout().block_size();
    let own = plan.positions(device).into_iter();
    let own = own.flat_map(|positions| positions.start / b..positions.end / b);
    let mut received: Vec<usize> = (0..plan.devices())
        .flat_map(|from| plan.crossing(from, device, kv_head))
        .flatten()
        .collect();
    received.sort_unstable();
    own.chain(received).collect()
}

/// Checks that every allowed pair is computed once, by one device that has its key; that exactly the needed keys are sent; and that bytes match.
fn assert_is_the_layout(plan: &ShardPlan) {
    let layout = plan.layout();
    let (b, n) = (layout.block_size(), layout.seq_q());
    let group = layout.heads() / plan.kv_heads();
    let mut pairs = vec![0u64; plan.devices()];
    let mut received = vec![0; plan.devices()];
    for head in 0..layout.heads() {
        let dense = layout.to_dense(head);
        let mut computed = vec![vec![0; n]; n];
        for (device, pairs) in pairs.iter_mut().enumerate() {
            let local = plan.local_layout(device);
            let rows: Vec<usize> = plan.positions(device).into_iter().flatten().collect();
            let keys = blocks_of_keys(plan, device, head / group);
            assert_eq!(local.seq_q(), rows.len());
            for (row, allowed) in local.to_dense(head).iter().enumerate() {
                for (place, _) in allowed.iter().enumerate().filter(|(_, on)| **on) {
                    computed[rows[row]][keys[place / b] * b + place % b] += 1;
                    *pairs += 1;
                }
            }
        }
        for (i, row) in dense.iter().enumerate() {
            for (j, &allowed) in row.iter().enumerate() {
                let what = format!("{}, head {head}, pair ({i}, {j})", layout.name());
                assert_eq!(computed[i][j], i32::from(allowed), "{what}");
            }
        }
    }
    // The keys that the dense masks need.
    for kv_head in 0..plan.kv_heads() {
        let masks: Vec<_> = (0..group)
            .map(|head| layout.to_dense(kv_head * group + head))
            .collect();
        for (device, received) in received.iter_mut().enumerate() {
            let rows: BTreeSet<usize> = plan.positions(device).into_iter().flatten().collect();
            let needed: BTreeSet<usize> = (0..n / b)
                .filter(|block| !rows.contains(&(block * b)))
                .filter(|block| {
                    let keys = || block * b..(block + 1) * b;
                    (masks.iter())
                        .any(|mask| rows.iter().any(|&row| keys().any(|key| mask[row][key])))
                })
                .collect();
            let own = rows.len() / b;
            let got = blocks_of_keys(plan, device, kv_head).split_off(own);
            assert!(
                got.iter().eq(&needed),
                "{}: {got:?}, {needed:?}",
                layout.name()
            );
            *received += needed.len() * b;
        }
    }
    for device in 0..plan.devices() {
        assert_eq!(plan.pairs(device), pairs[device]);
        assert_eq!(plan.keys_received(device), received[device]);
        // A key and a value of 10 elements of 2 bytes.
        assert_eq!(plan.bytes(device, 10, 2), received[device] as u64 * 40);
        let sent = (0..plan.devices()).flat_map(|to| {
            let of_head = move |head| plan.crossing(device, to, head);
            (0..plan.kv_heads()).flat_map(of_head)
        });
        assert_eq!(plan.keys_sent(device), b * sent.flatten().count());
    }
    let all: u64 = (0..plan.devices()).map(|device| plan.pairs(device)).sum();
    assert_eq!(all, layout.allowed_pairs());
}

#[rstest]
fn every_pair_is_computed_once(
    #[values(2, 3, 5)] devices: usize,
    #[values((8, 4), (16, 2), (16, 1))] (block_size, kv_heads): (usize, usize),
) {
    for pattern in patterns() {
        let layout = pattern.layout(4, 256, block_size).unwrap();
        assert_is_the_layout(&ShardPlan::new(&layout, kv_heads, devices).unwrap());
        for pieces in [1, 3] {
            let plan = ShardPlan::with_pieces(&layout, kv_heads, devices, pieces).unwrap();
            assert_eq!(plan.pieces(), pieces);
            assert_is_the_layout(&plan);
        }
    }
}

#[test]
fn layouts_of_no_pattern_have_plans() {
    let shape = LayoutShape::square(3, 120, 8);
    let mut state = 1u64;
    let layout = BlockLayout::from_block_fn("drawn", shape, |_, _, _| {
        state = state.wrapping_mul(6364136223846793005).wrapping_add(99);
        (state >> 60 == 0).then(|| BlockMask::from_fn(8, |row, column| (row ^ column) & 3 != 1))
    })
    .unwrap();
    for devices in [2, 3, 15] {
        assert_is_the_layout(&ShardPlan::new(&layout, 3, devices).unwrap());
        assert_is_the_layout(&ShardPlan::new(&layout, 1, devices).unwrap());
    }
}

#[test]
fn pieces_are_chosen_by_cost() {
    let pieces = |pattern: Pattern, seq, devices| {
        let layout = pattern.layout(1, seq, 32).unwrap();
        ShardPlan::new(&layout, 1, devices).unwrap().pieces()
    };
    // A window is balanced as it is, and every further piece has a window before it.
    assert_eq!(pieces(Pattern::local(512), 1 << 14, 4), 1);
    // Half of causal attention is a quarter of its pairs.
    assert_eq!(pieces(Pattern::causal(), 1 << 14, 4), 2);
    assert_eq!(pieces(Pattern::fixed(1024, 32), 1 << 18, 4), 2);
}

#[test]
fn a_million_positions() {
    let layout = Pattern::fixed(1024, 32).layout(8, 1 << 20, 32).unwrap();
    let plan = ShardPlan::new(&layout, 8, 2).unwrap();
    // Zigzag: device 0 has the first and the last quarter, and needs the summaries of the middle. Device 1 those of the first quarter.
    assert_eq!(plan.pieces(), 2);
    let summaries = |windows: usize| 8 * 32 * windows;
    assert_eq!(plan.keys_received(0), summaries(512));
    assert_eq!(plan.keys_received(1), summaries(256));
    let [a, b] = [plan.pairs(0), plan.pairs(1)];
    assert!((a as f64 / b as f64 - 1.0).abs() < 1e-4, "{a} and {b}");
    let local = plan.local_layout(0);
    assert_eq!(local.seq_q(), 1 << 19);
    assert_eq!(local.seq_kv(), (1 << 19) + 32 * 512);
    assert_eq!(local.allowed_pairs(), a);
    assert!(local.host_bytes() < 8 << 20, "{}", local.host_bytes());
    let text = plan.to_string();
    assert!(text.contains("2 pieces per device (zigzag)"), "{text}");
    assert!(!text.contains("reaches everything"), "{text}");

    // The natural layout of a residue pattern has strided runs, which are not expanded.
    let layout = Pattern::merged_strided(128).layout(8, 1 << 20, 32).unwrap();
    let plan = ShardPlan::new(&layout, 8, 2).unwrap();
    assert!(plan.reach() > 0.99 && plan.to_string().contains("reaches everything"));
}

#[test]
fn what_cannot_be_shared_is_refused() {
    let layout = Pattern::local(8).layout(4, 64, 16).unwrap();
    let padded = layout.with_key_padding(&[64, 3]).unwrap();
    let ragged = Pattern::local(8).layout(4, 60, 16).unwrap();
    let decoding = BlockLayout::new(&Pattern::causal(), LayoutShape::new(4, [16, 64], 16)).unwrap();
    refused! {
        ShardPlan::new(&layout, 4, 0) => "devices must be between 1 and 4, with 4 blocks, got 0";
        ShardPlan::new(&layout, 4, 5) => "devices must be between 1 and 4, with 4 blocks, got 5";
        ShardPlan::new(&layout, 3, 2) => "kv_heads must be a divisor of 4, the layout's heads, got 3";
        ShardPlan::with_pieces(&layout, 4, 2, 3) => "pieces must be between 1 and 2, with 4 blocks, got 3";
        ShardPlan::new(&padded, 4, 2) => "layout must be one for any batch, got a batch of 2";
        ShardPlan::new(&ragged, 4, 2) => "seq_q must be a multiple of 16, block_size, got 60";
        ShardPlan::new(&decoding, 4, 2) => "seq_q must be 64, seq_kv, got 16";
    }
}
