//! Launch plans of random layouts and tilings: every allowed pair is in the plan exactly once, and no other pair is.

use std::collections::HashMap;

use blocksparse::plan::{LAST_VISIT, MASKED_STEP, Mainloop, NO_VISIT, TilePlan, Tiling};
use blocksparse::{BlockLayout, BlockMask, FULL, LayoutShape};
use proptest::prelude::*;

use crate::{patterns, random_patterns};

const SIDES: [usize; 6] = [8, 16, 32, 64, 128, 256];

/// Options of a tiling besides its sizes.
const KINDS: [fn(&mut Tiling); 7] = [
    |_| (),
    |tiling| tiling.places = true,
    |tiling| tiling.clustered = true,
    |tiling| tiling.visits = true,
    |tiling| (tiling.visits, tiling.clustered) = (true, true),
    |tiling| (tiling.visits, tiling.coarse) = (true, true),
    |tiling| tiling.coarse = true,
];

fn tiling() -> impl Strategy<Value = Tiling> {
    let side = || prop::sample::select(SIDES.to_vec());
    let mainloop = prop::sample::select(vec![Mainloop::Rows, Mainloop::Columns]);
    (
        side(),
        side(),
        mainloop,
        prop::sample::select(KINDS.to_vec()),
    )
        .prop_map(|(rows, cols, mainloop, set)| {
            let mut tiling = Tiling::new(mainloop, rows, cols);
            set(&mut tiling);
            tiling
        })
}

/// Coarse tilings for the blocks of a random layout.
fn coarse_tiling() -> impl Strategy<Value = (Tiling, usize)> {
    (tiling(), prop::sample::select(vec![8, 16, 32, 64]))
        .prop_map(|(tiling, b)| {
            let coarse = Tiling {
                places: false,
                clustered: false,
                coarse: true,
                ..tiling
            };
            (coarse, b)
        })
        .prop_filter("tiles fit blocks", |&(tiling, b)| fits(tiling, b))
}

/// Returns whether the tiling can cut blocks of size `b`.
fn fits(tiling: Tiling, b: usize) -> bool {
    let Tiling { rows, cols, .. } = tiling;
    let multiple = |side: usize| side.is_multiple_of(b) || b.is_multiple_of(side);
    multiple(rows)
        && multiple(cols)
        && (!tiling.places || rows <= b)
        && (!tiling.clustered || (rows >= b && cols >= b))
        && (!tiling.coarse || tiling.may_be_coarse(b))
}

/// The tiles of one head of a plan, read like a kernel does.
struct Head<'a> {
    plan: &'a TilePlan,
    /// Index of the head among those of all batch entries.
    index: usize,
    block_size: usize,
}

struct Entry {
    at: usize,
    mask: usize,
    /// Place or visit, if entries have one.
    extra: u32,
    /// The words of a coarse entry's bits.
    bits: Vec<u32>,
}

