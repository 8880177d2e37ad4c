//! Plans against the layouts that they were made of.

use std::collections::HashMap;

use super::tiling::EMPTY;
use super::*;
use crate::{BlockMask, FULL, Pattern};

/// The pairs of a plan are exactly those of the layout, once each.
#[rstest::rstest]
#[case(Pattern::fixed(12, 3), 8, 64, 32)]
#[case(Pattern::causal(), 128, 64, 32)]
#[case(Pattern::causal(), 16, 16, 64)]
#[case(Pattern::merged_strided(9), 32, 64, 64)]
#[case(Pattern::fixed_heads(16, 4, 2), 16, 8, 8)]
fn plans_allow_what_the_layout_allows(
    #[case] pattern: Pattern,
    #[case] block: usize,
    #[case] rows: usize,
    #[case] cols: usize,
    #[values(Mainloop::Rows, Mainloop::Columns)] mainloop: Mainloop,
    #[values(false, true)] places: bool,
    #[values(false, true)] clustered: bool,
) {
    if (places && rows > block) || (clustered && (rows < block || cols < block)) {
        return;
    }
    let layout = pattern.layout(4, 187, block).unwrap();
    let tiling = Tiling {
        places,
        clustered,
        ..Tiling::new(mainloop, rows, cols)
    };
    let plan = TilePlan::new(&layout, tiling);
    let Sections {
        heads,
        order,
        tiles,
        entries,
        masks,
        rows: tile_rows,
        ..
    } = plan.sections;
    let width = 2 + usize::from(places);
    let per_step = cols / plan.group;
    for head in 0..4 {
        let dense = layout.to_dense(head);
        let mut seen = vec![vec![0; 187]; 187];
        let first_tile = plan.words[heads + head] as usize;
        let mut ranks: Vec<u32> = plan.words[order + first_tile * 4..][..plan.tiles * 4]
            .chunks(4)
            .map(|ranked| {
                let record = tiles + (first_tile + ranked[0] as usize) * 3;
                assert_eq!(ranked[1..], plan.words[record..record + 3]);
                ranked[0]
            })
            .collect();
        ranks.sort_unstable();
        assert_eq!(ranks, (0..plan.tiles as u32).collect::<Vec<_>>());
        for tile in 0..plan.tiles {
            let record = tiles + (first_tile + tile) * 3;
            let [first, steps, masked] = [0, 1, 2].map(|field| plan.words[record + field] as usize);
            for entry in 0..steps * per_step {
                let at = entries + (first + entry) * width;
                let (position, mask) = (plan.words[at] as usize, plan.words[at + 1] as usize);
                if entry / per_step >= masked {
                    assert_eq!(mask, 0, "a masked entry after the masked steps");
                }
                for row in 0..rows {
                    let mut place = tile * rows + row;
                    if clustered {
                        let at = tile_rows + (first_tile + tile) * (rows / block) + row / block;
                        place = plan.words[at] as usize * block + row % block;
                    }
                    for col in 0..plan.group {
                        let word = masks + (mask * rows + row) * plan.mask_words + col / 32;
                        if plan.words[word] >> (col % 32) & 1 == 1 {
                            let (r, c) = (place, position * plan.group + col);
                            let (i, j) = match mainloop {
                                Mainloop::Rows => (r, c),
                                Mainloop::Columns => (c, r),
                            };
                            seen[i][j] += 1;
                        }
                    }
                }
            }
        }
        for i in 0..187 {
            for j in 0..187 {
                assert_eq!(
                    seen[i][j],
                    u32::from(dense[i][j]),
                    "head {head}, ({i}, {j})"
                );
            }
        }
    }
}

/// The steps of a pattern's tiles follow each other, so that the number of a step says whose it is.
#[rstest::rstest]
#[case(Pattern::causal(), 16, 64, 1)]
#[case(Pattern::fixed_heads(16, 4, 2), 16, 64, 2)]
#[case(Pattern::local(30), 128, 64, 1)]
#[case(Pattern::strided(7), 16, 128, 1)]
fn steps_of_a_pattern_follow_each_other(
    #[case] pattern: Pattern,
    #[case] block: usize,
    #[case] cols: usize,
    #[case] patterns: usize,
    #[values(false, true)] clustered: bool,
) {
    if clustered && cols < block {
        return;
    }
    let layout = pattern.layout(4, 300, block).unwrap();
    assert_eq!(layout.num_patterns(), patterns);
    let tiling = Tiling {
        mainloop: Mainloop::Rows,
        ..tiling(128, cols, clustered)
    };
    let plan = TilePlan::new(&layout, tiling);
    let per_step = cols / plan.group;
    let steps = plan.pattern_steps();
    assert_eq!(steps.len(), layout.num_patterns());
    let of_heads = (0..4).map(|head| steps[layout.pattern_of(0, head)] as u64);
    assert_eq!(of_heads.sum::<u64>(), plan.steps);
    for (pattern, &steps) in steps.iter().enumerate() {
        let records = &plan.words[plan.sections.tiles + pattern * plan.tiles * 3..];
        let records: Vec<&[u32]> = records.chunks(3).take(plan.tiles).collect();
        let first = records[0][0] as usize;
        for step in 0..steps {
            let entry = first + step * per_step;
            let has = |record: &&&[u32]| {
                let begin = record[0] as usize;
                (begin..begin + record[1] as usize * per_step).contains(&entry)
            };
            assert_eq!(records.iter().filter(has).count(), 1, "step {step}");
        }
    }
}

