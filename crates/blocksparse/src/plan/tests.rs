//! Checks plans against their layouts.

use std::collections::HashMap;

use super::*;
use crate::{BlockMask, Pattern};

fn tiling(rows: usize, cols: usize, clustered: bool) -> Tiling {
    Tiling {
        clustered,
        ..Tiling::new(Mainloop::Columns, rows, cols)
    }
}

/// A plan is complete if each query sees a key in each head and no tile has separate sums.
#[rstest::rstest]
#[case("causal", true)]
#[case("fixed:128,32", true)]
#[case("local:64/streaming:2560,64", true)]
#[case("window:256+global:0,1", false)]
fn complete_plans(#[case] pattern: &str, #[case] complete: bool) {
    let pattern: Pattern = pattern.parse().unwrap();
    let layout = pattern.layout(2, 8192, 64).unwrap();
    let tiling = Tiling {
        visits: true,
        apart: true,
        ..tiling(128, 64, false)
    };
    assert_eq!(TilePlan::new(&layout, tiling).complete, complete);
    let shape = *layout.shape();
    let layout = BlockLayout::from_block_fn("blind", shape, |head, row, _| {
        ((head, row) != (1, 127)).then(|| BlockMask::corner(64, 64, 64))
    });
    let plan = TilePlan::new(&layout.unwrap(), tiling);
    assert!(!plan.complete, "the second head's last queries see nothing");
}

/// A tile that nearly all queries see adds to separate sums. The other tiles restart their counts and all run the same way. Long windows have no such tile.
#[rstest::rstest]
#[case("window:256+global:0,1", 8192, 1)]
#[case("window:256+global:0,4000", 8192, 2)]
#[case("streaming:256,4/local:64", 8192, 1)]
#[case("streaming:2560,64", 16_384, 0)]
#[case("causal", 4096, 0)]
fn long_tiles_count_visits_apart(#[case] pattern: &str, #[case] seq: usize, #[case] long: usize) {
    let pattern: Pattern = pattern.parse().unwrap();
    let layout = pattern.layout(2, seq, 64).unwrap();
    let tiling = Tiling {
        visits: true,
        apart: true,
        ..tiling(128, 64, false)
    };
    let plan = TilePlan::new(&layout, tiling);
    assert_eq!(plan.apart, long);
    let sections = plan.sections;
    for pattern in 0..layout.num_patterns() {
        let mut visits: HashMap<u32, u32> = HashMap::new();
        for rank in 0..plan.tiles {
            if rank == long {
                visits.clear();
            }
            let ranked = &plan.words[sections.order + (pattern * plan.tiles + rank) * 4..][..4];
            let entries = &plan.words[sections.entries + ranked[1] as usize * 3..];
            let entries = entries[..ranked[2] as usize * 3].chunks(3);
            let places: Vec<u32> = entries.clone().map(|entry| entry[0]).collect();
            assert!(
                long == 0 || places.is_sorted_by(|a, b| a >= b),
                "rank {rank}"
            );
            for entry in entries {
                let visit = visits.entry(entry[0]).or_default();
                assert_eq!(entry[2] & NO_VISIT, *visit, "rank {rank}");
                *visit += 1;
            }
        }
    }
}

/// Checks the distance in launch order between tiles that share queries, and that short tiles after long ones are detected.
#[rstest::rstest]
#[case("causal", 1)]
#[case("local:1024", 1)]
#[case("documents:0,1024,2048,3072&causal", 4)]
#[case("documents:0,128,256,384,512,640,768,896&causal", 1)]
#[case("documents:0,1000,2500&causal", 3)]
#[case("streaming:256,4", 0)]
#[case("streaming:2560,64", 1)]
#[case("window:256+global:0,1", 0)]
#[case("fixed:128,32", 0)]
fn tiles_that_share_queries(#[case] pattern: &str, #[case] between: usize) {
    let pattern: Pattern = pattern.parse().unwrap();
    let layout = pattern.layout(2, 4096, 32).unwrap();
    for apart in [false, true] {
        let tiling = Tiling {
            clustered: true,
            visits: true,
            apart,
            ..tiling(128, 64, false)
        };
        assert_eq!(TilePlan::new(&layout, tiling).between, between);
    }
}

/// Direction of a tile's mainloop. The default is from its last queries to its first.
#[derive(Clone, Copy, PartialEq)]
enum Turned {
    None,
    /// Tiles with more than this many steps run from the first to the last.
    Above(usize),
}

/// Windows start at their last queries. A tile of sinks is long, so it starts at the first queries and stays ahead; all others do so too if they are long.
#[rstest::rstest]
#[case(Pattern::local(256), 8192, Turned::None)]
#[case(Pattern::causal(), 8192, Turned::None)]
#[case(Pattern::streaming(256, 64), 8192, Turned::Above(7))]
#[case(Pattern::streaming(2560, 64), 16_384, Turned::Above(0))]
fn long_tiles_turn_mainloops(#[case] pattern: Pattern, #[case] seq: usize, #[case] turned: Turned) {
    let layout = pattern.layout(1, seq, 64).unwrap();
    let tiling = Tiling {
        visits: true,
        apart: false,
        coarse: false,
        ..tiling(128, 64, false)
    };
    let plan = TilePlan::new(&layout, tiling);
    let sections = plan.sections;
    let mut longest = 0;
    for tile in 0..plan.tiles {
        let record = &plan.words[sections.tiles + tile * 3..][..3];
        let entries = &plan.words[sections.entries + record[0] as usize * 3..];
        let places = entries[..record[1] as usize * 3].chunks(3);
        let places: Vec<u32> = places.map(|entry| entry[0]).collect();
        let is_turned = match turned {
            Turned::None => false,
            Turned::Above(steps) => places.len() > steps,
        };
        let sorted = match is_turned {
            true => places.is_sorted(),
            false => places.is_sorted_by(|a, b| a >= b),
        };
        assert!(sorted, "tile {tile}: {places:?}");
        longest = longest.max(places.len());
    }
    if turned == Turned::Above(7) {
        assert_eq!(longest, seq / 64);
    }
}