impl Head<'_> {
    fn first_record(&self) -> usize {
        self.plan.words[self.plan.sections.heads + self.index] as usize
    }

    /// Returns the first entry, the steps and the masked steps of a tile.
    fn record(&self, tile: usize) -> [usize; 3] {
        let at = self.plan.sections.tiles + (self.first_record() + tile) * 3;
        [0, 1, 2].map(|field| self.plan.words[at + field] as usize)
    }

    /// Returns the tiles in launch order, with their records.
    fn order(&self) -> Vec<(usize, [usize; 3])> {
        let at = self.plan.sections.order + self.first_record() * 4;
        let ranked = self.plan.words[at..][..self.plan.tiles * 4].chunks(4);
        ranked
            .map(|r| (r[0] as usize, [1, 2, 3].map(|field| r[field] as usize)))
            .collect()
    }

    /// Returns the entries of each step of a tile.
    fn steps(&self, tile: usize) -> Vec<Vec<Entry>> {
        let [first, steps, _] = self.record(tile);
        let per_step = self.plan.tiling.cols / self.plan.group;
        let (width, before) = (self.plan.tiling.entry_words(), self.plan.tiling.bits_at());
        let entry = |k: usize| {
            let words = &self.plan.words[self.plan.sections.entries + (first + k) * width..];
            Entry {
                at: words[0] as usize,
                mask: words[1] as usize,
                extra: if before == 3 { words[2] } else { 0 },
                bits: words[before..width].to_vec(),
            }
        };
        let of_step = |step: usize| (0..per_step).map(|k| entry(step * per_step + k)).collect();
        (0..steps).map(of_step).collect()
    }

    /// Returns the position of a tile's row: of a query, or of a key in a loop over columns.
    fn position(&self, tile: usize, row: usize) -> usize {
        let Tiling {
            rows, clustered, ..
        } = self.plan.tiling;
        if !clustered {
            return tile * rows + row;
        }
        let b = self.block_size;
        let blocks = self.plan.sections.rows + (self.first_record() + tile) * (rows / b);
        self.plan.words[blocks + row / b] as usize * b + row % b
    }

    fn bit(&self, mask: usize, row: usize, col: usize) -> bool {
        let at = (mask * self.plan.tiling.rows + row) * self.plan.mask_words + col / 32;
        self.plan.words[self.plan.sections.masks + at] >> (col % 32) & 1 == 1
    }

    /// Returns whether an entry keeps the block at a row and a column of a tile.
    fn keeps(&self, entry: &Entry, row: usize, col: usize) -> bool {
        let b = self.block_size;
        let bit = row / b * (self.plan.group / b).max(1) + col / b;
        !self.plan.tiling.coarse || entry.bits[bit / 32] >> (bit % 32) & 1 == 1
    }

    /// Returns the pairs (query, key) of an entry of a tile.
    fn pairs(&self, tile: usize, entry: &Entry) -> Vec<(usize, usize)> {
        let mut pairs = Vec::new();
        for row in 0..self.plan.tiling.rows {
            let allowed =
                |&col: &usize| self.bit(entry.mask, row, col) && self.keeps(entry, row, col);
            for col in (0..self.plan.group).filter(allowed) {
                let (own, other) = (self.position(tile, row), entry.at * self.plan.group + col);
                pairs.push(self.plan.tiling.mainloop.sides(own, other).into());
            }
        }
        pairs
    }

    fn is_full(&self, mask: usize) -> bool {
        mask == FULL as usize
    }
}

/// Returns the places of a head's kept blocks among the stored weights, by block row and column.
fn places(layout: &BlockLayout, batch: usize, head: usize) -> HashMap<(usize, usize), u32> {
    let pattern = layout.pattern_of(batch, head);
    let rows = (0..layout.q_blocks()).flat_map(|row| {
        let entries = layout.row(pattern, row).into_iter();
        entries.map(move |entry| (row, entry.block as usize))
    });
    rows.zip(0..).collect()
}

/// Checks that every pair of the layout is in its head's plan exactly once, with the place of its block, and in a masked step unless all pairs of
/// its entry are allowed.
fn check_pairs(layout: &BlockLayout, plan: &TilePlan) -> Result<(), TestCaseError> {
    let b = layout.block_size();
    let mut steps = 0;
    for batch in 0..layout.batch().unwrap_or(1) {
        let mut first_place = 0;
        for head in 0..layout.heads() {
            let index = batch * layout.heads() + head;
            let tiles = Head {
                plan,
                index,
                block_size: b,
            };
            let stored = plan.words[plan.sections.places + index] as usize;
            prop_assert_eq!(stored, first_place);
            first_place += layout.pattern_blocks(layout.pattern_of(batch, head));
            let expected_places = places(layout, batch, head);

            let mut records: Vec<_> = (0..plan.tiles).map(|tile| tiles.record(tile)).collect();
            records.retain(|record| record[1] > 0);
            records.sort_unstable();
            let per_step = plan.tiling.cols / plan.group;
            let follows = |pair: &[[usize; 3]]| pair[1][0] == pair[0][0] + pair[0][1] * per_step;
            prop_assert!(records.windows(2).all(follows), "steps of a pattern");
            let own: usize = records.iter().map(|record| record[1]).sum();
            let pattern = layout.pattern_of(batch, head);
            prop_assert_eq!(plan.pattern_steps()[pattern], own);

            let mut order = tiles.order();
            for &(tile, record) in &order {
                prop_assert_eq!(record, tiles.record(tile));
            }
            if !plan.tiling.visits {
                prop_assert!(order.is_sorted_by(|a, b| a.1[1] >= b.1[1]), "longest first");
            }
            order.sort_unstable();
            prop_assert!(order.iter().map(|ranked| ranked.0).eq(0..plan.tiles));

            let mut left = layout.to_dense_batch(batch, head);
            for tile in 0..plan.tiles {
                let masked_steps = tiles.record(tile)[2];
                for (at, step) in tiles.steps(tile).into_iter().enumerate() {
                    steps += 1;
                    let masked = step.iter().any(|entry| !tiles.is_full(entry.mask));
                    match plan.tiling.visits {
                        true => prop_assert_eq!(step[0].extra & MASKED_STEP != 0, masked),
                        false => prop_assert!(at < masked_steps || !masked, "tile {}", tile),
                    }
                    for entry in &step {
                        for (query, key) in tiles.pairs(tile, entry) {
                            let pair = left.get_mut(query).and_then(|row| row.get_mut(key));
                            let allowed = pair.map(std::mem::take);
                            prop_assert_eq!(allowed, Some(true), "({}, {})", query, key);
                            if plan.tiling.places {
                                let place = expected_places.get(&(query / b, key / b));
                                prop_assert_eq!(place, Some(&entry.extra));
                            }
                        }
                    }
                }
            }
            let missing = left.iter().flatten().filter(|&&pair| pair).count();
            prop_assert_eq!(missing, 0, "pairs are missing");
        }
    }
    prop_assert_eq!(plan.steps, steps);
    let area = (plan.tiling.rows * plan.tiling.cols) as u64;
    prop_assert_eq!(plan.computed_pairs(), steps * area);
    Ok(())
}