fn tiling(rows: usize, cols: usize, clustered: bool) -> Tiling {
    Tiling {
        clustered,
        ..Tiling::new(Mainloop::Columns, rows, cols)
    }
}

/// In launch order, tiles count the visits of each group of columns without a gap, and the last one says so, whatever the
/// pattern.
#[rstest::rstest]
#[case(Pattern::causal(), 16, 64)]
#[case(Pattern::streaming(40, 3), 8, 128)]
#[case(Pattern::fixed_heads(16, 4, 2), 16, 64)]
#[case(Pattern::local(30), 128, 64)]
fn visits_count_in_launch_order(
    #[case] pattern: Pattern,
    #[case] block: usize,
    #[case] cols: usize,
    #[values(false, true)] clustered: bool,
) {
    if clustered && cols < block {
        return;
    }
    let layout = pattern.layout(4, 700, block).unwrap();
    let tiling = Tiling {
        visits: true,
        clustered,
        ..Tiling::new(Mainloop::Columns, 128, cols)
    };
    let plan = TilePlan::new(&layout, tiling);
    let sections = plan.sections;
    let per_step = cols / plan.group;
    let order = |head: usize| {
        let first = plan.words[sections.heads + head] as usize;
        let ranked = plan.words[sections.order + first * 4..][..plan.tiles * 4].chunks(4);
        ranked.map(|ranked| ranked[0]).collect::<Vec<_>>()
    };
    for head in 0..4 {
        assert_eq!(order(head), order(0), "heads may share a tile of keys");
        let first = plan.words[sections.heads + head] as usize;
        let mut visits: HashMap<u32, (u32, bool)> = HashMap::new();
        let mut pairs = 0;
        for tile in order(head) {
            let record = sections.tiles + (first + tile as usize) * 3;
            let steps = plan.words[record + 1] as usize;
            for j in 0..steps {
                let at = plan.words[record] as usize + j * per_step;
                let words = &plan.words[sections.entries + at * 3..][..per_step * 3];
                let masked = words.chunks(3).any(|entry| entry[1] != FULL);
                assert_eq!(words[2] & MASKED_STEP != 0, masked);
                for entry in words.chunks(3) {
                    if entry[2] & NO_VISIT == NO_VISIT {
                        assert_eq!(entry[1], EMPTY);
                        continue;
                    }
                    let (visit, over) = visits.entry(entry[0]).or_default();
                    assert!(!*over, "nobody comes after the last visit");
                    assert_eq!(entry[2] & NO_VISIT, *visit);
                    *visit += 1;
                    *over = entry[2] & LAST_VISIT != 0;
                    let rows = 128 * plan.mask_words;
                    let mask = &plan.words[sections.masks + entry[1] as usize * rows..][..rows];
                    pairs += mask.iter().map(|word| word.count_ones()).sum::<u32>();
                }
            }
        }
        assert!(visits.values().all(|&(_, over)| over), "head {head}");
        if plan.complete {
            let groups = 0..700u32.div_ceil(plan.group as u32);
            assert!(groups.into_iter().all(|group| visits.contains_key(&group)));
        }
        let dense = layout.to_dense(head);
        let kept: usize = dense.iter().flatten().filter(|&&kept| kept).count();
        assert_eq!(pairs as usize, kept, "head {head}");
    }
}

/// A plan is complete if each query sees a key in each head, and no tile has sums of its own.
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

/// A tile that nearly all queries see adds to sums of its own; then the others begin to count again, and all go the same way. Of long windows none does.
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

/// How far tiles that share queries are from each other in launch order, and that short ones after long ones are noticed.
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

/// How a tile goes: from its last queries to its first, or the other way.
#[derive(Clone, Copy, PartialEq)]
enum Turned {
    None,
    /// Those of more than so many steps.
    Above(usize),
}

/// Windows go from their last queries on; a tile of sinks is long and keeps ahead from the first ones on, with all others if these are long, too.
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
