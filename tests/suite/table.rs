//! The table of cases itself: each shard of it that runs on a slow device meets every variant.

use std::collections::BTreeSet;

use burn_blocksparse_tests::attention::cases::{Case, cases, shard_of};
use burn_blocksparse_tests::attention::options::{REACHES, SHARED};
use burn_blocksparse_tests::shard::parse_shard;

/// Returns the variants that a case covers, by its index and its properties.
fn variants(index: usize, case: &Case) -> Vec<String> {
    let mut found = vec![
        format!("a bias shared as {:?}", SHARED[index % SHARED.len()]),
        format!("a reach of {}", REACHES[index % REACHES.len()]),
        format!("a table of distances, shared: {}", index.is_multiple_of(2)),
        format!("a third of the cases: {}", index % 3),
        format!("a quarter of the cases: {}", index % 4),
    ];
    let layout = case.layout();
    if case.softcap.is_some() {
        found.push("a softcap".into());
    }
    if layout.parts().is_some() {
        found.push("tiled by residue class".into());
    }
    let rows = (0..case.heads).flat_map(|head| layout.to_dense(head));
    if rows.into_iter().any(|row| !row.contains(&true)) {
        found.push("rows without keys".into());
    }
    if case.heads > case.kv_heads {
        found.push("grouped heads".into());
    }
    if case.seq_q != case.seq_kv {
        found.push("other keys than queries".into());
    }
    if case.head_dim >= 64 {
        found.push("wide heads".into());
    }
    if !case.seq_q.is_multiple_of(case.block_size) {
        found.push("a ragged end".into());
    }
    found
}

/// Each part of `tests/vulkan.txt` runs one of seven shards of the table.
#[test]
fn every_part_meets_every_variant() {
    let all: BTreeSet<String> = (cases().iter().enumerate())
        .flat_map(|(index, case)| variants(index, case))
        .collect();
    assert_eq!(all.len(), 6 + 5 + 2 + 3 + 4 + 7, "{all:?}");
    let missed: Vec<String> = (0..7)
        .flat_map(|part| {
            let cases = shard_of(part, 7);
            let met = cases
                .iter()
                .flat_map(|(index, case)| variants(*index, case));
            let met: BTreeSet<String> = met.collect();
            let missed = all.difference(&met).map(|what| format!("{part}/7: {what}"));
            missed.collect::<Vec<_>>()
        })
        .collect();
    assert!(missed.is_empty(), "{missed:#?}");
}

#[test]
fn parts_are_the_whole_table() {
    let mut numbers: Vec<usize> = (0..7)
        .flat_map(|part| shard_of(part, 7))
        .map(|(index, _)| index)
        .collect();
    numbers.sort();
    assert_eq!(numbers, (0..cases().len()).collect::<Vec<_>>());
}

#[test]
fn parts_are_read() {
    assert_eq!(parse_shard("0/7"), Ok((0, 7)));
    assert_eq!(parse_shard("6/7"), Ok((6, 7)));
    assert_eq!(parse_shard("7/7"), Ok((0, 7)));
    for text in ["", "3", "8/7", "0/0", "-1/7", "1/7/2"] {
        let message = format!("BURN_SPARSE_SHARD must be K/N with K at most N, got {text}");
        assert_eq!(parse_shard(text), Err(message));
    }
}