/// Checks that, in the common launch order of all heads, each group of columns is visited for the first, second, … time, and that the last visit is
/// marked.
fn check_visits(layout: &BlockLayout, plan: &TilePlan) -> Result<(), TestCaseError> {
    let mut shared = None;
    for index in 0..layout.batch().unwrap_or(1) * layout.heads() {
        let tiles = Head {
            plan,
            index,
            block_size: layout.block_size(),
        };
        let order: Vec<usize> = tiles.order().iter().map(|ranked| ranked.0).collect();
        prop_assert_eq!(shared.get_or_insert_with(|| order.clone()), &order);
        let mut visits: HashMap<usize, (u32, bool)> = HashMap::new();
        for tile in order {
            for entry in tiles.steps(tile).into_iter().flatten() {
                let visit = entry.extra & NO_VISIT;
                if visit == NO_VISIT {
                    prop_assert!(tiles.pairs(tile, &entry).is_empty());
                    continue;
                }
                let (expected, over) = visits.entry(entry.at).or_default();
                prop_assert!(!*over, "nobody comes after the last visit");
                prop_assert_eq!(visit, *expected);
                *expected += 1;
                *over = entry.extra & LAST_VISIT != 0;
            }
        }
        prop_assert!(visits.values().all(|&(_, over)| over));
        if plan.complete {
            let [_, others] = plan.tiling.mainloop.lengths(layout);
            prop_assert_eq!(visits.len(), others.div_ceil(plan.group));
        }
    }
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn plans_have_every_pair_once(
        (pattern, shape, tiling) in (random_patterns::pattern(), patterns::shape(), tiling())
            .prop_filter("tiles fit blocks", |(_, shape, tiling)| fits(*tiling, shape.block_size)),
        lengths in prop::option::of(prop::collection::vec(0usize..150, 1..3)),
    ) {
        let mut layout = BlockLayout::new(&pattern, shape).unwrap();
        if let Some(lengths) = lengths {
            let lengths: Vec<usize> = lengths.iter().map(|&n| n.min(shape.seq_kv)).collect();
            layout = layout.with_key_padding(&lengths).unwrap();
        }
        let plan = TilePlan::new(&layout, tiling);
        check_pairs(&layout, &plan)?;
        if tiling.visits {
            check_visits(&layout, &plan)?;
        }
    }

    /// Scattered blocks, some of them masked, in different heads.
    #[test]
    fn coarse_plans_have_every_pair_once(
        (tiling, block_size) in coarse_tiling(),
        [seq_q, seq_kv] in [1usize..300, 1usize..300],
        percent in 0u64..=100,
        masked in 0u64..=100,
        seed in any::<u64>(),
    ) {
        let shape = LayoutShape { heads: 2, seq_q, seq_kv, block_size };
        let mut state = seed | 1;
        let mut below = move |bound: u64| {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            state % bound
        };
        let layout = BlockLayout::from_block_fn("random blocks", shape, |_, _, _| {
            if below(100) >= percent {
                return None;
            }
            // Few kinds of masks, like in real layouts.
            let stride = 2 + below(3) as usize;
            let whole = below(100) >= masked;
            Some(BlockMask::from_fn(block_size, |r, c| {
                whole || (r + c) % stride != 0
            }))
        }).unwrap();
        let plan = TilePlan::new(&layout, tiling);
        check_pairs(&layout, &plan)?;
        if tiling.visits {
            check_visits(&layout, &plan)?;
        }
    }
}
